//! Tests of send queues, with an encoder of their own.

use super::sq::{Sq, SqSetup};
use super::test_queue::Place;
use crate::rdma::verbs::{
    Data, Datagram, Destination, MemKey, Mixed, Next, Operation, QpNum, Regions, SendQueue,
    Service, Sge, WorkRequest,
};
use crate::testing::{BASE, BYTES, Memory};
use proptest::prelude::*;

/// Bytes of an entry: control segment, then the rest.
pub(super) fn wqe(opcode: u8, fm_ce_se: u8, imm: u32, rest: &[u8]) -> Vec<u8> {
    let ds = (16 + rest.len()).div_ceil(16) as u8;
    let mut bytes = vec![0, 0, 0, opcode, 0, 0, 1, ds, 0, 0, 0, fm_ce_se];
    bytes.extend(imm.to_be_bytes());
    bytes.extend(rest);
    bytes
}

fn raddr(addr: u64, key: u32) -> Vec<u8> {
    let mut bytes = addr.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend([0; 4]);
    bytes
}

pub(super) fn segment(&(count, key, addr): &(u32, u32, u64)) -> Vec<u8> {
    let mut bytes = count.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend(addr.to_be_bytes());
    bytes
}

fn segments(sges: &[(u32, u32, u64)]) -> Vec<u8> {
    sges.iter().flat_map(segment).collect()
}

fn inline(data: &[u8]) -> Vec<u8> {
    let mut bytes = (1 << 31 | data.len() as u32).to_be_bytes().to_vec();
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(16), 0xee);
    bytes
}

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

pub(super) fn queue(place: &Place, log_wqebbs: u8, service: Service) -> Sq {
    Sq::new(SqSetup {
        qpn: 1,
        buffer: place.buffer(),
        log_wqebbs,
        doorbell: place.doorbell(),
        service,
        umr: true,
    })
    .unwrap()
}

/// What a queue of this service makes of one entry.
fn parse(service: Service, wqe: &[u8]) -> Next<WorkRequest> {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 5);
    let mut sq = queue(&place, 5, service);
    place.put(0, wqe);
    place.record(1, wqe.len().div_ceil(64) as u32);
    let reader = memory.table.reader();
    let view = reader.pin();
    let next = sq.next(&view, &Regions::default());
    assert_eq!(sq.next(&view, &Regions::default()), Next::Empty);
    next
}

fn gather(sges: &[(u32, u32, u64)]) -> Data {
    let sges = sges.iter().map(|&(len, key, addr)| Sge {
        key: MemKey(key),
        addr,
        len,
    });
    Data::Gather(sges.collect())
}

fn request(operation: Operation, data: Data) -> WorkRequest {
    WorkRequest {
        cookie: 0,
        operation,
        data,
        signaled: false,
        solicited: false,
        fence: false,
        datagram: None,
    }
}

const WRITE: Operation = Operation::Write {
    addr: 0x1234_5678_9abc,
    key: MemKey(0x5566),
    immediate: None,
};

fn write(rest: &[u8]) -> Vec<u8> {
    wqe(8, 0, 0, &join(&[&raddr(0x1234_5678_9abc, 0x5566), rest]))
}

#[test]
fn each_operation_is_parsed() {
    let one = [(8, 0x77, 0x1000)];
    let data = segments(&one);
    let addr = raddr(0x1_0000, 0x42);
    let key = MemKey(0x42);
    let atomic = join(&[&addr, &1u64.to_be_bytes(), &2u64.to_be_bytes(), &data]);
    let send = |immediate, invalidate| Operation::Send {
        immediate,
        invalidate,
    };
    let at = |immediate| Operation::Write {
        addr: 0x1_0000,
        key,
        immediate,
    };
    let both = join(&[&addr, &data]);
    for (opcode, imm, rest, operation) in [
        (0x0a, 9, &data, send(None, None)),
        (0x0b, 9, &data, send(Some(9), None)),
        (0x01, 9, &data, send(None, Some(MemKey(9)))),
        (0x08, 9, &both, at(None)),
        (0x09, 9, &both, at(Some(9))),
        (
            0x10,
            9,
            &both,
            Operation::Read {
                addr: 0x1_0000,
                key,
                invalidate: None,
            },
        ),
        (
            0x11,
            9,
            &atomic,
            Operation::CompareSwap {
                addr: 0x1_0000,
                key,
                compare: 2,
                swap: 1,
            },
        ),
        (
            0x12,
            9,
            &atomic,
            Operation::FetchAdd {
                addr: 0x1_0000,
                key,
                add: 1,
            },
        ),
    ] {
        let expected = Next::Entry(request(operation, gather(&one)));
        assert_eq!(parse(Service::Rc, &wqe(opcode, 0, imm, rest)), expected);
    }
    let nop = Next::Entry(request(Operation::Nop, gather(&[])));
    assert_eq!(parse(Service::Rc, &wqe(0, 0, 0, &[])), nop);
}

