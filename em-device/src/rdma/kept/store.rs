//! Records by key. A record is replaced or removed by one store, so that it is there as a whole or not at all.
//!
//! An entry is one word: whether it is in use, the low bits of a number that counts changes, and the place of the
//! record. A record is a header of four words (number of the change, length and class, number of its object, part)
//! and its bytes. An object's record of part 0 is what the others of it depend on: it is written first and removed
//! first, and parts without it count for nothing.

use super::KeptError;
use super::heap::Heap;
use super::memory::{ENTRIES, ENTRY_WORDS, HEAP, MOST, Memory};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a unit of the heap.
const UNIT: usize = 64;
const HEADER_WORDS: usize = 4;
/// Longest record: an input of the longest command, and what stands before it.
const MAX_LEN: usize = (16 << 20) + 4096;
/// Above this the memory that records have left is given back when they are forgotten.
const LARGE: usize = 4 << 20;

const USED: u64 = 1 << 63;
const CHANGE_SHIFT: u32 = 24;
const CHANGE_MASK: u64 = (1 << 39) - 1;
const UNIT_MASK: u64 = (1 << CHANGE_SHIFT) - 1;
const _: () = assert!((MOST - HEAP) / UNIT < 1 << CHANGE_SHIFT);

/// Names a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Kind of object.
    pub class: u8,
    /// Its number.
    pub number: u64,
    /// Which part of it; 0 is what the others depend on.
    pub part: u64,
}

/// A record as it was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its name.
    pub key: Key,
    /// Counts changes: a record with a higher one was written later.
    pub change: u64,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// A change that is prepared, and what its entry will be: who finds it so knows that it was done.
