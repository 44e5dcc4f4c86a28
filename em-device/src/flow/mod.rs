//! Which link a frame leaves by.

pub mod l2;

pub use l2::{L2Header, LinkSet, MacTable};
