//! A packed ring (virtio 1.3 §2.8).
//!
//! The position cannot be read from the driver's memory: descriptors in the middle of a used chain look as if they
//! were available. So it is noted, in one word ([`Step`]), before each use: where that begins and where it ends. A
//! use happens in one store, to the flags of the first descriptor, which the driver looks at; who comes later looks
//! at the same flags. Still available: the use did not happen, and the position is where it begins. Anything else:
//! it did. The buffers of a merged frame are noted in a log first, because those after the first are overwritten
//! before that store; where it did not happen, all of it is done again from the log.

use super::{Head, Position, QueueNote, RingError, RingFeatures, Taken};
use crate::virtio::area::GuestArea;
use crate::virtio::chain::{
    self, BadChain, Chain, DESCRIPTOR_BYTES, INDIRECT, MAX_DESCRIPTORS, NEXT, PackedDescriptor,
    Parts, WRITE,
};
use crate::virtio::common::QueueSetup;
use dot_iommu::{Access, DotView};
use std::sync::atomic::{Ordering, fence};

/// Offset of length, id and flags in a descriptor, which a use replaces.
const REST: u64 = 8;
/// Offset of the flags.
const FLAGS: u64 = 14;
/// `RING_EVENT_FLAGS_ENABLE`.
const EVENTS_ON: u16 = 0;
/// `RING_EVENT_FLAGS_DISABLE`.
const EVENTS_OFF: u16 = 1;
/// `RING_EVENT_FLAGS_DESC`: at one place.
const EVENTS_AT: u16 = 2;

/// A buffer that is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Used {
    head: Head,
    written: u32,
}

impl Used {
    /// As an entry of the log.
    fn to_bits(self) -> u64 {
        u64::from(self.written) | u64::from(self.head.id) << 32 | u64::from(self.head.slots) << 48
    }

    fn from_bits(bits: u64) -> Self {
        let head = Head {
            id: (bits >> 32) as u16,
            slots: (bits >> 48) as u16,
        };
        Self {
            head,
            written: bits as u32,
        }
    }

    /// Length, id and flags of the used descriptor at a place.
    fn rest(self, place: Position) -> u64 {
        let write = if self.written == 0 { 0 } else { WRITE };
        let flags = place.used_flags() | write;
        u64::from(self.written) | u64::from(self.head.id) << 32 | u64::from(flags) << 48
    }
}

/// A use, as it is noted before it happens. All zeroes: none yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    from: Position,
    to: Position,
    /// Entries of the log that belong to it; 0: it is a single buffer.
    logged: u16,
}

impl Step {
    fn to_bits(self) -> u64 {
        let start = Position::START.bits();
        let place = |place: Position| u64::from(place.bits() ^ start);
        place(self.from) | place(self.to) << 16 | u64::from(self.logged) << 32
    }

    fn from_bits(bits: u64) -> Self {
        let place = |bits: u64| Position::from_bits(bits as u16 ^ Position::START.bits());
        Self {
            from: place(bits),
            to: place(bits >> 16),
            logged: (bits >> 32) as u16,
        }
    }
}

/// Positions of a ring between bursts.
#[derive(Debug)]
pub(super) struct PackedRing {
    setup: QueueSetup,
    features: RingFeatures,
    next_avail: Position,
    next_used: Position,
    /// Descriptors between the two.
    taken: u16,
    /// Descriptors from `next_avail` on that were seen available and put back.
    seen: u16,
    /// Where `next_used` was at the last decision about an interrupt.
    signalled: Position,
    /// Descriptors used since then, at the most as many as there are.
    untold_slots: u16,
    /// Buffers used since then.
    untold: u16,
    /// Buffers to be published.
    staged: Vec<Used>,
    note: Option<QueueNote>,
    /// The position is to be found out first.
    resumes: bool,
}

impl PackedRing {
    pub(super) fn new(setup: QueueSetup, features: RingFeatures, note: Option<QueueNote>) -> Self {
        Self {
            setup,
            features,
            next_avail: Position::START,
            next_used: Position::START,
            taken: 0,
            seen: 0,
            signalled: Position::START,
            untold_slots: 0,
            untold: 0,
            staged: Vec::new(),
            note,
            resumes: false,
        }
    }

