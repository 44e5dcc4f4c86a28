//! How long to look for work before sleeping.

use std::time::Duration;

/// Grows while sleeps turn out short (the next work came so soon that polling would have caught it), shrinks
/// while they are long.
#[derive(Debug)]
pub(super) struct Spin {
    window: Duration,
    most: Duration,
}

impl Spin {
    pub(super) fn new(most: Duration) -> Self {
        Self {
            window: most / 4,
            most,
        }
    }

    pub(super) fn window(&self) -> Duration {
        self.window
    }

    /// A sleep lasted this long.
    pub(super) fn slept(&mut self, time: Duration) {
        self.window = if time < 2 * self.most {
            (self.window * 2 + Duration::from_micros(1)).min(self.most)
        } else {
            self.window / 2
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_grows_with_short_sleeps_up_to_its_limit_and_falls_with_long_ones() {
        let most = Duration::from_micros(40);
        let mut spin = Spin::new(most);
        for _ in 0..10 {
            spin.slept(Duration::from_micros(10));
        }
        assert_eq!(spin.window(), most);
        for _ in 0..40 {
            spin.slept(Duration::from_millis(10));
        }
        assert!(spin.window() < Duration::from_micros(1));
    }
}
