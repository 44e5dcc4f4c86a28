//! Reliable connections: every operation moves the right bytes and completes.

use super::lab::*;
use crate::rdma::engine::Notice;
use crate::rdma::verbs::*;

const ALL: fn() -> Rights =
    || Rights::LOCAL_WRITE | Rights::REMOTE_WRITE | Rights::REMOTE_READ | Rights::REMOTE_ATOMIC;

fn pair() -> (Lab, MemKey, MemKey) {
    let mut lab = Lab::pair(Service::Rc);
    let a = lab.nodes[0].whole(ALL());
    let b = lab.nodes[1].whole(ALL());
    (lab, a, b)
}

#[test]
fn a_write_copies_and_completes_at_the_requester_only() {
    let (mut lab, a, b) = pair();
    for (n, len) in [1usize, 8, 64, 65, 1024, 1025, 5000, 300_000, 3_000_000]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(n as u64, len);
        lab.nodes[0].write(BASE + 3, &bytes);
        let operation = write(BASE + 0x77_7777, b);
        lab.nodes[0].post(
            QP,
            request(n as u32, operation, &[sge(a, BASE + 3, len as u32)]),
        );
        lab.settle();
        assert!(lab.nodes[1].read(BASE + 0x77_7777, len) == bytes, "{len}");
        let completions = lab.nodes[0].take_completions();
        assert_eq!(completions.len(), 1, "{len}");
        assert_eq!(completions[0].status, Status::Success);
        assert_eq!(
            (completions[0].done, completions[0].len),
            (Done::Write, len as u32)
        );
        assert_eq!((completions[0].qp, completions[0].tag), (QP, QP.0 + 1000));
    }
    assert!(lab.nodes[1].take_completions().is_empty());
    assert!(!lab.nodes[0].engine.has_outstanding());
    assert_eq!(lab.nodes[0].counters().retransmissions, 0);
    assert_eq!(lab.nodes[1].counters().served_writes, 9);
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let (mut lab, a, b) = pair();
    for (n, len) in [1usize, 100, 1024, 70_001, 1_000_000]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(90 + n as u64, len);
        lab.nodes[1].write(BASE + 0x7f_ff01, &bytes);
        let operation = Operation::Read {
            addr: BASE + 0x7f_ff01,
            key: b,
            invalidate: None,
        };
        lab.nodes[0].post(
            QP,
            request(n as u32, operation, &[sge(a, BASE + 9, len as u32)]),
        );
        lab.settle();
        assert!(lab.nodes[0].read(BASE + 9, len) == bytes, "{len}");
        assert_eq!(lab.nodes[0].completed(), [(n as u32, Status::Success)]);
    }
}

#[test]
fn a_send_fills_the_receive_that_was_posted_first() {
    let (mut lab, a, b) = pair();
    let bytes = pattern(5, 9000);
    lab.nodes[0].write(BASE, &bytes);
    lab.nodes[1].post_receive(
        QP,
        50,
        &[
            sge(b, BASE + 1, 4000),
            sge(b, BASE + 0x9000, 0),
            sge(b, BASE + 0x8001, 6000),
        ],
    );
    lab.nodes[1].post_receive(QP, 51, &[]);
    let operation = Operation::Send {
        immediate: Some(0xdead_beef),
        invalidate: None,
    };
    let mut one = request(1, operation, &[sge(a, BASE, 9000)]);
    one.solicited = true;
    lab.nodes[0].post(QP, one);
    lab.nodes[0].post(QP, request(2, send(), &[]));
    lab.settle();
    assert_eq!(lab.nodes[1].read(BASE + 1, 4000), bytes[..4000]);
    assert_eq!(lab.nodes[1].read(BASE + 0x8001, 5000), bytes[4000..]);
    let received = lab.nodes[1].take_completions();
    assert_eq!(received.len(), 2);
    assert_eq!(received[0].done, Done::ReceiveImmediate(0xdead_beef));
    assert_eq!((received[0].cookie, received[0].len), (50, 9000));
    assert!(received[0].solicited && !received[1].solicited);
    assert_eq!(
        (received[1].cookie, received[1].done, received[1].len),
        (51, Done::Receive, 0)
    );
    assert_eq!(
        lab.nodes[0].completed(),
        [(1, Status::Success), (2, Status::Success)]
    );
}

