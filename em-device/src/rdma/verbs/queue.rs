//! What a front end gives the engine: queues in the formats of its driver.

use super::{Completion, ReceiveRequest, Regions, WorkRequest};
use dot_iommu::DotView;
use std::fmt::Debug;

/// What is next in a work queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next<T> {
    /// Nothing was posted.
    Empty,
    /// This; the queue has moved past it.
    Entry(T),
    /// An entry that makes no sense, by its cookie; the queue has moved past it.
    Bad(u32),
    /// The queue cannot be read: its memory is not mapped.
    Unreadable,
}

/// A send queue in guest memory.
pub trait SendQueue: Debug + Send {
    /// Takes the next entry. `regions` are for entries that refer to lists in memory.
    fn next(&mut self, memory: &DotView<'_>, regions: &Regions) -> Next<WorkRequest>;
    /// Back to the beginning, as the driver's own queue is after a reset.
    fn reset(&mut self);
    /// Where it is, for [`Self::seek`]: grows with every entry, and 16 bits count. The default is a queue that
    /// nobody takes over.
    fn position(&self) -> u16 {
        0
    }
    /// Goes on at a position.
    fn seek(&mut self, position: u16) {
        let _ = position;
    }
}

/// A receive queue in guest memory, of one queue pair or shared.
pub trait ReceiveQueue: Debug + Send {
    /// Takes the next entry.
    fn next(&mut self, memory: &DotView<'_>) -> Next<ReceiveRequest>;
    /// How many entries are posted and not taken: for a shared queue's limit. The default is a queue
    /// that never falls below one.
    fn posted(&mut self, memory: &DotView<'_>) -> u32 {
        let _ = memory;
        u32::MAX
    }
    /// Back to the beginning.
    fn reset(&mut self);
    /// Where it is, for [`Self::seek`]. The low 16 bits grow by one with every entry. The default is a queue that
    /// nobody takes over.
    fn position(&self) -> u32 {
        0
    }
    /// Goes on at a position.
    fn seek(&mut self, position: u32) {
        let _ = position;
    }
    /// The cookie of the next entry, if there is one.
    fn next_cookie(&self) -> u32 {
        self.position() & 0xffff
    }
    /// An entry that was taken before, by its cookie.
    fn again(&mut self, cookie: u32, memory: &DotView<'_>) -> Option<ReceiveRequest> {
        let _ = (cookie, memory);
        None
    }
}

/// What became of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// It is in the queue.
    Stored,
    /// It is in the queue, and the driver asked for an event.
    Notify,
    /// The queue is full or its memory is not mapped: the queue is in error.
    Overrun,
}

/// A completion queue in guest memory.
pub trait CompletionQueue: Debug + Send {
    /// Adds an entry.
    fn push(&mut self, completion: &Completion, memory: &DotView<'_>) -> Pushed;
    /// Number of the next entry, 24 bits. The default is a queue that nobody takes over.
    fn index(&self) -> u32 {
        0
    }
    /// Whether entry `index` is in the queue, or was.
    fn has(&self, index: u32) -> bool {
        (1..1 << 23).contains(&(self.index().wrapping_sub(index) & 0xff_ffff))
    }
}

/// The queues of one driver's format, and what it expects of the transport beside them.
pub trait Front: Debug {
    /// Whether the first 40 bytes of a datagram between IPv4 addresses end in an IPv4 header behind 20 zeroes,
    /// instead of being an IPv6 header.
    const IPV4_HEADERS: bool = false;
    /// Whether there is news of a queue pair whose own request failed, beside the completion.
    const REPORTS_FAILURES: bool = false;
    /// Send queues.
    type Send: SendQueue;
    /// Receive queues.
    type Receive: ReceiveQueue;
    /// Completion queues.
    type Completion: CompletionQueue;
}
