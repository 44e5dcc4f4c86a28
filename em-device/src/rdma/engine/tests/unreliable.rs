//! Unreliable connections and datagrams.

use super::lab::*;
use crate::rdma::engine::Notice;
use crate::rdma::verbs::*;
use std::time::Duration;

const GIDS: [[u8; 16]; 3] = [[0xa0; 16], [0xa1; 16], [0xa2; 16]];

fn to(node: usize) -> Datagram {
    Datagram {
        to: Destination {
            lid: 0,
            gid: Some(GIDS[node]),
            mac: [0; 6],
        },
        qp: QP,
        qkey: 0x1234,
        source_gid: Some(0),
        traffic_class: 0x12,
        hop_limit: 64,
        service_level: 3,
    }
}

/// Three functions with a datagram queue pair each, and a key of all memory.
fn three() -> (Lab, MemKey) {
    let mut lab = Lab::new(3);
    let mut keys = Vec::new();
    for (node, gid) in GIDS.into_iter().enumerate() {
        lab.add_qp(node, QP, Service::Ud, ReceiveFrom::Own);
        lab.connect((node, QP), (node, QP), Service::Ud);
        keys.push(lab.nodes[node].whole(Rights::LOCAL_WRITE));
        lab.nodes[node].wire.addresses.gids = vec![gid];
        for peer in 0..3 {
            let path = Path {
                peer: Peer(peer as u32),
                generation: 1,
            };
            lab.nodes[node].wire.routes.insert(to(peer).to, path);
        }
    }
    assert!(keys.iter().all(|key| *key == keys[0]));
    (lab, keys[0])
}

fn datagram(cookie: u32, node: usize, sge: Sge) -> WorkRequest {
    let mut one = request(cookie, send(), &[sge]);
    one.datagram = Some(to(node));
    one
}

#[test]
fn datagrams_reach_several_peers_and_their_sender() {
    let (mut lab, key) = three();
    for (len, from) in [(100, 0), (1024, 2)] {
        let bytes = pattern(len, len as usize);
        lab.nodes[from].write(BASE + 5, &bytes);
        for node in 0..3 {
            let sges = [sge(key, BASE + 0x2000, 50), sge(key, BASE + 0x4001, 2000)];
            lab.nodes[node].post_receive(QP, 60, &sges);
        }
        for node in 0..3 {
            let mut one = datagram(node as u32, node, sge(key, BASE + 5, len as u32));
            one.operation = Operation::Send {
                immediate: Some(9),
                invalidate: None,
            };
            lab.nodes[from].post(QP, one);
        }
        lab.settle();
        for (node, gid) in GIDS.iter().enumerate() {
            let completions = lab.nodes[node].take_completions();
            let (received, sent): (Vec<Completion>, Vec<Completion>) =
                completions.into_iter().partition(|c| c.done.is_receive());
            assert_eq!(sent.len(), if node == from { 3 } else { 0 });
            assert_eq!(received.len(), 1);
            assert_eq!(received[0].len, 40 + len as u32);
            assert_eq!(received[0].done, Done::ReceiveImmediate(9));
            let source = Source {
                qp: QP,
                lid: 0,
                grh: true,
                ipv4: false,
                service_level: 3,
            };
            assert_eq!(received[0].source, Some(source));
            let grh = lab.nodes[node].read(BASE + 0x2000, 40);
            assert_eq!(grh[..4], [0x61, 0x20, 0, 0]);
            let behind = u16::from_be_bytes([grh[4], grh[5]]);
            assert_eq!(u64::from(behind), 8 + 12 + 8 + 4 + len + 4);
            assert_eq!(grh[6..8], [17, 64]);
            assert_eq!((&grh[8..24], &grh[24..]), (&GIDS[from][..], &gid[..]));
            assert_eq!(lab.nodes[node].read(BASE + 0x2028, 10), bytes[..10]);
            let rest = lab.nodes[node].read(BASE + 0x4001, len as usize - 10);
            assert_eq!(rest, bytes[10..]);
        }
    }
}

