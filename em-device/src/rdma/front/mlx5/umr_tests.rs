//! Tests of changes of memory regions by work queue entries.

use super::sq_tests::{queue, segment, wqe};
use super::test_queue::Place;
use crate::rdma::verbs::{
    ABSENT, MemKey, Next, Operation, Pd, Region, RegionChange, Regions, Rights, SendQueue, Service,
    Translation,
};
use crate::testing::{BASE, Memory};
use dot_iommu::Access;

const FREE: u64 = 1 << 29;
/// What the driver sets when it registers: key, free, rights, PD, length, page size, start.
const ENABLE: u64 = 0x201e_20c3;

/// Pages set aside for a test's region.
const CAPACITY: usize = 1 << 20;

/// A free region of pages without a list, with index `n` and variant 7.
pub(super) fn add_region(regions: &mut Regions, n: u32) {
    assert_eq!(regions.allocate(), Ok(n));
    let region = Region {
        key: MemKey(n << 8 | 7),
        pd: Pd(1),
        rights: Rights::LOCAL_WRITE | Rights::REMOTE_READ,
        start: 0,
        len: 0,
        translation: Translation::Pages {
            shift: 12,
            pages: [].into(),
            offset: 0,
        },
        capacity: CAPACITY,
        valid: false,
    };
    regions.insert(region).unwrap();
}

/// The kernel's key for all memory, as region 2.
fn add_all_memory(regions: &mut Regions) {
    assert_eq!(regions.allocate(), Ok(2));
    let region = Region {
        key: MemKey(2 << 8),
        pd: Pd(1),
        rights: Rights::LOCAL_WRITE,
        start: 0,
        len: u64::MAX,
        translation: Translation::Identity,
        capacity: 1 << 20,
        valid: true,
    };
    regions.insert(region).unwrap();
}

/// Fields of an entry; the rest of it is zero.
#[derive(Default, Clone)]
struct Umr {
    flags: u8,
    octowords: u16,
    offset: u64,
    mask: u64,
    free: bool,
    access: u8,
    variant: u8,
    pd: u32,
    start: u64,
    len: u64,
    log_page: u8,
    list: Vec<u8>,
}

impl Umr {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.flags, 0, 0, 0];
        bytes.extend(self.octowords.to_be_bytes());
        bytes.extend((self.offset as u16).to_be_bytes());
        bytes.extend(self.mask.to_be_bytes());
        bytes.extend(((self.offset >> 16) as u32).to_be_bytes());
        bytes.extend([0; 28]);
        let mut mkc = [0; 64];
        mkc[0] = u8::from(self.free) << 6;
        mkc[2] = self.access;
        mkc[4..8].copy_from_slice(&[0xff, 0xff, 0xff, self.variant]);
        mkc[0xc..0x10].copy_from_slice(&self.pd.to_be_bytes());
        mkc[0x10..0x18].copy_from_slice(&self.start.to_be_bytes());
        mkc[0x18..0x20].copy_from_slice(&self.len.to_be_bytes());
        mkc[0x3b] = self.log_page;
        bytes.extend(mkc);
        bytes.extend(&self.list);
        wqe(0x25, 8, 1 << 8 | 7, &bytes)
    }
}

fn parse(memory: &Memory, regions: &Regions, umr: &Umr) -> Option<RegionChange> {
    let place = Place::new(memory, 0, 64 << 5);
    let mut sq = queue(&place, 5, Service::Rc);
    let bytes = umr.bytes();
    place.put(0, &bytes);
    place.record(1, bytes.len().div_ceil(64) as u32);
    let reader = memory.table.reader();
    match sq.next(&reader.pin(), regions) {
        Next::Entry(request) => match request.operation {
            Operation::Register(change) => Some(*change),
            other => panic!("{other:?}"),
        },
        Next::Bad(0) => None,
        other => panic!("{other:?}"),
    }
}

fn entries(pages: &[u64]) -> Vec<u8> {
    pages.iter().flat_map(|page| page.to_be_bytes()).collect()
}

fn setup() -> (Memory, Regions) {
    let mut regions = Regions::default();
    add_region(&mut regions, 1);
    add_all_memory(&mut regions);
    (Memory::new(), regions)
}

