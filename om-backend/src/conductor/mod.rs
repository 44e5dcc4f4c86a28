//! The OM's own thread: all decisions are made here, one after the other, so that none needs a lock.
//!
//! What happens elsewhere comes as a [`Message`]: an EM introduced itself, answered, died; somebody
//! asks. What may take long (telling an EM, asking it for counters) is done by other threads.

mod adopt;
mod answers;
mod life;
mod orders;
mod rdma;
mod stop;
mod upgrade;

use crate::function::Function;
use crate::northbound::view::{FunctionView, Inspect, Status};
use crate::peer::Introduction;
use crate::rdma::{SharedMemory, Subnet};
use crate::session::Subject;
use crate::supervisor::Supervised;
use crate::supervisor::awake::Awake;
use crate::supervisor::program::Program;
use crate::wiring::Wiring;
use m2m_fabric::Fabric;
use m2m_fabric::proto::{RdmaRequest, Reply, Request};
use smartep::listener::PathListener;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

/// Longest pause between two looks at the EMs' heartbeats.
const TICK: Duration = Duration::from_millis(250);

/// Something that the OM's thread is to know or to do.
pub enum Message {
    /// An EM connected and said who it is.
    Introduction(Box<Introduction>),
    /// A connection ended.
    Down {
        /// Whose it was.
        em: usize,
        /// Which one it was.
        epoch: u64,
        /// Why.
        reason: String,
    },
    /// An EM answered to an order.
    Answer {
        /// The EM.
        em: usize,
        /// Its connection.
        epoch: u64,
        /// The order.
        subject: Subject,
        /// The answer.
        result: Result<(), String>,
    },
    /// An EM asks about RDMA.
    Rdma {
        /// The EM.
        em: usize,
        /// Its connection.
        epoch: u64,
        /// What it asks.
        request: RdmaRequest,
        /// What came along.
        fds: Vec<OwnedFd>,
        /// Where the answer goes.
        answer: SyncSender<Reply>,
    },
    /// An EM of a former OM returns something.
    Return {
        /// The EM.
        em: usize,
        /// Its connection.
        epoch: u64,
        /// What it returns.
        request: Request,
        /// What came along.
        fds: Vec<OwnedFd>,
        /// Where the answer goes.
        answer: SyncSender<Reply>,
    },
    /// A process that the OM started ended.
    Exited {
        /// The EM.
        em: usize,
        /// The process.
        pid: u32,
        /// How it ended.
        status: std::io::Result<ExitStatus>,
    },
    /// Somebody asks.
    Ask(Question),
    /// End everything in order, then say so.
    Stop(SyncSender<()>),
}

/// What somebody asks, and where the answer goes.
pub enum Question {
    /// The DPU and its EMs.
    Status(SyncSender<Status>),
    /// The functions.
    Functions(SyncSender<Vec<FunctionView>>),
    /// Everything the OM knows.
    Inspect(SyncSender<Inspect>),
    /// The connections of the EMs that are up, by name.
    Connections(SyncSender<Vec<(String, Arc<dyn Fabric>)>>),
    /// Let an EM go on as another program.
    Upgrade {
        /// Its name.
        em: String,
        /// The program.
        program: Program,
        /// Takes a sentence when it goes on as before.
        answer: SyncSender<Result<(), String>>,
    },
    /// Let the link of a function be up or not.
    SetLink {
        /// Its name.
        function: String,
        /// Whether it may be up.
        up: bool,
        /// Takes a sentence when it cannot be done.
        answer: SyncSender<Result<(), String>>,
    },
}

/// Where things are that the EMs need.
#[derive(Debug, Clone)]
pub struct Places {
    /// Folder of sockets and logs.
    pub run_dir: PathBuf,
    /// Socket that the EMs connect to.
    pub m2m_socket: PathBuf,
    /// Program of the EMs.
    pub em_binary: PathBuf,
}

/// All that the OM's thread decides about.
pub struct Conductor {
    places: Places,
    started: Instant,
    functions: Vec<Arc<Function>>,
    /// Where the VMMs connect, by function id. Nobody else has them, so that their paths go when the
    /// OM's thread ends.
    listeners: Vec<PathListener>,
    ems: Vec<Supervised>,
    wiring: Wiring,
    subnet: Subnet,
    memory: SharedMemory,
    messages: Receiver<Message>,
    sender: Sender<Message>,
    next_epoch: u64,
    /// Functions whose EM could not be told of a change because its queue was full.
    untold: BTreeSet<u32>,
    awake: Awake,
}

impl Conductor {
    /// Nothing runs yet.
    pub fn new(
        places: Places,
        functions: Vec<Arc<Function>>,
        listeners: Vec<PathListener>,
        ems: Vec<Supervised>,
        (wiring, subnet): (Wiring, Subnet),
        messages: Receiver<Message>,
        sender: Sender<Message>,
    ) -> Self {
        Self {
            places,
            started: Instant::now(),
            functions,
            listeners,
            ems,
            wiring,
            subnet,
            memory: SharedMemory::default(),
            messages,
            sender,
            next_epoch: 1,
            untold: BTreeSet::new(),
            awake: Awake::new(Instant::now()),
        }
    }

    /// Starts the EMs and runs until [`Message::Stop`].
    pub fn run(mut self) {
        for em in 0..self.ems.len() {
            let at_once = |e: &Supervised| e.managed && e.restart_at.is_none();
            if self.ems.get(em).is_some_and(at_once) {
                self.start(em);
            }
        }
        let mut next_tick = Instant::now() + TICK;
        loop {
            let now = Instant::now();
            if now >= next_tick {
                self.tick(now);
                next_tick = now + TICK;
            }
            let soon = self
                .ems
                .iter()
                .filter_map(|e| e.restart_at)
                .fold(next_tick, Instant::min);
            match self
                .messages
                .recv_timeout(soon.saturating_duration_since(now))
            {
                Ok(Message::Stop(done)) => {
                    self.stop();
                    let _ = done.send(());
                    return;
                }
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => self.start_those_due(Instant::now()),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Introduction(introduction) => self.introduce(*introduction),
            Message::Down { em, epoch, reason } => {
                if self.epoch(em) == Some(epoch) {
                    self.lost(em, &reason);
                }
            }
            Message::Answer {
                em,
                epoch,
                subject,
                result,
            } => {
                if self.epoch(em) == Some(epoch) {
                    self.answered(em, subject, result);
                }
            }
            Message::Rdma {
                em,
                epoch,
                request,
                fds,
                answer,
            } => {
                // without an answer the EM hears that its connection does not count any more
                if self.epoch(em) == Some(epoch) {
                    drop(answer.send(self.rdma_request(em, &request, fds)));
                }
            }
            Message::Return {
                em,
                epoch,
                request,
                fds,
                answer,
            } => {
                if self.epoch(em) == Some(epoch) {
                    drop(answer.send(self.returned(em, request, fds)));
                }
            }
            Message::Exited { em, pid, status } => self.exited(em, pid, &status),
            Message::Ask(question) => self.answer(question),
            // `run` and `stop` take it themselves
            Message::Stop(_) => {}
        }
    }

    fn epoch(&self, em: usize) -> Option<u64> {
        self.ems.get(em)?.session.as_ref().map(|s| s.epoch)
    }
}
