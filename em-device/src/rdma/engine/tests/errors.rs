//! Errors, and what comes after them.

use super::lab::*;
use crate::rdma::engine::Notice;
use crate::rdma::packet::{Action, Body, Packet, Payload, Request, Segment, Verdict};
use crate::rdma::verbs::*;
use smallvec::SmallVec;
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
fn what_is_posted_in_error_is_flushed() {
    let (mut lab, a, _) = pair();
    for n in 0..600 {
        lab.nodes[0].post(QP, request(n, send(), &[sge(a, BASE, 8)]));
        lab.nodes[0].post_receive(QP, 1000 + n, &[]);
    }
    lab.modify(0, QP, QpState::Error, &QpChange::default())
        .unwrap();
    lab.settle();
    let completed = lab.nodes[0].completed();
    assert_eq!(completed.len(), 1200);
    assert!(
        completed
            .iter()
            .all(|(_, status)| *status == Status::Flushed)
    );
    let sends = completed.iter().filter(|(cookie, _)| *cookie < 1000);
    assert!(sends.map(|(cookie, _)| *cookie).eq(0..600));
    lab.nodes[0].post(QP, request(7, send(), &[]));
    // Nothing tells of this one; it is looked for, soon and then less often.
    lab.nodes[0].post_receive(QP, 8, &[]);
    lab.run(ms(1));
    assert_eq!(
        lab.nodes[0].completed(),
        [7, 8].map(|n| (n, Status::Flushed))
    );
}

#[test]
fn a_reset_forgets_everything_and_a_new_life_begins() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].post(QP, request(1, send(), &[sge(a, BASE, 8)]));
    lab.nodes[0].post(QP, request(2, send(), &[sge(a, BASE, 8)]));
    lab.settle();
    for node in 0..2 {
        lab.modify(node, QP, QpState::Reset, &QpChange::default())
            .unwrap();
    }
    assert!(!lab.nodes[0].engine.has_outstanding());
    lab.nodes[0].post(QP, request(3, send(), &[]));
    lab.run(ms(500));
    assert!(lab.nodes[0].completed().is_empty());
    assert_eq!(lab.nodes[0].engine.send_queue_mut(QP).unwrap().resets, 1);
    lab.connect((0, QP), (1, QP), Service::Rc);
    lab.connect((1, QP), (0, QP), Service::Rc);
    lab.nodes[1].post_receive(QP, 60, &[sge(b, BASE, 8)]);
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(3, Status::Success)]);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::Success)]);
}

#[test]
fn a_full_completion_queue_is_an_error_of_its_queue_pairs() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].engine.cq_mut(CQ).unwrap().room = 3;
    for n in 0..10 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
    }
    lab.settle();
    assert_eq!(lab.nodes[0].completed().len(), 3);
    let notices = &lab.nodes[0].notices;
    let errors = [Notice::CqError(CQ), Notice::QpFatal(QP)];
    assert!(errors.iter().all(|error| notices.contains(error)));
    assert_eq!(lab.nodes[0].state(QP), QpState::Error);
}

#[test]
fn completion_notices_of_a_queue_are_one_until_they_are_taken() {
    let (mut lab, a, b) = pair();
    for n in 0..10 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
    }
    lab.settle();
    assert_eq!(lab.nodes[0].notices, [Notice::Completion(CQ)]);
}

#[test]
fn a_revoked_path_is_an_error_of_its_queue_pairs_only() {
    let (mut lab, a, b) = pair();
    lab.add_qp(0, QpNum(2), Service::Rc, ReceiveFrom::Own);
    lab.nodes[0].wire.faults.dead = true;
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
    lab.settle();
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.revoke(Peer(1), 4, cx));
    assert_eq!(lab.nodes[0].state(QP), QpState::Rts);
    lab.nodes[0].with(now, |engine, cx| engine.revoke(Peer(1), 5, cx));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::RetryExceeded)]);
    assert_eq!(lab.nodes[0].state(QP), QpState::Error);
    assert_eq!(lab.nodes[0].state(QpNum(2)), QpState::Reset);
}

#[test]
fn with_its_path_the_first_request_that_is_only_posted_fails_and_the_others_are_flushed() {
    let (mut lab, a, b) = pair();
    for n in 1..=3 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
    }
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.revoke(Peer(1), 5, cx));
    lab.settle();
    let expected = [Status::RetryExceeded, Status::Flushed, Status::Flushed];
    assert_eq!(
        lab.nodes[0].completed(),
        [1, 2, 3].map(|n| (n, expected[n as usize - 1]))
    );
    assert_eq!(lab.nodes[0].state(QP), QpState::Error);
}

#[test]
fn packets_of_strangers_are_ignored() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 8)]));
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    let (_, packet) = lab.nodes[0].wire.outgoing.pop_front().unwrap();
    let mut another = packet.clone();
    another.from = QpNum(5);
    lab.nodes[1].with(now, |engine, cx| {
        engine.receive(Peer(2), packet.clone(), cx);
        engine.receive(Peer(0), another, cx);
        engine.turn(cx);
    });
    assert_eq!(lab.nodes[1].wire.packets, 0);
    lab.nodes[1].with(now, |engine, cx| engine.receive(Peer(0), packet, cx));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    let stray = Packet {
        to: QP,
        from: QP,
        psn: 5,
        body: Body::Answer(Verdict::Access),
    };
    lab.nodes[0].with(now, |engine, cx| engine.receive(Peer(1), stray, cx));
    assert_eq!(lab.nodes[0].state(QP), QpState::Rts);
}