    pub(super) fn resumed(
        setup: QueueSetup,
        features: RingFeatures,
        note: Option<QueueNote>,
    ) -> Self {
        Self {
            resumes: true,
            ..Self::new(setup, features, note)
        }
    }

    /// Goes on at a place up to which all was given back. `None`: the ring has no such place.
    pub(super) fn at(setup: QueueSetup, features: RingFeatures, place: Position) -> Option<Self> {
        (place.index() < setup.size).then(|| Self {
            next_avail: place,
            next_used: place,
            signalled: place,
            ..Self::new(setup, features, None)
        })
    }

    /// Where the next buffer is taken, and where the next one is given back.
    pub(super) fn position(&self) -> (Position, Position) {
        (self.next_avail, self.next_used)
    }

    /// The descriptor ring and the device's events.
    pub(super) fn written_areas(&self) -> [(u64, u64); 2] {
        let bytes = DESCRIPTOR_BYTES * u64::from(self.setup.size);
        [(self.setup.desc, bytes), (self.setup.used, 4)]
    }

    pub(super) fn untold(&self) -> u16 {
        self.untold
    }

    #[inline]
    pub(super) fn attach<'r, 'v>(&'r mut self, view: &'v DotView<'_>) -> Attached<'r, 'v> {
        let (setup, size) = (self.setup, u64::from(self.setup.size));
        let table = DESCRIPTOR_BYTES * size;
        self.staged.clear();
        let mut attached = Attached {
            view,
            desc: GuestArea::new(view, setup.desc, table, Access::ReadWrite),
            driver: GuestArea::new(view, setup.avail, 4, Access::Read),
            device: GuestArea::new(view, setup.used, 4, Access::Write),
            ring: self,
        };
        attached.find_position();
        attached
    }
}

/// A ring in a burst.
#[derive(Debug)]
pub struct Attached<'r, 'v> {
    ring: &'r mut PackedRing,
    view: &'v DotView<'v>,
    desc: GuestArea<'v>,
    driver: GuestArea<'v>,
    device: GuestArea<'v>,
}

