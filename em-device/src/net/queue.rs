//! A virtqueue of the function with what is counted about it.

use super::dirty::DirtyLog;
use super::moderation::Moderation;
use crate::frame::FrameMeta;
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

/// What drivers ask about a queue (device statistics), since DRIVER_OK.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Notifications by the driver.
    pub kicks: u64,
    /// Frames moved.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Frames dropped for any reason.
    pub drops: u64,
    /// Of those, for want of receive buffers.
    pub overruns: u64,
    /// Of those, because they were no frames.
    pub malformed: u64,
    /// Frames whose checksum was left to the other side.
    pub needs_csum: u64,
    /// Frames that were to be segmented.
    pub gso_packets: u64,
    /// Their bytes.
    pub gso_bytes: u64,
}

impl Figures {
    fn since(self, base: Self) -> Self {
        let less = |now: u64, then: u64| now.saturating_sub(then);
        Self {
            kicks: less(self.kicks, base.kicks),
            packets: less(self.packets, base.packets),
            bytes: less(self.bytes, base.bytes),
            interrupts: less(self.interrupts, base.interrupts),
            drops: less(self.drops, base.drops),
            overruns: less(self.overruns, base.overruns),
            malformed: less(self.malformed, base.malformed),
            needs_csum: less(self.needs_csum, base.needs_csum),
            gso_packets: less(self.gso_packets, base.gso_packets),
            gso_bytes: less(self.gso_bytes, base.gso_bytes),
        }
    }
}

/// Reasons that are not the frame's fault.
const NOT_MALFORMED: [&str; 7] = [
    drop_reason::LINK_DOWN,
    drop_reason::NO_PORT,
    drop_reason::PORT_FULL,
    drop_reason::PORT_REFUSED,
    drop_reason::NOT_RUNNING,
    drop_reason::FILTERED,
    drop_reason::NO_BUFFER,
];

/// One queue. Counters live as long as the function, the ring from DRIVER_OK to reset.
#[derive(Debug)]
pub struct NetQueue {
    /// Index in the device.
    pub index: u16,
    name: String,
    ring: Option<Ring>,
    /// Where the ring was when it was last logged.
    logged: Option<u32>,
    packets: u64,
    bytes: u64,
    interrupts: u64,
    offloads: Offloads,
    drops: BTreeMap<&'static str, u64>,
    /// What was counted before DRIVER_OK.
    base: Figures,
    marked: (u64, u64),
    /// Since when its frames find no room.
    pub blocked: Option<Instant>,
    /// Its frames are dropped: buffers of a transmit queue that is not enabled go back without being sent.
    pub discards: bool,
    /// What its driver was not told yet.
    pub moderation: Moderation,
}

/// Counts of frames with offload facts.
#[derive(Debug, Clone, Copy, Default)]
struct Offloads {
    needs_csum: u64,
    gso_packets: u64,
    gso_bytes: u64,
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
            logged: None,
            packets: 0,
            bytes: 0,
            interrupts: 0,
            offloads: Offloads::default(),
            drops: BTreeMap::new(),
            base: Figures::default(),
            marked: (0, 0),
            blocked: None,
            discards: false,
            moderation: Moderation::new(index % 2 == 1),
        }
    }

    /// Gives it a ring or takes it away.
    pub fn set_ring(&mut self, ring: Option<Ring>) {
        self.ring = ring;
        self.logged = None;
        self.blocked = None;
        self.moderation.settle();
    }

    /// Takes its ring away.
    pub fn take_ring(&mut self) -> Option<Ring> {
        let ring = self.ring.take();
        self.set_ring(None);
        ring
    }

    /// Logs the parts of its ring that the device writes.
    pub fn log_ring(&self, log: Option<&DirtyLog>) {
        if let (Some(log), Some(ring)) = (log, &self.ring) {
            for (addr, len) in ring.written_areas() {
                log.mark(addr, len);
            }
        }
    }

    /// The same if buffers were given back since the last call.
    pub fn log_ring_that_moved(&mut self, log: &DirtyLog) {
        let position = self.ring.as_ref().map(Ring::position);
        if std::mem::replace(&mut self.logged, position) != position {
            self.log_ring(Some(log));
        }
    }

    /// Whether it has a ring.
    pub fn is_enabled(&self) -> bool {
        self.ring.is_some()
    }

    /// Its ring on a view.
    #[inline]
    pub fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Option<Attached<'r, 'v>> {
        Some(self.ring.as_mut()?.attach(view))
    }

    /// Its ring on a view, and its counters.
    #[inline]
    pub fn parts<'r, 'v>(
        &'r mut self,
        view: &'v DotView<'_>,
    ) -> Option<(Attached<'r, 'v>, Counters<'r>)> {
        let ring = self.ring.as_mut()?.attach(view);
        let counters = Counters {
            packets: &mut self.packets,
            bytes: &mut self.bytes,
            offloads: &mut self.offloads,
            drops: &mut self.drops,
        };
        Some((ring, counters))
    }

    /// Counts a dropped frame.
    pub fn count_drop(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }

    /// Whether there are buffers that its driver was not told of.
    pub fn is_untold(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.untold() != 0)
    }

    /// Frames and bytes moved since the start.
    pub fn moved(&self) -> (u64, u64) {
        (self.packets, self.bytes)
    }

    /// Notes what was moved so far.
    pub fn mark(&mut self) {
        self.marked = (self.packets, self.bytes);
    }

    /// Frames and bytes moved since then.
    pub fn moved_since_mark(&self) -> (u64, u64) {
        let (packets, bytes) = self.marked;
        (self.packets - packets, self.bytes - bytes)
    }

    /// What a driver asks; `kicks`: notifications since the start.
    pub fn figures(&self, kicks: u64) -> Figures {
        self.all_figures(kicks).since(self.base)
    }

    /// A driver begins: its figures begin at 0.
    pub fn begin_figures(&mut self, kicks: u64) {
        self.base = self.all_figures(kicks);
    }

    fn all_figures(&self, kicks: u64) -> Figures {
        let malformed = self.drops.iter();
        let malformed = malformed.filter(|(reason, _)| !NOT_MALFORMED.contains(reason));
        Figures {
            kicks,
            packets: self.packets,
            bytes: self.bytes,
            interrupts: self.interrupts,
            drops: self.drops.values().sum(),
            overruns: self.drops.get(drop_reason::NO_BUFFER).copied().unwrap_or(0),
            malformed: malformed.map(|(_, count)| count).sum(),
            needs_csum: self.offloads.needs_csum,
            gso_packets: self.offloads.gso_packets,
            gso_bytes: self.offloads.gso_bytes,
        }
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
    offloads: &'a mut Offloads,
    drops: &'a mut BTreeMap<&'static str, u64>,
}

impl Counters<'_> {
    /// Counts a frame that was moved.
    #[inline]
    pub fn moved(&mut self, bytes: usize, meta: &FrameMeta) {
        *self.packets += 1;
        *self.bytes += bytes as u64;
        if meta.needs_csum() {
            self.offloads.needs_csum += 1;
            if meta.is_gso() {
                self.offloads.gso_packets += 1;
                self.offloads.gso_bytes += bytes as u64;
            }
        }
    }

    /// Counts a dropped frame.
    pub fn dropped(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}
