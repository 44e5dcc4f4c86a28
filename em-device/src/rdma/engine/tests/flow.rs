//! Waiting, retrying, giving up.

use super::lab::*;
use crate::rdma::engine::Notice;
use crate::rdma::packet::{Body, Verdict};
use crate::rdma::verbs::*;
use std::time::Duration;

fn pair() -> (Lab, MemKey, MemKey) {
    let mut lab = Lab::pair(Service::Rc);
    let rights =
        Rights::LOCAL_WRITE | Rights::REMOTE_WRITE | Rights::REMOTE_READ | Rights::REMOTE_ATOMIC;
    let a = lab.nodes[0].whole(rights);
    let b = lab.nodes[1].whole(rights);
    (lab, a, b)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn a_send_waits_for_a_receive() {
    let (mut lab, a, b) = pair();
    for n in 1..4 {
        lab.nodes[0].post(QP, request(n, send(), &[sge(a, BASE, 2000)]));
    }
    lab.settle();
    assert!(lab.nodes[0].completed().is_empty());
    for n in 60..63 {
        lab.nodes[1].post_receive(QP, n, &[sge(b, BASE, 2000)]);
    }
    // The code says 640 µs.
    lab.run(Duration::from_micros(630));
    assert!(lab.nodes[0].completed().is_empty());
    lab.run(ms(1));
    assert_eq!(lab.nodes[0].completed().len(), 3);
    let cookies: Vec<_> = lab.nodes[1].completed();
    assert_eq!(cookies, [60, 61, 62].map(|n| (n, Status::Success)));
    assert_eq!(lab.nodes[0].counters().receiver_not_ready, 1);
}

#[test]
fn a_send_without_a_receive_gives_up_after_its_retries() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(2, send(), &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(3, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.run(ms(100));
    let expected = [
        (1, Status::Success),
        (2, Status::RnrRetryExceeded),
        (3, Status::Flushed),
    ];
    assert_eq!(lab.nodes[0].completed(), expected);
    assert_eq!(lab.nodes[0].counters().receiver_not_ready, 3);
    assert_eq!(lab.nodes[1].state(QP), QpState::Rts);
}

#[test]
fn seven_rnr_retries_are_without_end() {
    let mut lab = Lab::new(2);
    for node in 0..2 {
        lab.add_qp(node, QP, Service::Rc, ReceiveFrom::Own);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let mut change = change((1 - node, QP));
            change.rnr_retry = Some(7);
            lab.modify(node, QP, state, &change).unwrap();
        }
    }
    lab.nodes[0].post(QP, request(1, send(), &[]));
    lab.run(ms(1000));
    assert!(lab.nodes[0].counters().receiver_not_ready > 1000);
    lab.nodes[1].post_receive(QP, 60, &[]);
    lab.run(ms(10));
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
}

#[test]
fn a_silent_peer_is_given_up_after_the_retries() {
    for gone in [false, true] {
        let (mut lab, a, b) = pair();
        lab.nodes[0].wire.faults.dead = true;
        lab.nodes[0].wire.faults.gone = gone;
        lab.nodes[0].post_receive(QP, 70, &[]);
        for n in 1..3 {
            lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
        }
        lab.run(ms(200));
        assert!(lab.nodes[0].completed().is_empty());
        lab.run(ms(100));
        let expected = [
            (1, Status::RetryExceeded),
            (2, Status::Flushed),
            (70, Status::Flushed),
        ];
        assert_eq!(lab.nodes[0].completed(), expected);
        assert_eq!(lab.nodes[0].counters().timeouts, 4);
        // Its receives are looked for, less and less often.
        let patience = lab.nodes[0].engine.patience(lab.now);
        assert!(patience.is_some_and(|time| time > ms(10)), "{patience:?}");
        assert!(!lab.nodes[0].engine.has_outstanding());
    }
}

#[test]
fn a_peer_that_does_not_come_to_what_was_sent_is_waited_for() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].wire.faults.held_up = true;
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.run(ms(5000));
    assert!(lab.nodes[0].completed().is_empty());
    assert_eq!(lab.nodes[0].counters().timeouts, 0);
    assert_eq!(lab.nodes[0].counters().retransmissions, 0);
    lab.nodes[0].wire.faults.held_up = false;
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    // What it took and does not answer is another matter.
    lab.nodes[0].wire.faults.held_up = true;
    lab.nodes[0].post(QP, request(2, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.run(ms(1000));
    lab.nodes[0].wire.outgoing.clear();
    lab.nodes[0].wire.faults.dead = true;
    lab.nodes[0].wire.faults.held_up = false;
    lab.run(ms(1000));
    assert_eq!(lab.nodes[0].completed(), [(2, Status::RetryExceeded)]);
}

#[test]
fn lost_answers_do_not_repeat_what_was_done() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].write(BASE, &5u64.to_ne_bytes());
    lab.nodes[1].wire.faults.dead = true;
    let add = Operation::FetchAdd {
        addr: BASE,
        key: b,
        add: 1,
    };
    lab.nodes[1].post_receive(QP, 60, &[]);
    lab.nodes[0].post(QP, request(1, add.clone(), &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(2, add, &[sge(a, BASE + 8, 8)]));
    lab.nodes[0].post(QP, request(3, send(), &[]));
    lab.settle();
    lab.nodes[1].wire.faults.dead = false;
    lab.run(ms(100));
    let expected = [1, 2, 3].map(|n| (n, Status::Success));
    assert_eq!(lab.nodes[0].completed(), expected);
    assert_eq!(lab.nodes[1].read(BASE, 8), 7u64.to_ne_bytes());
    assert_eq!(lab.nodes[0].read(BASE, 8), 5u64.to_ne_bytes());
    assert_eq!(lab.nodes[0].read(BASE + 8, 8), 6u64.to_ne_bytes());
    assert_eq!(lab.nodes[1].completed(), [(60, Status::Success)]);
}

