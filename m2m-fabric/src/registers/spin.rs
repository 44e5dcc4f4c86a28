//! When waiting by spinning pays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest spin. A sleep and a wake-up together cost about as much, so a spin at most doubles the
/// cost of a wait.
const LONGEST: Duration = Duration::from_micros(50);
const BEST_SCORE: u8 = 4;
/// CPUs from which on a spin can pay. Both sides of an access and the VMM that waits for it want to run:
/// on two CPUs the one that spins keeps another from running, and an access takes twice as long.
const FEWEST_CPUS: usize = 3;
/// While spinning does not pay, one wait in this many tries it again.
const PROBE_EVERY: u8 = 4;

static WITH_FEW_CPUS: AtomicBool = AtomicBool::new(false);

/// Lets connections that this process makes from now on spin however few CPUs there are: for a host whose CPUs have
/// nothing else to do, and to measure what an access costs while both sides poll.
pub fn poll_with_few_cpus(poll: bool) {
    WITH_FEW_CPUS.store(poll, Ordering::Relaxed);
}

/// Learns from the last waits whether the next one is likely to be short.
#[derive(Debug)]
pub(crate) struct Spin {
    score: u8,
    skipped: u8,
    possible: bool,
}

impl Spin {
    pub(crate) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let least = match WITH_FEW_CPUS.load(Ordering::Relaxed) {
            true => FEWEST_CPUS,
            false => 1,
        };
        Self::with_cpus(cpus.max(least))
    }

    fn with_cpus(cpus: usize) -> Self {
        Self {
            score: BEST_SCORE,
            skipped: 0,
            possible: cpus >= FEWEST_CPUS,
        }
    }

    /// Calls `ready` until it has something or spinning stops to pay.
    pub(crate) fn until<T>(&mut self, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
        if let Some(value) = ready() {
            self.learn(true);
            return Some(value);
        }
        if !self.worth_trying() {
            return None;
        }
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                std::hint::spin_loop();
                if let Some(value) = ready() {
                    self.learn(true);
                    return Some(value);
                }
            }
            if start.elapsed() > LONGEST {
                self.learn(false);
                return None;
            }
        }
    }

    fn worth_trying(&mut self) -> bool {
        if !self.possible {
            return false;
        }
        if self.score > 0 {
            return true;
        }
        self.skipped = (self.skipped + 1) % PROBE_EVERY;
        self.skipped == 0
    }

    fn learn(&mut self, paid: bool) {
        self.score = if paid {
            // One success after a drought is reason enough to go on trying for a while.
            BEST_SCORE.min(self.score + 2)
        } else {
            self.score.saturating_sub(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits in vain `waits` times; how many of them spun.
    fn spins(spin: &mut Spin, waits: u32) -> u32 {
        (0..waits)
            .filter(|_| {
                let mut calls = 0;
                spin.until(|| {
                    calls += 1;
                    None::<()>
                });
                calls > 1
            })
            .count() as u32
    }

    #[test]
    fn spinning_in_vain_stops_but_for_probes() {
        let mut spin = Spin::with_cpus(FEWEST_CPUS);
        assert_eq!(spins(&mut spin, 4), 4);
        assert_eq!(spins(&mut spin, 160), 40);
    }

    #[test]
    fn success_starts_it_again() {
        let mut spin = Spin::with_cpus(FEWEST_CPUS);
        spins(&mut spin, 10);
        assert_eq!(spin.until(|| Some(1)), Some(1));
        assert_eq!(spins(&mut spin, 2), 2);
    }

    #[test]
    fn too_few_cpus_never_spin() {
        for cpus in 1..FEWEST_CPUS {
            assert_eq!(spins(&mut Spin::with_cpus(cpus), 100), 0);
        }
    }

    #[test]
    fn a_process_may_insist() {
        poll_with_few_cpus(true);
        assert_eq!(spins(&mut Spin::new(), 4), 4);
        poll_with_few_cpus(false);
    }
}
