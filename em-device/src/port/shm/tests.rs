use super::ring_mem::{RING, RingMem};
use super::test_support::{bell, ends, memory, pair, readable, send, take, wire};
use super::*;
use crate::frame::FrameMeta;
use proptest::prelude::*;
use rustix::fs::{SealFlags, fcntl_add_seals};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

const PLAIN: FrameMeta = FrameMeta {
    flags: 0,
    gso_type: 0,
    hdr_len: 0,
    gso_size: 0,
    csum_start: 0,
    csum_offset: 0,
};

#[test]
fn a_frame_arrives_with_its_offload_facts_after_the_flush() {
    let (mut a, mut b) = pair();
    let meta = FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        gso_type: FrameMeta::GSO_TCPV6 | FrameMeta::GSO_ECN,
        hdr_len: 74,
        gso_size: 1440,
        csum_start: 54,
        csum_offset: 16,
    };
    let bytes: Vec<u8> = (0..MAX_FRAME).map(|i| (i * 31) as u8).collect();
    send(&mut a, meta, &bytes).unwrap();
    assert!(take(&mut b, 9).is_empty(), "not before the flush");
    a.flush();
    assert_eq!(take(&mut b, 9), [(meta, bytes)]);
    assert_eq!(a.stats().tx_bytes, MAX_FRAME as u64);
    assert_eq!(
        (b.stats().rx_packets, b.stats().rx_bytes),
        (1, MAX_FRAME as u64)
    );
}

#[test]
fn a_sink_is_told_before_the_room_of_its_frames_is_given_back() {
    /// Notes whether the sender still has what was taken.
    struct Sink<'a> {
        sender: &'a mut ShmPort,
        taken: usize,
        kept: Option<bool>,
    }
    impl RxSink for Sink<'_> {
        fn frame(&mut self, _: &Frame<'_>) -> Rx {
            self.taken += 1;
            Rx::Taken
        }
        fn done(&mut self) {
            let sent = self.sender.sent();
            self.kept = Some(self.taken == 2 && !self.sender.is_done(sent));
        }
    }
    let (mut a, mut b) = pair();
    (0..2).for_each(|_| send(&mut a, PLAIN, &[1; 60]).unwrap());
    a.flush();
    let sent = a.sent();
    let mut sink = Sink {
        sender: &mut a,
        taken: 0,
        kept: None,
    };
    assert_eq!(b.receive(9, &mut sink), 2);
    assert_eq!(sink.kept, Some(true));
    assert!(a.is_done(sent));
}

#[test]
fn a_frame_of_impossible_length_is_refused_and_counted() {
    let (mut a, _b) = pair();
    for len in [0, MIN_FRAME - 1, MAX_FRAME + 1] {
        assert_eq!(send(&mut a, PLAIN, &vec![0; len]), Err(TxError::TooLong));
    }
    assert_eq!(a.stats().drops["bad_length"], 3);
}

#[test]
fn a_full_ring_refuses_then_wakes_the_producer_once_there_is_room() {
    let (mut a, mut b) = pair();
    let bytes = vec![7u8; 60_000];
    let mut sent = 0;
    let full = loop {
        match send(&mut a, PLAIN, &bytes) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, TxError::Full);
    assert_eq!(sent, RING / record::record_len(bytes.len()));
    a.disarm();
    a.own.swallow();
    assert!(!a.arm());
    assert!(!readable(a.wake_fd().unwrap(), 0));
    // The flush in `arm` made everything visible.
    assert_eq!(take(&mut b, 1).len(), 1);
    assert!(!readable(a.wake_fd().unwrap(), 0), "not for so little room");
    assert_eq!(take(&mut b, usize::MAX).len(), sent - 1);
    assert!(readable(a.wake_fd().unwrap(), 0));
    a.disarm();
    assert!(!readable(a.wake_fd().unwrap(), 0));
    assert_eq!(send(&mut a, PLAIN, &bytes), Ok(()));
}

#[test]
fn room_that_came_back_before_arming_is_work() {
    let (mut a, mut b) = pair();
    while send(&mut a, PLAIN, &[0; 60_000]).is_ok() {}
    a.flush();
    take(&mut b, usize::MAX);
    assert!(a.arm());
    assert!(!a.arm(), "said once");
}

#[test]
fn a_sleeper_is_woken_by_the_flush_and_a_busy_one_is_not() {
    let (mut a, mut b) = pair();
    b.own.swallow();
    send(&mut a, PLAIN, &[1; 60]).unwrap();
    a.flush();
    assert!(!readable(b.wake_fd().unwrap(), 0));
    assert!(b.arm(), "something is waiting");
    take(&mut b, 9);
    assert!(!b.arm());
    send(&mut a, PLAIN, &[2; 60]).unwrap();
    assert!(!readable(b.wake_fd().unwrap(), 0));
    a.flush();
    assert!(readable(b.wake_fd().unwrap(), 0));
    b.disarm();
    assert_eq!(take(&mut b, 9).len(), 1);
}

