//! Objects: bounds, lifetimes, states.

use super::super::super::bits::{Field, put};
use super::super::super::command::opcode as op;
use super::super::super::fields::{cqc, eqc, mkc, qpc};
use super::driver::*;
use crate::rdma::front::allowance::MAX_LIST_BYTES;
use crate::rdma::verbs::{Destination, QpNum, QpState, Translation};
use m2m_fabric::proto::RdmaLinkLayer;

const IB: RdmaLinkLayer = RdmaLinkLayer::Infiniband;

/// A key of `len` bytes from 0x1_0800 with these pages.
fn key_input(pd: u32, len: u64, pages: &[u64]) -> Vec<u8> {
    let octwords = pages.len().div_ceil(2) as u32;
    let mut input = input_with(&[
        (mkc::ACCESS_MODE_1_0.at(mkc::AT), 1),
        (mkc::PD.at(mkc::AT), pd),
        (mkc::LOG_PAGE_SIZE.at(mkc::AT), 12),
        (mkc::TRANSLATIONS_OCTWORD_ACTUAL_SIZE, octwords),
    ]);
    put(
        &mut input,
        mkc::AT + mkc::START_ADDR,
        &0x1_0800u64.to_be_bytes(),
    );
    put(&mut input, mkc::AT + mkc::LEN_FIELD, &len.to_be_bytes());
    input.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
    input
}

#[test]
fn a_key_with_pages_begins_within_the_first() {
    let mut driver = Driver::started(IB);
    let pd = driver.create(op::ALLOC_PD, &[]);
    let key = driver.create(op::CREATE_MKEY, &key_input(pd, 0x1000, &[0x5003, 0x9003]));
    let region = driver.device.engine().regions().get(key).unwrap().clone();
    let translation = Translation::Pages {
        shift: 12,
        pages: [0x5000, 0x9000].into(),
        offset: 0x800,
    };
    assert_eq!((region.start, region.translation), (0x1_0800, translation));
    assert!(region.valid);
    let saved = driver.ok(op::QUERY_MKEY, &about(key), 0x50);
    assert_eq!(mkc::PD.at(mkc::AT).get(&saved), pd);
    driver.ok(op::DESTROY_MKEY, &about(key), 16);
    assert_eq!(driver.status(op::DESTROY_MKEY, &about(key)), 5);
    assert_eq!(driver.device.objects.allowance.used(), 0);
}

#[test]
fn keys_whose_list_is_too_short_or_whose_domain_is_unknown_are_refused() {
    let mut driver = Driver::started(IB);
    let pd = driver.create(op::ALLOC_PD, &[]);
    let pages = [0x5000, 0x9000];
    let refused = |driver: &mut Driver, input: &[u8]| driver.status(op::CREATE_MKEY, input);
    assert_eq!(refused(&mut driver, &key_input(pd, 0x1801, &pages)), 3);
    assert_eq!(refused(&mut driver, &key_input(pd, u64::MAX, &pages)), 3);
    assert_eq!(refused(&mut driver, &key_input(pd + 1, 8, &pages)), 5);
    let mut lying = key_input(pd, 0x1_0000, &pages);
    mkc::TRANSLATIONS_OCTWORD_ACTUAL_SIZE.set(&mut lying, 100);
    assert_eq!(refused(&mut driver, &lying), 0x50);
    let mut klm = key_input(pd, 8, &pages);
    mkc::ACCESS_MODE_1_0.at(mkc::AT).set(&mut klm, 2);
    assert_eq!(refused(&mut driver, &klm), 3);
    assert!(driver.device.engine().regions().is_empty());
}

#[test]
fn a_free_key_is_not_valid_and_is_charged_for_its_list() {
    let mut driver = Driver::started(IB);
    let octwords = (MAX_LIST_BYTES / 16 / 2 + 1) as u32;
    let input = input_with(&[
        (mkc::FREE.at(mkc::AT), 1),
        (mkc::ACCESS_MODE_1_0.at(mkc::AT), 1),
        (mkc::TRANSLATIONS_OCTWORD_SIZE.at(mkc::AT), octwords),
    ]);
    let key = driver.create(op::CREATE_MKEY, &input);
    assert!(!driver.device.engine().regions().get(key).unwrap().valid);
    assert_eq!(
        driver.status(op::CREATE_MKEY, &input),
        8,
        "half of it is left"
    );
}

