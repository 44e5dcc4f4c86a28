//! Tests of receive queues.

use super::rq::{Receive, RqSetup, SrqSetup};
use super::test_queue::Place;
use crate::rdma::verbs::{MemKey, Next, ReceiveQueue, ReceiveRequest, Sge};
use crate::testing::Memory;
use proptest::prelude::*;

fn segment(count: u32, key: u32, addr: u64) -> Vec<u8> {
    let mut bytes = count.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend(addr.to_be_bytes());
    bytes
}

fn list(sges: &[(u32, u32, u64)], end: bool) -> Vec<u8> {
    let mut bytes: Vec<u8> = sges.iter().flat_map(|s| segment(s.0, s.1, s.2)).collect();
    if end {
        bytes.extend(segment(0, 0x100, 0));
    }
    bytes
}

fn cyclic(place: &Place, log_size: u8, log_stride: u8, signature: bool) -> Receive {
    Receive::cyclic(RqSetup {
        buffer: place.buffer(),
        log_size,
        log_stride,
        doorbell: place.doorbell(),
        signature,
    })
    .unwrap()
}

fn linked(place: &Place, log_size: u8, log_stride: u8) -> Receive {
    Receive::linked(SrqSetup {
        buffer: place.buffer(),
        log_size,
        log_stride,
        doorbell: place.doorbell(),
    })
    .unwrap()
}

fn entry(cookie: u32, sges: &[(u32, u32, u64)]) -> Next<ReceiveRequest> {
    let sges = sges.iter().map(|&(len, key, addr)| Sge {
        key: MemKey(key),
        addr,
        len,
    });
    Next::Entry(ReceiveRequest {
        cookie,
        sges: sges.collect(),
    })
}

#[test]
fn impossible_queues_are_refused() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 0x1000);
    let new = |log_size, log_stride, signature| {
        Receive::cyclic(RqSetup {
            buffer: place.buffer(),
            log_size,
            log_stride,
            doorbell: place.doorbell(),
            signature,
        })
        .is_ok()
    };
    assert!(new(8, 4, false) && new(2, 10, true));
    for (log_size, log_stride, signature) in [
        (9, 4, false),
        (8, 3, false),
        (8, 4, true),
        (0, 11, false),
        (16, 4, false),
        (255, 255, false),
    ] {
        assert!(!new(log_size, log_stride, signature));
    }
}

#[test]
fn entries_are_taken_in_order_around_the_ring_as_far_as_they_are_posted() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 3);
    let mut rq = cyclic(&place, 3, 6, false);
    let reader = memory.table.reader();
    let view = reader.pin();
    assert_eq!(rq.next(&view), Next::Empty);
    for n in 0..70_000u32 {
        let sges = [(100, 5, 0x1000 + u64::from(n)), (1 << 31 | 7, 6, 9)];
        let taken = [(100, 5, 0x1000 + u64::from(n)), (7, 6, 9)];
        if n < 40 || n > 65_530 && n < 65_550 {
            place.put(u64::from(n % 8) * 64, &list(&sges, true));
            place.record(0, n + 1);
            assert_eq!(rq.posted(&view), 1);
            assert_eq!(rq.next(&view), entry(n & 0xffff, &taken));
            assert_eq!(rq.next(&view), Next::Empty);
        } else {
            place.record(0, n + 1);
            assert!(matches!(rq.next(&view), Next::Entry(_)));
        }
    }
    rq.reset();
    place.record(0, 0);
    assert_eq!(rq.next(&view), Next::Empty);
}

#[test]
fn a_full_entry_has_no_end_and_elements_without_data_do_not_count() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 1);
    let mut rq = cyclic(&place, 1, 6, true);
    let reader = memory.table.reader();
    let view = reader.pin();
    let sges = [(1, 0x100, 3), (0, 7, 4), (2, 8, 5)];
    place.put(16, &list(&sges, false));
    place.record(0, 1);
    assert_eq!(rq.next(&view), entry(0, &[(1, 0x100, 3), (2, 8, 5)]));
}

