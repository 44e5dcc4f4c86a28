//! The table of states, all of it.

use super::lab::*;
use crate::rdma::engine::{Notice, Refused};
use crate::rdma::verbs::*;

use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};

const STATES: [QpState; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Error];
const SERVICES: [Service; 3] = [Service::Rc, Service::Uc, Service::Ud];

/// A queue pair in `state`, if its service has that.
fn in_state(service: Service, state: QpState) -> Option<Lab> {
    let mut lab = Lab::new(2);
    lab.add_qp(0, QP, service, ReceiveFrom::Own);
    let way: &[QpState] = match state {
        Reset => &[],
        Init => &[Init],
        Rtr => &[Init, Rtr],
        Rts | Sqe => &[Init, Rtr, Rts],
        Sqd => &[Init, Rtr, Rts, Sqd],
        Error => &[Error],
    };
    for step in way {
        lab.modify(0, QP, *step, &change((1, QP))).unwrap();
    }
    if state == Sqe {
        let mut failing = request(1, send(), &[sge(MemKey(0), BASE, 8)]);
        failing.datagram = (service == Service::Ud).then_some(Datagram {
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
        });
        lab.nodes[0].post(QP, failing);
        lab.settle();
        assert_eq!(
            lab.nodes[0].completed(),
            [(1, Status::LocalProtection)],
            "{service:?}"
        );
    }
    (lab.nodes[0].state(QP) == state).then_some(lab)
}

#[test]
fn exactly_the_transitions_of_the_specification_are_possible() {
    let possible = [
        (Reset, &[Init][..]),
        (Init, &[Init, Rtr]),
        (Rtr, &[Rts]),
        (Rts, &[Rts, Sqd]),
        (Sqd, &[Rts, Sqd]),
        (Sqe, &[Rts]),
        (Error, &[]),
    ];
    for service in SERVICES {
        for (from, ways) in possible {
            for to in STATES {
                let Some(mut lab) = in_state(service, from) else {
                    assert_eq!((service, from), (Service::Rc, Sqe));
                    continue;
                };
                let expected = if ways.contains(&to) || [Reset, Error].contains(&to) {
                    Ok(())
                } else {
                    Err(Refused::Transition(from, to))
                };
                let result = lab.modify(0, QP, to, &change((1, QP)));
                assert_eq!(result, expected, "{service:?} {from:?} {to:?}");
                let now = if result.is_ok() { to } else { from };
                assert_eq!(lab.nodes[0].state(QP), now);
            }
        }
    }
}