#[test]
fn an_atomic_whose_answer_alone_is_lost_is_asked_for_again() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].write(BASE, &5u64.to_ne_bytes());
    let add = Operation::FetchAdd {
        addr: BASE,
        key: b,
        add: 1,
    };
    lab.nodes[1].wire.faults.filter =
        Some(|packet| matches!(packet.body, Body::Answer(Verdict::Atomic(_))));
    lab.nodes[0].post(QP, request(1, add, &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(2, write(BASE + 64, b), &[sge(a, BASE, 8)]));
    lab.round();
    lab.round();
    lab.nodes[1].wire.faults.filter = None;
    lab.run(ms(1));
    assert_eq!(
        lab.nodes[0].completed(),
        [1, 2].map(|n| (n, Status::Success))
    );
    assert_eq!(lab.nodes[0].read(BASE, 8), 5u64.to_ne_bytes());
    assert_eq!(lab.nodes[1].read(BASE, 8), 6u64.to_ne_bytes());
}

#[test]
fn a_missing_packet_is_asked_for_at_once() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].wire.faults.filter = Some(|packet| packet.psn == 0xff_ffff);
    for n in 0..10 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
    }
    lab.round();
    lab.nodes[0].wire.faults.filter = None;
    lab.settle();
    assert_eq!(lab.nodes[0].completed().len(), 10);
    assert_eq!(lab.nodes[0].counters().sequence_errors, 1);
}

