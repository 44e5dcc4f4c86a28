//! DMA: the client's maps on their way into the DOT, and messages for memory that has no descriptor.

mod files;
mod message;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dot_iommu::{Backing, DotError, DotTable, HostMapping, Perm};
use rustix::io::Errno;

use crate::proto::{DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, UNMAP_ALL, UNMAP_DIRTY};
use files::FileCache;
pub use message::{DmaError, Done, MessageDma};

/// A file that came with a range.
#[derive(Debug)]
pub(crate) struct NewFile {
    pub(crate) mapping: Arc<HostMapping>,
    pub(crate) fd: OwnedFd,
}

/// The maps of one client.
#[derive(Debug)]
pub(crate) struct DmaSpace {
    table: Arc<DotTable>,
    files: FileCache,
    maps: usize,
    max_maps: usize,
}

impl DmaSpace {
    pub(crate) fn new(table: Arc<DotTable>) -> Self {
        Self {
            table,
            files: FileCache::default(),
            maps: 0,
            max_maps: dot_iommu::MAX_RANGES,
        }
    }

    pub(crate) fn limit(&mut self, max_maps: usize) {
        self.max_maps = max_maps.min(dot_iommu::MAX_RANGES);
    }

    /// Adds a range. Without a descriptor it is known but reachable by messages only. Answers with the mapping
    /// of its file, when that is a new one.
    pub(crate) fn map(
        &mut self,
        map: &DmaMap,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<NewFile>, Errno> {
        let unknown = map.flags & !(DMA_READ | DMA_WRITE) != 0;
        if unknown || map.size == 0 || fds.len() > 1 {
            return Err(Errno::INVAL);
        }
        if self.maps >= self.max_maps {
            return Err(Errno::NOSPC);
        }
        let perm = Perm {
            read: map.flags & DMA_READ != 0,
            write: map.flags & DMA_WRITE != 0,
        };
        let mut new = None;
        let backing = match fds.into_iter().next() {
            None => Backing::Message,
            Some(fd) => {
                let (mapping, fd) = self
                    .files
                    .mapping(fd, map.offset, map.size, perm)
                    .map_err(errno)?;
                new = fd.map(|fd| NewFile {
                    mapping: mapping.clone(),
                    fd,
                });
                Backing::Mapped {
                    mapping,
                    offset: map.offset,
                }
            }
        };
        self.table
            .map(map.address, map.size, perm, backing)
            .map_err(errno)?;
        self.maps += 1;
        Ok(new)
    }

    /// Removes every range inside the given one, mapped or not. Returns when no worker can still use them, and
    /// names the mappings that are gone.
    pub(crate) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<Vec<u64>, Errno> {
        if unmap.flags & UNMAP_DIRTY != 0 {
            return Err(Errno::NOTSUP);
        }
        let gone = if unmap.flags & UNMAP_ALL != 0 {
            if unmap.address != 0 || unmap.size != 0 || unmap.flags != UNMAP_ALL {
                return Err(Errno::INVAL);
            }
            self.table.clear()
        } else {
            if unmap.flags != 0 || unmap.size == 0 {
                return Err(Errno::INVAL);
            }
            // A vIOMMU's ranges may run past the end of the address space.
            let to_end = (u64::MAX - unmap.address).saturating_add(1);
            self.table
                .unmap(unmap.address, unmap.size.min(to_end))
                .map_err(errno)?
        };
        self.maps = self.maps.saturating_sub(gone.ranges);
        Ok(self.files.sweep())
    }

    /// Removes everything.
    pub(crate) fn clear(&mut self) {
        self.table.clear();
        self.files = FileCache::default();
        self.maps = 0;
    }
}

fn errno(e: DotError) -> Errno {
    Errno::from_raw_os_error(e.errno())
}
