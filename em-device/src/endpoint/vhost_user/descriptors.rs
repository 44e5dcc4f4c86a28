//! What a front end may send along: eventfds, and memory that always is where it was. A file of a FUSE daemon would let its
//! owner hold up whoever touches it.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::fcntl_get_seals;
use rustix::io::Errno;

/// The descriptor if it is an eventfd.
///
/// # Errors
/// [`Errno::INVAL`] when it is something else.
pub(super) fn eventfd(file: File) -> Result<OwnedFd, Errno> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link = link.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    match link.as_os_str() == "anon_inode:[eventfd]" {
        true => Ok(file.into()),
        false => Err(Errno::INVAL),
    }
}

/// Whether it is memory of the system: a memfd, or a file of tmpfs or hugetlbfs.
pub(super) fn is_memory(file: &File) -> bool {
    // Only these have seals, and the file system is not asked, unlike by fstat and fstatfs.
    fcntl_get_seals(file).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dot_iommu::HostMapping;
    use rustix::event::{EventfdFlags, eventfd as new};

    fn program() -> File {
        File::open(std::env::current_exe().unwrap()).unwrap()
    }

    fn memfd() -> File {
        HostMapping::memfd(4096).unwrap().into()
    }

    #[test]
    fn only_an_eventfd_is_one() {
        let event = File::from(new(0, EventfdFlags::empty()).unwrap());
        assert!(eventfd(event).is_ok());
        let pipe = File::from(rustix::pipe::pipe().unwrap().0);
        let null = File::open("/dev/null").unwrap();
        for other in [pipe, null, memfd(), program()] {
            assert_eq!(eventfd(other).unwrap_err(), Errno::INVAL);
        }
    }

    #[test]
    fn a_memfd_is_memory_and_a_file_elsewhere_is_not() {
        assert!(is_memory(&memfd()));
        let event = File::from(new(0, EventfdFlags::empty()).unwrap());
        let [device, other] = ["/dev/zero", "/proc/self/status"].map(|p| File::open(p).unwrap());
        for other in [device, event, other] {
            assert!(!is_memory(&other));
        }
    }
}
