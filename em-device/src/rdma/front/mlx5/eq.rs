//! Event queues (`mlx5_ifc`: eqc; `device.h`: mlx5_eqe).

use super::bits::{Field, get64};
use super::fields::eqc;
use super::pages::{Charge, PageList};
use crate::rdma::kept::QueuePlace;
use dot_iommu::DotView;
use smartep::irq::Irqs;
use std::sync::atomic::{Ordering, fence};
use vm_memory::{Bytes, GuestAddress};

/// Bytes of an entry.
pub(crate) const EQE_BYTES: u64 = 64;
/// log₂ of the entries of a queue at most.
pub(crate) const MAX_LOG_SIZE: u32 = 20;
/// Consumer indices have this many bits.
const INDEX_MASK: u32 = (1 << 24) - 1;

/// Event types (`MLX5_EVENT_TYPE_*`).
pub(crate) mod event {
    pub(crate) const COMP: u8 = 0x00;
    pub(crate) const COMM_EST: u8 = 0x02;
    pub(crate) const SQ_DRAINED: u8 = 0x03;
    pub(crate) const CQ_ERROR: u8 = 0x04;
    pub(crate) const WQ_CATAS_ERROR: u8 = 0x05;
    pub(crate) const PORT_CHANGE: u8 = 0x09;
    pub(crate) const CMD: u8 = 0x0a;
    pub(crate) const WQ_INVAL_REQ_ERROR: u8 = 0x10;
    pub(crate) const WQ_ACCESS_ERROR: u8 = 0x11;
    pub(crate) const SRQ_CATAS_ERROR: u8 = 0x12;
    pub(crate) const SRQ_LAST_WQE: u8 = 0x13;
    pub(crate) const SRQ_RQ_LIMIT: u8 = 0x14;
}

/// Subtypes of a port change (`MLX5_PORT_CHANGE_SUBTYPE_*`).
pub(crate) mod port_change {
    pub(crate) const DOWN: u8 = 1;
    pub(crate) const ACTIVE: u8 = 4;
}

/// Places in an entry.
const TYPE: Field = Field::new(1, 0, 8);
const SUB_TYPE: Field = Field::new(3, 0, 8);
const DATA: usize = 32;
const OWNER: usize = 63;

/// An entry without its owner byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Eqe {
    bytes: [u8; OWNER],
}

impl Eqe {
    fn new(kind: u8, sub_type: u8) -> Self {
        let mut bytes = [0; OWNER];
        TYPE.set(&mut bytes, kind.into());
        SUB_TYPE.set(&mut bytes, sub_type.into());
        Self { bytes }
    }

    /// With a value at a place of the type-specific data.
    fn with(mut self, at: usize, width: u8, value: u32) -> Self {
        Field::new(DATA + at, 0, width).set(&mut self.bytes, value);
        self
    }

    /// mlx5_eqe_comp.
    pub(crate) fn completion(cqn: u32) -> Self {
        Self::new(event::COMP, 0).with(24, 32, cqn)
    }

    /// mlx5_eqe_cmd: a bit for each entry of the command queue.
    pub(crate) fn commands(slots: u32) -> Self {
        Self::new(event::CMD, 0).with(0, 32, slots)
    }

    /// mlx5_eqe_qp_srq: a queue pair (type 0) or a shared receive queue.
    pub(crate) fn queue(kind: u8, number: u32) -> Self {
        Self::new(kind, 0).with(24, 32, number)
    }

    /// mlx5_eqe_cq_err; syndrome 1 is an overrun.
    pub(crate) fn cq_error(cqn: u32) -> Self {
        Self::new(event::CQ_ERROR, 0)
            .with(0, 32, cqn)
            .with(11, 8, 1)
    }

    /// mlx5_eqe_port_state: port 1 came up or went down.
    pub(crate) fn port(up: bool) -> Self {
        let sub_type = match up {
            true => port_change::ACTIVE,
            false => port_change::DOWN,
        };
        Self::new(event::PORT_CHANGE, sub_type).with(8, 4, 1)
    }

