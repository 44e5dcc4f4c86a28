use super::*;
use crate::testing::{BASE, BYTES, Driver, INDIRECT, Memory, NEXT, WRITE};

const SIZE: u16 = 8;
const TABLE: u64 = BASE + 0x4_0000;
const DATA: u64 = BASE + 0x10_0000;

fn walk_with(indirect: bool, write: impl FnOnce(&Driver)) -> Result<(Walked, usize), BadChain> {
    let memory = Memory::new();
    let driver = Driver::new(&memory, 0, SIZE);
    write(&driver);
    let reader = memory.table.reader();
    let view = reader.pin();
    let table = GuestArea::new(&view, driver.setup.desc, 16 * u64::from(SIZE), Access::Read);
    let mut parts = Parts::default();
    let walked = walk(&view, &table, SIZE, 0, indirect, &mut parts)?;
    Ok((walked, parts.slices().len()))
}

#[test]
fn chains_that_break_the_rules_are_refused_by_name() {
    type Write = fn(&Driver);
    let cases: &[(&str, BadChain, Write)] = &[
        ("a loop of one", BadChain::TooLong, |d| {
            d.descriptor(0, (DATA, 8), NEXT, 0)
        }),
        ("a loop of three", BadChain::TooLong, |d| {
            for n in 0..3 {
                d.descriptor(n, (DATA, 8), NEXT, (n + 1) % 3);
            }
        }),
        ("next beyond the table", BadChain::NextOutOfRange, |d| {
            d.descriptor(0, (DATA, 8), NEXT, SIZE);
        }),
        ("an address that wraps", BadChain::NotMapped, |d| {
            d.descriptor(0, (0xffff_ffff_ffff_ff00, 512), 0, 0);
        }),
        ("an address that is not mapped", BadChain::NotMapped, |d| {
            d.descriptor(0, (0x70_0000_0000, 512), 0, 0);
        }),
        (
            "a buffer over the end of memory",
            BadChain::NotMapped,
            |d| {
                d.descriptor(0, (BASE + BYTES - 8, 16), 0, 0);
            },
        ),
        ("readable after writable", BadChain::Order, |d| {
            d.descriptor(0, (DATA, 8), WRITE | NEXT, 1);
            d.descriptor(1, (DATA, 8), 0, 0);
        }),
        (
            "an indirect table of no entries",
            BadChain::IndirectSize,
            |d| {
                d.descriptor(0, (TABLE, 0), INDIRECT, 0);
            },
        ),
        (
            "an indirect table of 17 bytes",
            BadChain::IndirectSize,
            |d| {
                d.descriptor(0, (TABLE, 17), INDIRECT, 0);
            },
        ),
        (
            "an indirect table of 65537 entries",
            BadChain::IndirectSize,
            |d| {
                d.descriptor(0, (TABLE, 65537 * 16), INDIRECT, 0);
            },
        ),
        (
            "an indirect table that goes on after itself",
            BadChain::IndirectNested,
            |d| {
                d.descriptor(0, (TABLE, 16), INDIRECT | NEXT, 1);
            },
        ),
        (
            "an indirect table in an indirect table",
            BadChain::IndirectNested,
            |d| {
                d.descriptor(0, (TABLE, 32), INDIRECT, 0);
                d.descriptor_at(TABLE, 0, (TABLE, 32), INDIRECT, 0);
            },
        ),
        ("a loop in an indirect table", BadChain::TooLong, |d| {
            d.descriptor(0, (TABLE, 32), INDIRECT, 0);
            d.descriptor_at(TABLE, 0, (DATA, 8), NEXT, 1);
            d.descriptor_at(TABLE, 1, (DATA, 8), NEXT, 0);
        }),
        (
            "next beyond the indirect table",
            BadChain::NextOutOfRange,
            |d| {
                d.descriptor(0, (TABLE, 32), INDIRECT, 0);
                d.descriptor_at(TABLE, 0, (DATA, 8), NEXT, 2);
            },
        ),
        (
            "an indirect table outside the memory",
            BadChain::NotMapped,
            |d| {
                d.descriptor(0, (0x70_0000_0000, 32), INDIRECT, 0);
            },
        ),
        ("an indirect table that wraps", BadChain::NotMapped, |d| {
            d.descriptor(0, (u64::MAX - 15, 64), INDIRECT, 0);
        }),
        (
            "a long chain in an indirect table",
            BadChain::TooLong,
            |d| {
                let entries = 2 * MAX_DESCRIPTORS as u16;
                d.descriptor(0, (TABLE, 16 * u32::from(entries)), INDIRECT, 0);
                for n in 0..entries {
                    d.descriptor_at(TABLE, n, (DATA, 1), NEXT, n + 1);
                }
            },
        ),
    ];
    for (name, want, write) in cases {
        assert_eq!(walk_with(true, write).unwrap_err(), *want, "{name}");
    }
    let refused = walk_with(false, |d| d.descriptor(0, (TABLE, 16), INDIRECT, 0));
    assert_eq!(refused.unwrap_err(), BadChain::IndirectNotNegotiated);
}