#[test]
fn malformed_requests_are_refused() {
    let (mut lab, a, b) = pair();
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[sge(a, BASE, 2048)]));
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    let (_, packet) = lab.nodes[0].wire.outgoing.pop_front().unwrap();
    type Spoil = fn(&mut Request);
    let spoils: [(Spoil, Verdict); 7] = [
        (|r| r.first = false, Verdict::InvalidRequest),
        (
            |r| r.action = total(r.action, 2049),
            Verdict::InvalidRequest,
        ),
        (
            |r| r.action = total(r.action, u32::MAX),
            Verdict::InvalidRequest,
        ),
        (|r| segments(r)[0].len = 2047, Verdict::InvalidRequest),
        (|r| segments(r)[0].len = u32::MAX, Verdict::InvalidRequest),
        (
            |r| segments(r)[0].offset = u64::MAX,
            Verdict::InvalidRequest,
        ),
        (
            |r| {
                r.last = false;
                segments(r)[0].len = 1000;
            },
            Verdict::InvalidRequest,
        ),
    ];
    for (n, (spoil, verdict)) in spoils.into_iter().enumerate() {
        let (mut lab, ..) = pair();
        // The memory that the packet names is another lab's: as good as any.
        let mut packet = packet.clone();
        let Body::Request(request) = &mut packet.body else {
            panic!()
        };
        let file = lab.nodes[0].file();
        segments(request)[0].file = file;
        spoil(request);
        lab.nodes[1].with(now, |engine, cx| {
            engine.receive(Peer(0), packet, cx);
            engine.turn(cx);
        });
        let (_, answer) = lab.nodes[1].wire.outgoing.pop_front().unwrap();
        assert_eq!(answer.body, Body::Answer(verdict), "{n}");
        assert_eq!(lab.nodes[1].state(QP), QpState::Error, "{n}");
        assert_eq!(lab.nodes[1].notices, []);
    }
}

fn total(action: Action, total: u32) -> Action {
    match action {
        Action::Write { addr, key, .. } => Action::Write { addr, key, total },
        other => other,
    }
}

fn segments(request: &mut Request) -> &mut SmallVec<[Segment; 2]> {
    match &mut request.payload {
        Payload::Segments(segments) => segments,
        Payload::Inline(_) => panic!(),
    }
}

#[test]
fn the_first_packet_tells_that_communication_is_established() {
    let mut lab = Lab::new(2);
    let b = lab.nodes[1].whole(Rights::REMOTE_WRITE);
    let a = lab.nodes[0].whole(Rights::NONE);
    lab.add_qp(0, QP, Service::Rc, ReceiveFrom::Own);
    lab.add_qp(1, QP, Service::Rc, ReceiveFrom::Own);
    lab.connect((0, QP), (1, QP), Service::Rc);
    for state in [QpState::Init, QpState::Rtr] {
        lab.modify(1, QP, state, &change((0, QP))).unwrap();
    }
    for n in 0..3 {
        lab.nodes[0].post(QP, request(n, write(BASE, b), &[sge(a, BASE, 8)]));
        lab.settle();
    }
    assert_eq!(lab.nodes[0].completed().len(), 3);
    let expected = [Notice::CommunicationEstablished(QP)];
    assert_eq!(lab.nodes[1].notices, expected);
}

#[test]
fn a_region_without_memory_is_an_error_of_its_owner() {
    let (mut lab, a, b) = pair();
    let half = BYTES / 2;
    lab.nodes[1].table.unmap(BASE + half, half).unwrap();
    let before = write(BASE + half - 100, b);
    lab.nodes[0].post(QP, request(1, before, &[sge(a, BASE, 100)]));
    let across = write(BASE + half - 100, b);
    lab.nodes[0].post(QP, request(2, across, &[sge(a, BASE, 101)]));
    lab.settle();
    let expected = [(1, Status::Success), (2, Status::RemoteOperation)];
    assert_eq!(lab.nodes[0].completed(), expected);
    let (mut lab, a, b) = pair();
    lab.nodes[0].table.unmap(BASE + half, half).unwrap();
    let from = sge(a, BASE + half - 100, 101);
    lab.nodes[0].post(QP, request(1, write(BASE, b), &[from]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::LocalProtection)]);
}

#[test]
fn a_function_talks_to_itself() {
    let mut lab = Lab::new(1);
    let key = lab.nodes[0].whole(Rights::LOCAL_WRITE | Rights::REMOTE_WRITE);
    let other = QpNum(0x41);
    lab.add_qp(0, QP, Service::Rc, ReceiveFrom::Own);
    lab.add_qp(0, other, Service::Rc, ReceiveFrom::Own);
    lab.connect((0, QP), (0, other), Service::Rc);
    lab.connect((0, other), (0, QP), Service::Rc);
    lab.nodes[0].write(BASE, &pattern(1, 5000));
    let operation = write(BASE + 0x10_0000, key);
    lab.nodes[0].post(QP, request(1, operation, &[sge(key, BASE, 5000)]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    assert_eq!(lab.nodes[0].read(BASE + 0x10_0000, 5000), pattern(1, 5000));
}
