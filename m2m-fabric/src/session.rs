//! What the connections of all transports have in common: callers that wait for the peer, requests and events that
//! wait for the handler, when the peer was heard, and the threads.

use crate::calls::Calls;
use crate::error::FabricError;
use crate::fabric::Handler;
use crate::inbox::{Inbox, Message};
use crate::link::{Link, PanicGuard, unless_panicked};
use crate::proto::{Event, Reply, Request};
use crate::wire::Frame;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// How long the peer may take to make room for a reply or a completion before it counts as dead.
pub(crate) const REPLY_PATIENCE: Duration = Duration::from_secs(5);

/// A connection without its way to the peer, which comes as `send`: it sends an encoded frame, until a deadline.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) link: Arc<Link>,
    pub(crate) calls: Calls,
    pub(crate) inbox: Inbox,
    started: Instant,
    /// Microseconds after `started`.
    last_heard: AtomicU64,
}

impl Session {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self {
            link,
            calls: Calls::default(),
            inbox: Inbox::default(),
            started: Instant::now(),
            last_heard: AtomicU64::new(0),
        }
    }

    /// The handler thread.
    pub(crate) fn handle(
        &self,
        handler: &dyn Handler,
        send: impl Fn(Vec<u8>, Instant) -> Result<(), FabricError>,
    ) {
        while let Some(message) = self.inbox.pop() {
            match message {
                Message::Event(event) => handler.event(event),
                Message::Request(id, request, fds) => {
                    let reply = handler.request(request, fds);
                    let sent = reply_frame(id, reply)
                        .and_then(|frame| send(frame, Instant::now() + REPLY_PATIENCE));
                    if let Err(error) = sent {
                        self.link.fail(error);
                    }
                }
            }
        }
    }

    /// Sends a request and waits for the answer.
    pub(crate) fn call(
        &self,
        request: Request,
        timeout: Duration,
        send: impl FnOnce(Vec<u8>, Instant) -> Result<(), FabricError>,
    ) -> Result<Reply, FabricError> {
        let late = || FabricError::Timeout(timeout);
        let deadline = Instant::now().checked_add(timeout).ok_or_else(late)?;
        let call = self.calls.begin()?;
        let frame = Frame::Request(call.id, request).emit()?;
        match send(frame, deadline) {
            Ok(()) => {}
            Err(FabricError::Full) => return Err(late()),
            Err(error) => {
                self.link.check()?;
                return Err(error);
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match call.reply.recv_timeout(left) {
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(late()),
            Err(RecvTimeoutError::Disconnected) => {
                self.link.check()?;
                Err(FabricError::Closed)
            }
        }
    }

    /// Runs the job of the thread that reports the end; why it is the end.
    pub(crate) fn until_down(
        &self,
        job: impl FnOnce() -> Result<(), FabricError>,
    ) -> Arc<FabricError> {
        if let Err(error) = unless_panicked(job) {
            self.link.fail(error);
        }
        match self.link.reason() {
            Some(reason) => Arc::clone(reason),
            None => Arc::new(FabricError::Closed),
        }
    }

    /// Something came from the peer.
    pub(crate) fn hear(&self) {
        let after = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_heard.store(after, Ordering::Relaxed);
    }

    /// When the last message came.
    pub(crate) fn last_heard(&self) -> Instant {
        self.started + Duration::from_micros(self.last_heard.load(Ordering::Relaxed))
    }

    /// Ends everything that waits for the peer here.
    pub(crate) fn end(&self, reason: Arc<FabricError>) {
        self.calls.end(reason);
        self.inbox.close();
    }
}

fn reply_frame(id: u32, reply: Reply) -> Result<Vec<u8>, FabricError> {
    let frame = Frame::Reply(id, reply).emit();
    // The caller gets an answer all the same.
    let frame = frame.or_else(|e| Frame::Reply(id, Reply::Failed(e.to_string())).emit());
    Ok(frame?)
}

/// What a heartbeat says.
pub(crate) fn heartbeat(sequence: u64, handler: &dyn Handler) -> Event {
    let (progress, backlog) = handler.heartbeat();
    Event::Heartbeat {
        sequence,
        progress,
        backlog,
    }
}

/// The threads of a connection.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    ids: Vec<ThreadId>,
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    /// Starts one. If its job panics, the link goes down.
    pub(crate) fn spawn(
        &mut self,
        name: &str,
        link: &Arc<Link>,
        job: impl FnOnce() + Send + 'static,
    ) -> Result<(), FabricError> {
        let link = link.clone();
        let spawned = Builder::new().name(name.into()).spawn(move || {
            let _guard = PanicGuard(&link);
            job();
        });
        let thread = spawned.map_err(FabricError::io("start a thread"))?;
        self.ids.push(thread.thread().id());
        let running = self.running.get_mut();
        running.unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Waits for all of them. One of them does not: it cannot wait for itself, nor for one that may wait for it.
    pub(crate) fn join(&self) {
        if self.ids.contains(&std::thread::current().id()) {
            return;
        }
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in running.drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of the connection panicked");
            }
        }
    }
}
