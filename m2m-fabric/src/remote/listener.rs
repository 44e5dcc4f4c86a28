//! The OM's end: listens.

use super::{Files, SILENCE, handshake};
use crate::error::FabricError;
use crate::fabric::{Arrival, Fabric, Handler, Listener, PeerInfo};
use crate::poll;
use rustix::event::PollFlags;
use rustix::net::Shutdown;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Peers that may be in their handshake at a time, of all hosts and of one; the next are turned away. Whoever reaches the
/// port can have them last 6 s each.
const MAX_ARRIVALS: usize = 64;
const MAX_OF_ONE_HOST: usize = 8;

/// An address that EMs of other hosts connect to.
#[derive(Debug)]
pub struct RemoteListener {
    socket: TcpListener,
    files: Files,
    silence: Duration,
    arrivals: Arc<Arrivals>,
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
                    let Some(place) = Place::take(&self.arrivals, address.ip()) else {
                        log::warn!("turned {address} away: too many peers are in their handshake");
                        continue;
                    };
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

/// Hosts of the peers that are in their handshake.
#[derive(Debug, Default)]
struct Arrivals(Mutex<Vec<IpAddr>>);

impl Arrivals {
    fn hosts(&self) -> MutexGuard<'_, Vec<IpAddr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the places for arrivals.
#[derive(Debug)]
struct Place {
    all: Arc<Arrivals>,
    host: IpAddr,
}

impl Place {
    fn take(all: &Arc<Arrivals>, host: IpAddr) -> Option<Self> {
        let mut hosts = all.hosts();
        let of_this = hosts.iter().filter(|other| **other == host).count();
        if hosts.len() >= MAX_ARRIVALS || of_this >= MAX_OF_ONE_HOST {
            return None;
        }
        hosts.push(host);
        let all = all.clone();
        Some(Self { all, host })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut hosts = self.all.hosts();
        if let Some(at) = hosts.iter().position(|host| *host == self.host) {
            hosts.swap_remove(at);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_leaves_places_to_the_others() {
        let all = Arc::default();
        let host = |n| IpAddr::from([127, 0, 0, n]);
        let first: Vec<_> = (0..MAX_OF_ONE_HOST)
            .map(|_| Place::take(&all, host(1)).unwrap())
            .collect();
        assert!(Place::take(&all, host(1)).is_none());
        let others: Vec<_> = (2..100).map_while(|n| Place::take(&all, host(n))).collect();
        assert_eq!(first.len() + others.len(), MAX_ARRIVALS);
        drop(first);
        assert!(Place::take(&all, host(1)).is_some());
    }
}
