//! An immutable state of the table, cheap to derive the next one from.
//!
//! Ranges are kept sorted in chunks that snapshots share: a change copies one chunk and the list of
//! chunks, so the cost of a change hardly grows with the table. Tables of usual size are one chunk,
//! and a lookup is then one bucket and one range.

use std::cell::Cell;
use std::sync::Arc;

use crate::bucket::{BucketIndex, SEVERAL};
use crate::entry::{Direct, Entry};

/// Ranges in a chunk at most: as many as should be found by one bucket, no more than one change may
/// copy. Small in unit tests, so that they cross chunks often.
const CHUNK_MAX: usize = if cfg!(test) { 4 } else { 512 };

/// Buckets in a chunk: memory against the chance that ranges share one.
const BUCKETS: usize = 4 * CHUNK_MAX;

/// Sorted disjoint ranges, never empty. Arrays of fixed size, because a lookup then loads no
/// pointers and no lengths.
#[derive(Debug)]
struct Chunk {
    index: BucketIndex<BUCKETS>,
    /// The translations of `entries`, position by position; behind them, ranges that grant nothing.
    direct: [Direct; CHUNK_MAX],
    entries: Box<[Entry]>,
}

impl Chunk {
    fn new(entries: Vec<Entry>) -> Arc<Chunk> {
        let last = entries.last().map_or(0, Entry::last);
        let index = BucketIndex::new(entries.iter().map(Entry::start), last);
        let direct = std::array::from_fn(|position| {
            entries
                .get(position)
                .map_or(Direct::NOTHING, |entry| entry.direct().clone())
        });
        Arc::new(Chunk {
            index,
            direct,
            entries: entries.into(),
        })
    }

    fn start(&self) -> u64 {
        self.entries.first().map_or(0, Entry::start)
    }

    /// The only range that may contain `addr`.
    #[inline]
    fn candidate(&self, addr: u64, hint: &Cell<usize>) -> Option<&Direct> {
        // `SEVERAL` is no position: one comparison bounds the index and finds the rare case.
        match self.direct.get(self.index.position(addr)) {
            Some(range) => Some(range),
            None => self.direct.get(self.search(addr, hint)),
        }
    }

    /// Where a bucket has several ranges, because the layout is sparse or odd, accesses still come
    /// in clusters: try the last range found before searching.
    #[inline(never)]
    fn search(&self, addr: u64, hint: &Cell<usize>) -> usize {
        if self
            .entries
            .get(hint.get())
            .is_some_and(|entry| entry.contains(addr))
        {
            return hint.get();
        }
        let after = self.entries.partition_point(|entry| entry.start() <= addr);
        let position = after.saturating_sub(1);
        hint.set(position);
        position
    }

    fn find(&self, addr: u64, hint: &Cell<usize>) -> Option<&Entry> {
        let position = match self.index.position(addr) {
            position if position < CHUNK_MAX => position,
            _ => self.search(addr, hint),
        };
        self.entries
            .get(position)
            .filter(|entry| entry.contains(addr))
    }
}

const _: () = assert!(CHUNK_MAX <= SEVERAL as usize);

/// One published state.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// The chunk, when there is one.
    only: Option<Arc<Chunk>>,
    /// First address of each chunk.
    starts: Box<[u64]>,
    chunks: Box<[Arc<Chunk>]>,
    len: usize,
    version: u64,
}

impl Snapshot {
    pub(crate) fn empty() -> Snapshot {
        Snapshot::from_chunks(Vec::new(), 0, 0)
    }