#[test]
fn a_frame_left_for_later_stays_first_and_does_not_keep_the_port_awake() {
    let (mut a, mut b) = pair();
    for i in 0..3 {
        send(&mut a, PLAIN, &[i; 60]).unwrap();
    }
    a.flush();
    let mut seen = 0;
    let count = b.receive(9, &mut |_: &Frame<'_>| {
        seen += 1;
        if seen == 2 { Rx::Later } else { Rx::Taken }
    });
    assert_eq!((count, seen), (1, 2));
    assert!(!b.arm());
    b.disarm();
    let rest: Vec<u8> = take(&mut b, 9).iter().map(|(_, bytes)| bytes[0]).collect();
    assert_eq!(rest, [1, 2]);
    assert_eq!(b.stats().rx_packets, 3);
}

#[test]
fn the_carrier_comes_with_the_peer_and_goes_with_it() {
    let memory = wire();
    let (own, other) = (bell(), bell());
    let mut a = ShmPort::attach(
        "a",
        0,
        memory.try_clone().unwrap(),
        own.try_clone().unwrap(),
        other.try_clone().unwrap(),
    )
    .unwrap();
    assert!(!a.carrier());
    assert_eq!(send(&mut a, PLAIN, &[0; 60]), Err(TxError::Down));
    assert_eq!(a.stats().drops["no_carrier"], 1);
    assert!(!a.arm());
    let mut b = ShmPort::attach("b", 1, memory, other, own).unwrap();
    assert!(readable(a.wake_fd().unwrap(), 0), "woken by the newcomer");
    a.disarm();
    assert!(a.carrier() && b.carrier());
    send(&mut b, PLAIN, &[9; 60]).unwrap();
    assert!(!a.arm());
    drop(b);
    assert!(readable(a.wake_fd().unwrap(), 0), "woken by the leaver");
    assert!(!a.carrier());
    assert_eq!(take(&mut a, 9).len(), 1, "its last words are heard");
}

#[test]
fn memory_that_is_no_wire_is_refused() {
    let attach = |side, memory| ShmPort::attach("x", side, memory, bell(), bell()).unwrap_err();
    assert!(matches!(attach(2, wire()), AttachError::Side(2)));
    assert!(matches!(
        attach(0, memory(SHM_LINK_BYTES - 1)),
        AttachError::Size(_)
    ));
    assert!(matches!(
        attach(0, memory(SHM_LINK_BYTES)),
        AttachError::NotSealed
    ));
    let grows_only = memory(SHM_LINK_BYTES);
    fcntl_add_seals(&grows_only, SealFlags::GROW).unwrap();
    assert!(matches!(attach(0, grows_only), AttachError::NotSealed));
    let file = tempfile::tempfile().unwrap();
    file.set_len(SHM_LINK_BYTES).unwrap();
    assert!(matches!(attach(0, file.into()), AttachError::NotMemfd(_)));
}

/// The memory of a wire as a peer that behaves badly sees it.
fn scribbler(memory: &OwnedFd) -> [RingMem; 2] {
    RingMem::map_pair(memory.as_fd()).unwrap()
}

#[test]
fn impossible_indices_take_the_port_down_with_a_reason() {
    use std::sync::atomic::Ordering::Relaxed;
    for tail in [8, RING as u64 + 16, u64::MAX - 15, u64::MAX] {
        let memory = wire();
        let (_a, mut b) = ends(&memory);
        scribbler(&memory)[0].indices().tail.0.store(tail, Relaxed);
        assert_eq!(take(&mut b, 9).len(), 0);
        assert!(b.down_reason().unwrap().contains(&tail.to_string()));
        assert!(!b.carrier());
        assert_eq!(send(&mut b, PLAIN, &[0; 60]), Err(TxError::Down));
        assert!(!b.arm());
    }
    for head in [8, RING as u64 + 16, u64::MAX - 15] {
        let memory = wire();
        let (mut a, _b) = ends(&memory);
        send(&mut a, PLAIN, &[0; 60]).unwrap();
        a.flush();
        scribbler(&memory)[0].indices().head.0.store(head, Relaxed);
        while send(&mut a, PLAIN, &[0; 60_000]).is_ok() {}
        assert!(a.down_reason().is_some(), "head {head}");
    }
}

#[test]
fn arming_finds_a_corrupt_ring_and_has_the_owner_look() {
    use std::sync::atomic::Ordering::Relaxed;
    let memory = wire();
    let (_a, mut b) = ends(&memory);
    scribbler(&memory)[0].indices().tail.0.store(8, Relaxed);
    assert!(b.arm());
    assert!(!b.carrier());
    assert!(!b.arm());
}

