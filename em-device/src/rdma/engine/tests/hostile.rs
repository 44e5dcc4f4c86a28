//! Guests and peers that say anything at all.

use super::lab::*;
use crate::rdma::packet::*;
use crate::rdma::verbs::*;
use proptest::prelude::*;
use std::time::Duration;

/// Numbers near what matters, and any.
fn number(near: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..0x3000u64).prop_map(move |n| near.wrapping_add(n).wrapping_sub(0x1000)),
        1 => any::<u64>(),
        1 => Just(0),
        1 => Just(u64::MAX),
    ]
}

fn key() -> impl Strategy<Value = MemKey> {
    prop_oneof![4 => Just(MemKey(0x15a)), 1 => any::<u32>().prop_map(MemKey)]
}

fn psn() -> impl Strategy<Value = u32> {
    prop_oneof![
        6 => (0..12u32).prop_map(|n| 0xff_fffc_u32.wrapping_add(n) & 0xff_ffff),
        1 => any::<u32>(),
    ]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![3 => 0..3000u32, 2 => Just(1024u32), 1 => any::<u32>()]
}

fn payload() -> impl Strategy<Value = Payload> {
    let segment = (0..3u64, number(0x1000), len());
    prop_oneof![
        proptest::collection::vec(segment, 0..4).prop_map(|segments| {
            let segments = segments.into_iter();
            // The test puts a file's number in the place of 0.
            Payload::Segments(
                segments
                    .map(|(file, offset, len)| Segment { file, offset, len })
                    .collect(),
            )
        }),
        proptest::collection::vec(any::<u8>(), 0..1100)
            .prop_map(|bytes| Payload::Inline(bytes.into_iter().collect())),
    ]
}

fn action() -> impl Strategy<Value = Action> {
    (0..5u8, number(BASE + BYTES / 2), key(), len()).prop_map(|(kind, addr, key, total)| match kind
    {
        0 => Action::Send,
        1 => Action::Write { addr, key, total },
        2 => Action::Read { addr, key, total },
        3 => Action::CompareSwap {
            addr,
            key,
            compare: 0,
            swap: 1,
        },
        _ => Action::FetchAdd { addr, key, add: 1 },
    })
}

fn body() -> impl Strategy<Value = Body> {
    let flags = any::<(bool, bool, bool, bool, bool)>();
    let request = (action(), payload(), flags, 0..3u8, key()).prop_map(
        |(action, payload, (first, last, acknowledge, solicited, datagram), tail, key)| {
            let tail = match tail {
                0 => Tail::Plain,
                1 => Tail::Immediate(1),
                _ => Tail::Invalidate(key),
            };
            let header = DatagramHeader {
                qkey: 0x1234,
                lid: 0,
                gids: Some(([1; 16], [2; 16])),
                service_level: 0,
                traffic_class: 0,
                hop_limit: 0,
            };
            Body::Request(Box::new(Request {
                action,
                first,
                last,
                tail,
                solicited,
                payload,
                datagram: datagram.then_some(header),
                acknowledge,
                mtu_shift: if first { 12 } else { 10 },
            }))
        },
    );
    let answer = (0..8u8, any::<u8>()).prop_map(|(kind, code)| {
        Body::Answer(match kind {
            0 => Verdict::Done,
            1 => Verdict::Atomic(9),
            2 => Verdict::ReceiverNotReady(code),
            3 => Verdict::Sequence,
            4 => Verdict::InvalidRequest,
            5 => Verdict::Access,
            6 => Verdict::Operation,
            _ => Verdict::MemoryUnknown,
        })
    });
    prop_oneof![request, answer]
}

fn work() -> impl Strategy<Value = WorkRequest> {
    let sge = (key(), number(BASE + BYTES / 2), len());
    let sges = proptest::collection::vec(sge, 0..18);
    let flags = any::<(bool, bool, bool, bool)>();
    (0..8u8, sges, number(BASE), key(), flags).prop_map(
        |(kind, sges, addr, key, (signaled, fence, immediate, datagram))| {
            let immediate = immediate.then_some(5);
            let operation = match kind {
                0 | 1 => Operation::Send {
                    immediate,
                    invalidate: Some(key),
                },
                2 => Operation::Write {
                    addr,
                    key,
                    immediate,
                },
                3 => Operation::Read {
                    addr,
                    key,
                    invalidate: None,
                },
                4 => Operation::CompareSwap {
                    addr,
                    key,
                    compare: 1,
                    swap: 2,
                },
                5 => Operation::FetchAdd { addr, key, add: 1 },
                6 => Operation::Nop,
                _ => Operation::Register(Box::new(RegionChange {
                    key,
                    variant: None,
                    pd: None,
                    rights: None,
                    start: None,
                    len: Some(addr),
                    translation: None,
                    valid: signaled,
                })),
            };
            let sges: Vec<_> = sges
                .into_iter()
                .map(|(key, addr, len)| Sge { key, addr, len })
                .collect();
            let mut one = request(1, operation, &sges);
            one.signaled = signaled;
            one.fence = fence;
            one.datagram = datagram.then_some(Datagram {
                to: Destination {
                    lid: 1,
                    gid: None,
                    mac: [0; 6],
                },
                qp: QP,
                qkey: 0x1234,
                source_gid: None,
                traffic_class: 0,
                hop_limit: 0,
                service_level: 0,
            });
            one
        },
    )
}