#[test]
fn readable_and_writable_bytes_are_counted_apart() {
    let (walked, slices) = walk_with(false, |d| {
        d.descriptor(0, (DATA, 12), NEXT, 1);
        d.descriptor(1, (DATA + 64, 0), NEXT, 2);
        d.descriptor(2, (DATA + 64, 100), NEXT, 3);
        d.descriptor(3, (DATA + 200, 1), WRITE, 0);
    })
    .unwrap();
    let want = Walked {
        readable_slices: 2,
        readable: 112,
        writable: 1,
    };
    assert_eq!((walked, slices), (want, 3));
}

#[test]
fn only_what_was_written_is_remembered_whatever_descriptors_claim() {
    let memory = Memory::new();
    let driver = Driver::new(&memory, 0, SIZE);
    driver.descriptor(0, (DATA, 100), WRITE | NEXT, 1);
    driver.descriptor(1, (DATA + 0x1000, 100), WRITE, 0);
    driver.descriptor(2, (DATA, 100), WRITE | NEXT, 3);
    driver.descriptor(3, (DATA, u32::MAX), WRITE, 0);
    let reader = memory.table.reader();
    let view = reader.pin();
    let table = GuestArea::new(&view, driver.setup.desc, 16 * u64::from(SIZE), Access::Read);
    let mut parts = Parts::default();
    parts.remember_written(Some(Vec::new()));
    for _ in 0..100 {
        let bad = walk(&view, &table, SIZE, 2, false, &mut parts);
        assert_eq!(bad.unwrap_err(), BadChain::NotMapped);
        parts.clear();
    }
    assert_eq!(parts.writable, []);
    walk(&view, &table, SIZE, 0, false, &mut parts).unwrap();
    parts.wrote(130);
    let want = vec![(DATA, 100), (DATA + 0x1000, 30)];
    assert_eq!(parts.take_written(), Some(want));
}

#[test]
fn an_indirect_chain_may_be_longer_than_the_queue() {
    let entries = 3 * SIZE;
    let (walked, slices) = walk_with(true, |d| {
        d.descriptor(0, (TABLE, 16 * u32::from(entries)), INDIRECT, 0);
        for n in 0..entries {
            let flags = if n + 1 < entries { NEXT } else { 0 };
            d.descriptor_at(TABLE, n, (DATA, 10), flags, n + 1);
        }
    })
    .unwrap();
    assert_eq!(
        (walked.readable, slices),
        (10 * u64::from(entries), usize::from(entries))
    );
}

#[test]
fn a_buffer_may_span_ranges() {
    let memory = Memory::new();
    let mapping = dot_iommu::HostMapping::anonymous(4096).unwrap();
    let backing = dot_iommu::Backing::Mapped { mapping, offset: 0 };
    memory
        .table
        .map(BASE + BYTES, 4096, dot_iommu::Perm::RW, backing)
        .unwrap();
    let driver = Driver::new(&memory, 0, SIZE);
    driver.descriptor(0, (BASE + BYTES - 10, 30), 0, 0);
    let reader = memory.table.reader();
    let view = reader.pin();
    let table = GuestArea::new(&view, driver.setup.desc, 128, Access::Read);
    let mut parts = Parts::default();
    let walked = walk(&view, &table, SIZE, 0, false, &mut parts).unwrap();
    let lens: Vec<usize> = parts.slices().iter().map(VolatileSlice::len).collect();
    assert_eq!((walked.readable, lens), (30, vec![10, 20]));
}

#[test]
fn the_front_of_a_list_is_taken_across_slices() {
    let mut bytes = [0u8; 30];
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = n as u8;
    }
    let (a, b) = bytes.split_at_mut(4);
    let mut parts = Parts {
        slices: vec![VolatileSlice::from(a), VolatileSlice::from(&mut b[..10])],
        writable: Vec::new(),
        written: None,
    };
    let mut out = [0; 6];
    assert_eq!(parts.take_front(&mut out), Some(1));
    assert_eq!(out, [0, 1, 2, 3, 4, 5]);
    assert_eq!(parts.slices()[1].len(), 8);
    let mut out = [0; 20];
    assert_eq!(parts.take_front(&mut out), None);
}

#[test]
fn a_list_is_used_again_with_its_allocation() {
    let mut bytes = [0; 8];
    let mut parts = Parts::default();
    parts.slices.reserve_exact(100);
    let at = parts.slices.as_ptr().addr();
    parts.slices.push(VolatileSlice::from(&mut bytes[..]));
    let again = Parts::reuse(parts.retire());
    assert_eq!(again.slices.as_ptr().addr(), at);
    assert_eq!((again.slices.len(), again.slices.capacity()), (0, 100));
}
