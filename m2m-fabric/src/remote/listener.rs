//! The OM's end: listens.

use super::{Files, SILENCE, handshake};
use crate::error::FabricError;
use crate::fabric::{Arrival, Fabric, Handler, Listener, PeerInfo};
use crate::poll;
use rustix::event::PollFlags;
use rustix::net::Shutdown;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Peers that may be in their handshake at a time; the next are turned away. Whoever reaches the port can have them
/// last 5 s each.
const MAX_ARRIVALS: usize = 64;

/// An address that EMs of other hosts connect to.
#[derive(Debug)]
pub struct RemoteListener {
    socket: TcpListener,
    files: Files,
    silence: Duration,
    arrivals: Arc<AtomicUsize>,
    closed: AtomicBool,
}

impl RemoteListener {
    /// Listens at `address`, with port 0 at one of the system's choice.
    ///
    /// # Errors
    /// [`FabricError::Credentials`] when the files are of no use, [`FabricError::Io`] when the address is in use or
    /// not this host's.
    pub fn bind(address: SocketAddr, files: Files) -> Result<Self, FabricError> {
        Self::bind_with(address, files, SILENCE)
    }

    pub(super) fn bind_with(
        address: SocketAddr,
        files: Files,
        silence: Duration,
    ) -> Result<Self, FabricError> {
        // They are read again for each peer; that they are of use is known now.
        files.server()?;
        let socket =
            TcpListener::bind(address).map_err(FabricError::io("listen for EMs of other hosts"))?;
        socket
            .set_nonblocking(true)
            .map_err(FabricError::io("prepare a listening socket"))?;
        Ok(Self {
            socket,
            files,
            silence,
            arrivals: Arc::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// [`FabricError::Io`].
    pub fn address(&self) -> Result<SocketAddr, FabricError> {
        self.socket
            .local_addr()
            .map_err(FabricError::io("read the address of a socket"))
    }

    /// Waits for the next peer.
    ///
    /// # Errors
    /// [`FabricError::Closed`] after [`close`](Self::close).
    pub fn accept(&self) -> Result<RemotePending, FabricError> {
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(FabricError::Closed);
            }
            match self.socket.accept() {
                Ok((socket, address)) => {
                    let place = Place::new(&self.arrivals);
                    if self.arrivals.load(Ordering::Relaxed) > MAX_ARRIVALS {
                        log::warn!("turned {address} away: too many peers are in their handshake");
                        continue;
                    }
                    return Ok(RemotePending {
                        socket,
                        address,
                        files: self.files.clone(),
                        silence: self.silence,
                        _place: place,
                    });
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => {
                        poll::wait(&self.socket, PollFlags::IN, Duration::from_secs(3600))?;
                    }
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ if self.closed.load(Ordering::Acquire) => return Err(FabricError::Closed),
                    _ => return Err(FabricError::io("accept a connection")(error)),
                },
            }
        }
    }

    /// Ends waiting and future [`accept`](Self::accept)s.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

/// One of the places for arrivals.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn new(all: &Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A peer that has not proved yet who it is. Dropping it closes the connection.
#[derive(Debug)]
pub struct RemotePending {
    socket: TcpStream,
    address: SocketAddr,
    files: Files,
    silence: Duration,
    _place: Place,
}

impl RemotePending {
    /// Who connected, as far as that is known.
    pub fn peer(&self) -> PeerInfo {
        peer_at(self.address)
    }

    /// Verifies the peer, agrees on the version and starts the connection. Waits at most 5 s for the peer; to accept
    /// others meanwhile, call it on a thread of its own.
    ///
    /// # Errors
    /// [`FabricError::Tls`] when one side does not accept the other's certificate, [`FabricError::Wire`] with the
    /// versions when the two programs do not fit, [`FabricError::Timeout`].
    pub fn start(self, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError> {
        let config = self.files.server()?;
        handshake::welcome(self.socket, config, handler, self.silence)
    }
}

/// A peer of which only the address is known to the system.
pub(super) fn peer_at(address: SocketAddr) -> PeerInfo {
    PeerInfo {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
        address: Some(address),
    }
}

impl Listener for RemoteListener {
    fn accept(&self) -> Result<Box<dyn Arrival>, FabricError> {
        Ok(Box::new(self.accept()?))
    }

    fn close(&self) {
        self.close();
    }
}

impl Arrival for RemotePending {
    fn peer(&self) -> PeerInfo {
        self.peer()
    }

    fn start(self: Box<Self>, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError> {
        (*self).start(handler)
    }
}
