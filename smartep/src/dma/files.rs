//! One mapping per file, however many ranges refer to it: a vIOMMU sends a range and a descriptor for every
//! 4 KiB page of the same memfd.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use dot_iommu::{DotError, HostMapping, Perm};

/// A mapping, with the number it keeps when it is gone.
#[derive(Debug)]
struct Cached {
    id: u64,
    mapping: Weak<HostMapping>,
}

/// Files by (device, inode).
#[derive(Debug, Default)]
pub(super) struct FileCache {
    files: HashMap<(u64, u64), Cached>,
    /// Mappings that were replaced and may still be in use.
    replaced: Vec<Cached>,
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
    ) -> Result<(Arc<HostMapping>, Option<OwnedFd>), DotError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| DotError::Sys {
            call: "fstat",
            errno,
        })?;
        let key = (stat.st_dev, stat.st_ino);
        let end = offset
            .checked_add(len)
            .ok_or(DotError::Wrap { start: offset, len })?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if let Some(mapping) = self.files.get(&key).and_then(|c| c.mapping.upgrade()) {
            // A file may have grown since, or shrunk; ranges on an older mapping keep that.
            if end <= mapping.len().min(size) && perm.within(mapping.perm()) {
                return Ok((mapping, None));
            }
        }
        let size = size.max(end);
        let mapping = HostMapping::of_file(fd.as_fd(), size)?;
        let cached = Cached {
            id: mapping.id(),
            mapping: Arc::downgrade(&mapping),
        };
        self.replaced.extend(self.files.insert(key, cached));
        Ok((mapping, Some(fd)))
    }

    /// Forgets files that no range refers to, and names their mappings.
    pub(super) fn sweep(&mut self) -> Vec<u64> {
        let mut gone = Vec::new();
        let mut used = |cached: &mut Cached| {
            let used = cached.mapping.strong_count() > 0;
            if !used {
                gone.push(cached.id);
            }
            used
        };
        self.files.retain(|_, cached| used(cached));
        self.replaced.retain_mut(used);
        gone
    }
}
