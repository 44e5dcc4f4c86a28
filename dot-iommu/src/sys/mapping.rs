//! Shared mappings of guest memory files.
#![allow(unsafe_code)] // mmap and munmap

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use rustix::fs::{self, FileType, MemfdFlags, SealFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use vm_memory::VolatileSlice;

use crate::error::DotError;
use crate::perm::{Access, Perm};
use crate::sys::span::HostSpan;

/// One mapping of a file, or a part of one, that is shared with a VMM. It is unmapped when the
/// last user drops it.
///
/// The file's size is checked when it is mapped, so that a short file is refused instead of raising
/// SIGBUS at the first access. A VMM can still shrink the file later, which no check here prevents,
/// unless the file is sealed against it ([`HostMapping::is_shrink_sealed`]; QEMU seals its memfds,
/// files on tmpfs or hugetlbfs have no seal). The rights are enforced by page protection too: a
/// mapping made with [`Perm::R`] cannot be written even by mistake. The memory is left out of core
/// dumps.
#[derive(Debug)]
pub struct HostMapping {
    /// Page-aligned start of the mapping.
    base: NonNull<c_void>,
    /// Bytes mapped from `base`.
    mapped: usize,
    /// Bytes between `base` and the byte asked for: a file offset need not be page aligned.
    lead: usize,
    perm: Perm,
    shrink_sealed: bool,
    id: u64,
}

/// The next mapping's number. Other processes name mappings by it, also when this one took the place of another:
/// so numbers begin at the time, and none is one of a process before.
static NEXT_ID: LazyLock<AtomicU64> = LazyLock::new(|| {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = (now.tv_sec as u64).saturating_mul(1_000_000_000);
    AtomicU64::new(seconds.saturating_add(now.tv_nsec as u64).max(1))
});

// SAFETY: the struct owns an address range, not a thread's data. Every access to the memory itself
// is a volatile or raw copy that assumes concurrent writers (other processes are such writers).
unsafe impl Send for HostMapping {}
// SAFETY: as above; no method hands out a Rust reference to the memory.
unsafe impl Sync for HostMapping {}

impl HostMapping {
    /// Maps `len` bytes of `fd` from byte `offset`, shared. The descriptor may be closed afterwards.
    ///
    /// Errors: [`DotError::Empty`], [`DotError::Wrap`], [`DotError::NotAFile`] for anything but a
    /// regular file (memfds are regular files), [`DotError::FileTooShort`], and [`DotError::Sys`]
    /// when a call fails, for instance EACCES when the descriptor does not allow `perm`.
    pub fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        perm: Perm,
    ) -> Result<Arc<HostMapping>, DotError> {
        if len == 0 {
            return Err(DotError::Empty { start: offset });
        }
        let wrap = DotError::Wrap { start: offset, len };
        let end = offset.checked_add(len).ok_or(wrap)?;
        let stat = fs::fstat(fd).map_err(|errno| DotError::Sys {
            call: "fstat",
            errno,
        })?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(DotError::NotAFile);
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size < end {
            return Err(DotError::FileTooShort { size, offset, len });
        }
        let shrink_sealed =
            fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));

        let page = rustix::param::page_size() as u64;
        let lead = offset % page;
        let mapped = usize::try_from(len + lead).map_err(|_| wrap)?;
        // Write-only page protection does not exist on the hosts that matter.
        let prot = if perm.write {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mm::mmap(
                std::ptr::null_mut(),
                mapped,
                prot,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                offset - lead,
            )
        }
        .map_err(|errno| DotError::Sys {
            call: "mmap",
            errno,
        })?;
        let base = NonNull::new(base).ok_or(DotError::Sys {
            call: "mmap",
            errno: rustix::io::Errno::FAULT,
        })?;
        // SAFETY: the range was mapped just now; the advice changes only what a core dump holds.
        // A kernel that does not know the advice is no reason to refuse the memory.
        let _ = unsafe { mm::madvise(base.as_ptr(), mapped, Advice::LinuxDontDump) };
        let lead = lead as usize;
        Ok(Arc::new(HostMapping {
            base,
            mapped,
            lead,
            perm,
            shrink_sealed,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        }))
    }

    /// Maps the first `len` bytes of `fd` with [`Perm::RW`], or with [`Perm::R`] where the descriptor
    /// does not allow writing.
    ///
    /// Errors: as [`Self::new`].
    pub fn of_file(fd: BorrowedFd<'_>, len: u64) -> Result<Arc<HostMapping>, DotError> {
        HostMapping::new(fd, 0, len, Perm::RW).or_else(|_| HostMapping::new(fd, 0, len, Perm::R))
    }

    /// A fresh zero-filled memfd of `len` bytes, mapped with [`Perm::RW`]: for tests and benches.
    pub fn anonymous(len: u64) -> Result<Arc<HostMapping>, DotError> {
        let fd = HostMapping::memfd(len)?;
        HostMapping::new(fd.as_fd(), 0, len, Perm::RW)
    }

    /// A memfd of `len` bytes, sealed against shrinking as a VMM's would be.
    pub fn memfd(len: u64) -> Result<OwnedFd, DotError> {
        let sys = |call| move |errno| DotError::Sys { call, errno };
        let fd = fs::memfd_create("dot-iommu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(sys("memfd_create"))?;
        fs::ftruncate(&fd, len).map_err(sys("ftruncate"))?;
        fs::fcntl_add_seals(&fd, SealFlags::SHRINK).map_err(sys("fcntl(F_ADD_SEALS)"))?;
        Ok(fd)
    }

    /// Bytes that were asked for; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        (self.mapped - self.lead) as u64
    }

    /// Number of the mapping in this process, never used again: names it to who shares its file.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// `len` bytes from byte `offset`; `None` when they are not all inside, `len` is 0, or the
    /// mapping's rights do not allow `access`.
    #[inline]
    pub fn span(&self, offset: u64, len: u64, access: Access) -> Option<HostSpan<'_>> {
        let inside = len != 0 && offset.checked_add(len)? <= self.len();
        if !inside || !self.perm.allows(access) {
            return None;
        }
        let host = self.host_address() + offset as usize;
        // SAFETY: the bytes lie in the mapping, which lives for as long as the borrow, and its
        // protection allows the access; both were checked.
        Some(unsafe { HostSpan::new(host, len as usize, access.bits()) })
    }

    /// Rights the mapping was made with.
    pub fn perm(&self) -> Perm {
        self.perm
    }

    /// True when the file cannot shrink any more, so that no access can raise SIGBUS.
    pub fn is_shrink_sealed(&self) -> bool {
        self.shrink_sealed
    }

    /// The whole mapping, for set-up code; the data path goes through a view.
    ///
    /// Writing to it when [`Self::perm`] has no `write` raises SIGSEGV.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        // SAFETY: `base + lead` is followed by `mapped - lead` mapped bytes for as long as `self`
        // lives, and the slice borrows `self`.
        unsafe {
            VolatileSlice::new(
                self.base.as_ptr().cast::<u8>().add(self.lead),
                self.mapped - self.lead,
            )
        }
    }

    /// Address of the first byte asked for, with provenance exposed to [`super::span`].
    pub(crate) fn host_address(&self) -> usize {
        self.base.as_ptr().expose_provenance() + self.lead
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped. Entries, spans and slices keep `self` alive
        // or borrow from it, so nobody uses the range any more.
        let _ = unsafe { mm::munmap(self.base.as_ptr(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn short_file_is_refused() {
        let fd = HostMapping::memfd(0x1000).unwrap();
        let error = HostMapping::new(fd.as_fd(), 0x800, 0x801, Perm::RW).unwrap_err();
        assert_eq!(
            error,
            DotError::FileTooShort {
                size: 0x1000,
                offset: 0x800,
                len: 0x801
            }
        );
        assert!(HostMapping::new(fd.as_fd(), 0x800, 0x800, Perm::RW).is_ok());
    }

    #[test]
    fn wrapping_and_empty_parts_are_refused() {
        let fd = HostMapping::memfd(0x1000).unwrap();
        let wrap = HostMapping::new(fd.as_fd(), u64::MAX, 2, Perm::R).unwrap_err();
        assert!(matches!(wrap, DotError::Wrap { .. }));
        let empty = HostMapping::new(fd.as_fd(), 0, 0, Perm::R).unwrap_err();
        assert!(matches!(empty, DotError::Empty { .. }));
    }

    #[test]
    fn pipe_is_refused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let error = HostMapping::new(reader.as_fd(), 0, 1, Perm::R).unwrap_err();
        assert_eq!(error, DotError::NotAFile);
    }

    #[test]
    fn read_only_descriptor_cannot_be_mapped_for_writing() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 64]).unwrap();
        let read_only = std::fs::File::open(file.path()).unwrap();
        let error = HostMapping::new(read_only.as_fd(), 0, 64, Perm::RW).unwrap_err();
        assert_eq!(error.errno(), libc::EACCES);
        assert!(HostMapping::new(read_only.as_fd(), 0, 64, Perm::R).is_ok());
    }

    #[test]
    fn unaligned_offset_starts_at_the_byte_asked_for() {
        let fd = HostMapping::memfd(0x3000).unwrap();
        let whole = HostMapping::new(fd.as_fd(), 0, 0x3000, Perm::RW).unwrap();
        whole.as_volatile_slice().write_obj(0x5au8, 0x1234).unwrap();
        let part = HostMapping::new(fd.as_fd(), 0x1234, 0x10, Perm::R).unwrap();
        assert_eq!(part.len(), 0x10);
        assert_eq!(part.as_volatile_slice().read_obj::<u8>(0).unwrap(), 0x5a);
    }

    #[test]
    fn a_span_stays_inside_the_mapping_and_its_rights() {
        let fd = HostMapping::memfd(0x2000).unwrap();
        let part = HostMapping::new(fd.as_fd(), 0x800, 0x1000, Perm::R).unwrap();
        assert_eq!(part.span(0xfff, 1, Access::Read).unwrap().len(), 1);
        for (offset, len) in [
            (0xfff, 2),
            (0x1000, 1),
            (0, 0),
            (u64::MAX, 2),
            (0, u64::MAX),
        ] {
            assert!(part.span(offset, len, Access::Read).is_none());
        }
        assert!(part.span(0, 1, Access::Write).is_none());
        let other = HostMapping::new(fd.as_fd(), 0x800, 0x1000, Perm::R).unwrap();
        assert_ne!(part.id(), other.id());
    }

    #[test]
    fn seal_against_shrinking_is_reported() {
        assert!(HostMapping::anonymous(0x1000).unwrap().is_shrink_sealed());
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x1000).unwrap();
        let mapping = HostMapping::new(file.as_fd(), 0, 0x1000, Perm::R).unwrap();
        assert!(!mapping.is_shrink_sealed());
    }
}
