//! How long to wait before an EM is started again: not at all the first time, because guests wait; longer and
//! longer while it does not live.

use std::time::Duration;

/// First pause after an EM that did not live.
pub const FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
pub const LONGEST: Duration = Duration::from_secs(5);
/// An EM that was up this long lived: it took what was left for it, and moved frames.
pub const HEALTHY: Duration = Duration::from_millis(100);
/// So many EMs in a row that did not live are a crash loop.
pub const LOOP: u32 = 5;

/// No pause, then pauses that double from [`FIRST`] to [`LONGEST`].
#[derive(Debug, Clone, Default)]
pub struct Backoff {
    next: Duration,
    failures: u32,
}

impl Backoff {
    /// The pause after an EM that was up for `up`.
    pub fn pause(&mut self, up: Duration) -> Duration {
        if up >= HEALTHY {
            *self = Self::default();
        }
        self.failures = self.failures.saturating_add(1);
        let pause = self.next;
        self.next = (pause * 2).clamp(FIRST, LONGEST);
        pause
    }

    /// Whether the last EMs did not live.
    pub fn is_loop(&self) -> bool {
        self.failures >= LOOP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_the_longest_and_start_over_after_health() {
        let mut backoff = Backoff::default();
        let pauses: Vec<u128> = (0..8)
            .map(|_| backoff.pause(Duration::ZERO).as_millis())
            .collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert!(backoff.is_loop());
        assert_eq!(backoff.pause(HEALTHY), Duration::ZERO);
        assert!(!backoff.is_loop());
        assert_eq!(backoff.pause(Duration::ZERO), FIRST);
    }
}
