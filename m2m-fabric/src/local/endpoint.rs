//! A started connection: its threads and its handle.
//!
//! Three threads: the *reader* takes packets off the socket, hands replies to their callers and the
//! rest to the *handler* thread, sends heartbeats, and reports the end; the *register* thread answers
//! register accesses. Whoever finds that the connection cannot go on tells the [`Link`], which shuts
//! the socket down, which wakes the reader, which takes everything else down.

use super::socket::{Received, Socket};
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo, RegisterPort};
use crate::inbox::Message;
use crate::link::Link;
use crate::proto::{Event, HEARTBEAT_INTERVAL_MS, Image, Reply, Request};
use crate::registers::port::Port;
use crate::registers::server::RegisterServer;
use crate::registers::shm::{Ring, Rings};
use crate::session::{Session, Threads, heartbeat};
use crate::wire::Frame;
use rustix::event::PollFlags;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Packets the reader takes before it looks after the heartbeat again.
const BURST: usize = 64;

/// What the threads and the handle share.
#[derive(Debug)]
struct Shared {
    session: Session,
    socket: Arc<Socket>,
    port: Port<Ring>,
    server: RegisterServer<Ring>,
}

/// The handle of a local connection.
#[derive(Debug)]
pub(super) struct Endpoint {
    shared: Arc<Shared>,
    threads: Threads,
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
            port: Port::new(rings.requests, Arc::clone(&link)),
            server: RegisterServer::new(rings.serves),
            session: Session::new(link),
        });
        let mut endpoint = Self {
            shared,
            threads: Threads::default(),
        };
        endpoint.spawn("m2m-registers", &handler, |shared, handler| {
            shared.server.run(handler, &shared.session.link);
        })?;
        endpoint.spawn("m2m-handler", &handler, |shared, handler| {
            shared.session.handle(handler, |frame, deadline| {
                shared.socket.send(&frame, &[], Some(deadline))
            });
        })?;
        // Last: it is the one that reports the end, so it must not start if another cannot.
        endpoint.spawn("m2m-reader", &handler, Shared::read)?;
        Ok(Arc::new(endpoint))
    }

    fn spawn(
        &mut self,
        name: &str,
        handler: &Arc<dyn Handler>,
        job: impl FnOnce(&Shared, &dyn Handler) + Send + 'static,
    ) -> Result<(), FabricError> {
        let (shared, handler) = (self.shared.clone(), handler.clone());
        let link = &self.shared.session.link;
        let spawned = self
            .threads
            .spawn(name, link, move || job(&shared, &*handler));
        spawned.inspect_err(|_| {
            link.fail(FabricError::Closed);
            self.shared.take_down(Arc::new(FabricError::Closed));
        })
    }
}

impl Shared {
    /// The reader thread.
    fn read(&self, handler: &dyn Handler) {
        let reason = self.session.until_down(|| self.read_until_down(handler));
        self.take_down(Arc::clone(&reason));
        handler.down(&reason);
    }

    fn read_until_down(&self, handler: &dyn Handler) -> Result<(), FabricError> {
        let interval = Duration::from_millis(HEARTBEAT_INTERVAL_MS);
        let mut buffer = Vec::new();
        let mut sequence = 0;
        let mut next_heartbeat = Instant::now();
        loop {
            self.session.link.check()?;
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
                        self.session.hear();
                        match frame {
                            Frame::Reply(id, reply) => self.session.calls.finish(id, reply),
                            Frame::Request(id, request) => {
                                self.session
                                    .inbox
                                    .push(Message::Request(id, request, fds))?;
                            }
                            Frame::Event(event) => {
                                self.session.inbox.push(Message::Event(event))?
                            }
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
        match self.notify(heartbeat(sequence, handler)) {
            // A peer that does not read will miss it; its own silence is what counts then. A peer
            // that is gone may have left messages, and the end comes behind them.
            Err(FabricError::Full | FabricError::PeerClosed) => Ok(()),
            other => other,
        }
    }

    fn notify(&self, event: Event) -> Result<(), FabricError> {
        self.session.link.check()?;
        self.socket.send(&Frame::Event(event).emit()?, &[], None)
    }

    /// Ends everything that waits for the peer.
    fn take_down(&self, reason: Arc<FabricError>) {
        self.session.end(reason);
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
        let socket = &self.shared.socket;
        self.shared
            .session
            .call(request, timeout, |frame, deadline| {
                socket.send(&frame, fds, Some(deadline))
            })
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
        self.shared.session.link.reason().is_none()
    }

    fn last_heard(&self) -> Instant {
        self.shared.session.last_heard()
    }

    fn peer(&self) -> PeerInfo {
        self.shared.session.link.peer()
    }

    fn close(&self) {
        self.shared.session.link.fail(FabricError::Closed);
        self.shared.port.rouse();
        self.shared.server.rouse();
        self.threads.join();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}
