//! The transport between two processes of one host: a unix socket (`SOCK_SEQPACKET`, one frame a
//! packet) for messages and descriptors, and shared memory for registers.

mod endpoint;
mod handshake;
mod listener;
mod socket;
mod sys;

pub use listener::{LocalListener, Pending};

use crate::error::FabricError;
use crate::fabric::{Fabric, Handler};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Connects to the listener at `path` and starts the connection. Waits at most 5 s for the listener's
/// greeting.
///
/// # Errors
/// [`FabricError::NobodyListens`], [`FabricError::NotPermitted`] when the listener belongs to another
/// user, [`FabricError::Wire`] with the versions when the two programs do not fit, and
/// [`FabricError::PeerClosed`] when the listener refused this process.
pub fn connect(
    path: impl AsRef<Path>,
    handler: Arc<dyn Handler>,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let path = path.as_ref();
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &address(path)?) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::PROTOTYPE) => {
            return Err(FabricError::NobodyListens(path.into()));
        }
        Err(error) => return Err(FabricError::io("connect to the fabric's socket")(error)),
    }
    let socket = socket::Socket::new(socket);
    handshake::permit(socket.peer()?, rustix::process::geteuid().as_raw())?;
    handshake::greet(socket, handler)
}

fn new_socket() -> Result<OwnedFd, FabricError> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(FabricError::io("create a unix socket"))
}

fn address(path: &Path) -> Result<SocketAddrUnix, FabricError> {
    SocketAddrUnix::new(path).map_err(|error| match error {
        Errno::NAMETOOLONG => FabricError::PathTooLong(path.into()),
        other => FabricError::io("use the socket path")(other),
    })
}
