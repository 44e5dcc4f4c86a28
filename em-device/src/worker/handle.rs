//! How other threads reach the data path, and how no wake-up gets lost on the way.
//!
//! Work is published where the data path looks for it: in a queue's ring, on a wire, in the list of tasks.
//! `asleep` is set by the worker alone, before its last look at all of them and until it wakes up.
//!
//! Whoever published work, fences and looks at `asleep`; the worker sets `asleep`, fences and looks for work.
//! So one of the two sees the other:
//!
//! * `asleep` is not set: the worker looks for work before it sleeps the next time, and sees this one.
//! * `asleep` is set and the lock is taken: by the worker on its way to sleep or back, or by a third thread. The
//!   bell rings. It keeps ringing until the worker, awake, takes note of it; what was published before is seen
//!   by the look that comes after that.
//! * `asleep` is set and the lock is free: the worker has looked for the last time, and what it waits for is in
//!   the rings, in the wires and in `poll`. The caller takes its place: it does rounds until one finds nothing
//!   and [`State::arm`] agrees, so that all queues and wires ask for the next wake-up again when it gives the
//!   lock back. Or it rings the bell and gives the lock back at any point: a worker that wakes up looks for
//!   everything, whatever was asked for.
//!
//! `asleep` stays set during all of the last case, so that a task that is sent meanwhile rings the bell. What
//! the worker sleeps on was fixed before: the wires, which only tasks change, the bell, and a timer, which
//! whoever gives the lock back sets to the next deadline.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::State;
use super::thread::Worker;

/// Rounds that a thread which came with a notification does before the worker takes over. What moves more
/// than this is a stream, and the worker, which goes on looking after it, spares its next notifications.
const ROUNDS: u32 = 4;

pub(super) type Task = Box<dyn FnOnce(&mut State) + Send>;

/// What the worker and the handles share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the worker.
    pub(super) bell: OwnedFd,
    /// Wakes the worker at a deadline.
    pub(super) timer: OwnedFd,
    pub(super) asleep: AtomicBool,
    progress: AtomicU64,
}

impl Shared {
    /// Waits for the state; for the worker only, who waits for no more than some rounds.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Notes a round that found work.
    pub(super) fn worked(&self, state: &mut State) {
        state.bursts += 1;
        self.came_round();
    }

    /// Notes that the data path came round.
    pub(super) fn came_round(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the timer to the next deadline. Answers whether that worked.
    pub(super) fn set_timer(&self, state: &mut State) -> bool {
        let deadline = state.deadline();
        if state.timer == deadline {
            return true;
        }
        // Zero would mean never.
        let left = deadline.map_or(Duration::ZERO, |at| {
            let left = at.saturating_duration_since(Instant::now());
            left.max(Duration::from_nanos(1))
        });
        let never = Timespec::default();
        let setting = Itimerspec {
            it_interval: never,
            it_value: Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            },
        };
        let set = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting).is_ok();
        state.timer = deadline.filter(|_| set);
        set
    }

    fn ring(&self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Does what there is to do in the place of the worker, who sleeps. Answers whether it may sleep on; if
    /// not, it is to be woken.
    fn stand_in(&self, state: &mut State) -> bool {
        state.disarm();
        for _ in 0..ROUNDS {
            if state.turn() {
                self.worked(state);
                continue;
            }
            self.came_round();
            // Something came in between: no progress was made, but the next round will.
            if state.arm() {
                state.disarm();
                continue;
            }
            return self.set_timer(state);
        }
        false
    }
}

/// Reaches the data path from other threads.
#[derive(Clone)]
pub struct Handle {
    tasks: mpsc::Sender<Task>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Handle {
    /// Starts the worker. `poll`: how long it looks for work at the most before it sleeps. It ends at its next
    /// wake-up after every handle is gone; with the process at the latest.
    pub fn start(poll: Duration) -> std::io::Result<Self> {
        let (tasks, inbox) = mpsc::channel();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?,
            asleep: AtomicBool::new(false),
            progress: AtomicU64::new(0),
        });
        let worker = Worker::new(shared.clone(), inbox, poll);
        std::thread::Builder::new()
            .name("data-path".into())
            .spawn(move || worker.run())?;
        Ok(Self { tasks, shared })
    }

    /// Runs a task between two rounds and waits for its result; `None` when the worker ended.
    pub fn run<R: Send + 'static>(
        &self,
        task: impl FnOnce(&mut State) -> R + Send + 'static,
    ) -> Option<R> {
        let (tx, rx) = mpsc::sync_channel(1);
        self.tasks
            .send(Box::new(move |state| {
                // Nobody waits any more: then nobody needs the result.
                let _ = tx.send(task(state));
            }))
            .ok()?;
        if self.worker_sleeps() {
            self.shared.ring();
        }
        rx.recv().ok()
    }

    /// A queue was notified: sees to it that the data path looks at it. Does the work itself when the worker
    /// sleeps, a bounded number of rounds. Do not call it while holding a view of guest memory.
    pub fn kick(&self) {
        if !self.worker_sleeps() {
            return;
        }
        let done = self
            .shared
            .try_lock()
            .is_some_and(|mut state| self.shared.stand_in(&mut state));
        if !done {
            self.shared.ring();
        }
    }

    /// Whether the worker sleeps and nobody stands in.
    #[cfg(test)]
    pub(super) fn worker_is_away(&self) -> bool {
        self.worker_sleeps() && self.shared.try_lock().is_some()
    }

    fn worker_sleeps(&self) -> bool {
        // Orders what the caller published before the look at the worker.
        fence(Ordering::SeqCst);
        self.shared.asleep.load(Ordering::Relaxed)
    }

    /// For the heartbeat: a count that grows as long as the data path comes round, and whether it has something
    /// to do, that is, nobody sleeps or has just looked. Awake without coming round it is stuck. A worker that
    /// waits for a peer to make room or for a guest's buffers sleeps.
    pub fn progress(&self) -> (u64, bool) {
        let shared = &self.shared;
        let awake = !shared.asleep.load(Ordering::Relaxed) || shared.try_lock().is_none();
        (shared.progress.load(Ordering::Relaxed), awake)
    }
}
