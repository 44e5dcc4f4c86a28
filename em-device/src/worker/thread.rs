//! The worker: the thread that looks for work, runs tasks, and sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::handle::{Shared, Task};
use super::spin::Spin;
use super::{State, Watch};

/// Rounds without work before the core is given to who else wants it: that costs more than a few rounds.
const PATIENT_ROUNDS: u32 = 4;

/// The worker.
pub(super) struct Worker {
    shared: Arc<Shared>,
    inbox: mpsc::Receiver<Task>,
    spin: Spin,
    /// The wires' wake-ups, own copies because it sleeps on them without the state; `None` after a task, which
    /// may have changed the wires.
    wires: Option<Vec<OwnedFd>>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, inbox: mpsc::Receiver<Task>, poll: Duration) -> Self {
        Self {
            shared,
            inbox,
            spin: Spin::new(poll),
            wires: None,
        }
    }

    /// Until nobody can send a task any more.
    pub(super) fn run(mut self) {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        let mut idle_since = None;
        let mut idle_rounds = 0u32;
        loop {
            let Some(tasks) = self.run_tasks(&mut state) else {
                return;
            };
            if state.turn() || tasks {
                shared.worked(&mut state);
                idle_since = None;
                idle_rounds = 0;
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.spin.window() {
                idle_rounds = idle_rounds.saturating_add(1);
                if idle_rounds >= PATIENT_ROUNDS {
                    // On a busy host the guest that makes the work may need this core.
                    std::thread::yield_now();
                }
                continue;
            }
            idle_since = None;
            shared.came_round();
            shared.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            // The last look: queues and wires in `arm`, tasks by trying one.
            let busy = state.arm();
            match self.inbox.try_recv() {
                Ok(task) => self.run_task(task, &mut state),
                Err(_) if busy => {}
                Err(mpsc::TryRecvError::Disconnected) => {}
                Err(mpsc::TryRecvError::Empty) => {
                    self.collect_wires(&state);
                    // Without a timer it looks at things now and then.
                    let deaf = !shared.set_timer(&mut state) || self.wires.is_none();
                    let watches = state.watches();
                    drop(state);
                    let begin = Instant::now();
                    let timer_rang = self.wait(deaf, &watches);
                    state = shared.lock();
                    if timer_rang {
                        state.timer = None;
                    }
                    self.spin.slept(begin.elapsed());
                    state.wakeups += 1;
                }
            }
            shared.asleep.store(false, Ordering::Relaxed);
            state.disarm();
        }
    }

    /// Runs what was sent; `None` when nobody can send any more.
    fn run_tasks(&mut self, state: &mut State) -> Option<bool> {
        let mut any = false;
        loop {
            match self.inbox.try_recv() {
                Ok(task) => {
                    self.run_task(task, state);
                    any = true;
                }
                Err(mpsc::TryRecvError::Empty) => return Some(any),
                Err(mpsc::TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn run_task(&mut self, task: Task, state: &mut State) {
        self.wires = None;
        task(state);
    }

    fn collect_wires(&mut self, state: &State) {
        if self.wires.is_some() {
            return;
        }
        let copies: io::Result<Vec<OwnedFd>> =
            state.wake_fds().map(|fd| fd.try_clone_to_owned()).collect();
        match copies {
            Ok(copies) => self.wires = Some(copies),
            Err(error) => log::error!("the data path cannot sleep on its wires: {error}"),
        }
    }

    /// Sleeps; not for long when `deaf`, which means that not everything can wake it. Glances at `watches`
    /// meanwhile. Answers whether the timer rang.
    fn wait(&self, deaf: bool, watches: &[Watch]) -> bool {
        const DEAF: Duration = Duration::from_millis(1);
        let (bell, timer) = (&self.shared.bell, &self.shared.timer);
        let wires = self.wires.iter().flatten().map(|fd| fd.as_fd());
        let fds = [bell.as_fd(), timer.as_fd()].into_iter().chain(wires);
        let mut fds: Vec<PollFd<'_>> = fds
            .map(|fd: BorrowedFd<'_>| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        loop {
            let now = Instant::now();
            let pauses = watches.iter().map(|watch| watch.pause(now));
            let pause = pauses.chain(deaf.then_some(DEAF)).min();
            // Pauses are shorter than a second.
            let pause = pause.map(|pause| Timespec {
                tv_sec: 0,
                tv_nsec: pause.subsec_nanos().into(),
            });
            // A failed wait (only EINTR can happen) is a short one.
            let ready = poll(&mut fds, pause.as_ref()) != Ok(0);
            if ready || deaf || watches.iter().any(|watch| watch.on.glance()) {
                break;
            }
        }
        let mut rang = [bell, timer].into_iter().zip(&fds).map(|(fd, polled)| {
            let rang = !polled.revents().is_empty();
            if rang {
                let mut count = [0; 8];
                let _ = rustix::io::read(fd, &mut count);
            }
            rang
        });
        rang.next();
        rang.next() == Some(true)
    }
}
