//! Event queues: of commands, of asynchronous events, of completions.
//!
//! An entry has 16 bytes; bit 31 of its first word says of which round it is.

use crate::rdma::kept::QueuePlace;
use dot_iommu::DotView;
use smartep::irq::Irqs;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress};

/// Bytes of an entry.
const ENTRY: u64 = 16;
/// log₂ of the entries at most: the driver's consumer index has 16 bits.
const MAX_LOG_SIZE: u32 = 15;
/// Of which round an entry is: set in the first.
const OWNER: u32 = 1 << 31;

/// Kinds of asynchronous events.
pub(super) mod event {
    /// A queue pair is in error.
    pub(crate) const QP_FATAL: u32 = 0;
    /// An incoming request was not allowed.
    pub(crate) const ACCESS: u32 = 2;
    /// A completion queue is in error.
    pub(crate) const CQ: u32 = 3;
}

/// An entry without its owner bit: the first two words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Eqe(pub(super) [u32; 2]);

impl Eqe {
    /// A command is done.
    pub(super) const COMMAND: Self = Self([0, 0]);

    /// A completion queue has entries.
    pub(super) fn completion(cqn: u32) -> Self {
        Self([cqn & 0xf_ffff, 0])
    }

    /// Something happened to a queue pair, or with [`event::CQ`] to a completion queue.
    pub(super) fn asynchronous(kind: u32, number: u32) -> Self {
        Self([kind << 16, number])
    }
}

/// See the module. A new one is armed.
#[derive(Debug)]
pub(super) struct Eq {
    base: u64,
    log_size: u32,
    vector: u16,
    producer: u32,
    consumer: u32,
    armed: bool,
    /// Whether an entry was lost.
    lossy: bool,
    /// Where it is known to who takes the place of this process: producer, consumer.
    place: Option<QueuePlace>,
}

impl Eq {
    /// A queue of `size` entries from bus address `base` on; `None`: there is no such queue.
    pub(super) fn new(base: u64, size: u32, vector: u16) -> Option<Self> {
        let log_size = size.trailing_zeros();
        let possible = size.is_power_of_two() && log_size <= MAX_LOG_SIZE && base % ENTRY == 0;
        base.checked_add(ENTRY * u64::from(size))
            .filter(|_| possible)?;
        Some(Self {
            base,
            log_size,
            vector,
            producer: 0,
            consumer: 0,
            armed: true,
            lossy: false,
            place: None,
        })
    }

    /// What becomes of it outlives this process from here on.
    pub(super) fn keep_in(&mut self, place: QueuePlace) {
        place.store(0, self.producer.into());
        place.store(1, self.consumer.into());
        self.place = Some(place);
    }

    /// Goes on where a former process was, and interrupts once: that one may have owed it.
    pub(super) fn restore(&mut self, place: QueuePlace, memory: &DotView<'_>, irqs: &Irqs) {
        self.producer = place.load(0) as u32;
        self.consumer = place.load(1) as u32;
        // An entry may have been stored last and not counted; one, because each is counted right behind its store.
        if self.is_stored(memory) {
            self.producer = self.producer.wrapping_add(1);
        }
        place.store(0, self.producer.into());
        self.place = Some(place);
        self.armed = true;
        irqs.trigger(self.vector);
    }

    /// Whether the entry at the producer index is of its round already.
    fn is_stored(&self, memory: &DotView<'_>) -> bool {
        let word: Option<u32> = memory.read_obj(GuestAddress(self.address())).ok();
        word.is_some_and(|word| u32::from_le(word) & OWNER == self.owner())
    }

    /// The owner bit of the next entry.
    fn owner(&self) -> u32 {
        match self.producer >> self.log_size & 1 {
            0 => OWNER,
            _ => 0,
        }
    }

    /// Where the next entry is.
    fn address(&self) -> u64 {
        let slot = self.producer & ((1 << self.log_size) - 1);
        self.base + ENTRY * u64::from(slot)
    }

