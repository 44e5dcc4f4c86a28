//! Framing on the socket: whole messages with their descriptors in, whole messages out.
//!
//! A message is read without taking it out of the socket ([`Receiver::next`]); it is taken out when it was dealt
//! with ([`Receiver::done`]). So the socket, which outlives this process, is the memory of what is not done yet.
//! Messages above [`IN_PLACE`], which do not fit into a socket, and those whose descriptors come with a part of
//! their bytes are the exception; no VMM sends any.
//!
//! Descriptors belong to the message whose bytes they came with: one read never sees those of two messages, because
//! the kernel ends it behind the bytes that carry some, and a read of several messages that brought some is done
//! again for the first message alone.

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

use crate::fault;
use crate::proto::{HEADER_SIZE, Header, MAX_FDS, MAX_MESSAGE};
use crate::state::State;

/// How long a client may leave its socket full before the connection is given up.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest message that is read in place, bytes: a DMA reply of 64 KiB fits.
const IN_PLACE: usize = 68 << 10;
/// Bytes of the first look at a message: an access of a register fits, and a few of them are soon walked over.
const FIRST_LOOK: usize = 64;
/// Longest pause between two looks at a message of which a part is there.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

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
    /// A message; all of it, header included, is in the buffer that was passed.
    Message(Header, Vec<OwnedFd>),
    /// The client closed between messages.
    Closed,
    /// There is none, for as long as was to be waited.
    Nothing,
    /// [`StopFd::stop`].
    Stopped,
}

/// The reading half.
#[derive(Debug)]
pub(crate) struct Receiver<'a> {
    stream: &'a UnixStream,
    stop: &'a StopFd,
    /// Further clients are accepted and closed at once, so that they do not wait.
    listener: Option<&'a UnixListener>,
    /// Bytes of the message that [`Self::next`] showed and that are still in the socket.
    left: usize,
}

impl<'a> Receiver<'a> {
    pub(crate) fn new(
        stream: &'a UnixStream,
        stop: &'a StopFd,
        listener: Option<&'a UnixListener>,
    ) -> Self {
        Self {
            stream,
            stop,
            listener,
            left: 0,
        }
    }

