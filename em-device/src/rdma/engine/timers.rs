//! When queue pairs want to be looked at again.

use crate::rdma::verbs::QpNum;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Entries of queue pairs that are gone that are kept at least until they are due.
const STALE: usize = 64;

/// What a queue pair waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// An answer.
    Answer,
    /// The time to send again that the responder asked for.
    Pause,
}

/// One timer of a queue pair.
///
/// Its time moves with every answer, but the heap gets a new entry only when the old one is gone or
/// too late, so that a busy queue pair costs the heap one entry per timeout.
#[derive(Debug, Default)]
pub(super) struct Timer {
    /// When it is due.
    pub(super) due: Option<Instant>,
    /// The entry in the heap.
    armed: Option<Instant>,
}

/// All queue pairs' timers.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32, Kind)>>,
    /// Entries of queue pairs that are gone.
    stale: usize,
}

impl Timers {
    /// Sees to it that [`Self::expired`] finds `timer` in time.
    #[inline]
    pub(super) fn arm(&mut self, num: QpNum, kind: Kind, timer: &mut Timer) {
        let sooner = |due: &Instant| timer.armed.is_none_or(|armed| *due < armed);
        if let Some(due) = timer.due.filter(sooner) {
            timer.armed = Some(due);
            self.heap.push(Reverse((due, num.0, kind)));
        }
    }

    /// The next entry that is due. The caller gives it to [`Timer::fired`].
    #[inline]
    pub(super) fn expired(&mut self, now: Instant) -> Option<(Instant, QpNum, Kind)> {
        match self.heap.peek() {
            Some(Reverse((at, _, _))) if *at <= now => {}
            _ => return None,
        }
        let Reverse((at, num, kind)) = self.heap.pop()?;
        Some((at, QpNum(num), kind))
    }

    /// A queue pair with this timer is gone. When too many entries are such ones, those are kept that
    /// `belongs` knows: a driver that makes and destroys queue pairs without end needs no memory.
    pub(super) fn forget(
        &mut self,
        timer: &Timer,
        belongs: impl Fn(QpNum, Kind) -> Option<Instant>,
    ) {
        self.stale += usize::from(timer.armed.is_some());
        if self.stale <= STALE || self.stale < self.heap.len() / 2 {
            return;
        }
        self.stale = 0;
        self.heap
            .retain(|Reverse((at, num, kind))| belongs(QpNum(*num), *kind) == Some(*at));
    }

    /// When the next entry is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }
}

impl Timer {
    /// The entry in the heap, if there is one.
    pub(super) fn armed(&self) -> Option<Instant> {
        self.armed
    }

    /// An entry for `at` came out of the heap: answers whether the timer is due.
    pub(super) fn fired(&mut self, at: Instant, now: Instant) -> bool {
        if self.armed != Some(at) {
            return false;
        }
        self.armed = None;
        self.due.is_some_and(|due| due <= now)
    }
}

/// How long a requester waits that was told this code (IBTA 1.5 table 46).
pub(super) fn rnr_time(code: u8) -> Duration {
    const CENTIMILLISECONDS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    let units = CENTIMILLISECONDS
        .get(usize::from(code & 31))
        .copied()
        .unwrap_or(1);
    Duration::from_micros(u64::from(units) * 10)
}

/// The local ACK timeout of this code, `None` for none (IBTA 1.5 §9.7.6.1.3). Never less than 16 ms:
/// the peer's thread may not be running for so long.
pub(super) fn ack_timeout(code: u8) -> Option<Duration> {
    let nanoseconds = 4096u64 << (code & 31);
    (code & 31 != 0).then(|| Duration::from_nanos(nanoseconds).max(Duration::from_millis(16)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_that_moves_later_stays_one_entry() {
        let (mut timers, mut timer) = (Timers::default(), Timer::default());
        let start = Instant::now();
        let ms = Duration::from_millis;
        for n in 1..100 {
            timer.due = Some(start + ms(n));
            timers.arm(QpNum(5), Kind::Answer, &mut timer);
        }
        assert_eq!(timers.heap.len(), 1);
        let (at, num, _) = timers.expired(start + ms(50)).unwrap();
        assert_eq!(num, QpNum(5));
        assert!(!timer.fired(at, start + ms(50)));
        timers.arm(QpNum(5), Kind::Answer, &mut timer);
        assert_eq!(timers.next(), timer.due);
        let (at, _, _) = timers.expired(start + ms(99)).unwrap();
        assert!(timer.fired(at, start + ms(99)));
    }

    #[test]
    fn timers_of_queue_pairs_that_are_gone_need_no_memory() {
        let mut timers = Timers::default();
        let due = Instant::now() + Duration::from_secs(8000);
        let until = |due| Timer {
            due: Some(due),
            ..Timer::default()
        };
        let mut kept = until(due);
        timers.arm(QpNum(1), Kind::Answer, &mut kept);
        for n in 2..10_000 {
            let mut timer = until(due);
            timers.arm(QpNum(n), Kind::Pause, &mut timer);
            timers.forget(&timer, |num, _| kept.armed().filter(|_| num == QpNum(1)));
            assert!(timers.heap.len() <= 2 * STALE);
        }
        let (_, num, _) = timers.expired(due).unwrap();
        assert_eq!(num, QpNum(1));
    }

    #[test]
    fn codes_are_times() {
        assert_eq!(rnr_time(0), Duration::from_micros(655_360));
        assert_eq!(rnr_time(1), Duration::from_micros(10));
        assert_eq!(rnr_time(12), Duration::from_micros(640));
        assert_eq!(rnr_time(31), Duration::from_micros(491_520));
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
    }
}
