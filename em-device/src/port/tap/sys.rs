//! System calls of a TAP interface.
#![allow(unsafe_code)] // ioctls and reads and writes of memory that a guest or a peer shares

use super::TapError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use vm_memory::VolatileSlice;

/// Most pieces that one call writes.
pub(super) const MAX_PIECES: usize = 64;

/// Bytes of the virtio-net header before each frame: with `num_buffers`, which a TAP does not use.
pub(super) const HEADER: usize = 12;

const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which all zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: the name was checked to be shorter, and zip stops anyway.
    for (to, from) in request
        .ifr_name
        .iter_mut()
        .take(libc::IFNAMSIZ - 1)
        .zip(name.bytes())
    {
        *to = from as libc::c_char;
    }
    request
}

/// An ioctl that takes an interface request.
fn interface_ioctl(
    fd: BorrowedFd<'_>,
    number: libc::Ioctl,
    request: &mut libc::ifreq,
) -> Result<(), Errno> {
    // SAFETY: all numbers used here take an ifreq, which the kernel reads and may write.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(request)) };
    if result < 0 {
        return Err(last_errno());
    }
    Ok(())
}

/// Opens the TAP interface `name`; the kernel creates it when there is none.
pub(super) fn open(name: &str) -> Result<OwnedFd, TapError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(TapError::Device)?;
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = FLAGS as libc::c_short;
    match interface_ioctl(fd.as_fd(), libc::TUNSETIFF, &mut request) {
        Ok(()) => Ok(fd),
        Err(Errno::PERM) => Err(TapError::Permission(name.into())),
        Err(Errno::BUSY) => Err(TapError::Busy(name.into())),
        Err(Errno::INVAL) => Err(TapError::OtherKind(name.into())),
        Err(error) => Err(TapError::Create(name.into(), error)),
    }
}

/// Checks that a descriptor is an open TAP with the header that we use, and returns its name.
pub(super) fn check(fd: BorrowedFd<'_>) -> Result<String, TapError> {
    let mut request = request("");
    interface_ioctl(fd, libc::TUNGETIFF, &mut request).map_err(TapError::NotTap)?;
    // SAFETY: TUNGETIFF has set the flags, and every value is valid.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    if flags & FLAGS != FLAGS {
        return Err(TapError::Mode);
    }
    Ok(request
        .ifr_name
        .iter()
        .take_while(|byte| **byte != 0)
        .map(|byte| char::from(*byte as u8))
        .collect())
}

/// UDP segmentation (`TUN_F_USO4`, `TUN_F_USO6`), since Linux 6.2.
const USO: libc::c_uint = 0x20 | 0x40;

/// Sets what the port relies on: header length, offloads, no blocking. Answers whether UDP segmentation is among them.
pub(super) fn configure(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let header = HEADER as libc::c_int;
    let fd_number = fd.as_raw_fd();
    // SAFETY: takes a pointer to an int, which it reads.
    if unsafe {
        libc::ioctl(
            fd_number,
            libc::TUNSETVNETHDRSZ,
            std::ptr::from_ref(&header),
        )
    } < 0
    {
        return Err(last_errno());
    }
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let uso = set_offloads(fd, offloads | USO).is_ok();
    if !uso {
        set_offloads(fd, offloads)?;
    }
    rustix::io::ioctl_fionbio(fd, true)?;
    Ok(uso)
}

fn set_offloads(fd: BorrowedFd<'_>, offloads: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: takes the number itself.
    let done = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            libc::TUNSETOFFLOAD,
            libc::c_ulong::from(offloads),
        )
    };
    if done < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Sets the interface administratively up.
pub(super) fn set_up(name: &str) -> Result<(), Errno> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    let mut request = request(name);
    interface_ioctl(socket.as_fd(), libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS has set the flags, and every value is valid.
    let old = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = old | libc::IFF_UP as libc::c_short;
    interface_ioctl(socket.as_fd(), libc::SIOCSIFFLAGS, &mut request)
}

/// Writes the header and then the bytes of `pieces`, of which at most [`MAX_PIECES`], as one frame.
pub(super) fn write(
    fd: BorrowedFd<'_>,
    header: &[u8; HEADER],
    pieces: &[VolatileSlice<'_>],
) -> Result<usize, Errno> {
    let mut vectors = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MAX_PIECES + 1];
    let mut count = 0;
    let header = (header.as_ptr().cast_mut(), HEADER);
    // vm-memory is built without guards that must be kept alive (Xen), so addresses may be kept.
    let pieces = pieces
        .iter()
        .map(|piece| (piece.ptr_guard_mut().as_ptr(), piece.len()));
    for (vector, (base, len)) in vectors
        .iter_mut()
        .zip(std::iter::once(header).chain(pieces))
    {
        vector.iov_base = base.cast();
        vector.iov_len = len;
        count += 1;
    }
    // SAFETY: the first `count` vectors are the header and volatile slices, which all live through this
    // call. The kernel only reads from them.
    let written = unsafe { libc::writev(fd.as_raw_fd(), vectors.as_ptr(), count) };
    usize::try_from(written).map_err(|_| last_errno())
}

#[cfg(test)]
pub(super) mod packet {
    //! The host's side of an interface, for tests.

    use super::*;
    use rustix::net::SendFlags;
    use std::os::fd::FromRawFd;

    /// A raw socket on an interface.
    pub(crate) fn socket(name: &str) -> OwnedFd {
        let name = std::ffi::CString::new(name).unwrap();
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: plain calls; the address is as long as said, and the descriptor is new.
        unsafe {
            let index = libc::if_nametoindex(name.as_ptr());
            assert_ne!(index, 0);
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
            let fd = libc::socket(libc::AF_PACKET, kind, libc::c_int::from(protocol));
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let fd = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = protocol;
            address.sll_ifindex = index as i32;
            let len = size_of_val(&address) as libc::socklen_t;
            let address = std::ptr::from_ref(&address).cast();
            assert_eq!(libc::bind(fd.as_raw_fd(), address, len), 0);
            fd
        }
    }

    pub(crate) fn send(socket: &OwnedFd, bytes: &[u8]) {
        assert_eq!(
            rustix::net::send(socket, bytes, SendFlags::empty()).unwrap(),
            bytes.len()
        );
    }
}
