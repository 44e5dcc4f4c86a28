//! The interface of a connection, the same for every transport.

use crate::error::FabricError;
use crate::proto::{Event, Image, Reply, Request};
use std::fmt::{self, Debug, Display};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
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

    /// Whether messages can carry descriptors, so that the peer can share memory.
    fn carries_fds(&self) -> bool;

    /// Sends what a function presents to a peer that cannot share the memory of its shadow; never blocks.
    /// [`Handler::image`] has it before the peer sees a completion of a register access, or a message,
    /// that this side sends later.
    ///
    /// # Errors
    /// [`FabricError::SharesMemory`] where descriptors can travel, [`FabricError::Full`] as for
    /// [`notify`](Self::notify).
    fn show(&self, image: Image) -> Result<(), FabricError>;

    /// Whether the peer may call itself `name`. A transport within a host, where the user of a process
    /// counts, allows any.
    ///
    /// # Errors
    /// [`FabricError::NotNamed`].
    fn check_name(&self, name: &str) -> Result<(), FabricError>;

    /// Whether the connection still works, as far as this side knows.
    fn is_up(&self) -> bool;

    /// When the last message of any kind came from the peer; the time of connection before the first.
    fn last_heard(&self) -> Instant;

    /// Who the peer is, as the operating system says, and where on another host.
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

    /// Takes what a function of the peer, or of this module, presents, see [`Fabric::show`]. Must be quick and must
    /// not wait for the peer: nothing else of the connection is taken meanwhile.
    fn image(&self, image: Image) {
        drop(image);
    }

    /// The connection ended. Called exactly once per started connection, after the last heartbeat
    /// and after all waiting calls have failed; a request that was being handled may still run.
    fn down(&self, reason: &FabricError);

    /// Values for the next heartbeat: data-path progress and backlog, see [`Event::Heartbeat`]. Must
    /// be quick.
    fn heartbeat(&self) -> (u64, bool) {
        (0, false)
    }
}

/// The process on the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerInfo {
    /// Process id, 0 when the peer lives in another pid namespace or on another host.
    pub pid: u32,
    /// Effective user id at the time of connection; all ones on another host.
    pub uid: u32,
    /// Effective group id at the time of connection; all ones on another host.
    pub gid: u32,
    /// Where it connected from, or listens, when the transport joins hosts.
    pub address: Option<SocketAddr>,
}

impl Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => Display::fmt(&address, f),
            None => write!(f, "process {}", self.pid),
        }
    }
}

/// Where peers connect to.
pub trait Listener: Debug + Send + Sync {
    /// Waits for the next peer that may try.
    ///
    /// # Errors
    /// [`FabricError::Closed`] after [`close`](Self::close).
    fn accept(&self) -> Result<Box<dyn Arrival>, FabricError>;

    /// Ends waiting and future [`accept`](Self::accept)s.
    fn close(&self);
}

/// A peer that has not been greeted yet. Dropping it closes the connection.
pub trait Arrival: Send {
    /// Who connected.
    fn peer(&self) -> PeerInfo;

    /// Agrees with the peer and starts the connection. Waits for the peer, 5 s at most; to accept others
    /// meanwhile, call it on a thread of its own.
    ///
    /// # Errors
    /// [`FabricError::Wire`] with the versions when the two programs do not fit,
    /// [`FabricError::Timeout`], and why the peer is refused.
    fn start(self: Box<Self>, handler: Arc<dyn Handler>) -> Result<Arc<dyn Fabric>, FabricError>;
}