#[test]
fn a_connection_goes_through_its_states_and_is_queried() {
    let mut driver = Driver::started(IB);
    let (pd, cq) = driver.basics();
    let input = driver.qp_input(0, pd, cq);
    let qpn = driver.create(op::CREATE_QP, &input);
    assert!(qpn > 1);
    assert_eq!(driver.status(op::RTR2RTS_QP, &qp_change(qpn, 0, &[])), 0x10);
    let init = qp_change(qpn, 0, &[(qpc::RRE.at(qpc::AT), 1)]);
    driver.ok(op::RST2INIT_QP, &init, 16);
    let mut rtr = qp_change(
        qpn,
        1 << 3,
        &[
            (qpc::MTU.at(qpc::AT), 5),
            (qpc::REMOTE_QPN.at(qpc::AT), 0x123),
            (qpc::RLID.at(qpc::AT), 4),
            (qpc::NEXT_RCV_PSN.at(qpc::AT), 0xab_cdef),
            (qpc::RWE.at(qpc::AT), 1),
        ],
    );
    driver.path = None;
    assert_eq!(driver.status(op::INIT2RTR_QP, &rtr), 3, "the OM refused");
    driver.path = Some(PATH);
    driver.ok(op::INIT2RTR_QP, &rtr, 16);
    let rts = qp_change(
        qpn,
        0,
        &[
            (qpc::NEXT_SEND_PSN.at(qpc::AT), 0x55),
            (qpc::RETRY_COUNT.at(qpc::AT), 7),
            (qpc::ACK_TIMEOUT.at(qpc::AT), 14),
        ],
    );
    driver.ok(op::RTR2RTS_QP, &rts, 16);
    let context = driver.ok(op::QUERY_QP, &about(qpn), 0x110);
    let get = |field: Field| field.at(qpc::AT).get(&context);
    assert_eq!((get(qpc::STATE), get(qpc::ST), get(qpc::MTU)), (3, 0, 5));
    assert_eq!((get(qpc::REMOTE_QPN), get(qpc::RLID)), (0x123, 4));
    assert_eq!(
        (get(qpc::NEXT_SEND_PSN), get(qpc::NEXT_RCV_PSN)),
        (0x55, 0xab_cdef)
    );
    assert_eq!((get(qpc::RRE), get(qpc::RWE), get(qpc::RAE)), (1, 1, 0));
    assert_eq!((get(qpc::RETRY_COUNT), get(qpc::ACK_TIMEOUT)), (7, 14));
    driver.ok(op::QP_2ERR, &about(qpn), 16);
    let state = driver.device.engine().qp(QpNum(qpn)).unwrap().state;
    assert_eq!(state, QpState::Error);
    driver.ok(op::QP_2RST, &about(qpn), 16);
    driver.ok(op::RST2INIT_QP, &init, 16);
    qpc::MTU.at(qpc::AT).set(&mut rtr, 6);
    assert_eq!(driver.status(op::INIT2RTR_QP, &rtr), 3, "no such MTU");
    driver.ok(op::DESTROY_QP, &about(qpn), 16);
    assert_eq!(driver.status(op::QUERY_QP, &about(qpn)), 5);
}

#[test]
fn destinations_are_those_of_the_port_s_kind() {
    let context = |values: &mut Vec<u8>| {
        put(values, qpc::AT + qpc::RMAC, &[2, 0, 0, 0, 0, 9]);
        put(values, qpc::AT + qpc::RGID, &[0xfd; 16]);
    };
    for (link, grh, expected) in [
        (IB, 0, (4, None, [0; 6])),
        (IB, 1, (4, Some([0xfd; 16]), [0; 6])),
        (
            RdmaLinkLayer::Ethernet,
            0,
            (0, Some([0xfd; 16]), [2, 0, 0, 0, 0, 9]),
        ),
    ] {
        let mut driver = Driver::started(link);
        let (pd, cq) = driver.basics();
        let input = driver.qp_input(0, pd, cq);
        let qpn = driver.create(op::CREATE_QP, &input);
        let fields = [(qpc::RLID.at(qpc::AT), 4), (qpc::GRH.at(qpc::AT), grh)];
        let mut input = qp_change(qpn, 0, &fields);
        context(&mut input);
        driver.post(0, op::INIT2RTR_QP, &input, 16);
        let queue = driver.registers.command_queue().unwrap();
        let found = driver.with(|device, cx| {
            let command = super::super::super::command::read_command(queue, 0, cx.memory).unwrap();
            device.destination(&command)
        });
        let (lid, gid, mac) = expected;
        assert_eq!(found, Some(Destination { lid, gid, mac }));
    }
}

#[test]
fn queues_that_do_not_fit_into_their_pages_are_refused() {
    let mut driver = Driver::started(IB);
    let (pd, cq) = driver.basics();
    let mut input = driver.qp_input(0, pd, cq);
    qpc::LOG_SQ_SIZE.at(qpc::AT).set(&mut input, 6);
    assert_eq!(driver.status(op::CREATE_QP, &input), 0x50);
    let mut input = driver.qp_input(0, pd, cq);
    qpc::PAGE_OFFSET.at(qpc::AT).set(&mut input, 48);
    assert_eq!(driver.status(op::CREATE_QP, &input), 0x50);
    let mut input = driver.cq_input(1, 7);
    assert_eq!(driver.status(op::CREATE_CQ, &input), 0x50);
    cqc::LOG_CQ_SIZE.at(cqc::AT).set(&mut input, 31);
    assert_eq!(driver.status(op::CREATE_CQ, &input), 3);
    let input = input_with(&[(eqc::LOG_EQ_SIZE.at(eqc::AT), 31)]);
    assert_eq!(driver.status(op::CREATE_EQ, &input), 3);
    let input = input_with(&[(eqc::INTR.at(eqc::AT), VECTORS.into())]);
    assert_eq!(driver.status(op::CREATE_EQ, &input), 3);
}

#[test]
fn queue_pairs_need_their_objects_and_a_known_type() {
    let mut driver = Driver::started(IB);
    let (pd, cq) = driver.basics();
    for (st, pd, cq, status) in [(0, pd + 1, cq, 5), (0, pd, cq + 1, 5), (3, pd, cq, 3)] {
        let input = driver.qp_input(st, pd, cq);
        assert_eq!(driver.status(op::CREATE_QP, &input), status);
    }
    let mut input = driver.qp_input(0, pd, cq);
    qpc::RQ_TYPE.at(qpc::AT).set(&mut input, 1);
    assert_eq!(driver.status(op::CREATE_QP, &input), 5, "no such SRQ");
    let input = driver.cq_input(63, 4);
    assert_eq!(driver.status(op::CREATE_CQ, &input), 5, "no such EQ");
    assert_eq!(driver.device.objects.qps.len(), 0);
}

#[test]
fn event_queues_run_out() {
    let mut driver = Driver::started(IB);
    let page = driver.page();
    let mut input = input_with(&[]);
    input.extend(page.to_be_bytes());
    let made = (0..100).filter(|_| driver.status(op::CREATE_EQ, &input) == 0);
    assert_eq!(made.count(), 63);
}
