//! DMA: the client's maps on their way into the DOT, and messages for memory that has no descriptor.

mod files;
mod message;
mod record;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dot_iommu::{Backing, DotError, DotTable, HostMapping, Perm};
use rustix::io::Errno;

use crate::keep::Keep;
use crate::proto::{DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, UNMAP_ALL, UNMAP_DIRTY};
use crate::state::{MapRecord, State};
use files::FileCache;
pub use message::{DmaError, Done, MessageDma};
use record::Record;

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
    record: Record,
    maps: usize,
    max_maps: usize,
}

impl DmaSpace {
    pub(crate) fn new(table: Arc<DotTable>) -> Self {
        Self {
            table,
            files: FileCache::default(),
            record: Record::default(),
            maps: 0,
            max_maps: dot_iommu::MAX_RANGES,
        }
    }

    pub(crate) fn limit(&mut self, max_maps: usize) {
        self.max_maps = max_maps.min(dot_iommu::MAX_RANGES);
    }

    /// Notes maps from now on.
    pub(crate) fn record(&mut self, state: Arc<State>, keep: Arc<dyn Keep>) {
        self.record = Record::new(state, keep);
    }

    /// Maps again what a former process noted, with the files that were kept. Answers with the mappings and their
    /// files.
    pub(crate) fn resume(
        &mut self,
        maps: &[(u32, MapRecord)],
        files: HashMap<u32, OwnedFd>,
    ) -> Result<Vec<NewFile>, Errno> {
        let mut mappings = HashMap::new();
        for (number, fd) in files {
            let of_file = maps.iter().filter(|(_, map)| map.file == Some(number));
            let ends = of_file.filter_map(|(_, map)| map.offset.checked_add(map.size));
            let Some(end) = ends.max() else {
                continue;
            };
            let mapping = self.files.restore(&fd, number, end).map_err(errno)?;
            mappings.insert(number, NewFile { mapping, fd });
        }
        for (_, map) in maps {
            let backing = match map.file {
                None => Backing::Message,
                Some(number) => Backing::Mapped {
                    mapping: mappings
                        .get(&number)
                        .map(|new| new.mapping.clone())
                        .ok_or(Errno::BADF)?,
                    offset: map.offset,
                },
            };
            self.table
                .map(map.address, map.size, map.perm, backing)
                .map_err(errno)?;
        }
        self.maps = maps.len();
        self.record.resume(maps);
        Ok(mappings.into_values().collect())
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
        let (mut new, mut file) = (None, None);
        let backing = match fds.into_iter().next() {
            None => Backing::Message,
            Some(fd) => {
                let found = self
                    .files
                    .mapping(fd, map.offset, map.size, perm)
                    .map_err(errno)?;
                new = found.new.map(|fd| NewFile {
                    mapping: found.mapping.clone(),
                    fd,
                });
                file = Some(found.number);
                Backing::Mapped {
                    mapping: found.mapping,
                    offset: map.offset,
                }
            }
        };
        self.table
            .map(map.address, map.size, perm, backing)
            .map_err(errno)?;
        self.maps += 1;
        let noted = MapRecord {
            address: map.address,
            size: map.size,
            offset: map.offset,
            perm,
            file,
        };
        self.record.add(&noted, new.as_ref().map(|new| &new.fd));
        Ok(new)
    }

    /// Removes every range inside the given one, mapped or not. Returns when no worker can still use them, and
    /// names the mappings that are gone.
    pub(crate) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<Vec<u64>, Errno> {
        if unmap.flags & UNMAP_DIRTY != 0 {
            return Err(Errno::NOTSUP);
        }
        let (gone, len) = if unmap.flags & UNMAP_ALL != 0 {
            if unmap.address != 0 || unmap.size != 0 || unmap.flags != UNMAP_ALL {
                return Err(Errno::INVAL);
            }
            (self.table.clear(), u64::MAX)
        } else {
            if unmap.flags != 0 || unmap.size == 0 {
                return Err(Errno::INVAL);
            }
            // A vIOMMU's ranges may run past the end of the address space.
            let to_end = (u64::MAX - unmap.address).saturating_add(1);
            let len = unmap.size.min(to_end);
            let gone = self.table.unmap(unmap.address, len).map_err(errno)?;
            (gone, len)
        };
        self.maps = self.maps.saturating_sub(gone.ranges);
        let swept = self.files.sweep();
        self.record.remove(unmap.address, len, &swept.numbers);
        Ok(swept.mappings)
    }

    /// How many maps there are.
    pub(crate) fn len(&self) -> usize {
        self.maps
    }

    /// Whether exactly this range was mapped.
    pub(crate) fn has(&self, address: u64, size: u64) -> bool {
        self.record.has(address, size)
    }

    /// Removes everything.
    pub(crate) fn clear(&mut self) {
        self.table.clear();
        self.files = FileCache::default();
        self.record.clear();
        self.maps = 0;
    }
}

fn errno(e: DotError) -> Errno {
    Errno::from_raw_os_error(e.errno())
}
