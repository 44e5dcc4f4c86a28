//! The OM's end of the socket.

use super::socket::Socket;
use super::{address, handshake, new_socket};
use crate::error::FabricError;
use crate::fabric::{Arrival, Fabric, Handler, Listener, PeerInfo};
use crate::poll::wait;
use rustix::event::PollFlags;
use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// A socket that EMs connect to, for its owner and root only (mode 0600). Dropping it removes the
/// socket's file, if it still is its own.
#[derive(Debug)]
pub struct LocalListener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file we made.
    file: (u64, u64),
    closed: AtomicBool,
}

impl LocalListener {
    /// Listens at `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// [`FabricError::InUse`], [`FabricError::NotASocket`], [`FabricError::PathTooLong`], or
    /// [`FabricError::Io`] for example when the directory does not exist.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, FabricError> {
        let path = path.as_ref();
        let address = address(path)?;
        remove_stale(path)?;
        let socket = new_socket()?;
        rustix::net::bind(&socket, &address).map_err(|error| match error {
            Errno::ADDRINUSE => FabricError::InUse(path.into()),
            other => FabricError::io("create the fabric's socket")(other),
        })?;
        // Nobody can connect before `listen`, so nobody gets in before the mode is right.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)
            .map_err(FabricError::io("set the mode of the fabric's socket"))?;
        let file = identity(
            &rustix::fs::lstat(path).map_err(FabricError::io("look at the fabric's socket"))?,
        );
        rustix::net::listen(&socket, BACKLOG)
            .map_err(FabricError::io("listen on the fabric's socket"))?;
        // Accepting must not block when a peer gives up between poll and accept.
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(FabricError::io("make the fabric's socket non-blocking"))?;
        Ok(Self {
            socket,
            path: path.into(),
            file,
            closed: AtomicBool::new(false),
        })
    }

    /// Waits for the next permitted peer; others are refused with a line in the log.
    ///
    /// # Errors
    /// [`FabricError::Closed`] after [`close`](Self::close).
    pub fn accept(&self) -> Result<Pending, FabricError> {
        loop {
            if let Some(pending) = self.accept_timeout(Duration::from_secs(3600))? {
                return Ok(pending);
            }
        }
    }

    /// Like [`accept`](Self::accept), `None` when nobody came within `timeout`.
    ///
    /// # Errors
    /// Like `accept`.
    pub fn accept_timeout(&self, timeout: Duration) -> Result<Option<Pending>, FabricError> {
        let deadline = Instant::now() + timeout;
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(FabricError::Closed);
            }
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    let socket = Socket::new(socket);
                    let peer = socket.peer()?;
                    match handshake::permit(peer, rustix::process::geteuid().as_raw()) {
                        Ok(()) => return Ok(Some(Pending { socket, peer })),
                        Err(error) => log::warn!("refused a connection: {error}"),
                    }
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    wait(&self.socket, PollFlags::IN, left)?;
                }
                Err(Errno::INVAL) if self.closed.load(Ordering::Acquire) => {
                    return Err(FabricError::Closed);
                }
                Err(error) => return Err(FabricError::io("accept a connection")(error)),
            }
        }
    }

    /// Ends waiting and future [`accept`](Self::accept)s.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for LocalListener {
    /// For an event loop: readable when [`LocalListener::accept`] would not wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        let still_ours = rustix::fs::lstat(&self.path).is_ok_and(|now| identity(&now) == self.file);
        if still_ours {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl LocalListener {
    /// Whether a listener at `path` died and left its socket.
    pub fn is_stale(path: &Path) -> bool {
        let Ok((socket, address)) = new_socket().and_then(|s| Ok((s, address(path)?))) else {
            return false;
        };
        rustix::net::connect(socket, &address) == Err(Errno::CONNREFUSED)
    }
}

/// Removes the socket of a listener that died.
fn remove_stale(path: &Path) -> Result<(), FabricError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(FabricError::io("look at the socket path")(error)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(FabricError::NotASocket(path.into()));
    }
    match rustix::net::connect(new_socket()?, &address(path)?) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path)
            .map_err(FabricError::io("remove the socket of a dead listener")),
        // Connected, or of another type, or not ours to connect to: someone has it.
        _ => Err(FabricError::InUse(path.into())),
    }
}

/// A permitted peer that has not been greeted yet. Dropping it closes the connection.
#[derive(Debug)]
pub struct Pending {
    socket: Socket,
    peer: PeerInfo,
}

impl Pending {
    /// Who connected.
    pub fn peer(&self) -> PeerInfo {
        self.peer
    }

    /// Agrees on the version, passes the register window and starts the connection. Waits at most
    /// 5 s for the peer; to accept others meanwhile, call it on a thread of its own.
    ///
    /// # Errors
    /// [`FabricError::Wire`] with the versions when the two programs do not fit,
    /// [`FabricError::Timeout`].
    pub fn start(self, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError> {
        handshake::welcome(self.socket, handler)
    }
}

impl Listener for LocalListener {
    fn accept(&self) -> Result<Box<dyn Arrival>, FabricError> {
        Ok(Box::new(self.accept()?))
    }

    fn close(&self) {
        self.close();
    }
}

impl Arrival for Pending {
    fn peer(&self) -> PeerInfo {
        self.peer
    }

    fn start(self: Box<Self>, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError> {
        (*self).start(handler)
    }
}
