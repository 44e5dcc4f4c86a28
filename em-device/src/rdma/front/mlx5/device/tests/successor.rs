//! What a successor makes of what a former process left.

use super::super::super::bits::put;
use super::super::super::command::opcode as op;
use super::super::super::fields::{mkc, qpc, srqc};
use super::driver::*;
use crate::rdma::kept::Key;
use crate::rdma::packet::{Action, Body, Packet, Payload, Request, Tail};
use crate::rdma::verbs::{MemKey, Pd, QpNum, QpState, RegionChange, Rights, Translation};
use crate::testing::BASE;
use m2m_fabric::proto::RdmaLinkLayer;

const IB: RdmaLinkLayer = RdmaLinkLayer::Infiniband;

fn connect(driver: &mut Driver, qpn: u32) {
    let values = [(qpc::RRE.at(qpc::AT), 1), (qpc::RWE.at(qpc::AT), 1)];
    driver.ok(op::RST2INIT_QP, &qp_change(qpn, 0, &values), 16);
    let values = [
        (qpc::MTU.at(qpc::AT), 3),
        (qpc::REMOTE_QPN.at(qpc::AT), 0x123),
        (qpc::RLID.at(qpc::AT), 4),
        (qpc::NEXT_RCV_PSN.at(qpc::AT), 0xab_cdef),
        (qpc::MIN_RNR_NAK.at(qpc::AT), 9),
    ];
    driver.ok(op::INIT2RTR_QP, &qp_change(qpn, 0, &values), 16);
    let values = [
        (qpc::NEXT_SEND_PSN.at(qpc::AT), 0x55),
        (qpc::RETRY_COUNT.at(qpc::AT), 7),
        (qpc::ACK_TIMEOUT.at(qpc::AT), 14),
    ];
    driver.ok(op::RTR2RTS_QP, &qp_change(qpn, 0, &values), 16);
}

#[test]
fn connections_are_what_they_were_and_numbers_are_not_given_twice() {
    let mut driver = Driver::started(IB);
    let (pd, cq) = driver.basics();
    let inputs = [0; 4].map(|_| driver.qp_input(0, pd, cq));
    let qps = inputs
        .clone()
        .map(|input| driver.create(op::CREATE_QP, &input));
    for qpn in &qps[..3] {
        connect(&mut driver, *qpn);
    }
    driver.ok(op::QP_2ERR, &about(qps[1]), 16);
    driver.ok(op::DESTROY_QP, &about(qps[2]), 16);
    let query =
        |driver: &mut Driver| [0, 1, 3].map(|n| driver.ok(op::QUERY_QP, &about(qps[n]), 0x110));
    let before = query(&mut driver);
    for _ in 0..3 {
        driver.succeed();
        assert!(query(&mut driver) == before);
        driver.turn();
    }
    let states = [0, 1, 3].map(|n| driver.device.engine().qp(QpNum(qps[n])).unwrap().state);
    assert_eq!(states, [QpState::Rts, QpState::Error, QpState::Reset]);
    assert_eq!(driver.status(op::DEALLOC_PD, &about(pd)), 6, "in use");
    assert_eq!(driver.create(op::CREATE_QP, &inputs[2]), qps[2]);
    assert_eq!(driver.create(op::CREATE_QP, &inputs[2]), qps[3] + 1);
    // A reset is one, whatever was before.
    driver.ok(op::QP_2RST, &about(qps[0]), 16);
    driver.succeed();
    connect(&mut driver, qps[0]);
}

/// A message had begun to come in when the queue pair went to error, and the process died before it flushed.
#[test]
fn the_receive_in_hand_of_a_queue_pair_in_error_is_flushed_by_the_successor() {
    const ERROR: u8 = 6;
    let mut driver = Driver::started(IB);
    let (pd, cqn) = driver.basics();
    // `basics` takes three pages: event queue, completion queue, its record.
    let entries = PAGES + 0x1000;
    let key = driver.create(op::CREATE_MKEY, &physical_key(pd)) << 8 | 0x42;
    let input = driver.qp_input(0, pd, cqn);
    let (receives, record) = (PAGES + 0x3000, PAGES + 0x4000);
    let qpn = driver.create(op::CREATE_QP, &input);
    connect(&mut driver, qpn);
    let mut segment = 8192u32.to_be_bytes().to_vec();
    segment.extend(key.to_be_bytes());
    segment.extend((BASE + 0x30_0000).to_be_bytes());
    driver.memory.write(receives, &segment);
    driver.memory.write(record, &1u32.to_be_bytes());
    let first = Request {
        action: Action::Send,
        first: true,
        last: false,
        tail: Tail::Plain,
        solicited: false,
        payload: Payload::Inline([7; 1024].into_iter().collect()),
        datagram: None,
        acknowledge: false,
        mtu_shift: 10,
    };
    let packet = Packet {
        to: QpNum(qpn),
        from: QpNum(0x123),
        psn: 0xab_cdef,
        body: Body::Request(Box::new(first)),
    };
    driver.with(|device, cx| device.engine().receive(PATH.peer, packet, cx));
    assert_eq!(driver.memory.read(BASE + 0x30_0000, 4), [7; 4], "it came");
    driver.kept().qp(qpn).unwrap().set_state(ERROR);
    let state = |driver: &mut Driver| driver.device.engine().qp(QpNum(qpn)).unwrap().state;
    for _ in 0..2 {
        driver.succeed();
        driver.turn();
        assert_eq!(state(&mut driver), QpState::Error);
        let flushed = driver.memory.read(entries, 64);
        assert_eq!((flushed[63] >> 4, flushed[55]), (0xe, 5));
        let next = driver.memory.read(entries + 64 + 63, 1);
        assert_eq!(next[0] >> 4, 0xf, "once, also when the successor dies");
    }
}

