//! A started connection: its threads and its handle.
//!
//! Three threads: the *stream* thread alone touches socket and keys: it sends what waits in the outbox, takes frames,
//! sends heartbeats, and reports the end; the *handler* thread answers requests and takes events; the *register* thread
//! answers register accesses. Nobody else waits for the network but who waits for an answer.

use super::listener::peer_at;
use super::names;
use super::outbox::Outbox;
use super::registers::{Accesses, Port};
use super::stream::Stream;
use crate::calls::Calls;
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo, RegisterPort};
use crate::inbox::{Inbox, Message};
use crate::link::{Link, PanicGuard, unless_panicked};
use crate::poll;
use crate::proto::{Event, HEARTBEAT_INTERVAL_MS, Image, MAX_IMAGE_BYTES, Reply, Request};
use crate::wire::{Frame, WireError};
use rustix::event::{PollFd, PollFlags};
use rustls::pki_types::CertificateDer;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// How long the peer may take to make room for a reply or a completion before it counts as dead.
const REPLY_PATIENCE: Duration = Duration::from_secs(5);
/// Reads in a row before the stream thread looks after what is to be sent, and frames sent before it reads.
const BURST: usize = 16;

/// What the threads and the handle share.
#[derive(Debug)]
struct Shared {
    outbox: Arc<Outbox>,
    link: Arc<Link>,
    calls: Calls,
    inbox: Inbox,
    port: Port,
    accesses: Accesses,
    certificate: Option<CertificateDer<'static>>,
    silence: Duration,
    started: Instant,
    /// Microseconds after `started`.
    last_heard: AtomicU64,
}

/// The handle of a remote connection.
#[derive(Debug)]
pub(super) struct Endpoint {
    shared: Arc<Shared>,
    workers: Vec<ThreadId>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Endpoint {
    /// Starts the threads of an agreed connection, which ends when nothing came for `silence`.
    pub(super) fn start(
        stream: Stream,
        handler: Arc<dyn Handler>,
        silence: Duration,
    ) -> Result<Arc<dyn Fabric>, FabricError> {
        let address = stream.socket().peer_addr();
        let peer = peer_at(address.map_err(FabricError::io("read the peer's address"))?);
        let outbox = Arc::new(Outbox::new()?);
        let woken = outbox.clone();
        let link = Arc::new(Link::new(peer, move || woken.wake()));
        let shared = Arc::new(Shared {
            port: Port::new(outbox.clone(), link.clone()),
            outbox,
            link,
            calls: Calls::default(),
            inbox: Inbox::default(),
            accesses: Accesses::default(),
            certificate: stream.certificate().cloned(),
            silence,
            started: Instant::now(),
            last_heard: AtomicU64::new(0),
        });
        let mut endpoint = Self {
            shared,
            workers: Vec::new(),
            threads: Mutex::default(),
        };
        endpoint.spawn("m2m-registers", &handler, |shared, handler| {
            let served = shared
                .accesses
                .serve(handler, &shared.outbox, REPLY_PATIENCE);
            if let Err(error) = served {
                shared.link.fail(error);
            }
        })?;
        endpoint.spawn("m2m-handler", &handler, Shared::handle)?;
        // Last: it is the one that reports the end, so it must not start if another cannot.
        endpoint.spawn("m2m-stream", &handler, move |shared, handler| {
            shared.carry(stream, handler);
        })?;
        Ok(Arc::new(endpoint))
    }

    fn spawn(
        &mut self,
        name: &str,
        handler: &Arc<dyn Handler>,
        job: impl FnOnce(&Shared, &dyn Handler) + Send + 'static,
    ) -> Result<(), FabricError> {
        let (worker, handler) = (self.shared.clone(), handler.clone());
        let spawned = Builder::new().name(name.into()).spawn(move || {
            let _guard = PanicGuard(&worker.link);
            job(&worker, &*handler);
        });
        let thread = spawned.map_err(|error| {
            self.shared.link.fail(FabricError::Closed);
            self.shared.take_down(Arc::new(FabricError::Closed));
            FabricError::io("start a thread")(error)
        })?;
        self.workers.push(thread.thread().id());
        let threads = self.threads.get_mut();
        threads.unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }
}

impl Shared {
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
        self.outbox
            .push(frame, Some(Instant::now() + REPLY_PATIENCE))
    }

    /// The stream thread.
    fn carry(&self, mut stream: Stream, handler: &dyn Handler) {
        if let Err(error) = unless_panicked(|| self.carry_until_down(&mut stream, handler)) {
            self.link.fail(error);
        }
        let reason = match self.link.reason() {
            Some(reason) => Arc::clone(reason),
            None => Arc::new(FabricError::Closed),
        };
        // What was said before the end is for the peer, as far as the system takes it at once.
        while let Some(frame) = self.outbox.pop() {
            if stream.write(&frame).and_then(|()| stream.flush()).is_err() || stream.wants_write() {
                break;
            }
        }
        stream.close();
        self.take_down(Arc::clone(&reason));
        handler.down(&reason);
    }