impl<'v> Attached<'_, 'v> {
    pub(super) fn size(&self) -> u16 {
        self.ring.setup.size
    }

    /// Finds out where a former process was, as soon as the memory is there.
    #[inline]
    fn find_position(&mut self) {
        if self.ring.resumes && self.recover().is_ok() {
            self.ring.resumes = false;
        }
    }

    /// See the module.
    fn recover(&mut self) -> Result<(), RingError> {
        let size = self.size();
        let place = self.ring.note.as_ref().and_then(QueueNote::place);
        let step = Step::from_bits(place.map_or(0, |place| place.step()));
        if step.from.index() >= size || step.to.index() >= size {
            return Err(RingError::Unmapped);
        }
        let happened = !step.from.is_available(self.flags(step.from)?);
        let mut untold = None;
        if let Some(place) = place.filter(|_| !happened && step.logged != 0) {
            let log =
                (0..usize::from(step.logged)).map(|index| Used::from_bits(place.entry(index)));
            let log: Vec<Used> = log.collect();
            self.use_all(step.from, &log)?;
            let slots = log
                .iter()
                .map(|used| u32::from(used.head.slots))
                .sum::<u32>();
            untold = Some(slots.min(u32::from(size)) as u16);
        }
        let ring = &mut *self.ring;
        let ended = happened || untold.is_some();
        ring.next_used = if ended { step.to } else { step.from };
        ring.next_avail = ring.next_used;
        ring.signalled = ring.next_used;
        if let Some(slots) = untold {
            // The driver may have looked before this, and waits to be told.
            ring.signalled = step.from;
            (ring.untold, ring.untold_slots) = (step.logged, slots);
        }
        Ok(())
    }

    #[inline]
    fn flags(&self, place: Position) -> Result<u16, RingError> {
        let at = DESCRIPTOR_BYTES * u64::from(place.index()) + FLAGS;
        // What the flags make available is read after them.
        let flags: Option<u16> = self.desc.load(at, Ordering::Acquire);
        flags.map(u16::from_le).ok_or(RingError::Unmapped)
    }

    #[inline]
    pub(super) fn pop(&mut self, parts: &mut Parts<'v>) -> Result<Option<Taken>, RingError> {
        let ring = &*self.ring;
        if ring.resumes {
            return Err(RingError::Unmapped);
        }
        let (size, start) = (ring.setup.size, ring.next_avail);
        let first = self.flags(start)?;
        if !start.is_available(first) {
            return Ok(None);
        }
        let mut chain = Chain::new(parts);
        let mut found = Ok(());
        let (mut place, mut slots) = (start, 1u16);
        let id = loop {
            let at = DESCRIPTOR_BYTES * u64::from(place.index());
            let descriptor = PackedDescriptor::read(&self.desc, at).ok_or(RingError::Unmapped)?;
            let flags = if slots == 1 {
                first
            } else {
                descriptor.flags()
            };
            // A chain that is none is followed to its end all the same: there the next one begins.
            if found.is_ok() {
                found = if u32::from(slots) > MAX_DESCRIPTORS {
                    Err(BadChain::TooLong)
                } else {
                    self.add(&mut chain, descriptor.buffer(), flags)
                };
            }
            if flags & NEXT == 0 {
                break descriptor.id();
            }
            if slots == size {
                return Err(RingError::EndlessChain { size });
            }
            slots += 1;
            place = place.forward(1, size);
        };
        let ring = &mut *self.ring;
        if slots > size - ring.taken {
            return Err(RingError::Overrun { size });
        }
        ring.taken += slots;
        ring.seen = ring.seen.saturating_sub(slots);
        ring.next_avail = place.forward(1, size);
        let head = Head { id, slots };
        let chain = found.map(|()| chain.walked());
        Ok(Some(Taken { head, chain }))
    }

    #[inline]
    pub(super) fn prefetch(&self, ahead: u16, access: Access) {
        let ring = &*self.ring;
        let size = ring.setup.size;
        if ahead >= size - ring.taken {
            return;
        }
        let place = ring.next_avail.forward(ahead, size);
        if self
            .flags(place)
            .is_ok_and(|flags| place.is_available(flags))
        {
            chain::prefetch(self.view, &self.desc, place.index(), access);
        }
    }

    fn add(
        &self,
        chain: &mut Chain<'_, 'v>,
        buffer: (u64, u32),
        flags: u16,
    ) -> Result<(), BadChain> {
        if flags & INDIRECT == 0 {
            return chain.buffer(self.view, buffer, flags & WRITE != 0);
        }
        if !self.ring.features.indirect {
            return Err(BadChain::IndirectNotNegotiated);
        }
        if flags & NEXT != 0 {
            return Err(BadChain::IndirectNested);
        }
        chain.packed_table(self.view, buffer)
    }

    pub(super) fn unpop(&mut self, slots: u16) {
        let ring = &mut *self.ring;
        ring.next_avail = ring.next_avail.back(slots, ring.setup.size);
        ring.taken -= slots.min(ring.taken);
        ring.seen = ring.seen.saturating_add(slots).min(ring.setup.size);
    }

    #[inline]
    pub(super) fn push_used(&mut self, head: Head, written: u32) -> Result<(), RingError> {
        let ring = &mut *self.ring;
        ring.untold = ring.untold.saturating_add(1);
        if ring.features.in_order && written == 0 {
            if let Some(batch) = ring.staged.last_mut().filter(|last| last.written == 0) {
                // One descriptor, the first, with the id of the last one stands for all of them (§2.8.21 and §2.9).
                let slots = batch.head.slots + head.slots;
                batch.head = Head { id: head.id, slots };
                return Ok(());
            }
        }
        ring.staged.push(Used { head, written });
        Ok(())
    }

    pub(super) fn publish(&mut self) -> Result<(), RingError> {
        let mut staged = std::mem::take(&mut self.ring.staged);
        let mut done = Ok(());
        for used in &staged {
            done = self.publish_one(*used);
            if done.is_err() {
                break;
            }
        }
        staged.clear();
        self.ring.staged = staged;
        done
    }

    #[inline]
    fn publish_one(&mut self, used: Used) -> Result<(), RingError> {
        let ring = &*self.ring;
        let from = ring.next_used;
        let to = from.forward(used.head.slots, ring.setup.size);
        self.note(Step {
            from,
            to,
            logged: 0,
        });
        self.write_used(from, used)?;
        self.used_up(used.head.slots, to);
        Ok(())
    }

    pub(super) fn publish_together(&mut self) -> Result<(), RingError> {
        if self.ring.staged.len() < 2 {
            return self.publish();
        }
        let mut staged = std::mem::take(&mut self.ring.staged);
        let ring = &*self.ring;
        let slots = staged.iter().fold(0, |sum, used| sum + used.head.slots);
        let (from, to) = (
            ring.next_used,
            ring.next_used.forward(slots, ring.setup.size),
        );
        if let Some(place) = ring.note.as_ref().and_then(QueueNote::place) {
            for (index, used) in staged.iter().enumerate() {
                place.set_entry(index, used.to_bits());
            }
        }
        let logged = staged.len() as u16;
        self.note(Step { from, to, logged });
        let done = self.use_all(from, &staged);
        if done.is_ok() {
            self.used_up(slots, to);
        }
        staged.clear();
        self.ring.staged = staged;
        done
    }

    /// Writes used descriptors, the first one last.
    fn use_all(&self, from: Position, all: &[Used]) -> Result<(), RingError> {
        let Some((first, others)) = all.split_first() else {
            return Ok(());
        };
        let mut place = from.forward(first.head.slots, self.size());
        for used in others {
            self.write_used(place, *used)?;
            place = place.forward(used.head.slots, self.size());
        }
        self.write_used(from, *first)
    }

    /// In one store, behind all that was written before.
    #[inline]
    fn write_used(&self, place: Position, used: Used) -> Result<(), RingError> {
        let at = DESCRIPTOR_BYTES * u64::from(place.index()) + REST;
        self.desc
            .store(at, used.rest(place).to_le(), Ordering::Release)
            .ok_or(RingError::Unmapped)
    }

    #[inline]
    fn note(&self, step: Step) {
        if let Some(place) = self.ring.note.as_ref().and_then(QueueNote::place) {
            place.set_step(step.to_bits());
        }
    }

    fn used_up(&mut self, slots: u16, to: Position) {
        let ring = &mut *self.ring;
        ring.next_used = to;
        ring.taken -= slots.min(ring.taken);
        ring.untold_slots = ring.untold_slots.saturating_add(slots).min(ring.setup.size);
    }

    fn told(&mut self) {
        let ring = &mut *self.ring;
        ring.signalled = ring.next_used;
        (ring.untold_slots, ring.untold) = (0, 0);
    }

    pub(super) fn wants_interrupt(&mut self) -> bool {
        let wanted = self.still_wants_interrupt();
        if wanted == Some(true) {
            self.told();
        }
        wanted.unwrap_or(false)
    }

    pub(super) fn still_wants_interrupt(&mut self) -> Option<bool> {
        if self.ring.untold_slots == 0 {
            return Some(false);
        }
        // What was published must be visible before the driver's wish is read.
        fence(Ordering::SeqCst);
        let wish: u32 = self.driver.load(0, Ordering::Relaxed)?;
        let wish = u32::from_le(wish);
        let wanted = match (wish >> 16) as u16 & 3 {
            EVENTS_OFF => false,
            EVENTS_AT if self.ring.features.event_idx => {
                self.passed(Position::from_bits(wish as u16))
            }
            _ => true,
        };
        if !wanted {
            self.told();
        }
        Some(wanted)
    }

    /// Whether a place was among the descriptors used since the last decision.
    fn passed(&self, event: Position) -> bool {
        let ring = &*self.ring;
        let size = ring.setup.size;
        event.index() >= size
            || ring.untold_slots >= size
            || ring.signalled.distance(event, size) < u32::from(ring.untold_slots)
    }

    pub(super) fn enable_notification(&mut self) -> Result<bool, RingError> {
        let ring = &*self.ring;
        if ring.resumes {
            return Err(RingError::Unmapped);
        }
        let next = ring.next_avail.forward(ring.seen, ring.setup.size);
        let wish = if ring.features.event_idx {
            u32::from(next.bits()) | u32::from(EVENTS_AT) << 16
        } else {
            u32::from(EVENTS_ON) << 16
        };
        self.wish(wish)?;
        // The wish must be visible before the descriptor is read.
        fence(Ordering::SeqCst);
        Ok(next.is_available(self.flags(next)?))
    }

    pub(super) fn disable_notification(&mut self) -> Result<(), RingError> {
        self.wish(u32::from(EVENTS_OFF) << 16)
    }

    fn wish(&self, wish: u32) -> Result<(), RingError> {
        self.device
            .store(0, wish.to_le(), Ordering::Relaxed)
            .ok_or(RingError::Unmapped)
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
