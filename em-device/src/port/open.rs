//! From a wire as the OM describes it to a port.

use std::os::fd::OwnedFd;

use m2m_fabric::proto::LinkKind;
use thiserror::Error;

use super::Port;
use super::loopback::LoopbackPort;
use super::null::NullPort;
use super::pcap::{CaptureError, CaptureFile, CapturePort};
use super::shm::{AttachError, ShmPort};
use super::tap::{TapError, TapPort};

/// Frames that a loopback holds.
const LOOPBACK_FRAMES: usize = 1024;

/// Why a wire cannot be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The number of descriptors is wrong.
    #[error("{0} descriptors came with the wire, which takes {1}")]
    Descriptors(usize, usize),
    /// RDMA wires are no ports.
    #[error("an RDMA wire carries no frames")]
    NoFrames,
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] AttachError),
    /// A TAP interface.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A capture file.
    #[error(transparent)]
    Capture(#[from] CaptureError),
}

/// Opens one end of a wire.
pub fn open(kind: &LinkKind, fds: Vec<OwnedFd>) -> Result<Box<dyn Port>, OpenError> {
    let none = |fds: Vec<OwnedFd>| match fds.len() {
        0 => Ok(()),
        n => Err(OpenError::Descriptors(n, 0)),
    };
    Ok(match kind {
        LinkKind::Shm { side, peer, .. } => {
            let [memory, wake, wake_peer] = <[OwnedFd; 3]>::try_from(fds)
                .map_err(|fds| OpenError::Descriptors(fds.len(), 3))?;
            Box::new(ShmPort::attach(
                format!("shm to {peer}"),
                *side,
                memory,
                wake,
                wake_peer,
            )?)
        }
        LinkKind::Rdma { .. } => return Err(OpenError::NoFrames),
        LinkKind::Tap { name } => {
            let mut fds = fds.into_iter();
            match (fds.next(), fds.len()) {
                (None, _) => Box::new(TapPort::open(name)?),
                (Some(tap), 0) => Box::new(TapPort::from_fd(tap)?),
                (Some(_), more) => return Err(OpenError::Descriptors(1 + more, 1)),
            }
        }
        LinkKind::Loopback => {
            none(fds)?;
            Box::new(LoopbackPort::new(LOOPBACK_FRAMES))
        }
        LinkKind::Null => {
            none(fds)?;
            Box::new(NullPort::new())
        }
        LinkKind::Capture { path } => {
            none(fds)?;
            Box::new(CapturePort::new(
                NullPort::new(),
                CaptureFile::create(path)?,
            ))
        }
    })
}
