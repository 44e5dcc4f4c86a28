//! The Ethernet side of the function: what the `mlx5e` part of the driver's queues carry.
//!
//! A send's way: [`EtherTx`] reads an entry → [`tx_entry`] → a [`crate::frame::Frame`] on the guest's
//! memory with the offload facts that every function here understands → the function's wires. A
//! received frame goes from a wire through [`EtherFilter`] and [`Rss`] to an [`EtherRx`], finished:
//! large ones are segmented, because large receive offload is not offered.
//!
//! Commands are parsed elsewhere; this is given setups.

mod counters;
mod deliver;
mod filter;
mod headers;
mod memory;
mod path;
mod receive;
mod rss;
mod rx;
mod tx;
mod tx_entry;
mod udp;

pub use counters::{Count, EtherCounters, Traffic};
pub use filter::EtherFilter;
pub use path::{EtherPath, discard};
pub use receive::EtherReceive;
pub use rss::{HashFunction, Rss};
pub use rx::{EtherRx, RxSetup};
pub use tx::{EtherTx, TxSetup};

use crate::net::links::Links;
use crate::rdma::verbs::{Pushed, Regions};
use dot_iommu::DotView;

/// Adds an entry to the completion queue of a number, see [`super::cq::Cq::push_raw`].
pub type Complete<'a> = dyn FnMut(u32, [u8; 64]) -> Pushed + 'a;

/// What the queues need from around them, for one round.
pub struct EtherContext<'a> {
    /// The guest's memory.
    pub view: &'a DotView<'a>,
    /// The memory keys that entries name.
    pub regions: &'a Regions,
    /// The function's wires.
    pub links: &'a mut Links,
    /// Where entries complete.
    pub complete: &'a mut Complete<'a>,
    /// What is counted.
    pub counters: &'a mut EtherCounters,
    /// Whether the link is up.
    pub link_up: bool,
}

#[cfg(test)]
mod receive_tests;
#[cfg(test)]
mod test_frames;
#[cfg(test)]
mod tx_tests;
