//! A function's state in memory that outlives the process which serves it.
//!
//! A process may be killed at any instruction. Whoever takes its place finds here what the client and the function
//! agreed on, which memory is mapped, which request is owed a reply, and what the data side saved. Descriptors are
//! not here but with [`crate::keep::Keep`]. The layout is `memory::Layout`; a change of it raises [`VERSION`], and a
//! process that does not know the version does not touch the memory.
//!
//! How a request survives: it stays in the client's socket until its reply was sent (see [`crate::conn`]). So
//!
//! 1. [`State::begin`] notes its id;
//! 2. it is executed; everything that a request changes may be changed twice;
//! 3. [`State::reply`] sends the reply; the kernel notes that in this memory in the same system call;
//! 4. it is taken out of the socket;
//! 5. [`State::end`].
//!
//! A successor finds a request noted: if it is not at the socket's head any more, it died behind 4; if its reply
//! was sent, only 4 is left to do; if not, all of it is. A request without a reply (a posted write) needs no note:
//! it is executed again when it is still in the socket.

mod memory;
mod queue;
mod word;

use std::os::fd::{BorrowedFd, OwnedFd};

use dot_iommu::Perm;
use rustix::io::Errno;
use thiserror::Error;

use crate::proto::Capabilities;
use memory::Memory;
pub use queue::QueueState;

/// First word of the memory.
const MAGIC: u64 = u64::from_le_bytes(*b"dpustate");
/// Version of the layout, the data side's sections included.
pub const VERSION: u32 = 2;
/// Bytes that a section holds.
pub const SECTION_BYTES: usize = memory::SECTION_BYTES;

const BUSY: u64 = 1 << 32;
const USED: u64 = 1 << 63;
const READ: u64 = 1 << 32;
const WRITE: u64 = 1 << 33;
const SECOND: u32 = 1 << 31;

/// Why a function's state cannot be used.
#[derive(Debug, Error)]
pub enum StateError {
    /// The system refused.
    #[error("the state of a function cannot be mapped: {0}")]
    System(#[from] Errno),
    /// Another size.
    #[error("the state of a function has {0} bytes or is not sealed")]
    Size(i64),
    /// Something else, or another version.
    #[error("the state of a function has layout version {0}; this program knows {VERSION}")]
    Version(u32),
    /// Its process could not keep everything.
    #[error("the state of a function is not complete")]
    Broken,
}

/// A part of the memory for the data side, saved and loaded as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// What the thread that serves the client changes: registers.
    Registers = 0,
    /// What the data path changes.
    DataPath = 1,
}

/// A request that was noted and not done with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Message id.
    pub id: u16,
    /// Command number.
    pub command: u16,
    /// Whether its reply was sent.
    pub replied: bool,
}

/// A range of the client's memory as it was mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRecord {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Rights.
    pub perm: Perm,
    /// Number of the file; `None` when it came without.
    pub file: Option<u32>,
}

