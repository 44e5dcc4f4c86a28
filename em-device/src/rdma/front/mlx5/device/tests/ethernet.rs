//! The network interface's commands in the order of the stock driver.

use super::super::super::bits::{Field, put};
use super::super::super::command::opcode as op;
use super::super::super::ether::Count;
use super::super::super::fields::{rqc, sqc, tirc, wq};
use super::super::super::nic::{Dispatch, QueueState};
use super::driver::*;
use m2m_fabric::proto::RdmaLinkLayer;

pub(super) const AT: usize = 0x20;
pub(super) const WQ: usize = 0x50;

pub(super) fn driver() -> Driver {
    Driver::started(RdmaLinkLayer::Ethernet)
}

/// A ring of 16 entries.
pub(super) fn ring(driver: &mut Driver, log_stride: u32, values: &[(Field, u32)]) -> Vec<u8> {
    let (page, record) = (driver.page(), driver.page());
    let mut input = input_with(values);
    for (field, value) in [
        (wq::WQ_TYPE, 1),
        (wq::LOG_WQ_STRIDE, log_stride),
        (wq::LOG_WQ_SZ, 4),
    ] {
        field.at(WQ).set(&mut input, value);
    }
    put(&mut input, WQ + wq::DBR_ADDR, &record.to_be_bytes());
    input.extend(page.to_be_bytes());
    input
}

pub(super) fn modify(index: u32, from: u32, state: Field, to: u32) -> Vec<u8> {
    let mut input = input_with(&[(state.at(AT), to)]);
    put(&mut input, 8, &(from << 28 | index).to_be_bytes());
    input
}

fn capability(driver: &mut Driver, kind: u8) -> Vec<u8> {
    let mut input = [0; 16];
    input[7] = kind << 1 | 1;
    driver.ok(op::QUERY_HCA_CAP, &input, 0x1010)
}

#[test]
fn the_capabilities_are_those_of_an_ethernet_port() {
    let mut driver = driver();
    let general = capability(&mut driver, 0);
    let cap = |byte: usize, bit, width| Field::new(0x10 + byte, bit, width).get(&general);
    assert_eq!((cap(0x36, 6, 2), cap(0x34, 2, 1)), (1, 0), "no ib_virt");
    assert_eq!((cap(0x43, 4, 2), cap(0x34, 6, 1)), (3, 1), "offloads, RoCE");
    assert_eq!(cap(0x52, 0, 16), 1024);
    let roce = capability(&mut driver, 4);
    assert_eq!((roce[0x10 + 0x13], roce[0x10 + 0x1f]), (4, 16));
    let flow = capability(&mut driver, 7);
    assert_eq!((flow[0x50] >> 7, flow[0x54], flow[0x57]), (1, 22, 64));
    assert_eq!(capability(&mut driver, 1)[0x10], 0xc0);
}