#[test]
fn a_write_with_immediate_takes_a_receive() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].post_receive(QP, 50, &[]);
    lab.nodes[0].write(BASE, b"immediate");
    let operation = Operation::Write {
        addr: BASE + 0x1000,
        key: b,
        immediate: Some(7),
    };
    lab.nodes[0].post(QP, request(1, operation, &[sge(a, BASE, 9)]));
    lab.settle();
    assert_eq!(lab.nodes[1].read(BASE + 0x1000, 9), b"immediate");
    let received = lab.nodes[1].take_completions();
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].done, Done::ReceiveWriteImmediate(7));
    assert_eq!((received[0].cookie, received[0].len), (50, 9));
}

#[test]
fn inline_bytes_need_no_region() {
    let (mut lab, _, b) = pair();
    for len in [0usize, 1, 28, 64, 65, 1000] {
        let bytes = pattern(len as u64, len);
        let mut one = request(1, write(BASE + 1, b), &[]);
        one.data = Data::Inline(bytes.iter().copied().collect());
        lab.nodes[0].post(QP, one);
        lab.settle();
        assert_eq!(lab.nodes[1].read(BASE + 1, len), bytes);
        assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    }
}

#[test]
fn bytes_of_the_entry_may_have_memory_behind_them() {
    let (mut lab, a, b) = pair();
    let behind = pattern(9, 300_000);
    lab.nodes[0].write(BASE, &behind);
    for (head, len) in [
        (8usize, 40usize),
        (1000, 0),
        (1000, 24),
        (3, 20_000),
        (900, 299_000),
    ] {
        let inline = pattern(head as u64, head);
        let (first, second) = (len / 3, len - len / 3);
        let mixed = Mixed {
            inline: inline.iter().copied().collect(),
            sges: [
                sge(a, BASE, first as u32),
                sge(a, BASE + first as u64, second as u32),
            ]
            .into_iter()
            .collect(),
        };
        let mut one = request(1, write(BASE + 0x10_0001, b), &[]);
        one.data = Data::Mixed(Box::new(mixed));
        lab.nodes[0].post(QP, one);
        lab.settle();
        assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
        let expected = [&inline, &behind[..len]].concat();
        let arrived = lab.nodes[1].read(BASE + 0x10_0001, expected.len());
        assert!(arrived == expected, "{head} and {len} bytes");
    }
}

#[test]
fn atomics_answer_the_old_value() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].write(BASE + 0x2000, &100u64.to_ne_bytes());
    let (addr, key) = (BASE + 0x2000, b);
    let operations = [
        (Operation::FetchAdd { addr, key, add: 5 }, 100u64),
        (
            Operation::CompareSwap {
                addr,
                key,
                compare: 105,
                swap: 7,
            },
            105,
        ),
        (
            Operation::CompareSwap {
                addr,
                key,
                compare: 105,
                swap: 8,
            },
            7,
        ),
        (
            Operation::FetchAdd {
                addr,
                key,
                add: u64::MAX,
            },
            7,
        ),
    ];
    for (n, (operation, _)) in operations.iter().enumerate() {
        let to = sge(a, BASE + 16 * n as u64 + 4, 8);
        lab.nodes[0].post(QP, request(n as u32, operation.clone(), &[to]));
    }
    lab.settle();
    for (n, (_, old)) in operations.iter().enumerate() {
        let stored = lab.nodes[0].read(BASE + 16 * n as u64 + 4, 8);
        assert_eq!(stored, old.to_ne_bytes(), "{n}");
    }
    assert_eq!(lab.nodes[1].read(addr, 8), 6u64.to_ne_bytes());
    assert_eq!(lab.nodes[0].take_completions().len(), 4);
}

