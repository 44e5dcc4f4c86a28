//! Front ends: one folder for each driver whose device a guest can see, and what they share.

pub(crate) mod allowance;
pub mod buffer;
pub mod doorbells;
pub mod erdma;
pub mod mlx5;
mod stats;

use super::engine::Context;
use super::kept::Kept;
use super::packet::{Addresses, Packet, Request};
use super::verbs::{Path, Peer};
use crate::net::links::Links;
use crate::worker::Watch;
use dot_iommu::DotView;
use m2m_fabric::proto::QueueStats;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The device that a guest sees, whichever it is.
#[derive(Debug)]
pub enum Device {
    /// Of the ConnectX family.
    Mlx5(Box<mlx5::Device>),
    /// Of the `erdma` driver.
    Erdma(Box<erdma::Device>),
}

impl Device {
    /// A GID that the driver changed: index and value, all zeroes when it removed it.
    pub fn take_gid_change(&mut self) -> Option<(u16, [u8; 16])> {
        match self {
            Self::Mlx5(device) => device.take_gid_change(),
            Self::Erdma(device) => device.take_gid_change(),
        }
    }

    /// All of [`Self::take_gid_change`].
    pub fn take_gid_changes(&mut self) -> Vec<(u16, [u8; 16])> {
        std::iter::from_fn(|| self.take_gid_change()).collect()
    }

    /// Whether a driver has the function in use.
    pub fn running(&self) -> bool {
        match self {
            Self::Mlx5(device) => device.running(),
            Self::Erdma(device) => device.running(),
        }
    }

    /// Whether the port is up.
    pub fn set_link(&mut self, up: bool) {
        match self {
            Self::Mlx5(device) => device.set_link(up),
            Self::Erdma(device) => device.set_link(up),
        }
    }

    /// Objects made from now on are kept there.
    pub fn keep_in(&mut self, objects: Arc<Kept>) {
        match self {
            Self::Mlx5(device) => device.keep_in(objects),
            Self::Erdma(device) => device.keep_in(objects),
        }
    }

    pub(super) fn reset(&mut self) {
        match self {
            Self::Mlx5(device) => device.reset(),
            Self::Erdma(device) => device.reset(),
        }
    }

    pub(super) fn receive(
        &mut self,
        from: Peer,
        packet: Packet,
        cx: &mut Context<'_>,
    ) -> Option<Box<Request>> {
        match self {
            Self::Mlx5(device) => device.engine().receive(from, packet, cx),
            Self::Erdma(device) => device.receive(from, packet, cx),
        }
    }

    pub(super) fn turn(&mut self, cx: &mut Context<'_>, links: &mut Links) -> bool {
        match self {
            Self::Mlx5(device) => device.turn(cx, links),
            Self::Erdma(device) => device.turn(cx),
        }
    }

    /// Frames go nowhere. Answers whether there were any.
    pub(super) fn discard_frames(&mut self, links: &mut Links) -> bool {
        match self {
            Self::Mlx5(device) => device.discard_frames(links),
            Self::Erdma(_) => false,
        }
    }

    /// Before sleep: whether there are frames to be moved.
    pub(super) fn has_frames(&mut self, links: &Links, memory: &DotView<'_>) -> bool {
        match self {
            Self::Mlx5(device) => device.has_frames(links, memory),
            Self::Erdma(_) => false,
        }
    }

    /// Whether a frame waits for a receive entry.
    pub(super) fn waits_for_receives(&self) -> bool {
        match self {
            Self::Mlx5(device) => device.waits_for_receives(),
            Self::Erdma(_) => false,
        }
    }

    /// Before sleep: whether a doorbell waits.
    pub(super) fn is_rung(&self) -> bool {
        match self {
            Self::Mlx5(device) => device.is_rung(),
            Self::Erdma(device) => device.is_rung(),
        }
    }

    /// The longest time without a turn.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        match self {
            Self::Mlx5(device) => device.patience(now),
            Self::Erdma(device) => device.engine_ref().patience(now),
        }
    }

    /// Where doorbells turn up without a word.
    pub(super) fn watch(&self) -> Option<Watch> {
        match self {
            Self::Mlx5(device) => device.watch(),
            Self::Erdma(_) => None,
        }
    }

    /// The data path slept, or meant to.
    pub(super) fn woke(&mut self) {
        match self {
            Self::Mlx5(device) => device.woke(),
            Self::Erdma(_) => {}
        }
    }

    pub(super) fn stats(&self) -> Vec<QueueStats> {
        match self {
            Self::Mlx5(device) => device.stats(),
            Self::Erdma(device) => device.stats(),
        }
    }

    pub(super) fn addresses(&self) -> &Addresses {
        match self {
            Self::Mlx5(device) => device.addresses(),
            Self::Erdma(device) => device.addresses(),
        }
    }

    /// The answers of the OM that queue pairs rely on.
    pub(super) fn paths(&mut self) -> Vec<Path> {
        match self {
            Self::Mlx5(device) => device.engine().paths().collect(),
            Self::Erdma(device) => device.engine().paths().collect(),
        }
    }

    pub(super) fn revoke(&mut self, peer: Peer, generation: u64, cx: &mut Context<'_>) {
        match self {
            Self::Mlx5(device) => device.engine().revoke(peer, generation, cx),
            Self::Erdma(device) => device.engine().revoke(peer, generation, cx),
        }
    }
}
