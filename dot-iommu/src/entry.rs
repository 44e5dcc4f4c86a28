//! One range of the table.

use std::sync::Arc;

use crate::perm::{Access, Perm};
use crate::sys::mapping::HostMapping;

/// Number of a `map` call on one table: unique and growing, never reused.
///
/// Who caches a translation keeps the generation with it and compares it with the current one
/// ([`crate::DotView::is_current`]): a range that was unmapped and mapped again differs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Generation(pub u64);

/// What stands behind a range.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Memory of this process.
    Mapped {
        /// The mapping; several ranges may share one.
        mapping: Arc<HostMapping>,
        /// Offset of the range's first byte in the mapping, in bytes.
        offset: u64,
    },
    /// The VMM gave no file descriptor: DMA messages to the VMM are the only way in.
    Message,
}

/// A range as readers see it.
#[derive(Clone, Debug)]
pub struct Entry {
    direct: Direct,
    generation: Generation,
    mapping: Option<Arc<HostMapping>>,
    perm: Perm,
}

/// What a translation needs of a range: half a cache line.
///
/// Stored only beside its [`Entry`], in an entry itself or in a chunk that holds the entry, and
/// never taken out: who borrows it also keeps the entry's mapping alive, on which
/// [`crate::sys::span::within`] relies.
#[derive(Clone, Debug)]
pub(crate) struct Direct {
    pub(crate) start: u64,
    /// Length minus one, so that a range may end at 2^64.
    pub(crate) span: u64,
    /// Host address of the first byte, 0 when there is none.
    pub(crate) host: usize,
    /// The range's rights as bits when host memory is behind it: one comparison refuses both a
    /// missing right and missing memory. Without host memory they stand [`ANNOUNCED`] bits higher.
    pub(crate) rights: u64,
}

/// Where the rights of a range without host memory stand.
const ANNOUNCED: u32 = 8;

impl Direct {
    /// Grants nothing.
    pub(crate) const NOTHING: Direct = Direct {
        start: 0,
        span: 0,
        host: 0,
        rights: 0,
    };

    #[inline]
    pub(crate) fn contains(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.start) <= self.span
    }

    /// Whether a window may answer for `addr`: the range does not have it, or has it without host
    /// memory and with these rights.
    #[inline]
    pub(crate) fn yields(&self, addr: u64, access: Access) -> bool {
        let asked = u64::from(access.bits());
        !self.contains(addr) || self.rights >> ANNOUNCED & asked == asked
    }
}

impl Entry {
    /// The caller checked that `len` is not 0, the range does not wrap, and it lies in the mapping.
    pub(crate) fn new(
        start: u64,
        len: u64,
        perm: Perm,
        generation: Generation,
        backing: Backing,
    ) -> Entry {
        let (host, mapping, rights) = match backing {
            Backing::Mapped { mapping, offset } => (
                mapping.host_address() + offset as usize,
                Some(mapping),
                u64::from(perm.bits()),
            ),
            Backing::Message => (0, None, u64::from(perm.bits()) << ANNOUNCED),
        };
        let direct = Direct {
            start,
            span: len.wrapping_sub(1),
            host,
            rights,
        };
        Entry {
            direct,
            generation,
            mapping,
            perm,
        }
    }

    /// First guest address.
    pub fn start(&self) -> u64 {
        self.direct.start
    }

    /// Last guest address (inclusive).
    pub fn last(&self) -> u64 {
        self.direct.start + self.direct.span
    }

    /// Bytes in the range.
    #[allow(clippy::len_without_is_empty)] // a range is never empty
    pub fn len(&self) -> u64 {
        self.direct.span + 1
    }

    /// Rights the range grants.
    pub fn perm(&self) -> Perm {
        self.perm
    }

    /// Number of the `map` call that made the range.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// True when host memory is behind the range, false when only DMA messages reach it.
    pub fn is_mapped(&self) -> bool {
        self.mapping.is_some()
    }

    /// True when `addr` lies in the range.
    #[inline]
    pub fn contains(&self, addr: u64) -> bool {
        self.direct.contains(addr)
    }

    /// Where `addr`, which lies in the range, is in the mapping behind it.
    pub(crate) fn locate(&self, addr: u64) -> Option<(&Arc<HostMapping>, u64)> {
        let mapping = self.mapping.as_ref()?;
        let first = (self.direct.host - mapping.host_address()) as u64;
        Some((mapping, first + (addr - self.direct.start)))
    }

    /// For a chunk to store beside the entry.
    pub(crate) fn direct(&self) -> &Direct {
        &self.direct
    }

    pub(crate) fn info(&self) -> RangeInfo {
        RangeInfo {
            start: self.start(),
            len: self.len(),
            perm: self.perm,
            generation: self.generation,
            mapped: self.is_mapped(),
        }
    }
}

/// One range as a plain value, for `inspect`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RangeInfo {
    /// First guest address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Rights the range grants.
    pub perm: Perm,
    /// Number of the `map` call.
    pub generation: Generation,
    /// True when host memory is behind it, false when only DMA messages reach it.
    pub mapped: bool,
}
