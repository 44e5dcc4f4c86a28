//! Where a queue is, for queues whose position cannot be read from the client's memory.

use super::memory::QUEUE_ENTRIES;
use super::word::Word64;

/// One queue's place: a word that is replaced as a whole, and a log that it may refer to. What they mean is the data
/// side's matter. One thread writes at a time, and each store is ordered behind all memory accesses before it.
#[repr(C)]
#[derive(Debug)]
pub struct QueueState {
    step: Word64,
    entries: [Word64; QUEUE_ENTRIES],
}

impl QueueState {
    /// Entries of the log.
    pub const ENTRIES: usize = QUEUE_ENTRIES;

    /// The word; 0 before the first use.
    pub fn step(&self) -> u64 {
        self.step.load()
    }

    /// Replaces the word.
    #[inline]
    pub fn set_step(&self, step: u64) {
        self.step.store(step);
    }

    /// Entry `index` of the log; 0 where there is none.
    pub fn entry(&self, index: usize) -> u64 {
        let entry = self.entries.get(index);
        entry.map_or(0, |entry| entry.load())
    }

    /// Replaces an entry. `false`: there are not so many.
    pub fn set_entry(&self, index: usize, value: u64) -> bool {
        let entry = self.entries.get(index);
        entry.is_some_and(|entry| {
            entry.store(value);
            true
        })
    }

    /// As before the first use.
    pub fn clear(&self) {
        self.set_step(0);
    }
}
