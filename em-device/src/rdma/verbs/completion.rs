//! Completions (IBTA 1.5 §11.4.2.1).

use super::{MemKey, QpNum, SrqNum};

/// How a request ended (IBTA 1.5 §11.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// As it should.
    Success,
    /// The scatter list is too short, or the message too long.
    LocalLength,
    /// The queue pair cannot do this, or the entry makes no sense.
    LocalQpOperation,
    /// A local key does not allow it.
    LocalProtection,
    /// The queue pair went to the error state before.
    Flushed,
    /// A memory region could not be changed.
    Bind,
    /// The response makes no sense.
    BadResponse,
    /// Responder: an incoming access was refused.
    LocalAccess,
    /// Requester: the responder finds the request invalid.
    RemoteInvalidRequest,
    /// Requester: the responder refuses the access.
    RemoteAccess,
    /// Requester: the responder could not finish.
    RemoteOperation,
    /// Requester: no answer after all retries.
    RetryExceeded,
    /// Requester: the responder had no receive after all retries.
    RnrRetryExceeded,
}

/// What ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// A SEND (with whatever).
    Send,
    /// An RDMA WRITE.
    Write,
    /// An RDMA READ.
    Read,
    /// A compare and swap.
    CompareSwap,
    /// A fetch and add.
    FetchAdd,
    /// A change of a region.
    Register,
    /// Nothing.
    Nop,
    /// A receive, by SEND.
    Receive,
    /// A receive, by SEND with immediate data.
    ReceiveImmediate(u32),
    /// A receive, by SEND that invalidated this key.
    ReceiveInvalidate(MemKey),
    /// A receive, by RDMA WRITE with immediate data; nothing was stored in its buffer.
    ReceiveWriteImmediate(u32),
}

impl Done {
    /// Whether it is of a receive queue.
    pub fn is_receive(self) -> bool {
        matches!(
            self,
            Self::Receive
                | Self::ReceiveImmediate(_)
                | Self::ReceiveInvalidate(_)
                | Self::ReceiveWriteImmediate(_)
        )
    }
}

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Queue pair.
    pub qp: QpNum,
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// Whether the first 40 bytes of the buffer hold a GRH.
    pub grh: bool,
    /// Whether those bytes hold an IPv4 header, or would.
    pub ipv4: bool,
    /// Service level.
    pub service_level: u8,
}

/// An entry for a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The queue pair.
    pub qp: QpNum,
    /// The front end's number for the queue pair, see [`super::QpChange`]; comes from its creation.
    pub tag: u32,
    /// The shared receive queue that the entry came from.
    pub srq: Option<SrqNum>,
    /// The front end's name of the work queue entry.
    pub cookie: u32,
    /// What ended. With an error only its direction is certain.
    pub done: Done,
    /// How.
    pub status: Status,
    /// Bytes received or read.
    pub len: u32,
    /// Whether the sender asked for an event.
    pub solicited: bool,
    /// Sender of a datagram.
    pub source: Option<Source>,
}
