//! The atomics and futexes below a ring; loom's model of them under `cfg(loom)`.

#[cfg(not(loom))]
pub(crate) use real::StateWord;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(loom)]
pub(crate) use model::StateWord;

#[cfg(not(loom))]
mod real {
    use super::AtomicU32;
    use rustix::thread::futex;
    use std::time::Duration;

    /// A word that threads of several processes change and sleep on. All zeroes is its first state.
    #[derive(Debug)]
    #[repr(transparent)]
    pub(crate) struct StateWord(AtomicU32);

    impl StateWord {
        pub(crate) fn atomic(&self) -> &AtomicU32 {
            &self.0
        }

        /// Sleeps if the word is `expected`, until a wake-up, the timeout or for no reason.
        pub(crate) fn wait(&self, expected: u32, timeout: Duration) {
            let Ok(timeout) = timeout.try_into() else {
                return;
            };
            // Not FUTEX_PRIVATE: the other side is another process. Every result means the same to
            // the caller: look at the word again.
            let _ = futex::wait(&self.0, futex::Flags::empty(), expected, Some(&timeout));
        }

        /// Wakes whoever sleeps on the word.
        pub(crate) fn wake(&self) {
            let _ = futex::wake(&self.0, futex::Flags::empty(), u32::MAX >> 1);
        }
    }
}

#[cfg(loom)]
mod model {
    use super::AtomicU32;
    use loom::sync::{Condvar, Mutex};
    use std::time::Duration;

    /// Like the real one, but never wakes for no reason and never times out, so that loom reports
    /// a lost wake-up as a deadlock.
    #[derive(Debug)]
    pub(crate) struct StateWord {
        word: AtomicU32,
        lock: Mutex<()>,
        sleepers: Condvar,
    }

    impl StateWord {
        pub(crate) fn new() -> Self {
            Self {
                word: AtomicU32::new(0),
                lock: Mutex::new(()),
                sleepers: Condvar::new(),
            }
        }

        pub(crate) fn atomic(&self) -> &AtomicU32 {
            &self.word
        }

        pub(crate) fn wait(&self, expected: u32, _timeout: Duration) {
            let guard = self.lock.lock().unwrap();
            // The kernel compares under its bucket lock, with the newest value.
            if self.word.fetch_add(0, super::Ordering::SeqCst) == expected {
                drop(self.sleepers.wait(guard).unwrap());
            }
        }

        pub(crate) fn wake(&self) {
            let _guard = self.lock.lock().unwrap();
            self.sleepers.notify_all();
        }
    }
}
