//! Keeps EM processes running: starts them, notices when they end, fall silent or get stuck, and starts
//! them again after a pause.
//!
//! [`Supervised`] is one EM's record; the OM's own thread (see [`crate::conductor`]) drives it.

pub mod awake;
pub mod backoff;
pub mod process;
pub mod program;
pub mod progress;

use crate::config::EmConfig;
use crate::session::Session;
use backoff::Backoff;
use process::Process;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// An EM that says nothing for this long is replaced: the time after which a VMM gives up on it too.
pub const SILENCE: Duration = Duration::from_secs(5);
/// An EM of another host that was heard of more recently is there.
const QUIET: Duration = Duration::from_secs(1);
/// An EM whose data path has something to do and does not come round for this long is replaced. More
/// than a disk or a busy host holds up a thread.
pub const STUCK: Duration = Duration::from_secs(10);
/// An EM that was started has this long to introduce itself.
pub const INTRODUCTION: Duration = Duration::from_secs(10);
/// An EM whose connection ended has this long to end too, so that its exit status tells why.
pub const LAST_WORDS: Duration = Duration::from_millis(500);

/// An EM of a program that was offered in place of another has this long to introduce itself, because there is
/// one that can.
pub const TRIAL: Duration = Duration::from_secs(2);

/// A program that is tried in place of another.
pub struct Upgrade {
    /// What [`Supervised::program`] was.
    pub former: Option<PathBuf>,
    /// Whether it was started.
    pub started: bool,
    /// Functions that it has yet to go on with.
    pub left: usize,
    /// Takes a sentence if it did not work.
    pub answer: SyncSender<Result<(), String>>,
}

/// One EM.
pub struct Supervised {
    /// Its name in the file.
    pub name: String,
    /// Whether the OM starts it.
    pub managed: bool,
    /// Whether it is on another host.
    pub remote: bool,
    /// Ids of its functions.
    pub functions: Vec<u32>,
    /// Its program, if it is not that of all EMs.
    pub program: Option<PathBuf>,
    /// While a program is tried.
    pub upgrade: Option<Upgrade>,
    /// Its process, while one runs that the OM started.
    pub process: Option<Process>,
    /// Its connection, while it is up.
    pub session: Option<Session>,
    /// When its process started or ended, or its connection came or went.
    pub since: Instant,
    /// When to start it again.
    pub restart_at: Option<Instant>,
    /// When to end its process, and why.
    pub kill_at: Option<(Instant, String)>,
    /// How often it was started after the first time.
    pub restarts: u64,
    /// Why it was last not up.
    pub reason: Option<String>,
    /// Why the OM ended it; says more than the exit status then.
    pub killed_because: Option<String>,
    /// How long the last connection was up.
    pub was_up: Duration,
    /// Pauses between starts.
    pub backoff: Backoff,
}

impl Supervised {
    /// An EM that was not started yet.
    pub fn new(config: &EmConfig, functions: Vec<u32>) -> Self {
        Self {
            name: config.name.clone(),
            managed: config.managed,
            remote: config.remote,
            functions,
            program: None,
            upgrade: None,
            process: None,
            session: None,
            since: Instant::now(),
            restart_at: None,
            kill_at: None,
            restarts: 0,
            reason: None,
            killed_because: None,
            was_up: Duration::ZERO,
            backoff: Backoff::default(),
        }
    }

    /// The word for people and scripts: `up`, `starting`, `ending`, `restarting`, `crash-loop` or `away`.
    pub fn state(&self) -> &'static str {
        match (&self.session, &self.process) {
            (Some(_), _) => "up",
            (None, Some(_)) if self.kill_at.is_some() || self.killed_because.is_some() => "ending",
            (None, Some(_)) => "starting",
            (None, None) if self.managed && self.backoff.is_loop() => "crash-loop",
            (None, None) if self.managed => "restarting",
            (None, None) => "away",
        }
    }

    /// Whether its connection may be one that ended, and nobody said so: an EM of another host that connects again is
    /// believed. Two that take turns would be heard of.
    pub fn may_be_replaced(&self) -> bool {
        let session = self.session.as_ref().filter(|_| self.remote);
        session.is_some_and(|session| session.silent_for() > QUIET)
    }

    /// Whether its process was started and has not introduced itself yet.
    pub fn is_starting(&self) -> bool {
        let ending = self.kill_at.is_some() || self.killed_because.is_some();
        self.session.is_none() && self.process.is_some() && !ending
    }

    /// How long it may take to introduce itself.
    pub fn introduction(&self) -> Duration {
        let tried = self.upgrade.as_ref().is_some_and(|upgrade| upgrade.started);
        if tried { TRIAL } else { INTRODUCTION }
    }

    /// Its process id, as far as it is known.
    pub fn pid(&self) -> Option<u32> {
        let connected = self.session.as_ref().map(|s| s.pid).filter(|pid| *pid != 0);
        self.process.as_ref().map(Process::pid).or(connected)
    }

    /// Where it is, while it is connected from another host.
    pub fn address(&self) -> Option<SocketAddr> {
        self.session.as_ref()?.address
    }

    /// Ends its process at once.
    pub fn kill(&mut self, because: String) {
        self.kill_at = None;
        if let Some(process) = &self.process {
            process.kill();
            self.killed_because = Some(because);
        }
    }

    /// Its process ended as `exit` says: notes why and when to start it again.
    pub fn ended(&mut self, exit: String, now: Instant) {
        self.process = None;
        self.kill_at = None;
        self.reason = Some(self.killed_because.take().unwrap_or(exit));
        self.since = now;
        self.restart_at = Some(now + self.backoff.pause(std::mem::take(&mut self.was_up)));
    }
}
