//! Completion queue entries (`mlx5_cqe64` and `mlx5_err_cqe` of the Linux driver).

use super::wqe::opcode as wqe;
use crate::rdma::verbs::{Completion, Done, Source, Status};
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

/// Opcodes, in the upper half of [`Cqe::op_own`].
pub mod opcode {
    /// A request.
    pub const REQUESTER: u8 = 0;
    /// A receive, by RDMA WRITE with immediate data.
    pub const WRITE_IMMEDIATE: u8 = 1;
    /// A receive, by SEND; also an Ethernet frame.
    pub const SEND: u8 = 2;
    /// A receive, by SEND with immediate data.
    pub const SEND_IMMEDIATE: u8 = 3;
    /// A receive, by SEND with invalidate.
    pub const SEND_INVALIDATE: u8 = 4;
    /// The queue goes on in its new buffer.
    pub const RESIZE: u8 = 5;
    /// A request that failed.
    pub const REQUESTER_ERROR: u8 = 0xd;
    /// A receive that failed.
    pub const RESPONDER_ERROR: u8 = 0xe;
    /// What drivers put into an entry that was never stored.
    pub const INVALID: u8 = 0xf;
}

/// In [`Cqe::op_own`]: a solicited event.
pub const SOLICITED: u8 = 1 << 1;

/// User index of a queue pair that has none: completions then carry the number of its SRQ.
pub const NO_USER_INDEX: u32 = 0xff_ffff;

/// P_Key of received datagrams: the only one that ports have.
const PKEY: u32 = 0xffff;

/// In [`Cqe::flags_rqpn`]: a GRH is in the receive buffer.
const GRH: u32 = 1 << 28;
/// In [`Cqe::flags_rqpn`] on Ethernet: the network header has the form of IPv6.
const L3_IPV6: u32 = 1 << 24;

/// The 64 bytes of an entry that both of its sizes have.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// Ethernet: bit 0 says that it was a tunnel.
    pub tunneled: u8,
    /// –
    pub reserved_1: u8,
    /// –
    pub wqe_id: U16,
    /// Ethernet: large receive offload.
    pub lro: [u8; 8],
    /// Ethernet: hash that chose the queue.
    pub rss_hash_result: U32,
    /// Ethernet: what the hash was made of.
    pub rss_hash_type: u8,
    /// Path bits of the destination LID.
    pub ml_path: u8,
    /// –
    pub reserved_12: [u8; 2],
    /// Ethernet: ones' complement sum of everything behind the Ethernet header.
    pub check_sum: U16,
    /// LID of the sender.
    pub slid: U16,
    /// GRH in bits 29:28, service level in 27:24, sender's queue pair in 23:0; on Ethernet network
    /// header type in 25:24.
    pub flags_rqpn: U32,
    /// Ethernet: checksums that were right.
    pub hds_ip_ext: u8,
    /// Ethernet: header types, and in bit 0 whether a VLAN tag was taken off.
    pub l4_l3_hdr_type: u8,
    /// Ethernet: that tag.
    pub vlan_info: U16,
    /// User index of the queue pair, or number of the SRQ.
    pub srqn_uidx: U32,
    /// Immediate data, invalidated key, or P_Key.
    pub imm_inval_pkey: U32,
    /// –
    pub reserved_28: [u8; 4],
    /// Bytes received or read.
    pub byte_cnt: U32,
    /// –
    pub timestamp_h: U32,
    /// Lower half of the time. In an error its lower half is a vendor's code and the syndrome.
    pub timestamp_l: U32,
    /// Opcode of the request in bits 31:24, queue pair in 23:0.
    pub sop_drop_qpn: U32,
    /// Which work queue entry.
    pub wqe_counter: U16,
    /// –
    pub signature: u8,
    /// Opcode in bits 7:4, [`SOLICITED`], owner in bit 0.
    pub op_own: u8,
}

const _: () = assert!(size_of::<Cqe>() == 64);

impl Cqe {
    /// As bytes; the owner bit is the queue's to set.
    #[inline]
    pub fn to_bytes(self) -> [u8; 64] {
        transmute!(self)
    }

