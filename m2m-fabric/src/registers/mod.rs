//! Register accesses through shared memory.
//!
//! A window holds one ring for each direction. A ring has one requester (one process) and one
//! server (the other); the processes share nothing else, so wake-ups use futexes in the ring's own
//! state words.
//!
//! * [`ring`]: the protocol of a ring, a state machine over atomics;
//! * [`shm`]: the memory;
//! * [`port`]: the requesting side, with waiting and deadlines;
//! * [`server`]: the answering side, a thread;
//! * [`spin`]: when waiting by spinning pays.

#[cfg(not(loom))]
pub(crate) mod port;
pub(crate) mod ring;
#[cfg(not(loom))]
pub(crate) mod server;
#[cfg(not(loom))]
pub(crate) mod shm;
#[cfg(not(loom))]
pub(crate) mod spin;
mod sync;
