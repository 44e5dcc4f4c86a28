//! Each fault ends the request with its syndrome and the queue pair with an event; what is posted is flushed.

use super::{Pair, plan};
use distdpu_tests::erdma::{Pages, Send, rights, state, syndrome};
use distdpu_tests::time::QUIET;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

const REMOTE: RangeInclusive<u8> = syndrome::REMOTE_KEY..=syndrome::REMOTE_DOMAIN;
const LOCAL: RangeInclusive<u8> = syndrome::LOCAL_KEY..=syndrome::LOCAL_DOMAIN;

/// Posts a request that is not signaled with one more behind it; answers the syndrome of the first. The other is
/// flushed, a queue pair in error hears of it by an event, and flushes what is posted later.
fn fail(pair: &mut Pair, send: Send<'_>, segment: super::Segment) -> u8 {
    let first = pair.a.qp.post_send(send, &[segment], false).unwrap();
    let second = pair.a.qp.post_send(send, &[segment], false).unwrap();
    pair.a.driver.ring(&pair.a.qp).unwrap();
    let done = pair.a.sends.wait().unwrap();
    assert_eq!(
        (done.index, done.opcode),
        (first, send.opcode()),
        "{done:?}"
    );
    assert_eq!((done.qpn, done.receive), (pair.a.qp.number, false));
    let next = pair.a.sends.wait().unwrap();
    assert_eq!((next.index, next.syndrome), (second, syndrome::FLUSHED));
    let driver = &mut pair.a.driver;
    assert_eq!(driver.qp_state(&pair.a.qp).unwrap(), state::ERROR);
    let event = driver.async_event().unwrap();
    assert_eq!(event.number, pair.a.qp.number);
    assert_ne!(event.kind, 3, "that would be about a completion queue");
    let third = pair.a.send(send, &[segment]);
    let next = pair.a.sends.wait().unwrap();
    assert_eq!((next.index, next.syndrome), (third, syndrome::FLUSHED));
    done.syndrome
}

#[test]
fn a_bad_remote_key_or_range_is_a_remote_access_error() {
    let mut pair = Pair::new(true);
    for (offset, key) in [
        (0, 1),
        (0, 0x100),
        ((8 << 20) - 4, 0),
        (1 << 40, 0),
        (u64::MAX - (1 << 20), 0),
    ] {
        let remote = pair.b.buffer;
        let part = pair.a.part(0, 8);
        let write = Send::Write(remote.address.wrapping_add(offset), remote.key ^ key, None);
        let found = fail(&mut pair, write, part);
        assert!(
            REMOTE.contains(&found),
            "offset {offset:#x} key ^ {key}: {found}"
        );
        renew(&mut pair);
    }
    for send in [
        Send::Read(pair.b.buffer.address, pair.b.buffer.key ^ 1),
        Send::FetchAdd(pair.b.buffer.address, pair.b.buffer.key ^ 1, 1),
    ] {
        let part = pair.a.part(0, 8);
        let found = fail(&mut pair, send, part);
        assert!(REMOTE.contains(&found), "{send:?}: {found}");
        renew(&mut pair);
    }
}

/// Other queue pairs in the place of the ones in error.
fn renew(pair: &mut Pair) {
    for side in [&mut pair.a, &mut pair.b] {
        side.driver.destroy_qp(&side.qp).unwrap();
        side.qp = side
            .driver
            .create_qp(plan(side.pd, true), &side.sends, &side.receives)
            .unwrap();
        while side.receives.poll().unwrap().is_some() {}
        side.driver.unexpected_async_events().unwrap();
    }
    pair.connect();
    pair.works();
}

#[test]
fn a_bad_local_key_or_range_is_a_local_access_error() {
    let mut pair = Pair::new(true);
    let (key, address, _) = pair.a.part(0, 8);
    for segment in [
        (key ^ 1, address, 8),
        (key, address - 1, 8),
        (key, address, 9 << 20),
    ] {
        let remote = pair.b.buffer;
        let found = fail(
            &mut pair,
            Send::Write(remote.address, remote.key, None),
            segment,
        );
        assert!(LOCAL.contains(&found), "{segment:x?}: {found}");
        let b = &mut pair.b;
        assert_eq!(
            b.driver.qp_state(&b.qp).unwrap(),
            state::RTS,
            "the peer is fine"
        );
        renew(&mut pair);
    }
}