    fn carry_until_down(
        &self,
        stream: &mut Stream,
        handler: &dyn Handler,
    ) -> Result<(), FabricError> {
        let interval = Duration::from_millis(HEARTBEAT_INTERVAL_MS);
        let mut sequence = 0;
        let mut next_heartbeat = Instant::now();
        // The first frames may have come with the greeting.
        self.take_frames(stream, handler)?;
        loop {
            self.link.check()?;
            let now = Instant::now();
            if now >= next_heartbeat {
                self.send_heartbeat(sequence, handler)?;
                sequence += 1;
                next_heartbeat = now + interval;
            }
            if let Err(error) = self.send_what_waits(stream) {
                // The peer may have said its last before it hung up.
                while stream.fill()? {
                    self.take_frames(stream, handler)?;
                }
                return Err(error);
            }
            let wait = match stream.wants_write() || self.outbox.is_empty() {
                true => next_heartbeat.saturating_duration_since(now),
                false => Duration::ZERO,
            };
            poll::wait_any(
                &mut [
                    PollFd::new(stream.socket(), stream.interest()),
                    PollFd::new(self.outbox.wake_fd(), PollFlags::IN),
                ],
                wait,
            )?;
            self.outbox.looked();
            for _ in 0..BURST {
                if !stream.fill()? {
                    break;
                }
                self.take_frames(stream, handler)?;
            }
            // After what came was taken: this process may have been held up itself.
            if self.last_heard().elapsed() > self.silence {
                return Err(FabricError::Silent(self.silence));
            }
        }
    }

    /// Sends some of what waits in the outbox.
    fn send_what_waits(&self, stream: &mut Stream) -> Result<(), FabricError> {
        for _ in 0..BURST {
            stream.flush()?;
            // Only when all before is sent: what waits here is bounded, there it is not.
            if stream.wants_write() {
                break;
            }
            let Some(frame) = self.outbox.pop() else {
                break;
            };
            stream.write(&frame)?;
        }
        stream.flush()
    }

    fn take_frames(&self, stream: &mut Stream, handler: &dyn Handler) -> Result<(), FabricError> {
        while let Some(frame) = stream.next_frame()? {
            // Parts of a frame are no sign of life.
            self.hear();
            match frame {
                Frame::Reply(id, reply) => self.calls.finish(id, reply),
                Frame::Request(id, request) => {
                    self.inbox.push(Message::Request(id, request, Vec::new()))?;
                }
                Frame::Event(event) => self.inbox.push(Message::Event(event))?,
                Frame::Register(id, access) => self.accesses.push(id, access)?,
                Frame::Completion(id, value) => self.port.complete(id, value)?,
                // Here, so that whoever then sees a completion sees what it did to the registers.
                Frame::Image(image) => {
                    check_image(&image)?;
                    handler.image(image);
                }
                Frame::Greeting(_) => return Err(FabricError::Protocol("a second greeting")),
            }
        }
        Ok(())
    }

    fn send_heartbeat(&self, sequence: u64, handler: &dyn Handler) -> Result<(), FabricError> {
        let (progress, backlog) = handler.heartbeat();
        let heartbeat = Event::Heartbeat {
            sequence,
            progress,
            backlog,
        };
        match self.offer(&Frame::Event(heartbeat)) {
            // A peer that does not read will miss it; its own silence is what counts then.
            Err(FabricError::Full) => Ok(()),
            other => other,
        }
    }

    /// Sends a frame if there is room.
    fn offer(&self, frame: &Frame) -> Result<(), FabricError> {
        self.link.check()?;
        self.outbox.push(frame.emit()?, None)
    }

    fn hear(&self) {
        let after = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_heard.store(after, Ordering::Relaxed);
    }

    fn last_heard(&self) -> Instant {
        self.started + Duration::from_micros(self.last_heard.load(Ordering::Relaxed))
    }

    /// Ends everything that waits for the peer.
    fn take_down(&self, reason: Arc<FabricError>) {
        self.outbox.close();
        self.calls.end(reason);
        self.inbox.close();
        self.port.end();
        self.accesses.close();
    }
}

impl Fabric for Endpoint {
    fn call(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Reply, FabricError> {
        if !fds.is_empty() {
            return Err(FabricError::NoFds);
        }
        let late = || FabricError::Timeout(timeout);
        let deadline = Instant::now().checked_add(timeout).ok_or_else(late)?;
        let call = self.shared.calls.begin()?;
        let frame = Frame::Request(call.id, request).emit()?;
        match self.shared.outbox.push(frame, Some(deadline)) {
            Ok(()) => {}
            Err(FabricError::Full) => return Err(late()),
            Err(error) => {
                self.shared.link.check()?;
                return Err(error);
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match call.reply.recv_timeout(left) {
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(late()),
            Err(RecvTimeoutError::Disconnected) => {
                self.shared.link.check()?;
                Err(FabricError::Closed)
            }
        }
    }

    fn notify(&self, event: Event) -> Result<(), FabricError> {
        self.shared.offer(&Frame::Event(event))
    }

    fn registers(&self) -> &dyn RegisterPort {
        &self.shared.port
    }

    fn carries_fds(&self) -> bool {
        false
    }

    fn show(&self, image: Image) -> Result<(), FabricError> {
        check_image(&image)?;
        self.shared.offer(&Frame::Image(image))
    }

    fn check_name(&self, name: &str) -> Result<(), FabricError> {
        names::check(self.shared.certificate.as_ref(), name)
    }

    fn is_up(&self) -> bool {
        self.shared.link.reason().is_none()
    }

    fn last_heard(&self) -> Instant {
        self.shared.last_heard()
    }

    fn peer(&self) -> PeerInfo {
        self.shared.link.peer()
    }

    fn close(&self) {
        self.shared.link.fail(FabricError::Closed);
        self.shared.outbox.wake();
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

fn check_image(image: &Image) -> Result<(), FabricError> {
    match image.bytes.len() {
        0..=MAX_IMAGE_BYTES => Ok(()),
        more => Err(WireError::TooLong(more).into()),
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}
