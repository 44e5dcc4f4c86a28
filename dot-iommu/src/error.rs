//! Errors of the offset table.

use rustix::io::Errno;

use crate::perm::Access;

/// Why a mapping, a table change or a translation was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DotError {
    /// The new range shares bytes with an existing one.
    #[error("range {start:#x}+{len:#x} overlaps the mapped range {other_start:#x}+{other_len:#x}")]
    Overlap {
        /// First address of the new range.
        start: u64,
        /// Bytes in the new range.
        len: u64,
        /// First address of the existing range.
        other_start: u64,
        /// Bytes in the existing range.
        other_len: u64,
    },
    /// `start + len` passes 2^64.
    #[error("range {start:#x}+{len:#x} wraps around the end of the address space")]
    Wrap {
        /// First address.
        start: u64,
        /// Bytes asked for.
        len: u64,
    },
    /// A range or access of zero bytes.
    #[error("a range at {start:#x} has no length")]
    Empty {
        /// First address.
        start: u64,
    },
    /// The table already holds [`crate::MAX_RANGES`] ranges.
    #[error("the table already holds its limit of {limit} ranges")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// An unmap would cut a mapped range in two.
    #[error("unmap of {start:#x}+{len:#x} would split the range {other_start:#x}+{other_len:#x}")]
    Split {
        /// First address of the unmap.
        start: u64,
        /// Bytes in the unmap.
        len: u64,
        /// First address of the range that would be cut.
        other_start: u64,
        /// Bytes in that range.
        other_len: u64,
    },
    /// The range does not fit in the host mapping that should back it.
    #[error("offset {offset:#x}+{len:#x} lies outside a host mapping of {mapping_len:#x} bytes")]
    OutsideMapping {
        /// Offset in the mapping.
        offset: u64,
        /// Bytes in the range.
        len: u64,
        /// Bytes in the mapping.
        mapping_len: u64,
    },
    /// The range would grant more than its host mapping allows.
    #[error("the range at {start:#x} asks for rights that its host mapping does not have")]
    MappingRights {
        /// First address of the range.
        start: u64,
    },
    /// No range contains this address, or the access runs past the end of its range.
    #[error("no single mapped range contains {addr:#x}+{len:#x}")]
    NotMapped {
        /// First address of the access.
        addr: u64,
        /// Bytes in the access.
        len: u64,
    },
    /// The range does not grant this access.
    #[error("the range at {addr:#x} does not allow {access:?} access")]
    NoAccess {
        /// First address of the access.
        addr: u64,
        /// What was asked for.
        access: Access,
    },
    /// The range is known but has no host memory: only DMA messages to the VMM reach it.
    #[error("the range at {addr:#x} is reachable only by DMA messages")]
    MessageOnly {
        /// First address of the access.
        addr: u64,
    },
    /// A span was used in a direction for which it was not translated.
    #[error("a span translated without {0:?} access was used for it")]
    SpanAccess(Access),
    /// The file is shorter than the part of it that should be mapped.
    #[error("the file has {size:#x} bytes, too few to map {offset:#x}+{len:#x}")]
    FileTooShort {
        /// Bytes in the file.
        size: u64,
        /// Offset of the wanted part.
        offset: u64,
        /// Bytes in the wanted part.
        len: u64,
    },
    /// The descriptor is no regular file (memfd, tmpfs, hugetlbfs), so its size proves nothing.
    #[error("the descriptor is not a regular file, so its size cannot be checked")]
    NotAFile,
    /// A system call failed.
    #[error("{call} failed: {errno}")]
    Sys {
        /// Name of the call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

impl DotError {
    /// The errno to report to a VMM, always positive.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            DotError::Overlap { .. } => Errno::EXIST,
            DotError::Wrap { .. }
            | DotError::Empty { .. }
            | DotError::Split { .. }
            | DotError::OutsideMapping { .. }
            | DotError::FileTooShort { .. } => Errno::INVAL,
            DotError::TooMany { .. } => Errno::NOSPC,
            DotError::NotMapped { .. } => Errno::FAULT,
            DotError::NoAccess { .. }
            | DotError::MappingRights { .. }
            | DotError::SpanAccess(_) => Errno::ACCESS,
            DotError::MessageOnly { .. } => Errno::OPNOTSUPP,
            DotError::NotAFile => Errno::NODEV,
            DotError::Sys { errno, .. } => *errno,
        };
        errno.raw_os_error()
    }
}

impl From<DotError> for std::io::Error {
    fn from(error: DotError) -> Self {
        let kind = std::io::Error::from_raw_os_error(error.errno()).kind();
        std::io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_report_the_errno_a_vmm_expects() {
        let overlap = DotError::Overlap {
            start: 0,
            len: 1,
            other_start: 0,
            other_len: 1,
        };
        assert_eq!(overlap.errno(), libc::EEXIST);
        assert_eq!(DotError::Wrap { start: 0, len: 1 }.errno(), libc::EINVAL);
        assert_eq!(DotError::Empty { start: 0 }.errno(), libc::EINVAL);
        assert_eq!(DotError::TooMany { limit: 1 }.errno(), libc::ENOSPC);
        assert_eq!(
            DotError::Sys {
                call: "mmap",
                errno: Errno::NOMEM
            }
            .errno(),
            libc::ENOMEM
        );
    }

    #[test]
    fn io_error_keeps_the_sentence() {
        let io = std::io::Error::from(DotError::MessageOnly { addr: 0x1000 });
        assert!(io.to_string().contains("only by DMA messages"));
    }
}