    fn from_chunks(chunks: Vec<Arc<Chunk>>, len: usize, version: u64) -> Snapshot {
        let starts = chunks.iter().map(|chunk| chunk.start()).collect();
        let only = match chunks.as_slice() {
            [only] => Some(only.clone()),
            _ => None,
        };
        Snapshot {
            only,
            starts,
            chunks: chunks.into(),
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

    /// The range that contains `addr`. `hint` remembers a position between
    /// calls; any value is right.
    #[inline]
    pub(crate) fn find(&self, addr: u64, hint: &Cell<usize>) -> Option<&Entry> {
        self.chunk(addr)?.find(addr, hint)
    }

    /// The only range that may contain `addr`: the caller checks that it does.
    #[inline]
    pub(crate) fn candidate(&self, addr: u64, hint: &Cell<usize>) -> Option<&Direct> {
        self.chunk(addr)?.candidate(addr, hint)
    }

    #[inline]
    fn chunk(&self, addr: u64) -> Option<&Chunk> {
        match &self.only {
            Some(only) => Some(only),
            None => self.chunk_of(addr),
        }
    }

    #[inline(never)]
    fn chunk_of(&self, addr: u64) -> Option<&Chunk> {
        let after = self.starts.partition_point(|&start| start <= addr);
        self.chunks.get(after.checked_sub(1)?).map(Arc::as_ref)
    }

    /// A range that shares a byte with `[start, last]`; the lowest one.
    pub(crate) fn overlapping(&self, start: u64, last: u64) -> Option<&Entry> {
        if let Some(entry) = self.find(start, &Cell::new(0)) {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::entry::{Backing, Generation};
    use crate::perm::Perm;

    fn entry(start: u64, len: u64) -> Entry {
        Entry::new(start, len, Perm::RW, Generation(start), Backing::Message)
    }

    /// Chunks are ordered, not empty, not too long, and the count is right.
    fn check_shape(snapshot: &Snapshot) {
        let starts: Vec<u64> = snapshot.iter().map(Entry::start).collect();
        assert!(starts.is_sorted_by(|a, b| a < b));
        assert_eq!(starts.len(), snapshot.len());
        assert!(
            snapshot
                .chunks
                .iter()
                .all(|c| (1..=CHUNK_MAX).contains(&c.entries.len()))
        );
    }

    #[test]
    fn any_order_of_changes_finds_what_a_map_finds() {
        // Deterministic and dense enough that chunks fill, split, empty and join.
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        let mut snapshot = Snapshot::empty();
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        let hint = Cell::new(0);
        let mut most_chunks = 0;
        for _ in 0..6000 {
            let start = next(400);
            let last = start + next(4);
            let overlap = model
                .iter()
                .map(|(s, l)| (*s, *l))
                .find(|(s, l)| *s <= last && start <= *l);
            assert_eq!(
                snapshot
                    .overlapping(start, last)
                    .map(|e| (e.start(), e.last())),
                overlap
            );
            if next(5) < 3 {
                if overlap.is_none() {
                    snapshot = snapshot.with(entry(start, last - start + 1));
                    model.insert(start, last);
                }
            } else {
                let last = start + next(60);
                let (changed, removed) = snapshot.without(start, last);
                let before = model.len();
                model.retain(|s, l| *s < start || *l > last);
                assert_eq!(removed.len(), before - model.len());
                assert_eq!(changed.version(), snapshot.version() + 1);
                snapshot = changed;
            }
            check_shape(&snapshot);
            most_chunks = most_chunks.max(snapshot.chunks.len());
            let addr = next(410);
            let wanted = model
                .iter()
                .find(|(s, l)| (**s..=**l).contains(&addr))
                .map(|(s, _)| *s);
            assert_eq!(snapshot.find(addr, &hint).map(Entry::start), wanted);
        }
        assert!(most_chunks > 8, "the test should have crossed chunks");
    }

    #[test]
    fn ascending_ranges_fill_chunks() {
        let mut snapshot = Snapshot::empty();
        for page in 0..(8 * CHUNK_MAX as u64) {
            snapshot = snapshot.with(entry(page * 4096, 4096));
        }
        assert_eq!(snapshot.chunks.len(), 8);
    }

    #[test]
    fn untouched_chunks_are_shared_between_states() {
        let mut snapshot = Snapshot::empty();
        for page in 0..(2 * CHUNK_MAX as u64) {
            snapshot = snapshot.with(entry(page * 4096, 4096));
        }
        let (changed, _) = snapshot.without(0, 4095);
        assert!(Arc::ptr_eq(&changed.chunks[1], &snapshot.chunks[1]));
    }
}
