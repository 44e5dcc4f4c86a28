//! The front end's memory: its ranges in the table, and its own addresses for them.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use dot_iommu::{Backing, DotError, DotTable, HostMapping, Perm};
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::descriptors;
use super::error::FaceError;

/// Ranges at the most (`VHOST_USER_GET_MAX_MEM_SLOTS`).
pub(super) const SLOTS: usize = 512;

/// Bytes that one front end may have mapped: address space is the EM's, which serves others too.
pub(super) const MOST: u64 = 4 << 40;

/// Whether so much more may be mapped.
pub(super) fn check_sum(sizes: impl Iterator<Item = u64>) -> Result<(), FaceError> {
    let bytes = sizes.fold(0, u64::saturating_add);
    match bytes <= MOST {
        true => Ok(()),
        false => Err(FaceError::TooMuch {
            what: "memory",
            bytes,
            most: MOST,
        }),
    }
}

/// A range of memory.
#[derive(Debug, Clone)]
pub(super) struct Region {
    /// Guest address.
    guest: u64,
    /// Address in the front end's process.
    user: u64,
    /// Bytes.
    size: u64,
    mapping: Arc<HostMapping>,
}

impl Region {
    /// Maps what a front end describes.
    pub(super) fn map(region: &VhostUserMemoryRegion, file: &File) -> Result<Self, FaceError> {
        // The structure is packed.
        let (guest, user) = (region.guest_phys_addr, region.user_addr);
        let (size, offset) = (region.memory_size, region.mmap_offset);
        let refused = |source| FaceError::Memory {
            address: guest,
            source,
        };
        let wraps = guest.checked_add(size).is_none() || user.checked_add(size).is_none();
        if wraps {
            return Err(refused(DotError::Wrap {
                start: guest,
                len: size,
            }));
        }
        if !descriptors::is_memory(file) {
            return Err(FaceError::NoMemoryFile("memory"));
        }
        let mapping = HostMapping::new(file.as_fd(), offset, size, Perm::RW).map_err(refused)?;
        Ok(Self {
            guest,
            user,
            size,
            mapping,
        })
    }

    /// Puts it into the table.
    pub(super) fn insert(&self, table: &DotTable) -> Result<(), FaceError> {
        let backing = Backing::Mapped {
            mapping: self.mapping.clone(),
            offset: 0,
        };
        let mapped = table.map(self.guest, self.size, Perm::RW, backing);
        mapped.map(|_| ()).map_err(|source| FaceError::Memory {
            address: self.guest,
            source,
        })
    }
}

/// All ranges of a front end.
#[derive(Debug, Default)]
pub(super) struct Regions(Vec<Region>);

impl Regions {
    /// These instead of all others. Answers the others, which the caller drops where it takes no harm that this takes
    /// its time.
    pub(super) fn replace(&mut self, regions: Vec<Region>) -> Vec<Region> {
        std::mem::replace(&mut self.0, regions)
    }

    /// Whether there is room for one of `size` bytes.
    pub(super) fn check_room(&self, size: u64) -> Result<(), FaceError> {
        if self.0.len() >= SLOTS {
            return Err(FaceError::TooManyRanges(SLOTS));
        }
        check_sum(self.0.iter().map(|r| r.size).chain([size]))
    }

    /// One more.
    pub(super) fn add(&mut self, table: &DotTable, region: Region) -> Result<(), FaceError> {
        self.check_room(region.size)?;
        region.insert(table)?;
        self.0.push(region);
        Ok(())
    }

    /// Takes one away; returns when nobody uses it.
    pub(super) fn remove(
        &mut self,
        table: &DotTable,
        region: &VhostUserMemoryRegion,
    ) -> Result<(), FaceError> {
        let (guest, user) = (region.guest_phys_addr, region.user_addr);
        let size = region.memory_size;
        let same = |r: &Region| (r.guest, r.user, r.size) == (guest, user, size);
        let Some(at) = self.0.iter().position(same) else {
            return Err(FaceError::NoMemory {
                address: guest,
                size,
            });
        };
        table
            .unmap(guest, size)
            .map_err(|source| FaceError::Memory {
                address: guest,
                source,
            })?;
        self.0.swap_remove(at);
        Ok(())
    }