#[test]
fn a_send_with_invalidate_takes_the_key_out_of_use() {
    let (mut lab, a, b) = pair();
    let victim = lab.nodes[1].whole(ALL() | Rights::REMOTE_INVALIDATE);
    lab.nodes[1].post_receive(QP, 50, &[sge(b, BASE, 8)]);
    let operation = Operation::Send {
        immediate: None,
        invalidate: Some(victim),
    };
    lab.nodes[0].post(QP, request(1, operation, &[sge(a, BASE, 8)]));
    lab.settle();
    let received = lab.nodes[1].take_completions();
    assert_eq!(received[0].done, Done::ReceiveInvalidate(victim));
    lab.nodes[0].post(QP, request(2, write(BASE, victim), &[sge(a, BASE, 8)]));
    lab.settle();
    assert_eq!(
        lab.nodes[0].completed(),
        [(1, Status::Success), (2, Status::RemoteAccess)]
    );
}

#[test]
fn a_key_that_is_not_for_it_is_not_invalidated() {
    let (mut lab, a, b) = pair();
    let fixed = lab.nodes[1].whole(ALL());
    lab.nodes[1].post_receive(QP, 50, &[sge(b, BASE, 8)]);
    let operation = Operation::Send {
        immediate: None,
        invalidate: Some(fixed),
    };
    lab.nodes[0].post(QP, request(1, operation, &[sge(a, BASE, 8)]));
    lab.settle();
    assert!(
        lab.nodes[1]
            .engine
            .regions()
            .get(fixed.0 >> 8)
            .unwrap()
            .valid
    );
    assert_ne!(lab.nodes[0].completed(), [(1, Status::Success)]);
}

#[test]
fn unsignaled_requests_complete_silently() {
    let (mut lab, a, b) = pair();
    for n in 0..300 {
        let mut one = request(n, write(BASE, b), &[sge(a, BASE, 8)]);
        one.signaled = n % 100 == 99;
        lab.nodes[0].post(QP, one);
    }
    lab.settle();
    let cookies: Vec<_> = lab.nodes[0].completed().into_iter().collect();
    assert_eq!(
        cookies,
        [99, 199, 299].map(|cookie| (cookie, Status::Success))
    );
    assert_eq!(lab.nodes[0].counters().writes, 300);
}

#[test]
fn a_local_key_that_does_not_fit_fails_after_what_was_before_it() {
    // Keys are the same in every pair.
    let (mut lab, a, b) = pair();
    let readable = lab.nodes[0].whole(Rights::NONE);
    let read = Operation::Read {
        addr: BASE,
        key: b,
        invalidate: None,
    };
    let add = Operation::FetchAdd {
        addr: BASE,
        key: b,
        add: 1,
    };
    for (n, (operation, bad)) in [
        (write(BASE, b), sge(a, BASE + BYTES - 4, 8)),
        (write(BASE, b), sge(MemKey(a.0 ^ 1), BASE, 8)),
        (write(BASE, b), sge(a, BASE + BYTES - 400, 500)),
        (read, sge(readable, BASE, 8)),
        (add, sge(readable, BASE, 8)),
    ]
    .into_iter()
    .enumerate()
    {
        let (mut lab, ..) = pair();
        assert_eq!(lab.nodes[0].whole(Rights::NONE), readable);
        lab.nodes[0].post_receive(QP, 70, &[]);
        lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
        let mut failing = request(2, operation, &[bad]);
        failing.signaled = false;
        lab.nodes[0].post(QP, failing);
        lab.nodes[0].post(QP, request(3, write(BASE, b), &[sge(a, BASE, 8)]));
        lab.settle();
        let expected = [
            (1, Status::Success),
            (2, Status::LocalProtection),
            (3, Status::Flushed),
            (70, Status::Flushed),
        ];
        assert_eq!(lab.nodes[0].completed(), expected, "{n}");
        assert_eq!(lab.nodes[0].state(QP), QpState::Error);
        assert_eq!(lab.nodes[1].state(QP), QpState::Rts);
    }
}

