//! Parts of a region that the VMM maps, as QEMU does, so that a driver's stores there are no messages.

use crate::{Error, Result};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// See the module.
#[derive(Debug)]
pub struct MappedRegion {
    /// Where each part begins in the region.
    areas: Vec<(u64, MmapRegion)>,
}

impl MappedRegion {
    /// Maps `areas` (offset in the region, bytes) of a region that begins at `offset` of the file.
    ///
    /// # Errors
    /// One cannot be mapped.
    pub fn new(fd: OwnedFd, offset: u64, areas: &[(u64, u64)]) -> Result<Self> {
        let file = File::from(fd);
        let map = |&(at, len): &(u64, u64)| {
            let place = FileOffset::new(file.try_clone()?, offset + at);
            let map = MmapRegion::from_file(place, len as usize)
                .map_err(|e| Error::Harness(format!("a region cannot be mapped: {e}")))?;
            Ok((at, map))
        };
        let areas = areas.iter().map(map).collect::<Result<_>>()?;
        Ok(Self { areas })
    }

    /// A store of 4 or 8 bytes as one. `false`: they are not in a part that is mapped.
    pub fn store(&self, offset: u64, data: &[u8]) -> bool {
        self.areas.iter().any(|(start, map)| {
            let Some(at) = offset.checked_sub(*start) else {
                return false;
            };
            let at = at as usize;
            if let Ok(eight) = <[u8; 8]>::try_from(data) {
                let word = map.get_atomic_ref::<AtomicU64>(at);
                word.map(|word| word.store(u64::from_ne_bytes(eight), Ordering::Release))
                    .is_ok()
            } else if let Ok(four) = <[u8; 4]>::try_from(data) {
                let word = map.get_atomic_ref::<AtomicU32>(at);
                word.map(|word| word.store(u32::from_ne_bytes(four), Ordering::Release))
                    .is_ok()
            } else {
                false
            }
        })
    }
}
