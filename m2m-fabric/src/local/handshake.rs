//! The first two packets of a connection: the connecting side says its version, the listening side
//! says its own and passes the register window. Either end that sees another version says so in its
//! error; the listening side still answers, so that both do.

use super::endpoint::Endpoint;
use super::socket::Socket;
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler, PeerInfo};
use crate::registers::shm::{self, Rings, WINDOW_BYTES};
use crate::wire::{Frame, Greeting, WireError};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long each side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);

/// The listening side.
pub(super) fn welcome(
    socket: Socket,
    handler: Arc<dyn Handler>,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let rings = offer(&socket).inspect_err(|error| {
        log::warn!("a connection failed before it began: {error}");
    })?;
    Endpoint::start(socket, rings, handler)
}

fn offer(socket: &Socket) -> Result<Rings, FabricError> {
    let greeting = socket.receive_until(PATIENCE);
    let offered = Frame::Greeting(Greeting {
        window_bytes: WINDOW_BYTES as u32,
    })
    .emit()?;
    let deadline = Some(Instant::now() + PATIENCE);
    match greeting {
        Ok((Frame::Greeting(_), fds)) if fds.is_empty() => {}
        Ok((Frame::Greeting(_), fds)) => return Err(FabricError::UnexpectedFds(fds.len())),
        Ok(_) => {
            return Err(FabricError::Protocol(
                "the first message must be a greeting",
            ));
        }
        Err(error @ FabricError::Wire(WireError::Version { .. })) => {
            // It helps the peer to say why; if it is gone, nothing is lost.
            let _ = socket.send(&offered, &[], deadline);
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    let (rings, window) = shm::create()?;
    socket.send(&offered, &[window.as_fd()], deadline)?;
    Ok(rings)
}

/// The connecting side.
pub(super) fn greet(
    socket: Socket,
    handler: Arc<dyn Handler>,
) -> Result<Arc<dyn Fabric>, FabricError> {
    let hello = Frame::Greeting(Greeting { window_bytes: 0 }).emit()?;
    socket.send(&hello, &[], Some(Instant::now() + PATIENCE))?;
    let (frame, mut fds) = socket.receive_until(PATIENCE)?;
    let Frame::Greeting(greeting) = frame else {
        return Err(FabricError::Protocol(
            "the first message must be a greeting",
        ));
    };
    if greeting.window_bytes as usize != WINDOW_BYTES {
        return Err(FabricError::Window("the announced size is wrong"));
    }
    let rings = match (fds.pop(), fds.is_empty()) {
        (Some(window), true) => shm::open(&window)?,
        _ => return Err(FabricError::Window("exactly one descriptor must come")),
    };
    Endpoint::start(socket, rings, handler)
}

/// Whether a process of this one's user may talk to `peer`.
pub(super) fn permit(peer: PeerInfo, own: u32) -> Result<(), FabricError> {
    if peer.uid == own || peer.uid == 0 {
        Ok(())
    } else {
        Err(FabricError::NotPermitted {
            pid: peer.pid,
            uid: peer.uid,
            own,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_permitted() {
        let peer = |uid| PeerInfo {
            pid: 1,
            uid,
            gid: 0,
            address: None,
        };
        assert!(permit(peer(1000), 1000).is_ok());
        assert!(permit(peer(0), 1000).is_ok());
        assert!(matches!(
            permit(peer(1001), 1000),
            Err(FabricError::NotPermitted { uid: 1001, .. })
        ));
        assert!(permit(peer(1000), 0).is_err());
    }
}