#[test]
fn queues_are_made_opened_and_closed() {
    let mut driver = driver();
    let (_, cq) = driver.basics();
    let domain = driver.create(op::ALLOC_TRANSPORT_DOMAIN, &[]);
    let tis = driver.create(op::CREATE_TIS, &input_with(&[]));
    let input = ring(&mut driver, 4, &[(rqc::CQN.at(AT), cq)]);
    let rq = driver.create(op::CREATE_RQ, &input);
    driver.ok(op::MODIFY_RQ, &modify(rq, 0, rqc::STATE, 1), 16);
    assert_eq!(
        driver.status(op::MODIFY_RQ, &modify(rq, 0, rqc::STATE, 1)),
        9
    );
    let values = [
        (sqc::CQN.at(AT), cq),
        (sqc::TIS_LST_SZ.at(AT), 1),
        (sqc::TIS_NUM_0.at(AT), tis),
    ];
    let input = ring(&mut driver, 6, &values);
    let sq = driver.create(op::CREATE_SQ, &input);
    driver.ok(op::MODIFY_SQ, &modify(sq, 0, sqc::STATE, 1), 16);
    let context = driver.ok(op::QUERY_SQ, &about(sq), 0x110);
    assert_eq!(sqc::STATE.at(AT).get(&context), 1);
    {
        let ether = driver.device.ether();
        let (number, queue) = ether.send_queues().next().unwrap();
        assert_eq!((number, queue.state), (sq, QueueState::Ready));
        assert_eq!((queue.tisn, queue.cqn), (Some(tis), cq));
        assert_eq!((queue.queue.log_size, queue.queue.log_stride), (4, 6));
        let (number, queue) = ether.receive_queues().next().unwrap();
        assert_eq!((number, queue.state), (rq, QueueState::Ready));
        assert!(queue.strip_vlan);
    }
    assert_eq!(driver.status(op::DESTROY_CQ, &about(cq)), 6, "in use");
    driver.ok(op::DESTROY_SQ, &about(sq), 16);
    driver.ok(op::DESTROY_RQ, &about(rq), 16);
    driver.ok(op::DESTROY_TIS, &about(tis), 16);
    driver.ok(op::DEALLOC_TRANSPORT_DOMAIN, &about(domain), 16);
    driver.ok(op::DESTROY_CQ, &about(cq), 16);
    assert_eq!(driver.status(op::QUERY_RQ, &about(rq)), 5);
}

#[test]
fn queues_whose_ring_or_objects_are_not_there_are_refused() {
    let mut driver = driver();
    let (_, cq) = driver.basics();
    let mut input = ring(&mut driver, 6, &[(sqc::CQN.at(AT), cq)]);
    wq::LOG_WQ_SZ.at(WQ).set(&mut input, 7);
    assert_eq!(driver.status(op::CREATE_SQ, &input), 0x50);
    wq::LOG_WQ_SZ.at(WQ).set(&mut input, 16);
    assert_eq!(driver.status(op::CREATE_SQ, &input), 3);
    let input = ring(&mut driver, 6, &[(sqc::CQN.at(AT), cq + 1)]);
    assert_eq!(driver.status(op::CREATE_SQ, &input), 5);
    let values = [(sqc::CQN.at(AT), cq), (sqc::TIS_LST_SZ.at(AT), 1)];
    let input = ring(&mut driver, 6, &values);
    assert_eq!(driver.status(op::CREATE_SQ, &input), 5, "no such TIS");
    let mut input = ring(&mut driver, 4, &[(rqc::CQN.at(AT), cq)]);
    wq::WQ_TYPE.at(WQ).set(&mut input, 3);
    assert_eq!(driver.status(op::CREATE_RQ, &input), 3, "striding");
}

#[test]
fn receives_are_spread_over_the_queues_of_a_table() {
    let mut driver = driver();
    let (_, cq) = driver.basics();
    let input = ring(&mut driver, 4, &[(rqc::CQN.at(AT), cq)]);
    let rq = driver.create(op::CREATE_RQ, &input);
    let mut table = input_with(&[
        (Field::new(0x36, 0, 16), 4),
        (Field::new(0x3a, 0, 16), 2),
        (Field::new(0x17, 7, 1), 1),
    ]);
    for _ in 0..2 {
        table.extend(rq.to_be_bytes());
    }
    let rqt = driver.create(op::CREATE_RQT, &table);
    assert_eq!(driver.device.ether().rqt(rqt).unwrap().rqs, [rq, rq]);
    let values = [
        (tirc::DISP_TYPE.at(AT), 1),
        (tirc::INDIRECT_TABLE.at(AT), rqt),
        (tirc::RX_HASH_FN.at(AT), 2),
        (tirc::FIELD_SELECTOR_OUTER.at(AT), 0x8000_000f),
    ];
    let tir = driver.create(op::CREATE_TIR, &input_with(&values));
    let (_, found) = driver.device.ether().tirs().next().unwrap();
    assert_eq!(found.dispatch, Dispatch::Indirect(rqt));
    assert_eq!((found.hash_fn, found.fields), (2, 0x8000_000f));
    let mut change = input_with(&[(tirc::RX_HASH_FN.at(AT), 1)]);
    put(&mut change, 8, &tir.to_be_bytes());
    put(&mut change, 0x10, &(1u64 << 2).to_be_bytes());
    driver.ok(op::MODIFY_TIR, &change, 16);
    let (_, found) = driver.device.ether().tirs().next().unwrap();
    assert_eq!(
        (found.hash_fn, found.dispatch),
        (1, Dispatch::Indirect(rqt))
    );
    put(&mut table, 8, &rqt.to_be_bytes());
    Field::new(0x3a, 0, 16).set(&mut table, 4);
    assert_eq!(driver.status(op::MODIFY_RQT, &table), 0x50, "a short list");
    Field::new(0x3a, 0, 16).set(&mut table, 8);
    assert_eq!(driver.status(op::MODIFY_RQT, &table), 3, "too large");
    Field::new(0x3a, 0, 16).set(&mut table, 1);
    driver.ok(op::MODIFY_RQT, &table, 16);
    assert_eq!(driver.device.ether().rqt(rqt).unwrap().rqs, [rq]);
    let none = input_with(&[(tirc::INLINE_RQN.at(AT), rq + 1)]);
    assert_eq!(driver.status(op::CREATE_TIR, &none), 5);
}

