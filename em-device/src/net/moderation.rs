//! When a driver hears of frames that were sent or came.
//!
//! What the driver says on the control queue counts ([`Coalesce`]). Where it says nothing, it hears of frames that
//! came at once. A driver that sends one frame now and then asks for an interrupt for each, to free the buffer;
//! nothing else waits for it. The answer to the frame makes an interrupt as well, and drivers free sent buffers on
//! that occasion. So small amounts wait a little for such an occasion, as with any network card; large ones do not,
//! since senders of bulk data are held up by buffers that are not freed.

use std::time::{Duration, Instant};

/// How long the driver may be left without an interrupt for sent frames that it asked for.
pub const DELAY: Duration = Duration::from_millis(2);
/// Frames that do not wait.
const FRAMES: u64 = 8;
/// Bytes that do not wait.
const BYTES: u64 = 4096;

/// The driver's wish for a queue (virtio 1.3 §5.1.6.5.8).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Frames that an interrupt is due for, however short they waited; 0: time alone counts.
    pub max_packets: u32,
    /// Microseconds that a frame waits at the most; 0: none waits.
    pub max_usecs: u32,
}

/// What a queue has not told its driver yet.
#[derive(Debug, Default)]
pub struct Moderation {
    rule: Rule,
    since: Option<Instant>,
    frames: u64,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Rule {
    /// At once.
    #[default]
    Now,
    /// The device's own, for frames that were sent.
    Sent,
    Wish(Coalesce),
}

impl Moderation {
    /// For a queue whose driver says nothing; `sent`: it is a transmit queue.
    pub fn new(sent: bool) -> Self {
        Self {
            rule: if sent { Rule::Sent } else { Rule::Now },
            ..Self::default()
        }
    }

    /// What the driver says, if it does.
    pub fn set_wish(&mut self, sent: bool, wish: Option<Coalesce>) {
        self.rule = wish.map_or(Self::new(sent).rule, Rule::Wish);
    }

    /// So many frames and bytes more that the driver was not told of. Without `any` there are none.
    pub fn untold(&mut self, any: bool, frames: u64, bytes: u64, now: Instant) {
        if !any {
            self.settle();
            return;
        }
        self.since.get_or_insert(now);
        self.frames += frames;
        self.bytes += bytes;
    }

    /// Whether there is something that waits.
    pub fn waits(&self) -> bool {
        self.since.is_some()
    }

    /// Whether an interrupt is due.
    pub fn is_due(&self, now: Instant) -> bool {
        let enough = match self.rule {
            Rule::Now => true,
            Rule::Sent => self.frames >= FRAMES || self.bytes >= BYTES,
            Rule::Wish(wish) => wish.max_packets != 0 && self.frames >= u64::from(wish.max_packets),
        };
        self.waits() && enough || self.deadline().is_some_and(|deadline| now >= deadline)
    }

    /// When an interrupt becomes due.
    pub fn deadline(&self) -> Option<Instant> {
        let delay = match self.rule {
            Rule::Now => Duration::ZERO,
            Rule::Sent => DELAY,
            Rule::Wish(wish) => Duration::from_micros(u64::from(wish.max_usecs)),
        };
        self.since.map(|since| since + delay)
    }

    /// The driver knows of all, or was told.
    pub fn settle(&mut self) {
        *self = Self {
            rule: self.rule,
            ..Self::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_frame_waits_and_much_does_not() {
        let now = Instant::now();
        let later = now + DELAY / 2;
        let due = |steps: &[(u64, u64)], at| {
            let mut moderation = Moderation::new(true);
            for (frames, bytes) in steps {
                moderation.untold(true, *frames, *bytes, now);
            }
            moderation.is_due(at)
        };
        assert!(!due(&[], later + DELAY));
        assert!(!due(&[(1, 98)], later));
        assert!(!due(&[(1, 98), (1, 1514)], later));
        assert!(due(&[(1, 98)], now + DELAY));
        assert!(due(&[(1, BYTES)], now));
        assert!(due(&[(4, 100), (4, 100)], now));
    }

    #[test]
    fn time_counts_from_the_first_frame_until_all_is_settled() {
        let now = Instant::now();
        let mut moderation = Moderation::new(true);
        moderation.untold(true, 1, 60, now);
        moderation.untold(true, 1, 60, now + DELAY / 2);
        assert_eq!(moderation.deadline(), Some(now + DELAY));
        moderation.untold(false, 0, 60, now + DELAY / 2);
        assert_eq!(moderation.deadline(), None);
        assert!(!moderation.waits() && !moderation.is_due(now + DELAY));
    }

    #[test]
    fn the_driver_s_wish_counts_for_frames_and_for_time() {
        let now = Instant::now();
        let usecs = |n| now + Duration::from_micros(n);
        for sent in [false, true] {
            let due = |max_packets, max_usecs, frames, at| {
                let mut moderation = Moderation::new(sent);
                let wish = Coalesce {
                    max_packets,
                    max_usecs,
                };
                moderation.set_wish(sent, Some(wish));
                moderation.untold(true, frames, 9000, now);
                moderation.is_due(at)
            };
            assert!(!due(8, 500, 7, usecs(499)));
            assert!(due(8, 500, 8, now));
            assert!(due(8, 500, 1, usecs(500)));
            assert!(!due(0, 500, 1000, usecs(499)), "time alone");
            assert!(due(1000, 0, 1, now), "no time at all");
            assert!(!due(u32::MAX, u32::MAX, 1 << 20, usecs(1 << 30)));
        }
        let mut received = Moderation::new(false);
        received.untold(true, 1, 60, now);
        assert!(received.is_due(now), "without a wish at once");
    }
}
