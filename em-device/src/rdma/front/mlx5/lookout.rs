//! Which mapped doorbells are looked at when.
//!
//! A place in a doorbell page holds one doorbell: of several queues that ring through it, the last is seen.
//! The others are found by their doorbell records: those that rang lately in every round, all others some at
//! a time, so that a round costs the same however many there are. After a sleep a round looks at more.
//!
//! When all were looked at in vain, what rings next leaves something in a page: from then on glances at the pages
//! are enough, which the worker takes in its sleep, without taking anything.

use super::command::{Command, opcode as op};
use super::doorbells::Doorbells;
use super::mapped::MappedPages;
use crate::worker::Watch;
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Numbers that are looked at in every round, of each kind.
const LATELY: usize = 16;
/// Of all others, as many in every such round.
const SOME: usize = 8;
const EVERY: u32 = 8;
/// And in a round after a sleep.
const MANY: usize = 256;
/// The shortest and the longest sleep, as log₂ of microseconds: from the one to the other it doubles with each
/// look in vain.
const SHORTEST: u32 = 7;
const LONGEST: u32 = 13;

/// Numbers of one kind.
#[derive(Debug, Default)]
pub(super) struct Rota {
    numbers: Vec<u32>,
    places: HashMap<u32, usize>,
    next: usize,
    lately: VecDeque<u32>,
}

impl Rota {
    fn add(&mut self, number: u32) {
        if let Entry::Vacant(place) = self.places.entry(number) {
            place.insert(self.numbers.len());
            self.numbers.push(number);
        }
    }

    fn remove(&mut self, number: u32) {
        self.lately.retain(|n| *n != number);
        let place = self.places.remove(&number);
        let Some(place) = place.filter(|place| *place < self.numbers.len()) else {
            return;
        };
        self.numbers.swap_remove(place);
        if let Some(moved) = self.numbers.get(place) {
            self.places.insert(*moved, place);
        }
    }

    /// It rang: it is looked at in the next rounds, instead of the one that began to be so first.
    pub(super) fn rang(&mut self, number: u32) {
        if self.lately.contains(&number) || !self.places.contains_key(&number) {
            return;
        }
        if self.lately.len() >= LATELY {
            self.lately.pop_front();
        }
        self.lately.push_back(number);
    }