#[derive(Debug)]
pub struct Change {
    key: Key,
    /// Number of the entry.
    pub entry: u32,
    /// Its value when the change is done.
    pub word: u64,
    /// Number of the change.
    pub number: u64,
    place: Option<Place>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    entry: u32,
    start: u32,
    units: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Store {
    memory: Arc<Memory>,
    heap: Heap,
    index: BTreeMap<Key, Place>,
    free: Vec<u32>,
    /// Entries below were used.
    end: u32,
    /// Number of the last change.
    changes: u64,
    /// Units that were ever used.
    high: usize,
}

fn units(len: usize) -> u32 {
    (HEADER_WORDS * 8 + len).div_ceil(UNIT) as u32
}

fn at(start: u32) -> usize {
    HEAP + start as usize * UNIT
}

impl Store {
    /// Without records.
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            heap: Heap::new(((MOST - HEAP) / UNIT) as u32),
            index: BTreeMap::new(),
            free: Vec::new(),
            end: 0,
            changes: 0,
            high: 0,
        }
    }

    /// With what a former process left. The entry `reserved` is not used for anything else.
    pub(super) fn open(memory: Arc<Memory>, reserved: Option<u32>) -> Result<Self, KeptError> {
        let mut store = Self::new(memory.clone());
        let entries = memory.words(ENTRY_WORDS, ENTRIES).unwrap_or_default();
        for (number, word) in (0u32..).zip(entries) {
            let word = word.load(Ordering::Acquire);
            if word == 0 {
                // Entries are taken one after the other.
                break;
            }
            store.end = number + 1;
            store.changes = store.changes.max(word >> CHANGE_SHIFT & CHANGE_MASK);
            if word & USED == 0 {
                if reserved != Some(number) {
                    store.free.push(number);
                }
                continue;
            }
            store.found(number, word)?;
        }
        let parts: Vec<Key> = store.index.keys().copied().collect();
        for key in parts {
            let whole = Key { part: 0, ..key };
            if !store.index.contains_key(&whole) {
                store.remove_one(key);
            }
        }
        Ok(store)
    }

    fn found(&mut self, entry: u32, word: u64) -> Result<(), KeptError> {
        let start = (word & UNIT_MASK) as u32;
        let header = self.memory.words(at(start), HEADER_WORDS);
        let [change, len, number, part] = header.unwrap_or_default() else {
            return Err(KeptError::Record("outside of the memory"));
        };
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        let len_and_class = load(len);
        let len = (len_and_class & 0xffff_ffff) as usize;
        let key = Key {
            class: (len_and_class >> 32) as u8,
            number: load(number),
            part: load(part),
        };
        let sound = load(change) & CHANGE_MASK == word >> CHANGE_SHIFT & CHANGE_MASK;
        let units = units(len.min(MAX_LEN));
        if !sound || len > MAX_LEN || !self.heap.take_at(start, units) {
            return Err(KeptError::Record("in a place where none can be"));
        }
        self.high = self.high.max((start + units) as usize);
        let place = Place {
            entry,
            start,
            units,
        };
        match self.index.insert(key, place) {
            None => Ok(()),
            Some(_) => Err(KeptError::Record("with the name of another")),
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Records that are kept.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// All records in the order in which they were written.
    pub fn records(&self) -> Vec<Record> {
        let one = |(key, place): (&Key, &Place)| {
            let header = self.memory.words(at(place.start), 2)?;
            let [change, len] = header else {
                return None;
            };
            let len = (len.load(Ordering::Acquire) & 0xffff_ffff) as usize;
            let words = self
                .memory
                .words(at(place.start) + HEADER_WORDS * 8, len.div_ceil(8))?;
            let mut bytes: Vec<u8> = words
                .iter()
                .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
                .collect();
            bytes.truncate(len);
            Some(Record {
                key: *key,
                change: change.load(Ordering::Acquire),
                bytes,
            })
        };
        let mut all: Vec<Record> = self.index.iter().filter_map(one).collect();
        all.sort_by_key(|record| record.change);
        all
    }

    /// Writes a record, which counts after [`Self::commit`]: until then the one it replaces does. `None`: there is
    /// no room.
    pub fn prepare(&mut self, key: Key, parts: &[&[u8]]) -> Option<Change> {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        if len > MAX_LEN {
            return None;
        }
        let entry = match self.index.get(&key) {
            Some(place) => place.entry,
            None => self.new_entry()?,
        };
        let units = units(len);
        let Some(start) = self.heap.take(units) else {
            self.give_entry(key, entry);
            return None;
        };
        self.high = self.high.max((start + units) as usize);
        let number = self.changes + 1;
        let place = Place {
            entry,
            start,
            units,
        };
        let end = at(start) + units as usize * UNIT;
        if self.memory.grow(end).is_err() || self.write(place, key, number, len, parts).is_none() {
            self.heap.give(start, units);
            self.give_entry(key, entry);
            return None;
        }
        self.changes = number;
        Some(Change {
            key,
            entry,
            word: USED | (number & CHANGE_MASK) << CHANGE_SHIFT | u64::from(start),
            number,
            place: Some(place),
        })
    }

    fn write(
        &self,
        place: Place,
        key: Key,
        number: u64,
        len: usize,
        parts: &[&[u8]],
    ) -> Option<()> {
        let header = self.memory.words(at(place.start), HEADER_WORDS)?;
        let class = u64::from(key.class) << 32;
        let values = [number, len as u64 | class, key.number, key.part];
        for (word, value) in header.iter().zip(values) {
            word.store(value, Ordering::Release);
        }
        let first = at(place.start) + HEADER_WORDS * 8;
        let mut words = self.memory.words(first, len.div_ceil(8))?.iter();
        let (mut word, mut filled) = ([0u8; 8], 0);
        for part in parts {
            let mut part = *part;
            if filled == 0 {
                let (whole, rest) = part.as_chunks_of_8();
                for (from, to) in whole.zip(words.by_ref()) {
                    to.store(from, Ordering::Relaxed);
                }
                part = rest;
            }
            for byte in part {
                if let Some(place) = word.get_mut(filled) {
                    *place = *byte;
                }
                filled += 1;
                if filled == 8 {
                    words
                        .next()?
                        .store(u64::from_le_bytes(word), Ordering::Relaxed);
                    (word, filled) = ([0; 8], 0);
                }
            }
        }
        if filled != 0 {
            words
                .next()?
                .store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        Some(())
    }

    /// What removes an object with all its parts. `None`: it has no record.
    pub fn prepare_removal(&mut self, class: u8, number: u64) -> Option<Change> {
        let key = Key {
            class,
            number,
            part: 0,
        };
        let entry = self.index.get(&key)?.entry;
        self.changes += 1;
        Some(Change {
            key,
            entry,
            word: (self.changes & CHANGE_MASK) << CHANGE_SHIFT,
            number: self.changes,
            place: None,
        })
    }

    /// Makes a change count.
    pub fn commit(&mut self, change: Change) {
        let Some(word) = self.entry(change.entry) else {
            return;
        };
        word.store(change.word, Ordering::Release);
        let before = match change.place {
            Some(place) => self.index.insert(change.key, place),
            None => {
                self.free.push(change.entry);
                let removed = self.index.remove(&change.key);
                self.remove_parts(change.key.class, change.key.number);
                removed
            }
        };
        if let Some(before) = before {
            self.heap.give(before.start, before.units);
        }
    }

    /// Writes a record at once. `false`: there is no room.
    pub fn put(&mut self, key: Key, parts: &[&[u8]]) -> bool {
        let change = self.prepare(key, parts);
        let there = change.is_some();
        if let Some(change) = change {
            self.commit(change);
        }
        there
    }

    /// Removes an object with all its parts at once.
    pub fn remove(&mut self, class: u8, number: u64) {
        if let Some(change) = self.prepare_removal(class, number) {
            self.commit(change);
        }
    }

    /// Removes one part of an object.
    pub fn remove_part(&mut self, key: Key) {
        self.remove_one(key);
    }

    /// Whether there is such a record.
    pub fn has(&self, key: Key) -> bool {
        self.index.contains_key(&key)
    }

    /// Removes all records whose names `which` picks.
    pub fn remove_all(&mut self, which: impl Fn(Key) -> bool) {
        let gone: Vec<Key> = self
            .index
            .keys()
            .copied()
            .filter(|key| which(*key))
            .collect();
        for key in gone {
            self.remove_one(key);
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        let entries = self.memory.words(ENTRY_WORDS, self.end as usize);
        // From the end, so that a part of it is what is left if this process dies here.
        for word in entries.unwrap_or_default().iter().rev() {
            word.store(0, Ordering::Release);
        }
        if self.high * UNIT > LARGE {
            self.memory.punch(HEAP);
        }
        *self = Self::new(self.memory.clone());
    }

    fn remove_parts(&mut self, class: u8, number: u64) {
        let key = |part| Key {
            class,
            number,
            part,
        };
        let parts = self.index.range(key(0)..=key(u64::MAX));
        let parts: Vec<Key> = parts.map(|(key, _)| *key).collect();
        for part in parts {
            self.remove_one(part);
        }
    }

    fn remove_one(&mut self, key: Key) {
        let Some(place) = self.index.remove(&key) else {
            return;
        };
        self.changes += 1;
        if let Some(word) = self.entry(place.entry) {
            let free = (self.changes & CHANGE_MASK) << CHANGE_SHIFT;
            word.store(free, Ordering::Release);
        }
        self.free.push(place.entry);
        self.heap.give(place.start, place.units);
    }

    fn new_entry(&mut self) -> Option<u32> {
        if let Some(entry) = self.free.pop() {
            return Some(entry);
        }
        if self.end as usize >= ENTRIES {
            return None;
        }
        self.end += 1;
        let entry = self.end - 1;
        // Those before the end are never 0 again.
        let free = ((self.changes + 1) & CHANGE_MASK) << CHANGE_SHIFT;
        self.entry(entry)?.store(free, Ordering::Release);
        Some(entry)
    }

    fn give_entry(&mut self, key: Key, entry: u32) {
        if !self.index.contains_key(&key) {
            self.free.push(entry);
        }
    }

    fn entry(&self, number: u32) -> Option<&AtomicU64> {
        self.memory.word(ENTRY_WORDS + number as usize * 8)
    }
}

trait Words {
    fn as_chunks_of_8(&self) -> (impl Iterator<Item = u64>, &[u8]);
}

impl Words for [u8] {
    fn as_chunks_of_8(&self) -> (impl Iterator<Item = u64>, &[u8]) {
        let chunks = self.chunks_exact(8);
        let rest = chunks.remainder();
        let words = chunks.map(|chunk| chunk.try_into().map_or(0, u64::from_le_bytes));
        (words, rest)
    }
}