#[test]
fn memory_that_the_peer_does_not_know_yet_is_waited_for() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].wire.faults.strange = true;
    lab.nodes[1].post_receive(QP, 60, &[sge(b, BASE, 100)]);
    lab.nodes[0].write(BASE, &pattern(1, 100));
    lab.nodes[0].post(QP, request(1, send(), &[sge(a, BASE, 100)]));
    lab.run(ms(1000));
    assert!(lab.nodes[0].completed().is_empty());
    lab.nodes[1].wire.faults.strange = false;
    lab.run(ms(6));
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::Success)]);
    assert_eq!(lab.nodes[1].read(BASE, 100), pattern(1, 100));
    lab.nodes[1].wire.faults.strange = true;
    lab.nodes[0].post(QP, request(2, write(BASE, b), &[sge(a, BASE, 100)]));
    lab.run(ms(2100));
    assert_eq!(lab.nodes[0].completed(), [(2, Status::RetryExceeded)]);
}

#[test]
fn a_full_fabric_is_tried_again() {
    let (mut lab, a, b) = pair();
    let bytes = pattern(3, 600_000);
    lab.nodes[0].write(BASE, &bytes);
    for node in &mut lab.nodes {
        node.wire.faults.full = 200;
    }
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 600_000)]));
    lab.run(ms(60_000));
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    assert!(lab.nodes[1].read(BASE, 600_000) == bytes);
}

#[test]
fn reads_under_way_are_no_more_than_allowed() {
    let (mut lab, a, b) = pair();
    let read = Operation::Read {
        addr: BASE,
        key: b,
        invalidate: None,
    };
    for n in 0..10 {
        lab.nodes[0].post(QP, request(n, read.clone(), &[sge(a, BASE, 8)]));
    }
    lab.nodes[0].wire.faults.dead = true;
    lab.round();
    assert_eq!(lab.nodes[0].wire.packets, 4);
    lab.nodes[0].wire.faults.dead = false;
    lab.run(ms(1000));
    assert_eq!(lab.nodes[0].completed().len(), 10);
}

#[test]
fn a_fence_waits_for_reads() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].write(BASE, b"fresh");
    let read = Operation::Read {
        addr: BASE,
        key: b,
        invalidate: None,
    };
    lab.nodes[0].post(QP, request(1, read, &[sge(a, BASE, 5)]));
    let mut fenced = request(2, write(BASE + 100, b), &[sge(a, BASE, 5)]);
    fenced.fence = true;
    lab.nodes[0].post(QP, fenced);
    lab.nodes[0].post(QP, request(3, Operation::Nop, &[]));
    lab.round();
    assert_eq!(lab.nodes[0].wire.packets, 1);
    lab.settle();
    assert_eq!(lab.nodes[1].read(BASE + 100, 5), b"fresh");
    assert_eq!(
        lab.nodes[0].completed(),
        [1, 2, 3].map(|n| (n, Status::Success))
    );
}

#[test]
fn regions_change_in_the_order_of_the_queue() {
    let (mut lab, _, b) = pair();
    let key = lab.nodes[0].whole(Rights::NONE);
    let change = |variant: Option<u8>, valid| {
        Operation::Register(Box::new(RegionChange {
            key,
            variant,
            pd: None,
            rights: None,
            start: None,
            len: None,
            translation: None,
            valid,
        }))
    };
    let renewed = MemKey(key.0 & !0xff | 9);
    lab.nodes[0].post(QP, request(0, Operation::Nop, &[]));
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(key, BASE, 100)]));
    lab.nodes[0].post(QP, request(2, change(None, false), &[]));
    lab.nodes[0].post(QP, request(3, change(Some(9), true), &[]));
    lab.nodes[0].post(QP, request(4, write(BASE, b), &[sge(renewed, BASE, 100)]));
    lab.nodes[0].post(QP, request(5, write(BASE, b), &[sge(key, BASE, 100)]));
    lab.settle();
    let mut expected = [0, 1, 2, 3, 4, 5].map(|n| (n, Status::Success));
    expected[5].1 = Status::LocalProtection;
    assert_eq!(lab.nodes[0].completed(), expected);
}

