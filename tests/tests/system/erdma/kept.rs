//! EMs that are killed under the drivers: neither of them notices.

use super::{Pair, plan};
use crate::recovery::{kills, replace};
use distdpu_tests::erdma::{Pages, Send, rights};
use distdpu_tests::time::QUIET;

/// Everything that moves data, once, checked.
fn round(pair: &mut Pair, seed: u8) {
    let data = pair.a.fill(seed);
    let remote = pair.b.buffer;
    let len = 30_000;
    let receive = pair.b.receive(0, len);
    let part = pair.a.part(seed.into(), len);
    pair.a.send(Send::Send(Some(seed.into())), &[part]);
    pair.a.send(
        Send::Write(remote.address + (1 << 20), remote.key, None),
        &[part],
    );
    let back = pair.a.part(2 << 20, len);
    pair.a
        .send(Send::Read(remote.address + (1 << 20), remote.key), &[back]);
    for opcode in [3, 0, 1] {
        assert_eq!(pair.a.sends.success().unwrap().opcode, opcode);
    }
    let done = pair.b.receives.success().unwrap();
    let got = (done.index, done.len, done.immediate);
    assert_eq!(got, (receive, len, seed.into()));
    let expected = &data[seed.into()..][..len as usize];
    assert!(pair.b.bytes(0, len as usize) == expected);
    assert!(pair.b.bytes(1 << 20, len as usize) == expected);
    assert!(pair.a.bytes(2 << 20, len as usize) == expected);
}

#[test]
fn data_moves_on_after_either_em_was_killed() {
    for user in [true, false] {
        let mut pair = Pair::new(user);
        for n in 0..kills(6) {
            round(&mut pair, n as u8 + 1);
            replace(&pair.dpu, n % 2);
            round(&mut pair, n as u8 + 100);
        }
    }
}

#[test]
fn commands_and_events_go_on() {
    let mut pair = Pair::new(true);
    for _ in 0..kills(3) {
        replace(&pair.dpu, 0);
        let a = &mut pair.a;
        a.driver.statistics().unwrap();
        let qp = a
            .driver
            .create_qp(plan(a.pd, true), &a.sends, &a.receives)
            .unwrap();
        a.driver.destroy_qp(&qp).unwrap();
        let more = a.driver.register(a.pd, 40_960).unwrap();
        a.driver.deregister(more.key).unwrap();
        assert_eq!(a.driver.unexpected_async_events().unwrap(), []);
    }
    // An error after it is told of as before.
    let part = pair.a.part(0, 8);
    let remote = pair.b.buffer;
    pair.a
        .send(Send::Write(remote.address, remote.key ^ 1, None), &[part]);
    assert_ne!(pair.a.sends.wait().unwrap().syndrome, 0);
    let event = pair.a.driver.async_event().unwrap();
    assert_eq!(event.number, pair.a.qp.number);
}

#[test]
fn what_is_outstanding_is_done_once() {
    let mut pair = Pair::new(true);
    let data = pair.a.fill(0x19);
    for n in 0..kills(4) {
        // A send without a receive, and what is behind it.
        let part = pair.a.part(0, 5000);
        pair.a.send(Send::Send(None), &[part]);
        let remote = pair.b.buffer;
        let old = pair.a.part(1 << 20, 8);
        let counter = 4 << 20;
        pair.a.send(
            Send::FetchAdd(remote.address + counter, remote.key, 1),
            &[old],
        );
        std::thread::sleep(QUIET);
        replace(&pair.dpu, n % 2);
        assert_eq!(pair.a.sends.poll().unwrap(), None);
        pair.b.receive(0, 8192);
        assert_eq!(pair.b.receives.success().unwrap().len, 5000);
        for opcode in [2, 18] {
            assert_eq!(pair.a.sends.success().unwrap().opcode, opcode);
        }
        assert!(pair.b.bytes(0, 5000) == data[..5000]);
        assert_eq!(pair.b.bytes(counter, 8), (n as u64 + 1).to_le_bytes());
    }
    std::thread::sleep(QUIET);
    let more = (
        pair.a.sends.poll().unwrap(),
        pair.b.receives.poll().unwrap(),
    );
    assert_eq!(more, (None, None), "completed twice");
}

#[test]
fn regions_of_every_kind_are_kept() {
    let mut pair = Pair::new(false);
    let data = pair.a.fill(0x29);
    let b = &mut pair.b;
    let place = (0x7000_0000_0123, b.buffer.address + 0x123, 3 << 20);
    let deep = b
        .driver
        .register_at(b.pd, place, rights::ALL, Pages::TwoLevels)
        .unwrap();
    let (fast, _) = b.driver.fast_region(b.pd, 4).unwrap();
    let pages = [b.buffer.address + (5 << 20), b.buffer.address + (6 << 20)];
    let register = Send::Register(fast, 0x9000, 8192, rights::ALL, &pages);
    pair.b.send(register, &[]);
    pair.b.sends.success().unwrap();
    replace(&pair.dpu, 1);
    let part = pair.a.part(0, 2 << 20);
    pair.a.send(Send::Write(place.0 + 9, deep, None), &[part]);
    let part = pair.a.part(77, 8192);
    pair.a.send(Send::Write(0x9000, fast, None), &[part]);
    for _ in 0..2 {
        pair.a.sends.success().unwrap();
    }
    assert!(pair.b.bytes(0x123 + 9, 2 << 20) == data[..2 << 20]);
    assert!(pair.b.bytes(5 << 20, 4096) == data[77..][..4096]);
    assert!(pair.b.bytes(6 << 20, 4096) == data[77 + 4096..][..4096]);
}
