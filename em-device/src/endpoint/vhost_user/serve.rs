//! The thread of a function: front ends, one after the other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use m2m_fabric::proto::FunctionState;
use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use smartep::server::StopFd;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::super::lock;
use super::face::{Face, Parts};
use super::kicks::{Event, Kicks};
use super::{Shared, early};

/// Pause before the next try to connect or to accept.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// No pause.
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Where front ends come from.
#[derive(Debug)]
pub(super) enum Source {
    /// They connect.
    Listener(UnixListener),
    /// One listens.
    FrontEnd(String),
}

/// How a front end's connection ended.
enum End {
    Gone,
    Stopped,
}

/// Serves front ends until `stop`.
pub(super) fn run(parts: &Arc<Parts>, shared: &Shared, source: &Source, stop: &StopFd) {
    let id = parts.seat.id;
    let mut tries = Tries::default();
    while let Some(stream) = next(id, source, &mut tries, stop).unwrap_or_else(|error| {
        log::error!("function {id} is not served any more: {error}");
        None
    }) {
        match one(parts, shared, stream, stop) {
            Ok(End::Stopped) => return,
            Ok(End::Gone) => log::info!("function {id}: the front end left"),
            Err(error) => log::warn!("function {id}: the front end is cut off: {error}"),
        }
    }
}

/// Tries to connect to a front end that listens.
#[derive(Debug, Default)]
struct Tries {
    /// Whether there was one.
    any: bool,
    /// How the last one failed.
    error: Option<Errno>,
}

impl Tries {
    /// How long to wait before the next one: a front end that takes connections and closes them does not make the thread
    /// spin.
    fn pause(&mut self) -> &'static Timespec {
        match std::mem::replace(&mut self.any, true) {
            true => &RETRY,
            false => &NOW,
        }
    }

    /// One ended so. Answers an error that the one before did not have.
    fn ended(&mut self, error: Option<Errno>) -> Option<Errno> {
        let former = std::mem::replace(&mut self.error, error);
        error.filter(|_| former != error)
    }
}

/// The next front end; `None` when the function is to stop.
fn next(
    id: u32,
    source: &Source,
    tries: &mut Tries,
    stop: &StopFd,
) -> io::Result<Option<UnixStream>> {
    let kicks = Kicks::new()?;
    kicks.watch(stop, Event::Stop)?;
    match source {
        Source::Listener(listener) => accept(listener, &kicks),
        Source::FrontEnd(path) => reach(id, path, tries, &kicks),
    }
}

/// Waits for a front end that connects.
fn accept(listener: &UnixListener, kicks: &Kicks) -> io::Result<Option<UnixStream>> {
    listener.set_nonblocking(true)?;
    kicks.watch(listener, Event::Socket)?;
    let mut events = Vec::new();
    loop {
        kicks.wait(&mut events, None)?;
        if events.contains(&Event::Stop) {
            return Ok(None);
        }
        match listener.accept() {
            Ok((stream, _)) => return Ok(Some(stream)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => return Err(e),
            Err(e) => {
                log::warn!("a front end is not accepted: {e}");
                // The listener would wake at once.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }
}

/// Connects to a front end that listens, as soon as it does.
fn reach(id: u32, path: &str, tries: &mut Tries, kicks: &Kicks) -> io::Result<Option<UnixStream>> {
    let mut events = Vec::new();
    loop {
        kicks.wait(&mut events, Some(tries.pause()))?;
        if events.contains(&Event::Stop) {
            return Ok(None);
        }
        let reached = connect(path);
        if let Some(error) = tries.ended(reached.as_ref().err().copied()) {
            log::warn!("function {id}: no front end at {path}: {error}");
        }
        if let Ok(stream) = reached {
            return Ok(Some(stream));
        }
    }
}

/// Connects without waiting for who listens.
fn connect(path: &str) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream
        .set_nonblocking(false)
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    Ok(stream)
}

fn one(
    parts: &Arc<Parts>,
    shared: &Shared,
    stream: UnixStream,
    stop: &StopFd,
) -> Result<End, Error> {
    let kicks = Arc::new(Kicks::new().map_err(Error::SocketError)?);
    let copy = stream.try_clone().map_err(Error::SocketError)?;
    let for_others = stream.try_clone().map_err(Error::SocketError)?;
    for (fd, event) in [(stop.as_fd(), Event::Stop), (copy.as_fd(), Event::Socket)] {
        kicks.watch(fd, event).map_err(Error::SocketError)?;
    }
    let id = parts.seat.id;
    *lock(&shared.stream) = Some(for_others);
    parts.report(FunctionState::Connected);
    log::info!("function {id}: a front end is here");
    let face = Arc::new(Mutex::new(Face::new(parts.clone(), kicks.clone())));
    let mut handler = BackendReqHandler::from_stream(stream, face.clone());
    let end = serve(&copy, &mut handler, &face, shared, &kicks);
    lock(&face).leave();
    *lock(&shared.running) = false;
    *lock(&shared.stream) = None;
    parts.report(FunctionState::Waiting);
    // Last, so that a front end that is cut off learns of it when nothing touches its memory any more.
    drop((handler, copy));
    end
}

fn serve(
    stream: &UnixStream,
    handler: &mut BackendReqHandler<Mutex<Face>>,
    face: &Mutex<Face>,
    shared: &Shared,
    kicks: &Kicks,
) -> Result<End, Error> {
    let parts = lock(face).parts.clone();
    let mut events = Vec::new();
    loop {
        kicks.wait(&mut events, None).map_err(Error::SocketError)?;
        if events.contains(&Event::Stop) {
            return Ok(End::Stopped);
        }
        let mut kicked = false;
        for event in &events {
            if let Event::Kick(ring) = event {
                kicked |= parts.signals.count_kick(*ring);
            }
        }
        if kicked {
            parts.seat.worker.kick();
        }
        if !events.contains(&Event::Socket) {
            continue;
        }
        let early = early::enable(stream, &mut lock(face))?;
        let done = if early {
            Ok(())
        } else {
            handler.handle_request()
        };
        match done {
            Ok(()) => {}
            Err(Error::Disconnected) => return Ok(End::Gone),
            Err(Error::SocketBroken(e)) if e.kind() == io::ErrorKind::ConnectionReset => {
                return Ok(End::Gone);
            }
            Err(error) => {
                if !std::mem::take(&mut lock(face).refused) {
                    return Err(error);
                }
                log::debug!("a request is refused: {error}");
            }
        }
        *lock(&shared.running) = lock(face).is_running();
    }
}

/// Ends a read or a write of the thread.
pub(super) fn interrupt(stream: Option<&UnixStream>) {
    let shut = stream.map(|stream: &UnixStream| -> BorrowedFd<'_> { stream.as_fd() });
    if let Some(fd) = shut {
        // One that is gone already needs none.
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_try_but_the_first_waits_also_after_one_that_succeeded() {
        let mut tries = Tries::default();
        assert_eq!(tries.pause(), &NOW);
        tries.ended(None);
        for error in [None, Some(Errno::NOENT), None] {
            assert_eq!(tries.pause(), &RETRY);
            tries.ended(error);
        }
    }

    #[test]
    fn an_error_is_told_when_it_is_another_than_before() {
        let mut tries = Tries::default();
        let (none, refused) = (Some(Errno::NOENT), Some(Errno::CONNREFUSED));
        for (error, told) in [
            (none, none),
            (none, None),
            (refused, refused),
            (refused, None),
            (None, None),
            (refused, refused),
        ] {
            assert_eq!(tries.ended(error), told);
        }
    }
}
