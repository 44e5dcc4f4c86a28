//! One split virtqueue, device side (virtio 1.3 §2.7).
//!
//! [`Ring`] keeps the positions between bursts. For a burst it is joined with a pinned view of guest
//! memory ([`Ring::attach`]); the [`Attached`] ring takes heads, gives them back and decides on
//! interrupts. Used buffers become visible together with [`Attached::publish`]: the buffers of one
//! merged frame must not show up one by one (§5.1.6.4).

use super::area::GuestArea;
use super::chain::{self, BadChain, Parts, Walked};
use super::common::QueueSetup;
use dot_iommu::{Access, DotView};
use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

/// Offset of `ring` in the available and in the used ring; `flags` and `idx` are before it.
const RING: u64 = 4;
const IDX: u64 = 2;
const FLAGS: u64 = 0;
const AVAIL_ENTRY: u64 = 2;
const USED_ENTRY: u64 = 8;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;

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
}

impl RingError {
    /// Whether only a reset of the device helps.
    pub fn is_fatal(self) -> bool {
        self != Self::Unmapped
    }
}

/// Positions of a ring between bursts.
#[derive(Debug)]
pub struct Ring {
    setup: QueueSetup,
    event_idx: bool,
    indirect: bool,
    next_avail: Wrapping<u16>,
    /// Last index read from the driver; heads before it need no look at the index.
    known_avail: Wrapping<u16>,
    next_used: Wrapping<u16>,
    /// Where `next_used` was at the last decision about an interrupt.
    signalled: Wrapping<u16>,
    /// The positions are to be read from the driver's memory first.
    resumes: bool,
}

impl Ring {
    /// A ring that the driver enabled, empty. `event_idx` and `indirect` as negotiated.
    pub fn new(setup: QueueSetup, event_idx: bool, indirect: bool) -> Self {
        Self {
            setup,
            event_idx,
            indirect,
            next_avail: Wrapping(0),
            known_avail: Wrapping(0),
            next_used: Wrapping(0),
            signalled: Wrapping(0),
            resumes: false,
        }
    }

    /// A ring that another process worked on. Heads are given back in the order in which they were taken, so the
    /// used index is the position: what is available from there on was not given back, whatever was done with it.
    pub fn resumed(setup: QueueSetup, event_idx: bool, indirect: bool) -> Self {
        Self {
            resumes: true,
            ..Self::new(setup, event_idx, indirect)
        }
    }

    /// Buffers that were published since the driver was last told, or did not want to be.
    pub fn untold(&self) -> u16 {
        (self.next_used - self.signalled).0
    }

    /// The ring on a view, for one burst.
    pub fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Attached<'r, 'v> {
        let (setup, size) = (self.setup, u64::from(self.setup.size));
        // The event fields are part of the areas whether they are used or not.
        let avail = AVAIL_ENTRY * size + RING + 2;
        let used = USED_ENTRY * size + RING + 2;
        let mut attached = Attached {
            view,
            desc: GuestArea::new(view, setup.desc, 16 * size, Access::Read),
            avail: GuestArea::new(view, setup.avail, avail, Access::Read),
            used: GuestArea::new(view, setup.used, used, Access::Write),
            staged: 0,
            ring: self,
        };
        attached.find_position();
        attached
    }
}

/// A ring in a burst.
#[derive(Debug)]
pub struct Attached<'r, 'v> {
    ring: &'r mut Ring,
    view: &'v DotView<'v>,
    desc: GuestArea<'v>,
    avail: GuestArea<'v>,
    used: GuestArea<'v>,
    /// Used entries that are written and not yet visible.
    staged: u16,
}

