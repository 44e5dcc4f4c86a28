//! Which windows a VM's RDMA functions should have. Talks to nobody.

use std::collections::BTreeMap;

/// Guest addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First.
    pub start: u64,
    /// Bytes; the range ends at 2⁶⁴ at the latest.
    pub len: u64,
}

impl Range {
    /// `None` for a range that is empty, wraps around, or begins at 0, where no BAR lies that was placed.
    pub fn new(start: u64, len: u64) -> Option<Self> {
        let last = start.checked_add(len.checked_sub(1)?);
        (start != 0 && last.is_some()).then_some(Self { start, len })
    }

    fn overlaps(&self, other: &Self) -> bool {
        // Neither wraps around.
        self.start <= other.start + (other.len - 1) && other.start <= self.start + (self.len - 1)
    }
}

/// A window that is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) device: u32,
    pub(super) generation: u64,
    pub(super) range: Range,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Where the guest placed the memory of each function.
    wanted: BTreeMap<u32, Range>,
    given: BTreeMap<u32, Window>,
    /// Number of the last window.
    generation: u64,
}

impl Plan {
    /// The memory of a function is elsewhere: the window that is to be taken away first.
    pub(super) fn moved(&mut self, device: u32, range: Option<Range>) -> Option<Window> {
        match range {
            Some(range) => drop(self.wanted.insert(device, range)),
            None => drop(self.wanted.remove(&device)),
        }
        self.given.remove(&device)
    }

    /// Windows that can be given now: those that overlap with none that is given. Which of two devices at the same
    /// address answers is nobody's to know; the first one stays.
    pub(super) fn settle(&mut self) -> Vec<Window> {
        let mut new = Vec::new();
        for (&device, &range) in &self.wanted {
            let taken = |w: &Window| w.range.overlaps(&range);
            if self.given.contains_key(&device) || self.given.values().any(taken) {
                continue;
            }
            self.generation += 1;
            let window = Window {
                device,
                generation: self.generation,
                range,
            };
            self.given.insert(device, window);
            new.push(window);
        }
        new
    }

    /// All windows that are given.
    pub(super) fn given(&self) -> impl Iterator<Item = &Window> {
        self.given.values()
    }

    /// Whether a function's window is given.
    pub(super) fn is_given(&self, device: u32) -> bool {
        self.given.contains_key(&device)
    }

    /// Whether a function's memory is where another's is.
    pub(super) fn is_hidden(&self, device: u32) -> bool {
        self.wanted.contains_key(&device) && !self.given.contains_key(&device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(start: u64) -> Option<Range> {
        Range::new(start * MIB, MIB)
    }

    fn new(plan: &mut Plan) -> Vec<(u32, u64)> {
        let new = plan.settle().into_iter();
        new.map(|w| (w.device, w.range.start / MIB)).collect()
    }

    #[test]
    fn a_range_that_no_bar_has_is_none() {
        assert_eq!(Range::new(0, MIB), None);
        assert_eq!(Range::new(MIB, 0), None);
        assert_eq!(Range::new(u64::MAX - MIB + 2, MIB), None);
        assert!(Range::new(u64::MAX - MIB + 1, MIB).is_some());
    }

    #[test]
    fn a_window_goes_before_its_successor_comes_and_each_has_a_number_of_its_own() {
        let mut plan = Plan::default();
        assert_eq!(plan.moved(5, at(16)), None);
        assert_eq!(new(&mut plan), [(5, 16)]);
        assert_eq!(new(&mut plan), []);
        let old = plan.moved(5, at(32)).unwrap();
        assert_eq!((old.generation, old.range.start), (1, 16 * MIB));
        assert_eq!(new(&mut plan), [(5, 32)]);
        assert_eq!(plan.moved(5, None).unwrap().generation, 2);
        assert_eq!((new(&mut plan), plan.given().count()), (vec![], 0));
    }

    #[test]
    fn of_two_at_the_same_place_the_first_stays_until_it_goes() {
        let mut plan = Plan::default();
        plan.moved(5, at(16));
        assert_eq!(new(&mut plan), [(5, 16)]);
        plan.moved(4, Range::new(16 * MIB + MIB / 2, MIB));
        assert_eq!(new(&mut plan), []);
        assert!(plan.is_hidden(4) && !plan.is_hidden(5));
        plan.moved(5, at(17));
        assert_eq!(new(&mut plan), [(4, 16)], "17 is half taken now");
        plan.moved(5, at(18));
        assert_eq!(new(&mut plan), [(5, 18)]);
    }
}
