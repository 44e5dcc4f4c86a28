//! The memory that outlives a process: a memfd that may grow, and where what lies in it.
#![allow(unsafe_code)] // maps memory that other processes hold too

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::KeptError;

/// Bytes of a queue pair's place.
pub(super) const QP_BYTES: usize = 512;
/// Bytes of any other queue's place.
pub(super) const QUEUE_BYTES: usize = 16;
/// Queue pairs, completion queues and shared receive queues have numbers below this.
pub(super) const NUMBERS: usize = 1 << 16;
/// Event queues and Ethernet receive queues have numbers below these.
pub(super) const EQS: usize = 64;
pub(super) const RQS: usize = 1 << 13;
/// Records at most.
pub(super) const ENTRIES: usize = 1 << 21;

/// First byte of each part, in the order in which they lie. Pages that nobody wrote take no memory.
pub(super) const QP_PLACES: usize = 4096;
pub(super) const CQ_PLACES: usize = QP_PLACES + NUMBERS * QP_BYTES;
pub(super) const SRQ_PLACES: usize = CQ_PLACES + NUMBERS * QUEUE_BYTES;
pub(super) const RQ_PLACES: usize = SRQ_PLACES + NUMBERS * QUEUE_BYTES;
pub(super) const EQ_PLACES: usize = RQ_PLACES + RQS * QUEUE_BYTES;
pub(super) const ENTRY_WORDS: usize = EQ_PLACES + EQS * QUEUE_BYTES;
/// Records lie from here on.
pub(super) const HEAP: usize = (ENTRY_WORDS + ENTRIES * 8).next_multiple_of(4096);
/// Bytes at most: page lists have an allowance of 256 MiB, and everything else is small.
pub(super) const MOST: usize = HEAP + (640 << 20);
/// The file grows by this.
const STEP: usize = 1 << 20;

/// The mapped memory.
#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    fd: OwnedFd,
    /// Bytes of the file.
    size: AtomicUsize,
}

// SAFETY: the memory is only accessed through atomics, and unmapped when the only owner drops.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory without records, all zeroes.
    pub(super) fn create() -> Result<Self, KeptError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("rdma-objects", flags)?;
        rustix::fs::ftruncate(&fd, HEAP as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::map(fd, HEAP)
    }

    /// Memory that another process made.
    pub(super) fn open(fd: OwnedFd) -> Result<Self, KeptError> {
        let bytes = rustix::fs::fstat(&fd)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let size = usize::try_from(bytes).unwrap_or(0);
        // Without the seal whoever holds it too could shrink it and kill us with SIGBUS.
        if !(HEAP..=MOST).contains(&size) || !seals.contains(SealFlags::SHRINK) {
            return Err(KeptError::Size(bytes));
        }
        Self::map(fd, size)
    }

    fn map(fd: OwnedFd, size: usize) -> Result<Self, KeptError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice. It is longer than the file; `words` gives
        // out nothing beyond `size`, which the file has and keeps.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                MOST,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self {
            base,
            fd,
            size: AtomicUsize::new(size),
        })
    }

    /// The descriptor, for who keeps it.
    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sees to it that the file has `end` bytes.
    pub(super) fn grow(&self, end: usize) -> Result<(), Errno> {
        if end <= self.size.load(Ordering::Relaxed) {
            return Ok(());
        }
        let size = end.next_multiple_of(STEP).min(MOST);
        if end > size {
            return Err(Errno::NOSPC);
        }
        rustix::fs::ftruncate(&self.fd, size as u64)?;
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    /// Gives all pages behind `start` back, which reads as zeroes then.
    pub(super) fn punch(&self, start: usize) {
        let len = self.size.load(Ordering::Relaxed).saturating_sub(start);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if len > 0 {
            // Memory that stays taken is no harm.
            let _ = rustix::fs::fallocate(&self.fd, flags, start as u64, len as u64);
        }
    }

    /// `count` words from byte `at` on, a multiple of 8.
    #[inline]
    pub(super) fn words(&self, at: usize, count: usize) -> Option<&[AtomicU64]> {
        let size = self.size.load(Ordering::Relaxed);
        let inside = at % 8 == 0 && count <= size / 8 && at <= size - 8 * count;
        // SAFETY: the range is within the file and the mapping and aligned; atomics take any content and may be
        // changed by others. The mapping lives as long as self.
        inside.then(|| unsafe {
            std::slice::from_raw_parts(self.base.as_ptr().add(at).cast::<AtomicU64>(), count)
        })
    }

    /// The word at a byte, a multiple of 8.
    #[inline]
    pub(super) fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words(at, 1)?.first()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; nobody borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), MOST) };
        if let Err(error) = unmapped {
            log::error!("cannot unmap what is kept of an RDMA function: {error}");
        }
    }
}
