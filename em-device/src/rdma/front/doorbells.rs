//! Doorbells on their way from the register side to the data path: flags, not a queue, so a driver
//! that rings without end needs no memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Queue pairs and send queues have numbers below this, and so do completion queues.
pub(crate) const MAX_NUMBER: u32 = 1 << 16;
/// Event queues have numbers below this.
pub(crate) const MAX_EQ: u32 = 64;

/// A new consumer index is there.
const NEWS: u32 = 1 << 31;
/// The event queue is to be armed.
const ARM: u32 = 1 << 30;
/// The consumer index.
const INDEX: u32 = (1 << 24) - 1;

/// A set of numbers below [`MAX_NUMBER`], with a summary of which words are not empty.
#[derive(Debug)]
struct Set {
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
}

impl Set {
    fn new() -> Self {
        let zeroes = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self {
            words: zeroes(MAX_NUMBER as usize / 64),
            summary: zeroes(MAX_NUMBER as usize / 64 / 64),
        }
    }

    /// The word comes first, so that whoever takes the summary's bit finds it.
    fn add(&self, number: u32) {
        let index = number as usize / 64;
        let (Some(word), Some(summary)) = (self.words.get(index), self.summary.get(index / 64))
        else {
            return;
        };
        word.fetch_or(1 << (number % 64), Ordering::AcqRel);
        summary.fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    fn drain(&self, mut each: impl FnMut(u32)) {
        for (n, summary) in (0u32..).zip(&self.summary) {
            for word in ones(take(summary)) {
                let index = n * 64 + word;
                let Some(word) = self.words.get(index as usize) else {
                    continue;
                };
                for bit in ones(take(word)) {
                    each(index * 64 + bit);
                }
            }
        }
    }
}

fn take(word: &AtomicU64) -> u64 {
    // A swap of a shared cache line costs even when there is nothing.
    match word.load(Ordering::Relaxed) {
        0 => 0,
        _ => word.swap(0, Ordering::AcqRel),
    }
}

/// The positions of the bits that are set.
pub(super) fn ones(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}

/// See the module. Any thread rings, one takes.
#[derive(Debug)]
pub struct Doorbells {
    sends: Set,
    receives: Set,
    cqs: Set,
    eqs: Box<[AtomicU32]>,
    eq_summary: AtomicU64,
}

impl Default for Doorbells {
    fn default() -> Self {
        Self {
            sends: Set::new(),
            receives: Set::new(),
            cqs: Set::new(),
            eqs: (0..MAX_EQ).map(|_| AtomicU32::new(0)).collect(),
            eq_summary: AtomicU64::new(0),
        }
    }
}

impl Doorbells {
    /// The send queue of a queue pair was rung. Numbers that cannot be are ignored.
    pub fn ring_send(&self, number: u32) {
        self.sends.add(number);
    }

    /// The receive queue of a queue pair was rung. Numbers that cannot be are ignored.
    pub fn ring_receive(&self, number: u32) {
        self.receives.add(number);
    }

    /// A completion queue is to look at its arm word. Numbers that cannot be are ignored.
    pub fn ring_cq(&self, number: u32) {
        self.cqs.add(number);
    }

    /// An event queue's new consumer index (24 bits), and whether to arm it. An arm that nobody took
    /// yet stays.
    pub fn update_eq(&self, number: u32, index: u32, arm: bool) {
        let Some(eq) = self.eqs.get(number as usize) else {
            return;
        };
        let new = NEWS | index & INDEX | if arm { ARM } else { 0 };
        let merge = |old| Some(new | old & ARM);
        // The closure always answers, so this cannot fail.
        let _ = eq.fetch_update(Ordering::AcqRel, Ordering::Relaxed, merge);
        self.eq_summary.fetch_or(1 << number, Ordering::AcqRel);
    }

    /// Takes the send queues that were rung.
    pub(crate) fn take_sends(&self, each: impl FnMut(u32)) {
        self.sends.drain(each);
    }

    /// Takes the receive queues that were rung.
    pub(crate) fn take_receives(&self, each: impl FnMut(u32)) {
        self.receives.drain(each);
    }

    /// Takes the completion queues that were rung.
    pub(crate) fn take_cqs(&self, each: impl FnMut(u32)) {
        self.cqs.drain(each);
    }

    /// Takes the event queues that were rung: number, consumer index, whether to arm.
    pub(crate) fn take_eqs(&self, mut each: impl FnMut(u32, u32, bool)) {
        for number in ones(take(&self.eq_summary)) {
            let Some(eq) = self.eqs.get(number as usize) else {
                continue;
            };
            let word = eq.swap(0, Ordering::AcqRel);
            if word & NEWS != 0 {
                each(number, word & INDEX, word & ARM != 0);
            }
        }
    }

    /// Whether something may be there to take.
    pub fn is_rung(&self) -> bool {
        let sets = [&self.sends, &self.receives, &self.cqs].into_iter();
        self.eq_summary.load(Ordering::Acquire) != 0
            || sets
                .flat_map(|set| &set.summary)
                .any(|word| word.load(Ordering::Acquire) != 0)
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.take_sends(|_| ());
        self.take_receives(|_| ());
        self.take_cqs(|_| ());
        self.take_eqs(|_, _, _| ());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn each_rung_number_comes_out_once() {
        let bells = Doorbells::default();
        for number in [0, 63, 64, 65535, 65535, 65536, u32::MAX] {
            bells.ring_send(number);
        }
        assert!(bells.is_rung());
        let mut taken = Vec::new();
        bells.take_sends(|number| taken.push(number));
        assert_eq!(taken, [0, 63, 64, 65535]);
        bells.take_sends(|_| panic!());
        assert!(!bells.is_rung());
    }

    #[test]
    fn an_update_without_arm_keeps_an_arm_that_nobody_took() {
        let bells = Doorbells::default();
        bells.update_eq(3, 10, true);
        bells.update_eq(3, 0x100_000c, false);
        bells.update_eq(99, 1, true);
        let mut taken = Vec::new();
        bells.take_eqs(|eq, index, arm| taken.push((eq, index, arm)));
        assert_eq!(taken, [(3, 12, true)]);
        bells.update_eq(3, 13, false);
        bells.take_eqs(|eq, index, arm| taken.push((eq, index, arm)));
        assert_eq!(taken[1..], [(3, 13, false)]);
    }

    #[test]
    fn no_ring_is_lost_between_threads() {
        let bells = Arc::new(Doorbells::default());
        let ringer = {
            let bells = bells.clone();
            std::thread::spawn(move || (0..MAX_NUMBER).for_each(|n| bells.ring_cq(n)))
        };
        let mut seen = 0;
        while seen < MAX_NUMBER {
            let done = ringer.is_finished();
            let before = seen;
            bells.take_cqs(|_| seen += 1);
            assert!(!done || seen == MAX_NUMBER || seen > before);
        }
        ringer.join().unwrap();
        assert_eq!(seen, MAX_NUMBER);
    }
}
