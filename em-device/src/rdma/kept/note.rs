//! The command that is being executed, as far as a successor has to know of it.
//!
//! 1. [`Note::begin`], before its change of the records counts: which command, and which entry of the records has
//!    which value once it was executed;
//! 2. the output is stored and the driver gets its entry back;
//! 3. [`Note::tells`], if it gets an event: which event queue has it at which place; then the event;
//! 4. [`Note::clear`].
//!
//! A driver that issues an equal command in the same slot right after 2 uses another token.

use super::memory::Memory;
use super::store::Change;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in the first page.
const AT: usize = 64;
const WORDS: usize = 6;

const VALID: u64 = 1 << 63;
const SILENT: u64 = 1 << 62;

/// See the module.
#[derive(Debug)]
pub struct Note {
    memory: Arc<Memory>,
}

/// A command that a former process had begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Slot of the command queue.
    pub slot: u8,
    /// Token of the entry.
    pub token: u8,
    /// Of the input.
    pub hash: u32,
    /// Whether the driver gets no event for it.
    pub silent: bool,
    /// Its output, if it changed something and that counts.
    pub output: Option<[u8; 16]>,
    /// Where its event was to be stored: event queue and producer index.
    pub event: Option<(u32, u32)>,
}

impl Note {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        Self { memory }
    }

    fn words(&self) -> &[AtomicU64] {
        self.memory.words(AT, WORDS).unwrap_or_default()
    }

    /// A command is going to be executed, by `change` if it changes something.
    pub fn begin(&self, command: &Outcome, change: Option<&Change>, output: &[u8]) {
        let [first, entry, word, low, high, event] = self.words() else {
            return;
        };
        first.store(0, Ordering::Release);
        let half = |from: usize| {
            let mut bytes = [0; 8];
            let part = output.iter().skip(from);
            bytes
                .iter_mut()
                .zip(part)
                .for_each(|(to, from)| *to = *from);
            u64::from_le_bytes(bytes)
        };
        let number = change.map_or(0, |change| VALID | u64::from(change.entry));
        for (place, value) in [
            (entry, number),
            (word, change.map_or(0, |change| change.word)),
            (low, half(0)),
            (high, half(8)),
            (event, 0),
        ] {
            place.store(value, Ordering::Release);
        }
        let silent = if command.silent { SILENT } else { 0 };
        let token = u64::from(command.token) << 8 | u64::from(command.slot);
        let name = VALID | silent | u64::from(command.hash) << 16 | token;
        first.store(name, Ordering::Release);
    }

    /// The driver is going to be told by the event queue `eqn`, whose next entry is `index`.
    pub fn tells(&self, eqn: u32, index: u32) {
        if let [.., event] = self.words() {
            let place = VALID | u64::from(eqn) << 32 | u64::from(index);
            event.store(place, Ordering::Release);
        }
    }

    /// The command is done with.
    pub fn clear(&self) {
        if let [first, ..] = self.words() {
            first.store(0, Ordering::Release);
        }
    }

    /// The entry that the command in progress changes.
    pub(super) fn entry(&self) -> Option<u32> {
        let [first, entry, ..] = self.words() else {
            return None;
        };
        let [first, entry] = [first, entry].map(|word| word.load(Ordering::Acquire));
        (first & entry & VALID != 0).then_some(entry as u32)
    }

    /// The command in progress.
    pub fn load(&self) -> Option<Outcome> {
        let [first, _, word, low, high, event] = self.words() else {
            return None;
        };
        let [name, word, low, high, event] =
            [first, word, low, high, event].map(|word| word.load(Ordering::Acquire));
        let counts = self.entry().is_some_and(|entry| {
            let place = super::memory::ENTRY_WORDS + entry as usize * 8;
            let now = self.memory.word(place);
            now.is_some_and(|now| now.load(Ordering::Acquire) == word)
        });
        let output = counts.then(|| {
            let mut output = [0; 16];
            let bytes = [low, high].into_iter().flat_map(u64::to_le_bytes);
            output
                .iter_mut()
                .zip(bytes)
                .for_each(|(to, from)| *to = from);
            output
        });
        (name & VALID != 0).then_some(Outcome {
            slot: name as u8,
            token: (name >> 8) as u8,
            hash: (name >> 16) as u32,
            silent: name & SILENT != 0,
            output,
            event: (event & VALID != 0).then_some(((event >> 32) as u32 & 0xff, event as u32)),
        })
    }
}