    /// Looks at those of this round. `look` answers whether it found something, and so does this.
    fn round(&mut self, count: usize, mut look: impl FnMut(u32) -> bool) -> bool {
        let (len, first) = (self.numbers.len(), self.next);
        let count = count.min(len);
        self.next = if len == 0 { 0 } else { (first + count) % len };
        let some = (first..first + count).filter_map(|n| self.numbers.get(n % len));
        let mut found = SmallVec::<[u32; LATELY]>::new();
        let mut any = false;
        for &number in self.lately.iter().chain(some) {
            if look(number) {
                any = true;
                if found.len() < LATELY {
                    found.push(number);
                }
            }
        }
        for number in found {
            self.rang(number);
        }
        any
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lookout {
    pages: Arc<MappedPages>,
    uars: Rota,
    /// Send queues of any kind.
    pub(super) sends: Rota,
    pub(super) cqs: Rota,
    /// Whether the next round is the first after a sleep.
    slept: bool,
    rounds: u32,
    /// Sleeps since something was found.
    in_vain: u32,
    /// Since when there is nothing.
    quiet: Option<Instant>,
}

impl Lookout {
    pub(super) fn new(pages: Arc<MappedPages>) -> Self {
        Self {
            pages,
            uars: Rota::default(),
            sends: Rota::default(),
            cqs: Rota::default(),
            slept: false,
            rounds: 0,
            in_vain: 0,
            quiet: None,
        }
    }

    /// The driver's objects are gone.
    pub(super) fn clear(&mut self) {
        self.pages.close_all();
        *self = Self::new(self.pages.clone());
    }

    /// A command succeeded; `made`: the number in its output. What waits in a page that a former process gave out
    /// stays there (`again`).
    pub(super) fn follow(&mut self, command: &Command, made: u32, again: bool) {
        let index = command.index();
        match command.opcode {
            op::CREATE_QP | op::CREATE_SQ => self.sends.add(made),
            op::DESTROY_QP | op::DESTROY_SQ => self.sends.remove(index),
            op::CREATE_CQ => self.cqs.add(made),
            op::DESTROY_CQ => self.cqs.remove(index),
            op::ALLOC_UAR => {
                if !again {
                    self.pages.clear(made);
                }
                self.pages.open(made);
                self.uars.add(made);
            }
            op::DEALLOC_UAR => {
                self.pages.close(index);
                self.uars.remove(index);
            }
            _ => return,
        }
        self.in_vain = 0;
        self.quiet = None;
    }

    /// Takes doorbells from the pages.
    pub(super) fn take(&mut self, doorbells: &Doorbells) {
        let (pages, count) = (&self.pages, self.some());
        self.uars.round(count, |uar| pages.take(uar, doorbells));
    }

    /// Looks at the records of send queues; `look` answers whether there was something new.
    pub(super) fn look_at_sends(&mut self, look: impl FnMut(u32) -> bool) -> bool {
        self.sends.round(self.some(), look)
    }

    /// The same with completion queues.
    pub(super) fn look_at_cqs(&mut self, look: impl FnMut(u32) -> bool) -> bool {
        self.cqs.round(self.some(), look)
    }

    /// A round is over.
    pub(super) fn came_round(&mut self, worked: bool) {
        self.rounds = self.rounds.wrapping_add(1);
        let slept = std::mem::take(&mut self.slept);
        if worked {
            self.in_vain = 0;
            self.quiet = None;
        } else if slept {
            self.in_vain = self.in_vain.saturating_add(1);
            self.quiet.get_or_insert_with(Instant::now);
        }
    }

    /// Whether all had their turn since something was found.
    fn is_settled(&self) -> bool {
        let all = [&self.uars, &self.sends, &self.cqs];
        let most = all.map(|rota| rota.numbers.len()).into_iter().max();
        self.in_vain as usize * MANY >= most.unwrap_or(0).max(1)
    }

    /// What the worker glances at in its sleep, when that is enough.
    pub(super) fn watch(&self) -> Option<Watch> {
        let since = self.quiet.filter(|_| self.is_settled())?;
        let on = self.pages.clone();
        (!self.uars.numbers.is_empty()).then_some(Watch { on, since })
    }

    /// Before sleep: whether there is a doorbell already where there were some lately.
    pub(super) fn is_rung(&self) -> bool {
        self.uars.lately.iter().any(|uar| self.pages.is_rung(*uar))
    }

    /// The data path slept, or meant to.
    pub(super) fn woke(&mut self) {
        self.slept = true;
    }

    /// How long it may sleep, when the driver has doorbells that glances do not find.
    pub(super) fn patience(&self) -> Option<Duration> {
        let log = (SHORTEST + self.in_vain.min(LONGEST)).min(LONGEST);
        let blind = !self.uars.numbers.is_empty() && self.watch().is_none();
        blind.then_some(Duration::from_micros(1 << log))
    }

    /// How many are looked at in this round beside those that rang lately.
    fn some(&self) -> usize {
        match (self.slept, self.rounds % EVERY) {
            (true, _) => MANY,
            (false, 0) => SOME,
            (false, _) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(rota: &mut Rota, count: usize) -> Vec<u32> {
        let mut seen = Vec::new();
        rota.round(count, |number| {
            seen.push(number);
            false
        });
        seen
    }

    #[test]
    fn all_numbers_have_their_turn_and_one_that_is_gone_has_none() {
        let mut rota = Rota::default();
        (10..15).for_each(|number| rota.add(number));
        let rounds: Vec<_> = (0..3).map(|_| seen(&mut rota, 2)).collect();
        assert_eq!(rounds, [vec![10, 11], vec![12, 13], vec![14, 10]]);
        rota.remove(11);
        rota.remove(99);
        rota.add(12);
        let mut all = seen(&mut rota, 100);
        all.sort_unstable();
        assert_eq!(all, [10, 12, 13, 14]);
        (10..15).for_each(|number| rota.remove(number));
        assert!(seen(&mut rota, 2).is_empty());
    }

    #[test]
    fn what_rang_lately_is_in_every_round_and_does_not_crowd_out_the_others() {
        let mut rota = Rota::default();
        (0..100).for_each(|number| rota.add(number));
        rota.rang(7);
        rota.round(1, |number| number == 0);
        assert_eq!(seen(&mut rota, 1), [7, 0, 1]);
        assert_eq!(seen(&mut rota, 1), [7, 0, 2]);
        (20..19 + LATELY as u32).for_each(|number| rota.rang(number));
        let now = seen(&mut rota, 1);
        assert_eq!((now.len(), now[0]), (LATELY + 1, 0), "7 was the first");
        rota.remove(0);
        rota.rang(200);
        assert!(!seen(&mut rota, 1).contains(&0) && !seen(&mut rota, 1).contains(&200));
    }

    fn sleep_in_vain(lookout: &mut Lookout) {
        lookout.woke();
        lookout.came_round(false);
    }

    #[test]
    fn glances_are_enough_when_all_queues_had_their_turn() {
        let (pages, _) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let mut lookout = Lookout::new(Arc::new(pages));
        assert_eq!(lookout.patience(), None, "no driver");
        lookout.uars.add(8);
        (0..3 * MANY as u32).for_each(|number| lookout.sends.add(number));
        let shortest = lookout.patience().unwrap();
        lookout.came_round(false);
        assert_eq!(lookout.patience(), Some(shortest), "no sleep yet");
        for _ in 0..2 {
            sleep_in_vain(&mut lookout);
            assert!(lookout.patience().unwrap() > shortest);
            assert!(lookout.watch().is_none());
        }
        sleep_in_vain(&mut lookout);
        assert_eq!(lookout.patience(), None);
        assert!(lookout.watch().is_some());
        lookout.came_round(true);
        assert_eq!(lookout.patience(), Some(shortest));
        assert!(lookout.watch().is_none());
    }
}
