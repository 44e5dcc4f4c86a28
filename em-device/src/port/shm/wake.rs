//! The eventfds that wake the two ends of a wire.

use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd that this process and a peer share.
#[derive(Debug)]
pub(super) struct Bell {
    fd: OwnedFd,
}

impl Bell {
    pub(super) fn new(fd: OwnedFd) -> Self {
        // The peer shares the descriptor's flags too. If it makes the descriptor block, `swallow` does
        // not care, and `ring` blocks only once 2⁶⁴ - 2 rings were not swallowed.
        if let Err(error) = rustix::io::ioctl_fionbio(&fd, true) {
            log::warn!("cannot make the wake-up of a wire non-blocking: {error}");
        }
        Self { fd }
    }

    /// Wakes whoever sleeps on it.
    pub(super) fn ring(&self) {
        match rustix::io::write(&self.fd, &1u64.to_ne_bytes()) {
            // A full counter wakes as well as one more would.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => log::warn!("cannot wake the peer of a wire: {error}"),
        }
    }

    /// Forgets all rings so far; never blocks.
    pub(super) fn swallow(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::preadv2(
            &self.fd,
            &mut [IoSliceMut::new(&mut count)],
            u64::MAX, // a stream has no position
            ReadWriteFlags::NOWAIT,
        );
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    fn is_rung(bell: &Bell) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let fd = bell.as_fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() == 1
    }

    #[test]
    fn swallowing_silences_and_never_blocks() {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let bell = Bell::new(fd);
        // A peer that shares the descriptor undoes what `new` did.
        rustix::io::ioctl_fionbio(&bell.fd, false).unwrap();
        bell.swallow();
        bell.ring();
        bell.ring();
        assert!(is_rung(&bell));
        bell.swallow();
        assert!(!is_rung(&bell));
    }
}
