//! A split ring (virtio 1.3 §2.7).

use super::{Head, RingError, RingFeatures, Taken};
use crate::virtio::area::GuestArea;
use crate::virtio::chain::{self, Parts};
use crate::virtio::common::QueueSetup;
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

/// Positions of a ring between bursts.
#[derive(Debug)]
pub(super) struct SplitRing {
    setup: QueueSetup,
    features: RingFeatures,
    next_avail: Wrapping<u16>,
    /// Last index read from the driver; heads before it need no look at the index.
    known_avail: Wrapping<u16>,
    next_used: Wrapping<u16>,
    /// Where `next_used` was at the last decision about an interrupt.
    signalled: Wrapping<u16>,
    /// The positions are to be read from the driver's memory first.
    resumes: bool,
    /// Where to go on then, if not where the used index is.
    base: Option<Wrapping<u16>>,
}

impl SplitRing {
    pub(super) fn new(setup: QueueSetup, features: RingFeatures) -> Self {
        Self {
            setup,
            features,
            next_avail: Wrapping(0),
            known_avail: Wrapping(0),
            next_used: Wrapping(0),
            signalled: Wrapping(0),
            resumes: false,
            base: None,
        }
    }

    /// Buffers are given back in the order in which they were taken, so the used index is the position.
    pub(super) fn resumed(setup: QueueSetup, features: RingFeatures) -> Self {
        Self {
            resumes: true,
            ..Self::new(setup, features)
        }
    }

    /// The next buffer is that of the available index `base`.
    pub(super) fn at(setup: QueueSetup, features: RingFeatures, base: u16) -> Self {
        let base = Wrapping(base);
        Self {
            resumes: true,
            base: Some(base),
            next_avail: base,
            ..Self::new(setup, features)
        }
    }

    /// The available index of the next buffer.
    pub(super) fn position(&self) -> u16 {
        self.next_avail.0
    }

    /// The used ring.
    pub(super) fn written_area(&self) -> (u64, u64) {
        let bytes = RING + USED_ENTRY * u64::from(self.setup.size) + 2;
        (self.setup.used, bytes)
    }

    pub(super) fn untold(&self) -> u16 {
        (self.next_used - self.signalled).0
    }

    #[inline]
    pub(super) fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Attached<'r, 'v> {
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
            batch: None,
            ring: self,
        };
        attached.find_position();
        attached
    }
}

/// A ring in a burst.
#[derive(Debug)]
pub struct Attached<'r, 'v> {
    ring: &'r mut SplitRing,
    view: &'v DotView<'v>,
    desc: GuestArea<'v>,
    avail: GuestArea<'v>,
    used: GuestArea<'v>,
    /// Used entries that are written and not yet visible.
    staged: u16,
    /// Buffers of a batch that one entry will stand for: how many, and the last one's head.
    batch: Option<(u16, u16)>,
}