#[test]
fn a_large_datagram_completes_when_its_bytes_are_not_needed_any_more() {
    let (mut lab, key) = three();
    lab.nodes[0].post(QP, datagram(1, 1, sge(key, BASE, 1024)));
    lab.settle();
    // Inline bytes are not needed at all.
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    for node in 0..3 {
        let rts = QpState::Reset;
        lab.modify(node, QP, rts, &QpChange::default()).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let mut change = change((node, QP));
            change.mtu = Some(4096);
            lab.modify(node, QP, state, &change).unwrap();
        }
    }
    // Even a queue pair that does not exist lets them go.
    let mut nowhere = datagram(2, 1, sge(key, BASE, 4096));
    nowhere.datagram.as_mut().unwrap().qp = QpNum(99);
    lab.nodes[0].post(QP, nowhere);
    lab.nodes[0].post(QP, datagram(3, 1, sge(key, BASE, 4096)));
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    assert!(lab.nodes[0].completed().is_empty());
    lab.settle();
    assert_eq!(
        lab.nodes[0].completed(),
        [2, 3].map(|n| (n, Status::Success))
    );
    // And a peer that is silent does so in the end.
    lab.nodes[0].wire.faults.dead = true;
    lab.nodes[0].post(QP, datagram(4, 1, sge(key, BASE, 4096)));
    lab.run(Duration::from_secs(1));
    assert_eq!(lab.nodes[0].completed(), [(4, Status::Success)]);
    assert_eq!(lab.nodes[0].engine.patience(lab.now), None);
}

#[test]
fn datagrams_that_nobody_wants_are_dropped() {
    let (mut lab, key) = three();
    let mut wrong_key = datagram(1, 1, sge(key, BASE, 8));
    wrong_key.datagram.as_mut().unwrap().qkey = 5;
    let mut own_key = datagram(2, 1, sge(key, BASE, 8));
    own_key.datagram.as_mut().unwrap().qkey = 1 << 31;
    let mut unknown = datagram(3, 1, sge(key, BASE, 8));
    unknown.datagram.as_mut().unwrap().to.lid = 77;
    lab.nodes[0].post(QP, datagram(0, 1, sge(key, BASE, 8)));
    lab.settle();
    lab.nodes[1].post_receive(QP, 60, &[sge(key, BASE, 48)]);
    lab.nodes[1].post_receive(QP, 61, &[sge(key, BASE, 48)]);
    for one in [wrong_key, own_key, unknown] {
        lab.nodes[0].post(QP, one);
    }
    lab.settle();
    let expected = [0, 1, 2, 3].map(|n| (n, Status::Success));
    assert_eq!(lab.nodes[0].completed(), expected);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::Success)]);
    assert_eq!(lab.nodes[1].counters().dropped, 2);
    assert_eq!(lab.nodes[0].counters().dropped, 1);
}

#[test]
fn a_route_that_is_being_asked_for_is_waited_for() {
    let (mut lab, key) = three();
    lab.nodes[1].post_receive(QP, 60, &[sge(key, BASE, 48)]);
    lab.nodes[0].wire.faults.asking = true;
    lab.nodes[0].post(QP, datagram(1, 1, sge(key, BASE, 8)));
    lab.run(Duration::from_millis(10));
    assert!(lab.nodes[0].completed().is_empty());
    lab.nodes[0].wire.faults.asking = false;
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::Success)]);
}

#[test]
fn a_failing_send_stops_sends_only() {
    let (mut lab, key) = three();
    lab.nodes[0].post(QP, datagram(1, 1, sge(key, BASE, 1025)));
    lab.nodes[0].post(QP, datagram(2, 1, sge(key, BASE, 8)));
    lab.settle();
    let expected = [(1, Status::LocalLength), (2, Status::Flushed)];
    assert_eq!(lab.nodes[0].completed(), expected);
    assert_eq!(lab.nodes[0].state(QP), QpState::Sqe);
    lab.nodes[0].post(QP, datagram(3, 1, sge(key, BASE, 8)));
    lab.nodes[0].post_receive(QP, 60, &[sge(key, BASE, 48)]);
    lab.nodes[1].post(QP, datagram(4, 0, sge(key, BASE, 8)));
    lab.settle();
    let expected = [(3, Status::Flushed), (60, Status::Success)];
    assert_eq!(lab.nodes[0].completed(), expected);
    lab.modify(0, QP, QpState::Rts, &QpChange::default())
        .unwrap();
    lab.nodes[0].post(QP, datagram(5, 1, sge(key, BASE, 8)));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(5, Status::Success)]);
}

#[test]
fn a_datagram_longer_than_the_receive_is_the_receivers_error() {
    let (mut lab, key) = three();
    lab.nodes[1].post_receive(QP, 60, &[sge(key, BASE, 47)]);
    lab.nodes[0].post(QP, datagram(1, 1, sge(key, BASE, 8)));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    assert_eq!(lab.nodes[1].completed(), [(60, Status::LocalLength)]);
    assert_eq!(lab.nodes[1].state(QP), QpState::Error);
}

fn connection() -> (Lab, MemKey) {
    let mut lab = Lab::pair(Service::Uc);
    let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
    let key = lab.nodes[0].whole(rights);
    assert_eq!(lab.nodes[1].whole(rights), key);
    (lab, key)
}