impl<'v> Attached<'_, 'v> {
    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        self.ring.setup.size
    }

    /// Reads where a former process was, as soon as the memory is there.
    fn find_position(&mut self) {
        let ring = &mut *self.ring;
        if !ring.resumes {
            return;
        }
        if let Some(index) = self.used.load::<u16>(IDX, Ordering::Acquire) {
            let position = Wrapping(u16::from_le(index));
            (ring.next_avail, ring.known_avail) = (position, position);
            (ring.next_used, ring.signalled) = (position, position);
            ring.resumes = false;
        }
    }

    /// Takes the next head.
    ///
    /// # Errors
    /// [`RingError`]; nothing was taken then.
    pub fn pop(&mut self) -> Result<Option<u16>, RingError> {
        let ring = &mut *self.ring;
        if ring.resumes {
            return Err(RingError::Unmapped);
        }
        if ring.known_avail == ring.next_avail {
            self.look()?;
        }
        let ring = &mut *self.ring;
        if ring.known_avail == ring.next_avail {
            return Ok(None);
        }
        let slot = u64::from(ring.next_avail.0 % ring.setup.size);
        let head: u16 = self
            .avail
            .load(RING + AVAIL_ENTRY * slot, Ordering::Relaxed)
            .map(u16::from_le)
            .ok_or(RingError::Unmapped)?;
        if head >= ring.setup.size {
            return Err(RingError::BadHead {
                head,
                size: ring.setup.size,
            });
        }
        ring.next_avail += 1;
        Ok(Some(head))
    }

    /// Reads the driver's index anew.
    fn look(&mut self) -> Result<(), RingError> {
        let ring = &mut *self.ring;
        let index = self
            .avail
            .load(IDX, Ordering::Acquire)
            .map(|index| Wrapping(u16::from_le(index)))
            .ok_or(RingError::Unmapped)?;
        if (index - ring.next_avail).0 > ring.setup.size {
            return Err(RingError::IndexJump {
                from: ring.next_avail.0,
                to: index.0,
                size: ring.setup.size,
            });
        }
        ring.known_avail = index;
        Ok(())
    }

    /// Puts the last `count` heads back: they are taken again next time.
    pub fn unpop(&mut self, count: u16) {
        self.ring.next_avail -= count;
    }

    /// Appends the buffers of a chain to `parts`.
    ///
    /// # Errors
    /// [`BadChain`].
    pub fn walk(&self, head: u16, parts: &mut Parts<'v>) -> Result<Walked, BadChain> {
        let ring = &*self.ring;
        chain::walk(
            self.view,
            &self.desc,
            ring.setup.size,
            head,
            ring.indirect,
            parts,
        )
    }

    /// Gives a head back, with the bytes that were written to it. It becomes visible with
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`RingError::Unmapped`]; the head is lost to the driver then, as is its ring.
    pub fn push_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        let ring = &*self.ring;
        let slot = u64::from((ring.next_used + Wrapping(self.staged)).0 % ring.setup.size);
        // `struct virtq_used_elem`: id, len.
        let entry = u64::from(head) | u64::from(written) << 32;
        self.used
            .write(RING + USED_ENTRY * slot, entry.to_le())
            .ok_or(RingError::Unmapped)?;
        self.staged += 1;
        Ok(())
    }

    /// Makes the heads given back visible to the driver.
    ///
    /// # Errors
    /// [`RingError::Unmapped`].
    pub fn publish(&mut self) -> Result<(), RingError> {
        if self.staged == 0 {
            return Ok(());
        }
        self.ring.next_used += std::mem::take(&mut self.staged);
        self.used
            .store(IDX, self.ring.next_used.0.to_le(), Ordering::Release)
            .ok_or(RingError::Unmapped)
    }

    /// Whether the driver wants an interrupt for what was published since the last call (virtio 1.3
    /// §2.7.7).
    pub fn wants_interrupt(&mut self) -> bool {
        let wanted = self.still_wants_interrupt();
        if wanted == Some(true) {
            self.ring.signalled = self.ring.next_used;
        }
        wanted.unwrap_or(false)
    }

    /// The same, and the question stays open as long as the answer is yes. `None`: the memory is not there.
    pub fn still_wants_interrupt(&mut self) -> Option<bool> {
        let ring = &mut *self.ring;
        let (old, new) = (ring.signalled, ring.next_used);
        if old == new {
            return Some(false);
        }
        // What was published must be visible before the driver's wish is read.
        fence(Ordering::SeqCst);
        let wanted = if ring.event_idx {
            let at = RING + AVAIL_ENTRY * u64::from(ring.setup.size);
            self.avail
                .load::<u16>(at, Ordering::Relaxed)
                .map(|event| new - Wrapping(u16::from_le(event)) - Wrapping(1) < new - old)
        } else {
            self.avail
                .load::<u16>(FLAGS, Ordering::Relaxed)
                .map(|flags| u16::from_le(flags) & NO_INTERRUPT == 0)
        };
        // Without an answer the question stays open until the memory is back.
        if wanted == Some(false) {
            ring.signalled = new;
        }
        wanted
    }

    /// Asks the driver for a notification at the next buffer after those that were seen (virtio 1.3
    /// §2.7.10). Answers whether there are more already, so that none may come for them.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn enable_notification(&mut self) -> Result<bool, RingError> {
        let ring = &*self.ring;
        if ring.resumes {
            return Err(RingError::Unmapped);
        }
        let seen = ring.known_avail;
        let stored = if ring.event_idx {
            let at = RING + USED_ENTRY * u64::from(ring.setup.size);
            self.used.store(at, seen.0.to_le(), Ordering::Relaxed)
        } else {
            self.used.store(FLAGS, 0u16, Ordering::Relaxed)
        };
        stored.ok_or(RingError::Unmapped)?;
        // The wish must be visible before the index is read.
        fence(Ordering::SeqCst);
        self.look()?;
        Ok(self.ring.known_avail != seen)
    }

    /// Asks the driver not to notify. With event indices nothing needs to be said: the index asked for
    /// stays behind.
    ///
    /// # Errors
    /// [`RingError::Unmapped`].
    pub fn disable_notification(&mut self) -> Result<(), RingError> {
        if self.ring.event_idx {
            return Ok(());
        }
        self.used
            .store(FLAGS, NO_NOTIFY.to_le(), Ordering::Relaxed)
            .ok_or(RingError::Unmapped)
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