fn registration() -> Umr {
    Umr {
        flags: 0x80,
        octowords: 4,
        mask: ENABLE,
        access: 0x34 | 1,
        variant: 9,
        pd: 5,
        start: 0x1_0123,
        len: 0x3000,
        log_page: 12,
        list: entries(&[0x5003, 0x9003, 0x7003, 0x8003, 0, 0, 0, 0]),
        ..Umr::default()
    }
}

#[test]
fn a_registration_with_its_list_in_the_entry() {
    let (memory, mut regions) = setup();
    let change = parse(&memory, &regions, &registration()).unwrap();
    regions.change(&change).unwrap();
    let expected = Region {
        key: MemKey(1 << 8 | 9),
        pd: Pd(5),
        // The atomic right is not in the mask and local writing is taken away.
        rights: Rights::REMOTE_READ | Rights::REMOTE_WRITE,
        start: 0x1_0123,
        len: 0x3000,
        translation: Translation::Pages {
            shift: 12,
            pages: [
                0x5000, 0x9000, 0x7000, 0x8000, ABSENT, ABSENT, ABSENT, ABSENT,
            ]
            .into(),
            offset: 0x123,
        },
        capacity: CAPACITY,
        valid: true,
    };
    assert_eq!(regions.get(1), Some(&expected));
}

#[test]
fn a_list_in_memory_may_come_in_parts() {
    let (memory, mut regions) = setup();
    let at = BASE + 0x30_0fc0;
    let part = |pages: &[u64]| {
        let list = entries(pages);
        memory.write(at, &list);
        Umr {
            octowords: (list.len() / 16) as u16,
            list: segment(&(list.len() as u32, 2 << 8, at)),
            ..Umr::default()
        }
    };
    let first: Vec<u64> = (0..16).map(|n| (n << 20) | 3).collect();
    let change = parse(&memory, &regions, &part(&first)).unwrap();
    assert!(!change.valid && change.len.is_none() && change.rights.is_none());
    regions.change(&change).unwrap();
    let second = Umr {
        flags: 0x10,
        offset: 8,
        mask: ENABLE,
        len: 17 << 20,
        start: 0x4012_3456,
        log_page: 20,
        ..part(&[0xff0_0003, 0, 0, 0, 0, 0, 0, 0])
    };
    let change = parse(&memory, &regions, &second).unwrap();
    regions.change(&change).unwrap();
    let region = regions.get(1).unwrap();
    assert!(region.valid);
    let Translation::Pages {
        shift,
        pages,
        offset,
    } = &region.translation
    else {
        panic!("not paged");
    };
    assert_eq!((*shift, *offset, pages.len()), (20, 0x2_3456, 24));
    assert_eq!(pages[15..18], [0xf0_0000, 0xff0_0000, ABSENT]);
    let pieces: Vec<_> = region.pieces(0x4112_3456, 8, Access::Read).collect();
    assert_eq!(pieces, [(0xff2_3456, 8)]);
}

#[test]
fn a_revocation_and_a_local_invalidate_free_the_region() {
    let (memory, mut regions) = setup();
    let change = parse(&memory, &regions, &registration()).unwrap();
    regions.change(&change).unwrap();
    for mask in [FREE, FREE | 1 << 7] {
        let umr = Umr {
            flags: 0x80,
            mask,
            free: true,
            pd: 3,
            ..Umr::default()
        };
        let expected = RegionChange {
            key: MemKey(1 << 8 | 9),
            variant: None,
            pd: (mask != FREE).then_some(Pd(3)),
            rights: None,
            start: None,
            len: None,
            translation: None,
            valid: false,
        };
        assert_eq!(parse(&memory, &regions, &umr), Some(expected));
    }
}

