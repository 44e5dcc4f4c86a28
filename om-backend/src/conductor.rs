//! The OM's own thread: all decisions are made here, one after the other, so that none needs a lock.
//!
//! What happens elsewhere comes as a [`Message`]: an EM introduced itself, answered, died; somebody
//! asks. What may take long (telling an EM, asking it for counters) is done by other threads.

use crate::function::{Function, Life};
use crate::listener::PathListener;
use crate::northbound::view::{EmView, EndView, FunctionView, Inspect, Status};
use crate::peer::{Binding, Introduction};
use crate::session::{Session, Subject};
use crate::supervisor::process::{Process, describe_exit};
use crate::supervisor::{INTRODUCTION, LAST_WORDS, SILENCE, Supervised};
use crate::wiring::{Destination, EndState, Order, Wiring};
use m2m_fabric::Fabric;
use m2m_fabric::proto::{Event, Request};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

/// Longest pause between two looks at the EMs' heartbeats.
const TICK: Duration = Duration::from_millis(250);
/// How long EMs get to end in order.
const SHUTDOWN: Duration = Duration::from_secs(2);

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
    messages: Receiver<Message>,
    sender: Sender<Message>,
    next_epoch: u64,
    /// Functions whose EM could not be told of a change because its queue was full.
    untold: BTreeSet<u32>,
}

