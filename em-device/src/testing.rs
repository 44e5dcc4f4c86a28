//! Helpers of this crate's tests: guest memory, and a driver's side of a ring.

use crate::virtio::common::QueueSetup;
use crate::virtio::signals::Signals;
use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
use m2m_fabric::proto::{VirtioPciLayout, Window};
use smartep::irq::Irqs;
use std::sync::Arc;

/// The layout that the OM gives.
pub(crate) const LAYOUT: VirtioPciLayout = VirtioPciLayout {
    bar: 0,
    common: Window {
        offset: 0,
        len: 0x40,
    },
    isr: Window {
        offset: 0x1000,
        len: 4,
    },
    device: Window {
        offset: 0x2000,
        len: 0x40,
    },
    notify: Window {
        offset: 0x3000,
        len: 0x1000,
    },
    notify_multiplier: 4,
};

/// First guest address that is mapped.
pub(crate) const BASE: u64 = 0x10_0000;
/// Bytes that are mapped.
pub(crate) const BYTES: u64 = 4 << 20;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Guest memory, one range from [`BASE`].
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) table: Arc<DotTable>,
    mapping: Arc<HostMapping>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let mapping = HostMapping::anonymous(BYTES).unwrap();
        let this = Self {
            table: Arc::new(DotTable::new()),
            mapping,
        };
        this.map();
        this
    }

    pub(crate) fn map(&self) {
        let backing = Backing::Mapped {
            mapping: self.mapping.clone(),
            offset: 0,
        };
        self.table.map(BASE, BYTES, Perm::RW, backing).unwrap();
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        let reader = self.table.reader();
        let view = reader.pin();
        let span = view
            .translate(addr, bytes.len() as u64, Access::Write)
            .unwrap();
        span.copy_from(bytes).unwrap();
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let reader = self.table.reader();
        let view = reader.pin();
        view.translate(addr, len as u64, Access::Read)
            .unwrap()
            .copy_to(&mut bytes)
            .unwrap();
        bytes
    }

    pub(crate) fn read_u16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.read(addr, 2).try_into().unwrap())
    }
}

/// A driver's half of a split ring at fixed places.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) memory: Memory,
    pub(crate) setup: QueueSetup,
    avail: u16,
    seen_used: u16,
}

impl Driver {
    /// Ring number `n` of `size` entries.
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
            avail: 0,
            seen_used: 0,
        }
    }

    /// The same with its memory zeroed, as a driver that starts anew has it.
    pub(crate) fn fresh(memory: &Memory, n: u64, size: u16) -> Self {
        let this = Self::new(memory, n, size);
        memory.write(this.setup.desc, &[0; 0x1_0000]);
        this
    }

    pub(crate) fn descriptor(&self, index: u16, (addr, len): (u64, u32), flags: u16, next: u16) {
        self.descriptor_at(self.setup.desc, index, (addr, len), flags, next);
    }

    pub(crate) fn descriptor_at(
        &self,
        table: u64,
        index: u16,
        (addr, len): (u64, u32),
        flags: u16,
        next: u16,
    ) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write(table + 16 * u64::from(index), &bytes);
    }

    /// Writes a chain from descriptor `first` on and offers it.
    pub(crate) fn chain(&mut self, first: u16, buffers: &[(u64, u32, u16)]) {
        for (n, (addr, len, flags)) in (first..).zip(buffers) {
            let last = usize::from(n - first) + 1 == buffers.len();
            let flags = flags | if last { 0 } else { NEXT };
            self.descriptor(n, (*addr, *len), flags, n + 1);
        }
        self.offer(first);
    }

    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail % self.setup.size);
        self.memory
            .write(self.setup.avail + 4 + 2 * slot, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
        self.set_avail(self.avail);
    }

    pub(crate) fn set_avail(&mut self, index: u16) {
        self.avail = index;
        self.memory
            .write(self.setup.avail + 2, &index.to_le_bytes());
    }

    /// The index after the last chain offered.
    pub(crate) fn avail_index(&self) -> u16 {
        self.avail
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.memory.write(self.setup.avail, &flags.to_le_bytes());
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        let at = self.setup.avail + 4 + 2 * u64::from(self.setup.size);
        self.memory.write(at, &event.to_le_bytes());
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

    /// Heads given back since the last call, with the bytes written.
    pub(crate) fn take_used(&mut self) -> Vec<(u32, u32)> {
        let mut used = Vec::new();
        while self.seen_used != self.used_index() {
            let slot = u64::from(self.seen_used % self.setup.size);
            let entry = self.memory.read(self.setup.used + 4 + 8 * slot, 8);
            let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
            used.push((word(0), word(4)));
            self.seen_used = self.seen_used.wrapping_add(1);
        }
        used
    }
}

/// Signals without vectors.
pub(crate) fn signals(queues: u16) -> Arc<Signals> {
    Arc::new(Signals::new(Irqs::new(4), queues))
}
