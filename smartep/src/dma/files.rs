//! One mapping per file, however many ranges refer to it: a vIOMMU sends a range and a descriptor for every
//! 4 KiB page of the same memfd.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use dot_iommu::{DotError, HostMapping, Perm};

/// Files by (device, inode).
#[derive(Debug, Default)]
pub(super) struct FileCache {
    files: HashMap<(u64, u64), Weak<HostMapping>>,
}

impl FileCache {
    /// A mapping of the whole file that covers `offset..offset + len`; the descriptor is not needed afterwards.
    pub(super) fn mapping(
        &mut self,
        fd: OwnedFd,
        offset: u64,
        len: u64,
        perm: Perm,
    ) -> Result<Arc<HostMapping>, DotError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| DotError::Sys {
            call: "fstat",
            errno,
        })?;
        let key = (stat.st_dev, stat.st_ino);
        let end = offset
            .checked_add(len)
            .ok_or(DotError::Wrap { start: offset, len })?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if let Some(mapping) = self.files.get(&key).and_then(Weak::upgrade) {
            // A file may have grown since, or shrunk; ranges on an older mapping keep that.
            if end <= mapping.len().min(size) && perm.within(mapping.perm()) {
                return Ok(mapping);
            }
        }
        let size = size.max(end);
        let mapping = HostMapping::new(fd.as_fd(), 0, size, Perm::RW)
            .or_else(|_| HostMapping::new(fd.as_fd(), 0, size, Perm::R))?;
        self.files.insert(key, Arc::downgrade(&mapping));
        Ok(mapping)
    }

    /// Forgets files that no range refers to.
    pub(super) fn sweep(&mut self) {
        self.files.retain(|_, mapping| mapping.strong_count() > 0);
    }
}
