//! The memory behind a [`super::State`], and the one system call that the kernel answers into it.
#![allow(unsafe_code)] // maps memory that other processes hold too, and hands its addresses to the kernel

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::StateError;
use super::word::{Word32, Word64};

/// Maps that fit.
pub(super) const MAPS: usize = 65536;
/// Bytes of a copy of a section.
pub(super) const SECTION_BYTES: usize = 12 << 10;
/// Sections of the data side.
pub(super) const SECTIONS: usize = 2;
/// Queues of the data side that have a place of their own.
pub(super) const QUEUES: usize = 65;
/// Entries of such a place.
pub(super) const QUEUE_ENTRIES: usize = 512;

/// The layout, version 2. All zeroes but for the first two fields is a function without a client.
///
/// A field is written by one thread at a time. The reader is another process after this one died, so what counts is
/// the order of the stores in the program; see each field's writer in [`super::State`].
#[repr(C)]
pub(super) struct Layout {
    /// [`super::MAGIC`].
    pub(super) magic: Word64,
    /// [`super::VERSION`].
    pub(super) version: Word32,
    /// Not 0: something could not be kept, and nothing can be resumed.
    pub(super) broken: Word32,
    /// Not 0: a version was agreed on, and the next fields say what with it.
    pub(super) agreed: Word32,
    pub(super) max_fds: Word32,
    pub(super) max_data_xfer: Word32,
    pub(super) max_dma_maps: Word32,
    pub(super) write_multiple: Word32,
    pub(super) message_dma: Word32,
    /// Registers of the window onto the BARs.
    pub(super) window: [Word32; 4],
    /// The request that a reply is owed for: bit 32 set, command in bits 16–31, id in bits 0–15. 0: none.
    pub(super) request: Word64,
    /// `struct mmsghdr` of the reply. The kernel fills in its last field when it has queued the reply.
    reply: [Word64; MMSGHDR_WORDS],
    /// Slots of `maps` below this number may be in use.
    pub(super) map_end: Word32,
    pad: Word32,
    pub(super) sections: [Section; SECTIONS],
    pub(super) maps: [Map; MAPS],
    pub(super) queues: [super::QueueState; QUEUES],
}

/// Bytes of the data side, in two copies, of which one counts.
#[repr(C)]
pub(super) struct Section {
    /// Length of the copy that counts in bits 0–30, its number in bit 31.
    pub(super) current: Word32,
    pad: Word32,
    copies: [[Word64; SECTION_BYTES / 8]; 2],
}

/// A range of the client's memory.
#[repr(C)]
pub(super) struct Map {
    pub(super) address: Word64,
    pub(super) size: Word64,
    /// Offset in the file.
    pub(super) offset: Word64,
    /// Bit 63: in use. Bits 32 and 33: may be read, written. Bits 0–31: number of its file plus 1, 0 without one.
    pub(super) flags: Word64,
}

const MMSGHDR_WORDS: usize = size_of::<libc::mmsghdr>() / 8;
const _: () = assert!(size_of::<libc::mmsghdr>() % 8 == 0 && align_of::<libc::mmsghdr>() <= 8);
const _: () = assert!(size_of::<Layout>() % 8 == 0);

/// Bytes of the memory.
pub(super) const BYTES: usize = size_of::<Layout>().next_multiple_of(4096);

/// The mapped memory.
pub(super) struct Memory {
    base: NonNull<Layout>,
}

// SAFETY: the memory is only accessed through atomics and by the kernel, and unmapped when the only owner drops.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory of the right size, all zeroes.
    pub(super) fn create() -> Result<(Self, OwnedFd), Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("function-state", flags)?;
        rustix::fs::ftruncate(&fd, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&fd)?, fd))
    }

    /// Memory that another process made.
    pub(super) fn open(fd: &OwnedFd) -> Result<Self, StateError> {
        let size = rustix::fs::fstat(fd)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(fd)?;
        // Without the seal whoever holds it too could shrink it and kill us with SIGBUS.
        if usize::try_from(size) != Ok(BYTES) || !seals.contains(SealFlags::SHRINK) {
            return Err(StateError::Size(size));
        }
        Ok(Self::map(fd)?)
    }

    fn map(fd: &OwnedFd) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address of the kernel's choice; the file has BYTES and keeps them.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base })
    }

    pub(super) fn layout(&self) -> &Layout {
        // SAFETY: the mapping holds a Layout, which consists of atomics: every content is valid, and others may
        // change it. It lives as long as self.
        unsafe { self.base.as_ref() }
    }

    /// Sends a message; [`Self::sent`] says how many bytes the kernel has taken, to this process and to whoever
    /// looks after its death: the kernel takes them and writes the number in one go, before a signal can end the
    /// process. Does not wait.
    pub(super) fn send(&self, socket: BorrowedFd<'_>, message: &[u8]) -> Result<usize, Errno> {
        let mut iov = libc::iovec {
            iov_base: message.as_ptr().cast_mut().cast(),
            iov_len: message.len(),
        };
        // SAFETY: `mmsghdr` is plain data for which zeroes are valid.
        let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
        header.msg_hdr.msg_iov = &mut iov;
        header.msg_hdr.msg_iovlen = 1;
        let place = self
            .layout()
            .reply
            .as_ptr()
            .cast_mut()
            .cast::<libc::mmsghdr>();
        // SAFETY: `place` is large and aligned enough (asserted above), in memory that may be written. The kernel
        // reads `header`, `iov` and `message`, which live until it returns, and writes `msg_len` of `place`. Only
        // one thread replies to a client, so nobody else accesses `reply` meanwhile.
        let sent = unsafe {
            place.write_volatile(header);
            libc::sendmmsg(
                socket.as_raw_fd(),
                place,
                1,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        match sent {
            1 => Ok(self.sent()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }

    /// Bytes of the last reply that the kernel has taken.
    pub(super) fn sent(&self) -> usize {
        self.sent_word().load().try_into().unwrap_or(0)
    }

    /// No reply was sent.
    pub(super) fn nothing_sent(&self) {
        self.sent_word().store(0);
    }

    /// As the kernel does when it has taken a reply.
    #[cfg(test)]
    pub(super) fn pretend_sent(&self, bytes: u32) {
        self.sent_word().store(bytes);
    }

    fn sent_word(&self) -> &Word32 {
        let at = std::mem::offset_of!(libc::mmsghdr, msg_len);
        let place = self.layout().reply.as_ptr().cast::<u8>();
        // SAFETY: `msg_len` is a 32-bit field inside `reply`, aligned as in `mmsghdr`; atomics may be changed by
        // others, the kernel among them.
        unsafe { &*place.add(at).cast::<Word32>() }
    }
}

impl Section {
    /// Words of a copy.
    pub(super) fn copy(&self, number: u32) -> &[Word64; SECTION_BYTES / 8] {
        let [first, second] = &self.copies;
        if number == 0 { first } else { second }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; nobody borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), BYTES) };
        if let Err(error) = unmapped {
            log::error!("cannot unmap a function's state: {error}");
        }
    }
}
