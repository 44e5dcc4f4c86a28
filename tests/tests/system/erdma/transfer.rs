//! What arrives is what was sent.

use super::{BUFFER, Pair};
use crate::rdma::transfer::CASES;
use distdpu_tests::erdma::Send;
use distdpu_tests::memory::Shape;
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::Guest;

/// Guests whose memory lies in pieces, differently on each side.
fn scattered(user: bool) -> Pair {
    let shaped = |shape| Guest {
        shape,
        ..Guest::default()
    };
    Pair::with(user, shaped(Shape::Pages), shaped(Shape::Split))
}

#[test]
fn writes_arrive_whole_and_touch_nothing_else() {
    for user in [true, false] {
        let mut pair = scattered(user);
        let data = pair.a.fill(0x11);
        for (from, to, len) in CASES {
            let mut expected = pair.b.fill(0xee);
            let remote = pair.b.buffer;
            let part = pair.a.part(from, len);
            let first = pair
                .a
                .send(Send::Write(remote.address + to, remote.key, None), &[part]);
            let done = pair.a.sends.success().unwrap();
            let sent = (done.opcode, done.receive, done.index, done.qpn);
            assert_eq!(sent, (0, false, first, pair.a.qp.number), "{done:?}");
            expected[to as usize..][..len as usize]
                .copy_from_slice(&data[from as usize..][..len as usize]);
            let whole = pair.b.bytes(0, BUFFER as usize) == expected;
            assert!(whole, "{len} bytes from {from} to {to}");
        }
    }
}

#[test]
fn reads_bring_what_is_there() {
    let mut pair = scattered(true);
    let data = pair.b.fill(0x22);
    for (to, from, len) in CASES {
        let mut expected = pair.a.fill(0xdd);
        let remote = pair.b.buffer;
        let part = pair.a.part(to, len);
        pair.a
            .send(Send::Read(remote.address + from, remote.key), &[part]);
        assert_eq!(pair.a.sends.success().unwrap().opcode, 1);
        expected[to as usize..][..len as usize]
            .copy_from_slice(&data[from as usize..][..len as usize]);
        let whole = pair.a.bytes(0, BUFFER as usize) == expected;
        assert!(whole, "{len} bytes from {from} to {to}");
    }
}

#[test]
fn sends_fill_receives_in_order() {
    for user in [true, false] {
        let mut pair = Pair::new(user);
        let data = pair.a.fill(0x33);
        for n in 0..20 {
            assert_eq!(pair.b.receive(n * 10_000, 10_000), n as u16);
        }
        let mut signaled = Vec::new();
        for n in 0..20u32 {
            let immediate = (n % 3 == 0).then_some(0x5102_0304 + n);
            // One to six pieces.
            let mut pieces = vec![pair.a.part(n.into(), 400 * n)];
            for piece in 0..n % 6 {
                pieces.push(pair.a.part(100_000 + u64::from(piece) * 1000, n));
            }
            let signal = n % 4 == 3;
            let first = pair
                .a
                .qp
                .post_send(Send::Send(immediate), &pieces, signal)
                .unwrap();
            signaled.extend(signal.then_some(first));
        }
        pair.a.driver.ring(&pair.a.qp).unwrap();
        for n in 0..20u32 {
            let done = pair.b.receives.success().unwrap();
            let opcode = if n % 3 == 0 { 12 } else { 4 };
            let len = 400 * n + n * (n % 6);
            let got = (done.opcode, done.receive, done.index, done.len);
            assert_eq!(got, (opcode, true, n as u16, len), "{done:?}");
            assert_eq!(done.qpn, pair.b.qp.number);
            if n % 3 == 0 {
                assert_eq!(done.immediate, 0x5102_0304 + n);
            }
            let got = pair.b.bytes(u64::from(n) * 10_000, len as usize);
            let (first, rest) = got.split_at(400 * n as usize);
            assert!(first == &data[n as usize..][..400 * n as usize]);
            for (piece, chunk) in rest.chunks(n.max(1) as usize).enumerate() {
                assert!(chunk == &data[100_000 + piece * 1000..][..n as usize]);
            }
        }
        for first in signaled {
            assert_eq!(pair.a.sends.success().unwrap().index, first);
        }
        assert_eq!(pair.a.sends.poll().unwrap(), None, "the others are silent");
    }
}

