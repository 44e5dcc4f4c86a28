//! A driver's side of a ring, split or packed, with every field open to misuse.

use super::{BASE, Memory, NEXT};
use crate::virtio::common::QueueSetup;
use crate::virtio::ring::{Position, RingFeatures};
use std::collections::{HashMap, VecDeque};

/// A driver's half of a ring at fixed places.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) memory: Memory,
    pub(crate) setup: QueueSetup,
    features: RingFeatures,
    avail: u16,
    seen_used: u16,
    /// Places in a packed ring.
    next: Position,
    next_used: Position,
    /// Descriptors of each buffer that the device has, by id, in a packed ring.
    slots: HashMap<u16, u16>,
    /// What the device has, in order.
    given: VecDeque<u16>,
}

impl Driver {
    /// Split ring number `n` of `size` entries.
    pub(crate) fn new(memory: &Memory, n: u64, size: u16) -> Self {
        let at = BASE + n * 0x1_0000;
        let setup = QueueSetup {
            size,
            enabled: true,
            desc: at,
            avail: at + 0x8000,
            used: at + 0xc000,
        };
        Self {
            memory: memory.clone(),
            setup,
            features: RingFeatures::default(),
            avail: 0,
            seen_used: 0,
            next: Position::START,
            next_used: Position::START,
            slots: HashMap::new(),
            given: VecDeque::new(),
        }
    }

    /// A ring with these features, its memory zeroed, as a driver that starts anew has it.
    pub(crate) fn fresh(memory: &Memory, n: u64, size: u16, features: RingFeatures) -> Self {
        let this = Self {
            features,
            ..Self::new(memory, n, size)
        };
        memory.write(this.setup.desc, &[0; 0x1_0000]);
        this
    }

    /// Writes a descriptor; `next` is the id in a packed ring.
    pub(crate) fn descriptor(&self, index: u16, buffer: (u64, u32), flags: u16, next: u16) {
        self.descriptor_at(self.setup.desc, index, buffer, flags, next);
    }

    pub(crate) fn descriptor_at(
        &self,
        table: u64,
        index: u16,
        (addr, len): (u64, u32),
        flags: u16,
        next: u16,
    ) {
        let at = table + 16 * u64::from(index);
        self.memory.write(at, &addr.to_le_bytes());
        self.memory.write(at + 8, &len.to_le_bytes());
        let (third, fourth) = if self.features.packed {
            (next, flags)
        } else {
            (flags, next)
        };
        self.memory.store_u16(at + 12, third);
        // A packed ring's flags come last and once: a device that polls may use the descriptor before a copy of
        // all of it has come to its end, and the rest of that copy would undo the use.
        self.memory.store_u16(at + 14, fourth);
    }

    /// Writes a chain from descriptor `first` on and offers it. In a packed ring it takes the next descriptors, and
    /// `first` is its id.
    pub(crate) fn chain(&mut self, first: u16, buffers: &[(u64, u32, u16)]) {
        if self.features.packed {
            self.packed_chain(first, buffers);
            return;
        }
        for (n, (addr, len, flags)) in (first..).zip(buffers) {
            let last = usize::from(n - first) + 1 == buffers.len();
            let flags = flags | if last { 0 } else { NEXT };
            self.descriptor(n, (*addr, *len), flags, n + 1);
        }
        self.offer(first);
    }

    fn packed_chain(&mut self, id: u16, buffers: &[(u64, u32, u16)]) {
        let slots = buffers.len() as u16;
        // The first descriptor comes last, as a driver must have it.
        for n in (0..slots).rev() {
            let place = self.next.forward(n, self.setup.size);
            let (addr, len, flags) = buffers[usize::from(n)];
            let more = if n + 1 == slots { 0 } else { NEXT };
            let available = if place.wrap() { 1 << 7 } else { 1 << 15 };
            let flags = flags | more | available;
            self.descriptor(place.index(), (addr, len), flags, id);
        }
        self.next = self.next.forward(slots, self.setup.size);
        self.slots.insert(id, slots);
        self.given.push_back(id);
    }

    /// The place of the next descriptor of a packed ring.
    pub(crate) fn place(&self) -> Position {
        self.next
    }

