//! Whether a connection is up, and why not.

use crate::error::FabricError;
use crate::fabric::PeerInfo;
use std::sync::{Arc, OnceLock};

/// The one place that decides that a connection is down. The first reason wins.
pub(crate) struct Link {
    reason: OnceLock<Arc<FabricError>>,
    peer: PeerInfo,
    stop: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("peer", &self.peer)
            .field("reason", &self.reason.get())
            .finish()
    }
}

impl Link {
    /// `stop` makes the transport's threads notice that the link went down; it runs once.
    pub(crate) fn new(peer: PeerInfo, stop: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            reason: OnceLock::new(),
            peer,
            stop: Box::new(stop),
        }
    }

    pub(crate) fn peer(&self) -> PeerInfo {
        self.peer
    }

    /// Takes the link down for `reason`, unless it is down already.
    pub(crate) fn fail(&self, reason: FabricError) {
        let mut first = false;
        let reason = self.reason.get_or_init(|| {
            first = true;
            Arc::new(reason)
        });
        if first {
            match **reason {
                FabricError::Closed | FabricError::PeerClosed => {
                    log::info!("connection to {} ended: {reason}", self.peer);
                }
                _ => log::warn!("connection to {} dropped: {reason}", self.peer),
            }
            (self.stop)();
        }
    }

    /// Why the link is down.
    pub(crate) fn reason(&self) -> Option<&Arc<FabricError>> {
        self.reason.get()
    }

    /// An error when the link is down.
    pub(crate) fn check(&self) -> Result<(), FabricError> {
        match self.reason.get() {
            None => Ok(()),
            Some(reason) => Err(FabricError::Down(Arc::clone(reason))),
        }
    }
}

/// Runs the job of the thread that reports the end, which must do so even if a handler's method panics.
pub(crate) fn unless_panicked(
    job: impl FnOnce() -> Result<(), FabricError>,
) -> Result<(), FabricError> {
    // What is used after a panic is what the other threads of the connection see, and the handler, told only that it is
    // down.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).unwrap_or(Err(
        FabricError::Protocol("a handler of this side panicked"),
    ))
}

/// Takes the link down if a handler's method panics, so that nobody waits for a dead thread.
pub(crate) struct PanicGuard<'a>(pub(crate) &'a Link);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .fail(FabricError::Protocol("a handler of this side panicked"));
        }
    }
}