    /// From bytes, whatever they are.
    pub fn from_bytes(bytes: [u8; 64]) -> Self {
        transmute!(bytes)
    }

    /// The entry for a completion of a queue pair.
    #[inline]
    pub fn new(completion: &Completion) -> Self {
        let uidx = match completion.tag & NO_USER_INDEX {
            NO_USER_INDEX => completion.srq.map_or(0, |srq| srq.0),
            tag => tag,
        };
        let mut cqe = Self {
            srqn_uidx: U32::new(uidx),
            sop_drop_qpn: U32::new(
                u32::from(request_opcode(completion.done)) << 24 | completion.qp.0 & 0xff_ffff,
            ),
            // Counters have 16 bits in the format.
            wqe_counter: U16::new(completion.cookie as u16),
            ..Self::default()
        };
        if completion.status == Status::Success {
            cqe.success(completion);
        } else {
            let (syndrome, vendor) = syndrome(completion.status);
            cqe.timestamp_l = U32::new(u32::from(vendor) << 8 | u32::from(syndrome));
            cqe.op_own = match completion.done.is_receive() {
                true => opcode::RESPONDER_ERROR << 4,
                false => opcode::REQUESTER_ERROR << 4,
            };
        }
        cqe
    }

    #[inline]
    fn success(&mut self, completion: &Completion) {
        self.byte_cnt = U32::new(completion.len);
        let (opcode, extra) = match completion.done {
            Done::Receive => (opcode::SEND, completion.source.map_or(0, |_| PKEY)),
            Done::ReceiveImmediate(imm) => (opcode::SEND_IMMEDIATE, imm),
            Done::ReceiveInvalidate(key) => (opcode::SEND_INVALIDATE, key.0),
            Done::ReceiveWriteImmediate(imm) => (opcode::WRITE_IMMEDIATE, imm),
            _ => (opcode::REQUESTER, 0),
        };
        self.imm_inval_pkey = U32::new(extra);
        self.op_own = opcode << 4;
        if completion.solicited {
            self.op_own |= SOLICITED;
        }
        if let Some(source) = completion.source {
            self.source(source);
        }
    }

    fn source(&mut self, source: Source) {
        let mut flags = source.qp.0 & 0xff_ffff;
        if source.grh {
            flags |= GRH;
        }
        // No LID: Ethernet, which has the header type where InfiniBand has the service level.
        flags |= match source.lid {
            0 => L3_IPV6,
            _ => u32::from(source.service_level & 0xf) << 24,
        };
        self.slid = U16::new(source.lid);
        self.flags_rqpn = U32::new(flags);
    }
}

/// Opcode of the work queue entry, which tells drivers what was done.
fn request_opcode(done: Done) -> u8 {
    match done {
        Done::Send => wqe::SEND,
        Done::Write => wqe::RDMA_WRITE,
        Done::Read => wqe::RDMA_READ,
        Done::CompareSwap => wqe::ATOMIC_CS,
        Done::FetchAdd => wqe::ATOMIC_FA,
        Done::Register => wqe::UMR,
        Done::Nop => wqe::NOP,
        _ => 0,
    }
}