#[test]
fn a_region_of_another_domain_cannot_be_changed() {
    let (mut lab, ..) = pair();
    let index = lab.nodes[0].engine.regions_mut().allocate().unwrap();
    let region = Region {
        key: MemKey(index << 8),
        pd: Pd(99),
        rights: Rights::NONE,
        start: 0,
        len: 1,
        translation: Translation::Identity,
        capacity: 1 << 20,
        valid: true,
    };
    lab.nodes[0].engine.regions_mut().insert(region).unwrap();
    let change = RegionChange {
        key: MemKey(index << 8),
        variant: None,
        pd: Some(PD),
        rights: None,
        start: None,
        len: None,
        translation: None,
        valid: true,
    };
    let operation = Operation::Register(Box::new(change));
    lab.nodes[0].post(QP, request(1, operation, &[]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Bind)]);
}

#[test]
fn draining_finishes_what_was_begun_and_tells() {
    let (mut lab, a, b) = pair();
    for n in 0..40 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
    }
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    lab.modify(0, QP, QpState::Sqd, &QpChange::default())
        .unwrap();
    assert!(lab.nodes[0].engine.qp(QP).unwrap().draining);
    let refused = lab.modify(0, QP, QpState::Sqd, &QpChange::default());
    assert!(refused.is_err());
    lab.settle();
    assert_eq!(lab.nodes[0].completed().len(), 32);
    assert!(lab.nodes[0].notices.contains(&Notice::SendQueueDrained(QP)));
    assert!(!lab.nodes[0].engine.qp(QP).unwrap().draining);
    lab.modify(0, QP, QpState::Rts, &QpChange::default())
        .unwrap();
    lab.settle();
    assert_eq!(lab.nodes[0].completed().len(), 8);
}

/// A request that gives a key a list of pages and leaves it out of use.
fn listing(cookie: u32, key: MemKey, pages: &std::sync::Arc<[u64]>) -> WorkRequest {
    let change = RegionChange {
        key,
        variant: None,
        pd: None,
        rights: None,
        start: None,
        len: None,
        translation: Some(Translation::Pages {
            shift: 12,
            pages: pages.clone(),
            offset: 0,
        }),
        valid: false,
    };
    request(cookie, Operation::Register(Box::new(change)), &[])
}

#[test]
fn registrations_that_wait_to_complete_hold_no_lists() {
    let (mut lab, a, b) = pair();
    let key = lab.nodes[0].whole(Rights::NONE);
    let pages: std::sync::Arc<[u64]> = [0x5000].into();
    lab.nodes[0].post(QP, listing(0, key, &pages));
    lab.settle();
    lab.nodes[0].wire.faults.dead = true;
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
    for n in 2..30 {
        lab.nodes[0].post(QP, listing(n, key, &pages));
    }
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(0, Status::Success)]);
    assert!(lab.nodes[0].engine.has_outstanding());
    assert_eq!(
        std::sync::Arc::strong_count(&pages),
        2,
        "here and the region's"
    );
}

#[test]
fn one_turn_makes_lists_of_some_bytes_only() {
    let (mut lab, ..) = pair();
    lab.add_qp(0, QpNum(7), Service::Rc, ReceiveFrom::Own);
    lab.connect((0, QpNum(7)), (1, QP), Service::Rc);
    let key = lab.nodes[0].whole(Rights::NONE);
    let pages: std::sync::Arc<[u64]> = vec![0; 1 << 20].into();
    for n in 0..40 {
        lab.nodes[0].post(QP, listing(n, key, &pages));
        lab.nodes[0].post(QpNum(7), listing(100 + n, key, &pages));
    }
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    let first = lab.nodes[0].completed().len();
    assert!((1..20).contains(&first), "{first}");
    assert_eq!(lab.nodes[0].engine.patience(now), Some(ms(0)));
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    let second = lab.nodes[0].completed();
    assert!(
        second.iter().any(|(cookie, _)| *cookie >= 100),
        "{second:?}"
    );
    lab.settle();
    assert_eq!(lab.nodes[0].completed().len(), 80 - first - second.len());
}
