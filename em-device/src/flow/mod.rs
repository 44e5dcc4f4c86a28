//! Which link a frame leaves by, and hashes of flows.

pub mod l2;
pub mod toeplitz;

pub use l2::{L2Header, LinkSet, MacTable};
