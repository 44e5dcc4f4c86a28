//! The table's data side: pin, translate.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

use crate::entry::{Direct, Entry, Generation};
use crate::error::DotError;
use crate::perm::Access;
use crate::snapshot::Snapshot;
use crate::sys::span::{self, HostSpan};

/// A worker's handle on a table. Clone it for each worker.
#[derive(Clone, Debug)]
pub struct DotReader {
    current: Arc<ArcSwap<Snapshot>>,
    /// Where addresses are looked for behind which `current` has no memory.
    windows: Option<Arc<ArcSwap<Snapshot>>>,
}

impl DotReader {
    pub(crate) fn new(current: Arc<ArcSwap<Snapshot>>) -> DotReader {
        DotReader {
            current,
            windows: None,
        }
    }

    /// The same table, with the ranges of another where this one has no memory: memory of other
    /// devices, which the VMM announces without a descriptor or not at all.
    ///
    /// A range of this table with memory goes before one of `windows`, and one without memory
    /// still says which accesses are allowed. `unmap` of either table waits for the views.
    pub fn with_windows(&self, windows: &DotReader) -> DotReader {
        DotReader {
            current: self.current.clone(),
            windows: Some(windows.current.clone()),
        }
    }

    /// The table's current state, held still. Takes no lock.
    ///
    /// While the view exists, `unmap` waits for it: hold it for one burst of work and never across
    /// a sleep.
    #[inline]
    pub fn pin(&self) -> DotView<'_> {
        DotView {
            snapshot: self.current.load(),
            windows: self.windows.as_ref().map(|windows| windows.load()),
            hint: Cell::new(0),
            window_hint: Cell::new(0),
            reader: PhantomData,
        }
    }
}

/// Where guest memory lies in the file behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Located {
    /// Number of the mapping.
    pub mapping: u64,
    /// Offset of the first byte in the mapping.
    pub offset: u64,
    /// Bytes that follow there; never 0.
    pub len: u64,
}

/// A state of the table that does not change while it is held.
#[derive(Debug)]
pub struct DotView<'r> {
    snapshot: Guard<Arc<Snapshot>>,
    windows: Option<Guard<Arc<Snapshot>>>,
    /// Position of the last range that needed a search.
    hint: Cell<usize>,
    /// The same of the windows.
    window_hint: Cell<usize>,
    reader: PhantomData<&'r DotReader>,
}

