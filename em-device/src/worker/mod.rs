//! The data path: one thread that moves the frames of all functions of this EM.
//!
//! The thread owns queues and wires outright, so nothing on a frame's way takes a lock. Whoever wants
//! something of them sends a closure with [`Worker::run`] and waits for its answer; the closure runs
//! between two rounds, so when it has run, no round still uses what it took away.
//!
//! * [`datapath`]: what the thread owns, and a round over it;
//! * [`idle`]: how long to look for work before sleeping.

pub mod datapath;
pub mod idle;

use datapath::DataPath;
use idle::PollWindow;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a caller waits for the data path. A round takes far less; a VMM gives up after 5 s.
const ANSWER: Duration = Duration::from_secs(3);

/// Why something asked of the data path did not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The thread has ended.
    #[error("the data path has ended")]
    Gone,
    /// No answer in time; it may still happen.
    #[error("the data path did not answer within {ANSWER:?}")]
    Slow,
}

type Command = Box<dyn FnOnce(&mut DataPath) + Send>;

/// What the thread and its callers share.
#[derive(Debug)]
struct Shared {
    /// Wakes the thread.
    bell: OwnedFd,
    /// Set while the thread sleeps or is about to.
    sleeping: AtomicBool,
    stop: AtomicBool,
    progress: AtomicU64,
    backlog: AtomicBool,
    wakeups: AtomicU64,
}

impl Shared {
    /// Wakes the thread if it sleeps. What the caller wrote before is seen by the thread before it
    /// sleeps: it says that it sleeps first and looks for work then.
    fn kick(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // Only a full counter can fail, and that wakes as well.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }
}

/// The handle on the data path's thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    /// Starts the thread. `poll` is the longest time that it looks for work before it sleeps.
    ///
    /// # Errors
    /// The system has no descriptor or thread to give.
    pub fn start(poll: Duration) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            sleeping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            backlog: AtomicBool::new(false),
            wakeups: AtomicU64::new(0),
        });
        let (commands, receiver) = mpsc::channel();
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("data-path".to_owned())
            .spawn(move || run(&of_thread, &receiver, PollWindow::new(poll)))?;
        Ok(Self {
            shared,
            commands,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// A driver notified: look at the queues.
    pub fn kick(&self) {
        self.shared.kick();
    }

    /// Runs `work` on the data path's thread between two rounds and waits for its answer.
    ///
    /// # Errors
    /// [`WorkerError`].
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut DataPath) -> T + Send + 'static,
    ) -> Result<T, WorkerError> {
        let (answer, receiver) = mpsc::sync_channel(1);
        let command: Command = Box::new(move |path| {
            // Nobody waits any more when this fails.
            let _ = answer.send(work(path));
        });
        self.commands.send(command).map_err(|_| WorkerError::Gone)?;
        self.shared.kick();
        receiver.recv_timeout(ANSWER).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => WorkerError::Slow,
            mpsc::RecvTimeoutError::Disconnected => WorkerError::Gone,
        })
    }

    /// Rounds that did something, since start.
    pub fn progress(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    /// Whether the data path knows of work it could not do yet.
    pub fn has_backlog(&self) -> bool {
        self.shared.backlog.load(Ordering::Relaxed)
    }

    /// Times the thread slept and was woken.
    pub fn wakeups(&self) -> u64 {
        self.shared.wakeups.load(Ordering::Relaxed)
    }

    /// Ends the thread; what it owns is dropped.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.kick();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(shared: &Shared, commands: &Receiver<Command>, mut window: PollWindow) {
    let mut path = DataPath::default();
    let mut idle_since: Option<Instant> = None;
    loop {
        let now = Instant::now();
        if !obey(shared, commands, &mut path) {
            return;
        }
        if path.turn(now) {
            shared.progress.fetch_add(1, Ordering::Relaxed);
            idle_since = None;
            continue;
        }
        let since = *idle_since.get_or_insert(now);
        if now.duration_since(since) < window.get() {
            // On a busy host the guest that makes the work needs this core.
            std::thread::yield_now();
            continue;
        }
        idle_since = None;
        // Said before the last look: who sees it unset was looked at, who sees it set rings.
        shared.sleeping.store(true, Ordering::SeqCst);
        let work = path.arm();
        shared.backlog.store(path.has_backlog(), Ordering::Relaxed);
        let told = work || shared.stop.load(Ordering::SeqCst);
        let command = match commands.try_recv() {
            Ok(command) => Some(command),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => return,
        };
        if told || command.is_some() {
            shared.sleeping.store(false, Ordering::SeqCst);
        } else {
            let slept = sleep(shared, &path);
            shared.sleeping.store(false, Ordering::SeqCst);
            shared.wakeups.fetch_add(1, Ordering::Relaxed);
            window.slept(slept);
        }
        path.disarm();
        if let Some(command) = command {
            command(&mut path);
        }
    }
}

/// Does what was asked; `false` when the thread is to end.
fn obey(shared: &Shared, commands: &Receiver<Command>, path: &mut DataPath) -> bool {
    loop {
        match commands.try_recv() {
            Ok(command) => command(path),
            Err(TryRecvError::Empty) => return !shared.stop.load(Ordering::Relaxed),
            Err(TryRecvError::Disconnected) => return false,
        }
    }
}

/// Sleeps until a bell rings or patience ends.
fn sleep(shared: &Shared, path: &DataPath) -> Duration {
    let began = Instant::now();
    let timeout = path.patience().and_then(|t| Timespec::try_from(t).ok());
    let mut fds = vec![PollFd::new(&shared.bell, PollFlags::IN)];
    fds.extend(
        path.wake_fds()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
    );
    // An interrupted sleep is a short one.
    let _ = poll(&mut fds, timeout.as_ref());
    if fds.first().is_some_and(|bell| !bell.revents().is_empty()) {
        let mut count = [0; 8];
        let _ = rustix::io::read(shared.bell.as_fd(), &mut count);
    }
    began.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_runs_on_the_data_path_in_order() {
        let worker = Worker::start(Duration::from_micros(50)).unwrap();
        let names: Vec<_> = (0..100)
            .map(|n| {
                worker
                    .run(move |_| (n, std::thread::current().name().map(str::to_owned)))
                    .unwrap()
            })
            .collect();
        for (n, (number, name)) in names.into_iter().enumerate() {
            assert_eq!((number, name.as_deref()), (n, Some("data-path")));
        }
    }

    #[test]
    fn many_callers_are_all_answered() {
        let worker = Worker::start(Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..500 {
                        assert_eq!(worker.run(move |_| n), Ok(n));
                        worker.kick();
                    }
                });
            }
        });
    }

    #[test]
    fn after_the_end_nothing_is_answered() {
        let worker = Worker::start(Duration::ZERO).unwrap();
        worker.stop();
        assert_eq!(worker.run(|_| ()), Err(WorkerError::Gone));
        worker.stop();
    }
}
