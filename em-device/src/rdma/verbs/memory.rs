//! Memory regions: who may touch which bytes, and where those are (IBTA 1.5 §10.6).

use super::{MemKey, Pd, RegionChange};
use dot_iommu::Access;
use std::ops::BitOr;
use std::sync::Arc;
use thiserror::Error;

/// Regions a function can have.
pub const MAX_REGIONS: usize = 1 << 20;

/// Bus address of a page that is not there: no guest memory is mapped at it; a multiple of all page sizes.
pub const ABSENT: u64 = u64::MAX << 31;
/// Flags of a page in [`Translation::Pages`], below its address: it must not be read, or written.
pub const NO_READ: u64 = 1;
/// See [`NO_READ`].
pub const NO_WRITE: u64 = 2;
const PAGE_FLAGS: u64 = NO_READ | NO_WRITE;

/// Rights on a region, or of a queue pair's peer. Local reading is always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rights(u8);

impl Rights {
    /// Local reading only.
    pub const NONE: Self = Self(0);
    /// Receives, responses and atomics' old values may be stored.
    pub const LOCAL_WRITE: Self = Self(1);
    /// RDMA WRITE.
    pub const REMOTE_WRITE: Self = Self(2);
    /// RDMA READ.
    pub const REMOTE_READ: Self = Self(4);
    /// Atomics.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// SEND with invalidate: for keys that their owner registers anew each time.
    pub const REMOTE_INVALIDATE: Self = Self(16);

    /// As a number, for [`Self::from_bits`].
    pub fn bits(self) -> u8 {
        self.0
    }

    /// From a number; bits that mean nothing are dropped.
    pub fn from_bits(bits: u8) -> Self {
        Self(bits & 0x1f)
    }

    /// Whether all of `needed` are there.
    #[inline]
    pub fn allow(self, needed: Self) -> bool {
        self.0 & needed.0 == needed.0
    }

    /// `self` when `on`.
    pub fn when(self, on: bool) -> Self {
        if on { self } else { Self::NONE }
    }
}

impl BitOr for Rights {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Where the bytes of a region are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Translation {
    /// Addresses are bus addresses (guest physical ones without a vIOMMU).
    Identity,
    /// Pages.
    Pages {
        /// log₂ of their size in bytes, 12 to 31.
        shift: u8,
        /// Bus addresses, each a multiple of the size, with flags ([`NO_READ`], [`NO_WRITE`]).
        pages: Arc<[u64]>,
        /// Bytes of the first page in front of the region's first.
        offset: u64,
    },
}

/// A memory region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Its key with the valid variant.
    pub key: MemKey,
    /// Who may use it.
    pub pd: Pd,
    /// What for.
    pub rights: Rights,
    /// Address of its first byte.
    pub start: u64,
    /// Bytes; `u64::MAX` is everything from `start`.
    pub len: u64,
    /// Where it is.
    pub translation: Translation,
    /// Pages that a change may give its translation at most: what was set aside for it.
    pub capacity: usize,
    /// Whether it may be used (a free region may be registered by a work request).
    pub valid: bool,
}

/// Why an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Denied {
    /// No such key.
    #[error("there is no valid memory region with this key")]
    Key,
    /// Another protection domain's.
    #[error("the memory region belongs to another protection domain")]
    Domain,
    /// Not within.
    #[error("the access is not within the memory region")]
    Range,
    /// Not allowed.
    #[error("the memory region does not allow this")]
    Rights,
    /// The table is full, or the index out of range or taken.
    #[error("the key's index cannot be used")]
    Index,
}

/// The pieces of a region's range that are contiguous on the bus.
#[derive(Debug, Clone)]
pub struct Pieces<'r> {
    region: &'r Region,
    /// Distance from the region's first byte.
    at: u64,
    left: u64,
    /// Flags of pages that are as good as absent.
    denied: u64,
}