    /// Its type.
    pub(crate) fn kind(&self) -> u8 {
        TYPE.get(&self.bytes) as u8
    }
}

/// An event queue in guest memory.
#[derive(Debug)]
pub(crate) struct Eq {
    pub(crate) context: [u8; eqc::LEN],
    mask: [u8; 32],
    list: PageList,
    log_size: u8,
    vector: u16,
    consumer: u32,
    producer: u32,
    armed: bool,
    /// Whether its doorbells may be overwritten before they are seen: then what the driver has read is not
    /// known for sure, and each entry interrupts.
    polled: bool,
    /// Whether an entry was lost.
    lossy: bool,
    /// Where it is known to who takes the place of this process: producer, consumer.
    place: Option<QueuePlace>,
    _charge: Charge,
}

impl Eq {
    /// A queue of 2^`log_size` entries, at most [`MAX_LOG_SIZE`], in the pages of `list`; `polled`: its
    /// doorbells may be overwritten before they are seen.
    pub(crate) fn new(
        context: [u8; eqc::LEN],
        mask: [u8; 32],
        list: PageList,
        charge: Charge,
        polled: bool,
    ) -> Self {
        Self {
            log_size: eqc::LOG_EQ_SIZE.get(&context) as u8,
            vector: eqc::INTR.get(&context) as u16,
            context,
            mask,
            list,
            consumer: 0,
            producer: 0,
            armed: false,
            polled,
            lossy: false,
            place: None,
            _charge: charge,
        }
    }

    /// What becomes of it outlives this process from here on.
    pub(crate) fn keep_in(&mut self, place: QueuePlace) {
        place.store(0, self.producer.into());
        place.store(1, self.consumer.into());
        self.place = Some(place);
    }

    /// Goes on where a former process was, and interrupts once: that one may have owed it.
    pub(crate) fn restore(&mut self, place: QueuePlace, memory: &DotView<'_>, irqs: &Irqs) {
        self.producer = place.load(0) as u32;
        self.consumer = place.load(1) as u32 & INDEX_MASK;
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
        let owner = (self.producer >> self.log_size & 1) as u8;
        let at = self.address().and_then(|at| at.checked_add(OWNER as u64));
        let last: Option<u8> = at.and_then(|at| memory.read_obj(GuestAddress(at)).ok());
        last.is_some_and(|last| last & 1 == owner)
    }

    /// Number of the next entry.
    pub(crate) fn index(&self) -> u32 {
        self.producer & INDEX_MASK
    }

    /// Whether entry `index` was stored.
    pub(crate) fn has(&self, index: u32) -> bool {
        (1..1 << 23).contains(&(self.producer.wrapping_sub(index) & INDEX_MASK))
    }

    /// Whether the driver wants events of a type here. Those of completion queues come by number.
    pub(crate) fn wants(&self, kind: u8) -> bool {
        let word = get64(&self.mask, usize::from(kind / 64) * 8);
        word >> (kind % 64) & 1 != 0
    }

    /// The context with the indices of now.
    pub(crate) fn query(&self) -> [u8; eqc::LEN] {
        let mut context = self.context;
        eqc::CONSUMER_COUNTER.set(&mut context, self.consumer);
        eqc::PRODUCER_COUNTER.set(&mut context, self.producer & INDEX_MASK);
        context
    }

    /// Adds an entry and interrupts when the queue is armed. An entry that finds no room, or no
    /// memory, is lost (`false`): drivers size their queues so that this does not happen.
    pub(crate) fn push(&mut self, eqe: &Eqe, memory: &DotView<'_>, irqs: &Irqs) -> bool {
        let room = self.polled || self.pending() >> self.log_size == 0;
        let stored = room && self.store(eqe, memory).is_some();
        if stored {
            self.producer = self.producer.wrapping_add(1);
            if let Some(place) = &self.place {
                place.store(0, self.producer.into());
            }
        } else if !std::mem::replace(&mut self.lossy, true) {
            log::warn!("an event queue of vector {} overran", self.vector);
        }
        self.armed |= self.polled;
        self.interrupt(irqs);
        stored
    }

