//! Peer credentials of a unix socket.
#![allow(unsafe_code)] // getsockopt: rustix takes a process id of 0, which a peer in another pid namespace has, for impossible

use crate::error::FabricError;
use crate::fabric::PeerInfo;
use std::os::fd::{AsFd, AsRawFd};

/// Credentials of the other end at the time of connect or listen (SO_PEERCRED, unix(7)).
pub(super) fn peer_info(socket: impl AsFd) -> Result<PeerInfo, FabricError> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of the struct, which is plain data.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(FabricError::io("read the peer's credentials")(
            std::io::Error::last_os_error(),
        ));
    }
    Ok(PeerInfo {
        pid: u32::try_from(cred.pid).unwrap_or(0),
        uid: cred.uid,
        gid: cred.gid,
        address: None,
    })
}
