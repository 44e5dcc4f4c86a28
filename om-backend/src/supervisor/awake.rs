//! Notices when the OM itself was held up, as by a host that was suspended or has no processor to spare.
//!
//! Who did not listen cannot say that the others were silent.

use std::time::{Duration, Instant};

/// A pause between two looks that is no accident of scheduling.
const HELD_UP: Duration = Duration::from_secs(1);

/// Since when the OM has been looking without a pause.
#[derive(Debug, Clone, Copy)]
pub struct Awake {
    since: Instant,
    last: Instant,
}

impl Awake {
    /// Looks from `now` on.
    pub fn new(now: Instant) -> Self {
        Self {
            since: now,
            last: now,
        }
    }

    /// The OM looks at `now`.
    pub fn looked(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.last);
        if pause > HELD_UP {
            log::warn!("this process was held up for {:.1} s", pause.as_secs_f64());
            self.since = now;
        }
        self.last = now;
    }

    /// How long the OM has been looking without a pause.
    pub fn lasts(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_ones_own_begins_the_count_anew() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut awake = Awake::new(start);
        for ms in [250, 600, 1500] {
            awake.looked(at(ms));
        }
        assert_eq!(awake.lasts(at(1500)), Duration::from_millis(1500));
        awake.looked(at(6000));
        assert_eq!(awake.lasts(at(6000)), Duration::ZERO);
        awake.looked(at(6250));
        assert_eq!(awake.lasts(at(6250)), Duration::from_millis(250));
    }
}