#[derive(Debug, Clone)]
enum Event {
    Packet(u32, Body),
    Work(WorkRequest),
    Receive(Vec<(MemKey, u64, u32)>),
    Round,
    Time(u64),
    Modify(u8),
}

fn events() -> impl Strategy<Value = Event> {
    let sge = (key(), number(BASE + 0x8000), len());
    prop_oneof![
        6 => (psn(), body()).prop_map(|(psn, body)| Event::Packet(psn, body)),
        4 => work().prop_map(Event::Work),
        3 => proptest::collection::vec(sge, 0..4).prop_map(Event::Receive),
        4 => Just(Event::Round),
        1 => (1..100_000u64).prop_map(Event::Time),
        1 => (0..9u8).prop_map(Event::Modify),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn nothing_that_is_said_breaks_an_engine(
        service in 0..3u8,
        events in proptest::collection::vec(events(), 1..60),
    ) {
        let service = [Service::Rc, Service::Uc, Service::Ud][usize::from(service)];
        let mut lab = Lab::pair(service);
        let rights = Rights::LOCAL_WRITE
            | Rights::REMOTE_WRITE
            | Rights::REMOTE_READ
            | Rights::REMOTE_ATOMIC;
        for node in &mut lab.nodes {
            prop_assert_eq!(node.whole(rights), MemKey(0x15a));
            let to = Destination { lid: 1, gid: None, mac: [0; 6] };
            let path = Path { peer: Peer(1), generation: 0 };
            node.wire.routes.insert(to, path);
        }
        let file = lab.nodes[0].file();
        for event in events {
            let now = lab.now;
            match event {
                Event::Packet(psn, mut body) => {
                    if let Body::Request(request) = &mut body {
                        if let Payload::Segments(segments) = &mut request.payload {
                            for segment in segments.iter_mut().filter(|one| one.file == 0) {
                                segment.file = file;
                            }
                        }
                    }
                    let packet = Packet { to: QP, from: QP, psn, body };
                    lab.nodes[1].with(now, |engine, cx| engine.receive(Peer(0), packet, cx));
                }
                Event::Work(work) => lab.nodes[1].post(QP, work),
                Event::Receive(sges) => {
                    let sges: Vec<_> =
                        sges.into_iter().map(|(key, addr, len)| Sge { key, addr, len }).collect();
                    lab.nodes[1].post_receive(QP, 2, &sges);
                }
                Event::Round => {
                    lab.round();
                }
                Event::Time(us) => lab.now += Duration::from_micros(us),
                Event::Modify(n) => {
                    let states = [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts];
                    for state in states.into_iter().take(usize::from(n)) {
                        let _ = lab.modify(1, QP, state, &change((0, QP)));
                    }
                }
            }
        }
        lab.settle();
        // And a reset makes it as good as new.
        for node in 0..2 {
            lab.modify(node, QP, QpState::Reset, &QpChange::default()).unwrap();
            lab.nodes[node].take_completions();
        }
        prop_assert!(lab.nodes.iter().all(|node| node.engine.counters().sends < 1000));
        lab.run(Duration::from_secs(1));
        prop_assert!(lab.nodes.iter().all(|node| !node.engine.has_outstanding()));
        lab.connect((0, QP), (1, QP), service);
        lab.connect((1, QP), (0, QP), service);
        let sge = sge(lab.nodes[0].whole(rights), BASE, 8);
        let target = lab.nodes[1].whole(rights);
        if service != Service::Ud {
            lab.nodes[0].post(QP, request(7, write(BASE, target), &[sge]));
            lab.settle();
            prop_assert_eq!(lab.nodes[0].completed(), [(7, Status::Success)]);
        }
    }
}