#[test]
fn impossible_records_take_the_port_down() {
    for len in [0u64, 45, MAX_FRAME as u64 + 1, u64::from(u32::MAX)] {
        let memory = wire();
        let (mut a, mut b) = ends(&memory);
        send(&mut a, PLAIN, &[0; 32]).unwrap();
        a.flush();
        scribbler(&memory)[0].store_header(0, [len, 0]).unwrap();
        assert_eq!(take(&mut b, 9).len(), 0);
        assert!(b.down_reason().unwrap().contains("record"), "len {len}");
    }
}

#[test]
fn frames_with_impossible_offloads_are_dropped_and_the_next_arrives() {
    let (mut a, mut b) = pair();
    let bad = FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        csum_start: 50,
        csum_offset: 16,
        ..PLAIN
    };
    send(&mut a, bad, &[1; 60]).unwrap();
    send(&mut a, PLAIN, &[2; 60]).unwrap();
    a.flush();
    assert_eq!(take(&mut b, 9), [(PLAIN, vec![2; 60])]);
    assert_eq!(b.stats().drops["bad_offloads"], 1);
    assert!(b.carrier());
}

#[derive(Debug, Clone)]
enum Step {
    Send(usize),
    Flush,
    Take(usize),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_ring_is_a_queue(steps in prop::collection::vec(prop_oneof![
        4 => (MIN_FRAME..=MAX_FRAME).prop_map(Step::Send),
        4 => (MIN_FRAME..200).prop_map(Step::Send),
        2 => Just(Step::Flush),
        2 => (0usize..40).prop_map(Step::Take),
    ], 0..400)) {
        let (mut a, mut b) = pair();
        let mut model: VecDeque<(u8, usize)> = VecDeque::new();
        let mut number = 0u8;
        for step in steps {
            match step {
                Step::Send(len) => match send(&mut a, PLAIN, &vec![number; len]) {
                    Ok(()) => {
                        model.push_back((number, len));
                        number = number.wrapping_add(1);
                    }
                    Err(error) => {
                        prop_assert_eq!(error, TxError::Full);
                        let used: usize = model.iter().map(|(_, l)| record::record_len(*l)).sum();
                        prop_assert!(used + record::record_len(len) > RING);
                    }
                },
                Step::Flush => a.flush(),
                Step::Take(budget) => {
                    for (_, bytes) in take(&mut b, budget) {
                        let (number, len) = model.pop_front().unwrap();
                        prop_assert_eq!(bytes, vec![number; len]);
                    }
                }
            }
        }
        a.flush();
        while !model.is_empty() {
            let all = take(&mut b, 1000);
            prop_assert!(!all.is_empty());
            for (_, bytes) in all {
                let (number, len) = model.pop_front().unwrap();
                prop_assert_eq!(bytes, vec![number; len]);
            }
        }
        prop_assert!(take(&mut b, 1).is_empty());
    }
}

#[test]
fn a_side_that_takes_the_place_of_another_goes_on_where_that_one_was_seen_last() {
    let memory = wire();
    let (mut a, mut b) = ends(&memory);
    let number = |n: u8| vec![n; 100 + usize::from(n)];
    for n in 0..200u8 {
        send(&mut a, PLAIN, &number(n)).unwrap();
    }
    a.flush();
    assert_eq!(take(&mut b, 50).len(), 50);
    send(&mut b, PLAIN, &number(1)).unwrap();
    b.flush();
    // Both die: without a word, and with something that was not published.
    send(&mut a, PLAIN, &number(201)).unwrap();
    std::mem::forget((a, b));
    let (mut a, mut b) = ends(&memory);
    assert!(a.carrier() && b.carrier());
    send(&mut a, PLAIN, &number(202)).unwrap();
    a.flush();
    // First what was there when it attached.
    let all = [take(&mut b, 999), take(&mut b, 999)].concat();
    let rest: Vec<Vec<u8>> = all.into_iter().map(|(_, bytes)| bytes).collect();
    let wanted: Vec<Vec<u8>> = (50..200).chain([202]).map(number).collect();
    assert!(rest == wanted, "{} frames", rest.len());
    assert_eq!(take(&mut a, 9), [(PLAIN, number(1))]);
}

#[test]
fn a_wire_whose_positions_make_no_sense_is_not_attached_to() {
    let memory = wire();
    let [first, _] = RingMem::map_pair(memory.as_fd()).unwrap();
    for (tail, head) in [(8, 0), (16, 8), (0, 16), (RING as u64 + 16, 0)] {
        first.indices().tail.0.store(tail, Ordering::Relaxed);
        first.indices().head.0.store(head, Ordering::Relaxed);
        for side in 0..2 {
            let copy = memory.try_clone().unwrap();
            let port = ShmPort::attach("bad", side, copy, bell(), bell());
            assert!(
                matches!(port, Err(AttachError::Corrupt(_))),
                "{tail} {head}"
            );
        }
    }
}