impl Conductor {
    /// Nothing runs yet.
    pub fn new(
        places: Places,
        functions: Vec<Arc<Function>>,
        listeners: Vec<PathListener>,
        ems: Vec<Supervised>,
        wiring: Wiring,
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
            messages,
            sender,
            next_epoch: 1,
            untold: BTreeSet::new(),
        }
    }

    /// Starts the EMs and runs until [`Message::Stop`].
    pub fn run(mut self) {
        for em in 0..self.ems.len() {
            if self.ems.get(em).is_some_and(|e| e.managed) {
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
            Message::Exited { em, pid, status } => self.exited(em, pid, &status),
            Message::Ask(question) => self.answer(question),
            // `run` and `stop` take it themselves
            Message::Stop(_) => {}
        }
    }

    fn epoch(&self, em: usize) -> Option<u64> {
        self.ems.get(em)?.session.as_ref().map(|s| s.epoch)
    }

    fn start(&mut self, em: usize) {
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let log = self.places.run_dir.join(format!("{}.log", e.name));
        let sender = self.sender.clone();
        let spawned = Process::spawn(
            &self.places.em_binary,
            &e.name,
            &self.places.m2m_socket,
            &log,
            move |pid, status| {
                let _ = sender.send(Message::Exited { em, pid, status });
            },
        );
        let now = Instant::now();
        e.restart_at = None;
        match spawned {
            Ok(process) => {
                log::info!("EM {} started as process {}", e.name, process.pid());
                e.process = Some(process);
                e.since = now;
            }
            Err(error) => {
                log::error!("EM {}: {error}", e.name);
                e.ended(error.to_string(), now);
            }
        }
    }

    fn start_those_due(&mut self, now: Instant) {
        for em in 0..self.ems.len() {
            let due = self
                .ems
                .get_mut(em)
                .filter(|e| e.restart_at.is_some_and(|at| at <= now));
            if let Some(e) = due {
                e.restarts += 1;
                self.start(em);
            }
        }
    }

    /// Looks after EMs that fell silent, never came, or do not end.
    fn tick(&mut self, now: Instant) {
        for em in 0..self.ems.len() {
            let Some(e) = self.ems.get_mut(em) else {
                continue;
            };
            if let Some(session) = &e.session {
                let silence = session.silent_for();
                if silence > SILENCE {
                    let reason = format!("was silent for {:.1} s", silence.as_secs_f64());
                    e.kill(reason.clone());
                    self.lost(em, &reason);
                }
            } else if let Some((at, reason)) = e.kill_at.clone() {
                if at <= now {
                    e.kill(reason);
                }
            } else if e.process.is_some()
                && e.killed_because.is_none()
                && now.saturating_duration_since(e.since) > INTRODUCTION
            {
                let seconds = INTRODUCTION.as_secs();
                log::error!("EM {} did not connect within {seconds} s", e.name);
                e.kill(format!("did not connect within {seconds} s"));
            }
        }
        for function in std::mem::take(&mut self.untold) {
            self.tell_changed(function);
        }
        self.start_those_due(now);
    }

    /// Whether an EM may be who it says, and then everything it needs to work.
    fn introduce(&mut self, introduction: Introduction) {
        let Introduction {
            hello,
            info,
            fabric,
            peer,
            answer,
        } = introduction;
        let refused = |reason: String| {
            log::warn!("refused process {} as EM {}: {reason}", info.pid, hello.em);
            // It stays a stranger, whose connection is closed after it could read why.
            peer.started(fabric.clone());
            let _ = answer.send(Err(reason));
        };
        let Some(em) = self.ems.iter().position(|e| e.name == hello.em) else {
            return refused(format!(
                "no EM is named \"{}\" in the configuration",
                hello.em
            ));
        };
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        if e.session.is_some() {
            return refused(format!("EM \"{}\" is connected already", e.name));
        }
        if e.managed {
            match &e.process {
                Some(process) if process.pid() == info.pid && e.killed_because.is_none() => {}
                _ => {
                    return refused(format!(
                        "the OM starts EM \"{}\" itself; set `managed = false` to start it yourself",
                        e.name
                    ));
                }
            }
        }
        let epoch = self.next_epoch;
        let session = match Session::start(
            em,
            &e.name,
            epoch,
            fabric.clone(),
            peer.clone(),
            self.sender.clone(),
        ) {
            Ok(session) => session,
            Err(error) => return refused(format!("the OM has no room for a thread: {error}")),
        };
        self.next_epoch += 1;
        let functions: Vec<Arc<Function>> = e
            .functions
            .iter()
            .filter_map(|id| self.functions.get(*id as usize).cloned())
            .collect();
        for function in &functions {
            // Whatever the last EM's guest wrote is that guest's.
            function.control.reset();
        }
        let bound = peer.bind(Binding {
            em,
            epoch,
            functions: functions.clone(),
        });
        if !bound {
            return refused("this connection has introduced itself before".to_owned());
        }
        log::info!(
            "EM {} is up ({}, process {})",
            e.name,
            hello.program,
            info.pid
        );
        e.session = Some(session);
        e.since = Instant::now();
        let _ = answer.send(Ok(()));
        for function in &functions {
            self.order_function(em, function);
        }
        match self.wiring.em_up(em) {
            Ok(orders) => self.give(orders),
            Err(error) => {
                let reason = format!("the OM could not make its wires: {error}");
                if let Some(e) = self.ems.get_mut(em) {
                    e.kill(reason.clone());
                }
                self.lost(em, &reason);
            }
        }
    }

    fn order_function(&self, em: usize, function: &Function) {
        let Some(session) = self.ems.get(em).and_then(|e| e.session.as_ref()) else {
            return;
        };
        let Some(listener) = self.listeners.get(function.id() as usize) else {
            return;
        };
        let copies = listener
            .as_fd()
            .try_clone_to_owned()
            .and_then(|listener| Ok(vec![listener, function.shadow.try_clone()?]));
        match copies {
            Ok(fds) => session.order(
                Subject::Function(function.id()),
                Request::AddFunction(Box::new(function.spec.clone())),
                fds,
            ),
            Err(error) => {
                function.set_fault(Some(format!("the OM has no descriptors left: {error}")))
            }
        }
    }

    fn give(&self, orders: Vec<Order>) {
        for order in orders {
            let (em, subject, request, fds) = match order {
                Order::Add { em, link, fds } => {
                    (em, Subject::AddLink(link.id), Request::AddLink(link), fds)
                }
                Order::Remove { em, link } => (
                    em,
                    Subject::RemoveLink(link),
                    Request::RemoveLink { link },
                    Vec::new(),
                ),
            };
            if let Some(session) = self.ems.get(em).and_then(|e| e.session.as_ref()) {
                session.order(subject, request, fds);
            }
        }
    }

    fn answered(&mut self, em: usize, subject: Subject, result: Result<(), String>) {
        let Some(name) = self.ems.get(em).map(|e| e.name.clone()) else {
            return;
        };
        match subject {
            Subject::Function(id) => {
                let Some(function) = self.functions.get(id as usize) else {
                    return;
                };
                match result {
                    Ok(()) => function.served(),
                    Err(reason) => {
                        log::error!(
                            "EM {name} does not serve {}: {reason}",
                            function.config.name
                        );
                        function.set_fault(Some(reason));
                    }
                }
            }
            Subject::AddLink(link) => {
                if let Err(reason) = &result {
                    let function = self
                        .wiring
                        .ends()
                        .get(&link)
                        .and_then(|end| self.functions.get(end.function as usize))
                        .map_or("a function", |f| f.config.name.as_str());
                    log::error!("EM {name} could not join wire {link} of {function}: {reason}");
                }
                self.wiring.answered(link, result);
                self.update_links();
            }
            Subject::RemoveLink(link) => {
                if let Err(reason) = result {
                    log::warn!("EM {name} could not leave wire {link}: {reason}");
                }
            }
            Subject::Shutdown => {
                if let Err(reason) = result {
                    log::warn!("EM {name} does not end in order: {reason}");
                }
            }
        }
    }

    /// The connection of an EM is gone, or is to go.
    fn lost(&mut self, em: usize, reason: &str) {
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let Some(session) = e.session.take() else {
            return;
        };
        log::warn!("EM {} is gone: {reason}", e.name);
        let now = Instant::now();
        e.was_up = session.since.elapsed();
        e.since = now;
        e.reason = Some(reason.to_owned());
        if e.process.is_some() && e.killed_because.is_none() {
            e.kill_at = Some((now + LAST_WORDS, format!("lost its connection: {reason}")));
        }
        drop(session);
        for id in e.functions.clone() {
            if let Some(function) = self.functions.get(id as usize) {
                function.set_life(Life::Absent);
                function.set_fault(None);
            }
        }
        let orders = self.wiring.em_down(em);
        self.give(orders);
        self.update_links();
    }

    fn exited(&mut self, em: usize, pid: u32, status: &std::io::Result<ExitStatus>) {
        let ours = self
            .ems
            .get(em)
            .and_then(|e| e.process.as_ref())
            .is_some_and(|p| p.pid() == pid);
        if !ours {
            return;
        }
        let exit = describe_exit(status);
        self.lost(em, &exit);
        if let Some(e) = self.ems.get_mut(em) {
            e.ended(exit, Instant::now());
            log::warn!(
                "EM {} {}; its log is {}",
                e.name,
                e.reason.as_deref().unwrap_or("ended"),
                self.places
                    .run_dir
                    .join(format!("{}.log", e.name))
                    .display()
            );
        }
    }

    /// Makes every function's link status what administrator and wires say.
    fn update_links(&mut self) {
        for id in 0..self.functions.len() as u32 {
            let Some(function) = self.functions.get(id as usize) else {
                continue;
            };
            let up = function.admin_up.load(Ordering::Acquire) && self.wiring.carrier(id);
            if function.control.set_link(up) {
                let word = if up { "up" } else { "down" };
                log::info!("link of {} is {word}", function.config.name);
                self.tell_changed(id);
            }
        }
    }

    fn tell_changed(&mut self, function: u32) {
        let session = self
            .functions
            .get(function as usize)
            .and_then(|f| self.ems.get(f.em))
            .and_then(|e| e.session.as_ref());
        if session.is_some_and(|s| !s.notify(Event::ConfigChanged { function })) {
            self.untold.insert(function);
        }
    }

    /// Ends the EMs in order: asks, waits, then insists.
    fn stop(&mut self) {
        for e in &mut self.ems {
            e.restart_at = None;
            match (&e.session, &e.process) {
                (Some(session), _) => {
                    session.order(Subject::Shutdown, Request::Shutdown, Vec::new());
                }
                (None, Some(process)) => process.kill(),
                (None, None) => {}
            }
        }
        let mut deadline = Instant::now() + SHUTDOWN;
        let mut insisted = false;
        // An EM that others started is not waited for, beyond its answer.
        let mut asked: BTreeSet<usize> = (0..self.ems.len())
            .filter(|em| self.epoch(*em).is_some())
            .collect();
        loop {
            asked.retain(|em| self.epoch(*em).is_some());
            if asked.is_empty() && self.ems.iter().all(|e| e.process.is_none()) {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left) {
                Ok(Message::Answer {
                    em,
                    subject: Subject::Shutdown,
                    ..
                }) => {
                    asked.remove(&em);
                }
                Ok(Message::Exited { em, pid, .. }) => {
                    asked.remove(&em);
                    if let Some(e) = self.ems.get_mut(em) {
                        if e.process.as_ref().is_some_and(|p| p.pid() == pid) {
                            e.process = None;
                        }
                    }
                }
                Ok(Message::Down { em, .. }) => {
                    asked.remove(&em);
                }
                Ok(Message::Introduction(i)) => {
                    let _ = i.answer.send(Err("the OM is stopping".to_owned()));
                }
                Ok(_) => {}
                Err(_) if insisted => break,
                Err(_) => {
                    insisted = true;
                    asked.clear();
                    deadline = Instant::now() + SHUTDOWN;
                    for e in &self.ems {
                        if let Some(process) = &e.process {
                            log::warn!("EM {} did not end in order and was killed", e.name);
                            process.kill();
                        }
                    }
                }
            }
        }
        for e in &mut self.ems {
            e.session = None;
        }
    }

    fn answer(&mut self, question: Question) {
        // Whoever asked may have gone.
        match question {
            Question::Status(answer) => drop(answer.send(self.status())),
            Question::Functions(answer) => drop(answer.send(self.function_views())),
            Question::Inspect(answer) => drop(answer.send(self.inspect())),
            Question::Connections(answer) => {
                let up = |e: &Supervised| Some((e.name.clone(), e.session.as_ref()?.fabric()));
                drop(answer.send(self.ems.iter().filter_map(up).collect()));
            }
            Question::SetLink {
                function,
                up,
                answer,
            } => {
                let found = self.functions.iter().find(|f| f.config.name == function);
                let result = match found {
                    Some(f) => {
                        f.admin_up.store(up, Ordering::Release);
                        self.update_links();
                        Ok(())
                    }
                    None => Err(format!(
                        "there is no function \"{function}\"; there are {}",
                        self.function_names().join(", ")
                    )),
                };
                drop(answer.send(result));
            }
        }
    }

    fn function_names(&self) -> Vec<String> {
        let names = self.functions.iter();
        names.map(|f| f.config.name.clone()).collect()
    }

    fn name_of(&self, function: u32) -> String {
        self.functions
            .get(function as usize)
            .map(|f| f.config.name.clone())
            .unwrap_or_default()
    }

    fn status(&self) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            run_dir: self.places.run_dir.to_string_lossy().into_owned(),
            ems: self
                .ems
                .iter()
                .map(|e| EmView {
                    name: e.name.clone(),
                    state: e.state().to_owned(),
                    pid: e.pid(),
                    managed: e.managed,
                    restarts: e.restarts,
                    since_s: e.since.elapsed().as_secs_f64(),
                    reason: e.reason.clone(),
                    functions: e.functions.iter().map(|id| self.name_of(*id)).collect(),
                })
                .collect(),
        }
    }

    fn function_views(&self) -> Vec<FunctionView> {
        self.functions
            .iter()
            .map(|f| {
                let em = self.ems.get(f.em).map(|e| e.name.clone());
                FunctionView::new(f, em.unwrap_or_default(), self.wiring.carrier(f.id()))
            })
            .collect()
    }

    fn inspect(&self) -> Inspect {
        Inspect {
            status: self.status(),
            functions: self.function_views(),
            presentation: self
                .functions
                .iter()
                .map(|f| (f.config.name.clone(), f.control.inspect(&f.spec)))
                .collect(),
            wires: self
                .wiring
                .ends()
                .iter()
                .map(|(id, end)| EndView {
                    id: *id,
                    function: self.name_of(end.function),
                    to: match end.to {
                        Destination::Function { function, .. } => self.name_of(function),
                        Destination::Port => "port".to_owned(),
                        Destination::Capture => "capture".to_owned(),
                    },
                    state: match &end.state {
                        EndState::Pending => "pending".to_owned(),
                        EndState::Attached => "attached".to_owned(),
                        EndState::Failed(reason) => format!("failed: {reason}"),
                    },
                })
                .collect(),
        }
    }
}
