//! Whole-system tests without a VM: real OM, real EMs, and a driver that stands where a guest would.

// A test that panics is a test that failed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod certificates;
mod control_queue;
mod erdma;
mod fixture;
mod hostile_driver;
mod hostile_socket;
mod lifecycle;
mod om_config;
mod probe;
mod rdma;
mod recovery;
mod remote;
mod rings;
mod stats;
mod traffic;
mod traffic_ports;
mod upgrade;
mod vhost_user;
