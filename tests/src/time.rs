//! Waits with a deadline: a hang is a failure, and how long something took is not judged.

use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Longest wait for anything that should happen at once. Generous, for loaded machines.
pub const SOON: Duration = Duration::from_secs(10);

/// How long a test watches that something does *not* happen.
pub const QUIET: Duration = Duration::from_millis(50);

/// Asks `done` again and again until it answers `Some`.
///
/// # Errors
/// [`Error::Timeout`] after `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut done: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_micros(20);
    loop {
        if let Some(value) = done() {
            return Ok(value);
        }
        if Instant::now() > end {
            return Err(Error::Timeout {
                what: what.into(),
                seconds: limit.as_secs_f32(),
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

/// Asks `done` without a pause but to yield, for what takes less time than a sleep, for [`SOON`] at the most; `None`
/// afterwards.
///
/// # Errors
/// Those of `done`.
pub fn look_for<T>(mut done: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let begin = Instant::now();
    loop {
        for _ in 0..100 {
            if let Some(value) = done()? {
                return Ok(Some(value));
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() > SOON {
            return Ok(None);
        }
        std::thread::yield_now();
    }
}
