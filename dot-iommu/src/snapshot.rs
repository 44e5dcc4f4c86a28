//! An immutable state of the table, cheap to derive the next one from.
//!
//! Ranges are kept sorted in chunks that snapshots share: a change copies one chunk and the list of
//! chunks, so filling the table costs O(n · √n), not O(n²). Tables of usual size are one chunk, and
//! a lookup is then one bucket and one entry.

use std::sync::Arc;

use crate::bucket::BucketIndex;
use crate::entry::Entry;

/// Ranges in a chunk at most.
const CHUNK_MAX: usize = 1024;

/// Sorted disjoint ranges, never empty.
#[derive(Debug)]
struct Chunk {
    entries: Box<[Entry]>,
    index: BucketIndex,
}

impl Chunk {
    fn new(entries: Vec<Entry>) -> Arc<Chunk> {
        let index = BucketIndex::new(entries.iter().map(Entry::start));
        Arc::new(Chunk {
            entries: entries.into(),
            index,
        })
    }

    fn start(&self) -> u64 {
        self.entries.first().map_or(0, Entry::start)
    }

    #[inline]
    fn find(&self, addr: u64) -> Option<&Entry> {
        let (low, high) = self.index.candidates(addr);
        if low == high {
            self.entries.get(low)
        } else {
            self.search(low, high, addr)
        }
    }

    /// The last of the entries `low..=high` that begins at or below `addr`.
    fn search(&self, low: usize, high: usize, addr: u64) -> Option<&Entry> {
        let candidates = self.entries.get(low..=high)?;
        let after = candidates.partition_point(|entry| entry.start() <= addr);
        candidates.get(after.checked_sub(1)?)
    }
}

/// One published state.
#[derive(Debug)]
pub(crate) struct Snapshot {
    chunks: Box<[Arc<Chunk>]>,
    index: BucketIndex,
    len: usize,
    version: u64,
}

impl Snapshot {
    pub(crate) fn empty() -> Snapshot {
        Snapshot::from_chunks(Vec::new(), 0, 0)
    }

    fn from_chunks(chunks: Vec<Arc<Chunk>>, len: usize, version: u64) -> Snapshot {
        let index = BucketIndex::new(chunks.iter().map(|chunk| chunk.start()));
        Snapshot {
            chunks: chunks.into(),
            index,
            len,
            version,
        }
    }

    /// Ranges held.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Number of changes since the table was made.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks.iter().flat_map(|chunk| chunk.entries.iter())
    }

    /// The range that contains `addr`.
    #[inline]
    pub(crate) fn find(&self, addr: u64) -> Option<&Entry> {
        let chunk = match &*self.chunks {
            [only] => only,
            _ => self.chunk_of(addr)?,
        };
        chunk.find(addr).filter(|entry| entry.contains(addr))
    }

    fn chunk_of(&self, addr: u64) -> Option<&Arc<Chunk>> {
        let (low, high) = self.index.candidates(addr);
        let candidates = self.chunks.get(low..=high)?;
        let after = candidates.partition_point(|chunk| chunk.start() <= addr);
        candidates.get(after.saturating_sub(1))
    }

    /// A range that shares a byte with `[start, last]`; the lowest one.
    pub(crate) fn overlapping(&self, start: u64, last: u64) -> Option<&Entry> {
        if let Some(entry) = self.find(start) {
            return Some(entry);
        }
        let chunk = self.chunks.partition_point(|chunk| chunk.start() <= start);
        let here = chunk
            .checked_sub(1)
            .and_then(|chunk| self.chunks.get(chunk));
        let next_here = here.and_then(|chunk| {
            chunk.entries.get(
                chunk
                    .entries
                    .partition_point(|entry| entry.start() <= start),
            )
        });
        next_here
            .or_else(|| self.chunks.get(chunk)?.entries.first())
            .filter(|entry| entry.start() <= last)
    }

    /// The next state with `entry` added; the caller checked that nothing overlaps it.
    pub(crate) fn with(&self, entry: Entry) -> Snapshot {
        let mut chunks = self.chunks.to_vec();
        let after = chunks.partition_point(|chunk| chunk.start() <= entry.start());
        let position = after.saturating_sub(1);
        match chunks.get(position).map(|chunk| chunk.entries.to_vec()) {
            None => chunks.push(Chunk::new(vec![entry])),
            Some(mut entries) => {
                let at = entries.partition_point(|other| other.start() < entry.start());
                entries.insert(at, entry);
                if entries.len() > CHUNK_MAX {
                    // Ranges that arrive in ascending order leave full chunks behind.
                    let cut = if at + 1 == entries.len() {
                        at
                    } else {
                        entries.len() / 2
                    };
                    let tail = entries.split_off(cut);
                    chunks.insert(position + 1, Chunk::new(tail));
                }
                if let Some(slot) = chunks.get_mut(position) {
                    *slot = Chunk::new(entries);
                }
            }
        }
        Snapshot::from_chunks(chunks, self.len + 1, self.version + 1)
    }

    /// The next state without the ranges inside `[start, last]`, and what was removed.
    pub(crate) fn without(&self, start: u64, last: u64) -> (Snapshot, Vec<Entry>) {
        let mut chunks: Vec<Arc<Chunk>> = Vec::with_capacity(self.chunks.len());
        let mut removed = Vec::new();
        for chunk in &self.chunks {
            let low = chunk.entries.partition_point(|entry| entry.start() < start);
            let high = chunk.entries.partition_point(|entry| entry.last() <= last);
            if low >= high {
                chunks.push(chunk.clone());
                continue;
            }
            let mut entries = chunk.entries.to_vec();
            removed.extend(entries.drain(low..high));
            if entries.is_empty() {
                continue;
            }
            // Small neighbours are joined, so that holes do not leave a long list of tiny chunks.
            if let Some(before) = chunks.last() {
                if before.entries.len() + entries.len() <= CHUNK_MAX / 2 {
                    entries = [&before.entries, entries.as_slice()].concat();
                    chunks.pop();
                }
            }
            chunks.push(Chunk::new(entries));
        }
        let len = self.len - removed.len();
        (
            Snapshot::from_chunks(chunks, len, self.version + 1),
            removed,
        )
    }
}
