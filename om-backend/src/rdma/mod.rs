//! Who may talk RDMA to whom, and whose memory is shared with whom.
//!
//! [`Subnet`] is the OM as subnet manager and policy: it knows the addresses of the ports and answers
//! where a destination is. [`SharedMemory`] keeps the files of guest memory and knows which EMs have
//! them. Both talk to nobody, but say what the EMs are to be told ([`Order`]).

mod memory;
mod subnet;

pub use memory::SharedMemory;
pub use subnet::{Port, Subnet};

use m2m_fabric::proto::RdmaRequest;
use std::os::fd::OwnedFd;

/// Something an EM is to be told.
#[derive(Debug)]
pub struct Order {
    /// The EM, by its place in the configuration.
    pub em: usize,
    /// What it is told.
    pub request: RdmaRequest,
    /// What belongs to it.
    pub fds: Vec<OwnedFd>,
}
