//! After TLS: both sides say their version, as on the local transport.

use super::PATIENCE;
use super::endpoint::Endpoint;
use super::stream::Stream;
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler};
use crate::wire::{Frame, Greeting, WireError};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The listening side.
pub(super) fn welcome(
    socket: TcpStream,
    config: Arc<ServerConfig>,
    handler: Arc<dyn Handler>,
    silence: Duration,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let deadline = Instant::now() + PATIENCE;
    let tls = Connection::Server(ServerConnection::new(config)?);
    let mut stream = Stream::agree(socket, tls, deadline)?;
    let theirs = stream.receive(deadline);
    // It helps a peer of another version to say so; if it is gone, nothing is lost.
    let other = matches!(theirs, Err(FabricError::Wire(WireError::Version { .. })));
    if other || matches!(theirs, Ok(Frame::Greeting(_))) {
        stream.send(&greeting()?, deadline)?;
    }
    match greeted(theirs) {
        Ok(()) => Endpoint::start(stream, handler, silence),
        Err(error) => {
            stream.part();
            Err(error)
        }
    }
}

/// The connecting side; `name` is whom the peer must prove to be.
pub(super) fn greet(
    socket: TcpStream,
    config: Arc<ClientConfig>,
    name: &'static str,
    handler: Arc<dyn Handler>,
    silence: Duration,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let deadline = Instant::now() + PATIENCE;
    let name = ServerName::try_from(name)
        .map_err(|_| FabricError::Protocol("the name of the peer is none"))?;
    let tls = Connection::Client(ClientConnection::new(config, name)?);
    let mut stream = Stream::agree(socket, tls, deadline)?;
    stream.send(&greeting()?, deadline)?;
    // With TLS 1.3 the listening side verifies last: that it refuses this side is known here first.
    greeted(stream.receive(deadline))?;
    Endpoint::start(stream, handler, silence)
}

fn greeting() -> Result<Vec<u8>, WireError> {
    Frame::Greeting(Greeting { window_bytes: 0 }).emit()
}

fn greeted(frame: Result<Frame, FabricError>) -> Result<(), FabricError> {
    match frame? {
        Frame::Greeting(_) => Ok(()),
        _ => Err(FabricError::Protocol(
            "the first message must be a greeting",
        )),
    }
}