/// See the module.
pub struct State {
    memory: Memory,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl State {
    /// New memory, without a client.
    ///
    /// # Errors
    /// What the system said.
    pub fn create() -> Result<(Self, OwnedFd), StateError> {
        let (memory, fd) = Memory::create()?;
        memory.layout().version.store(VERSION);
        memory.layout().magic.store(MAGIC);
        Ok((Self { memory }, fd))
    }

    /// The memory of a process that is gone.
    ///
    /// # Errors
    /// It is not of this version, or not to be relied on.
    pub fn open(fd: &OwnedFd) -> Result<Self, StateError> {
        let memory = Memory::open(fd)?;
        let layout = memory.layout();
        let version = layout.version.load();
        if layout.magic.load() != MAGIC || version != VERSION {
            return Err(StateError::Version(version));
        }
        if layout.broken.load() != 0 {
            return Err(StateError::Broken);
        }
        Ok(Self { memory })
    }

    /// Version of the layout of another program's memory, `None` if it is none.
    pub fn version_of(fd: BorrowedFd<'_>) -> Option<u32> {
        let mut head = [0; 12];
        let read = rustix::io::pread(fd, &mut head[..], 0).ok()?;
        let (magic, version) = head.split_first_chunk()?;
        let is_state = read == head.len() && u64::from_le_bytes(*magic) == MAGIC;
        is_state.then(|| u32::from_le_bytes(version.try_into().unwrap_or_default()))
    }

    /// Something could not be kept: nobody is to rely on this until [`Self::clear`].
    pub fn set_broken(&self) {
        self.memory.layout().broken.store(1);
    }

    /// Everything is kept, after all: another keeper took all that there is.
    pub fn set_whole(&self) {
        self.memory.layout().broken.store(0);
    }

    /// As without a client.
    pub fn clear(&self) {
        let layout = self.memory.layout();
        layout.agreed.store(0);
        layout.request.store(0);
        let end = layout.map_end.load() as usize;
        layout.map_end.store(0);
        for map in layout.maps.iter().take(end) {
            map.flags.store(0);
        }
        for section in &layout.sections {
            section.current.store(0);
        }
        self.clear_queues();
        self.set_window([0; 16]);
        layout.broken.store(0);
    }

    /// What was agreed on with the client.
    pub fn agreed(&self) -> Option<Capabilities> {
        let layout = self.memory.layout();
        let word = |field: &word::Word32| field.load();
        (word(&layout.agreed) != 0).then(|| Capabilities {
            max_data_xfer: word(&layout.max_data_xfer) as usize,
            max_fds: word(&layout.max_fds) as usize,
            max_dma_maps: word(&layout.max_dma_maps) as usize,
            write_multiple: word(&layout.write_multiple) != 0,
            message_dma: word(&layout.message_dma) != 0,
        })
    }

    /// Notes what was agreed on.
    pub fn set_agreed(&self, agreed: &Capabilities) {
        let layout = self.memory.layout();
        let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        for (field, value) in [
            (&layout.max_data_xfer, word(agreed.max_data_xfer)),
            (&layout.max_fds, word(agreed.max_fds)),
            (&layout.max_dma_maps, word(agreed.max_dma_maps)),
            (&layout.write_multiple, u32::from(agreed.write_multiple)),
            (&layout.message_dma, u32::from(agreed.message_dma)),
            (&layout.agreed, 1),
        ] {
            field.store(value);
        }
    }

    /// A request that wants a reply is going to be executed.
    pub fn begin(&self, id: u16, command: u16) {
        self.memory.nothing_sent();
        let note = BUSY | u64::from(command) << 16 | u64::from(id);
        self.memory.layout().request.store(note);
    }

    /// The request was replied to and taken out of the socket.
    pub fn end(&self) {
        self.memory.layout().request.store(0);
    }

    /// The request that is noted.
    pub fn pending(&self) -> Option<Pending> {
        let note = self.memory.layout().request.load();
        (note & BUSY != 0).then(|| Pending {
            id: note as u16,
            command: (note >> 16) as u16,
            replied: self.memory.sent() != 0,
        })
    }

    /// Sends the reply to the request that was begun, or its first bytes, without waiting; answers how many. That
    /// it was sent is noted together with it.
    ///
    /// # Errors
    /// What the system said; nothing was sent then.
    pub fn reply(&self, socket: BorrowedFd<'_>, message: &[u8]) -> Result<usize, Errno> {
        self.memory.send(socket, message)
    }

    /// Registers of the window onto the BARs.
    pub fn window(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (to, from) in bytes.chunks_exact_mut(4).zip(&self.memory.layout().window) {
            to.copy_from_slice(&from.load().to_le_bytes());
        }
        bytes
    }

    /// Saves the window's registers. A request that changes them is executed again if it was not replied to.
    pub fn set_window(&self, bytes: [u8; 16]) {
        for (from, to) in bytes.chunks_exact(4).zip(&self.memory.layout().window) {
            let word = from.try_into().map(u32::from_le_bytes).unwrap_or_default();
            to.store(word);
        }
    }

    /// Notes a map in a free slot. `false`: there is no such slot.
    pub fn set_map(&self, slot: u32, map: &MapRecord) -> bool {
        let layout = self.memory.layout();
        let Some(place) = layout.maps.get(slot as usize) else {
            return false;
        };
        let rights = if map.perm.read { READ } else { 0 } | if map.perm.write { WRITE } else { 0 };
        let file = map.file.map_or(0, |file| u64::from(file) + 1);
        place.address.store(map.address);
        place.size.store(map.size);
        place.offset.store(map.offset);
        layout.map_end.raise(slot + 1);
        place.flags.store(USED | rights | file);
        true
    }

    /// Frees a slot.
    pub fn remove_map(&self, slot: u32) {
        if let Some(place) = self.memory.layout().maps.get(slot as usize) {
            place.flags.store(0);
        }
    }

    /// Maps with their slots.
    pub fn maps(&self) -> Vec<(u32, MapRecord)> {
        let layout = self.memory.layout();
        let end = layout.map_end.load() as usize;
        let used = (0..)
            .zip(layout.maps.iter().take(end))
            .filter_map(|(slot, place)| {
                let flags = place.flags.load();
                (flags & USED != 0).then(|| {
                    let map = MapRecord {
                        address: place.address.load(),
                        size: place.size.load(),
                        offset: place.offset.load(),
                        perm: Perm {
                            read: flags & READ != 0,
                            write: flags & WRITE != 0,
                        },
                        file: (flags as u32).checked_sub(1),
                    };
                    (slot, map)
                })
            });
        used.collect()
    }

    /// Saves a section: all of it or nothing. One thread at a time per section. `false`: too long.
    pub fn save(&self, section: Section, bytes: &[u8]) -> bool {
        let Some(place) = self.memory.layout().sections.get(section as usize) else {
            return false;
        };
        if bytes.is_empty() || bytes.len() > SECTION_BYTES {
            return false;
        }
        let other = place.current.load() & SECOND ^ SECOND;
        for (from, to) in bytes.chunks(8).zip(place.copy(other)) {
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(from) {
                *to = *from;
            }
            to.store(u64::from_le_bytes(word));
        }
        place.current.store(other | bytes.len() as u32);
        true
    }

    /// What was saved last.
    pub fn load(&self, section: Section) -> Option<Vec<u8>> {
        let place = self.memory.layout().sections.get(section as usize)?;
        let current = place.current.load();
        let len = (current & !SECOND) as usize;
        let words = place.copy(current & SECOND).iter();
        let mut bytes: Vec<u8> = words
            .take(len.div_ceil(8))
            .flat_map(|word| word.load().to_le_bytes())
            .collect();
        bytes.truncate(len);
        (len != 0).then_some(bytes)
    }

    /// The place of a queue of the data side; `None` when there are not so many.
    pub fn queue(&self, index: u16) -> Option<&QueueState> {
        self.memory.layout().queues.get(usize::from(index))
    }

    /// Every queue as before its first use.
    pub fn clear_queues(&self) {
        self.memory
            .layout()
            .queues
            .iter()
            .for_each(QueueState::clear);
    }

    /// Drops what was saved.
    pub fn drop_section(&self, section: Section) {
        if let Some(place) = self.memory.layout().sections.get(section as usize) {
            place.current.store(0);
        }
    }
}

#[cfg(test)]
mod kill_tests;
#[cfg(test)]
mod tests;
