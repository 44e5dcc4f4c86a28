//! The wire format of vfio-user: little-endian structures behind a 16-byte header.
//!
//! Source: vfio-user specification, sections of the same names; layouts of the bodies are those of
//! `linux/vfio.h`. Unknown commands and flags stay representable.

mod bodies;
mod version;

pub use bodies::*;
pub use version::{Capabilities, VersionError, answer_version};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Largest body of a message that is accepted: a transfer of [`MAX_DATA_XFER`] with its fixed part.
pub const MAX_MESSAGE: usize = HEADER_SIZE + MAX_DATA_XFER + 64;
/// Largest data part of one message, bytes.
pub const MAX_DATA_XFER: usize = 1 << 20;
/// Most descriptors on one message.
pub const MAX_FDS: usize = 16;
/// Bytes of a header.
pub const HEADER_SIZE: usize = 16;

/// Message header (spec: "Header").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of the command; the reply carries the same.
    pub id: u16,
    /// Command number, see [`command`].
    pub command: u16,
    /// Bytes of the whole message.
    pub size: u32,
    /// Type in bits 0–3, then [`Header::NO_REPLY`] and [`Header::ERROR`].
    pub flags: u32,
    /// errno of a failed command, in a reply with the error flag.
    pub error: u32,
}

impl Header {
    /// The sender wants no reply.
    pub const NO_REPLY: u32 = 1 << 4;
    /// The command failed.
    pub const ERROR: u32 = 1 << 5;
    /// Type of a reply, in bits 0–3.
    pub const REPLY: u32 = 1;

    /// Whether it is a command (type 0).
    pub fn is_command(&self) -> bool {
        self.flags & 15 == 0
    }

    /// Whether it is a reply (type 1).
    pub fn is_reply(&self) -> bool {
        self.flags & 15 == Self::REPLY
    }

    /// Whether the sender waits for a reply.
    pub fn wants_reply(&self) -> bool {
        self.flags & Self::NO_REPLY == 0
    }
}

/// Command numbers.
#[allow(missing_docs)] // the names are the specification's
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const DEVICE_GET_INFO: u16 = 4;
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub const DEVICE_SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DMA_READ: u16 = 11;
    pub const DMA_WRITE: u16 = 12;
    pub const DEVICE_RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;
}