    /// Guest address of what the front end has at `user`.
    pub(super) fn to_guest(&self, user: u64) -> Option<u64> {
        let mut regions = self.0.iter();
        let region = regions.find(|r| user.wrapping_sub(r.user) < r.size)?;
        region.guest.checked_add(user - region.user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dot_iommu::Access;

    fn file(len: u64) -> File {
        File::from(HostMapping::memfd(len).unwrap())
    }

    fn described(guest: u64, size: u64, user: u64, offset: u64) -> VhostUserMemoryRegion {
        VhostUserMemoryRegion::new(guest, size, user, offset)
    }

    #[test]
    fn addresses_of_the_front_end_are_found_in_the_range_that_has_them() {
        let (table, mut regions, file) = (DotTable::new(), Regions::default(), file(0x3000));
        for region in [
            described(0x10_0000, 0x1000, 0x7000_0000, 0x1000),
            described(0, 0x1000, 0x7fff_f000, 0),
        ] {
            let region = Region::map(&region, &file).unwrap();
            regions.add(&table, region).unwrap();
        }
        assert_eq!(regions.to_guest(0x7000_0000), Some(0x10_0000));
        assert_eq!(regions.to_guest(0x7000_0fff), Some(0x10_0fff));
        assert_eq!(regions.to_guest(0x7fff_f010), Some(0x10));
        for outside in [0, 0x6fff_ffff, 0x7000_1000, 0x8000_0000, u64::MAX] {
            assert_eq!(regions.to_guest(outside), None, "{outside:#x}");
        }
    }

    #[test]
    fn a_range_goes_only_by_the_description_with_which_it_came() {
        let (table, mut regions, file) = (DotTable::new(), Regions::default(), file(0x2000));
        let given = described(0x1000, 0x2000, 0x7000_0000, 0);
        let region = Region::map(&given, &file).unwrap();
        regions.add(&table, region).unwrap();
        for other in [
            described(0x1000, 0x1000, 0x7000_0000, 0),
            described(0x2000, 0x2000, 0x7000_0000, 0),
            described(0x1000, 0x2000, 0x7000_1000, 0),
        ] {
            assert!(regions.remove(&table, &other).is_err());
        }
        let reader = table.reader();
        assert!(reader.pin().translate(0x2fff, 1, Access::Write).is_ok());
        regions.remove(&table, &given).unwrap();
        assert!(reader.pin().translate(0x1000, 1, Access::Read).is_err());
        assert_eq!(regions.to_guest(0x7000_0000), None);
    }

    #[test]
    fn memory_that_is_not_there_or_there_already_is_refused() {
        let (table, mut regions, file) = (DotTable::new(), Regions::default(), file(0x2000));
        for impossible in [
            described(0, 0x3000, 0, 0),
            described(0, 0x2000, 0, 0x1000),
            described(u64::MAX - 0xfff, 0x2000, 0, 0),
            described(0, 0x2000, u64::MAX - 0xfff, 0),
            described(0, 0x1000, 0, u64::MAX),
        ] {
            assert!(Region::map(&impossible, &file).is_err());
        }
        let region = Region::map(&described(0, 0x2000, 0, 0), &file).unwrap();
        regions.add(&table, region).unwrap();
        let over = Region::map(&described(0x1000, 0x1000, 0, 0), &file).unwrap();
        assert!(regions.add(&table, over).is_err());
    }

    #[test]
    fn a_front_end_has_only_so_much_memory_in_all() {
        let (table, mut regions, file) = (DotTable::new(), Regions::default(), file(0x1000));
        let region = Region::map(&described(0, 0x1000, 0, 0), &file).unwrap();
        regions.add(&table, region).unwrap();
        assert!(regions.check_room(MOST - 0x1000).is_ok());
        assert!(regions.check_room(MOST).is_err());
        assert!(regions.check_room(u64::MAX).is_err());
        assert!(check_sum([MOST / 2, MOST / 2].into_iter()).is_ok());
        assert!(check_sum([MOST / 2, MOST / 2, 1].into_iter()).is_err());
        assert!(check_sum([u64::MAX, u64::MAX].into_iter()).is_err());
    }

    #[test]
    fn there_are_only_so_many_ranges() {
        let (table, mut regions, file) = (DotTable::new(), Regions::default(), file(0x1000));
        for n in 0..=SLOTS as u64 {
            let region = described(n << 12, 0x1000, n << 12, 0);
            let added = regions.add(&table, Region::map(&region, &file).unwrap());
            assert_eq!(added.is_ok(), n < SLOTS as u64);
        }
    }
}
