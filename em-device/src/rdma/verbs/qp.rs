//! Queue pairs: services, states and attributes (IBTA 1.5 §10.3, §11.2.5).

use super::{Rights, SrqNum};

/// Transport service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram; also queue pairs 0 and 1.
    Ud,
}

/// State (IBTA 1.5 §10.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// Newly made, or made so again: no work is taken.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained or draining.
    Sqd,
    /// Send queue error (unreliable services).
    Sqe,
    /// Error: everything is flushed.
    Error,
}

/// Where receives come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveFrom {
    /// The queue pair's own receive queue.
    Own,
    /// A shared one.
    Shared(SrqNum),
    /// There are none.
    Nothing,
}

/// An address on the network, as address vectors give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// GID, when there is a GRH.
    pub gid: Option<[u8; 16]>,
    /// Ethernet address; zero on InfiniBand.
    pub mac: [u8; 6],
}

/// A function in the DPU, by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(pub u32);

/// A destination that the OM resolved and allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The function there.
    pub peer: Peer,
    /// Number of the answer: what the OM revokes.
    pub generation: u64,
}

/// Attributes for a change of state; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QpChange {
    /// What the peer may do by RDMA ([`Rights::REMOTE_READ`] and the like).
    pub remote_rights: Option<Rights>,
    /// Q_Key.
    pub qkey: Option<u32>,
    /// The connected queue pair.
    pub dest_qp: Option<super::QpNum>,
    /// Where that is.
    pub path: Option<Path>,
    /// Path MTU in bytes, 256 to 4096.
    pub mtu: Option<u16>,
    /// PSN expected next, 24 bits.
    pub receive_psn: Option<u32>,
    /// PSN sent next, 24 bits.
    pub send_psn: Option<u32>,
    /// RNR timer that the peer is told to wait, by code (IBTA 1.5 table 46).
    pub min_rnr_timer: Option<u8>,
    /// Local ACK timeout: 4.096 µs · 2^n, 0 is none.
    pub timeout: Option<u8>,
    /// Retries without an answer, 0–7 or [`Self::PATIENT`].
    pub retry_count: Option<u8>,
    /// Retries without a receive, 0–7; 7 is without end.
    pub rnr_retry: Option<u8>,
    /// READs and atomics under way at once, as requester.
    pub max_reads: Option<u8>,
    /// READs and atomics under way at once, as responder.
    pub max_dest_reads: Option<u8>,
}

impl QpChange {
    /// So many retries as no protocol has a word for, for devices that decide themselves.
    pub const PATIENT: u8 = u8::MAX;
}
