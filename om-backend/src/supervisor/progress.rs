//! Tells a data path that is stuck from one that is idle, by what its heartbeats say.

use std::time::{Duration, Instant};

/// What the heartbeats of one EM said.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    value: u64,
    /// First heartbeat in a row that told of work and of this value, and the last.
    standstill: Option<(Instant, Instant)>,
}

impl Progress {
    /// A heartbeat came at `now`; see [`m2m_fabric::proto::Event::Heartbeat`].
    pub fn heard(&mut self, progress: u64, backlog: bool, now: Instant) {
        self.standstill = match self.standstill {
            _ if !backlog => None,
            Some((since, _)) if progress == self.value => Some((since, now)),
            _ => Some((now, now)),
        };
        self.value = progress;
    }

    /// How long the data path did not come round although it had something to do. Time without a
    /// heartbeat does not count: nothing is known of it.
    pub fn stuck_for(&self) -> Duration {
        self.standstill.map_or(Duration::ZERO, |(since, last)| {
            last.saturating_duration_since(since)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_standstill_with_work_counts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut progress = Progress::default();
        assert_eq!(progress.stuck_for(), Duration::ZERO);
        for (second, value, backlog, stuck) in [
            (0, 5, false, 0),
            (10, 5, false, 0),
            (11, 5, true, 0),
            (15, 5, true, 4),
            (16, 6, true, 0),
            (18, 6, true, 2),
            (19, 6, false, 0),
            (20, 6, true, 0),
            (29, 6, true, 9),
        ] {
            progress.heard(value, backlog, at(second));
            assert_eq!(progress.stuck_for().as_secs(), stuck, "second {second}");
        }
    }
}