    /// The next message, or the same until it is [`Self::done`]. `buffer` is overwritten; it is at least as long as
    /// the message afterwards. With `patience`, waits no longer than that.
    pub(crate) fn next(
        &mut self,
        buffer: &mut Vec<u8>,
        patience: Option<Duration>,
    ) -> Result<Incoming, ConnError> {
        let mut waited = false;
        let mut pause = Duration::from_micros(50);
        let mut look = FIRST_LOOK;
        self.left = 0;
        loop {
            // A client that never pauses must not keep the server from stopping.
            if self.stop.is_stopped() {
                return Ok(Incoming::Stopped);
            }
            if buffer.len() < look {
                buffer.resize(look, 0);
            }
            let bytes = buffer.get_mut(..look).unwrap_or_default();
            let mut fds = Vec::new();
            let seen = match self.receive(bytes, RecvFlags::PEEK, &mut fds) {
                Ok(0) => return Ok(Incoming::Closed),
                Ok(seen) => seen,
                Err(ConnError::System(Errno::AGAIN)) => {
                    if waited && patience.is_some() {
                        return Ok(Incoming::Nothing);
                    }
                    waited = true;
                    if self.wait(PollFlags::IN, patience)? {
                        return Ok(Incoming::Stopped);
                    }
                    continue;
                }
                Err(ConnError::System(Errno::CONNRESET | Errno::PIPE)) => {
                    return Ok(Incoming::Closed);
                }
                Err(error) => return Err(error),
            };
            let header = bytes.get(..seen.min(HEADER_SIZE));
            if let Some(Ok(header)) = header.map(Header::read_from_bytes) {
                let size = header.size as usize;
                if !(HEADER_SIZE..=MAX_MESSAGE).contains(&size) {
                    return Err(ConnError::Size(header.size));
                }
                if size > IN_PLACE {
                    return self.take_pieces(buffer);
                }
                if seen == size || seen > size && fds.is_empty() {
                    self.left = size;
                    return Ok(Incoming::Message(header, fds));
                }
                if look != size {
                    look = size;
                    continue;
                }
            }
            // What comes after descriptors is not seen before they are taken.
            if !fds.is_empty() {
                return self.take_pieces(buffer);
            }
            if self.wait(PollFlags::RDHUP, Some(pause))? {
                return Ok(Incoming::Stopped);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Whether the socket holds nothing that could be shown.
    pub(crate) fn is_empty(&self) -> bool {
        let mut byte = [0];
        let mut fds = Vec::new();
        let seen = self.receive(&mut byte, RecvFlags::PEEK, &mut fds);
        matches!(seen, Err(ConnError::System(Errno::AGAIN)))
    }

    /// The message that was shown is dealt with: takes it out of the socket.
    pub(crate) fn done(&mut self) -> Result<(), ConnError> {
        let mut bytes = [0; 4096];
        while self.left != 0 {
            let some = self.left.min(bytes.len());
            let bytes = bytes.get_mut(..some).unwrap_or_default();
            // Without room for descriptors the kernel drops them; the look at the message brought copies.
            match rustix::net::recv(self.stream, bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(ConnError::Torn),
                Ok((_, taken)) => self.left -= taken.min(self.left),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Takes a message that cannot be seen as a whole in the socket. Nobody can take it over half read.
    fn take_pieces(&self, buffer: &mut Vec<u8>) -> Result<Incoming, ConnError> {
        let (mut fds, mut start) = (Vec::new(), [0; HEADER_SIZE]);
        match self.fill(&mut start, &mut fds)? {
            Filled::All => {}
            Filled::Stopped => return Ok(Incoming::Stopped),
            Filled::Closed => return Err(ConnError::Torn),
        }
        let Ok(header) = Header::read_from_bytes(&start) else {
            return Err(ConnError::Torn);
        };
        let size = header.size as usize;
        if !(HEADER_SIZE..=MAX_MESSAGE).contains(&size) {
            return Err(ConnError::Size(header.size));
        }
        buffer.resize(size.max(buffer.len()), 0);
        let rest = buffer.get_mut(HEADER_SIZE..size).unwrap_or_default();
        match self.fill(rest, &mut fds)? {
            Filled::All => Ok(Incoming::Message(header, fds)),
            Filled::Stopped => Ok(Incoming::Stopped),
            Filled::Closed => Err(ConnError::Torn),
        }
    }

    fn receive(
        &self,
        bytes: &mut [u8],
        how: RecvFlags,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<usize, ConnError> {
        loop {
            // One more than allowed fits, so that too many are noticed and not just cut off.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | how;
            let result = recvmsg(
                self.stream,
                &mut [IoSliceMut::new(bytes)],
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
                    return Ok(received.bytes);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Filled, ConnError> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|r| !r.is_empty()) {
            match self.receive(rest, RecvFlags::empty(), fds) {
                Ok(0) => return Ok(Filled::Closed),
                Ok(bytes) => done += bytes,
                Err(ConnError::System(Errno::AGAIN)) => {
                    if self.wait(PollFlags::IN, None)? {
                        return Ok(Filled::Stopped);
                    }
                }
                Err(ConnError::System(Errno::CONNRESET | Errno::PIPE)) => {
                    return Ok(Filled::Closed);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Filled::All)
    }

    /// Sleeps until there is `news` of the client, no longer than `time`; true when stopped. `RDHUP` is for when the
    /// beginning of a message keeps the socket readable: a client that closes now is an error.
    fn wait(&self, news: PollFlags, time: Option<Duration>) -> Result<bool, ConnError> {
        let mut fds = vec![
            PollFd::new(self.stream, news),
            PollFd::new(self.stop, PollFlags::IN),
        ];
        if let Some(listener) = self.listener {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let timeout = time.and_then(|pause| Timespec::try_from(pause).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready = |i: usize| fds.get(i).is_some_and(|f| !f.revents().is_empty());
        if news == PollFlags::RDHUP && ready(0) {
            return Err(ConnError::Torn);
        }
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
    /// The stream ended before.
    Closed,
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
        header: Header,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ConnError> {
        self.send_noted(header, parts, fds, None)
    }

    /// The same for the reply to the request that was begun in `state`, which notes that it was sent.
    pub(crate) fn send_noted(
        &self,
        mut header: Header,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        state: Option<&State>,
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
            Some(stream) => send_all(stream, &message, fds, state),
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
    state: Option<&State>,
) -> Result<(), ConnError> {
    let (mut done, mut deadline) = (0, None);
    // Descriptors ride on regions that a client maps; a function that has such regions notes no replies.
    if let Some(state) = state.filter(|_| fds.is_empty()) {
        fault::point("reply");
        done = loop {
            match state.reply(stream.as_fd(), message) {
                Ok(sent) => break sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    wait_writable(
                        stream,
                        *deadline.get_or_insert_with(|| Instant::now() + SEND_TIMEOUT),
                    )?;
                }
                Err(error) => return Err(error.into()),
            }
        };
        fault::point("replied");
    }
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
