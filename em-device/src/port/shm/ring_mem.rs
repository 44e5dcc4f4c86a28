//! The memory of a shared-memory wire: the only place that touches it by address.
//!
//! A direction of the wire is a page of indices and a ring of bytes. The ring is mapped twice in a row,
//! so that what starts anywhere in it and is no longer than the ring is contiguous, and nothing
//! ever wraps in the middle.
#![allow(unsafe_code)] // maps memory that another process writes

use super::AttachError;
use m2m_fabric::proto::{SHM_LINK_BYTES, SHM_RING_BYTES};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vm_memory::VolatileSlice;

/// Bytes of the ring.
pub(super) const RING: usize = SHM_RING_BYTES as usize;
const PAGE: usize = 4096;
/// Bytes of one direction in the file, and of its mapping.
const DIRECTION: usize = PAGE + RING;
const MAPPING: usize = PAGE + 2 * RING;

const _: () = assert!(RING.is_power_of_two() && RING % PAGE == 0);
const _: () = assert!(SHM_LINK_BYTES as usize == 2 * DIRECTION);

/// The index page of a direction. All zeroes is an empty ring between two sides of which neither has
/// come yet. What one side writes often is 128 bytes away from what the other side writes, because
/// processors fetch cache lines in pairs.
#[repr(C)]
pub(super) struct Indices {
    /// Bytes ever published. Written by the producer.
    pub(super) tail: Line<AtomicU64>,
    /// Bytes ever consumed. Written by the consumer.
    pub(super) head: Line<AtomicU64>,
    /// 1 while the consumer wants to be woken; the producer clears it before it does so.
    pub(super) consumer_waits: Line<AtomicU32>,
    /// 1 while the producer waits for room; the consumer clears it before it wakes.
    pub(super) producer_waits: Line<AtomicU32>,
    /// [`ATTACHED`] while the producer is there.
    pub(super) producer_state: Line<AtomicU32>,
}

/// Value of [`Indices::producer_state`] while the producer is there.
pub(super) const ATTACHED: u32 = 1;
/// Value of [`Indices::producer_state`] once the producer has left.
pub(super) const LEFT: u32 = 2;

/// Something with two cache lines for itself.
#[repr(C, align(128))]
pub(super) struct Line<T>(pub(super) T);

const _: () = assert!(size_of::<Indices>() <= PAGE);

/// A mapped direction.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: the memory is only accessed through atomics and volatile slices, whoever else writes it, and
// is unmapped only when the last owner drops.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the address range that `map` reserved; nobody borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), MAPPING) };
        if let Err(error) = unmapped {
            log::error!("cannot unmap a wire: {error}");
        }
    }
}

impl Mapping {
    fn map(fd: BorrowedFd<'_>, offset: u64) -> Result<Self, AttachError> {
        // SAFETY: a fresh reservation at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                MAPPING,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(AttachError::Map)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(AttachError::MapAtZero)?;
        let mapping = Self { base };
        for (at, from, len) in [
            (0, offset, DIRECTION),
            (DIRECTION, offset + PAGE as u64, RING),
        ] {
            // SAFETY: `at + len` ≤ MAPPING, so this replaces part of the reservation above, which
            // nobody uses yet. The file has SHM_LINK_BYTES and is sealed against shrinking, so that
            // every page of it exists; both were checked.
            unsafe {
                rustix::mm::mmap(
                    mapping.base.as_ptr().add(at).cast(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    fd,
                    from,
                )
            }
            .map_err(AttachError::Map)?;
        }
        Ok(mapping)
    }
}

/// One direction of a wire.
#[derive(Debug, Clone)]
pub(super) struct RingMem {
    mapping: Arc<Mapping>,
}

impl RingMem {
    /// Maps both directions of a wire, in the order of the file.
    pub(super) fn map_pair(fd: BorrowedFd<'_>) -> Result<[Self; 2], AttachError> {
        let size = rustix::fs::fstat(fd).map_err(AttachError::Map)?.st_size;
        if u64::try_from(size) != Ok(SHM_LINK_BYTES) {
            return Err(AttachError::Size(size));
        }
        // Without the seal the peer could shrink the file and kill us with SIGBUS.
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(AttachError::NotMemfd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(AttachError::NotSealed);
        }
        let map = |offset| -> Result<Self, AttachError> {
            Ok(Self {
                mapping: Arc::new(Mapping::map(fd.as_fd(), offset)?),
            })
        };
        Ok([map(0)?, map(DIRECTION as u64)?])
    }

    /// The index page.
    pub(super) fn indices(&self) -> &Indices {
        // SAFETY: the first page of the mapping, page aligned, which lives as long as self. Indices
        // consists of atomics, for which every content is valid and which others may change.
        unsafe { self.mapping.base.cast::<Indices>().as_ref() }
    }

    /// `len` bytes of the ring from the position that `index` (bytes ever) falls on. `None` when
    /// longer than the ring.
    pub(super) fn bytes(&self, index: u64, len: usize) -> Option<VolatileSlice<'_>> {
        if len > RING {
            return None;
        }
        let at = PAGE + (index % RING as u64) as usize;
        // SAFETY: `at` < PAGE + RING and `len` ≤ RING, so the bytes lie in the mapping, which lives as
        // long as self. All access to them is through volatile slices, or by `header`.
        Some(unsafe { VolatileSlice::new(self.mapping.base.as_ptr().add(at), len) })
    }

    /// The two words of a record's header. `None` when `index` is not a multiple of 16.
    fn header(&self, index: u64) -> Option<&[AtomicU64; 2]> {
        if index % 16 != 0 {
            return None;
        }
        let at = PAGE + (index % RING as u64) as usize;
        // SAFETY: 16-byte aligned because the base is page aligned and `index` was checked; `at` + 16
        // ≤ PAGE + RING. Atomics: every content is valid, and others may change it.
        Some(unsafe { self.mapping.base.add(at).cast::<[AtomicU64; 2]>().as_ref() })
    }

    /// Reads a record's header, each word once.
    pub(super) fn load_header(&self, index: u64) -> Option<[u64; 2]> {
        let [a, b] = self.header(index)?;
        Some([a.load(Ordering::Relaxed), b.load(Ordering::Relaxed)])
    }

    /// Writes a record's header.
    pub(super) fn store_header(&self, index: u64, words: [u64; 2]) -> Option<()> {
        let [a, b] = self.header(index)?;
        a.store(words[0], Ordering::Relaxed);
        b.store(words[1], Ordering::Relaxed);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::shm::test_support::wire;

    #[test]
    fn the_ring_continues_at_its_start() {
        let fd = wire();
        let [a, b] = RingMem::map_pair(fd.as_fd()).unwrap();
        let end = RING as u64 - 3;
        a.bytes(end, 8).unwrap().copy_from(b"abcdefgh");
        let mut start = [0u8; 5];
        a.bytes(0, 5).unwrap().copy_to(&mut start);
        assert_eq!(&start, b"defgh");
        let mut other = [1u8; 8];
        b.bytes(end, 8).unwrap().copy_to(&mut other);
        assert_eq!(other, [0; 8], "the other direction has its own ring");
        assert_eq!(a.indices().tail.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn nothing_outside_the_mapping_can_be_asked_for() {
        let fd = wire();
        let [a, _] = RingMem::map_pair(fd.as_fd()).unwrap();
        assert!(a.bytes(u64::MAX, RING).is_some());
        assert!(a.bytes(0, RING + 1).is_none());
        assert!(a.load_header(8).is_none());
        assert!(a.load_header(u64::MAX - 15).is_some());
    }
}
