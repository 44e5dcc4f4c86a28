//! A ConnectX-compatible function: what the stock `mlx5_core` and `mlx5_ib` drivers talk to.
//!
//! [`Registers`] is BAR0 as the driver reads and writes it: the initialization segment and the
//! doorbell pages. [`Device`] executes the driver's commands, owns its objects and reports events.
//! The queues' formats are in files of their own ([`sq`], [`rq`], [`cq`]).
//!
//! Formats: ConnectX programmer's reference manual, by the names that `mlx5_ifc.h` of the Linux kernel
//! gives to structures and fields. Everything is big endian.

mod bits;
pub mod command;
pub mod cq;
pub mod cqe;
mod device;
mod eq;
pub mod ether;
mod events;
mod fields;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod iseg;
mod kept;
mod lookout;
mod mapped;
pub mod nic;
mod pages;
mod registers;
mod replay;
pub mod rq;
mod send_ring;
pub mod sq;
mod stats;
mod table;
mod umr;
mod wqe;

#[cfg(test)]
mod cq_tests;
#[cfg(test)]
mod rq_tests;
#[cfg(test)]
mod sq_tests;
#[cfg(test)]
mod test_queue;
#[cfg(test)]
mod umr_tests;

pub use command::{Command, Status};
pub use device::Device;
pub use mapped::MappedPages;
pub use registers::{Action, BAR_BYTES, Registers};

use super::super::verbs;
pub use super::buffer;
pub use super::doorbells::{self, Doorbells};

/// The formats of this family's queues.
#[derive(Debug)]
pub struct Mlx5;

impl verbs::Front for Mlx5 {
    type Send = sq::Sq;
    type Receive = rq::Receive;
    type Completion = cq::Cq;
}
