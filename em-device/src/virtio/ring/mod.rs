//! One virtqueue, device side: split (virtio 1.3 §2.7) or packed (§2.8).
//!
//! [`Ring`] keeps the positions between bursts. For a burst it is joined with a pinned view of guest
//! memory ([`Ring::attach`]); the [`Attached`] ring takes buffers, gives them back and decides on
//! interrupts. Buffers are always given back in the order in which they were taken, which is what IN_ORDER
//! (§2.9) promises and what makes a ring's position survive its process.

mod packed;
mod position;
mod split;

pub use position::Position;

use super::chain::{BadChain, Parts, Walked};
use super::common::QueueSetup;
use super::feature;
use dot_iommu::{Access, DotView};
use smartep::state::{QueueState, State};
use std::sync::Arc;

/// Why a ring cannot be used now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Its memory is not mapped at present. The VMM may map it again, as firmware makes it do.
    #[error("the ring is not in mapped memory")]
    Unmapped,
    /// The available index moved by more than the ring has, or backwards.
    #[error("the available index went from {from} to {to} in a ring of {size}")]
    IndexJump {
        /// Where the device was.
        from: u16,
        /// What the driver wrote.
        to: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A head that is no index of the descriptor table.
    #[error("the available ring names descriptor {head} in a table of {size}")]
    BadHead {
        /// What the driver wrote.
        head: u16,
        /// Entries of the table.
        size: u16,
    },
    /// A chain of a packed ring has no end, so that nobody knows where the next begins.
    #[error("a chain goes all the way round a packed ring of {size}")]
    EndlessChain {
        /// Entries of the ring.
        size: u16,
    },
    /// A packed ring's descriptors were made available again before they were used.
    #[error("more than the {size} descriptors of a packed ring are available")]
    Overrun {
        /// Entries of the ring.
        size: u16,
    },
}

impl RingError {
    /// Whether only a reset helps.
    pub fn is_fatal(self) -> bool {
        self != Self::Unmapped
    }

    /// The name of the counter.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unmapped => "ring-not-mapped",
            Self::IndexJump { .. } => "ring-index-jump",
            Self::BadHead { .. } => "ring-bad-head",
            Self::EndlessChain { .. } => "ring-endless-chain",
            Self::Overrun { .. } => "ring-overrun",
        }
    }
}

/// What was negotiated about rings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// The packed layout.
    pub packed: bool,
    /// Events by index.
    pub event_idx: bool,
    /// Indirect tables.
    pub indirect: bool,
    /// One used entry may stand for a batch.
    pub in_order: bool,
}

impl RingFeatures {
    /// Out of the negotiated feature bits.
    pub fn of(features: u64) -> Self {
        let has = |bit| features & bit != 0;
        Self {
            packed: has(feature::RING_PACKED),
            event_idx: has(feature::EVENT_IDX),
            indirect: has(feature::INDIRECT_DESC),
            in_order: has(feature::IN_ORDER),
        }
    }
}

/// Where a packed ring notes its position for the next process.
#[derive(Clone)]
pub struct QueueNote {
    state: Arc<State>,
    queue: u16,
}

impl std::fmt::Debug for QueueNote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QueueNote({})", self.queue)
    }
}

impl QueueNote {
    /// The place of a queue of the device.
    pub fn new(state: Arc<State>, queue: u16) -> Self {
        Self { state, queue }
    }

    fn place(&self) -> Option<&QueueState> {
        self.state.queue(self.queue)
    }
}

/// A buffer that was taken and is to be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Index of the chain's first descriptor, or the buffer's id in a packed ring.
    pub id: u16,
    /// Entries of the ring that it takes.
    pub slots: u16,
}

/// A buffer that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// What to give back.
    pub head: Head,
    /// What the chain holds, or why it is none. With an error an unspecified number of slices was added.
    pub chain: Result<Walked, BadChain>,
}

/// A ring between bursts.
#[derive(Debug)]
pub struct Ring(Kind);

#[derive(Debug)]
enum Kind {
    Split(split::SplitRing),
    Packed(packed::PackedRing),
}

impl Ring {
    /// A ring that the driver enabled, empty. A packed one notes its position in `note`, whose place is empty.
    pub fn new(setup: QueueSetup, features: RingFeatures, note: Option<QueueNote>) -> Self {
        Self(if features.packed {
            Kind::Packed(packed::PackedRing::new(setup, features, note))
        } else {
            Kind::Split(split::SplitRing::new(setup, features))
        })
    }

    /// A ring that another process worked on. What was available and not given back is taken again, whatever was
    /// done with it.
    pub fn resumed(setup: QueueSetup, features: RingFeatures, note: Option<QueueNote>) -> Self {
        Self(if features.packed {
            Kind::Packed(packed::PackedRing::resumed(setup, features, note))
        } else {
            Kind::Split(split::SplitRing::resumed(setup, features))
        })
    }

