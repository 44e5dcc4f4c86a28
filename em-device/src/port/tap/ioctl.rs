//! The ioctls of `/dev/net/tun` (`linux/if_tun.h`).
#![allow(unsafe_code)] // ioctl

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Attaches to interface `name` as a TAP whose frames carry a virtio-net header of `header` bytes, with checksum
/// and TCP segmentation offload on.
pub(super) fn attach(file: &File, name: &str, header: usize) -> io::Result<()> {
    // SAFETY: ifreq is plain data for which all zeroes is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request
        .ifr_name
        .iter_mut()
        .take(libc::IFNAMSIZ - 1)
        .zip(name.bytes())
    {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    let header = header as libc::c_int;
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: TUNSETIFF takes a pointer to an ifreq, which lives until the call returns.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })?;
    // SAFETY: TUNSETVNETHDRSZ takes a pointer to an int, which lives until the call returns.
    check(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::TUNSETVNETHDRSZ as _,
            &raw const header,
        )
    })?;
    // SAFETY: TUNSETOFFLOAD takes its flags by value.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, offloads) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
