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
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo, RegisterPort};
use crate::inbox::Message;
use crate::link::Link;
use crate::poll;
use crate::proto::{Event, HEARTBEAT_INTERVAL_MS, Image, MAX_IMAGE_BYTES, Reply, Request};
use crate::session::{REPLY_PATIENCE, Session, Threads, heartbeat};
use crate::wire::{Frame, WireError};
use rustix::event::{PollFd, PollFlags};
use rustls::pki_types::CertificateDer;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads in a row before the stream thread looks after what is to be sent, and frames sent before it reads.
const BURST: usize = 16;

/// What the threads and the handle share.
#[derive(Debug)]
struct Shared {
    session: Session,
    outbox: Arc<Outbox>,
    port: Port,
    accesses: Accesses,
    certificate: Option<CertificateDer<'static>>,
    silence: Duration,
}

/// The handle of a remote connection.
#[derive(Debug)]
pub(super) struct Endpoint {
    shared: Arc<Shared>,
    threads: Threads,
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
            session: Session::new(link),
            accesses: Accesses::default(),
            certificate: stream.certificate().cloned(),
            silence,
        });
        let mut endpoint = Self {
            shared,
            threads: Threads::default(),
        };
        endpoint.spawn("m2m-registers", &handler, |shared, handler| {
            let served = shared
                .accesses
                .serve(handler, &shared.outbox, REPLY_PATIENCE);
            if let Err(error) = served {
                shared.session.link.fail(error);
            }
        })?;
        endpoint.spawn("m2m-handler", &handler, |shared, handler| {
            shared.session.handle(handler, |frame, deadline| {
                shared.outbox.push(frame, Some(deadline))
            });
        })?;
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
    /// The stream thread.
    fn carry(&self, mut stream: Stream, handler: &dyn Handler) {
        let reason = self
            .session
            .until_down(|| self.carry_until_down(&mut stream, handler));
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
            self.session.link.check()?;
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
            if self.session.last_heard().elapsed() > self.silence {
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
            self.session.hear();
            match frame {
                Frame::Reply(id, reply) => self.session.calls.finish(id, reply),
                Frame::Request(id, request) => {
                    self.session
                        .inbox
                        .push(Message::Request(id, request, Vec::new()))?;
                }
                Frame::Event(event) => self.session.inbox.push(Message::Event(event))?,
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
        match self.offer(&Frame::Event(heartbeat(sequence, handler))) {
            // A peer that does not read will miss it; its own silence is what counts then.
            Err(FabricError::Full) => Ok(()),
            other => other,
        }
    }

    /// Sends a frame if there is room.
    fn offer(&self, frame: &Frame) -> Result<(), FabricError> {
        self.session.link.check()?;
        self.outbox.push(frame.emit()?, None)
    }

    /// Ends everything that waits for the peer.
    fn take_down(&self, reason: Arc<FabricError>) {
        self.outbox.close();
        self.session.end(reason);
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
        let outbox = &self.shared.outbox;
        self.shared
            .session
            .call(request, timeout, |frame, deadline| {
                outbox.push(frame, Some(deadline))
            })
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
        self.shared.outbox.wake();
        self.threads.join();
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
