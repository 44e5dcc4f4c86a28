//! The EM's end: connects.

use super::{Files, OM_NAME, PATIENCE, SILENCE, handshake};
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler};
use std::io::{Error, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;

/// Connects to the OM at `address`, `HOST:PORT`, and starts the connection. Waits at most 5 s for each of its addresses
/// and as long for what the OM says.
///
/// # Errors
/// [`FabricError::Credentials`], [`FabricError::Unreachable`], [`FabricError::Tls`] when one side does not accept the
/// other's certificate, [`FabricError::Wire`] with the versions when the two programs do not fit.
pub fn connect(
    address: &str,
    files: &Files,
    handler: Arc<dyn Handler>,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let config = files.client()?;
    handshake::greet(reach(address)?, config, OM_NAME, handler, SILENCE)
}

/// The first of the addresses behind a name that answers.
pub(super) fn reach(address: &str) -> Result<TcpStream, FabricError> {
    let unreachable = |source| FabricError::Unreachable {
        address: address.to_owned(),
        source,
    };
    let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
    for one in address.to_socket_addrs().map_err(unreachable)? {
        match TcpStream::connect_timeout(&one, PATIENCE) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(unreachable(last))
}
