//! The OM's end of the socket.

use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A socket that EMs connect to, for its owner and root only (mode 0600).
#[derive(Debug)]
pub struct LocalListener {}

impl LocalListener {
    /// Listens at `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// [`FabricError::InUse`], [`FabricError::NotASocket`], [`FabricError::PathTooLong`].
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, FabricError> {
        let _ = path;
        Err(FabricError::Closed)
    }

    /// Waits for the next permitted peer; others are refused with a line in the log.
    ///
    /// # Errors
    /// [`FabricError::Closed`] after [`close`](Self::close).
    pub fn accept(&self) -> Result<Pending, FabricError> {
        Err(FabricError::Closed)
    }

    /// Like [`accept`](Self::accept), `None` when nobody came within `timeout`.
    ///
    /// # Errors
    /// Like `accept`.
    pub fn accept_timeout(&self, timeout: Duration) -> Result<Option<Pending>, FabricError> {
        let _ = timeout;
        Err(FabricError::Closed)
    }

    /// Ends waiting and future [`accept`](Self::accept)s.
    pub fn close(&self) {}
}

/// A permitted peer that has not been greeted yet. Dropping it closes the connection.
#[derive(Debug)]
pub struct Pending {
    peer: PeerInfo,
}

impl Pending {
    /// Who connected.
    pub fn peer(&self) -> PeerInfo {
        self.peer
    }

    /// Agrees on the version, passes the register window and starts the connection. Waits at most
    /// 5 s for the peer.
    ///
    /// # Errors
    /// [`FabricError::Wire`] with the version when the two programs do not fit,
    /// [`FabricError::Timeout`].
    pub fn start(self, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError> {
        let _ = handler;
        Err(FabricError::Closed)
    }
}
