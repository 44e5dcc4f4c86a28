//! The M2M fabric: what joins the Orchestration Module (OM) and its Execution Modules (EMs).
//!
//! A connection joins one OM and one EM and carries three kinds of traffic, both ways:
//!
//! * **messages**: a [`proto::Request`] is answered by one [`proto::Reply`]; a [`proto::Event`] by
//!   nothing. Requests may carry file descriptors.
//! * **registers**: 4-byte reads and writes with byte enables, the shape of a PCIe configuration
//!   request. They are the fast path for trapped accesses of a guest; see [`RegisterPort`].
//! * **liveness**: heartbeats every [`proto::HEARTBEAT_INTERVAL_MS`], [`Fabric::last_heard`], and one
//!   call of [`Handler::down`] at the end.
//!
//! Start from [`Fabric`] (what a module does to its peer), [`Handler`] (what the peer does to a
//! module), [`local`] (how two processes of one host get a connection) and [`remote`] (how those of two
//! hosts do).
//!
//! What it is not: it holds no policy, restarts nobody, reconnects nothing, and knows no function,
//! queue or packet. A peer is another process and is not trusted: whatever it sends or writes into
//! shared memory costs at most its own connection.
//!
//! # Transports
//!
//! The OM and the EM see `Arc<dyn Fabric>` and `Arc<dyn Handler>` only; only what makes a [`Listener`] or a
//! connection knows the transport.
//!
//! * [`wire`] is the same on all; a byte stream has no packets and goes by the length in the header.
//! * [`Fabric::call`] with descriptors fails with [`FabricError::NoFds`] where they cannot travel,
//!   and [`Fabric::carries_fds`] says so beforehand. The content of a function's shadow then travels
//!   as an image, see [`Fabric::show`].
//! * Order among register accesses of one direction is the order of the calls; messages and registers
//!   are not ordered with each other, on any transport.
//! * Who a remote peer is says its certificate, see [`Fabric::check_name`].
//! * A connection that breaks is down for good; whoever wants another makes another.

// Under loom only the ring is built: loom's atomics cannot lie in shared memory.
#[cfg(not(loom))]
mod calls;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod fabric;
#[cfg(not(loom))]
mod inbox;
#[cfg(not(loom))]
pub mod keeper;
#[cfg(not(loom))]
mod link;
#[cfg(not(loom))]
pub mod local;
#[cfg(not(loom))]
mod poll;
pub mod proto;
mod registers;
#[cfg(not(loom))]
pub mod remote;
#[cfg(not(loom))]
mod session;
pub mod wire;

#[cfg(not(loom))]
pub use error::FabricError;
#[cfg(not(loom))]
pub use fabric::{Arrival, Fabric, Handler, Listener, PeerInfo, RegisterPort};
#[cfg(not(loom))]
pub use registers::spin::poll_with_few_cpus;
