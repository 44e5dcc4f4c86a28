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

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use m2m_fabric::proto::EmStats;

use crate::net::device::NetDevice;
use crate::net::links::Links;
pub use handle::Handle;

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
    /// Functions by id.
    pub functions: BTreeMap<u32, Function>,
    wakeups: u64,
    bursts: u64,
}

impl State {
    /// All counters; what only the endpoint knows (DMA ranges) is left zero.
    pub fn stats(&self) -> EmStats {
        let links = self.functions.values().flat_map(|f| f.links.iter());
        EmStats {
            functions: self.functions.values().map(|f| f.device.stats()).collect(),
            links: links
                .map(|link| {
                    let mut stats = link.port.stats();
                    stats.link = link.id;
                    stats
                })
                .collect(),
            wakeups: self.wakeups,
            bursts: self.bursts,
        }
    }

    fn turn(&mut self) -> bool {
        let now = Instant::now();
        self.functions.values_mut().fold(false, |worked, f| {
            f.links.set_now(now);
            f.device.turn(&mut f.links) | worked
        })
    }

    fn arm(&mut self) -> bool {
        self.functions
            .values_mut()
            .any(|f| f.device.arm(&mut f.links))
    }

    fn disarm(&mut self) {
        self.functions
            .values_mut()
            .for_each(|f| f.device.disarm(&mut f.links));
    }

    fn patience(&self) -> Option<Duration> {
        self.functions
            .values()
            .filter_map(|f| f.device.patience(&f.links))
            .min()
    }

    fn has_backlog(&self) -> bool {
        self.functions
            .values()
            .any(|f| f.device.has_backlog(&f.links))
    }
}

#[cfg(test)]
mod tests;
