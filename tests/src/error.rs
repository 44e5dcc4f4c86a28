//! What can go wrong between the test driver and the device.

use std::io;

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation of the test driver did not end as it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket failed or was closed by the server.
    #[error("the vfio-user socket: {0}")]
    Socket(#[from] io::Error),
    /// The server answered with the error flag.
    #[error("the server refused command {command} with errno {errno}")]
    Refused {
        /// vfio-user command number.
        command: u16,
        /// errno of the reply.
        errno: u32,
    },
    /// The server's answer breaks the protocol.
    #[error("protocol: {0}")]
    Protocol(String),
    /// A wait ran into its deadline.
    #[error("nothing within {seconds} s: {what}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: f32,
    },
    /// An access outside the guest's memory.
    #[error("guest address {address:#x} with {len} bytes is not in the test driver's memory")]
    Memory {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: usize,
    },
    /// The device did what a driver cannot work with.
    #[error("device: {0}")]
    Device(String),
    /// The processes under test could not be started or asked.
    #[error("{0}")]
    Harness(String),
}

impl Error {
    /// Whether this is a wait that ran into its deadline.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Timeout { .. } => true,
            Self::Socket(e) => matches!(
                e.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ),
            _ => false,
        }
    }

    /// Whether the server closed the connection.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Socket(e) if matches!(e.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset))
    }
}
