//! What requester and responder say to each other, however it travels.
//!
//! On one host a packet does not carry the payload but says where it lies in the requester's memory
//! ([`Segment`]): the responder copies from there, or to there, once. A packet then stands for as
//! many packets of the wire as its payload fills at the path's MTU, and its PSN is the first of
//! theirs (IBTA 1.5 §9.7.2).

use super::verbs::{MemKey, Peer, QpNum};
use crate::rdma::verbs::{Destination, Path};
use smallvec::SmallVec;

/// Payload of one packet in bytes at most.
pub const MAX_PAYLOAD: u32 = 256 << 10;
/// Segments of one packet at most.
pub const MAX_SEGMENTS: usize = 64;
/// Bytes of a work queue entry at most, and up to how many bytes of memory are copied instead of referred to.
pub const MAX_INLINE: usize = 1024;
/// Bytes that a packet carries itself at most: what begins with bytes of an entry is carried up to the end of an MTU.
pub const MAX_CARRIED: usize = 4096;

/// A part of the requester's memory: of a file that its EM shared with the responder's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Which file, by the number under which it was shared ([`dot_iommu::HostMapping::id`]).
    pub file: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// What a request carries, or where its response goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Parts of the requester's memory, at most [`MAX_SEGMENTS`] and [`MAX_PAYLOAD`] bytes.
    Segments(SmallVec<[Segment; 2]>),
    /// Bytes, at most [`MAX_CARRIED`].
    Inline(SmallVec<[u8; 64]>),
}

/// What is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A part of a SEND.
    Send,
    /// A part of an RDMA WRITE.
    Write {
        /// Where this packet's payload goes.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// Bytes of the whole message; counts in its first packet.
        total: u32,
    },
    /// A part of an RDMA READ: the payload says where the data goes.
    Read {
        /// Where this packet's data comes from.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// Bytes of the whole message; counts in its first packet.
        total: u32,
    },
    /// Compare and swap; the old value comes back in [`Verdict::Atomic`].
    CompareSwap {
        /// Where.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// Compared with memory.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add; the old value comes back in [`Verdict::Atomic`].
    FetchAdd {
        /// Where.
        addr: u64,
        /// R_Key.
        key: MemKey,
        /// What to add.
        add: u64,
    },
}

/// What the last packet of a message says to the receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// Nothing more.
    Plain,
    /// Immediate data.
    Immediate(u32),
    /// A key to invalidate.
    Invalidate(MemKey),
}

/// What a datagram says about its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramHeader {
    /// Q_Key.
    pub qkey: u32,
    /// LID of the sender; 0 on Ethernet.
    pub lid: u16,
    /// GIDs of sender and receiver, when there is a GRH.
    pub gids: Option<([u8; 16], [u8; 16])>,
    /// Service level.
    pub service_level: u8,
    /// Traffic class of the GRH.
    pub traffic_class: u8,
    /// Hop limit of the GRH.
    pub hop_limit: u8,
}

/// Requester → responder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What.
    pub action: Action,
    /// Whether a message begins here.
    pub first: bool,
    /// Whether it ends here.
    pub last: bool,
    /// What else the message says at its end.
    pub tail: Tail,
    /// Whether the receiver's completion is a solicited event.
    pub solicited: bool,
    /// Bytes.
    pub payload: Payload,
    /// Of a datagram.
    pub datagram: Option<DatagramHeader>,
    /// Whether an answer is wanted: always for a reliable connection's last packet and for READs.
    pub acknowledge: bool,
    /// log₂ of the requester's path MTU in bytes, 8 to 12: how many PSNs the payload uses. The two ends of a
    /// connection need not agree on it.
    pub mtu_shift: u8,
}

/// What the responder says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All up to the PSN is done.
    Done,
    /// As [`Self::Done`], and an atomic's old value.
    Atomic(u64),
    /// No receive is posted: come again after the time of this code (IBTA 1.5 table 46). All before
    /// the PSN is done.
    ReceiverNotReady(u8),
    /// The PSN is not the one expected, which is given as the answer's PSN.
    Sequence,
    /// The request makes no sense.
    InvalidRequest,
    /// The access is not allowed.
    Access,
    /// The responder could not do it.
    Operation,
    /// The requester's memory is not known here (yet): come again soon.
    MemoryUnknown,
}

/// Content of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// From the requester.
    Request(Box<Request>),
    /// From the responder.
    Answer(Verdict),
}

/// A packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Queue pair that it is for.
    pub to: QpNum,
    /// Queue pair that it is from.
    pub from: QpNum,
    /// Packet sequence number, 24 bits: of a request its first; of an answer the last it is about.
    pub psn: u32,
    /// What.
    pub body: Body,
}

/// Why a packet could not be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotSent {
    /// No room now; the fabric makes the data path run again when there is.
    Full,
    /// There is no way to the peer (any more).
    Gone,
}

/// What is known of the way to a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// This.
    Known(Path),
    /// The OM is being asked; the data path runs again when it has answered.
    Asking,
    /// The OM refuses, or knows no such destination.
    Refused,
}

/// How packets travel between functions.
pub trait Fabric {
    /// Sends a packet; packets to one peer arrive in order or not at all.
    fn send(&mut self, peer: Peer, packet: &Packet) -> Result<(), NotSent>;
    /// How much was sent to a peer so far, for [`Self::is_taken`].
    fn position(&self, peer: Peer) -> u64;
    /// Whether a peer has taken what was sent to it before `position`, or never will.
    fn is_taken(&mut self, peer: Peer, position: u64) -> bool;
    /// A file of a peer's memory, by the number that its [`Segment`]s name; `None` when it is not
    /// known here (yet).
    fn file(&self, peer: Peer, file: u64) -> Option<&dot_iommu::HostMapping>;
    /// The way to a destination of a datagram.
    fn route(&mut self, to: &Destination) -> Route;
    /// Whether a peer has handled all that was sent to it: nobody looks at the bytes any more that
    /// those packets refer to.
    fn is_handled(&mut self, peer: Peer) -> bool;
    /// This function's LID and GID table.
    fn addresses(&self) -> &Addresses;
}

/// Addresses of a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// GIDs by index; all zeroes is none.
    pub gids: Vec<[u8; 16]>,
}