#[test]
fn flags_of_the_control_segment_are_taken_over() {
    for (flags, signaled, solicited, fence) in [
        (0x00, false, false, false),
        (0x08, true, false, false),
        (0x0c, true, false, false),
        (0x04, false, false, false),
        (0x02, false, true, false),
        (0x20, false, false, false),
        (0x40, false, false, true),
        (0x60, false, false, true),
        (0x80, false, false, true),
    ] {
        let Next::Entry(request) = parse(Service::Rc, &wqe(0x0a, flags, 0, &[])) else {
            panic!("{flags:#x}");
        };
        let got = (request.signaled, request.solicited, request.fence);
        assert_eq!(got, (signaled, solicited, fence), "{flags:#x}");
    }
}

#[test]
fn nonsense_is_bad() {
    let data = segments(&[(8, 1, 2)]);
    let addr = raddr(0, 0);
    let both = join(&[&addr, &data]);
    let nine = join(&[&addr, &[0; 16], &segments(&[(9, 1, 2)])]);
    let many = segments(&[(1, 2, 3); 17]);
    for (service, opcode, rest) in [
        (Service::Rc, 0x0e, &data),
        (Service::Rc, 0xff, &data),
        (Service::Rc, 0x08, &vec![]),
        (Service::Rc, 0x0a, &many),
        (Service::Rc, 0x0a, &join(&[&data, &inline(b"x")])),
        (Service::Rc, 0x10, &join(&[&addr, &inline(b"x"), &data])),
        (Service::Rc, 0x10, &join(&[&addr, &inline(b"x")])),
        (Service::Rc, 0x11, &both),
        (Service::Rc, 0x12, &nine),
        (Service::Rc, 0x25, &data),
        (Service::Uc, 0x10, &both),
        (Service::Uc, 0x01, &data),
        (Service::Ud, 0x08, &join(&[&[0; 48], &both])),
        (Service::Ud, 0x0a, &vec![]),
    ] {
        let next = parse(service, &wqe(opcode, 0, 0, rest));
        assert_eq!(next, Next::Bad(0), "{service:?} {opcode:#x}");
    }
    // An inline segment that is longer than its entry.
    let mut long = wqe(0x0a, 0, 0, &inline(&[1; 12]));
    long[19] = 13;
    assert_eq!(parse(Service::Rc, &long), Next::Bad(0));
}

#[test]
fn a_datagrams_address_is_of_either_network() {
    let mut av = 0x1122_3344u32.to_be_bytes().to_vec();
    av.extend([0; 4]);
    av.extend(0x8000_0777u32.to_be_bytes());
    av.extend([0x35, 0, 0xab, 0xcd]);
    av.extend([0; 4]);
    let mac_at = av.len();
    av.extend([0; 6]);
    av.extend([0x61, 0x40]);
    let grh_at = av.len();
    av.extend((1u32 << 30 | 5 << 20 | 0x1234).to_be_bytes());
    av.extend([0xfe; 16]);
    let sges = [(3, 4, 5)];
    let entry = |av: &[u8]| wqe(0x0a, 0, 0, &join(&[av, &segments(&sges)]));
    let expected = Datagram {
        to: Destination {
            lid: 0xabcd,
            gid: Some([0xfe; 16]),
            mac: [0; 6],
        },
        qp: QpNum(0x777),
        qkey: 0x1122_3344,
        source_gid: Some(5),
        traffic_class: 0x61,
        hop_limit: 0x40,
        service_level: 5,
    };
    let send = || {
        let invalidate = None;
        request(
            Operation::Send {
                immediate: None,
                invalidate,
            },
            gather(&sges),
        )
    };
    let check = |av: &[u8], expected: Datagram| {
        let mut request = send();
        request.datagram = Some(expected);
        assert_eq!(parse(Service::Ud, &entry(av)), Next::Entry(request));
    };
    check(&av, expected);
    let mut ethernet = av.clone();
    ethernet[mac_at..mac_at + 6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    // There it has a GRH whether the driver says so or not.
    ethernet[grh_at] = 0;
    let to = Destination {
        lid: 0,
        gid: Some([0xfe; 16]),
        mac: [2, 0, 0, 0, 0, 1],
    };
    let service_level = 2;
    check(
        &ethernet,
        Datagram {
            to,
            service_level,
            ..expected
        },
    );
    let mut plain = av.clone();
    plain[grh_at] = 0;
    let without = Datagram {
        to: Destination {
            gid: None,
            ..expected.to
        },
        source_gid: None,
        traffic_class: 0,
        hop_limit: 0,
        ..expected
    };
    check(&plain, without);
    // The short form.
    let mut short = av[..16].to_vec();
    short[8] = 0;
    check(&short, without);
}

#[test]
fn entries_wrap_and_cross_pages_and_are_named_by_their_first_block() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 7);
    let mut sq = queue(&place, 7, Service::Rc);
    let reader = memory.table.reader();
    let view = reader.pin();
    let mut counter = 0u32;
    for round in 0..20_000u32 {
        let data: Vec<u8> = (0..round % 900).map(|n| (n + round) as u8).collect();
        let entry = write(&inline(&data));
        let blocks = entry.len().div_ceil(64) as u32;
        if round < 400 || counter & 0xffff > 0xff00 {
            place.put(u64::from(counter % 128) * 64, &entry);
            assert_eq!(sq.next(&view, &Regions::default()), Next::Empty);
            place.record(1, counter + blocks);
            let mut expected = request(WRITE, Data::Inline(data.into()));
            expected.cookie = counter & 0xffff;
            let next = sq.next(&view, &Regions::default());
            assert_eq!(next, Next::Entry(expected));
            counter += blocks;
        } else {
            // Quickly on to where the counter wraps.
            place.put(u64::from(counter % 128) * 64, &wqe(0, 0, 0, &[]));
            place.record(1, counter + 1);
            assert!(matches!(
                sq.next(&view, &Regions::default()),
                Next::Entry(_)
            ));
            counter += 1;
        }
    }
    sq.reset();
    place.record(1, 0);
    assert_eq!(sq.next(&view, &Regions::default()), Next::Empty);
}

