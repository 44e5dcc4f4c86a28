//! Whole-system tests without a VM, and what they share: a virtio-net driver that meets the real EM over
//! the real vfio-user socket, with the real OM behind it.
//!
//! The driver stands where a guest kernel and its VMM stand: [`client`] is the VMM's half (a vfio-user
//! client that can also misbehave), [`memory`] the guest's memory, [`pci`] the guest's PCI core,
//! [`virtio_net`] the guest's network driver on [`ring`]s. [`dpu`] starts an OM with its EMs as processes,
//! [`packet`] makes frames and judges them by arithmetic of its own.
//!
//! It is not a driver to learn performance from, and it trusts nothing of the crates under test: numbers
//! of the specifications are written out here a second time, so that a wrong one is seen.
//!
//! Start from [`dpu::Dpu`], [`virtio_net::VirtioNet`] and [`packet::Flow`].

pub mod client;
pub mod compat;
pub mod device_memory;
pub mod dpu;
pub mod erdma;
pub mod error;
pub mod manager;
pub mod mapped;
pub mod memory;
pub mod mlx5;
pub mod packet;
pub mod pci;
pub mod recovery;
pub mod ring;
pub mod time;
pub mod vhost_user;
pub mod virtio_net;
pub mod wire;

pub use error::{Error, Result};