#[test]
fn more_elements_than_verbs_has_are_bad() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 512 << 2);
    let mut rq = cyclic(&place, 2, 9, false);
    let reader = memory.table.reader();
    let view = reader.pin();
    place.put(0, &list(&[(1, 2, 3); 17], true));
    place.put(512, &list(&[(1, 2, 3); 16], true));
    place.record(0, 2);
    assert_eq!(rq.next(&view), Next::Bad(0));
    assert_eq!(rq.next(&view), entry(1, &[(1, 2, 3); 16]));
}

#[test]
fn a_counter_that_jumps_is_bad_once() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 16 << 3);
    let mut rq = cyclic(&place, 3, 4, false);
    let reader = memory.table.reader();
    let view = reader.pin();
    place.record(0, 9);
    assert_eq!(rq.next(&view), Next::Bad(0));
    assert_eq!(rq.next(&view), Next::Empty);
}

#[test]
fn a_linked_queue_follows_its_links() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 32 << 2);
    let mut srq = linked(&place, 2, 5);
    let reader = memory.table.reader();
    let view = reader.pin();
    let link =
        |index: u64, next: u16| place.put(32 * index, &[0, 0, (next >> 8) as u8, next as u8]);
    for (index, next) in [(0, 2), (2, 1), (1, 3)] {
        link(index, next);
        place.put(32 * index + 16, &list(&[(10 + index as u32, 1, 2)], false));
    }
    place.record(0, 2);
    assert_eq!(srq.next(&view), entry(0, &[(10, 1, 2)]));
    assert_eq!(srq.next(&view), entry(2, &[(12, 1, 2)]));
    assert_eq!(srq.next(&view), Next::Empty);
    // Given back and posted again behind entry 1.
    link(1, 0);
    link(0, 3);
    place.record(0, 4);
    assert_eq!(srq.next(&view), entry(1, &[(11, 1, 2)]));
    assert_eq!(srq.next(&view), entry(0, &[(10, 1, 2)]));
    srq.reset();
    place.record(0, 1);
    assert_eq!(srq.next(&view), entry(0, &[(10, 1, 2)]));
}

#[test]
fn a_link_to_nowhere_ends_a_linked_queue() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 32 << 2);
    let mut srq = linked(&place, 2, 5);
    let reader = memory.table.reader();
    let view = reader.pin();
    place.put(0, &[0, 0, 0, 4]);
    place.record(0, 1);
    assert!(matches!(srq.next(&view), Next::Entry(_)));
    assert_eq!(srq.next(&view), Next::Empty);
    place.record(0, 2);
    assert_eq!(srq.next(&view), Next::Unreadable);
    assert_eq!(srq.next(&view), Next::Unreadable);
}

proptest! {
    #[test]
    fn an_encoded_list_is_decoded(
        sges in prop::collection::vec((1u32..1 << 31, any::<u32>(), any::<u64>()), 0..=16),
        log_stride in 8u8..10,
    ) {
        let memory = Memory::new();
        let place = Place::new(&memory, 0, 2 << log_stride);
        let mut rq = cyclic(&place, 1, log_stride, false);
        let full = sges.len() * 16 == 1 << log_stride;
        place.put(0, &list(&sges, !full));
        place.record(0, 1);
        let reader = memory.table.reader();
        prop_assert_eq!(rq.next(&reader.pin()), entry(0, &sges));
    }

    #[test]
    fn nonsense_never_panics(bytes in prop::collection::vec(any::<u8>(), 256), posts: [u16; 8]) {
        let memory = Memory::new();
        let place = Place::new(&memory, 0, 256);
        place.put(0, &bytes);
        let reader = memory.table.reader();
        let view = reader.pin();
        for mut queue in [cyclic(&place, 2, 6, false), linked(&place, 2, 6)] {
            for post in posts {
                place.record(0, u32::from(post) & 7);
                let mut left = 6;
                while !matches!(queue.next(&view), Next::Empty | Next::Unreadable) {
                    left -= 1;
                    prop_assert!(left > 0);
                }
            }
        }
    }
}