#[test]
fn what_cannot_be_an_entry_gives_up_all_that_is_posted() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 3);
    let mut sq = queue(&place, 3, Service::Rc);
    let reader = memory.table.reader();
    let view = reader.pin();
    let regions = Regions::default();
    let mut empty = wqe(0, 0, 0, &[]);
    empty[7] = 0;
    place.put(0, &empty);
    place.record(1, 3);
    assert_eq!(sq.next(&view, &regions), Next::Bad(0));
    assert_eq!(sq.next(&view, &regions), Next::Empty);
    // Longer than what is posted.
    place.put(64 * 3, &write(&inline(&[0; 200])));
    place.record(1, 4);
    assert_eq!(sq.next(&view, &regions), Next::Bad(3));
    assert_eq!(sq.next(&view, &regions), Next::Empty);
    // More than the ring has.
    place.record(1, 4 + 9);
    assert_eq!(sq.next(&view, &regions), Next::Bad(4));
    assert_eq!(sq.next(&view, &regions), Next::Empty);
    assert!(!sq.is_posted(&view));
    // A bad one in between is one entry only.
    place.put(64 * 5, &wqe(0x77, 0, 0, &[]));
    place.put(64 * 6, &write(&[]));
    place.record(1, 15);
    assert!(sq.is_posted(&view));
    assert_eq!(sq.next(&view, &regions), Next::Bad(13));
    assert!(matches!(sq.next(&view, &regions), Next::Entry(_)));
}

#[test]
fn a_queue_that_is_not_mapped_is_unreadable() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 3);
    let mut sq = queue(&place, 3, Service::Rc);
    place.record(1, 1);
    memory.table.unmap(BASE, BYTES).unwrap();
    {
        let reader = memory.table.reader();
        let view = reader.pin();
        assert_eq!(sq.next(&view, &Regions::default()), Next::Unreadable);
    }
    let mut setup = SqSetup {
        qpn: 1,
        buffer: place.buffer(),
        log_wqebbs: 16,
        doorbell: 0,
        service: Service::Rc,
        umr: false,
    };
    assert!(Sq::new(setup).is_err());
    setup = SqSetup {
        qpn: 1,
        buffer: place.buffer(),
        log_wqebbs: 4,
        doorbell: 0,
        service: Service::Rc,
        umr: false,
    };
    assert!(Sq::new(setup).is_err());
}

#[test]
fn changes_of_regions_need_a_queue_that_may() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 3);
    let mut sq = Sq::new(SqSetup {
        qpn: 1,
        buffer: place.buffer(),
        log_wqebbs: 3,
        doorbell: place.doorbell(),
        service: Service::Rc,
        umr: false,
    })
    .unwrap();
    place.put(0, &wqe(0x25, 0, 1 << 8, &[0; 112]));
    place.record(1, 2);
    let reader = memory.table.reader();
    let mut regions = Regions::default();
    super::umr_tests::add_region(&mut regions, 1);
    assert_eq!(sq.next(&reader.pin(), &regions), Next::Bad(0));
}

