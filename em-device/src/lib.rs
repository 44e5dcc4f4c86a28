//! placeholder
pub mod flow;
pub mod frame;
pub mod offload;
pub mod port;
