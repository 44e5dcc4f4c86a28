//! What can go wrong on a connection.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Why a fabric operation failed or a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// No answer in time. The peer may still act on the request later.
    #[error("the peer did not answer within {0:?}")]
    Timeout(Duration),
    /// A bounded queue towards the peer has no room; nothing was sent.
    #[error("the queue to the peer is full")]
    Full,
    /// The connection was closed on this side.
    #[error("the connection was closed on this side")]
    Closed,
    /// The peer closed the connection or died.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The connection ended before or during the operation.
    #[error("the connection is down: {0}")]
    Down(#[source] Arc<FabricError>),
    /// Descriptors stay on their host.
    #[error("file descriptors do not travel over a remote transport")]
    NoFds,
    /// Images are for peers that cannot share memory.
    #[error("the peer shares the memory of the shadow and takes no image of it")]
    SharesMemory,
    /// The peer's certificate does not name it.
    #[error("the peer calls itself \"{name}\", but its certificate does not have that name: {why}")]
    NotNamed {
        /// What it called itself.
        name: String,
        /// What it has.
        why: String,
    },
    /// Nothing came from the peer for too long, not even heartbeats.
    #[error("nothing was heard of the peer for {0:?}")]
    Silent(Duration),
    /// The files that prove who this program is.
    #[error(transparent)]
    Credentials(#[from] crate::remote::CredentialsError),
    /// One side does not accept the other's certificate, or what came is not TLS.
    #[error("no secure connection: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer cannot be reached.
    #[error("cannot connect to {address}: {source}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// Why not.
        source: std::io::Error,
    },
    /// More descriptors than a message can carry.
    #[error("{got} file descriptors in one message, at most {max} are allowed")]
    TooManyFds {
        /// How many there were.
        got: usize,
        /// How many there can be.
        max: usize,
    },
    /// The peer sent more descriptors than a message can carry, or this process has no room left in
    /// its descriptor table.
    #[error("descriptors of a message were lost: too many in it, or this process's table is full")]
    FdsLost,
    /// Descriptors came with a message that takes none.
    #[error("the peer sent {0} file descriptors with a message that takes none")]
    UnexpectedFds(usize),
    /// A message could not be framed or parsed.
    #[error("bad message: {0}")]
    Wire(#[from] crate::wire::WireError),
    /// A message came at the wrong time, for example a request during the handshake.
    #[error("protocol violation by the peer: {0}")]
    Protocol(&'static str),
    /// The peer sent more than this side may have waiting.
    #[error("the peer has more than {max} {what} waiting here")]
    Overflow {
        /// Kind of message.
        what: &'static str,
        /// The bound.
        max: usize,
    },
    /// The shared register window is not what it must be.
    #[error("register window: {0}")]
    Window(&'static str),
    /// A register access that the fabric does not have.
    #[error(
        "no such register access: address {address:#x} must be a multiple of 4, byte enables \
         {byte_enable:#x} must be at most 0xf"
    )]
    Access {
        /// The address asked for.
        address: u32,
        /// The byte enables asked for.
        byte_enable: u8,
    },
    /// The process on the other end belongs to someone else.
    #[error("peer pid {pid} has uid {uid}; only uid {own} and root may connect")]
    NotPermitted {
        /// Process id of the peer.
        pid: u32,
        /// User id of the peer.
        uid: u32,
        /// User id of this process.
        own: u32,
    },
    /// Another process listens on the path.
    #[error("{0} is in use: another process listens on it; stop that one or choose another path")]
    InUse(PathBuf),
    /// A file that is no socket is where the socket should be.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// Nobody listens on the path.
    #[error("nobody listens on {0}; is the OM running?")]
    NobodyListens(PathBuf),
    /// The path does not fit in a socket address.
    #[error("the socket path {0} is too long, at most 107 bytes are possible")]
    PathTooLong(PathBuf),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl FabricError {
    /// For `map_err` of a system call: what was tried.
    pub(crate) fn io<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }
}