    /// Puts a head into a split ring's available ring.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail % self.setup.size);
        self.memory
            .write(self.setup.avail + 4 + 2 * slot, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
        self.given.push_back(head);
        self.set_avail(self.avail);
    }

    pub(crate) fn set_avail(&mut self, index: u16) {
        self.avail = index;
        self.memory.store_u16(self.setup.avail + 2, index);
    }

    /// Breaks the ring in a way that only a reset mends.
    pub(crate) fn break_ring(&mut self) {
        if self.features.packed {
            for index in 0..self.setup.size {
                self.descriptor(index, (BASE, 1), NEXT | 1 << 7, 0);
            }
        } else {
            self.set_avail(self.avail.wrapping_add(1000));
        }
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.memory.write(self.setup.avail, &flags.to_le_bytes());
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        let at = self.setup.avail + 4 + 2 * u64::from(self.setup.size);
        self.memory.write(at, &event.to_le_bytes());
    }

    /// A packed ring's wish for interrupts: place and flags.
    pub(crate) fn set_wish(&self, place: u16, flags: u16) {
        self.memory.write(self.setup.avail, &place.to_le_bytes());
        self.memory
            .write(self.setup.avail + 2, &flags.to_le_bytes());
    }

    /// A packed device's wish for notifications: place and flags.
    pub(crate) fn device_wish(&self) -> (u16, u16) {
        let word = |at| self.memory.read_u16(self.setup.used + at);
        (word(0), word(2))
    }

    /// Where the next buffer goes.
    pub(crate) fn mark(&self) -> u16 {
        if self.features.packed {
            self.next.bits()
        } else {
            self.avail
        }
    }

    /// Whether the device wants to hear of the buffer at a mark.
    pub(crate) fn wants_kick_at(&self, mark: u16) -> bool {
        if self.features.packed {
            return match self.device_wish() {
                (_, 0) => true,
                (place, 2) => place == mark,
                _ => false,
            };
        }
        self.avail_event() == mark
    }

    /// Whether the device wants to hear of the next buffer.
    pub(crate) fn wants_kick(&self) -> bool {
        self.wants_kick_at(self.mark())
    }

    pub(crate) fn avail_event(&self) -> u16 {
        self.memory
            .read_u16(self.setup.used + 4 + 8 * u64::from(self.setup.size))
    }

    pub(crate) fn used_flags(&self) -> u16 {
        self.memory.read_u16(self.setup.used)
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.memory.read_u16(self.setup.used + 2)
    }

    /// Buffers given back since the last call, with the bytes written. Where one entry stands for a batch, all of
    /// it.
    pub(crate) fn take_used(&mut self) -> Vec<(u32, u32)> {
        let mut used = Vec::new();
        while let Some((id, len)) = self.next_entry() {
            if !self.features.in_order {
                used.push((u32::from(id), len));
                self.forward(1, self.slots.get(&id).copied());
                continue;
            }
            let batch = self.given.iter().position(|given| *given == id).unwrap();
            let mut slots = 0;
            for given in self.given.drain(..=batch) {
                let last = given == id;
                used.push((u32::from(given), if last { len } else { 0 }));
                slots += self.slots.get(&given).copied().unwrap_or(0);
            }
            self.forward(batch as u16 + 1, Some(slots));
        }
        used
    }

    fn next_entry(&self) -> Option<(u16, u32)> {
        if self.features.packed {
            let at = self.setup.desc + 16 * u64::from(self.next_used.index());
            let flags = self.memory.read_u16(at + 14);
            let both = flags >> 7 & 1 == flags >> 15;
            let used = both && (flags >> 15 == 1) == self.next_used.wrap();
            let len = self.memory.read(at + 8, 4).try_into().unwrap();
            return used.then(|| (self.memory.read_u16(at + 12), u32::from_le_bytes(len)));
        }
        let slot = u64::from(self.seen_used % self.setup.size);
        let entry = self.memory.read(self.setup.used + 4 + 8 * slot, 8);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        (self.seen_used != self.used_index()).then(|| (word(0) as u16, word(4)))
    }

    fn forward(&mut self, buffers: u16, slots: Option<u16>) {
        self.seen_used = self.seen_used.wrapping_add(buffers);
        if self.features.packed {
            let slots = slots.expect("a buffer that was given");
            self.next_used = self.next_used.forward(slots, self.setup.size);
        }
    }
}