#[test]
fn a_key_of_another_domain_or_without_the_right_is_refused() {
    let mut pair = Pair::new(true);
    let at = pair.b.buffer.address;
    let place = (at, at, 4096);
    let b = &mut pair.b;
    let foreign = b
        .driver
        .register_at(9, place, rights::ALL, Pages::Inline)
        .unwrap();
    let some = rights::LOCAL_READ | rights::REMOTE_READ;
    let read_only = b
        .driver
        .register_at(b.pd, place, some, Pages::Inline)
        .unwrap();
    let no_atomics = rights::ALL & !rights::ATOMIC;
    let no_atomics = b
        .driver
        .register_at(b.pd, place, no_atomics, Pages::Inline)
        .unwrap();
    let part = pair.a.part(0, 8);
    pair.a.send(Send::Read(at, read_only), &[part]);
    pair.a.sends.success().unwrap();
    for send in [
        Send::Write(at, foreign, None),
        Send::Read(at, foreign),
        Send::Write(at, read_only, None),
        Send::FetchAdd(at, no_atomics, 1),
    ] {
        let found = fail(&mut pair, send, part);
        assert!(REMOTE.contains(&found), "{send:?}: {found}");
        renew(&mut pair);
    }
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let mut pair = Pair::new(true);
    pair.b.receive(0, 100);
    let part = pair.a.part(0, 101);
    assert_ne!(fail(&mut pair, Send::Send(None), part), syndrome::FLUSHED);
    let done = pair.b.receives.wait().unwrap();
    assert!(done.receive && done.syndrome != 0, "{done:?}");
    assert_eq!(pair.b.bytes(100, 8), [0; 8]);
}

#[test]
fn an_error_by_command_flushes_what_is_posted_and_what_comes_later() {
    for user in [true, false] {
        let mut pair = Pair::new(user);
        for n in 0..5 {
            pair.b.receive(n * 100, 100);
        }
        pair.b
            .driver
            .change_state(&pair.b.qp, state::ERROR)
            .unwrap();
        for n in 0..5 {
            let done = pair.b.receives.wait().unwrap();
            let got = (done.receive, done.syndrome, done.index);
            assert_eq!(got, (true, syndrome::FLUSHED, n));
        }
        assert_eq!(pair.b.receive(0, 100), 5);
        let part = pair.b.part(0, 8);
        let first = pair.b.send(Send::Send(None), &[part]);
        if !user {
            pair.b.driver.reflush(&pair.b.qp).unwrap();
        }
        let done = pair.b.receives.wait().unwrap();
        assert_eq!((done.syndrome, done.index), (syndrome::FLUSHED, 5));
        let done = pair.b.sends.wait().unwrap();
        assert_eq!((done.syndrome, done.index), (syndrome::FLUSHED, first));
        if !user {
            // Again, for nothing.
            pair.b.driver.reflush(&pair.b.qp).unwrap();
        }
        std::thread::sleep(QUIET);
        let more = (
            pair.b.receives.poll().unwrap(),
            pair.b.sends.poll().unwrap(),
        );
        assert_eq!(more, (None, None), "flushed twice");
    }
}

#[test]
fn a_kernel_s_queue_is_flushed_without_its_doorbells() {
    let mut pair = Pair::new(false);
    pair.b
        .driver
        .change_state(&pair.b.qp, state::ERROR)
        .unwrap();
    let part = pair.b.part(0, 8);
    for _ in 0..3 {
        pair.b
            .qp
            .post_send(Send::Send(None), &[part], false)
            .unwrap();
        pair.b.qp.post_receive(Some(part)).unwrap();
    }
    pair.b.driver.record_only(&pair.b.qp).unwrap();
    pair.b.driver.reflush(&pair.b.qp).unwrap();
    for _ in 0..3 {
        assert_eq!(pair.b.sends.wait().unwrap().syndrome, syndrome::FLUSHED);
        assert_eq!(pair.b.receives.wait().unwrap().syndrome, syndrome::FLUSHED);
    }
}

#[test]
fn a_queue_pair_works_again_after_a_reset() {
    let mut pair = Pair::new(false);
    let remote = pair.b.buffer;
    let part = pair.a.part(0, 8);
    pair.a
        .send(Send::Write(remote.address, remote.key ^ 1, None), &[part]);
    assert!(REMOTE.contains(&pair.a.sends.wait().unwrap().syndrome));
    for side in [&mut pair.a, &mut pair.b] {
        side.driver.change_state(&side.qp, state::RESET).unwrap();
        side.qp.forget().unwrap();
    }
    pair.connect();
    pair.works();
}

#[test]
fn a_peer_that_is_gone_holds_up_no_command() {
    let pair = Pair::new(true);
    let remote = pair.b.buffer;
    // Its VMM ends.
    drop(pair.b);
    let part = pair.a.part(0, 8);
    let mut a = pair.a;
    a.send(Send::Write(remote.address, remote.key, None), &[part]);
    let begin = Instant::now();
    for _ in 0..20 {
        a.driver.statistics().unwrap();
        let buffer = a.driver.register(a.pd, 4096).unwrap();
        a.driver.deregister(buffer.key).unwrap();
    }
    let qp = a
        .driver
        .create_qp(plan(a.pd, true), &a.sends, &a.receives)
        .unwrap();
    a.driver.destroy_qp(&qp).unwrap();
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "a driver waits 15 s, then never again"
    );
    // It would be sent again for half a minute; the application gives up before.
    a.driver.change_state(&a.qp, state::ERROR).unwrap();
    let done = a.sends.wait().unwrap();
    assert!(
        [syndrome::FLUSHED, syndrome::RETRIES].contains(&done.syndrome),
        "{done:?}"
    );
    a.driver.destroy_qp(&a.qp).unwrap();
}
