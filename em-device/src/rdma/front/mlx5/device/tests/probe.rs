//! The whole way of the stock driver.

use super::super::super::bits::{Field, get64};
use super::super::super::command::opcode as op;
use super::super::super::fields::{qpc, rmpc, srqc, wq};
use super::driver::*;
use crate::rdma::verbs::{Pd, Rights};
use m2m_fabric::proto::RdmaLinkLayer;

const IB: RdmaLinkLayer = RdmaLinkLayer::Infiniband;

fn op_mod(value: u8) -> [u8; 16] {
    let mut input = [0; 16];
    input[7] = value;
    input
}

fn register(id: u16) -> Vec<u8> {
    let mut input = vec![0; 0x50];
    input[7] = 1;
    input[10..12].copy_from_slice(&id.to_be_bytes());
    input
}

fn table(index: u16) -> [u8; 16] {
    let mut input = [0; 16];
    input[14..].copy_from_slice(&index.to_be_bytes());
    input
}

fn bring_up(driver: &mut Driver, qpn: u32, mtu: u32) {
    driver.ok(op::RST2INIT_QP, &qp_change(qpn, 0, &[]), 16);
    let rtr = qp_change(qpn, 0, &[(qpc::MTU.at(qpc::AT), mtu)]);
    driver.ok(op::INIT2RTR_QP, &rtr, 16);
    driver.ok(op::RTR2RTS_QP, &qp_change(qpn, 0, &[]), 16);
    let state = driver.ok(op::QUERY_QP, &about(qpn), 0x110);
    assert_eq!(qpc::STATE.at(qpc::AT).get(&state), 3);
}

