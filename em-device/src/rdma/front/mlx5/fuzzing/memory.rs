//! Memory of a function: mapped in parts, with the rest poisoned.

use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
use std::ops::Range;
use std::sync::Arc;

/// First bus address.
pub(super) const BASE: u64 = 0x10_0000;
/// Bytes of the file; offsets in it are bus addresses from [`BASE`].
const BYTES: u64 = 0xb_0000;
/// What the device may read and write.
pub(super) const OPEN: Range<u64> = 0..0x8_0000;
/// Not mapped.
pub(super) const HOLE: Range<u64> = 0x8_0000..0x9_0000;
/// What the device may read.
pub(super) const READABLE: Range<u64> = 0x9_0000..0xa_0000;
/// Not mapped.
const END: Range<u64> = 0xa_0000..BYTES;
/// A part of [`OPEN`] that is taken away at times.
pub(super) const MOVABLE: Range<u64> = 0x4_0000..0x5_0000;

/// See the module.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) table: Arc<DotTable>,
    mapping: Arc<HostMapping>,
    movable: bool,
}

/// The byte at an offset of what must not change.
fn poison(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9) >> 13) as u8 | 1
}

fn poisoned(range: Range<u64>) -> Vec<u8> {
    range.map(poison).collect()
}

impl Memory {
    pub(super) fn new() -> Self {
        let this = Self {
            table: Arc::new(DotTable::new()),
            mapping: HostMapping::anonymous(BYTES).unwrap(),
            movable: false,
        };
        for range in [HOLE, READABLE, END] {
            this.poke(BASE + range.start, &poisoned(range));
        }
        for (range, perm) in [
            (OPEN.start..MOVABLE.start, Perm::RW),
            (MOVABLE.end..OPEN.end, Perm::RW),
            (READABLE, Perm::R),
        ] {
            this.map(range, perm);
        }
        let mut this = this;
        this.set_movable(true);
        this
    }

    fn map(&self, range: Range<u64>, perm: Perm) {
        let backing = Backing::Mapped {
            mapping: self.mapping.clone(),
            offset: range.start,
        };
        let len = range.end - range.start;
        self.table
            .map(BASE + range.start, len, perm, backing)
            .unwrap();
    }

    /// Maps [`MOVABLE`] or takes it away.
    pub(super) fn set_movable(&mut self, mapped: bool) {
        match (self.movable, mapped) {
            (false, true) => self.map(MOVABLE, Perm::RW),
            (true, false) => {
                let len = MOVABLE.end - MOVABLE.start;
                let _ = self.table.unmap(BASE + MOVABLE.start, len).unwrap();
            }
            _ => {}
        }
        self.movable = mapped;
    }

    /// The file, to be shared with peers.
    pub(super) fn mapping(&self) -> &Arc<HostMapping> {
        &self.mapping
    }

    /// Stores bytes as the guest does; what is outside of the memory is not stored.
    pub(super) fn poke(&self, addr: u64, bytes: &[u8]) {
        let offset = addr.wrapping_sub(BASE);
        if let Some(span) = self.mapping.span(offset, bytes.len() as u64, Access::Write) {
            span.copy_from(bytes).unwrap();
        }
    }

    /// As [`Self::poke`], in [`OPEN`] only: a guest that harms what is not mapped for the device
    /// would hide what the device does there.
    pub(super) fn scribble(&self, addr: u64, bytes: &[u8]) {
        let offset = addr.wrapping_sub(BASE);
        let end = offset.saturating_add(bytes.len() as u64);
        if end <= OPEN.end {
            self.poke(addr, bytes);
        }
    }

    /// Loads bytes as the guest does; zeroes outside of the memory.
    pub(super) fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let offset = addr.wrapping_sub(BASE);
        if let Some(span) = self.mapping.span(offset, len as u64, Access::Read) {
            span.copy_to(&mut bytes).unwrap();
        }
        bytes
    }

    /// What the device may not write is as it was.
    pub(super) fn check(&self) {
        for range in [HOLE, READABLE, END] {
            let now = self.peek(BASE + range.start, (range.end - range.start) as usize);
            let at = now
                .iter()
                .zip(range.clone())
                .find(|(byte, at)| **byte != poison(*at));
            assert_eq!(at, None, "memory outside of what may be written changed");
        }
    }
}
