//! The table's control side: map, unmap, clear.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::entry::{Backing, Entry, Generation, RangeInfo};
use crate::error::DotError;
use crate::perm::Perm;
use crate::snapshot::Snapshot;
use crate::view::DotReader;

/// Ranges a table holds at most, as a VMM's `max_dma_maps` capability announces it.
pub const MAX_RANGES: usize = 65535;

/// What an unmap removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unmapped {
    /// Number of ranges.
    pub ranges: usize,
    /// Sum of their lengths in bytes, saturating at `u64::MAX`.
    pub bytes: u64,
}

/// The offset table of one endpoint. Share it by `Arc`; changes are serialised inside.
#[derive(Debug)]
pub struct DotTable {
    current: Arc<ArcSwap<Snapshot>>,
    writer: Mutex<Writer>,
}

#[derive(Debug)]
struct Writer {
    generation: u64,
    /// States that were replaced and that some view may still hold.
    retired: Vec<Arc<Snapshot>>,
}

impl DotTable {
    /// An empty table.
    pub fn new() -> Self {
        DotTable {
            current: Arc::new(ArcSwap::from_pointee(Snapshot::empty())),
            writer: Mutex::new(Writer {
                generation: 0,
                retired: Vec::new(),
            }),
        }
    }

    /// Adds the range `[start, start + len)`. Views pinned from now on see it. Does not wait for
    /// readers.
    ///
    /// Errors: [`DotError::Empty`], [`DotError::Wrap`] (ending exactly at 2^64 is fine),
    /// [`DotError::Overlap`], [`DotError::TooMany`], [`DotError::OutsideMapping`] and
    /// [`DotError::MappingRights`]. Nothing is changed then.
    pub fn map(
        &self,
        start: u64,
        len: u64,
        perm: Perm,
        backing: Backing,
    ) -> Result<Generation, DotError> {
        let last = last_of(start, len)?;
        if let Backing::Mapped { mapping, offset } = &backing {
            let mapping_len = mapping.len();
            if offset.checked_add(len).is_none_or(|end| end > mapping_len) {
                return Err(DotError::OutsideMapping {
                    offset: *offset,
                    len,
                    mapping_len,
                });
            }
            if !perm.within(mapping.perm()) {
                return Err(DotError::MappingRights { start });
            }
        }

        let mut writer = self.lock();
        let current = self.current.load_full();
        if let Some(other) = current.overlapping(start, last) {
            let (other_start, other_len) = (other.start(), other.len());
            return Err(DotError::Overlap {
                start,
                len,
                other_start,
                other_len,
            });
        }
        if current.len() >= MAX_RANGES {
            return Err(DotError::TooMany { limit: MAX_RANGES });
        }
        writer.generation += 1;
        let generation = Generation(writer.generation);
        let next = current.with(Entry::new(start, len, perm, generation, backing));
        drop(current);
        self.publish(&mut writer, next);
        writer.retired.retain_mut(|old| !is_released(old));
        Ok(generation)
    }

    /// Removes every range that lies inside `[start, start + len)` and returns once no view can
    /// reach any of them: it waits for views pinned before. Call it from a thread that holds no
    /// view of this table, or it waits for itself.
    ///
    /// No range inside is no error: the result counts 0 ranges.
    ///
    /// Errors: [`DotError::Split`] when a range is covered only in part, [`DotError::Empty`],
    /// [`DotError::Wrap`]. Nothing is changed then.
    pub fn unmap(&self, start: u64, len: u64) -> Result<Unmapped, DotError> {
        let last = last_of(start, len)?;
        let mut writer = self.lock();
        let current = self.current.load_full();
        for addr in [start, last] {
            if let Some(other) = current
                .find(addr, &Cell::new(0))
                .filter(|o| o.start() < start || o.last() > last)
            {
                let (other_start, other_len) = (other.start(), other.len());
                return Err(DotError::Split {
                    start,
                    len,
                    other_start,
                    other_len,
                });
            }
        }
        Ok(self.remove(&mut writer, current, start, last))
    }

    /// Removes all ranges; waits as [`Self::unmap`] does.
    pub fn clear(&self) -> Unmapped {
        let mut writer = self.lock();
        let current = self.current.load_full();
        self.remove(&mut writer, current, 0, u64::MAX)
    }

    /// A handle for one worker.
    pub fn reader(&self) -> DotReader {
        DotReader::new(self.current.clone())
    }

    /// All ranges, ascending.
    pub fn ranges(&self) -> Vec<RangeInfo> {
        self.current.load().iter().map(Entry::info).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Writer> {
        // The state is changed only by whole assignments, so a panic elsewhere cannot spoil it.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(
        &self,
        writer: &mut Writer,
        current: Arc<Snapshot>,
        start: u64,
        last: u64,
    ) -> Unmapped {
        let (next, removed) = current.without(start, last);
        drop(current);
        if removed.is_empty() {
            return Unmapped::default();
        }
        self.publish(writer, next);
        for mut old in writer.retired.drain(..) {
            wait_until_released(&mut old);
        }
        let bytes = removed
            .iter()
            .fold(0u64, |sum, entry| sum.saturating_add(entry.len()));
        Unmapped {
            ranges: removed.len(),
            bytes,
        }
    }

    /// Views pinned from now on see `next`. The old state is kept until no view holds it, so that
    /// freeing (and unmapping memory) never happens on a worker's thread.
    fn publish(&self, writer: &mut Writer, next: Snapshot) {
        let old = self.current.swap(Arc::new(next));
        writer.retired.push(old);
    }
}

impl Default for DotTable {
    fn default() -> Self {
        DotTable::new()
    }
}

fn last_of(start: u64, len: u64) -> Result<u64, DotError> {
    let span = len.checked_sub(1).ok_or(DotError::Empty { start })?;
    start.checked_add(span).ok_or(DotError::Wrap { start, len })
}

/// True when no view holds `old` any more. A replaced state cannot be pinned again, so this stays
/// true; `get_mut` also orders the readers' last accesses before what the caller does next.
fn is_released(old: &mut Arc<Snapshot>) -> bool {
    Arc::get_mut(old).is_some()
}

fn wait_until_released(old: &mut Arc<Snapshot>) {
    let mut tries = 0u32;
    while !is_released(old) {
        match tries {
            0..64 => std::hint::spin_loop(),
            64..128 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
        tries = tries.saturating_add(1);
    }
}
