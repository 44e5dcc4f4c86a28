//! A well-behaved driver's end of a connection: transfers whose bytes and completions are checked.

use super::super::bits::{Field, get64, put};
use super::super::command::opcode as op;
use super::super::cqe::opcode as cqe;
use super::super::fields::qpc;
use super::super::wqe::opcode;
use super::entries::{entry, remote, segment};
use super::node::{Node, gid};
use super::objects::{self, Ring, about};
use crate::rdma::verbs::Peer;

/// Asks for a completion.
const SIGNALED: u8 = 8;

/// A queue pair with a completion queue of its own, and a key for its memory.
#[derive(Debug)]
pub(super) struct End {
    pub(super) qpn: u32,
    pub(super) cq: Ring,
    pub(super) send: Ring,
    pub(super) receive: Ring,
    /// L_Key and R_Key.
    pub(super) key: u32,
}

/// Input of a change of state.
pub(super) fn change(qpn: u32, values: &[(Field, u32)]) -> Vec<u8> {
    let mut input = objects::input(values);
    put(&mut input, 8, &qpn.to_be_bytes());
    input
}

/// Input of INIT2RTR to a peer's queue pair.
pub(super) fn to_peer(qpn: u32, peer: Peer, remote: u32) -> Vec<u8> {
    let mut input = change(
        qpn,
        &[
            (qpc::MTU.at(qpc::AT), 5),
            (qpc::REMOTE_QPN.at(qpc::AT), remote),
            (qpc::RLID.at(qpc::AT), peer.0),
            (qpc::LOG_RRA_MAX.at(qpc::AT), 4),
            (qpc::MIN_RNR_NAK.at(qpc::AT), 1),
        ],
    );
    put(&mut input, qpc::AT + qpc::RGID, &gid(peer));
    put(
        &mut input,
        qpc::AT + qpc::RMAC,
        &[2, 0, 0, 0, 0, peer.0 as u8],
    );
    input
}

/// Input of RTR2RTS.
pub(super) fn to_send(qpn: u32) -> Vec<u8> {
    change(
        qpn,
        &[
            (qpc::RETRY_COUNT.at(qpc::AT), 7),
            (qpc::RNR_RETRY.at(qpc::AT), 7),
            (qpc::ACK_TIMEOUT.at(qpc::AT), 14),
            (qpc::LOG_SRA_MAX.at(qpc::AT), 4),
        ],
    )
}

/// Input of RST2INIT, with all rights for the peer.
pub(super) fn to_init(qpn: u32) -> Vec<u8> {
    change(
        qpn,
        &[
            (qpc::RRE.at(qpc::AT), 1),
            (qpc::RWE.at(qpc::AT), 1),
            (qpc::RAE.at(qpc::AT), 1),
            (qpc::Q_KEY.at(qpc::AT), 0x11),
        ],
    )
}

impl End {
    /// A queue pair of type `st`, its events to `eqn`.
    pub(super) fn new(node: &mut Node, st: u32, eqn: u32, pd: u32, key: u32) -> Self {
        let (input, mut cq) = objects::cq(node, eqn);
        cq.number = node.create(op::CREATE_CQ, &input);
        let (input, receive, send) = objects::qp(node, st, pd, (cq.number, cq.number));
        let qpn = node.create(op::CREATE_QP, &input);
        Self {
            qpn,
            cq,
            send,
            receive,
            key,
        }
    }

    /// Connects it, whatever its state was. What it had posted is forgotten.
    pub(super) fn connect(&mut self, node: &mut Node, peer: Peer, remote: u32) {
        node.ok(op::QP_2RST, &about(self.qpn), 16);
        node.memory.poke(self.send.record, &[0; 8]);
        (self.send.count, self.receive.count) = (0, 0);
        while self.poll(node).is_some() {}
        node.ok(op::RST2INIT_QP, &to_init(self.qpn), 16);
        node.ok(op::INIT2RTR_QP, &to_peer(self.qpn, peer, remote), 16);
        node.ok(op::RTR2RTS_QP, &to_send(self.qpn), 16);
    }

    fn post(&mut self, node: &mut Node, opcode: u8, segments: &[u8]) {
        let head = (self.send.count as u16, opcode, self.qpn);
        let bytes = entry(head, SIGNALED, 0, segments);
        assert!(bytes.len() <= 64);
        node.memory.poke(self.send.at(self.send.count), &bytes);
        self.send.count = self.send.count.wrapping_add(1);
        let count = self.send.count.to_be_bytes();
        node.memory.poke(self.send.record + 4, &count);
        node.ring_send(self.qpn);
    }

    /// RDMA WRITE or READ of `len` bytes between `at` and the peer's memory.
    pub(super) fn access(
        &mut self,
        node: &mut Node,
        read: bool,
        (at, len): (u64, u32),
        (addr, key): (u64, u32),
    ) {
        let segments = [remote(addr, key), segment(len, self.key, at)].concat();
        let opcode = match read {
            true => opcode::RDMA_READ,
            false => opcode::RDMA_WRITE,
        };
        self.post(node, opcode, &segments);
    }

    pub(super) fn send(&mut self, node: &mut Node, at: u64, len: u32) {
        let segment = segment(len, self.key, at);
        self.post(node, opcode::SEND, &segment);
    }

    pub(super) fn receive(&mut self, node: &mut Node, at: u64, len: u32) {
        let mut bytes = segment(len, self.key, at);
        bytes.extend(segment(0, 0x100, 0));
        node.memory
            .poke(self.receive.at(self.receive.count), &bytes);
        self.receive.count = self.receive.count.wrapping_add(1);
        let count = self.receive.count.to_be_bytes();
        node.memory.poke(self.receive.record, &count);
    }

    /// The next completion.
    pub(super) fn poll(&mut self, node: &mut Node) -> Option<Vec<u8>> {
        let bytes = node.memory.peek(self.cq.at(self.cq.count), 64);
        let round = (self.cq.count >> self.cq.log_size & 1) as u8;
        if bytes[63] >> 4 == 0xf || bytes[63] & 1 != round {
            return None;
        }
        self.cq.count = self.cq.count.wrapping_add(1);
        let count = self.cq.count.to_be_bytes();
        node.memory.poke(self.cq.record, &count);
        Some(bytes)
    }

    /// Takes a completion that must be a success of this opcode.
    pub(super) fn done(&mut self, node: &mut Node, expected: u8) {
        let bytes = self.poll(node).expect("a completion is there");
        let syndrome = get64(&bytes, 48) as u8;
        assert_eq!(
            bytes[63] >> 4,
            expected,
            "syndrome {syndrome:#x}: {bytes:x?}"
        );
    }
}

/// Opcodes of completions.
pub(super) const SENT: u8 = cqe::REQUESTER;
pub(super) const RECEIVED: u8 = cqe::SEND;
