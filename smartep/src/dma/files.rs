//! One mapping per file, however many ranges refer to it: a vIOMMU sends a range and a descriptor for every
//! 4 KiB page of the same memfd.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use dot_iommu::{DotError, HostMapping, Perm};

/// A mapping, with the numbers it keeps when it is gone: in this process, and among the files that are kept.
#[derive(Debug)]
struct Cached {
    id: u64,
    number: u32,
    mapping: Weak<HostMapping>,
}

/// Files by (device, inode).
#[derive(Debug, Default)]
pub(super) struct FileCache {
    files: HashMap<(u64, u64), Cached>,
    /// Mappings that were replaced and may still be in use.
    replaced: Vec<Cached>,
    next_number: u32,
}

/// What [`FileCache::mapping`] found or made.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) mapping: Arc<HostMapping>,
    /// Number of the file among those that are kept.
    pub(super) number: u32,
    /// The descriptor, when the mapping is a new one.
    pub(super) new: Option<OwnedFd>,
}

/// What is gone.
#[derive(Debug, Default)]
pub(super) struct Swept {
    /// Mappings.
    pub(super) mappings: Vec<u64>,
    /// Numbers of files that are kept.
    pub(super) numbers: Vec<u32>,
}

impl FileCache {
    /// A mapping of the whole file that covers `offset..offset + len`. When it is a new one, the descriptor comes
    /// back; it is not needed for the mapping any more.
    pub(super) fn mapping(
        &mut self,
        fd: OwnedFd,
        offset: u64,
        len: u64,
        perm: Perm,
    ) -> Result<Found, DotError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| DotError::Sys {
            call: "fstat",
            errno,
        })?;
        let key = (stat.st_dev, stat.st_ino);
        let end = offset
            .checked_add(len)
            .ok_or(DotError::Wrap { start: offset, len })?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let cached = self.files.get(&key);
        if let Some((mapping, number)) = cached.and_then(|c| Some((c.mapping.upgrade()?, c.number)))
        {
            // A file may have grown since, or shrunk; ranges on an older mapping keep that.
            if end <= mapping.len().min(size) && perm.within(mapping.perm()) {
                return Ok(Found {
                    mapping,
                    number,
                    new: None,
                });
            }
        }
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        let mapping = self.insert(key, number, &fd, size.max(end))?;
        Ok(Found {
            mapping,
            number,
            new: Some(fd),
        })
    }

    /// Maps a file again that was kept under a number; it covers `end` bytes at least.
    pub(super) fn restore(
        &mut self,
        fd: &OwnedFd,
        number: u32,
        end: u64,
    ) -> Result<Arc<HostMapping>, DotError> {
        let stat = rustix::fs::fstat(fd).map_err(|errno| DotError::Sys {
            call: "fstat",
            errno,
        })?;
        self.next_number = self.next_number.max(number.wrapping_add(1));
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.insert((stat.st_dev, stat.st_ino), number, fd, size.max(end))
    }

    fn insert(
        &mut self,
        key: (u64, u64),
        number: u32,
        fd: &OwnedFd,
        size: u64,
    ) -> Result<Arc<HostMapping>, DotError> {
        let mapping = HostMapping::of_file(fd.as_fd(), size)?;
        let cached = Cached {
            id: mapping.id(),
            number,
            mapping: Arc::downgrade(&mapping),
        };
        self.replaced.extend(self.files.insert(key, cached));
        Ok(mapping)
    }

    /// Forgets files that no range refers to, and names them.
    pub(super) fn sweep(&mut self) -> Swept {
        let mut gone = Swept::default();
        let mut used = |cached: &mut Cached| {
            let used = cached.mapping.strong_count() > 0;
            if !used {
                gone.mappings.push(cached.id);
                gone.numbers.push(cached.number);
            }
            used
        };
        self.files.retain(|_, cached| used(cached));
        self.replaced.retain_mut(used);
        gone
    }
}
