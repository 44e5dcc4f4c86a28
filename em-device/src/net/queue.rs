//! A virtqueue of the function with what is counted about it.

use super::moderation::Moderation;
use crate::virtio::ring::{Attached, Ring};
use dot_iommu::DotView;
use m2m_fabric::proto::QueueStats;
use std::collections::BTreeMap;
use std::time::Instant;

/// Names of drop counters that are not [`crate::virtio::chain::BadChain`]'s.
pub mod drop_reason {
    /// Too few bytes for the virtio header.
    pub const SHORT_HEADER: &str = "short-header";
    /// Too few bytes for an Ethernet header.
    pub const SHORT_FRAME: &str = "short-frame";
    /// More bytes than MTU or any frame allows.
    pub const ABOVE_MTU: &str = "above-mtu";
    /// Offload facts that are wrong or were not negotiated.
    pub const BAD_OFFLOAD: &str = "bad-offload";
    /// A transmit buffer the device may write, or a receive buffer it may read.
    pub const WRONG_DIRECTION: &str = "wrong-direction";
    /// The link is down.
    pub const LINK_DOWN: &str = "link-down";
    /// No wire.
    pub const NO_PORT: &str = "no-port";
    /// The wire stayed full.
    pub const PORT_FULL: &str = "port-full";
    /// The wire does not take the frame.
    pub const PORT_REFUSED: &str = "port-refused";
    /// No driver runs.
    pub const NOT_RUNNING: &str = "not-running";
    /// The driver's filter does not want the frame.
    pub const FILTERED: &str = "filtered";
    /// The driver gave no buffers for long.
    pub const NO_BUFFER: &str = "no-buffer";
    /// A buffer too small for a header, or for the frame where buffers cannot be merged.
    pub const SMALL_BUFFER: &str = "small-buffer";
    /// A control command without room for its answer.
    pub const NO_ANSWER_ROOM: &str = "no-answer-room";
}

/// One queue. Counters live as long as the function, the ring from DRIVER_OK to reset.
#[derive(Debug)]
pub struct NetQueue {
    /// Index in the device.
    pub index: u16,
    name: String,
    ring: Option<Ring>,
    packets: u64,
    bytes: u64,
    interrupts: u64,
    drops: BTreeMap<&'static str, u64>,
    /// Since when its frames find no room.
    pub blocked: Option<Instant>,
    /// What its driver was not told yet; transmit queues only.
    pub moderation: Moderation,
}

impl NetQueue {
    /// Queue `index` of a function with `pairs` pairs; the last is the control queue.
    pub fn new(index: u16, pairs: u16) -> Self {
        let name = match index {
            i if i >= 2 * pairs => "ctrl".to_owned(),
            i if i % 2 == 0 => format!("rx{}", i / 2),
            i => format!("tx{}", i / 2),
        };
        Self {
            index,
            name,
            ring: None,
            packets: 0,
            bytes: 0,
            interrupts: 0,
            drops: BTreeMap::new(),
            blocked: None,
            moderation: Moderation::default(),
        }
    }

    /// Gives it a ring or takes it away.
    pub fn set_ring(&mut self, ring: Option<Ring>) {
        self.ring = ring;
        self.blocked = None;
        self.moderation.settle();
    }

    /// Whether it has a ring.
    pub fn is_enabled(&self) -> bool {
        self.ring.is_some()
    }

    /// Its ring on a view.
    pub fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Option<Attached<'r, 'v>> {
        Some(self.ring.as_mut()?.attach(view))
    }

    /// Its ring on a view, and its counters.
    pub fn parts<'r, 'v>(
        &'r mut self,
        view: &'v DotView<'_>,
    ) -> Option<(Attached<'r, 'v>, Counters<'r>)> {
        let ring = self.ring.as_mut()?.attach(view);
        let counters = Counters {
            packets: &mut self.packets,
            bytes: &mut self.bytes,
            drops: &mut self.drops,
        };
        Some((ring, counters))
    }

    /// Counts a dropped frame.
    pub fn count_drop(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }

    /// Buffers that its driver was not told of.
    pub fn untold(&self) -> u16 {
        self.ring.as_ref().map_or(0, Ring::untold)
    }

    /// Bytes moved since the start.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts an interrupt.
    pub fn count_interrupt(&mut self) {
        self.interrupts += 1;
    }

    /// A snapshot of the counters.
    pub fn stats(&self, kicks: u64) -> QueueStats {
        QueueStats {
            name: self.name.clone(),
            enabled: self.is_enabled(),
            packets: self.packets,
            bytes: self.bytes,
            kicks,
            interrupts: self.interrupts,
            drops: self
                .drops
                .iter()
                .map(|(k, v)| ((*k).to_owned(), *v))
                .collect(),
        }
    }
}

/// The counters of a queue whose ring is in use.
#[derive(Debug)]
pub struct Counters<'a> {
    packets: &'a mut u64,
    bytes: &'a mut u64,
    drops: &'a mut BTreeMap<&'static str, u64>,
}

impl Counters<'_> {
    /// Counts a frame that was moved.
    pub fn moved(&mut self, bytes: usize) {
        *self.packets += 1;
        *self.bytes += bytes as u64;
    }

    /// Counts a dropped frame.
    pub fn dropped(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}