    /// The driver read up to `consumer` and may want the next interrupt.
    pub(crate) fn update(&mut self, consumer: u32, arm: bool, irqs: &Irqs) {
        self.consumer = consumer & INDEX_MASK;
        if let Some(place) = &self.place {
            place.store(1, self.consumer.into());
        }
        if arm {
            self.armed = true;
            self.interrupt(irqs);
        }
    }

    /// Entries that the driver did not read yet.
    fn pending(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & INDEX_MASK
    }

    fn interrupt(&mut self, irqs: &Irqs) {
        if self.armed && self.pending() != 0 {
            self.armed = false;
            irqs.trigger(self.vector);
        }
    }

    /// Guest address of the entry at the producer index.
    fn address(&self) -> Option<u64> {
        let slot = u64::from(self.producer) & ((1 << self.log_size) - 1);
        let at = self.list.offset + slot * EQE_BYTES;
        let page = self.list.pages.get((at >> self.list.shift) as usize)?;
        page.checked_add(at & ((1 << self.list.shift) - 1))
    }

    /// The driver polls the owner byte, so it comes last. It changes with each round.
    fn store(&self, eqe: &Eqe, memory: &DotView<'_>) -> Option<()> {
        let owner = (self.producer >> self.log_size & 1) as u8;
        let at = self.address()?;
        memory.write_slice(&eqe.bytes, GuestAddress(at)).ok()?;
        fence(Ordering::Release);
        let owner_at = GuestAddress(at.checked_add(OWNER as u64)?);
        memory.store(owner, owner_at, Ordering::Release).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::front::mlx5::pages::Allowance;
    use crate::rdma::kept::Kept;
    use crate::testing::{BASE, Memory};
    use dot_iommu::DotReader;

    struct Harness {
        memory: Memory,
        reader: DotReader,
        irqs: std::sync::Arc<Irqs>,
        eq: Eq,
    }

    impl Harness {
        fn new(log_size: u32, types: &[u8]) -> Self {
            let memory = Memory::new();
            let reader = memory.table.reader();
            let mut context = [0; eqc::LEN];
            eqc::LOG_EQ_SIZE.set(&mut context, log_size);
            let mut mask = [0; 32];
            for kind in types {
                let at = usize::from(kind / 64) * 8;
                let word = get64(&mask, at) | 1 << (kind % 64);
                mask[at..at + 8].copy_from_slice(&word.to_be_bytes());
            }
            let list = PageList {
                pages: [BASE + 0x3000, BASE + 0x1000].into(),
                shift: 12,
                offset: 4096 - 128,
            };
            let charge = Allowance::default().take(0).unwrap();
            let eq = Eq::new(context, mask, list, charge, false);
            Self {
                memory,
                reader,
                irqs: Irqs::new(1),
                eq,
            }
        }

        fn push(&mut self, cqn: u32) -> bool {
            let view = self.reader.pin();
            self.eq.push(&Eqe::completion(cqn), &view, &self.irqs)
        }

        /// CQ number and owner of the entry in a slot.
        fn entry(&self, slot: u64) -> (u32, u8) {
            let at = match slot {
                0 | 1 => BASE + 0x3000 + 4096 - 128 + slot * 64,
                _ => BASE + 0x1000 + (slot - 2) * 64,
            };
            let bytes = self.memory.read(at, 64);
            (Field::new(56, 0, 32).get(&bytes), bytes[63])
        }
    }

    #[test]
    fn entries_change_their_owner_with_each_round_and_cross_pages() {
        let mut harness = Harness::new(2, &[]);
        for n in 0..6 {
            harness.push(100 + n);
            harness.eq.update(n + 1, false, &harness.irqs);
        }
        let all: Vec<_> = (0..4).map(|slot| harness.entry(slot)).collect();
        assert_eq!(all, [(104, 1), (105, 1), (102, 0), (103, 0)]);
    }

    #[test]
    fn a_full_queue_overwrites_nothing() {
        let mut harness = Harness::new(1, &[]);
        let stored = [1, 2, 3].map(|n| harness.push(n));
        assert_eq!(stored, [true, true, false]);
        assert_eq!((harness.entry(0), harness.entry(1)), ((1, 0), (2, 0)));
        harness.eq.update(1, false, &harness.irqs);
        harness.push(4);
        assert_eq!((harness.entry(0), harness.entry(1)), ((4, 1), (2, 0)));
    }

    /// As with completion queues: memory in which all entries look stored is believed for one.
    #[test]
    fn a_successor_counts_one_entry_at_the_most_whatever_the_memory_says() {
        let kept = Kept::create().unwrap();
        let mut harness = Harness::new(2, &[]);
        harness.eq.keep_in(kept.eq(5).unwrap());
        harness.push(1);
        for slot in 0..4u64 {
            let at = match slot {
                0 | 1 => BASE + 0x3000 + 4096 - 128 + slot * 64,
                _ => BASE + 0x1000 + (slot - 2) * 64,
            };
            harness.memory.write(at + OWNER as u64, &[0]);
        }
        let place = kept.eq(5).unwrap();
        let view = harness.reader.pin();
        harness.eq.restore(place, &view, &harness.irqs);
        assert_eq!(harness.eq.index(), 2);
        // A second death right behind the first.
        harness
            .eq
            .restore(kept.eq(5).unwrap(), &view, &harness.irqs);
        assert_eq!(harness.eq.index(), 3);
    }

    #[test]
    fn one_interrupt_for_each_arm() {
        let mut harness = Harness::new(4, &[]);
        harness.push(1);
        assert!(!harness.eq.armed);
        harness.eq.update(0, true, &harness.irqs);
        assert!(!harness.eq.armed, "an entry was pending: it fires at once");
        harness.eq.update(1, true, &harness.irqs);
        assert!(harness.eq.armed, "nothing is pending");
        harness.push(2);
        assert!(!harness.eq.armed);
    }

    #[test]
    fn a_polled_queue_interrupts_for_each_entry_and_does_not_wait_for_room() {
        let mut harness = Harness::new(1, &[]);
        harness.eq.polled = true;
        for n in 1..=3 {
            assert!(harness.push(n), "{n}");
            assert!(!harness.eq.armed, "it fired");
        }
        assert_eq!((harness.entry(0), harness.entry(1)), ((3, 1), (2, 0)));
    }

    #[test]
    fn indices_wrap_at_24_bits() {
        let mut harness = Harness::new(1, &[]);
        harness.eq.producer = 0xff_ffff;
        harness.eq.update(0xff_ffff, true, &harness.irqs);
        assert_eq!(harness.eq.pending(), 0);
        harness.push(7);
        assert_eq!((harness.eq.pending(), harness.entry(1)), (1, (7, 1)));
        harness.eq.update(0, true, &harness.irqs);
        assert_eq!(harness.eq.pending(), 0);
    }

    #[test]
    fn types_are_wanted_by_their_bit() {
        let harness = Harness::new(1, &[event::PORT_CHANGE, 0x48]);
        let wanted: Vec<u8> = (0..=255).filter(|kind| harness.eq.wants(*kind)).collect();
        assert_eq!(wanted, [9, 0x48]);
    }

    #[test]
    fn entries_for_memory_that_is_gone_are_dropped() {
        let mut harness = Harness::new(1, &[]);
        harness.memory.table.clear();
        harness.push(1);
        assert_eq!(harness.eq.pending(), 0);
    }
}
