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
    while let Some(stream) = next(source, stop).unwrap_or_else(|error| {
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

/// The next front end; `None` when the function is to stop.
fn next(source: &Source, stop: &StopFd) -> io::Result<Option<UnixStream>> {
    let kicks = Kicks::new()?;
    kicks.watch(stop, Event::Stop)?;
    if let Source::Listener(listener) = source {
        listener.set_nonblocking(true)?;
        kicks.watch(listener, Event::Socket)?;
    }
    let mut events = Vec::new();
    let mut timeout = None;
    loop {
        if let Source::FrontEnd(path) = source {
            if let Ok(stream) = connect(path) {
                return Ok(Some(stream));
            }
            timeout = Some(&RETRY);
        }
        kicks.wait(&mut events, timeout)?;
        if events.contains(&Event::Stop) {
            return Ok(None);
        }
        if let Source::Listener(listener) = source {
            match listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => timeout = None,
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => return Err(e),
                Err(e) => {
                    log::warn!("a front end is not accepted: {e}");
                    // The listener would wake at once.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
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
