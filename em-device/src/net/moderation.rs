//! When a driver hears of frames that were sent.
//!
//! A driver that sends one frame now and then asks for an interrupt for each, to free the buffer; nothing else
//! waits for it. The answer to the frame makes an interrupt as well, and drivers free sent buffers on that
//! occasion. So small amounts wait a little for such an occasion, as with any network card; large ones do not,
//! since senders of bulk data are held up by buffers that are not freed.

use std::time::{Duration, Instant};

/// How long the driver may be left without an interrupt that it asked for.
pub const DELAY: Duration = Duration::from_millis(2);
/// Frames that do not wait.
const FRAMES: u16 = 8;
/// Bytes that do not wait.
const BYTES: u64 = 4096;

/// What a transmit queue has not told its driver yet.
#[derive(Debug, Default)]
pub struct Moderation {
    since: Option<Instant>,
    frames: u16,
    bytes: u64,
}

impl Moderation {
    /// The driver was not told of so many frames in all; `bytes` were sent since the last call.
    pub fn untold(&mut self, frames: u16, bytes: u64, now: Instant) {
        if frames == 0 {
            self.settle();
            return;
        }
        self.since.get_or_insert(now);
        self.frames = frames;
        self.bytes += bytes;
    }

    /// Whether there is something that waits.
    pub fn waits(&self) -> bool {
        self.since.is_some()
    }

    /// Whether an interrupt is due.
    pub fn is_due(&self, now: Instant) -> bool {
        self.frames >= FRAMES
            || self.bytes >= BYTES
            || self.deadline().is_some_and(|deadline| now >= deadline)
    }

    /// When an interrupt becomes due.
    pub fn deadline(&self) -> Option<Instant> {
        self.since.map(|since| since + DELAY)
    }

    /// The driver knows of all, or was told.
    pub fn settle(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_frame_waits_and_much_does_not() {
        let now = Instant::now();
        let later = now + DELAY / 2;
        let due = |steps: &[(u16, u64)], at| {
            let mut moderation = Moderation::default();
            for (frames, bytes) in steps {
                moderation.untold(*frames, *bytes, now);
            }
            moderation.is_due(at)
        };
        assert!(!due(&[], later + DELAY));
        assert!(!due(&[(0, 0)], later + DELAY));
        assert!(!due(&[(1, 98)], later));
        assert!(!due(&[(1, 98), (2, 1514)], later));
        assert!(due(&[(1, 98)], now + DELAY));
        assert!(due(&[(1, BYTES)], now));
        assert!(due(&[(4, 100), (8, 100)], now));
    }

    #[test]
    fn time_counts_from_the_first_frame_until_all_is_settled() {
        let now = Instant::now();
        let mut moderation = Moderation::default();
        moderation.untold(1, 60, now);
        moderation.untold(2, 60, now + DELAY / 2);
        assert_eq!(moderation.deadline(), Some(now + DELAY));
        moderation.untold(0, 60, now + DELAY / 2);
        assert_eq!(moderation.deadline(), None);
        assert!(!moderation.waits());
    }
}