#[test]
fn an_empty_message_needs_no_buffers() {
    let mut pair = Pair::new(true);
    let (qp, driver) = (&mut pair.b.qp, &mut pair.b.driver);
    driver.receive(qp, None).unwrap();
    driver.receive(qp, None).unwrap();
    pair.a.send(Send::Send(None), &[]);
    pair.a.send(Send::Write(0, 0, Some(9)), &[]);
    pair.a.send(Send::Write(0, 0, None), &[]);
    for opcode in [4, 5] {
        let done = pair.b.receives.success().unwrap();
        assert_eq!((done.opcode, done.len), (opcode, 0));
    }
    for _ in 0..3 {
        pair.a.sends.success().unwrap();
    }
}

#[test]
fn a_write_with_immediate_takes_a_receive() {
    let mut pair = Pair::new(true);
    let data = pair.a.fill(0x44);
    pair.b.receive(0, 16);
    let remote = pair.b.buffer;
    let part = pair.a.part(0, 3000);
    let send = Send::Write(remote.address + 1000, remote.key, Some(0x0102_0377));
    pair.a.send(send, &[part]);
    let done = pair.b.receives.success().unwrap();
    let got = (done.opcode, done.immediate, done.len);
    assert_eq!(got, (5, 0x0102_0377, 3000));
    assert_eq!(pair.a.sends.success().unwrap().opcode, 9);
    assert!(pair.b.bytes(1000, 3000) == data[..3000]);
    assert!(pair.b.bytes(0, 16) == [0; 16]);
}

#[test]
fn inline_data_is_taken_from_entries_of_every_size_around_the_ring() {
    let mut pair = Pair::new(true);
    let remote = pair.b.buffer;
    for n in 0..400u64 {
        let text: Vec<u8> = (0..n % 97).map(|byte| (byte * 7 + n) as u8).collect();
        let send = Send::Write(remote.address + n * 97, remote.key, None);
        let first = pair.a.qp.post_inline(send, &text, true).unwrap();
        pair.a.driver.ring(&pair.a.qp).unwrap();
        assert_eq!(pair.a.sends.success().unwrap().index, first);
        assert!(pair.b.bytes(n * 97, text.len()) == text, "{n}");
    }
    // The send queue has 256 blocks: it went round, and so will the index of 16 bits.
    for n in 0..30_000u32 {
        let send = Send::Write(remote.address, remote.key, None);
        let text = n.to_le_bytes().repeat(20);
        let signaled = n % 16 == 15;
        pair.a.qp.post_inline(send, &text, signaled).unwrap();
        if signaled {
            pair.a.driver.ring(&pair.a.qp).unwrap();
            pair.a.sends.success().unwrap();
            assert!(pair.b.bytes(0, 80) == text, "{n}");
        }
    }
    assert_eq!(pair.a.sends.poll().unwrap(), None);
}

#[test]
fn atomics_change_memory_once_and_bring_the_old_value() {
    let mut pair = Pair::new(true);
    let remote = pair.b.buffer;
    let at = remote.address + 64;
    pair.b
        .driver
        .memory
        .write(at, &100u64.to_le_bytes())
        .unwrap();
    let mut all = Vec::new();
    for send in [
        Send::FetchAdd(at, remote.key, 5),
        Send::CompareSwap(at, remote.key, 105, 7),
        Send::CompareSwap(at, remote.key, 105, 8),
        Send::FetchAdd(at, remote.key, u64::MAX),
    ] {
        let old = pair.a.part(0, 8);
        pair.a.send(send, &[old]);
        let done = pair.a.sends.success().unwrap();
        assert_eq!(done.opcode, send.opcode());
        all.push(pair.a.bytes(0, 8)[0]);
    }
    assert_eq!(all, [100, 105, 7, 7]);
    assert_eq!(pair.b.bytes(64, 8), 6u64.to_le_bytes());
}

#[test]
fn a_message_waits_for_a_receive() {
    for send in [Send::Send(Some(1)), Send::Write(0, 0, Some(1))] {
        for user in [true, false] {
            let mut pair = Pair::new(user);
            let data = pair.a.fill(0x77);
            let remote = pair.b.buffer;
            let send = match send {
                Send::Write(..) => Send::Write(remote.address, remote.key, Some(1)),
                send => send,
            };
            let part = pair.a.part(0, 5000);
            pair.a.send(send, &[part]);
            std::thread::sleep(QUIET);
            assert_eq!(pair.a.sends.poll().unwrap(), None);
            pair.b.receive(0, 8192);
            assert_eq!(pair.b.receives.success().unwrap().len, 5000);
            pair.a.sends.success().unwrap();
            assert!(pair.b.bytes(0, 5000) == data[..5000]);
        }
    }
}

