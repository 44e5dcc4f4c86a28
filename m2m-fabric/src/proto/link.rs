//! Wires that join functions.

use serde::{Deserialize, Serialize};

/// One end of a wire, for the EM that gets it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSpec {
    /// Unique in the DPU.
    pub id: u32,
    /// Function of this EM whose frames travel here.
    pub function: u32,
    /// How frames travel.
    pub kind: LinkKind,
}

/// How frames travel on a wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkKind {
    /// To a function of another EM on this host, through shared memory. Descriptors: the memfd of
    /// the ring pair, the eventfd that wakes this end, the eventfd that wakes the peer.
    Shm {
        /// This end's side of the ring pair, 0 or 1.
        side: u8,
        /// Name of the peer function, for people.
        peer: String,
        /// MAC address of the peer function.
        peer_mac: [u8; 6],
    },
    /// RDMA to a function (of another EM on this host, or of the same), through shared memory: requests
    /// and answers, no payload. Descriptors as for [`LinkKind::Shm`].
    Rdma {
        /// This end's side of the ring pair, 0 or 1.
        side: u8,
        /// Name of the peer function, for people.
        peer: String,
        /// Id of the peer function.
        peer_function: u32,
    },
    /// A TAP interface of the host, by name. No descriptors, or one: an open TAP.
    Tap {
        /// Interface name, at most 15 bytes.
        name: String,
    },
    /// Every frame comes back.
    Loopback,
    /// Every frame is counted and dropped.
    Null,
    /// Frames of the function are also written to a pcap file.
    Capture {
        /// File to create.
        path: String,
    },
}

/// Size in bytes of the memfd behind [`LinkKind::Shm`]: two rings and their indices. The OM makes it
/// zero-filled and sealed against resizing; all zeroes is a valid empty wire.
pub const SHM_LINK_BYTES: u64 = 2 * (SHM_RING_BYTES + 4096);

/// Payload bytes of one direction of a shared-memory wire, a power of two.
pub const SHM_RING_BYTES: u64 = 4 << 20;
