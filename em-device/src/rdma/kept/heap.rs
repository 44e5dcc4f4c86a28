//! Which parts of the records' memory are free.

use std::collections::{BTreeMap, BTreeSet};

/// Parts in units; the best fit is taken, neighbours are joined.
#[derive(Debug)]
pub(super) struct Heap {
    free: BTreeMap<u32, u32>,
    by_size: BTreeSet<(u32, u32)>,
}

impl Heap {
    /// Units `0..end`, all free.
    pub(super) fn new(end: u32) -> Self {
        let mut heap = Self {
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
        };
        heap.insert(0, end);
        heap
    }

    /// A part of `units`.
    pub(super) fn take(&mut self, units: u32) -> Option<u32> {
        let &(len, start) = self.by_size.range((units, 0)..).next()?;
        self.remove(start, len);
        self.insert(start + units, len - units);
        Some(start)
    }

    /// Takes the part that begins at `start`. `false`: not all of it is free.
    pub(super) fn take_at(&mut self, start: u32, units: u32) -> bool {
        let Some(end) = start.checked_add(units) else {
            return false;
        };
        let Some((&at, &len)) = self.free.range(..=start).next_back() else {
            return false;
        };
        if at + len < end || units == 0 {
            return false;
        }
        self.remove(at, len);
        self.insert(at, start - at);
        self.insert(end, at + len - end);
        true
    }

    /// Gives a part back.
    pub(super) fn give(&mut self, start: u32, units: u32) {
        let (mut start, mut units) = (start, units);
        if let Some((&before, &len)) = self.free.range(..start).next_back() {
            if before + len == start {
                self.remove(before, len);
                start = before;
                units += len;
            }
        }
        if let Some(&len) = self.free.get(&(start + units)) {
            self.remove(start + units, len);
            units += len;
        }
        self.insert(start, units);
    }

    fn insert(&mut self, start: u32, len: u32) {
        if len != 0 {
            self.free.insert(start, len);
            self.by_size.insert((len, start));
        }
    }

    fn remove(&mut self, start: u32, len: u32) {
        self.free.remove(&start);
        self.by_size.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_that_come_back_are_one_part() {
        let mut heap = Heap::new(10);
        let all: Vec<_> = (0..5).map(|_| heap.take(2).unwrap()).collect();
        assert_eq!((all, heap.take(1)), (vec![0, 2, 4, 6, 8], None));
        for start in [2, 6, 4] {
            heap.give(start, 2);
        }
        assert_eq!((heap.take(6), heap.take(1)), (Some(2), None));
    }

    #[test]
    fn a_part_that_is_taken_is_not_taken_again() {
        let mut heap = Heap::new(10);
        assert!(heap.take_at(3, 4));
        assert!(!heap.take_at(6, 1) && !heap.take_at(2, 2) && !heap.take_at(9, 2));
        assert!(!heap.take_at(u32::MAX, 2) && !heap.take_at(0, 0));
        assert!(heap.take_at(0, 3) && heap.take_at(7, 3));
        assert_eq!(heap.take(1), None);
    }

    proptest! {
        #[test]
        fn parts_never_overlap(steps in prop::collection::vec((0u32..20, any::<bool>()), 1..200)) {
            let mut heap = Heap::new(256);
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (units, back) in steps {
                if back && !taken.is_empty() {
                    let (start, len) = taken.swap_remove(units as usize % taken.len());
                    heap.give(start, len);
                } else if let Some(start) = heap.take(units + 1) {
                    let end = start + units + 1;
                    prop_assert!(end <= 256);
                    prop_assert!(taken.iter().all(|(s, l)| end <= *s || s + l <= start));
                    taken.push((start, units + 1));
                }
            }
            for (start, len) in taken {
                heap.give(start, len);
            }
            prop_assert_eq!(heap.take(256), Some(0));
        }
    }
}
