//! A ring as the front end describes it.

use std::os::fd::OwnedFd;

use super::error::FaceError;
use super::memory::Regions;
use crate::virtio::common::QueueSetup;

/// Entries of a ring at the most (virtio 1.3 §2.7, §2.8).
const MAX_SIZE: u32 = 32768;

/// What was said about a ring. A ring is started by its notifications' descriptor and stopped when its position is
/// asked for. The data path has it while it is started and, if it is a receive ring, enabled; a transmit ring that is not
/// enabled is emptied.
#[derive(Debug, Default)]
pub(super) struct Vring {
    /// Entries.
    pub(super) size: u32,
    /// Descriptor table or ring, where the front end has it.
    pub(super) desc: u64,
    /// Available ring or the driver's events, where the front end has it.
    pub(super) avail: u64,
    /// Used ring or the device's events, where the front end has it.
    pub(super) used: u64,
    /// Where it goes on, see [`crate::virtio::ring::Ring::position`].
    pub(super) base: u32,
    /// Whether the front end enabled it.
    pub(super) enabled: bool,
    /// Descriptor of its notifications, as long as it is started.
    pub(super) kick: Option<OwnedFd>,
    /// Whether it ran since the first ring of this driver did.
    pub(super) in_use: bool,
    /// What the data path has of it.
    pub(super) running: Option<QueueSetup>,
}

impl Vring {
    /// For the data path.
    pub(super) fn setup(
        &self,
        ring: u16,
        regions: &Regions,
        packed: bool,
    ) -> Result<QueueSetup, FaceError> {
        let size = self.size;
        let possible = size != 0 && size <= MAX_SIZE && (packed || size.is_power_of_two());
        let size = u16::try_from(size)
            .ok()
            .filter(|_| possible)
            .ok_or(FaceError::Size { ring, size })?;
        let guest = |address: u64, align: u64| {
            let guest = regions.to_guest(address).filter(|at| at % align == 0);
            guest.ok_or(FaceError::Address { ring, address })
        };
        Ok(QueueSetup {
            size,
            enabled: true,
            desc: guest(self.desc, 16)?,
            avail: guest(self.avail, if packed { 4 } else { 2 })?,
            used: guest(self.used, 4)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::Region;
    use super::*;
    use dot_iommu::{DotTable, HostMapping};
    use std::fs::File;
    use vhost::vhost_user::message::VhostUserMemoryRegion;

    const USER: u64 = 0x7000_0000;

    fn regions() -> Regions {
        let file = File::from(HostMapping::memfd(0x10000).unwrap());
        let region = VhostUserMemoryRegion::new(0x10_0000, 0x10000, USER, 0);
        let mut regions = Regions::default();
        let region = Region::map(&region, &file).unwrap();
        regions.add(&DotTable::new(), region).unwrap();
        regions
    }

    fn vring(size: u32) -> Vring {
        Vring {
            size,
            desc: USER + 0x1000,
            avail: USER + 0x2000,
            used: USER + 0x3000,
            ..Vring::default()
        }
    }

    #[test]
    fn the_data_path_gets_guest_addresses() {
        let setup = vring(256).setup(0, &regions(), false).unwrap();
        assert_eq!((setup.size, setup.enabled), (256, true));
        let addresses = (setup.desc, setup.avail, setup.used);
        assert_eq!(addresses, (0x10_1000, 0x10_2000, 0x10_3000));
    }

    #[test]
    fn sizes_are_powers_of_two_in_split_rings_and_any_in_packed_ones() {
        let regions = regions();
        for (size, split, packed) in [
            (0, false, false),
            (1, true, true),
            (100, false, true),
            (32768, true, true),
            (32769, false, false),
            (65536, false, false),
            (u32::MAX, false, false),
        ] {
            let ring = vring(size);
            assert_eq!(ring.setup(0, &regions, false).is_ok(), split, "{size}");
            assert_eq!(ring.setup(0, &regions, true).is_ok(), packed, "{size}");
        }
    }

    #[test]
    fn parts_outside_of_memory_or_not_aligned_are_refused() {
        let regions = regions();
        let with = |change: fn(&mut Vring)| {
            let mut ring = vring(16);
            change(&mut ring);
            ring.setup(0, &regions, false).is_ok()
        };
        assert!(with(|_| {}));
        assert!(!with(|r| r.desc += 8));
        assert!(!with(|r| r.avail += 1));
        assert!(!with(|r| r.used += 2));
        assert!(!with(|r| r.desc = 0x10_1000));
        assert!(!with(|r| r.used = 0));
        assert!(!with(|r| r.avail = USER + 0x10000));
    }
}
