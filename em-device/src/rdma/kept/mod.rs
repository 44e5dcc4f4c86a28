//! What of an RDMA function outlives its process: its objects, and where its queues are.
//!
//! A process may be killed at any instruction. Whoever takes its place finds in this memory
//!
//! * [`Store`]: a record for each object and each change of it that counts, replaced and removed as a whole;
//! * [`Note`]: the command that is being executed, so that none is executed twice;
//! * the places of queues ([`QpPlace`] and the like): a few words each that the data path stores to.
//!
//! Nothing here knows what a record means. The reader is another process after this one died, so what counts is
//! the order of the stores in the program.

mod heap;
mod memory;
mod note;
mod places;
mod store;

#[cfg(test)]
mod tests;

use memory::Memory;
pub use note::{Note, Outcome};
pub use places::{Detail, Finished, QpPlace, QueuePlace, Standing};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
pub use store::{Change, Key, Record, Store};
use thiserror::Error;

/// First word of the memory.
const MAGIC: u64 = u64::from_le_bytes(*b"rdmakept");
/// Version of the layout and of the records. A change raises [`smartep::state::VERSION`] too, which an upgrade looks at.
pub const VERSION: u64 = 1;
/// Places in the first page, in bytes: first word, version, whether it cannot be relied on.
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const BROKEN_AT: usize = 16;

/// Why the memory cannot be used.
#[derive(Debug, Error)]
pub enum KeptError {
    /// The system refused.
    #[error("the memory for an RDMA function's objects cannot be used: {0}")]
    System(#[from] Errno),
    /// Another size.
    #[error("the memory for an RDMA function's objects has {0} bytes or is not sealed")]
    Size(i64),
    /// Something else, or another version.
    #[error("an RDMA function's objects have layout version {0}; this program knows {VERSION}")]
    Version(u64),
    /// Something could not be kept.
    #[error("an RDMA function's objects are not complete")]
    Broken,
    /// A record that makes no sense.
    #[error("an RDMA function's object {0} makes no sense")]
    Record(&'static str),
}

/// See the module.
#[derive(Debug)]
pub struct Kept {
    memory: Arc<Memory>,
    store: Mutex<Store>,
}

impl Kept {
    /// New memory without objects.
    ///
    /// # Errors
    /// What the system said.
    pub fn create() -> Result<Arc<Self>, KeptError> {
        let memory = Arc::new(Memory::create()?);
        for (at, value) in [(VERSION_AT, VERSION), (MAGIC_AT, MAGIC)] {
            if let Some(word) = memory.word(at) {
                word.store(value, Ordering::Release);
            }
        }
        let store = Mutex::new(Store::new(memory.clone()));
        Ok(Arc::new(Self { memory, store }))
    }

    /// What a process that is gone left.
    ///
    /// # Errors
    /// It is not of this version, or not to be relied on.
    pub fn open(fd: OwnedFd) -> Result<Arc<Self>, KeptError> {
        let memory = Arc::new(Memory::open(fd)?);
        let load = |at| {
            memory
                .word(at)
                .map_or(0, |word| word.load(Ordering::Acquire))
        };
        if load(MAGIC_AT) != MAGIC || load(VERSION_AT) != VERSION {
            return Err(KeptError::Version(load(VERSION_AT)));
        }
        if load(BROKEN_AT) != 0 {
            return Err(KeptError::Broken);
        }
        let note = Note::new(memory.clone()).entry();
        let store = Mutex::new(Store::open(memory.clone(), note)?);
        Ok(Arc::new(Self { memory, store }))
    }

    /// The descriptor, for who keeps it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Something could not be kept: nobody is to rely on this until [`Self::clear`].
    pub fn set_broken(&self) {
        log::error!(
            "not all of an RDMA function's objects can be kept: they will not survive this process"
        );
        if let Some(word) = self.memory.word(BROKEN_AT) {
            word.store(1, Ordering::Release);
        }
    }

    /// The records.
    pub fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command in progress.
    pub fn note(&self) -> Note {
        Note::new(self.memory.clone())
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.store().clear();
        self.note().clear();
        if let Some(word) = self.memory.word(BROKEN_AT) {
            word.store(0, Ordering::Release);
        }
    }

    /// The place of a queue pair, or of an Ethernet send queue: they have numbers of one range. `None`: there
    /// cannot be such a number.
    pub fn qp(&self, number: u32) -> Option<QpPlace> {
        QpPlace::new(&self.memory, number)
    }

    /// The place of a completion queue.
    pub fn cq(&self, number: u32) -> Option<QueuePlace> {
        QueuePlace::new(&self.memory, memory::CQ_PLACES, memory::NUMBERS, number)
    }

    /// The place of a shared receive queue.
    pub fn srq(&self, number: u32) -> Option<QueuePlace> {
        QueuePlace::new(&self.memory, memory::SRQ_PLACES, memory::NUMBERS, number)
    }

    /// The place of an event queue.
    pub fn eq(&self, number: u32) -> Option<QueuePlace> {
        QueuePlace::new(&self.memory, memory::EQ_PLACES, memory::EQS, number)
    }

    /// The place of an Ethernet receive queue.
    pub fn rq(&self, number: u32) -> Option<QueuePlace> {
        QueuePlace::new(&self.memory, memory::RQ_PLACES, memory::RQS, number)
    }
}
