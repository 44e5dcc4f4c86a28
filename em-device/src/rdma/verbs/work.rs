//! Work requests (IBTA 1.5 §11.4.1).

use super::{Destination, MemKey, Pd, Rights, Translation};
use smallvec::SmallVec;

/// Scatter/gather elements of a request at most.
pub const MAX_SGE: usize = 16;

/// One scatter/gather element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// L_Key.
    pub key: MemKey,
    /// First byte, an address in the key's region.
    pub addr: u64,
    /// Bytes, at most 2³¹; 0 is an element without data.
    pub len: u32,
}

/// Scatter/gather list; not on the heap when it is short.
pub type Sges = SmallVec<[Sge; 3]>;

/// What a request sends, or where a response goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Memory of the guest, at most [`MAX_SGE`] elements.
    Gather(Sges),
    /// The bytes stood in the work queue entry.
    Inline(SmallVec<[u8; 64]>),
    /// Bytes of the entry, then memory; not for responses.
    Mixed(Box<Mixed>),
}

/// Bytes of a work queue entry with memory behind them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixed {
    /// What stood in the entry.
    pub inline: SmallVec<[u8; 64]>,
    /// Memory of the guest, at most [`MAX_SGE`] elements.
    pub sges: Sges,
}

/// What a send queue entry asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// SEND; with immediate data, or a key that the responder invalidates.
    Send {
        /// In the order of the wire, as a number.
        immediate: Option<u32>,
        /// R_Key to invalidate; not together with `immediate`.
        invalidate: Option<MemKey>,
    },
    /// RDMA WRITE.
    Write {
        /// First byte at the responder.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// With immediate data it consumes a receive at the responder.
        immediate: Option<u32>,
    },
    /// RDMA READ into the request's data.
    Read {
        /// First byte at the responder.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// A key of this side that is taken out of use when the data is there.
        invalidate: Option<MemKey>,
    },
    /// Compare and swap of 8 bytes; the old value goes to the request's data.
    CompareSwap {
        /// At the responder, a multiple of 8.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// Swap happens when memory has this value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add of 8 bytes; the old value goes to the request's data.
    FetchAdd {
        /// At the responder, a multiple of 8.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// What to add.
        add: u64,
    },
    /// Change a memory region in the order of the queue (fast registration, local invalidate).
    Register(Box<RegionChange>),
    /// Nothing; completes in order.
    Nop,
}

/// What [`Operation::Register`] changes of a region; `None` leaves a part as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionChange {
    /// The region.
    pub key: MemKey,
    /// The key's new variant (low 8 bits).
    pub variant: Option<u8>,
    /// New protection domain.
    pub pd: Option<Pd>,
    /// New rights.
    pub rights: Option<Rights>,
    /// New first address.
    pub start: Option<u64>,
    /// New length in bytes.
    pub len: Option<u64>,
    /// New translation.
    pub translation: Option<Translation>,
    /// Whether the region may be used afterwards.
    pub valid: bool,
}

/// One entry of a send queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkRequest {
    /// The front end's name for the entry: comes back in its completion.
    pub cookie: u32,
    /// What to do.
    pub operation: Operation,
    /// What to send, or where a response goes.
    pub data: Data,
    /// A successful request completes with an entry in the completion queue.
    pub signaled: bool,
    /// The responder's completion is a solicited event.
    pub solicited: bool,
    /// Start only after all RDMA READs and atomics before it are done.
    pub fence: bool,
    /// Where a datagram goes: for [`super::Service::Ud`] only.
    pub datagram: Option<Datagram>,
}

/// Destination of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// Port.
    pub to: Destination,
    /// Queue pair there.
    pub qp: super::QpNum,
    /// Q_Key; with the high bit set, the sending QP's own is used (IBTA 1.5 §10.2.5).
    pub qkey: u32,
    /// Index of the source GID in the function's table, when the datagram has a GRH.
    pub source_gid: Option<u8>,
    /// Traffic class and hop limit of the GRH.
    pub traffic_class: u8,
    /// Hop limit of the GRH.
    pub hop_limit: u8,
    /// Service level.
    pub service_level: u8,
}

/// One entry of a receive queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The front end's name for the entry: comes back in its completion.
    pub cookie: u32,
    /// Where data goes, at most [`MAX_SGE`] elements.
    pub sges: Sges,
}