    /// Adds an entry and interrupts when the queue is armed. `false`: it found no room, or no memory, and is lost.
    pub(super) fn push(&mut self, eqe: Eqe, memory: &DotView<'_>, irqs: &Irqs) -> bool {
        let stored = self.pending() >> self.log_size == 0 && self.store(eqe, memory).is_some();
        if stored {
            self.producer = self.producer.wrapping_add(1);
            if let Some(place) = &self.place {
                place.store(0, self.producer.into());
            }
        } else if !std::mem::replace(&mut self.lossy, true) {
            log::warn!("an event queue of vector {} overran", self.vector);
        }
        self.interrupt(irqs);
        stored
    }

    /// The driver read up to `consumer`, of which 16 bits count, and may want the next interrupt.
    pub(super) fn update(&mut self, consumer: u32, arm: bool, irqs: &Irqs) {
        self.consumer = consumer;
        if let Some(place) = &self.place {
            place.store(1, consumer.into());
        }
        if arm {
            self.armed = true;
            self.interrupt(irqs);
        }
    }

    /// Entries that the driver did not read yet.
    fn pending(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & 0xffff
    }

    fn interrupt(&mut self, irqs: &Irqs) {
        if self.armed && self.pending() != 0 {
            self.armed = false;
            irqs.trigger(self.vector);
        }
    }

    /// The driver polls the owner bit, so its word comes last.
    fn store(&self, Eqe([first, second]): Eqe, memory: &DotView<'_>) -> Option<()> {
        let at = self.address();
        let mut rest = [0; 12];
        rest.first_chunk_mut::<4>()?
            .copy_from_slice(&second.to_le_bytes());
        memory.write_slice(&rest, GuestAddress(at + 4)).ok()?;
        let word = first & !OWNER | self.owner();
        memory
            .store(word.to_le(), GuestAddress(at), Ordering::Release)
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BASE, BYTES, Memory};

    fn entry(memory: &Memory, n: u64) -> [u32; 4] {
        let bytes = memory.read(BASE + 16 * n, 16);
        [0, 4, 8, 12].map(|at| super::super::bytes::u32_at(&bytes, at))
    }

    #[test]
    fn impossible_queues_are_refused() {
        for (base, size) in [
            (BASE + 8, 8),
            (BASE, 0),
            (BASE, 3),
            (BASE, 1 << 16),
            (u64::MAX - 15, 8),
        ] {
            assert!(Eq::new(base, size, 0).is_none(), "{base:#x} {size}");
        }
        assert!(Eq::new(BASE, 1 << 15, 0).is_some());
    }

    #[test]
    fn the_owner_bit_changes_with_each_round_and_the_driver_makes_room() {
        let (memory, irqs) = (Memory::new(), Irqs::new(1));
        let reader = memory.table.reader();
        let mut eq = Eq::new(BASE, 2, 0).unwrap();
        let view = reader.pin();
        assert!(eq.push(Eqe::completion(5), &view, &irqs));
        assert!(!eq.armed, "a new queue is armed, and fires once");
        assert!(eq.push(Eqe::asynchronous(event::CQ, 0x1_2345), &view, &irqs));
        assert_eq!(entry(&memory, 0), [OWNER | 5, 0, 0, 0]);
        assert_eq!(entry(&memory, 1), [OWNER | 3 << 16, 0x1_2345, 0, 0]);
        assert!(!eq.push(Eqe::COMMAND, &view, &irqs), "there is no room");
        eq.update(1, false, &irqs);
        assert!(eq.push(Eqe::completion(6), &view, &irqs));
        assert_eq!(entry(&memory, 0), [6, 0, 0, 0]);
        eq.update(2, true, &irqs);
        assert!(!eq.armed, "what is there fires at once");
        eq.update(3, true, &irqs);
        assert!(eq.armed);
    }

    #[test]
    fn sixteen_bits_of_the_consumer_index_count() {
        let (memory, irqs) = (Memory::new(), Irqs::new(1));
        let reader = memory.table.reader();
        let mut eq = Eq::new(BASE, 2, 0).unwrap();
        eq.producer = 0x1_0000;
        eq.update(0, true, &irqs);
        assert!(eq.armed && eq.push(Eqe::COMMAND, &reader.pin(), &irqs));
        let mut away = Eq::new(BASE + BYTES, 2, 0).unwrap();
        assert!(!away.push(Eqe::COMMAND, &reader.pin(), &irqs));
    }
}
