//! Inputs of commands that make objects, as drivers write them.

use super::super::bits::{Field, put};
use super::super::fields::{cqc, eqc, mkc, qpc, rmpc, rqc, sqc, srqc, wq};
use super::node::Node;
use crate::rdma::verbs::ABSENT;

/// Contexts of the network interface's queues in commands, and their ring.
pub(super) const ETHER: usize = 0x20;
const ETHER_WQ: usize = ETHER + 0x30;

/// Where a queue's page has its doorbell record: the queue itself is shorter.
const RECORD: u64 = 0xf00;

/// A ring as its driver knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    pub(super) number: u32,
    pub(super) memory: u64,
    pub(super) record: u64,
    pub(super) log_size: u32,
    pub(super) log_stride: u32,
    /// Entries posted, or taken.
    pub(super) count: u32,
}

impl Ring {
    /// Bus address of an entry.
    pub(super) fn at(&self, index: u32) -> u64 {
        let slot = u64::from(index) & ((1 << self.log_size) - 1);
        self.memory + (slot << self.log_stride)
    }
}

/// Input up to the page list.
pub(super) fn input(values: &[(Field, u32)]) -> Vec<u8> {
    let mut input = vec![0; 0x110];
    for (field, value) in values {
        field.set(&mut input, *value);
    }
    input
}

/// Input about an object.
pub(super) fn about(index: u32) -> Vec<u8> {
    let mut input = vec![0; 0x110];
    put(&mut input, 8, &index.to_be_bytes());
    input
}

/// An event queue of 32 entries for all events.
pub(super) fn eq(node: &mut Node) -> (Vec<u8>, Ring) {
    let page = node.page();
    let mut input = input(&[
        (eqc::LOG_EQ_SIZE.at(eqc::AT), 5),
        (eqc::INTR.at(eqc::AT), 1),
    ]);
    // Not those of commands, which are waited for by polling.
    let types = !(1_u64 << 0x0a);
    put(&mut input, eqc::EVENT_BITMASK, &types.to_be_bytes());
    node.memory.poke(page, &[1; 4096]);
    input.extend(page.to_be_bytes());
    let ring = Ring {
        number: 0,
        memory: page,
        record: page + RECORD,
        log_size: 5,
        log_stride: 6,
        count: 0,
    };
    (input, ring)
}

/// A completion queue of 32 entries.
pub(super) fn cq(node: &mut Node, eqn: u32) -> (Vec<u8>, Ring) {
    let memory = node.page();
    let record = memory + RECORD;
    let mut input = input(&[
        (cqc::LOG_CQ_SIZE.at(cqc::AT), 5),
        (cqc::C_EQN.at(cqc::AT), eqn),
    ]);
    put(&mut input, cqc::AT + cqc::DBR_ADDR, &record.to_be_bytes());
    input.extend(memory.to_be_bytes());
    let ring = Ring {
        number: 0,
        memory,
        record,
        log_size: 5,
        log_stride: 6,
        count: 0,
    };
    // No entry is the driver's yet.
    node.memory.poke(memory, &[0xf1; 2048]);
    node.memory.poke(record, &[0; 8]);
    (input, ring)
}

/// A queue pair of type `st` with 16 receives of 64 bytes and 32 send blocks: receive and send ring.
pub(super) fn qp(node: &mut Node, st: u32, pd: u32, cqs: (u32, u32)) -> (Vec<u8>, Ring, Ring) {
    let memory = node.page();
    let record = memory + RECORD;
    let mut input = input(&[
        (qpc::ST.at(qpc::AT), st),
        (qpc::PD.at(qpc::AT), pd),
        (qpc::LOG_RQ_SIZE.at(qpc::AT), 4),
        (qpc::LOG_RQ_STRIDE.at(qpc::AT), 2),
        (qpc::LOG_SQ_SIZE.at(qpc::AT), 5),
        (qpc::USER_INDEX.at(qpc::AT), 0xff_ffff),
        (qpc::CQN_SND.at(qpc::AT), cqs.0),
        (qpc::CQN_RCV.at(qpc::AT), cqs.1),
    ]);
    put(&mut input, qpc::AT + qpc::DBR_ADDR, &record.to_be_bytes());
    input.extend(memory.to_be_bytes());
    node.memory.poke(record, &[0; 8]);
    let receive = Ring {
        number: 0,
        memory,
        record,
        log_size: 4,
        log_stride: 6,
        count: 0,
    };
    let send = Ring {
        memory: memory + 0x400,
        log_size: 5,
        ..receive
    };
    (input, receive, send)
}

