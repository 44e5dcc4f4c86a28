//! Memory in which work turns up without a word: the worker glances at it in its sleep.
//!
//! A glance is one wait that timed out and a few loads; it takes no lock and asks no queue. The longer nothing turned
//! up, the longer it takes to the next one: what comes after a pause waits for a small part of that pause.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time from glance to glance: this part of the time since something turned up, within these limits.
const PART: u32 = 128;
const SHORTEST: Duration = Duration::from_micros(128);
const LONGEST: Duration = Duration::from_millis(8);

/// Such memory.
pub trait Watched: std::fmt::Debug + Send + Sync {
    /// Whether there is something. It stays there until a round takes it.
    fn glance(&self) -> bool;
}

/// What to glance at.
#[derive(Debug)]
pub struct Watch {
    /// The memory.
    pub on: Arc<dyn Watched>,
    /// Since when nothing turned up.
    pub since: Instant,
}

impl Watch {
    /// Time to the next glance.
    pub(super) fn pause(&self, now: Instant) -> Duration {
        let quiet = now.saturating_duration_since(self.since);
        (quiet / PART).clamp(SHORTEST, LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;

    impl Watched for Nothing {
        fn glance(&self) -> bool {
            false
        }
    }

    #[test]
    fn glances_are_rarer_the_longer_nothing_turned_up() {
        let since = Instant::now();
        let watch = Watch {
            on: Arc::new(Nothing),
            since,
        };
        let pause = |quiet| watch.pause(since + quiet);
        assert_eq!(pause(Duration::ZERO), SHORTEST);
        assert_eq!(pause(Duration::from_millis(256)), Duration::from_millis(2));
        assert_eq!(pause(Duration::from_secs(3600)), LONGEST);
    }
}
