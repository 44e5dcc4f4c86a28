//! Verbs (IBTA 1.5 §10, §11) as plain data: what front ends fill in and the engine works on.
//!
//! Start from [`WorkRequest`], [`Completion`] and [`Regions`]. A front end gives the engine its work
//! queues and completion queues as [`SendQueue`], [`ReceiveQueue`] and [`CompletionQueue`].

mod completion;
mod memory;
mod qp;
mod queue;
mod work;

pub use completion::{Completion, Done, Source, Status};
pub use memory::{
    ABSENT, Denied, MAX_REGIONS, NO_READ, NO_WRITE, Pieces, Region, Regions, Rights, Translation,
};
pub use qp::{Destination, Path, Peer, QpChange, QpState, ReceiveFrom, Service};
pub use queue::{CompletionQueue, Front, Next, Pushed, ReceiveQueue, SendQueue};
pub use work::{
    Data, Datagram, MAX_SGE, Mixed, Operation, ReceiveRequest, RegionChange, Sge, Sges, WorkRequest,
};

/// Protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pd(pub u32);

/// Completion queue, by its number in the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqNum(pub u32);

/// Queue pair, by its number in the function: 24 bits; 0 and 1 are special.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QpNum(pub u32);

/// Shared receive queue, by its number in the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrqNum(pub u32);

/// L_Key or R_Key: index in the upper 24 bits, variant in the lower 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemKey(pub u32);
