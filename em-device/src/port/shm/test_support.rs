//! Wires for tests.

#![allow(clippy::unwrap_used, dead_code)]

use super::ShmPort;
use crate::frame::{Frame, FrameMeta};
use crate::port::{Port, Rx};
use m2m_fabric::proto::SHM_LINK_BYTES;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{BorrowedFd, OwnedFd};
use vm_memory::VolatileSlice;

/// The memory of an empty wire.
pub(crate) fn wire() -> OwnedFd {
    let fd = memory(SHM_LINK_BYTES);
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    fd
}

/// A memfd that may be sealed.
pub(super) fn memory(len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("wire", flags).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}

pub(super) fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// The two ends of a new wire.
pub(crate) fn pair() -> (ShmPort, ShmPort) {
    ends(&wire())
}

/// The two ends of that wire.
pub(super) fn ends(memory: &OwnedFd) -> (ShmPort, ShmPort) {
    let (wake0, wake1) = (bell(), bell());
    let end = |side: u8, own: &OwnedFd, peer: &OwnedFd| {
        ShmPort::attach(
            format!("shm{side}"),
            side,
            memory.try_clone().unwrap(),
            own.try_clone().unwrap(),
            peer.try_clone().unwrap(),
        )
        .unwrap()
    };
    (end(0, &wake0, &wake1), end(1, &wake1, &wake0))
}

/// Sends `bytes` as a frame.
pub(crate) fn send(
    port: &mut impl Port,
    meta: FrameMeta,
    bytes: &[u8],
) -> Result<(), crate::port::TxError> {
    let mut bytes = bytes.to_vec();
    let parts = [VolatileSlice::from(&mut bytes[..])];
    port.transmit(&Frame::new(meta, &parts))
}

/// Takes at most `budget` frames.
pub(crate) fn take(port: &mut impl Port, budget: usize) -> Vec<(FrameMeta, Vec<u8>)> {
    let mut all = Vec::new();
    port.receive(budget, &mut |frame: &Frame<'_>| {
        all.push((frame.meta, frame.to_vec()));
        Rx::Taken
    });
    all
}

/// Waits until `fd` is readable, at most so long. Returns whether it is.
pub(crate) fn readable(fd: BorrowedFd<'_>, millis: u64) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = rustix::time::Timespec {
        tv_sec: (millis / 1000) as i64,
        tv_nsec: (millis % 1000 * 1_000_000) as i64,
    };
    poll(&mut fds, Some(&timeout)).unwrap() == 1
}