#[test]
fn the_filter_is_what_the_driver_set() {
    let mut driver = driver();
    let context = driver.ok(op::QUERY_NIC_VPORT_CONTEXT, &[], 0x110);
    assert_eq!(context[0x106..0x10c], [2, 0, 0, 0, 0, 1]);
    assert_eq!(Field::new(0x36, 0, 16).get(&context), 1500);
    let before = driver.device.ether().revision();
    let mut input = vec![0; 0x200];
    input[0xf] = 0b0101_1110; // mtu, promisc, permanent_address, addresses_list, roce_en
    input[0x103] = 1;
    put(&mut input, 0x126, &9000u16.to_be_bytes());
    input[0x1f0] = 0b0100_0001; // promisc_mc, a list of multicast addresses
    input[0x1f3] = 2;
    put(&mut input, 0x1f6, &[2, 0, 0, 0, 0, 7]);
    assert_eq!(driver.status(op::MODIFY_NIC_VPORT_CONTEXT, &input), 0x50);
    input.extend([0, 0, 0x33, 0x33, 0, 0, 0, 1, 0, 0, 0x33, 0x33, 0, 0, 0, 2]);
    driver.ok(op::MODIFY_NIC_VPORT_CONTEXT, &input, 16);
    let ether = driver.device.ether();
    assert_ne!(ether.revision(), before);
    let vport = ether.vport();
    assert_eq!((vport.mtu, vport.mac), (9000, [2, 0, 0, 0, 0, 7]));
    assert_eq!((vport.promisc_mc, vport.promisc_all), (true, false));
    assert!(vport.roce_en && vport.unicast.is_empty());
    let groups = [[0x33, 0x33, 0, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 2]];
    assert_eq!(vport.multicast, groups);
    let mut query = [0; 16];
    query[0xc] = 1;
    let context = driver.ok(op::QUERY_NIC_VPORT_CONTEXT, &query, 0x120);
    assert_eq!(
        (context[0x103], &context[0x112..0x118]),
        (2, &groups[0][..])
    );
}

#[test]
fn gids_come_and_go() {
    let mut driver = driver();
    assert_eq!(driver.device.take_gid_change(), None);
    let mut input = vec![0; 0x30];
    input[9] = 5;
    put(&mut input, 0x10, &[0xfd; 16]);
    driver.ok(op::SET_ROCE_ADDRESS, &input, 16);
    driver.ok(op::SET_ROCE_ADDRESS, &input, 16);
    assert_eq!(driver.device.take_gid_change(), Some((5, [0xfd; 16])));
    assert_eq!(driver.device.take_gid_change(), None);
    assert_eq!(driver.device.addresses().gids[5], [0xfd; 16]);
    input[9] = 16;
    assert_eq!(driver.status(op::SET_ROCE_ADDRESS, &input), 0xa);
    driver.ok(op::TEARDOWN_HCA, &[], 16);
    assert_eq!(driver.device.take_gid_change(), Some((5, [0; 16])));
}

