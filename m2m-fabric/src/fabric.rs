//! The interface of a connection, the same for every transport.

use crate::error::FabricError;
use crate::proto::{Event, Reply, Request};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A connection to one peer module, as its owner uses it. Dropping the last handle closes it.
///
/// A connection that went down stays down: every operation then fails with [`FabricError::Down`].
pub trait Fabric: Send + Sync {
    /// Sends `request` with copies of `fds` and waits for its reply.
    ///
    /// Any number of threads may call at the same time. May be called from a [`Handler`]'s request
    /// or event method, not from its register methods while the peer waits for them in turn.
    ///
    /// # Errors
    /// [`FabricError::Timeout`] when no reply came within `timeout` (the peer may still act on the
    /// request), [`FabricError::NoFds`] when descriptors cannot travel on this transport,
    /// [`FabricError::Down`] as soon as the connection ends.
    fn call(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Reply, FabricError>;

    /// Sends an event; never blocks.
    ///
    /// # Errors
    /// [`FabricError::Full`] when the peer does not take messages as fast as they come; nothing was
    /// sent then.
    fn notify(&self, event: Event) -> Result<(), FabricError>;

    /// The peer's registers.
    fn registers(&self) -> &dyn RegisterPort;

    /// Whether messages can carry descriptors.
    fn carries_fds(&self) -> bool;

    /// Whether the connection still works, as far as this side knows.
    fn is_up(&self) -> bool;

    /// When the last message of any kind came from the peer; the time of connection before the first.
    fn last_heard(&self) -> Instant;

    /// Who the peer is, as the operating system says.
    fn peer(&self) -> PeerInfo;

    /// Ends the connection and waits until no [`Handler`] method runs any more, unless it is called
    /// from one. [`Handler::down`] gets [`FabricError::Closed`] if nothing ended the connection
    /// before. May be called again, and does nothing then.
    fn close(&self);
}

/// The peer's 4-byte registers.
///
/// Accesses take effect at the peer in the order of the calls; one access is handled at a time, so
/// an answered access says that all posted ones before it were handled.
pub trait RegisterPort: Send + Sync {
    /// Writes the bytes of `value` that `byte_enable` names (bit n: bits 8n to 8n+7) and waits for
    /// the completion, whose meaning the two modules agree on.
    ///
    /// # Errors
    /// [`FabricError::Timeout`] (the write may still happen later), [`FabricError::Access`] for an
    /// address that is no multiple of 4 or byte enables above 0xf, [`FabricError::Down`].
    fn write(
        &self,
        address: u32,
        byte_enable: u8,
        value: u32,
        timeout: Duration,
    ) -> Result<u32, FabricError>;

    /// Writes like [`write`](Self::write), without waiting for a completion. Waits for at most
    /// 100 ms when the peer is behind.
    ///
    /// # Errors
    /// [`FabricError::Full`] when the peer is still behind then; otherwise like `write`.
    fn post(&self, address: u32, byte_enable: u8, value: u32) -> Result<(), FabricError>;

    /// Reads 4 bytes.
    ///
    /// # Errors
    /// Like [`write`](Self::write).
    fn read(&self, address: u32, timeout: Duration) -> Result<u32, FabricError>;
}

/// What a module does for its peer. The transport calls it from its own threads: one for requests
/// and events, in the order they came; one for registers, in order; and one for the rest.
pub trait Handler: Send + Sync {
    /// Answers a request. May take its time; requests and events behind it wait, nothing else does.
    /// `fds` are at most 16 and close-on-exec; those not kept are closed by dropping them.
    fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Reply;

    /// Takes an event. Of several heartbeats that wait, only the newest is delivered.
    fn event(&self, event: Event);

    /// Reads the register at `address`, a multiple of 4. Must be quick: the peer's vCPU waits.
    fn register_read(&self, address: u32) -> u32;

    /// Writes the bytes of `value` that `byte_enable` (0 to 15) names to the register at `address`, a
    /// multiple of 4; returns the completion, which is dropped if the write was posted. Must be quick.
    fn register_write(&self, address: u32, byte_enable: u8, value: u32) -> u32;

    /// The connection ended. Called exactly once per started connection, after the last heartbeat
    /// and after all waiting calls have failed; a request that was being handled may still run.
    fn down(&self, reason: &FabricError);

    /// Values for the next heartbeat: data-path progress and backlog, see [`Event::Heartbeat`]. Must
    /// be quick.
    fn heartbeat(&self) -> (u64, bool) {
        (0, false)
    }
}

/// The process (or authenticated host) on the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerInfo {
    /// Process id, 0 when the peer lives in another pid namespace.
    pub pid: u32,
    /// Effective user id at the time of connection.
    pub uid: u32,
    /// Effective group id at the time of connection.
    pub gid: u32,
}