impl Iterator for Pieces<'_> {
    /// Bus address and bytes.
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        if self.left == 0 {
            return None;
        }
        let (bus, run) = match &self.region.translation {
            Translation::Identity => (self.region.start.wrapping_add(self.at), self.left),
            Translation::Pages {
                shift,
                pages,
                offset,
            } => {
                let size = 1u64 << shift;
                let at = self.at.wrapping_add(*offset);
                let mut index = usize::try_from(at >> shift).ok()?;
                let within = at & (size - 1);
                let page = *pages.get(index)?;
                let flags = page & PAGE_FLAGS;
                let page = match flags & self.denied {
                    0 => page - flags,
                    _ => ABSENT,
                };
                let bus = page.wrapping_add(within);
                let mut run = (size - within).min(self.left);
                // Neighbours on the bus are one piece.
                while run < self.left && page != ABSENT {
                    index += 1;
                    match pages.get(index) {
                        Some(page) if *page == bus.wrapping_add(run) | flags => {
                            run = run.saturating_add(size).min(self.left);
                        }
                        _ => break,
                    }
                }
                (bus, run)
            }
        };
        self.at = self.at.wrapping_add(run);
        self.left -= run;
        Some((bus, run))
    }
}

impl Region {
    /// The pieces of `[addr, addr + len)`, which [`Regions::check`] found within the region. They
    /// end early when the translation does not cover the range. Pages that do not allow `access` are
    /// [`ABSENT`].
    #[inline]
    pub fn pieces(&self, addr: u64, len: u64, access: Access) -> Pieces<'_> {
        Pieces {
            region: self,
            at: addr.wrapping_sub(self.start),
            left: len,
            denied: match access {
                Access::Read => NO_READ,
                Access::Write => NO_WRITE,
                Access::ReadWrite => NO_READ | NO_WRITE,
            },
        }
    }

    fn covers(&self, addr: u64, len: u64) -> bool {
        let Some(at) = addr.checked_sub(self.start) else {
            return false;
        };
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

/// All regions of a function by key.
#[derive(Debug, Default)]
pub struct Regions {
    slots: Vec<Option<Region>>,
    free: Vec<u32>,
    count: usize,
}

impl Regions {
    /// Indices below are never given out.
    const FIRST: usize = 1;

    /// An index that is free, for [`Self::insert`].
    pub fn allocate(&mut self) -> Result<u32, Denied> {
        if let Some(index) = self.free.pop() {
            return Ok(index);
        }
        let index = self.slots.len().max(Self::FIRST);
        if index >= MAX_REGIONS {
            return Err(Denied::Index);
        }
        self.slots.resize(index + 1, None);
        Ok(index as u32)
    }

    /// Puts a region at the index of its key, whichever that is: what a former process had. [`Self::settle`]
    /// follows.
    pub fn put_back(&mut self, region: Region) -> Result<(), Denied> {
        let index = (region.key.0 >> 8) as usize;
        if !(Self::FIRST..MAX_REGIONS).contains(&index) {
            return Err(Denied::Index);
        }
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
        }
        let slot = self.slots.get_mut(index).ok_or(Denied::Index)?;
        if slot.replace(region).is_none() {
            self.count += 1;
        }
        Ok(())
    }

    /// All regions are put back: the indices between them are free.
    pub fn settle(&mut self) {
        let slots = self.slots.iter().enumerate().skip(Self::FIRST);
        let free = slots.filter(|(_, slot)| slot.is_none());
        self.free = free.map(|(index, _)| index as u32).rev().collect();
    }

    /// Puts a region at the index of its key, which [`Self::allocate`] gave.
    pub fn insert(&mut self, region: Region) -> Result<(), Denied> {
        let index = (region.key.0 >> 8) as usize;
        match self.slots.get_mut(index) {
            Some(slot @ None) => {
                *slot = Some(region);
                self.count += 1;
                Ok(())
            }
            _ => Err(Denied::Index),
        }
    }

    /// Removes the region at an index.
    pub fn remove(&mut self, index: u32) -> Option<Region> {
        let region = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        self.count -= 1;
        Some(region)
    }

    /// The region at an index.
    pub fn get(&self, index: u32) -> Option<&Region> {
        self.slots.get(index as usize)?.as_ref()
    }

    /// Number of regions.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Removes all of them.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The region of `key` if `pd` may do `needed` in `[addr, addr + len)` of it.
    #[inline]
    pub fn check(
        &self,
        key: MemKey,
        pd: Pd,
        addr: u64,
        len: u64,
        needed: Rights,
    ) -> Result<&Region, Denied> {
        let region = self
            .slots
            .get((key.0 >> 8) as usize)
            .and_then(Option::as_ref)
            .filter(|region| region.key == key && region.valid)
            .ok_or(Denied::Key)?;
        if region.pd != pd {
            return Err(Denied::Domain);
        }
        if !region.rights.allow(needed) {
            return Err(Denied::Rights);
        }
        if !region.covers(addr, len) {
            return Err(Denied::Range);
        }
        Ok(region)
    }

    /// Changes a region as a work request of `pd` asks.
    pub fn change(&mut self, change: &RegionChange) -> Result<(), Denied> {
        let region = self
            .slots
            .get_mut((change.key.0 >> 8) as usize)
            .and_then(Option::as_mut)
            .ok_or(Denied::Key)?;
        if let Some(variant) = change.variant {
            region.key = MemKey(region.key.0 & !0xff | u32::from(variant));
        }
        if let Some(pd) = change.pd {
            region.pd = pd;
        }
        if let Some(rights) = change.rights {
            region.rights = rights;
        }
        if let Some(start) = change.start {
            region.start = start;
        }
        if let Some(len) = change.len {
            region.len = len;
        }
        if let Some(translation) = &change.translation {
            region.translation = translation.clone();
        }
        region.valid = change.valid;
        Ok(())
    }

    /// Whether [`Self::invalidate`] was done to a key already.
    pub fn is_invalidated(&self, key: MemKey, pd: Pd) -> bool {
        let region = self.get(key.0 >> 8);
        region.is_some_and(|region| region.key == key && region.pd == pd && !region.valid)
    }

    /// Puts a region at the index of its key, which is the driver's choice and free. Not to be mixed with
    /// [`Self::allocate`].
    pub fn place(&mut self, region: Region) -> Result<(), Denied> {
        match self.get(region.key.0 >> 8) {
            Some(_) => Err(Denied::Index),
            None => self.put_back(region),
        }
    }

    /// Removes a region that [`Self::place`] put there.
    pub fn displace(&mut self, index: u32) -> Option<Region> {
        let region = self.slots.get_mut(index as usize)?.take()?;
        self.count -= 1;
        Some(region)
    }

    /// The region of a key that can be used in `pd`.
    fn in_use(&mut self, key: MemKey, pd: Pd) -> Result<&mut Region, Denied> {
        let region = self
            .slots
            .get_mut((key.0 >> 8) as usize)
            .and_then(Option::as_mut)
            .filter(|region| region.key == key && region.valid)
            .ok_or(Denied::Key)?;
        if region.pd != pd {
            return Err(Denied::Domain);
        }
        Ok(region)
    }

    /// Takes a key out of use until it is registered anew, for its owner (READ with invalidate).
    pub fn withdraw(&mut self, key: MemKey, pd: Pd) -> Result<(), Denied> {
        self.in_use(key, pd)?.valid = false;
        Ok(())
    }

    /// Takes a key out of use until it is registered anew, for a peer (SEND with invalidate).
    pub fn invalidate(&mut self, key: MemKey, pd: Pd) -> Result<(), Denied> {
        let region = self.in_use(key, pd)?;
        if !region.rights.allow(Rights::REMOTE_INVALIDATE) {
            return Err(Denied::Rights);
        }
        region.valid = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paged(start: u64, len: u64, pages: &[u64]) -> Region {
        Region {
            key: MemKey(1 << 8 | 7),
            pd: Pd(3),
            rights: Rights::LOCAL_WRITE | Rights::REMOTE_READ,
            start,
            len,
            translation: Translation::Pages {
                shift: 12,
                pages: pages.into(),
                offset: start & 0xfff,
            },
            capacity: pages.len(),
            valid: true,
        }
    }

    fn table(region: Region) -> Regions {
        let mut regions = Regions::default();
        assert_eq!(regions.allocate(), Ok(1));
        regions.insert(region).unwrap();
        regions
    }

    #[test]
    fn an_access_needs_key_domain_rights_and_range() {
        let regions = table(paged(0x1_0010, 0x1000, &[0x5000, 0x9000]));
        let check = |key, pd, addr, len, rights| {
            regions
                .check(MemKey(key), Pd(pd), addr, len, rights)
                .map(|_| ())
        };
        let key = 1 << 8 | 7;
        assert_eq!(check(key, 3, 0x1_0010, 0x1000, Rights::REMOTE_READ), Ok(()));
        assert_eq!(
            check(key ^ 1, 3, 0x1_0010, 1, Rights::NONE),
            Err(Denied::Key)
        );
        assert_eq!(
            check(2 << 8, 3, 0x1_0010, 1, Rights::NONE),
            Err(Denied::Key)
        );
        assert_eq!(
            check(key, 4, 0x1_0010, 1, Rights::NONE),
            Err(Denied::Domain)
        );
        let write = Rights::REMOTE_WRITE;
        assert_eq!(check(key, 3, 0x1_0010, 1, write), Err(Denied::Rights));
        for (addr, len) in [
            (0x1_000f, 1),
            (0x1_0010, 0x1001),
            (u64::MAX, 2),
            (0, u64::MAX),
        ] {
            assert_eq!(
                check(key, 3, addr, len, Rights::NONE),
                Err(Denied::Range),
                "{addr:#x} {len:#x}"
            );
        }
    }

    #[test]
    fn pieces_follow_the_pages_and_join_neighbours() {
        let region = paged(0x1_0ff0, 0x3000, &[0x5000, 0x6000, 0x9000, 0xa000]);
        let all: Vec<_> = region.pieces(0x1_0ff0, 0x3000, Access::Read).collect();
        assert_eq!(all, [(0x5ff0, 0x1010), (0x9000, 0x1ff0)]);
        let some: Vec<_> = region.pieces(0x1_1fff, 2, Access::Write).collect();
        assert_eq!(some, [(0x6fff, 1), (0x9000, 1)]);
    }

    #[test]
    fn a_page_is_absent_for_what_its_flags_deny() {
        let pages = [0x5000, 0x6000, 0x7000 | NO_WRITE, 0x8000 | NO_READ];
        let region = paged(0x1000, 0x4000, &pages);
        let pieces = |access| region.pieces(0x1000, 0x4000, access).collect::<Vec<_>>();
        let absent = (ABSENT, 0x1000);
        assert_eq!(
            pieces(Access::Read),
            [(0x5000, 0x2000), (0x7000, 0x1000), absent]
        );
        assert_eq!(
            pieces(Access::Write),
            [(0x5000, 0x2000), absent, (0x8000, 0x1000)]
        );
        assert_eq!(pieces(Access::ReadWrite)[1..], [absent, absent]);
    }

    #[test]
    fn pieces_end_where_the_translation_ends() {
        let region = paged(0x1000, 0x3000, &[0x5000]);
        let all: Vec<_> = region.pieces(0x1800, 0x2000, Access::Read).collect();
        assert_eq!(all, [(0x5800, 0x800)]);
    }

    #[test]
    fn an_invalidated_key_is_refused_until_it_is_registered_again() {
        let mut region = paged(0, 0x1000, &[0x5000]);
        let key = region.key;
        let mut fixed = table(region.clone());
        assert_eq!(fixed.invalidate(key, Pd(3)), Err(Denied::Rights));
        assert!(fixed.check(key, Pd(3), 0, 8, Rights::NONE).is_ok());
        region.rights = region.rights | Rights::REMOTE_INVALIDATE;
        let mut regions = table(region);
        assert_eq!(regions.invalidate(key, Pd(9)), Err(Denied::Domain));
        regions.invalidate(key, Pd(3)).unwrap();
        let check =
            |regions: &Regions, key| regions.check(key, Pd(3), 0, 8, Rights::NONE).map(|_| ());
        assert_eq!(check(&regions, key), Err(Denied::Key));
        let change = RegionChange {
            key,
            variant: Some(8),
            pd: None,
            rights: None,
            start: None,
            len: None,
            translation: None,
            valid: true,
        };
        regions.change(&change).unwrap();
        assert_eq!(check(&regions, key), Err(Denied::Key));
        assert_eq!(check(&regions, MemKey(1 << 8 | 8)), Ok(()));
    }

    #[test]
    fn an_index_is_given_out_again_after_its_region_is_gone() {
        let mut regions = table(paged(0, 0x1000, &[0x5000]));
        assert_eq!(regions.allocate(), Ok(2));
        assert!(regions.remove(1).is_some() && regions.remove(1).is_none());
        assert_eq!(regions.allocate(), Ok(1));
    }
}
