//! Conformance of the vfio-user server: what a client may rely on, and what it may not break.

#![allow(unreachable_pub)] // one crate, split by topic
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests stand outside `#[test]`

mod access;
mod cloud_hypervisor;
mod dma;
mod harness;
mod hostile;
mod interrupts;
mod negotiation;
mod window;
