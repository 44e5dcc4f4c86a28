//! The memory of a register window: a sealed memfd that both processes map.
#![allow(unsafe_code)] // maps memory that another process writes

use super::ring::{SLOTS, Slot, Slots};
use crate::error::FabricError;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const HEADER_BYTES: usize = 4096;
const RING_BYTES: usize = SLOTS * size_of::<Slot>();
/// Bytes of a window: a header page and two rings.
pub(crate) const WINDOW_BYTES: usize = HEADER_BYTES + 2 * RING_BYTES;

/// First word of the header; changes with the layout.
const LAYOUT: u32 = 0x4d32_0001;

/// A mapped window.
#[derive(Debug)]
struct Window {
    base: NonNull<u8>,
}

// SAFETY: the memory is only accessed through atomics, and unmapped only when the last owner drops.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    fn map(fd: &OwnedFd) -> Result<Self, FabricError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice. The memfd cannot shrink
        // below WINDOW_BYTES: both callers know its size and that it is sealed.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                WINDOW_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                fd,
                0,
            )
        }
        .map_err(FabricError::io("map the register window"))?;
        let base = NonNull::new(base.cast()).ok_or(FabricError::Window("is mapped at zero"))?;
        Ok(Self { base })
    }

    fn layout(&self) -> &AtomicU32 {
        // SAFETY: the first word of the mapping, which is page aligned and lives as long as self;
        // an atomic may be changed by others at any time.
        unsafe { self.base.cast::<AtomicU32>().as_ref() }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; nobody borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), WINDOW_BYTES) };
        if let Err(error) = unmapped {
            log::error!("cannot unmap a register window: {error}");
        }
    }
}

/// One direction of a window.
#[derive(Debug, Clone)]
pub(crate) struct Ring {
    window: Arc<Window>,
    offset: usize,
}

impl Slots for Ring {
    fn slot(&self, index: u64) -> &Slot {
        let offset = self.offset + (index % SLOTS as u64) as usize * size_of::<Slot>();
        // SAFETY: within the mapping, because `offset` is that of one of its two rings; aligned to 64
        // because the base is page aligned. A Slot consists of atomics, for which every content is
        // valid and which others may change at any time.
        unsafe { self.window.base.add(offset).cast::<Slot>().as_ref() }
    }
}

/// The two directions of a window, as one side uses them.
#[derive(Debug)]
pub(crate) struct Rings {
    /// This side asks.
    pub(crate) requests: Ring,
    /// This side answers.
    pub(crate) serves: Ring,
}

impl Rings {
    fn new(window: Window, creator: bool) -> Self {
        let window = Arc::new(window);
        let [first, second] = [HEADER_BYTES, HEADER_BYTES + RING_BYTES].map(|offset| Ring {
            window: Arc::clone(&window),
            offset,
        });
        let (requests, serves) = if creator {
            (first, second)
        } else {
            (second, first)
        };
        Self { requests, serves }
    }
}

/// Makes a window, for the listening side; the descriptor is for the peer.
pub(crate) fn create() -> Result<(Rings, OwnedFd), FabricError> {
    let what = "create the memory of a register window";
    let fd = rustix::fs::memfd_create(
        "m2m-registers",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .map_err(FabricError::io(what))?;
    rustix::fs::ftruncate(&fd, WINDOW_BYTES as u64).map_err(FabricError::io(what))?;
    // Without the seals the peer could shrink the file and kill us with SIGBUS.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(FabricError::io(what))?;
    let window = Window::map(&fd)?;
    window.layout().store(LAYOUT, Ordering::Release);
    Ok((Rings::new(window, true), fd))
}

/// Maps the window that the peer made.
pub(crate) fn open(fd: &OwnedFd) -> Result<Rings, FabricError> {
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd())
        .map_err(|_| FabricError::Window("the descriptor is not a memfd"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(FabricError::Window("the memfd is not sealed"));
    }
    let size = rustix::fs::fstat(fd)
        .map_err(FabricError::io("read the size of the register window"))?
        .st_size;
    if size != WINDOW_BYTES as i64 {
        return Err(FabricError::Window("the memfd has the wrong size"));
    }
    let window = Window::map(fd)?;
    if window.layout().load(Ordering::Acquire) != LAYOUT {
        return Err(FabricError::Window("the layout is unknown"));
    }
    Ok(Rings::new(window, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn window_that_could_shrink_is_refused() {
        let fd = memfd(WINDOW_BYTES as u64, SealFlags::GROW);
        assert!(matches!(open(&fd), Err(FabricError::Window(reason)) if reason.contains("sealed")));
    }

    #[test]
    fn window_of_another_size_or_layout_is_refused() {
        let small = memfd(4096, SealFlags::SHRINK);
        assert!(
            matches!(open(&small), Err(FabricError::Window(reason)) if reason.contains("size"))
        );
        let zero = memfd(WINDOW_BYTES as u64, SealFlags::SHRINK);
        assert!(
            matches!(open(&zero), Err(FabricError::Window(reason)) if reason.contains("layout"))
        );
    }

    #[test]
    fn descriptor_that_is_no_memfd_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(open(&pipe), Err(FabricError::Window(_))));
    }

    #[test]
    fn the_two_sides_see_each_others_rings() {
        use crate::registers::ring::{Access, Requester, Server};
        let (ours, fd) = create().unwrap();
        let theirs = open(&fd).unwrap();
        let access = Access::Read { address: 8 };
        Requester::default().submit(&ours.requests, access).unwrap();
        assert_eq!(Server::default().take(&theirs.serves), Ok(Some(access)));
        assert_eq!(Server::default().take(&ours.serves), Ok(None));
    }
}
