//! Frames over TLS over TCP. Never blocks without a deadline.

use crate::error::FabricError;
use crate::poll;
use crate::wire::{Frame, HEADER_BYTES};
use rustix::event::PollFlags;
use rustls::Connection;
use rustls::pki_types::CertificateDer;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// How long a refused peer gets to read why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Stream {
    socket: TcpStream,
    tls: Connection,
    /// What was decrypted and is not taken yet: less than a frame, and what one read brought.
    inbound: Vec<u8>,
    /// Bytes of it that were taken.
    taken: usize,
}

impl Stream {
    /// Agrees on keys and verifies the peer, until `deadline`.
    ///
    /// # Errors
    /// [`FabricError::Tls`] with what one side does not like about the other, [`FabricError::Timeout`].
    pub(super) fn agree(
        socket: TcpStream,
        mut tls: Connection,
        deadline: Instant,
    ) -> Result<Self, FabricError> {
        let prepared = socket
            .set_nonblocking(true)
            .and_then(|()| socket.set_nodelay(true));
        prepared.map_err(FabricError::io("prepare a TCP connection"))?;
        // The outbox is what bounds.
        tls.set_buffer_limit(None);
        let mut stream = Self {
            socket,
            tls,
            inbound: Vec::new(),
            taken: 0,
        };
        let agreed = stream.drive(deadline, |stream| {
            Ok((!stream.tls.is_handshaking()).then_some(()))
        });
        match agreed {
            Ok(()) => Ok(stream),
            Err(error) => {
                stream.part();
                Err(error)
            }
        }
    }

    /// Sends and receives until `done` has something.
    fn drive<T>(
        &mut self,
        deadline: Instant,
        mut done: impl FnMut(&mut Self) -> Result<Option<T>, FabricError>,
    ) -> Result<T, FabricError> {
        let started = Instant::now();
        loop {
            if let Err(error) = self.flush() {
                // The peer may have said why before it hung up.
                self.fill()?;
                return Err(error);
            }
            if let Some(done) = done(self)? {
                return Ok(done);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(FabricError::Timeout(
                    deadline.saturating_duration_since(started),
                ));
            }
            poll::wait(&self.socket, self.interest(), left)?;
            self.fill()?;
        }
    }

    /// Sends a frame and receives one, until `deadline`.
    pub(super) fn send(&mut self, frame: &[u8], deadline: Instant) -> Result<(), FabricError> {
        self.write(frame)?;
        self.drive(deadline, |stream| Ok((!stream.wants_write()).then_some(())))
    }

    /// The next frame, until `deadline`.
    pub(super) fn receive(&mut self, deadline: Instant) -> Result<Frame, FabricError> {
        self.drive(deadline, Self::next_frame)
    }

    /// The peer's certificate, which was verified.
    pub(super) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.tls.peer_certificates()?.first()
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Encrypts a frame; [`flush`](Self::flush) sends it.
    pub(super) fn write(&mut self, frame: &[u8]) -> Result<(), FabricError> {
        let written = self.tls.writer().write_all(frame);
        written.map_err(FabricError::io("encrypt a message"))
    }

    /// Whether something encrypted is not sent yet.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.wants_write()
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> PollFlags {
        match self.wants_write() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        }
    }

    /// Sends as much as the system takes now.
    pub(super) fn flush(&mut self) -> Result<(), FabricError> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ended("send to the peer", error)),
            }
        }
        Ok(())
    }

    /// Takes what came, at most some ten KiB; `false` when nothing did.
    pub(super) fn fill(&mut self) -> Result<bool, FabricError> {
        match self.tls.read_tls(&mut self.socket) {
            Ok(0) => return Err(FabricError::PeerClosed),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(false),
            Err(error) => return Err(ended("receive from the peer", error)),
        }
        let state = match self.tls.process_new_packets() {
            Ok(state) => state,
            Err(error) => {
                // The peer is to know why; if it is gone, nothing is lost.
                let _ = self.flush();
                return Err(error.into());
            }
        };
        self.inbound.drain(..self.taken);
        self.taken = 0;
        let (had, more) = (self.inbound.len(), state.plaintext_bytes_to_read());
        self.inbound.resize(had + more, 0);
        let fresh = self.inbound.get_mut(had..).unwrap_or_default();
        self.tls
            .reader()
            .read_exact(fresh)
            .map_err(FabricError::io("decrypt a message"))?;
        match more == 0 && state.peer_has_closed() {
            true => Err(FabricError::PeerClosed),
            false => Ok(true),
        }
    }

    /// The next whole frame of what came. What is no frame is an error as soon as its header is there.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame>, FabricError> {
        let rest = self.inbound.get(self.taken..).unwrap_or_default();
        let Some(header) = rest.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let bytes = Frame::bytes(header)?;
        let Some(frame) = rest.get(..bytes) else {
            return Ok(None);
        };
        let frame = Frame::parse(frame)?;
        self.taken += bytes;
        Ok(Some(frame))
    }

    /// Says that nothing comes any more, and hangs up.
    pub(super) fn close(&mut self) {
        self.tls.send_close_notify();
        let _ = self.flush();
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Hangs up on a peer that was refused. What it still sends is read for a while: otherwise the system would throw
    /// away the reason, which may be on its way.
    pub(super) fn part(&mut self) {
        let _ = self.flush();
        let _ = self.socket.shutdown(Shutdown::Write);
        let deadline = Instant::now() + LAST_WORDS;
        let mut nothing = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let waits = !left.is_zero() && poll::wait(&self.socket, PollFlags::IN, left).is_ok();
            match self.socket.read(&mut nothing) {
                Ok(0) => break,
                Err(error) if error.kind() != ErrorKind::WouldBlock => break,
                _ if waits => {}
                _ => break,
            }
        }
    }
}

fn ended(what: &'static str, error: std::io::Error) -> FabricError {
    match error.kind() {
        ErrorKind::BrokenPipe
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::NotConnected
        | ErrorKind::UnexpectedEof => FabricError::PeerClosed,
        _ => FabricError::io(what)(error),
    }
}
