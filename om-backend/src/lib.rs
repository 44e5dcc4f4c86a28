//! The Orchestration Module (OM): the brain of the DPU.
//!
//! It reads the configuration file ([`config`]), decides how each function looks to its guest
//! ([`presentation`]) and answers for it ([`control`]), keeps the functions' sockets ([`listener`]),
//! runs the EMs ([`supervisor`]), joins their functions by wires ([`wiring`]), decides which RDMA
//! functions reach each other ([`rdma`]) and answers `dpuctl` ([`northbound`]).
//!
//! Start from [`Om`], which is all of it as one value, and from [`conductor`], where the decisions are
//! made.
//!
//! What it is not: it moves no packet and maps no guest memory; that is the EM's. What grows with
//! bandwidth does not belong here.

pub mod conductor;
pub mod config;
pub mod control;
pub mod fd_store;
pub mod function;
pub mod northbound;
mod om;
pub mod peer;
pub mod presentation;
pub mod rdma;
pub mod session;
pub mod supervisor;
pub mod vault;
pub mod windows;
pub mod wiring;

pub use om::{Om, StartError};
