//! The data path: one loop over all functions of an EM, and who runs it when.
//!
//! A thread of its own, the worker, polls while there is work and for a short, adaptive window after. Then it
//! asks every queue and wire for a notification, looks once more, and sleeps on file descriptors.
//!
//! A thread that is woken costs more than moving a few frames. So the thread that learns of work does it: a
//! thread that takes a driver's notification from its socket ([`Handle::kick`]) does the rounds itself while
//! the worker sleeps, and leaves to the worker what takes longer. [`State`] belongs to whoever holds its lock:
//! the worker holds it all the time that it is awake and gives it up only to sleep. How no wake-up gets lost
//! between them is told in the `handle` module.

mod handle;
mod spin;
mod thread;
mod watch;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use m2m_fabric::proto::EmStats;

use crate::net::device::NetDevice;
use crate::net::links::{Link, Links};
use crate::rdma::function::RdmaFunction;
pub use handle::Handle;
pub use watch::{Watch, Watched};

/// A function on the data path, with its wires.
#[derive(Debug)]
pub struct Function {
    /// The device.
    pub device: NetDevice,
    /// Its wires.
    pub links: Links,
}

/// Everything on the data path.
#[derive(Debug, Default)]
pub struct State {
    /// Network functions by id.
    pub functions: BTreeMap<u32, Function>,
    /// RDMA functions by id.
    pub rdma: BTreeMap<u32, RdmaFunction>,
    wakeups: u64,
    bursts: u64,
    /// When the worker's timer rings.
    timer: Option<Instant>,
}

impl State {
    /// All counters; what only the endpoint knows (DMA ranges) is left zero.
    pub fn stats(&self) -> EmStats {
        let net = self.functions.values().map(|f| f.device.stats());
        let rdma = self.rdma.values().map(RdmaFunction::stats);
        let wires = self.rdma.values().flat_map(|f| f.wires.stats());
        EmStats {
            functions: net.chain(rdma).collect(),
            links: self.links().map(Link::stats).chain(wires).collect(),
            wakeups: self.wakeups,
            bursts: self.bursts,
        }
    }

    /// Wires for frames of a function of any kind.
    pub fn links_of(&mut self, function: u32) -> Option<&mut Links> {
        let net = self.functions.get_mut(&function).map(|f| &mut f.links);
        net.or_else(|| self.rdma.get_mut(&function).map(|f| &mut f.links))
    }

    fn links(&self) -> impl Iterator<Item = &Link> {
        let net = self.functions.values().map(|f| &f.links);
        let rdma = self.rdma.values().map(|f| &f.links);
        net.chain(rdma).flat_map(Links::iter)
    }

    /// What to sleep on.
    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let wires = self.rdma.values().flat_map(|f| f.wires.wake_fds());
        self.links()
            .filter_map(|link| link.port.wake_fd())
            .chain(wires)
    }

    /// What to glance at while asleep.
    fn watches(&self) -> Vec<Watch> {
        self.rdma.values().filter_map(RdmaFunction::watch).collect()
    }

    fn turn(&mut self) -> bool {
        let now = Instant::now();
        let net = self.functions.values_mut().fold(false, |worked, f| {
            f.links.set_now(now);
            f.device.turn(&mut f.links) | worked
        });
        self.rdma
            .values_mut()
            .fold(net, |worked, f| f.turn(now) | worked)
    }

    fn arm(&mut self) -> bool {
        let mut net = self.functions.values_mut();
        net.any(|f| f.device.arm(&mut f.links)) || self.rdma.values_mut().any(RdmaFunction::arm)
    }

    fn disarm(&mut self) {
        for f in self.functions.values_mut() {
            f.device.disarm(&mut f.links);
        }
        self.rdma.values_mut().for_each(RdmaFunction::disarm);
    }

    fn deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let net = self.functions.values();
        net.filter_map(|f| f.device.deadline(&f.links, now))
            .chain(self.rdma.values().filter_map(|f| f.deadline(now)))
            .min()
    }
}

#[cfg(test)]
mod tests;
