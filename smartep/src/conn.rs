//! Framing on the socket: whole messages with their descriptors in, whole messages out.
//!
//! A message is read as its header and then exactly its body, so that descriptors which the kernel hands over
//! with either belong to this message and no other.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use log::warn;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{HEADER_SIZE, Header, MAX_FDS, MAX_MESSAGE};

/// How long a client may leave its socket full before the connection is given up.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a connection cannot go on.
#[derive(Debug, Error)]
pub enum ConnError {
    /// The system refused.
    #[error("the socket failed: {0}")]
    System(#[from] Errno),
    /// A header's size is impossible.
    #[error("a message says it has {0} bytes; {HEADER_SIZE} to {MAX_MESSAGE} are possible")]
    Size(u32),
    /// The stream ended inside a message.
    #[error("the client closed the connection inside a message")]
    Torn,
    /// Too many descriptors.
    #[error("a message carries more than {MAX_FDS} descriptors")]
    TooManyFds,
    /// The client does not read.
    #[error("the client left its socket full for {} s", SEND_TIMEOUT.as_secs())]
    Stuck,
}

/// Ends a server from another thread.
#[derive(Debug, Clone)]
pub struct StopFd(Arc<Stop>);

#[derive(Debug)]
struct Stop {
    event: OwnedFd,
    /// Seen without a system call by a reader that never has to wait.
    stopped: AtomicBool,
}

impl StopFd {
    /// Not stopped.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(Stop {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
        })))
    }

    /// Stops whoever serves with this, for good.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        // Only a full counter can fail, and that is stopped as well.
        let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
    }

    fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }
}

impl AsFd for StopFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

/// What came in.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A message; its body is in the buffer that was passed.
    Message(Header, Vec<OwnedFd>),
    /// The client closed between messages.
    Closed,
    /// [`StopFd::stop`].
    Stopped,
}

/// The reading half.
#[derive(Debug)]
pub(crate) struct Receiver<'a> {
    pub(crate) stream: &'a UnixStream,
    pub(crate) stop: &'a StopFd,
    /// Further clients are accepted and closed at once, so that they do not wait.
    pub(crate) listener: Option<&'a UnixListener>,
}

impl Receiver<'_> {
    /// The next message; `body` is overwritten with what follows the header.
    pub(crate) fn next(&self, body: &mut Vec<u8>) -> Result<Incoming, ConnError> {
        // A client that never pauses must not keep the server from stopping.
        if self.stop.is_stopped() {
            return Ok(Incoming::Stopped);
        }
        let (mut fds, mut header) = (Vec::new(), [0; HEADER_SIZE]);
        match self.fill(&mut header, &mut fds)? {
            Filled::All => {}
            Filled::Stopped => return Ok(Incoming::Stopped),
            Filled::Closed(0) => return Ok(Incoming::Closed),
            Filled::Closed(_) => return Err(ConnError::Torn),
        }
        let Ok(header) = Header::read_from_bytes(&header) else {
            return Err(ConnError::Torn);
        };
        let size = header.size as usize;
        if !(HEADER_SIZE..=MAX_MESSAGE).contains(&size) {
            return Err(ConnError::Size(header.size));
        }
        body.resize(size - HEADER_SIZE, 0);
        match self.fill(body, &mut fds)? {
            Filled::All => Ok(Incoming::Message(header, fds)),
            Filled::Stopped => Ok(Incoming::Stopped),
            Filled::Closed(_) => Err(ConnError::Torn),
        }
    }

    fn fill(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Filled, ConnError> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|r| !r.is_empty()) {
            // One more than allowed fits, so that too many are noticed and not just cut off.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let result = recvmsg(
                self.stream,
                &mut [IoSliceMut::new(rest)],
                &mut ancillary,
                flags,
            );
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            match result {
                Ok(received) => {
                    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
                        return Err(ConnError::TooManyFds);
                    }
                    if received.bytes == 0 {
                        return Ok(Filled::Closed(done));
                    }
                    done += received.bytes;
                }
                Err(Errno::AGAIN) => {
                    if self.wait()? {
                        return Ok(Filled::Stopped);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Filled::Closed(done)),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(Filled::All)
    }

    /// Sleeps until there is something to read; true when stopped.
    fn wait(&self) -> Result<bool, ConnError> {
        let mut fds = vec![
            PollFd::new(self.stream, PollFlags::IN),
            PollFd::new(self.stop, PollFlags::IN),
        ];
        if let Some(listener) = self.listener {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready = |i: usize| fds.get(i).is_some_and(|f| !f.revents().is_empty());
        // With news on the stream it is read first: a client that left makes room for the one that waits.
        if let Some(listener) = self.listener.filter(|_| ready(2) && !ready(0)) {
            match listener.accept() {
                Ok(_) => warn!("a second client is closed: the function serves one at a time"),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                // Out of descriptors: it stays ready, and must not make this a busy loop.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        Ok(ready(1))
    }
}

enum Filled {
    All,
    /// The stream ended after so many bytes.
    Closed(usize),
    Stopped,
}

/// The writing half; replies and messages of several threads go out whole.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Gone for good after the first failure: what follows a message cut short would be taken for its rest.
    stream: Mutex<Option<UnixStream>>,
}

impl Sender {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream: Mutex::new(Some(stream)),
        }
    }

    /// Sends a message of a header, whose size is filled in, and the parts of its body; descriptors ride on its
    /// first byte. A failure ends the connection for both directions.
    pub(crate) fn send(
        &self,
        mut header: Header,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ConnError> {
        let body: usize = parts.iter().map(|p| p.len()).sum();
        header.size = (HEADER_SIZE + body) as u32;
        let mut message = Vec::with_capacity(HEADER_SIZE + body);
        message.extend_from_slice(header.as_bytes());
        parts
            .iter()
            .for_each(|part| message.extend_from_slice(part));
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &*stream {
            Some(stream) => send_all(stream, &message, fds),
            None => return Err(Errno::PIPE.into()),
        };
        if result.is_err() {
            end(&mut stream);
        }
        result
    }

    /// Ends the connection for both directions, whoever still holds this.
    pub(crate) fn close(&self) {
        end(&mut self.stream.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn end(stream: &mut Option<UnixStream>) {
    if let Some(stream) = stream.take() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn send_all(
    stream: &UnixStream,
    message: &[u8],
    mut fds: &[BorrowedFd<'_>],
) -> Result<(), ConnError> {
    let (mut done, mut deadline) = (0, None);
    while let Some(rest) = message.get(done..).filter(|r| !r.is_empty()) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ConnError::TooManyFds);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(stream, &[IoSlice::new(rest)], &mut ancillary, flags) {
            Ok(sent) => {
                done += sent;
                fds = &[];
            }
            Err(Errno::AGAIN) => {
                wait_writable(
                    stream,
                    *deadline.get_or_insert_with(|| Instant::now() + SEND_TIMEOUT),
                )?;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Waits for room. The deadline is that of the whole message: a client that reads a byte now and then is as
/// stuck as one that reads none.
fn wait_writable(stream: &UnixStream, deadline: Instant) -> Result<(), ConnError> {
    let mut fds = [PollFd::new(stream, PollFlags::OUT)];
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ConnError::Stuck);
    }
    let timeout = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(0) => Err(ConnError::Stuck),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