impl DotView<'_> {
    /// Host memory behind `[addr, addr + len)`, which must lie in one range.
    ///
    /// Errors: [`DotError::Empty`] for a length of 0, [`DotError::Wrap`], [`DotError::NotMapped`],
    /// [`DotError::NoAccess`], [`DotError::MessageOnly`].
    #[inline]
    pub fn translate(&self, addr: u64, len: u64, access: Access) -> Result<HostSpan<'_>, DotError> {
        let range = self.candidate(addr);
        match range.and_then(|range| span::within(range, addr, len, access.bits())) {
            Some(span) => Ok(span),
            None => self.translate_window(range, addr, len, access),
        }
    }

    /// As [`Self::translate`], for an address that has no memory in the table itself; `own`: the only range of
    /// the table that may contain it.
    #[inline(never)]
    fn translate_window(
        &self,
        own: Option<&Direct>,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<HostSpan<'_>, DotError> {
        let yields = own.is_none_or(|own| own.yields(addr, access));
        let windows = self.windows.as_ref().filter(|_| yields);
        let range = windows.and_then(|windows| windows.candidate(addr, &self.window_hint));
        match range.and_then(|range| span::within(range, addr, len, access.bits())) {
            Some(span) => Ok(span),
            None => Err(self.why_not(addr, len, access)),
        }
    }

    /// Where `[addr, addr + len)` begins in the file behind it, for somebody who has the same file:
    /// the mapping's [`HostMapping::id`](crate::HostMapping::id), the offset in the mapping, and how
    /// many of the bytes follow there (the rest, if any, lies in the next range).
    ///
    /// Errors: as [`Self::translate`], but a range that ends early is none.
    #[inline]
    pub fn locate(&self, addr: u64, len: u64, access: Access) -> Result<Located, DotError> {
        let allows = |entry: &&Entry| len != 0 && entry.perm().allows(access);
        let own = self.snapshot.find(addr, &self.hint);
        let allowed = own.is_none_or(|own| allows(&own));
        let entry = self.lookup(addr).filter(allows).filter(|_| allowed);
        match entry.and_then(|entry| Some((entry, entry.locate(addr)?))) {
            Some((entry, (mapping, offset))) => Ok(Located {
                mapping: mapping.id(),
                offset,
                len: len.min((entry.last() - addr).saturating_add(1)),
            }),
            None => Err(self.why_not(addr, len, access)),
        }
    }

    /// The range that contains `addr`; a window when only there is memory.
    #[inline]
    pub fn lookup(&self, addr: u64) -> Option<&Entry> {
        let own = self.snapshot.find(addr, &self.hint);
        match &self.windows {
            Some(windows) if own.is_none_or(|entry| !entry.is_mapped()) => {
                windows.find(addr, &self.window_hint).or(own)
            }
            _ => own,
        }
    }

    /// True when the range that contains `addr` is still the one that `map` gave `generation`.
    #[inline]
    pub fn is_current(&self, addr: u64, generation: Generation) -> bool {
        self.lookup(addr)
            .is_some_and(|entry| entry.generation() == generation)
    }

    /// Number of changes made to the table; equal versions mean equal ranges.
    #[inline]
    pub fn version(&self) -> u64 {
        self.snapshot.version()
    }

    /// The only range that may contain `addr`: the caller checks that it does.
    #[inline]
    pub(crate) fn candidate(&self, addr: u64) -> Option<&Direct> {
        self.snapshot.candidate(addr, &self.hint)
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn why_not(&self, addr: u64, len: u64, access: Access) -> DotError {
        let Some(span) = len.checked_sub(1) else {
            return DotError::Empty { start: addr };
        };
        let Some(last) = addr.checked_add(span) else {
            return DotError::Wrap { start: addr, len };
        };
        match self.lookup(addr) {
            Some(entry) if !entry.perm().allows(access) => DotError::NoAccess { addr, access },
            Some(entry) if entry.contains(last) && !entry.is_mapped() => {
                DotError::MessageOnly { addr }
            }
            _ => DotError::NotMapped { addr, len },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, DotTable, HostMapping, Perm};

    fn mapped(table: &DotTable, start: u64, len: u64, perm: Perm) -> u64 {
        let mapping = HostMapping::anonymous(len).unwrap();
        let id = mapping.id();
        let backing = Backing::Mapped { mapping, offset: 0 };
        table.map(start, len, perm, backing).unwrap();
        id
    }

    #[test]
    fn a_window_is_found_where_the_table_has_no_memory_and_only_there() {
        let (table, windows) = (DotTable::new(), DotTable::new());
        let own = mapped(&table, 0x2000, 0x1000, Perm::R);
        let message = |start, perm| table.map(start, 0x1000, perm, Backing::Message).unwrap();
        message(0x3000, Perm::RW);
        message(0x4000, Perm::R);
        let window = mapped(&windows, 0x1000, 0x5000, Perm::RW);
        let reader = table.reader().with_windows(&windows.reader());
        let view = reader.pin();
        let found = |addr, access| {
            let located = view.locate(addr, 8, access).map(|at| at.mapping).ok();
            let translated = view.translate(addr, 8, access).is_ok();
            assert_eq!(located.is_some(), translated, "{addr:#x} {access:?}");
            located
        };
        assert_eq!(found(0x1000, Access::Write), Some(window), "unknown");
        assert_eq!(found(0x2000, Access::Read), Some(own));
        assert_eq!(found(0x2000, Access::Write), None, "the table's own rights");
        assert_eq!(found(0x3000, Access::Write), Some(window), "no descriptor");
        assert_eq!(found(0x4000, Access::Read), Some(window));
        assert_eq!(found(0x4000, Access::Write), None, "rights of the range");
        assert_eq!(found(0x6000, Access::Read), None, "behind the window");
        assert!(view.translate(0x5ffc, 8, Access::Read).is_err());
    }

    #[test]
    fn a_window_that_is_gone_is_not_reached_by_later_views() {
        let (table, windows) = (DotTable::new(), DotTable::new());
        mapped(&windows, 0x1000, 0x1000, Perm::RW);
        let reader = table.reader().with_windows(&windows.reader());
        assert!(reader.pin().translate(0x1000, 8, Access::Write).is_ok());
        assert_eq!(windows.unmap(0x1000, 0x1000).unwrap().ranges, 1);
        let gone = reader.pin().translate(0x1000, 8, Access::Write).map(|_| ());
        assert!(matches!(gone, Err(DotError::NotMapped { .. })));
    }

    #[test]
    fn a_location_names_the_mapping_and_ends_with_the_range() {
        let table = DotTable::new();
        let mapping = HostMapping::anonymous(0x10000).unwrap();
        for (start, offset, perm) in [(0x1000, 0x4000, Perm::RW), (0x2000, 0x8000, Perm::R)] {
            let backing = Backing::Mapped {
                mapping: mapping.clone(),
                offset,
            };
            table.map(start, 0x1000, perm, backing).unwrap();
        }
        table
            .map(0x9000, 0x1000, Perm::RW, Backing::Message)
            .unwrap();
        let reader = table.reader();
        let view = reader.pin();
        let at = view.locate(0x1800, 0x1000, Access::Write).unwrap();
        let expected = Located {
            mapping: mapping.id(),
            offset: 0x4800,
            len: 0x800,
        };
        assert_eq!(at, expected);
        assert_eq!(view.locate(0x2fff, 1, Access::Read).unwrap().offset, 0x8fff);
        for (addr, len, access) in [
            (0x2000, 1, Access::Write),
            (0x3000, 1, Access::Read),
            (0x9000, 1, Access::Read),
            (0x1000, 0, Access::Read),
        ] {
            assert!(view.locate(addr, len, access).is_err(), "{addr:#x}");
        }
    }
}
