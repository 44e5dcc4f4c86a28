//! The Execution Module: the functions a guest sees and the data path behind them.
//!
//! A frame's way: a guest's transmit queue ([`virtio::ring`]) → [`net`] → [`flow`] → [`port`], and
//! from a port through the receive filter into a guest's receive queue. One [`worker`] thread moves
//! them all; [`endpoint`] joins a function's vfio-user connection with it.
//!
//! Start from [`Em`], which the program `em` and in-process tests run, and [`worker::Handle`].
//!
//! What it is not: it holds no policy and presents no configuration space; both are the
//! Orchestration Module's, which tells it what to do over the M2M fabric.

pub mod control;
pub mod em;
pub mod endpoint;
pub mod flow;
pub mod frame;
pub mod net;
pub mod offload;
pub mod port;
pub mod rdma;
pub mod slices_sys;
pub mod virtio;
pub mod worker;

pub use em::Em;

#[cfg(test)]
mod testing;