#[test]
fn keys_are_what_work_requests_made_of_them() {
    let mut driver = Driver::started(IB);
    let pd = driver.create(op::ALLOC_PD, &[]);
    let input = input_with(&[
        (mkc::FREE.at(mkc::AT), 1),
        (mkc::ACCESS_MODE_1_0.at(mkc::AT), 1),
        (mkc::TRANSLATIONS_OCTWORD_SIZE.at(mkc::AT), 8),
    ]);
    let key = driver.create(op::CREATE_MKEY, &input);
    let gone = driver.create(op::CREATE_MKEY, &input);
    let change = |index: u32, valid| RegionChange {
        key: MemKey(index << 8),
        variant: Some(7),
        pd: Some(Pd(pd)),
        rights: Some(Rights::LOCAL_WRITE | Rights::REMOTE_READ),
        start: Some(0x1_0800),
        len: Some(0x1800),
        translation: Some(Translation::Pages {
            shift: 12,
            pages: [0x5000, 0x9000].into(),
            offset: 0x800,
        }),
        valid,
    };
    for index in [key, gone] {
        let engine = driver.device.engine();
        engine.regions_mut().change(&change(index, true)).unwrap();
        engine.keep_region(index);
    }
    let before = driver.device.engine().regions().get(key).unwrap().clone();
    driver.ok(op::DESTROY_MKEY, &about(gone), 16);
    driver.succeed();
    let regions = driver.device.engine().regions();
    assert_eq!(regions.get(key), Some(&before));
    assert!(before.valid && regions.get(gone).is_none());
    assert_eq!(driver.create(op::CREATE_MKEY, &input), gone);
    driver.ok(op::DESTROY_MKEY, &about(key), 16);
    driver.succeed();
    assert!(driver.device.engine().regions().get(key).is_none());
}

#[test]
fn limits_of_shared_queues_and_settings_survive() {
    let mut driver = Driver::started(RdmaLinkLayer::Ethernet);
    let pd = driver.create(op::ALLOC_PD, &[]);
    let (page, record) = (driver.page(), driver.page());
    let mut input = input_with(&[
        (srqc::LOG_SRQ_SIZE.at(srqc::AT), 4),
        (srqc::LOG_RQ_STRIDE.at(srqc::AT), 1),
        (srqc::PD.at(srqc::AT), pd),
    ]);
    put(&mut input, srqc::AT + srqc::DBR_ADDR, &record.to_be_bytes());
    input.extend(page.to_be_bytes());
    let srq = driver.create(op::CREATE_SRQ, &input);
    let gid = [0xfe; 16];
    let mut input = vec![0; 0x20];
    put(&mut input, 0x8, &[0, 3]);
    put(&mut input, 0x10, &gid);
    driver.ok(op::SET_ROCE_ADDRESS, &input, 16);
    driver.succeed();
    assert_eq!(driver.device.addresses().gids[3], gid);
    assert_eq!(
        driver.device.take_gid_change(),
        Some((3, gid)),
        "told again"
    );
    driver.ok(op::DESTROY_SRQ, &about(srq), 16);
    driver.succeed();
    assert_eq!(driver.status(op::DESTROY_SRQ, &about(srq)), 5);
}

#[test]
fn an_interrupted_teardown_leaves_a_device_without_objects() {
    let mut driver = Driver::started(IB);
    driver.basics();
    let hca = Key {
        class: 1,
        number: 0,
        part: 0,
    };
    driver.kept().store().remove_part(hca);
    driver.succeed();
    assert!(!driver.device.running());
    assert!(driver.kept().store().is_empty());
    driver.ok(op::INIT_HCA, &[], 16);
    driver.basics();
}

#[test]
fn records_that_make_no_sense_are_refused() {
    for bytes in [&[0; 3][..], &[0xff; 40]] {
        let mut driver = Driver::started(IB);
        driver.basics();
        let key = Key {
            class: 4,
            number: 99,
            part: 0,
        };
        driver.kept().store().put(key, &[bytes]);
        assert!(driver.try_to_succeed().is_err());
    }
}
