//! What OM and EM say about RDMA: who may talk to whom, and whose memory is shared with whom.

use serde::{Deserialize, Serialize};

/// A request about RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RdmaRequest {
    /// EM → OM: a queue pair, or a datagram, wants to reach a destination. Answered by
    /// [`super::Reply::Path`] when there is such a function and the network's policy allows it.
    Resolve {
        /// The function that asks.
        function: u32,
        /// Where to.
        to: RdmaDestination,
    },
    /// EM → OM: a function's GID table changed.
    SetGid {
        /// The function.
        function: u32,
        /// Index in its table.
        index: u16,
        /// The GID; all zeroes removes it.
        gid: [u8; 16],
    },
    /// EM → OM: a function's guest memory lies (also) in the file whose descriptor rides along. The OM
    /// gives it to every EM with a function that this one may reach, now and later.
    ShareMemory {
        /// The function.
        function: u32,
        /// Number of the file, unique in the EM and never used again.
        file: u64,
    },
    /// EM → OM: a function does not use a file any more; without a number, any file.
    UnshareMemory {
        /// The function.
        function: u32,
        /// Number of the file.
        file: Option<u64>,
    },
    /// OM → EM: a peer's memory, see [`Self::ShareMemory`]; the descriptor rides along.
    PeerMemory {
        /// The peer function.
        function: u32,
        /// Number of the file in the peer's EM.
        file: u64,
    },
    /// OM → EM: a peer does not use a file any more; without a number, any file.
    PeerMemoryGone {
        /// The peer function.
        function: u32,
        /// Number of the file.
        file: Option<u64>,
    },
    /// EM → OM: what a function of an EM has that goes on, told when another OM adopted the EM and when the EM took over
    /// what another left; before it, its files by [`Self::ShareMemory`].
    Holds {
        /// The function.
        function: u32,
        /// Its GID table, by index; what is not there is not set.
        gids: Vec<(u16, [u8; 16])>,
        /// The last answer to [`Self::Resolve`] that it relies on, for each peer.
        paths: Vec<RdmaPath>,
        /// Numbers of its files; others are not used any more.
        files: Vec<u64>,
    },
    /// OM → EM: of a peer's files that an OM before told of, those that are not among these are not used any more.
    PeerMemoryKept {
        /// The peer function.
        function: u32,
        /// Numbers of the files in the peer's EM.
        files: Vec<u64>,
    },
    /// OM → EM: answers to [`Self::Resolve`] about a peer, up to a generation, are not valid any more:
    /// queue pairs that rely on one go to error.
    Revoke {
        /// The function that asked.
        function: u32,
        /// The peer.
        peer: u32,
        /// The last generation that is not valid.
        generation: u64,
    },
    /// OM → EM: memory of another device of the same VM lies in the guest's address space, so that requests of the
    /// function may name it; its file rides along. Answered when requests can use it.
    Window {
        /// The RDMA function.
        function: u32,
        /// Where the memory is.
        window: WindowSpec,
    },
    /// OM → EM: those were all windows that there are for now.
    WindowsGiven {
        /// The RDMA function.
        function: u32,
    },
    /// OM → EM: a window of a device, up to a generation, is not there any more; one of them that comes later is refused.
    /// Answered when no transfer uses it, neither here nor in the EM of a peer.
    WindowGone {
        /// The RDMA function.
        function: u32,
        /// The function with the memory; without, any.
        device: Option<u32>,
        /// The last generation that is gone.
        generation: u64,
    },
    /// OM → EM: the administrator lets a function's link be up or not; its driver is told.
    SetLink {
        /// The function.
        function: u32,
        /// Whether it may be up.
        up: bool,
    },
}

/// A range of guest addresses behind which is another device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSpec {
    /// The function with the memory.
    pub device: u32,
    /// Number of the window; numbers of one OM count up.
    pub generation: u64,
    /// First guest address: that of the BAR.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

/// A destination as an address vector names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RdmaDestination {
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// GID, when there is a GRH.
    pub gid: Option<[u8; 16]>,
    /// Ethernet address; zero on InfiniBand.
    pub mac: [u8; 6],
}

/// Where a destination is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaPath {
    /// The function there.
    pub peer: u32,
    /// Number of the answer; numbers count up.
    pub generation: u64,
}