    /// A ring that goes on at a position which [`Self::position`] answered, here or elsewhere. `None`: the ring has no
    /// such position. Of a packed ring only the lower half counts: buffers are given back before a ring stops, so that
    /// both places are the same, and DPDK's virtio-user leaves the upper half 0.
    pub fn at(setup: QueueSetup, features: RingFeatures, position: u32) -> Option<Self> {
        let (low, high) = (position as u16, (position >> 16) as u16);
        Some(Self(if features.packed {
            Kind::Packed(packed::PackedRing::at(
                setup,
                features,
                Position::from_bits(low),
            )?)
        } else if high == 0 {
            Kind::Split(split::SplitRing::at(setup, features, low))
        } else {
            return None;
        }))
    }

    /// Where it is between bursts, as vhost-user says it: the available index; of a packed ring two places with
    /// their wrap counters, of the next buffer to take and, in the upper half, of the next one to give back.
    pub fn position(&self) -> u32 {
        match &self.0 {
            Kind::Split(ring) => u32::from(ring.position()),
            Kind::Packed(ring) => {
                let (avail, used) = ring.position();
                u32::from(avail.bits()) | u32::from(used.bits()) << 16
            }
        }
    }

    /// Guest addresses and lengths of the parts that the device writes.
    pub fn written_areas(&self) -> [(u64, u64); 2] {
        match &self.0 {
            Kind::Split(ring) => [ring.written_area(), (0, 0)],
            Kind::Packed(ring) => ring.written_areas(),
        }
    }

    /// Buffers that were published since the driver was last told, or did not want to be.
    pub fn untold(&self) -> u16 {
        match &self.0 {
            Kind::Split(ring) => ring.untold(),
            Kind::Packed(ring) => ring.untold(),
        }
    }

    /// The ring on a view, for one burst.
    #[inline]
    pub fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Attached<'r, 'v> {
        match &mut self.0 {
            Kind::Split(ring) => Attached::Split(ring.attach(view)),
            Kind::Packed(ring) => Attached::Packed(ring.attach(view)),
        }
    }
}

/// A ring in a burst.
#[derive(Debug)]
pub enum Attached<'r, 'v> {
    /// The split layout.
    Split(split::Attached<'r, 'v>),
    /// The packed layout.
    Packed(packed::Attached<'r, 'v>),
}

/// The same call on either layout: a branch that is the same for the whole burst.
macro_rules! either {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            Self::Split($ring) => $call,
            Self::Packed($ring) => $call,
        }
    };
}

impl<'v> Attached<'_, 'v> {
    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Takes the next buffer and appends its memory to `parts`.
    ///
    /// # Errors
    /// [`RingError`]; nothing was taken then.
    #[inline]
    pub fn pop(&mut self, parts: &mut Parts<'v>) -> Result<Option<Taken>, RingError> {
        either!(self, ring => ring.pop(parts))
    }

    /// Has the processor fetch the buffer that is `ahead` places behind the next one, if it is known to be there, for
    /// reading or writing: it comes from the cache of the driver's processor. A hint.
    #[inline]
    pub fn prefetch(&self, ahead: u16, access: Access) {
        either!(self, ring => ring.prefetch(ahead, access));
    }

    /// Puts the last buffers back, `slots` entries in all: they are taken again next time.
    pub fn unpop(&mut self, slots: u16) {
        either!(self, ring => ring.unpop(slots));
    }

    /// Gives a buffer back, with the bytes that were written to it. It becomes visible with
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`RingError::Unmapped`]; the buffer is lost to the driver then, as is its ring.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) -> Result<(), RingError> {
        either!(self, ring => ring.push_used(head, written))
    }

    /// Makes the buffers given back visible to the driver, those of a packed ring one after the other.
    ///
    /// # Errors
    /// [`RingError::Unmapped`].
    pub fn publish(&mut self) -> Result<(), RingError> {
        either!(self, ring => ring.publish())
    }

    /// The same, and the driver sees all of them at once, as the buffers of a merged frame must be (§5.1.6.4). At
    /// most [`MAX_TOGETHER`] in a packed ring.
    ///
    /// # Errors
    /// [`RingError::Unmapped`].
    pub fn publish_together(&mut self) -> Result<(), RingError> {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish_together(),
        }
    }

    /// Whether the driver wants an interrupt for what was published since the last call (§2.7.7, §2.8.7).
    pub fn wants_interrupt(&mut self) -> bool {
        either!(self, ring => ring.wants_interrupt())
    }

    /// The same, and the question stays open as long as the answer is yes. `None`: the memory is not there.
    pub fn still_wants_interrupt(&mut self) -> Option<bool> {
        either!(self, ring => ring.still_wants_interrupt())
    }

    /// Asks the driver for a notification at the next buffer after those that were seen (§2.7.10,
    /// §2.8.7). Answers whether there are more already, so that none may come for them.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn enable_notification(&mut self) -> Result<bool, RingError> {
        either!(self, ring => ring.enable_notification())
    }

    /// Asks the driver not to notify.
    ///
    /// # Errors
    /// [`RingError::Unmapped`].
    pub fn disable_notification(&mut self) -> Result<(), RingError> {
        either!(self, ring => ring.disable_notification())
    }
}

/// Buffers that can become visible at once.
pub const MAX_TOGETHER: usize = QueueState::ENTRIES;