#[test]
fn only_what_the_mask_names_is_changed() {
    let (memory, mut regions) = setup();
    let change = parse(&memory, &regions, &registration()).unwrap();
    regions.change(&change).unwrap();
    let only = |mask| {
        let umr = Umr {
            mask,
            list: Vec::new(),
            octowords: 0,
            access: 0x40,
            start: 0x777,
            ..registration()
        };
        parse(&memory, &regions, &umr).unwrap()
    };
    let none = only(0);
    assert!(none.valid && none.translation.is_none() && none.start.is_none());
    // An atomic right is added; the others stay.
    let all = Rights::REMOTE_READ | Rights::REMOTE_WRITE | Rights::REMOTE_ATOMIC;
    assert_eq!(only(1 << 21).rights, Some(all));
    // So is a peer's right to invalidate, whose flag stands beside the domain.
    let mut invalidated = Umr {
        mask: 1 << 8,
        ..registration()
    };
    invalidated.pd |= 1 << 24;
    let rights = parse(&memory, &regions, &invalidated).unwrap().rights;
    let all = Rights::REMOTE_READ | Rights::REMOTE_WRITE | Rights::REMOTE_INVALIDATE;
    assert_eq!(rights, Some(all));
    // A new start moves the pages' offset.
    let moved = only(1 << 6);
    assert_eq!(moved.start, Some(0x777));
    assert!(matches!(
        moved.translation,
        Some(Translation::Pages { offset: 0x777, .. })
    ));
    let mut everything = Umr {
        mask: 1,
        ..registration()
    };
    everything.pd |= 1 << 31;
    assert_eq!(
        parse(&memory, &regions, &everything).unwrap().len,
        Some(u64::MAX)
    );
}

#[test]
fn changes_that_make_no_sense_are_bad() {
    let (memory, regions) = setup();
    let good = registration();
    assert!(parse(&memory, &regions, &good).is_some());
    let at = BASE + 0x30_0000;
    let pointing = |count, key, addr| Umr {
        flags: 0,
        list: segment(&(count, key, addr)),
        ..good.clone()
    };
    assert!(parse(&memory, &regions, &pointing(64, 2 << 8, at)).is_some());
    for (what, bad) in [
        (
            "list of keys",
            Umr {
                access: 2,
                ..good.clone()
            },
        ),
        (
            "signature",
            Umr {
                offset: 1,
                ..good.clone()
            },
        ),
        (
            "page size",
            Umr {
                log_page: 11,
                ..good.clone()
            },
        ),
        (
            "large page size",
            Umr {
                log_page: 63,
                ..good.clone()
            },
        ),
        (
            "short inline list",
            Umr {
                octowords: 5,
                ..good.clone()
            },
        ),
        (
            "far part",
            Umr {
                flags: 0x90,
                offset: 1 << 47,
                ..good.clone()
            },
        ),
        (
            "part behind the end",
            Umr {
                flags: 0x90,
                offset: (1 << 19) - 3,
                ..good.clone()
            },
        ),
        (
            "no list",
            Umr {
                flags: 0,
                list: Vec::new(),
                ..good.clone()
            },
        ),
        ("short list", pointing(63, 2 << 8, at)),
        ("unknown key", pointing(64, 3 << 8, at)),
        ("other variant", pointing(64, 2 << 8 | 1, at)),
        ("free key", pointing(64, 1 << 8 | 7, 0)),
        ("not mapped", pointing(64, 2 << 8, 0)),
    ] {
        assert_eq!(parse(&memory, &regions, &bad), None, "{what}");
    }
    let mut without = Regions::default();
    assert_eq!(parse(&memory, &without, &good), None);
    assert_eq!(without.allocate(), Ok(1));
    add_all_memory(&mut without);
    let mut bus = regions.get(2).unwrap().clone();
    bus.key = MemKey(1 << 8);
    without.insert(bus).unwrap();
    assert_eq!(parse(&memory, &without, &good), None, "bus addresses");
}

#[test]
fn a_part_may_begin_behind_the_first_256_mebibytes() {
    let (memory, mut regions) = setup();
    // 16 bits count units of 16 bytes, that is two pages.
    let part = Umr {
        flags: 0x90,
        offset: 1 << 17,
        octowords: 4,
        mask: 0,
        ..registration()
    };
    let change = parse(&memory, &regions, &part).unwrap();
    regions.change(&change).unwrap();
    let Translation::Pages { pages, .. } = &regions.get(1).unwrap().translation else {
        panic!("not paged");
    };
    let at = 2 << 17;
    assert_eq!(pages.len(), at + 8);
    assert_eq!(pages[at - 1..at + 2], [ABSENT, 0x5000, 0x9000]);
}

#[test]
fn a_list_longer_than_what_was_set_aside_is_bad() {
    let (memory, mut regions) = setup();
    for (capacity, fits) in [(8, true), (7, false)] {
        let mut region = regions.remove(1).unwrap();
        region.capacity = capacity;
        assert_eq!(regions.allocate(), Ok(1));
        regions.insert(region).unwrap();
        let change = parse(&memory, &regions, &registration());
        assert_eq!(change.is_some(), fits, "{capacity} pages");
    }
}
