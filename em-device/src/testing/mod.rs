//! Helpers of this crate's tests: guest memory, and a driver's side of a ring.

pub(crate) mod kill;
mod ring;

pub(crate) use ring::Driver;

use crate::virtio::area::GuestArea;
use crate::virtio::signals::Signals;
use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
use m2m_fabric::proto::{VirtioPciLayout, Window};
use smartep::irq::Irqs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

/// Descriptor flag: another one follows.
pub(crate) const NEXT: u16 = 1;
/// Descriptor flag: the device writes.
pub(crate) const WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table.
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

    /// The file that it is in.
    pub(crate) fn mapping(&self) -> &HostMapping {
        &self.mapping
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

    /// In one store, behind all that was written before.
    pub(crate) fn store_u16(&self, addr: u64, value: u16) {
        let reader = self.table.reader();
        let view = reader.pin();
        GuestArea::new(&view, addr, 2, Access::Write)
            .store(0, value.to_le(), Ordering::Release)
            .unwrap();
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

/// Signals without vectors.
pub(crate) fn signals(queues: u16) -> Arc<Signals> {
    Arc::new(Signals::new(Irqs::new(4), queues))
}
