//! How long to wait before an EM is started again.

use std::time::Duration;

/// First pause.
pub const FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
pub const LONGEST: Duration = Duration::from_secs(5);
/// An EM that lived this long was healthy: the next pause is the first again.
pub const HEALTHY: Duration = Duration::from_secs(10);

/// Pauses that double from [`FIRST`] to [`LONGEST`].
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Backoff {
    /// The pause after an EM that was up for `up`.
    pub fn pause(&mut self, up: Duration) -> Duration {
        if up >= HEALTHY {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause
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
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.pause(HEALTHY), FIRST);
        assert_eq!(backoff.pause(Duration::ZERO), FIRST * 2);
    }
}
