//! The data path's thread: one loop over all functions of an EM.
//!
//! It polls while there is work and for a short, adaptive window after. Then it asks every queue and wire for a
//! notification, looks once more, and sleeps on file descriptors. What belongs to a queue belongs to this
//! thread alone; others change it by sending a task ([`Handle::run`]) that runs between two rounds.

mod spin;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use m2m_fabric::proto::EmStats;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::net::device::NetDevice;
use crate::net::links::Links;
use spin::Spin;

/// A function on the data path, with its wires.
#[derive(Debug)]
pub struct Function {
    /// The device.
    pub device: NetDevice,
    /// Its wires.
    pub links: Links,
}

/// Everything that the worker owns.
#[derive(Debug, Default)]
pub struct State {
    /// Functions by id.
    pub functions: BTreeMap<u32, Function>,
    wakeups: u64,
    bursts: u64,
}

impl State {
    /// All counters; what only the endpoint knows (DMA ranges) is left zero.
    pub fn stats(&self) -> EmStats {
        let links = self.functions.values().flat_map(|f| f.links.iter());
        EmStats {
            functions: self.functions.values().map(|f| f.device.stats()).collect(),
            links: links
                .map(|link| {
                    let mut stats = link.port.stats();
                    stats.link = link.id;
                    stats
                })
                .collect(),
            wakeups: self.wakeups,
            bursts: self.bursts,
        }
    }

    fn turn(&mut self) -> bool {
        let now = Instant::now();
        self.functions.values_mut().fold(false, |worked, f| {
            f.links.set_now(now);
            f.device.turn(&mut f.links) | worked
        })
    }

    fn arm(&mut self) -> bool {
        self.functions
            .values_mut()
            .any(|f| f.device.arm(&mut f.links))
    }

    fn disarm(&mut self) {
        self.functions
            .values_mut()
            .for_each(|f| f.device.disarm(&mut f.links));
    }

    fn patience(&self) -> Option<Duration> {
        self.functions
            .values()
            .filter_map(|f| f.device.patience(&f.links))
            .min()
    }

    fn has_backlog(&self) -> bool {
        self.functions
            .values()
            .any(|f| f.device.has_backlog(&f.links))
    }
}

type Task = Box<dyn FnOnce(&mut State) + Send>;

#[derive(Debug)]
struct Shared {
    bell: OwnedFd,
    asleep: AtomicBool,
    progress: AtomicU64,
    backlog: AtomicBool,
}

/// Reaches the worker from other threads.
#[derive(Clone)]
pub struct Handle {
    tasks: mpsc::Sender<Task>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

impl Handle {
    /// Starts the thread. `poll`: how long it looks for work at the most before it sleeps. It ends at its next
    /// wake-up after every handle is gone; with the process at the latest.
    pub fn start(poll: Duration) -> std::io::Result<Self> {
        let (tasks, inbox) = mpsc::channel();
        let shared = Arc::new(Shared {
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            asleep: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            backlog: AtomicBool::new(false),
        });
        let handle = Handle {
            tasks,
            shared: shared.clone(),
        };
        std::thread::Builder::new()
            .name("data-path".into())
            .spawn(move || {
                Loop {
                    state: State::default(),
                    shared,
                    inbox,
                    spin: Spin::new(poll),
                }
                .run()
            })?;
        Ok(handle)
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
        self.kick();
        rx.recv().ok()
    }

    /// Wakes the worker when it sleeps: a queue was notified, or a task was sent.
    pub fn kick(&self) {
        // Orders what the caller published before the look at the sleeper; the worker orders its mark before
        // its last look for work. One of the two sees the other.
        fence(Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::Relaxed) {
            // A full counter wakes as well.
            let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        }
    }

    /// Bursts of work done, and whether work is known that was not done; for the heartbeat.
    pub fn progress(&self) -> (u64, bool) {
        let shared = &self.shared;
        (
            shared.progress.load(Ordering::Relaxed),
            shared.backlog.load(Ordering::Relaxed),
        )
    }
}

struct Loop {
    state: State,
    shared: Arc<Shared>,
    inbox: mpsc::Receiver<Task>,
    spin: Spin,
}

impl Loop {
    fn run(mut self) {
        let mut idle_since = None;
        loop {
            let Some(tasks) = self.run_tasks() else {
                return;
            };
            if self.state.turn() || tasks {
                self.state.bursts += 1;
                self.shared
                    .progress
                    .store(self.state.bursts, Ordering::Relaxed);
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.spin.window() {
                // On a busy host the guest that makes the work may need this core.
                std::thread::yield_now();
                continue;
            }
            self.shared
                .backlog
                .store(self.state.has_backlog(), Ordering::Relaxed);
            self.sleep();
            idle_since = None;
        }
    }

    /// Runs what was sent; `None` when nobody can send any more.
    fn run_tasks(&mut self) -> Option<bool> {
        let mut any = false;
        loop {
            match self.inbox.try_recv() {
                Ok(task) => {
                    task(&mut self.state);
                    any = true;
                }
                Err(mpsc::TryRecvError::Empty) => return Some(any),
                Err(mpsc::TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn sleep(&mut self) {
        self.shared.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // The last look: queues and wires in `arm`, tasks by trying one.
        let busy = self.state.arm();
        match self.inbox.try_recv() {
            Ok(task) => task(&mut self.state),
            Err(_) if busy => {}
            Err(mpsc::TryRecvError::Disconnected) => {}
            Err(mpsc::TryRecvError::Empty) => {
                let begin = Instant::now();
                self.wait();
                self.spin.slept(begin.elapsed());
                self.state.wakeups += 1;
            }
        }
        self.shared.asleep.store(false, Ordering::Relaxed);
        self.state.disarm();
    }

    fn wait(&self) {
        let functions = self.state.functions.values();
        let wires: Vec<BorrowedFd<'_>> = functions
            .flat_map(|f| f.links.iter())
            .filter_map(|link| link.port.wake_fd())
            .collect();
        let mut fds: Vec<PollFd<'_>> = std::iter::once(self.shared.bell.as_fd())
            .chain(wires)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let timeout = self.state.patience().map(|d| Timespec {
            tv_sec: d.as_secs() as i64,
            tv_nsec: i64::from(d.subsec_nanos()),
        });
        // A failed wait (only EINTR can happen) is a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.bell, &mut count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_runs_on_the_worker_and_its_result_comes_back() {
        let handle = Handle::start(Duration::from_micros(50)).unwrap();
        for sleep_first in [false, true] {
            if sleep_first {
                std::thread::sleep(Duration::from_millis(20));
            }
            let name = handle.run(|_| std::thread::current().name().map(String::from));
            assert_eq!(name.flatten().as_deref(), Some("data-path"));
        }
    }

    #[test]
    fn ten_thousand_tasks_from_two_threads_all_run() {
        let handle = Handle::start(Duration::from_micros(5)).unwrap();
        let total = Arc::new(AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        let total = total.clone();
                        handle
                            .run(move |_| total.fetch_add(1, Ordering::Relaxed))
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 10_000);
    }
}