/// A small deterministic generator: the same nonsense in every run.
fn noise(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn random_entries_never_panic_and_never_take_more_than_is_posted() {
    const OPCODES: [u8; 12] = [0, 1, 8, 9, 0xa, 0xb, 0xe, 0x10, 0x11, 0x12, 0x25, 0x25];
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 5);
    let reader = memory.table.reader();
    let view = reader.pin();
    let mut regions = Regions::default();
    for n in 1..8 {
        super::umr_tests::add_region(&mut regions, n);
    }
    let mut state = 0x1234_5678_9abc_def1;
    let services = [Service::Rc, Service::Uc, Service::Ud];
    let mut queues = services.map(|service| queue(&place, 5, service));
    let mut counter = 0u16;
    let (mut good, mut bad) = (0, 0);
    for round in 0..34_000 {
        let mut bytes = [0u8; 192];
        for chunk in bytes.chunks_mut(8) {
            let mask = noise(&mut state);
            // Sparse bits make small numbers, and so more that makes sense.
            let word = noise(&mut state) & mask & noise(&mut state);
            chunk.copy_from_slice(&word.to_be_bytes());
        }
        bytes[3] = OPCODES[(noise(&mut state) % 12) as usize];
        bytes[7] = (noise(&mut state) % if round % 4 == 0 { 256 } else { 13 }) as u8;
        bytes[12..16].copy_from_slice(&((noise(&mut state) % 9) as u32 * 256).to_be_bytes());
        place.put(u64::from(counter % 32) * 64, &bytes);
        let more = noise(&mut state) as u16 % if round % 64 == 0 { u16::MAX } else { 5 };
        counter = counter.wrapping_add(more);
        place.record(1, u32::from(counter));
        for sq in &mut queues {
            let mut left = 33;
            loop {
                match sq.next(&view, &regions) {
                    Next::Empty => break,
                    Next::Unreadable => panic!("all is mapped"),
                    Next::Entry(_) => good += 1,
                    Next::Bad(_) => bad += 1,
                }
                left -= 1;
                assert!(left > 0);
            }
        }
    }
    assert!(good > 10_000 && bad > 10_000, "{good} {bad}");
}

proptest! {
    #[test]
    fn an_encoded_write_is_decoded(
        addr: u64, key: u32, imm: u32, flags: u8,
        sges in prop::collection::vec((1u32..1 << 31, any::<u32>(), any::<u64>()), 0..=16),
    ) {
        let entry = wqe(9, flags, imm, &join(&[&raddr(addr, key), &segments(&sges)]));
        let expected = WorkRequest {
            cookie: 0,
            operation: Operation::Write { addr, key: MemKey(key), immediate: Some(imm) },
            data: gather(&sges),
            signaled: flags & 8 != 0,
            solicited: flags & 2 != 0,
            fence: flags >> 5 >= 2,
            datagram: None,
        };
        prop_assert_eq!(parse(Service::Uc, &entry), Next::Entry(expected));
    }

    #[test]
    fn inline_data_with_memory_behind_it_is_decoded(
        head in prop::collection::vec(any::<u8>(), 0..60),
        sges in prop::collection::vec((1u32..1 << 31, any::<u32>(), any::<u64>()), 1..=4),
    ) {
        let Data::Gather(memory) = gather(&sges) else { unreachable!() };
        let mixed = Mixed { inline: head.iter().copied().collect(), sges: memory };
        let entry = write(&join(&[&inline(&head), &segments(&sges)]));
        let expected = request(WRITE, Data::Mixed(Box::new(mixed)));
        prop_assert_eq!(parse(Service::Rc, &entry), Next::Entry(expected));
        // The other way round is no entry.
        let entry = write(&join(&[&segments(&sges), &inline(&head)]));
        prop_assert!(matches!(parse(Service::Rc, &entry), Next::Bad(_)));
    }

    #[test]
    fn encoded_inline_data_is_decoded(parts in prop::collection::vec(0usize..200, 1..4)) {
        let bytes: Vec<u8> = (0..200).collect();
        let segments: Vec<u8> = parts.iter().flat_map(|&len| inline(&bytes[..len])).collect();
        let all: Vec<u8> = parts.iter().flat_map(|&len| bytes[..len].to_vec()).collect();
        let expected = request(WRITE, Data::Inline(all.into()));
        prop_assert_eq!(parse(Service::Rc, &write(&segments)), Next::Entry(expected));
    }
}
