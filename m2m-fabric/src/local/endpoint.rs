//! A started connection: its threads and its handle.
//!
//! Three threads: the *reader* takes packets off the socket, hands replies to their callers and the
//! rest to the *handler* thread, sends heartbeats, and reports the end; the *register* thread answers
//! register accesses. Whoever finds that the connection cannot go on tells the [`Link`], which shuts
//! the socket down, which wakes the reader, which takes everything else down.

use super::socket::{Received, Socket, frame_buffer};
use crate::calls::Calls;
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo, RegisterPort};
use crate::inbox::{Inbox, Message};
use crate::link::{Link, PanicGuard, unless_panicked};
use crate::proto::{Event, HEARTBEAT_INTERVAL_MS, Image, Reply, Request};
use crate::registers::port::Port;
use crate::registers::server::RegisterServer;
use crate::registers::shm::{Ring, Rings};
use crate::wire::Frame;
use rustix::event::PollFlags;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// How long the peer may take to make room for a reply before it counts as dead.
const REPLY_PATIENCE: Duration = Duration::from_secs(5);
/// Packets the reader takes before it looks after the heartbeat again.
const BURST: usize = 64;

/// What a thread of the connection does until the connection is down.
type Job = fn(&Shared, &dyn Handler);

/// What the threads and the handle share.
#[derive(Debug)]
struct Shared {
    socket: Arc<Socket>,
    link: Arc<Link>,
    calls: Calls,
    inbox: Inbox,
    port: Port<Ring>,
    server: RegisterServer<Ring>,
    started: Instant,
    /// Microseconds after `started`.
    last_heard: AtomicU64,
}

/// The handle of a local connection.
#[derive(Debug)]
pub(super) struct Endpoint {
    shared: Arc<Shared>,
    workers: Vec<ThreadId>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Endpoint {
    /// Starts the threads of an agreed connection.
    pub(super) fn start(
        socket: Socket,
        rings: Rings,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<dyn Fabric>, FabricError> {
        let peer = socket.peer()?;
        let socket = Arc::new(socket);
        let stopped = Arc::clone(&socket);
        let link = Arc::new(Link::new(peer, move || stopped.shut_down()));
        let shared = Arc::new(Shared {
            socket,
            calls: Calls::default(),
            inbox: Inbox::default(),
            port: Port::new(rings.requests, Arc::clone(&link)),
            server: RegisterServer::new(rings.serves),
            link,
            started: Instant::now(),
            last_heard: AtomicU64::new(0),
        });
        let jobs: [(&str, Job); 3] = [
            ("m2m-registers", Shared::serve_registers),
            ("m2m-handler", Shared::handle),
            // Last: it is the one that reports the end, so it must not start if another cannot.
            ("m2m-reader", Shared::read),
        ];
        let mut threads = Vec::new();
        for (name, job) in jobs {
            let worker = Arc::clone(&shared);
            let handler = Arc::clone(&handler);
            let spawned = Builder::new().name(name.into()).spawn(move || {
                let _guard = PanicGuard(&worker.link);
                job(&worker, &*handler);
            });
            match spawned {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    shared.link.fail(FabricError::Closed);
                    shared.take_down(Arc::new(FabricError::Closed));
                    return Err(FabricError::io("start a thread")(error));
                }
            }
        }
        Ok(Arc::new(Self {
            shared,
            workers: threads.iter().map(|thread| thread.thread().id()).collect(),
            threads: Mutex::new(threads),
        }))
    }
}

impl Shared {
    fn serve_registers(&self, handler: &dyn Handler) {
        self.server.run(handler, &self.link);
    }

    /// The handler thread.
    fn handle(&self, handler: &dyn Handler) {
        while let Some(message) = self.inbox.pop() {
            match message {
                Message::Event(event) => handler.event(event),
                Message::Request(id, request, fds) => {
                    let reply = handler.request(request, fds);
                    if let Err(error) = self.reply(id, reply) {
                        self.link.fail(error);
                    }
                }
            }
        }
    }

    fn reply(&self, id: u32, reply: Reply) -> Result<(), FabricError> {
        let frame = match Frame::Reply(id, reply).emit() {
            Ok(frame) => frame,
            // The caller gets an answer all the same.
            Err(error) => Frame::Reply(id, Reply::Failed(error.to_string())).emit()?,
        };
        let deadline = Instant::now() + REPLY_PATIENCE;
        self.socket.send(&frame, &[], Some(deadline))
    }

