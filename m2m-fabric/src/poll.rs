//! Waiting for a descriptor.

use crate::error::FabricError;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::Duration;

/// Waits until `fd` may be ready; `false` after `timeout`.
pub(crate) fn wait(
    fd: &impl AsFd,
    for_what: PollFlags,
    timeout: Duration,
) -> Result<bool, FabricError> {
    wait_any(&mut [PollFd::new(fd, for_what)], timeout)
}

/// Waits until one of `fds` may be ready; `false` after `timeout`.
pub(crate) fn wait_any(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<bool, FabricError> {
    let timeout = timeout.try_into().ok();
    match poll(fds, timeout.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(FabricError::io("wait for the peer")(error)),
    }
}