#[test]
fn a_driver_probes_and_unloads_an_infiniband_port() {
    let mut driver = Driver::new(IB);
    driver.ok(op::ENABLE_HCA, &[], 16);
    let issi = driver.ok(op::QUERY_ISSI, &[], 0x70);
    assert_eq!(Field::new(0x6c, 0, 32).get(&issi) & 2, 2);
    driver.ok(op::SET_ISSI, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 16);
    let pages = driver.ok(op::QUERY_PAGES, &op_mod(1), 16);
    assert_eq!(Field::new(0xc, 0, 32).get(&pages), 0);
    for current in [0, 1] {
        let caps = driver.ok(op::QUERY_HCA_CAP, &op_mod(current), 0x1010);
        let cap = |byte: usize, bit, width| Field::new(0x10 + byte, bit, width).get(&caps);
        assert_eq!((cap(0x37, 0, 8), cap(0x36, 6, 2)), (1, 0), "an IB port");
        assert_eq!((cap(0x34, 2, 1), cap(0x47, 4, 1)), (1, 1), "ib_virt, xrc");
        assert_eq!((cap(0x40, 7, 1), cap(0x44, 7, 1)), (0, 1), "UMR, pg");
        assert_eq!((cap(0x42, 0, 2), cap(0x3f, 4, 4)), (0, 1), "cqe_version");
        assert!(cap(0x52, 0, 16) >= 512 && cap(0x1f, 4, 4) >= 4);
    }
    driver.ok(op::SET_HCA_CAP, &vec![0; 0x1010], 16);
    driver.ok(op::QUERY_PAGES, &op_mod(2), 16);
    assert_eq!(driver.status(op::ALLOC_PD, &[]), 4, "not before INIT_HCA");
    driver.ok(op::INIT_HCA, &[], 16);
    assert!(driver.device.running());
    let adapter = driver.ok(op::QUERY_ADAPTER, &[], 0x110);
    assert_eq!(Field::new(0x29, 0, 24).get(&adapter), 0x2c9);

    let uar = driver.create(op::ALLOC_UAR, &[]);
    assert!(uar >= 8);
    let (command_eq, command_entries) = driver.create_eq(5, 1 << 0x0a, 0);
    assert_eq!(driver.memory.read(command_entries + 63, 1), [1], "no event");
    let (async_eq, _) = driver.create_eq(6, 0x1f_02be, 0);
    let event = driver.memory.read(command_entries, 64);
    assert_eq!((event[1], event[63]), (0x0a, 0));
    assert_eq!(Field::new(32, 0, 32).get(&event), 1, "the entry's bit");

    let context = driver.ok(op::QUERY_HCA_VPORT_CONTEXT, &[], 0x210);
    assert_eq!((context[0x32] >> 4, context[0x33]), (5, 0x44), "active");
    assert_eq!((get64(&context, 0x40), get64(&context, 0x48)), (GUID, GUID));
    assert_eq!(Field::new(0x70, 0, 16).get(&context), u32::from(LID));
    let name = driver.ok(op::ACCESS_REG, &register(0x6001), 0x50);
    assert!(name[0x10] != 0);
    driver.create(op::ALLOC_XRCD, &[]);
    let speed = driver.ok(op::ACCESS_REG, &register(0x5004), 0x50);
    assert_eq!(Field::new(0x38, 0, 16).get(&speed), 4);
    assert_eq!(Field::new(0x3a, 0, 16).get(&speed), 32);
    let mtu = driver.ok(op::ACCESS_REG, &register(0x5003), 0x20);
    assert_eq!(Field::new(0x1c, 0, 16).get(&mtu), 4096);
    let lanes = driver.ok(op::ACCESS_REG, &register(0x500f), 0x20);
    assert_eq!(lanes[0x17] & 0xf, 1);
    let gid = driver.ok(op::QUERY_HCA_VPORT_GID, &table(0), 0x20);
    assert_eq!((get64(&gid, 0x10), get64(&gid, 0x18)), (0xfe80 << 48, GUID));
    assert_eq!(driver.status(op::QUERY_HCA_VPORT_GID, &table(8)), 0xa);
    let key = |driver: &mut Driver, n| {
        let output = driver.ok(op::QUERY_HCA_VPORT_PKEY, &table(n), 0x14);
        Field::new(0x12, 0, 16).get(&output)
    };
    assert_eq!((key(&mut driver, 0), key(&mut driver, 127)), (0xffff, 0));
    let mut mad = vec![0; 0x110];
    (mad[0x11], mad[0x13], mad[0x21]) = (4, 1, 1);
    let mad = driver.ok(op::MAD_IFC, &mad, 0x110);
    assert_eq!(
        (mad[0x13], &mad[0x14..0x16], mad[0x50]),
        (0x81, &[0, 0][..], 1)
    );

    let pd = driver.create(op::ALLOC_PD, &[]);
    let key = driver.create(op::CREATE_MKEY, &physical_key(pd));
    let region = driver.device.engine().regions().get(key).unwrap().clone();
    assert_eq!((region.key.0, region.pd), (key << 8 | 0x42, Pd(pd)));
    assert_eq!((region.len, region.rights), (u64::MAX, Rights::LOCAL_WRITE));
    let (completion_eq, _) = driver.create_eq(6, 0, 1);
    let input = driver.cq_input(completion_eq, 5);
    let cq = driver.create(op::CREATE_CQ, &input);
    let (page, record) = (driver.page(), driver.page());
    let mut xrc = input_with(&[
        (srqc::LOG_SRQ_SIZE.at(srqc::AT), 1),
        (srqc::LOG_RQ_STRIDE.at(srqc::AT), 1),
        (srqc::PD.at(srqc::AT), pd),
    ]);
    xrc[0x38..0x40].copy_from_slice(&record.to_be_bytes());
    xrc.extend(page.to_be_bytes());
    let xrc = driver.create(op::CREATE_XRC_SRQ, &xrc);
    let at = rmpc::AT + rmpc::WQ;
    let mut rmp = input_with(&[
        (wq::LOG_WQ_STRIDE.at(at), 5),
        (wq::LOG_WQ_SZ.at(at), 1),
        (wq::PD.at(at), pd),
    ]);
    rmp[0x60..0x68].copy_from_slice(&record.to_be_bytes());
    rmp.extend(page.to_be_bytes());
    let rmp = driver.create(op::CREATE_RMP, &rmp);
    assert_ne!(xrc, rmp);

    let smi = driver.qp_input(7, pd, cq);
    let gsi = driver.qp_input(8, pd, cq);
    assert_eq!(driver.create(op::CREATE_QP, &smi), 0);
    assert_eq!(driver.create(op::CREATE_QP, &gsi), 1);
    assert_eq!(driver.status(op::CREATE_QP, &gsi), 0xf, "only one");
    bring_up(&mut driver, 0, 1);
    bring_up(&mut driver, 1, 1);
    let umr = driver.qp_input(0xc, pd, cq);
    let umr = driver.create(op::CREATE_QP, &umr);
    bring_up(&mut driver, umr, 1);

    assert_eq!(driver.status(op::DEALLOC_PD, &about(pd)), 6, "in use");
    assert_eq!(driver.status(op::DESTROY_CQ, &about(cq)), 6, "in use");
    for qpn in [umr, 1, 0] {
        driver.ok(op::QP_2RST, &about(qpn), 16);
        driver.ok(op::DESTROY_QP, &about(qpn), 16);
    }
    driver.ok(op::DESTROY_RMP, &about(rmp), 16);
    assert_eq!(driver.status(op::DESTROY_RMP, &about(xrc)), 5, "no pool");
    driver.ok(op::DESTROY_XRC_SRQ, &about(xrc), 16);
    driver.ok(op::DESTROY_CQ, &about(cq), 16);
    driver.ok(op::DESTROY_MKEY, &about(key), 16);
    driver.ok(op::DEALLOC_PD, &about(pd), 16);
    driver.ok(op::DEALLOC_UAR, &about(uar), 16);
    for eqn in [completion_eq, async_eq, command_eq] {
        driver.ok(op::DESTROY_EQ, &about(eqn), 16);
    }
    assert_eq!(driver.device.objects.allowance.used(), 0);
    driver.ok(op::TEARDOWN_HCA, &[], 16);
    assert!(!driver.device.running());
    driver.ok(op::DISABLE_HCA, &[], 16);
}

