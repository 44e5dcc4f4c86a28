//! Memory shared between two processes, accessed as 32-bit atomics so that a racing writer is no undefined
//! behaviour.
#![allow(unsafe_code)] // mmap, and a slice over memory that another process writes

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::ShadowError;

/// A mapping of whole words.
#[derive(Debug)]
pub(super) struct Page {
    start: *mut AtomicU32,
    words: usize,
}

// SAFETY: the mapping belongs to this value alone and is only reached through atomics.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// A new zero-filled sealed memfd of `size` bytes (a multiple of 4), mapped for writing.
    pub(super) fn create(size: usize) -> Result<(Self, OwnedFd), ShadowError> {
        let fd = rustix::fs::memfd_create(
            "distdpu-shadow",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(|e| ShadowError::System("create", e))?;
        rustix::fs::ftruncate(&fd, size as u64).map_err(|e| ShadowError::System("size", e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| ShadowError::System("seal", e))?;
        let page = Self::map(fd.as_fd(), size, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok((page, fd))
    }

    /// Maps an existing one read-only; it must be large enough and unable to shrink.
    pub(super) fn open(fd: BorrowedFd<'_>, size: usize) -> Result<Self, ShadowError> {
        let stat = rustix::fs::fstat(fd).map_err(|e| ShadowError::System("inspect", e))?;
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if (stat.st_size as u64) < size as u64 {
            return Err(ShadowError::System("use", rustix::io::Errno::OVERFLOW));
        }
        if !seals.contains(SealFlags::SHRINK) {
            return Err(ShadowError::Foreign(0, 0));
        }
        Self::map(fd, size, ProtFlags::READ)
    }

    fn map(fd: BorrowedFd<'_>, size: usize, prot: ProtFlags) -> Result<Self, ShadowError> {
        // SAFETY: a fresh mapping at an address the kernel picks; nothing else refers to it.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, fd, 0) }
                .map_err(|e| ShadowError::System("map", e))?;
        Ok(Self {
            start: start.cast(),
            words: size / 4,
        })
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has that many words, is page-aligned, lives as long as self, and its file cannot
        // shrink (sealed).
        unsafe { std::slice::from_raw_parts(self.start, self.words) }
    }

    pub(super) fn load(&self, word: usize) -> u32 {
        self.words()
            .get(word)
            .map_or(0, |w| w.load(Ordering::Relaxed))
    }

    pub(super) fn store(&self, word: usize, value: u32) {
        if let Some(w) = self.words().get(word) {
            w.store(value, Ordering::Relaxed);
        }
    }

    /// Copies in from byte `at`, a multiple of 4; a last part of a word is padded with zeroes.
    pub(super) fn copy_in(&self, at: usize, data: &[u8]) {
        for (i, chunk) in data.chunks(4).enumerate() {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            self.store(at / 4 + i, u32::from_le_bytes(word));
        }
    }

    /// Copies out from byte `at`, any alignment.
    pub(super) fn copy_out(&self, at: usize, data: &mut [u8]) {
        let mut done = 0;
        while let Some(rest) = data.get_mut(done..).filter(|r| !r.is_empty()) {
            let (word, within) = ((at + done) / 4, (at + done) % 4);
            let bytes = self.load(word).to_le_bytes();
            let n = rest.len().min(4 - within);
            rest[..n].copy_from_slice(&bytes[within..within + n]);
            done += n;
        }
    }

    /// What is stored from now on is seen only by who also sees every switch before.
    pub(super) fn before_change(&self) {
        fence(Ordering::Release);
    }

    /// Stores a word that makes all stores before it count.
    pub(super) fn switch(&self, word: usize, value: u32) {
        if let Some(w) = self.words().get(word) {
            w.store(value, Ordering::Release);
        }
    }

    pub(super) fn begin_read(&self, word: usize) -> u32 {
        self.words()
            .get(word)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    pub(super) fn end_read(&self, word: usize) -> u32 {
        fence(Ordering::Acquire);
        self.load(word)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.words * 4) };
    }
}
