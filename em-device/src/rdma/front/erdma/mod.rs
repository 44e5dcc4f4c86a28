//! An RDMA function that the `erdma` driver of the Linux kernel talks to.
//!
//! [`Registers`] is BAR0 as the driver reads and writes it. [`Device`] executes the driver's commands, owns its objects
//! and reports events. The queues' formats are in files of their own ([`sq`], [`rq`], [`cq`]).
//!
//! The driver chooses the numbers of its objects, and never says path MTU, timeouts or how often to retry, which are
//! this device's. Everything is little endian but for completion queue entries.

mod address;
mod bytes;
mod command;
pub mod cq;
mod device;
mod eq;
mod kept;
mod memory;
mod mr;
mod qp;
mod registers;
pub mod rq;
pub mod sq;
mod stats;
mod tables;

#[cfg(test)]
mod tests;

pub use command::Command;
pub use device::Device;
pub use registers::{Action, BAR_BYTES, Registers, Setup};

use super::super::verbs;

/// The formats of this device's queues.
#[derive(Debug)]
pub struct Erdma;

impl verbs::Front for Erdma {
    const IPV4_HEADERS: bool = true;
    const REPORTS_FAILURES: bool = true;
    type Send = sq::Sq;
    type Receive = rq::Rq;
    type Completion = cq::Cq;
}