#[test]
fn commands_that_are_not_known_are_bad_operations() {
    let mut driver = Driver::started(IB);
    assert_eq!(
        driver.run(0xb0d, &[], 16)[..8],
        [2, 0, 0, 0, 0, 0x0b, 0x0d, 2]
    );
    assert_eq!(driver.status(op::QUERY_HCA_CAP, &op_mod(0x0d << 1)), 3);
}

#[test]
fn a_command_of_another_slot_than_the_queue_s_maker_gets_its_event() {
    let mut driver = Driver::started(IB);
    let (_, entries) = driver.create_eq(5, 1 << 0x0a, 0);
    driver.post(31, op::NOP, &[], 16);
    driver.serve(31);
    let event = driver.memory.read(entries, 64);
    assert_eq!((event[1], &event[32..36]), (0x0a, &[0x80, 0, 0, 0][..]));
}

#[test]
fn the_port_s_way_up_and_down_is_an_event() {
    let mut driver = Driver::started(IB);
    let (_, entries) = driver.create_eq(5, 1 << 9, 0);
    driver.turn();
    driver.device.set_link(false);
    assert!(driver.turn());
    driver.device.set_link(true);
    assert!(driver.turn() && !driver.turn());
    let events = driver.memory.read(entries, 192);
    let event = |n: usize| (events[n + 1], events[n + 3], events[n + 40], events[n + 63]);
    assert_eq!((event(0), event(64)), ((9, 1, 0x10, 0), (9, 4, 0x10, 0)));
    assert_eq!(events[128 + 63], 1, "nothing came before");
}

#[test]
fn a_reset_leaves_nothing() {
    let mut driver = Driver::started(IB);
    let (pd, cq) = driver.basics();
    let input = driver.qp_input(0, pd, cq);
    driver.create(op::CREATE_QP, &input);
    driver.create(op::CREATE_MKEY, &physical_key(pd));
    driver.device.reset();
    assert!(!driver.device.running());
    assert!(driver.device.engine().regions().is_empty());
    assert_eq!(driver.device.objects.qps.len(), 0);
    driver.ok(op::INIT_HCA, &[], 16);
    assert_eq!(driver.status(op::DESTROY_CQ, &about(cq)), 5);
}

#[test]
fn the_byte_order_of_atomics_that_a_driver_sets_is_read_back_until_teardown() {
    let mut driver = Driver::new(IB);
    let mode = |driver: &mut Driver| {
        let caps = driver.ok(op::QUERY_HCA_CAP, &op_mod(7), 0x1010);
        Field::new(0x18, 0, 2).get(&caps)
    };
    assert_eq!(mode(&mut driver), 0);
    let mut atomic = vec![0; 0x1010];
    (atomic[7], atomic[0x18]) = (6, 1 << 6);
    driver.ok(op::SET_HCA_CAP, &atomic, 16);
    assert_eq!(mode(&mut driver), 1);
    driver.ok(op::SET_HCA_CAP, &vec![0; 0x1010], 16);
    assert_eq!(mode(&mut driver), 1, "another block");
    driver.ok(op::INIT_HCA, &[], 16);
    driver.ok(op::TEARDOWN_HCA, &[], 16);
    assert_eq!(mode(&mut driver), 0);
}