#[test]
fn flow_tables_are_numbers_with_bounds() {
    let mut driver = driver();
    let mut input = vec![0; 0x40];
    input[0x1b] = 4;
    let table = driver.create(op::CREATE_FLOW_TABLE, &input);
    let mut group = vec![0; 0x400];
    put(&mut group, 0x14, &table.to_be_bytes());
    let group_id = driver.create(op::CREATE_FLOW_GROUP, &group);
    let mut entry = vec![0; 0x340];
    put(&mut entry, 0x14, &table.to_be_bytes());
    put(&mut entry, 0x44, &group_id.to_be_bytes());
    entry[0x23] = 15;
    driver.ok(op::SET_FLOW_TABLE_ENTRY, &entry, 16);
    entry[0x23] = 16;
    assert_eq!(driver.status(op::SET_FLOW_TABLE_ENTRY, &entry), 0xa);
    entry[0x23] = 15;
    assert_eq!(driver.status(op::DESTROY_FLOW_TABLE, &entry), 6, "in use");
    driver.ok(op::DELETE_FLOW_TABLE_ENTRY, &entry, 16);
    assert_eq!(driver.status(op::DELETE_FLOW_TABLE_ENTRY, &entry), 5);
    put(&mut group, 0x18, &group_id.to_be_bytes());
    driver.ok(op::DESTROY_FLOW_GROUP, &group, 16);
    driver.ok(op::DESTROY_FLOW_TABLE, &entry, 16);
}

#[test]
fn counters_and_state_are_told() {
    let mut driver = driver();
    let counters = &mut driver.device.ether().counters;
    let frames = |packets, octets| Count { packets, octets };
    counters.received.unicast = frames(3, 300);
    counters.transmitted.multicast = frames(5, 500);
    counters.out_of_buffer = 7;
    let vport = driver.ok(op::QUERY_VPORT_COUNTER, &[0; 0x20], 0x210);
    assert_eq!((vport[0x97], vport[0x9e..0xa0].to_vec()), (3, vec![1, 44]));
    assert_eq!(vport[0xc7], 5);
    let set = driver.ok(op::ALLOC_Q_COUNTER, &[], 16)[0xb];
    let mut query = [0; 0x20];
    assert_eq!(driver.status(op::QUERY_Q_COUNTER, &query), 5);
    query[0x1f] = set;
    assert_eq!(driver.ok(op::QUERY_Q_COUNTER, &query, 0x100)[0x33], 7);
    let mut register = vec![0; 0x110];
    (register[7], register[10], register[11]) = (1, 0x50, 0x08);
    let register = driver.ok(op::ACCESS_REG, &register, 0x110);
    assert_eq!((register[0x1f], register[0x27]), (5, 3));
    assert_eq!(register[0x46..0x48], [1, 44], "octets received");
    let mut register = vec![0; 0x30];
    (register[7], register[10], register[11]) = (1, 0x50, 0x07);
    assert_eq!(
        driver.ok(op::ACCESS_REG, &register, 0x30)[0x14..],
        [0; 0x1c]
    );
    let state = driver.ok(op::QUERY_VPORT_STATE, &[], 16);
    assert_eq!(state[0xf], 0x11);
    driver.device.set_link(false);
    assert_eq!(driver.ok(op::QUERY_VPORT_STATE, &[], 16)[0xf], 0x10);
}

#[test]
fn an_infiniband_port_has_no_network_interface() {
    let mut driver = Driver::started(RdmaLinkLayer::Infiniband);
    for opcode in [
        op::CREATE_TIS,
        op::QUERY_NIC_VPORT_CONTEXT,
        op::SET_ROCE_ADDRESS,
    ] {
        assert_eq!(driver.status(opcode, &[0; 0x30]), 2);
    }
}