#[test]
fn a_queue_pair_that_is_only_ready_to_receive_serves() {
    let mut pair = Pair::new(true);
    let b = &mut pair.b;
    b.qp = b
        .driver
        .create_qp(super::plan(b.pd, true), &b.sends, &b.receives)
        .unwrap();
    let number = b.qp.number;
    let a = &mut pair.a;
    a.qp = a
        .driver
        .create_qp(super::plan(a.pd, true), &a.sends, &a.receives)
        .unwrap();
    let own = a.qp.number;
    pair.b
        .driver
        .to_rtr(&pair.b.qp, super::path(0), own)
        .unwrap();
    pair.b.receive(4096, 4096);
    pair.a.connect(1, number);
    pair.works();
    let part = pair.a.part(0, 100);
    pair.a.send(Send::Send(None), &[part]);
    assert_eq!(pair.b.receives.success().unwrap().len, 100);
}

#[test]
fn an_armed_queue_brings_one_event_and_one_interrupt() {
    let mut pair = Pair::new(true);
    let remote = pair.b.buffer;
    let part = pair.a.part(0, 8);
    let write = Send::Write(remote.address, remote.key, None);
    for _ in 0..3 {
        pair.a.driver.arm(&mut pair.a.sends, false).unwrap();
        for _ in 0..3 {
            pair.a.qp.post_send(write, &[part], true).unwrap();
        }
        pair.a.driver.ring(&pair.a.qp).unwrap();
        let driver = &mut pair.a.driver;
        wait_for("an interrupt", SOON, || driver.interrupted(1).then_some(())).unwrap();
        let number = pair.a.sends.number;
        assert_eq!(driver.completion_event(1).unwrap(), Some(number));
        assert_eq!(driver.completion_event(1).unwrap(), None);
        for _ in 0..3 {
            pair.a.sends.success().unwrap();
        }
        assert!(!pair.a.driver.interrupted(1));
    }
    // Armed while there is something that was not polled: at once.
    pair.a.send(write, &[part]);
    std::thread::sleep(QUIET);
    pair.a.driver.arm(&mut pair.a.sends, false).unwrap();
    let driver = &mut pair.a.driver;
    wait_for("an interrupt", SOON, || driver.interrupted(1).then_some(())).unwrap();
}

#[test]
fn a_queue_armed_again_before_it_is_polled_waits_for_a_new_entry() {
    let mut pair = Pair::new(true);
    let remote = pair.b.buffer;
    let part = pair.a.part(0, 8);
    let write = Send::Write(remote.address, remote.key, None);
    let event = |pair: &mut Pair| {
        let driver = &mut pair.a.driver;
        let signalled = || driver.interrupted(1).then_some(());
        wait_for("an interrupt", SOON, signalled).unwrap();
        let number = pair.a.sends.number;
        assert_eq!(driver.completion_event(1).unwrap(), Some(number));
        assert_eq!(driver.completion_event(1).unwrap(), None);
    };
    pair.a.driver.arm(&mut pair.a.sends, false).unwrap();
    for _ in 0..3 {
        pair.a.send(write, &[part]);
        event(&mut pair);
        // perftest's order: the next event is asked for before the entry of this one is taken.
        pair.a.driver.arm(&mut pair.a.sends, false).unwrap();
        std::thread::sleep(QUIET);
        assert!(
            !pair.a.driver.interrupted(1),
            "an event without a new entry"
        );
        pair.a.sends.success().unwrap();
    }
}

#[test]
fn a_queue_armed_for_solicited_messages_sleeps_through_others() {
    let mut pair = Pair::new(true);
    for n in 0..4 {
        pair.b.receive(n * 100, 100);
    }
    pair.b.driver.arm(&mut pair.b.receives, true).unwrap();
    let part = pair.a.part(0, 8);
    pair.a.send(Send::Send(None), &[part]);
    pair.a.sends.success().unwrap();
    std::thread::sleep(QUIET);
    assert!(!pair.b.driver.interrupted(1));
    pair.a
        .qp
        .post_flagged(Send::Send(None), part, 1 << 23)
        .unwrap();
    pair.a.driver.ring(&pair.a.qp).unwrap();
    let driver = &mut pair.b.driver;
    wait_for("an interrupt", SOON, || driver.interrupted(1).then_some(())).unwrap();
    let number = pair.b.receives.number;
    assert_eq!(driver.completion_event(1).unwrap(), Some(number));
}
