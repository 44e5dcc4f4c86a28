//! Frames that wait for the thread which sends them.

use crate::error::FabricError;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes that may wait. A frame that finds less is taken, whatever its size.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// A bounded queue of emitted frames; nobody who only offers a frame waits.
#[derive(Debug)]
pub(super) struct Outbox {
    state: Mutex<State>,
    room: Condvar,
    /// Readable when the sending thread has to look.
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    closed: bool,
}

impl Outbox {
    pub(super) fn new() -> Result<Self, FabricError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)
            .map_err(FabricError::io("make an eventfd for a connection"))?;
        Ok(Self {
            state: Mutex::default(),
            room: Condvar::new(),
            wake,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a frame; with a deadline it waits for room until then.
    ///
    /// # Errors
    /// [`FabricError::Full`], [`FabricError::Closed`].
    pub(super) fn push(
        &self,
        frame: Vec<u8>,
        deadline: Option<Instant>,
    ) -> Result<(), FabricError> {
        let mut state = self.lock();
        while state.bytes >= MAX_BYTES && !state.closed {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                return Err(FabricError::Full);
            };
            let waited = self.room.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.add(state, frame)
    }

    /// Adds a frame of which there are few at a time, however much waits.
    ///
    /// # Errors
    /// [`FabricError::Closed`].
    pub(super) fn push_bounded(&self, frame: Vec<u8>) -> Result<(), FabricError> {
        self.add(self.lock(), frame)
    }

    fn add(&self, mut state: MutexGuard<'_, State>, frame: Vec<u8>) -> Result<(), FabricError> {
        if state.closed {
            return Err(FabricError::Closed);
        }
        let first = state.frames.is_empty();
        state.bytes += frame.len();
        state.frames.push_back(frame);
        drop(state);
        // With others waiting the sending thread looks anyway.
        if first {
            self.wake();
        }
        Ok(())
    }

    /// The frame that waits longest.
    pub(super) fn pop(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let frame = state.frames.pop_front()?;
        let was_full = state.bytes >= MAX_BYTES;
        state.bytes -= frame.len();
        if was_full && state.bytes < MAX_BYTES {
            self.room.notify_all();
        }
        Some(frame)
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().frames.is_empty()
    }

    /// Takes nothing more, and nobody waits any longer.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.room.notify_all();
        self.wake();
    }

    /// Makes the sending thread look.
    pub(super) fn wake(&self) {
        // The counter cannot overflow in a way that matters: it is readable then too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// What becomes readable.
    pub(super) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// The sending thread looks from here on.
    pub(super) fn looked(&self) {
        let mut counter = [0; 8];
        while rustix::io::read(&self.wake, &mut counter) == Err(Errno::INTR) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn without_room_a_frame_is_refused_or_waits_until_its_deadline() {
        let outbox = Outbox::new().unwrap();
        outbox.push(vec![0; MAX_BYTES], None).unwrap();
        let full = outbox.push(vec![1], None);
        assert!(matches!(full, Err(FabricError::Full)));
        let soon = Some(Instant::now() + Duration::from_millis(10));
        assert!(matches!(outbox.push(vec![1], soon), Err(FabricError::Full)));
        outbox.push_bounded(vec![2]).unwrap();
        assert_eq!(outbox.pop().map(|frame| frame.len()), Some(MAX_BYTES));
        outbox.push(vec![3], None).unwrap();
        assert_eq!([outbox.pop(), outbox.pop()], [Some(vec![2]), Some(vec![3])]);
        assert!(outbox.is_empty());
    }

    #[test]
    fn who_waits_for_room_gets_it_or_hears_of_the_end() {
        let outbox = Outbox::new().unwrap();
        let late = Some(Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            outbox.push(vec![0; MAX_BYTES], None).unwrap();
            let waits = scope.spawn(|| outbox.push(vec![0; MAX_BYTES], late));
            while outbox.pop().is_none() {}
            waits.join().unwrap().unwrap();
            let waits = scope.spawn(|| outbox.push(vec![1], late));
            outbox.close();
            assert!(matches!(waits.join().unwrap(), Err(FabricError::Closed)));
        });
    }
}