#[test]
fn the_responder_refuses_what_its_keys_do_not_allow() {
    let read = |addr, key| Operation::Read {
        addr,
        key,
        invalidate: None,
    };
    let add = |addr, key| Operation::FetchAdd { addr, key, add: 1 };
    type Make = fn(u64, MemKey) -> Operation;
    let operations: [(&str, Make); 3] = [("write", write), ("read", read), ("atomic", add)];
    for (name, operation) in operations {
        for case in ["key", "rights", "range", "none"] {
            let (mut lab, a, b) = pair();
            let closed = lab.nodes[1].whole(Rights::LOCAL_WRITE);
            let operation = match case {
                "key" => operation(BASE, MemKey(b.0 ^ 0x80)),
                "rights" => operation(BASE, closed),
                "range" => operation(BASE + BYTES, b),
                _ => operation(BASE, MemKey(0xffff_ff00)),
            };
            lab.nodes[1].post_receive(QP, 60, &[sge(b, BASE, 64)]);
            let mut one = request(1, operation, &[sge(a, BASE, 8)]);
            one.signaled = false;
            lab.nodes[0].post(QP, one);
            lab.nodes[0].post(QP, request(2, send(), &[sge(a, BASE, 8)]));
            lab.settle();
            let expected = [(1, Status::RemoteAccess), (2, Status::Flushed)];
            assert_eq!(lab.nodes[0].completed(), expected, "{name} {case}");
            assert_eq!(lab.nodes[1].completed(), [(60, Status::Flushed)]);
            let notices = &lab.nodes[1].notices;
            let expected = [Notice::AccessError(QP), Notice::Completion(CQ)];
            assert_eq!(notices[..], expected, "{name} {case}");
            assert_eq!(lab.nodes[1].state(QP), QpState::Error);
        }
    }
}

#[test]
fn the_queue_pairs_own_rights_count_too() {
    let (mut lab, a, b) = pair();
    let change = QpChange {
        remote_rights: Some(Rights::REMOTE_READ),
        ..QpChange::default()
    };
    lab.modify(1, QP, QpState::Rts, &change).unwrap();
    let read = Operation::Read {
        addr: BASE,
        key: b,
        invalidate: None,
    };
    lab.nodes[0].post(QP, request(1, read, &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(2, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.settle();
    assert_eq!(
        lab.nodes[0].completed(),
        [(1, Status::Success), (2, Status::RemoteAccess)]
    );
}

#[test]
fn a_message_longer_than_the_receive_is_an_error_at_both_ends() {
    let (mut lab, a, b) = pair();
    lab.nodes[1].post_receive(QP, 60, &[sge(b, BASE, 1000), sge(b, BASE + 0x2000, 1000)]);
    lab.nodes[1].post_receive(QP, 61, &[sge(b, BASE, 8)]);
    lab.nodes[0].post(QP, request(1, send(), &[sge(a, BASE, 2001)]));
    lab.settle();
    assert_eq!(
        lab.nodes[0].completed(),
        [(1, Status::RemoteInvalidRequest)]
    );
    assert_eq!(
        lab.nodes[1].completed(),
        [(60, Status::LocalLength), (61, Status::Flushed)]
    );
    assert!(lab.nodes[1].notices.contains(&Notice::InvalidRequest(QP)));
}

#[test]
fn a_receive_whose_key_does_not_fit_is_the_responders_fault() {
    let (mut lab, a, _) = pair();
    let readable = lab.nodes[1].whole(Rights::REMOTE_READ);
    lab.nodes[1].post_receive(QP, 60, &[sge(readable, BASE, 1000)]);
    lab.nodes[0].post(QP, request(1, send(), &[sge(a, BASE, 100)]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::RemoteOperation)]);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::LocalProtection)]);
}