/// A key over `len` bytes from `start` with these pages.
pub(super) fn key(pd: u32, rights: u32, start: u64, len: u64, pages: &[u64]) -> Vec<u8> {
    let mut input = input(&[
        (mkc::ACCESS_MODE_1_0.at(mkc::AT), 1),
        (mkc::PD.at(mkc::AT), pd),
        (mkc::LW.at(mkc::AT), rights & 1),
        (mkc::RR.at(mkc::AT), rights >> 1 & 1),
        (mkc::RW.at(mkc::AT), rights >> 2 & 1),
        (mkc::A.at(mkc::AT), rights >> 3 & 1),
        (mkc::LOG_PAGE_SIZE.at(mkc::AT), 12),
        (
            mkc::TRANSLATIONS_OCTWORD_ACTUAL_SIZE,
            pages.len().div_ceil(2) as u32,
        ),
        (mkc::MKEY_7_0.at(mkc::AT), 0x42),
    ]);
    put(&mut input, mkc::AT + mkc::START_ADDR, &start.to_be_bytes());
    put(&mut input, mkc::AT + mkc::LEN_FIELD, &len.to_be_bytes());
    input.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
    input
}

/// A key over all memory, as the kernel's.
pub(super) fn physical_key(pd: u32) -> Vec<u8> {
    input(&[
        (mkc::LW.at(mkc::AT), 1),
        (mkc::PD.at(mkc::AT), pd),
        (mkc::LENGTH64.at(mkc::AT), 1),
        (mkc::MKEY_7_0.at(mkc::AT), 0x42),
    ])
}

/// A key to be registered by a work queue entry, with room for 64 pages.
pub(super) fn free_key() -> Vec<u8> {
    input(&[
        (mkc::FREE.at(mkc::AT), 1),
        (mkc::ACCESS_MODE_1_0.at(mkc::AT), 1),
        (mkc::TRANSLATIONS_OCTWORD_SIZE.at(mkc::AT), 32),
        (mkc::MKEY_7_0.at(mkc::AT), 0x42),
    ])
}

/// A shared receive queue of 16 linked entries of 64 bytes.
pub(super) fn srq(node: &mut Node, pd: u32) -> (Vec<u8>, Ring) {
    let memory = node.page();
    let record = memory + RECORD;
    let mut input = input(&[
        (srqc::LOG_SRQ_SIZE.at(srqc::AT), 4),
        (srqc::LOG_RQ_STRIDE.at(srqc::AT), 2),
        (srqc::PD.at(srqc::AT), pd),
        (srqc::LWM.at(srqc::AT), 2),
    ]);
    put(&mut input, srqc::AT + srqc::DBR_ADDR, &record.to_be_bytes());
    input.extend(memory.to_be_bytes());
    (input, shared(node, memory, record))
}

/// The same as a receive memory pool.
pub(super) fn rmp(node: &mut Node, pd: u32) -> (Vec<u8>, Ring) {
    let memory = node.page();
    let record = memory + RECORD;
    let at = rmpc::AT + rmpc::WQ;
    let mut input = input(&[
        (wq::LOG_WQ_SZ.at(at), 4),
        (wq::LOG_WQ_STRIDE.at(at), 6),
        (wq::PD.at(at), pd),
    ]);
    put(&mut input, at + wq::DBR_ADDR, &record.to_be_bytes());
    input.extend(memory.to_be_bytes());
    (input, shared(node, memory, record))
}

fn shared(node: &Node, memory: u64, record: u64) -> Ring {
    node.memory.poke(record, &[0; 8]);
    Ring {
        number: 0,
        memory,
        record,
        log_size: 4,
        log_stride: 6,
        count: 0,
    }
}

/// A queue of the network interface of 16 entries.
pub(super) fn ether_queue(
    node: &mut Node,
    log_stride: u32,
    values: &[(Field, u32)],
) -> (Vec<u8>, Ring) {
    let memory = node.page();
    let record = memory + RECORD;
    let mut input = input(values);
    for (field, value) in [
        (wq::WQ_TYPE, 1),
        (wq::LOG_WQ_STRIDE, log_stride),
        (wq::LOG_WQ_SZ, 4),
    ] {
        field.at(ETHER_WQ).set(&mut input, value);
    }
    put(&mut input, ETHER_WQ + wq::DBR_ADDR, &record.to_be_bytes());
    input.extend(memory.to_be_bytes());
    node.memory.poke(record, &[0; 8]);
    let ring = Ring {
        number: 0,
        memory,
        record,
        log_size: 4,
        log_stride,
        count: 0,
    };
    (input, ring)
}

/// A send queue of the network interface.
pub(super) fn ether_send(node: &mut Node, cqn: u32) -> (Vec<u8>, Ring) {
    ether_queue(node, 6, &[(sqc::CQN.at(ETHER), cqn)])
}

/// A receive queue of the network interface.
pub(super) fn ether_receive(node: &mut Node, cqn: u32) -> (Vec<u8>, Ring) {
    ether_queue(node, 4, &[(rqc::CQN.at(ETHER), cqn)])
}

/// Input that brings a queue of the network interface from one state to another.
pub(super) fn ether_change(number: u32, from: u32, to: u32) -> Vec<u8> {
    // The field is in the same place for both kinds.
    let mut input = input(&[(rqc::STATE.at(ETHER), to)]);
    put(&mut input, 8, &(from << 28 | number).to_be_bytes());
    input
}

/// Address of no page, for lists.
pub(super) const NOWHERE: u64 = ABSENT;