/// Syndrome of an error, and the vendor's code that adapters are commonly seen to give with it
/// (0: none is known).
fn syndrome(status: Status) -> (u8, u8) {
    match status {
        Status::Success => (0, 0),
        Status::LocalLength => (0x01, 0),
        Status::LocalQpOperation => (0x02, 0),
        Status::LocalProtection => (0x04, 0),
        Status::Flushed => (0x05, 0xf9),
        Status::Bind => (0x06, 0),
        Status::BadResponse => (0x10, 0),
        Status::LocalAccess => (0x11, 0),
        Status::RemoteInvalidRequest => (0x12, 0x8a),
        Status::RemoteAccess => (0x13, 0x88),
        Status::RemoteOperation => (0x14, 0x89),
        Status::RetryExceeded => (0x15, 0x81),
        Status::RnrRetryExceeded => (0x16, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::verbs::{MemKey, QpNum, SrqNum};

    fn completion(done: Done, status: Status) -> Completion {
        Completion {
            qp: QpNum(0x12_3456),
            tag: 0x77,
            srq: None,
            cookie: 0x9_8765,
            done,
            status,
            len: 0x11_2233,
            solicited: false,
            source: None,
        }
    }

    fn word(bytes: &[u8; 64], at: usize) -> u32 {
        u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn each_kind_of_success_has_its_opcode_and_word() {
        for (done, op, request, extra) in [
            (Done::Send, 0, 0x0a, 0),
            (Done::Write, 0, 0x08, 0),
            (Done::Read, 0, 0x10, 0),
            (Done::CompareSwap, 0, 0x11, 0),
            (Done::FetchAdd, 0, 0x12, 0),
            (Done::Register, 0, 0x25, 0),
            (Done::Nop, 0, 0, 0),
            (Done::ReceiveWriteImmediate(0xa1b2_c3d4), 1, 0, 0xa1b2_c3d4),
            (Done::Receive, 2, 0, 0),
            (Done::ReceiveImmediate(0xa1b2_c3d4), 3, 0, 0xa1b2_c3d4),
            (Done::ReceiveInvalidate(MemKey(0x1234)), 4, 0, 0x1234),
        ] {
            let bytes = Cqe::new(&completion(done, Status::Success)).to_bytes();
            assert_eq!(bytes[63], op << 4, "{done:?}");
            assert_eq!(word(&bytes, 56), request << 24 | 0x12_3456, "{done:?}");
            assert_eq!(word(&bytes, 36), extra, "{done:?}");
            assert_eq!(word(&bytes, 44), 0x11_2233);
            assert_eq!(word(&bytes, 32), 0x77);
            assert_eq!(bytes[60..62], [0x87, 0x65]);
        }
    }

    #[test]
    fn each_error_has_its_syndrome_and_direction() {
        for (status, syndrome) in [
            (Status::LocalLength, 0x01),
            (Status::LocalQpOperation, 0x02),
            (Status::LocalProtection, 0x04),
            (Status::Flushed, 0x05),
            (Status::Bind, 0x06),
            (Status::BadResponse, 0x10),
            (Status::LocalAccess, 0x11),
            (Status::RemoteInvalidRequest, 0x12),
            (Status::RemoteAccess, 0x13),
            (Status::RemoteOperation, 0x14),
            (Status::RetryExceeded, 0x15),
            (Status::RnrRetryExceeded, 0x16),
        ] {
            let bytes = Cqe::new(&completion(Done::Write, status)).to_bytes();
            assert_eq!((bytes[55], bytes[63]), (syndrome, 0xd0));
            assert_eq!(word(&bytes, 56), 0x0812_3456);
            let bytes = Cqe::new(&completion(Done::Receive, status)).to_bytes();
            assert_eq!((bytes[55], bytes[63]), (syndrome, 0xe0));
            assert_eq!(bytes[60..62], [0x87, 0x65]);
        }
    }

    #[test]
    fn a_datagram_says_where_it_came_from() {
        let mut completion = completion(Done::Receive, Status::Success);
        completion.solicited = true;
        let source = Source {
            qp: QpNum(0x65_4321),
            lid: 0x1234,
            grh: true,
            ipv4: false,
            service_level: 5,
        };
        completion.source = Some(source);
        let bytes = Cqe::new(&completion).to_bytes();
        assert_eq!(word(&bytes, 24), 0x1565_4321);
        assert_eq!(bytes[22..24], [0x12, 0x34]);
        assert_eq!(word(&bytes, 36), 0xffff);
        assert_eq!(bytes[63], 0x22);
        completion.source = Some(Source { lid: 0, ..source });
        let bytes = Cqe::new(&completion).to_bytes();
        assert_eq!(word(&bytes, 24), 0x1165_4321);
    }

    #[test]
    fn without_a_user_index_the_srq_is_named() {
        let mut completion = completion(Done::Receive, Status::Success);
        completion.tag = NO_USER_INDEX;
        assert_eq!(word(&Cqe::new(&completion).to_bytes(), 32), 0);
        completion.srq = Some(SrqNum(0x42));
        assert_eq!(word(&Cqe::new(&completion).to_bytes(), 32), 0x42);
    }
}