#[test]
fn entries_that_cannot_be_done_fail() {
    let (_, a, b) = pair();
    let read = Operation::Read {
        addr: BASE,
        key: b,
        invalidate: None,
    };
    let mut inline_read = request(1, read.clone(), &[]);
    inline_read.data = Data::Inline([0; 8].into_iter().collect());
    let add = Operation::FetchAdd {
        addr: BASE + 4,
        key: b,
        add: 1,
    };
    let mut unaligned = request(1, add, &[sge(a, BASE, 8)]);
    unaligned.signaled = false;
    let long = sge(a, BASE, (1 << 30) + 1);
    let datagram = Datagram {
        to: Destination {
            lid: 1,
            gid: None,
            mac: [0; 6],
        },
        qp: QP,
        qkey: 0,
        source_gid: None,
        traffic_class: 0,
        hop_limit: 0,
        service_level: 0,
    };
    let mut addressed = request(1, send(), &[]);
    addressed.datagram = Some(datagram);
    for (one, status) in [
        (inline_read, Status::LocalQpOperation),
        (unaligned, Status::LocalQpOperation),
        (request(1, send(), &[long]), Status::LocalLength),
        (
            request(1, send(), &[sge(a, BASE, 1 << 31); 16]),
            Status::LocalLength,
        ),
        (
            request(1, send(), &[sge(a, BASE, 1); 17]),
            Status::LocalQpOperation,
        ),
        (addressed, Status::LocalQpOperation),
    ] {
        let (mut lab, _, _) = pair();
        lab.nodes[0].post(QP, one.clone());
        lab.settle();
        assert_eq!(lab.nodes[0].completed(), [(1, status)], "{one:?}");
        assert_eq!(lab.nodes[0].state(QP), QpState::Error);
    }
    let (mut lab, _, _) = pair();
    let queue = lab.nodes[0].engine.send_queue_mut(QP).unwrap();
    queue.posted.push_back(Next::Bad(9));
    lab.nodes[0].engine.ring(QP);
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(9, Status::LocalQpOperation)]);
    let (mut lab, _, _) = pair();
    let queue = lab.nodes[0].engine.send_queue_mut(QP).unwrap();
    queue.posted.push_back(Next::Unreadable);
    lab.nodes[0].engine.ring(QP);
    lab.settle();
    assert_eq!(lab.nodes[0].notices, [Notice::QpFatal(QP)]);
    assert_eq!(lab.nodes[0].state(QP), QpState::Error);
}

#[test]
fn a_shared_queue_serves_several_queue_pairs_and_tells_its_limit() {
    let mut lab = Lab::new(2);
    let srq = SrqNum(2);
    lab.nodes[1]
        .engine
        .add_srq(srq, PD, Receives::default())
        .unwrap();
    let a = lab.nodes[0].whole(ALL());
    let b = lab.nodes[1].whole(ALL());
    for n in 1..3 {
        lab.add_qp(0, QpNum(n), Service::Rc, ReceiveFrom::Own);
        lab.add_qp(1, QpNum(n), Service::Rc, ReceiveFrom::Shared(srq));
        lab.connect((0, QpNum(n)), (1, QpNum(n)), Service::Rc);
        lab.connect((1, QpNum(n)), (0, QpNum(n)), Service::Rc);
    }
    for cookie in 0..3 {
        let queue = lab.nodes[1].engine.srq_mut(srq).unwrap();
        let sges = [sge(b, BASE + 64 * u64::from(cookie), 64)];
        queue.waiting.push_back(Next::Entry(ReceiveRequest {
            cookie,
            sges: sges.into_iter().collect(),
        }));
    }
    lab.nodes[1].engine.set_srq_limit(srq, 2).unwrap();
    for n in [1, 2, 1] {
        lab.nodes[0].post(QpNum(n), request(n, send(), &[sge(a, BASE, 10)]));
        lab.settle();
        let limit = lab.nodes[1].notices.contains(&Notice::SrqLimit(srq));
        let received = lab.nodes[1].take_completions();
        assert_eq!(received.len(), 1);
        assert_eq!((received[0].qp, received[0].srq), (QpNum(n), Some(srq)));
        assert_eq!(limit, received[0].cookie >= 1);
    }
    lab.modify(1, QpNum(1), QpState::Error, &QpChange::default())
        .unwrap();
    lab.settle();
    assert!(
        lab.nodes[1]
            .notices
            .contains(&Notice::LastReceive(QpNum(1)))
    );
    assert!(lab.nodes[1].engine.remove_srq(srq).is_err());
    for n in 1..3 {
        lab.nodes[1].engine.remove_qp(QpNum(n)).unwrap();
    }
    assert!(lab.nodes[1].engine.remove_srq(srq).is_ok());
    assert!(lab.nodes[1].engine.remove_cq(CQ).is_ok());
}