#[test]
fn an_unreliable_connection_sends_and_writes() {
    let (mut lab, key) = connection();
    for len in [0usize, 8, 1024, 1025, 5000, 600_000] {
        let bytes = pattern(len as u64, len);
        lab.nodes[0].write(BASE + 1, &bytes);
        lab.nodes[1].post_receive(QP, 60, &[sge(key, BASE + 0x10_0003, 700_000)]);
        lab.nodes[1].post_receive(QP, 61, &[]);
        let from = sge(key, BASE + 1, len as u32);
        lab.nodes[0].post(QP, request(1, send(), &[from]));
        let immediate = Operation::Write {
            addr: BASE + 0x80_0001,
            key,
            immediate: Some(4),
        };
        lab.nodes[0].post(QP, request(2, immediate, &[from]));
        lab.settle();
        assert_eq!(
            lab.nodes[0].completed(),
            [1, 2].map(|n| (n, Status::Success))
        );
        let received = lab.nodes[1].completed();
        assert_eq!(received, [60, 61].map(|n| (n, Status::Success)));
        assert!(lab.nodes[1].read(BASE + 0x10_0003, len) == bytes);
        assert!(lab.nodes[1].read(BASE + 0x80_0001, len) == bytes);
    }
}

#[test]
fn a_lost_packet_loses_its_message_only() {
    let (mut lab, key) = connection();
    lab.nodes[1].post_receive(QP, 60, &[sge(key, BASE, 700_000)]);
    lab.nodes[0].write(BASE, &pattern(1, 600_000));
    // One packet after the other, so that the middle one can be taken.
    let long = sge(key, BASE, 600_000);
    lab.nodes[0].post(QP, request(1, send(), &[long]));
    lab.nodes[0].post(QP, request(2, send(), &[sge(key, BASE, 600)]));
    let now = lab.now;
    lab.nodes[0].with(now, |engine, cx| engine.turn(cx));
    assert!(lab.nodes[0].wire.outgoing.remove(1).is_some());
    lab.run(Duration::from_secs(1));
    assert_eq!(
        lab.nodes[0].completed(),
        [1, 2].map(|n| (n, Status::Success))
    );
    let received = lab.nodes[1].take_completions();
    assert_eq!(received.len(), 1);
    assert_eq!((received[0].cookie, received[0].len), (60, 600));
    assert_eq!(lab.nodes[1].read(BASE, 600), pattern(1, 600));
}

#[test]
fn an_unreliable_connection_drops_what_is_not_allowed_or_not_awaited() {
    let (mut lab, key) = connection();
    let from = sge(key, BASE, 8);
    lab.nodes[0].post(QP, request(1, write(BASE + BYTES, key), &[from]));
    lab.nodes[0].post(QP, request(2, send(), &[from]));
    lab.settle();
    assert_eq!(
        lab.nodes[0].completed(),
        [1, 2].map(|n| (n, Status::Success))
    );
    assert_eq!(lab.nodes[1].state(QP), QpState::Rts);
    assert_eq!(lab.nodes[1].counters().dropped, 2);
    let read = Operation::Read {
        addr: BASE,
        key,
        invalidate: None,
    };
    lab.nodes[0].post(QP, request(3, read, &[from]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(3, Status::LocalQpOperation)]);
    assert_eq!(lab.nodes[0].state(QP), QpState::Sqe);
    assert_eq!(lab.nodes[1].notices, [] as [Notice; 0]);
}

#[test]
fn a_responder_that_wants_nothing_does_not_hold_up_an_unreliable_connection() {
    let mut lab = Lab::pair(Service::Uc);
    let a = lab.nodes[0].whole(Rights::NONE);
    let all = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
    let b = lab.nodes[1].whole(all);
    lab.nodes[1].engine.remove_qp(QP).unwrap();
    let operation = write(BASE, b);
    lab.nodes[0].post(QP, request(1, operation.clone(), &[sge(a, BASE, 9000)]));
    lab.settle();
    assert!(
        lab.nodes[0].completed().is_empty(),
        "the peer may be reading"
    );
    lab.run(Duration::from_millis(2));
    assert_eq!(lab.nodes[0].completed(), [(1, Status::Success)]);
    // A peer that is silent holds it up for a while, one that is gone does not.
    lab.nodes[0].wire.faults.dead = true;
    lab.nodes[0].post(QP, request(2, operation.clone(), &[sge(a, BASE, 9000)]));
    lab.run(Duration::from_millis(400));
    assert!(lab.nodes[0].completed().is_empty());
    lab.run(Duration::from_millis(200));
    assert_eq!(lab.nodes[0].completed(), [(2, Status::Success)]);
    lab.nodes[0].wire.faults.gone = true;
    lab.nodes[0].post(QP, request(3, operation, &[sge(a, BASE, 9000)]));
    lab.settle();
    assert_eq!(lab.nodes[0].completed(), [(3, Status::Success)]);
}