impl<'v> Attached<'_, 'v> {
    pub(super) fn size(&self) -> u16 {
        self.ring.setup.size
    }

    /// Reads where a former process was, as soon as the memory is there.
    #[inline]
    fn find_position(&mut self) {
        let ring = &mut *self.ring;
        if !ring.resumes {
            return;
        }
        if let Some(index) = self.used.load::<u16>(IDX, Ordering::Acquire) {
            let used = Wrapping(u16::from_le(index));
            let next = ring.base.unwrap_or(used);
            (ring.next_avail, ring.known_avail) = (next, next);
            (ring.next_used, ring.signalled) = (used, used);
            ring.resumes = false;
        }
    }

    #[inline]
    pub(super) fn pop(&mut self, parts: &mut Parts<'v>) -> Result<Option<Taken>, RingError> {
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
        let size = ring.setup.size;
        let slot = u64::from(ring.next_avail.0 % size);
        let head: u16 = self
            .avail
            .load(RING + AVAIL_ENTRY * slot, Ordering::Relaxed)
            .map(u16::from_le)
            .ok_or(RingError::Unmapped)?;
        if head >= size {
            return Err(RingError::BadHead { head, size });
        }
        ring.next_avail += 1;
        let indirect = ring.features.indirect;
        let chain = chain::walk(self.view, &self.desc, size, head, indirect, parts);
        let head = Head { id: head, slots: 1 };
        Ok(Some(Taken { head, chain }))
    }

    #[inline]
    pub(super) fn prefetch(&self, ahead: u16, access: Access) {
        let ring = &*self.ring;
        if (ring.known_avail - ring.next_avail).0 <= ahead {
            return;
        }
        let slot = u64::from((ring.next_avail.0.wrapping_add(ahead)) % ring.setup.size);
        let head = self
            .avail
            .load::<u16>(RING + AVAIL_ENTRY * slot, Ordering::Relaxed)
            .map(u16::from_le);
        if let Some(head) = head.filter(|head| *head < ring.setup.size) {
            chain::prefetch(self.view, &self.desc, head, access);
        }
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

    pub(super) fn unpop(&mut self, slots: u16) {
        self.ring.next_avail -= slots;
    }

    #[inline]
    pub(super) fn push_used(&mut self, head: Head, written: u32) -> Result<(), RingError> {
        if self.ring.features.in_order && written == 0 {
            // The entry of the last one will stand for all of them (§2.7.1 and §2.9).
            let count = self.batch.map_or(0, |(count, _)| count);
            self.batch = Some((count + 1, head.id));
            return Ok(());
        }
        self.end_batch()?;
        self.write_used(head.id, written)?;
        self.staged += 1;
        Ok(())
    }

    #[inline]
    fn end_batch(&mut self) -> Result<(), RingError> {
        if let Some((count, last)) = self.batch.take() {
            self.write_used(last, 0)?;
            self.staged += count;
        }
        Ok(())
    }

    #[inline]
    fn write_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        let ring = &*self.ring;
        let slot = u64::from((ring.next_used + Wrapping(self.staged)).0 % ring.setup.size);
        // `struct virtq_used_elem`: id, len.
        let entry = u64::from(head) | u64::from(written) << 32;
        self.used
            .write(RING + USED_ENTRY * slot, entry.to_le())
            .ok_or(RingError::Unmapped)
    }

    pub(super) fn publish(&mut self) -> Result<(), RingError> {
        self.end_batch()?;
        if self.staged == 0 {
            return Ok(());
        }
        self.ring.next_used += std::mem::take(&mut self.staged);
        self.used
            .store(IDX, self.ring.next_used.0.to_le(), Ordering::Release)
            .ok_or(RingError::Unmapped)
    }

    pub(super) fn wants_interrupt(&mut self) -> bool {
        let wanted = self.still_wants_interrupt();
        if wanted == Some(true) {
            self.ring.signalled = self.ring.next_used;
        }
        wanted.unwrap_or(false)
    }

    pub(super) fn still_wants_interrupt(&mut self) -> Option<bool> {
        let ring = &mut *self.ring;
        let (old, new) = (ring.signalled, ring.next_used);
        if old == new {
            return Some(false);
        }
        // What was published must be visible before the driver's wish is read.
        fence(Ordering::SeqCst);
        let wanted = if ring.features.event_idx {
            let at = RING + AVAIL_ENTRY * u64::from(ring.setup.size);
            self.avail
                .load::<u16>(at, Ordering::Relaxed)
                .map(|event| passed(Wrapping(u16::from_le(event)), old, new))
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

    pub(super) fn enable_notification(&mut self) -> Result<bool, RingError> {
        let ring = &*self.ring;
        if ring.resumes {
            return Err(RingError::Unmapped);
        }
        let seen = ring.known_avail;
        let stored = if ring.features.event_idx {
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

    /// With event indices nothing needs to be said: the index asked for stays behind.
    pub(super) fn disable_notification(&mut self) -> Result<(), RingError> {
        if self.ring.features.event_idx {
            return Ok(());
        }
        self.used
            .store(FLAGS, NO_NOTIFY.to_le(), Ordering::Relaxed)
            .ok_or(RingError::Unmapped)
    }
}

/// Whether the entry `event` is among those from `old` up to `new` (§2.7.10).
fn passed(event: Wrapping<u16>, old: Wrapping<u16>, new: Wrapping<u16>) -> bool {
    new - event - Wrapping(1) < new - old
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
