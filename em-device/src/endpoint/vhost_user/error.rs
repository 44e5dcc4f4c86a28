//! What a front end can do wrong.

use std::io;

use dot_iommu::DotError;
use rustix::io::Errno;
use thiserror::Error;

/// Why a front end is cut off.
#[derive(Debug, Error)]
pub(super) enum FaceError {
    /// A ring that the function does not have.
    #[error("there is no ring {ring}: the function has {pairs} queue pairs")]
    NoRing {
        /// What was asked for.
        ring: u32,
        /// What there is.
        pairs: u16,
    },
    /// Features that were not offered.
    #[error("features {0:#x} were not offered")]
    Features(u64),
    /// Features that cannot work.
    #[error("features {0:#x} need others; a driver older than virtio 1.0 is not served")]
    Unacceptable(u64),
    /// Something that a running ring keeps.
    #[error("{what} cannot change while ring {ring} runs")]
    Running {
        /// The ring.
        ring: u16,
        /// What was to change.
        what: &'static str,
    },
    /// An impossible size.
    #[error("ring {ring} cannot have {size} entries")]
    Size {
        /// The ring.
        ring: u16,
        /// What was asked for.
        size: u32,
    },
    /// A ring outside of the memory, or not aligned.
    #[error("a part of ring {ring} is at {address:#x}, which is not in memory or not aligned")]
    Address {
        /// The ring.
        ring: u16,
        /// As the front end sees it.
        address: u64,
    },
    /// A position that the ring does not have.
    #[error("ring {ring} has no position {position:#x}")]
    Position {
        /// The ring.
        ring: u16,
        /// What was asked for.
        position: u32,
    },
    /// A ring without a descriptor for notifications.
    #[error("ring {0} has no descriptor for notifications, and is not polled")]
    Polled(u16),
    /// Memory that is used differently or cannot be used.
    #[error("memory at {address:#x}: {source}")]
    Memory {
        /// Guest address.
        address: u64,
        /// Why.
        source: DotError,
    },
    /// A log that cannot be used.
    #[error("the log of dirty pages: {0}")]
    Log(#[source] DotError),
    /// A range that was not given.
    #[error("there is no memory of {size} bytes at {address:#x}")]
    NoMemory {
        /// Guest address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// Too many ranges.
    #[error("more than {0} ranges of memory")]
    TooManyRanges(usize),
    /// More memory than one front end may have mapped.
    #[error("{bytes} bytes of {what} are more than {most}")]
    TooMuch {
        /// What for.
        what: &'static str,
        /// What would be mapped in all.
        bytes: u64,
        /// What may be.
        most: u64,
    },
    /// A descriptor of something else than memory.
    #[error("{0} is neither a memfd nor on tmpfs or hugetlbfs")]
    NoMemoryFile(&'static str),
    /// A descriptor that is no eventfd.
    #[error("the descriptor for ring {ring} cannot be used: {source}")]
    Descriptor {
        /// The ring.
        ring: u16,
        /// What the system said.
        source: Errno,
    },
    /// A message for something that was not offered.
    #[error("{0} was not offered")]
    NotOffered(&'static str),
    /// There is no such part of the device configuration, or it cannot be written.
    #[error("{size} bytes of configuration at {offset} cannot be {verb}")]
    Config {
        /// First byte.
        offset: u32,
        /// Bytes.
        size: usize,
        /// What was to be done.
        verb: &'static str,
    },
    /// The data path ended.
    #[error("the data path has ended")]
    Worker,
}

impl From<FaceError> for vhost::vhost_user::Error {
    fn from(error: FaceError) -> Self {
        Self::ReqHandlerError(io::Error::other(error))
    }
}
