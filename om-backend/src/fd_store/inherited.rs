//! Descriptors that came with the process.
#![allow(unsafe_code)] // takes ownership of descriptors that are known by number only

use super::{Inheritance, sort};
use std::collections::HashMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

static TAKEN: AtomicBool = AtomicBool::new(false);

/// What the service manager kept for this process, by function. Empty from the second call on.
pub fn inherited() -> HashMap<String, Inheritance> {
    if TAKEN.swap(true, Ordering::AcqRel) {
        return HashMap::new();
    }
    let all = match sd_notify::listen_fds_with_names() {
        Ok(all) => all,
        Err(error) => {
            log::warn!("what the service manager kept cannot be taken: {error}");
            return HashMap::new();
        }
    };
    sort(all.map(|(fd, name)| (name, take(fd))))
}

fn take(fd: RawFd) -> OwnedFd {
    // SAFETY: `listen_fds_with_names` names descriptors that were passed to this very process (LISTEN_PID) and are
    // open (it set a flag on each). They are nobody else's, and TAKEN sees to it that they are taken once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