/// Takes an attribute away.
type Without = (&'static str, fn(&mut QpChange));

const ATTRIBUTES: [Without; 13] = [
    ("remote_rights", |c| c.remote_rights = None),
    ("qkey", |c| c.qkey = None),
    ("dest_qp", |c| c.dest_qp = None),
    ("path", |c| c.path = None),
    ("mtu", |c| c.mtu = None),
    ("receive_psn", |c| c.receive_psn = None),
    ("send_psn", |c| c.send_psn = None),
    ("min_rnr_timer", |c| c.min_rnr_timer = None),
    ("timeout", |c| c.timeout = None),
    ("retry_count", |c| c.retry_count = None),
    ("rnr_retry", |c| c.rnr_retry = None),
    ("max_reads", |c| c.max_reads = None),
    ("max_dest_reads", |c| c.max_dest_reads = None),
];

#[test]
fn exactly_the_attributes_of_the_specification_are_needed() {
    let connection = ["dest_qp", "path", "mtu", "receive_psn"];
    let sending = ["timeout", "retry_count", "rnr_retry", "max_reads"];
    for service in SERVICES {
        let reliable = service == Service::Rc;
        let connected = service != Service::Ud;
        for (from, to) in [
            (Reset, Init),
            (Init, Init),
            (Init, Rtr),
            (Rtr, Rts),
            (Rts, Rts),
            (Sqd, Sqd),
            (Sqd, Rts),
        ] {
            for (name, without) in ATTRIBUTES {
                let needed = match (from, to) {
                    (Reset, Init) => name == if connected { "remote_rights" } else { "qkey" },
                    (Init, Rtr) => {
                        connected && connection.contains(&name)
                            || reliable && ["min_rnr_timer", "max_dest_reads"].contains(&name)
                    }
                    (Rtr, Rts) => name == "send_psn" || reliable && sending.contains(&name),
                    _ => false,
                };
                let mut lab = in_state(service, from).unwrap();
                let mut change = change((1, QP));
                without(&mut change);
                let expected = if needed {
                    Err(Refused::Attribute(name))
                } else {
                    Ok(())
                };
                let result = lab.modify(0, QP, to, &change);
                assert_eq!(result, expected, "{service:?} {from:?} {to:?} {name}");
            }
        }
    }
}

#[test]
fn attributes_out_of_range_are_refused_and_nothing_changes() {
    let spoils: [(QpState, Without); 13] = [
        (Init, ("dest_qp", |c| c.dest_qp = Some(QpNum(1 << 24)))),
        (Init, ("mtu", |c| c.mtu = Some(128))),
        (Init, ("mtu", |c| c.mtu = Some(8192))),
        (Init, ("mtu", |c| c.mtu = Some(1500))),
        (Init, ("mtu", |c| c.mtu = Some(0))),
        (Init, ("receive_psn", |c| c.receive_psn = Some(1 << 24))),
        (Init, ("min_rnr_timer", |c| c.min_rnr_timer = Some(32))),
        (Init, ("max_dest_reads", |c| c.max_dest_reads = Some(129))),
        (Rtr, ("send_psn", |c| c.send_psn = Some(1 << 24))),
        (Rtr, ("timeout", |c| c.timeout = Some(32))),
        (Rtr, ("retry_count", |c| c.retry_count = Some(8))),
        (Rtr, ("rnr_retry", |c| c.rnr_retry = Some(8))),
        (Rtr, ("max_reads", |c| c.max_reads = Some(129))),
    ];
    for (from, (name, spoil)) in spoils {
        let mut lab = in_state(Service::Rc, from).unwrap();
        let before = lab.nodes[0].engine.qp(QP);
        let mut change = change((1, QP));
        spoil(&mut change);
        let to = if from == Init { Rtr } else { Rts };
        let result = lab.modify(0, QP, to, &change);
        assert_eq!(result, Err(Refused::Attribute(name)));
        assert_eq!(lab.nodes[0].engine.qp(QP), before);
    }
}

#[test]
fn status_tells_the_psns() {
    let lab = in_state(Service::Rc, Rts).unwrap();
    let status = lab.nodes[0].engine.qp(QP).unwrap();
    assert_eq!(
        (status.send_psn, status.receive_psn),
        (0xff_fffe, 0xff_fffe)
    );
    assert_eq!(lab.nodes[0].engine.qp(QpNum(1)), None);
}

#[test]
fn a_drained_queue_pair_says_so_at_once() {
    let lab = in_state(Service::Rc, Sqd).unwrap();
    let mut engine = lab.nodes.into_iter().next().unwrap().engine;
    assert_eq!(engine.take_notice(), Some(Notice::SendQueueDrained(QP)));
    assert_eq!(engine.take_notice(), None);
}

#[test]
fn objects_are_found_used_and_refused_by_number() {
    let mut lab = Lab::new(1);
    let engine = &mut lab.nodes[0].engine;
    assert_eq!(
        engine.add_cq(CQ, Completions::default()),
        Err(Refused::Number)
    );
    let far = CqNum(1 << 24);
    assert_eq!(
        engine.add_cq(far, Completions::default()),
        Err(Refused::Number)
    );
    assert!(engine.remove_cq(CqNum(9)).is_err());
    lab.add_qp(0, QP, Service::Rc, ReceiveFrom::Nothing);
    let engine = &mut lab.nodes[0].engine;
    assert!(matches!(engine.remove_cq(CQ), Err(Refused::InUse)));
    engine.remove_qp(QP).unwrap();
    assert_eq!(engine.remove_qp(QP), Err(Refused::Unknown));
    assert!(engine.remove_cq(CQ).is_ok());
    engine.ring(QP);
    engine.clear();
    assert!(engine.cq_mut(CQ).is_none());
}
