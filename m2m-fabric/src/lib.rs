//! M2M fabric.
pub mod proto;