    /// The reader thread.
    fn read(&self, handler: &dyn Handler) {
        if let Err(error) = unless_panicked(|| self.read_until_down(handler)) {
            self.link.fail(error);
        }
        let reason = match self.link.reason() {
            Some(reason) => Arc::clone(reason),
            None => Arc::new(FabricError::Closed),
        };
        self.take_down(Arc::clone(&reason));
        handler.down(&reason);
    }

    fn read_until_down(&self, handler: &dyn Handler) -> Result<(), FabricError> {
        let interval = Duration::from_millis(HEARTBEAT_INTERVAL_MS);
        let mut buffer = frame_buffer();
        let mut sequence = 0;
        let mut next_heartbeat = Instant::now();
        loop {
            self.link.check()?;
            let now = Instant::now();
            if now >= next_heartbeat {
                self.send_heartbeat(sequence, handler)?;
                sequence += 1;
                next_heartbeat = now + interval;
            }
            self.socket
                .wait(PollFlags::IN, next_heartbeat.duration_since(now))?;
            for _ in 0..BURST {
                match self.socket.receive(&mut buffer)? {
                    Received::Nothing => break,
                    Received::Frame(frame, fds) => {
                        self.hear();
                        match frame {
                            Frame::Reply(id, reply) => self.calls.finish(id, reply),
                            Frame::Request(id, request) => {
                                self.inbox.push(Message::Request(id, request, fds))?;
                            }
                            Frame::Event(event) => self.inbox.push(Message::Event(event))?,
                            Frame::Greeting(_) => {
                                return Err(FabricError::Protocol("a second greeting"));
                            }
                            Frame::Register(..) | Frame::Completion(..) | Frame::Image(_) => {
                                return Err(FabricError::Protocol(
                                    "a message in place of shared memory",
                                ));
                            }
                        }
                    }
                }
            }
        }
    }

    fn send_heartbeat(&self, sequence: u64, handler: &dyn Handler) -> Result<(), FabricError> {
        let (progress, backlog) = handler.heartbeat();
        let heartbeat = Event::Heartbeat {
            sequence,
            progress,
            backlog,
        };
        match self.notify(heartbeat) {
            // A peer that does not read will miss it; its own silence is what counts then. A peer
            // that is gone may have left messages, and the end comes behind them.
            Err(FabricError::Full | FabricError::PeerClosed) => Ok(()),
            other => other,
        }
    }

    fn notify(&self, event: Event) -> Result<(), FabricError> {
        self.link.check()?;
        self.socket.send(&Frame::Event(event).emit()?, &[], None)
    }

    fn hear(&self) {
        let after = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_heard.store(after, Ordering::Relaxed);
    }

    /// Ends everything that waits for the peer.
    fn take_down(&self, reason: Arc<FabricError>) {
        self.calls.end(reason);
        self.inbox.close();
        self.port.rouse();
        self.server.rouse();
    }
}

impl Fabric for Endpoint {
    fn call(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Reply, FabricError> {
        let deadline = Instant::now()
            .checked_add(timeout)
            .ok_or(FabricError::Timeout(timeout))?;
        let call = self.shared.calls.begin()?;
        let frame = Frame::Request(call.id, request).emit()?;
        match self.shared.socket.send(&frame, fds, Some(deadline)) {
            Ok(()) => {}
            Err(FabricError::Full) => return Err(FabricError::Timeout(timeout)),
            Err(error) => {
                self.shared.link.check()?;
                return Err(error);
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match call.reply.recv_timeout(left) {
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(FabricError::Timeout(timeout)),
            Err(RecvTimeoutError::Disconnected) => {
                self.shared.link.check()?;
                Err(FabricError::Closed)
            }
        }
    }

    fn notify(&self, event: Event) -> Result<(), FabricError> {
        self.shared.notify(event)
    }

    fn registers(&self) -> &dyn RegisterPort {
        &self.shared.port
    }

    fn carries_fds(&self) -> bool {
        true
    }

    fn show(&self, _image: Image) -> Result<(), FabricError> {
        Err(FabricError::SharesMemory)
    }

    fn check_name(&self, _name: &str) -> Result<(), FabricError> {
        Ok(())
    }

    fn is_up(&self) -> bool {
        self.shared.link.reason().is_none()
    }

    fn last_heard(&self) -> Instant {
        let after = Duration::from_micros(self.shared.last_heard.load(Ordering::Relaxed));
        self.shared.started + after
    }

    fn peer(&self) -> PeerInfo {
        self.shared.link.peer()
    }

    fn close(&self) {
        self.shared.link.fail(FabricError::Closed);
        self.shared.port.rouse();
        self.shared.server.rouse();
        // A worker cannot wait for itself, nor for one that may wait for it.
        if self.workers.contains(&std::thread::current().id()) {
            return;
        }
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of the connection panicked");
            }
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}
