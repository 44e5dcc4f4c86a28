//! SmartEP: a PCIe endpoint that a VMM reaches over vfio-user.
//!
//! An endpoint has two sides. The *control side* ([`ControlSide`]) is configuration space and the control
//! registers: what the function presents itself as. The *data side* ([`DataSide`]) is everything that carries
//! traffic: doorbells, queues, DMA, interrupts. A [`route::RouteTable`] joins them by region and offset. The
//! control side may live in another process; reads are then answered from its [`shadow`].
//!
//! Start with [`server::Server`], which serves one function to one client at a time, with
//! [`function::FunctionInfo`], which describes the function to it, and with [`config::ConfigBuilder`].
//!
//! This crate knows nothing of virtio (but for the register layout of [`window`]) or RDMA, and moves no data by itself: guest memory goes into a
//! [`dot_iommu::DotTable`] that the data side reads.
//!
//! Source of the wire format: the vfio-user protocol specification 0.0/0.1 (QEMU
//! `docs/interop/vfio-user.rst`) and the Linux VFIO user API.

pub mod config;
pub mod conn;
pub mod dma;
pub mod fault;
pub mod function;
pub mod irq;
pub mod keep;
pub mod listener;
pub mod model;
pub mod proto;
pub mod route;
pub mod server;
pub mod shadow;
pub mod state;
pub mod window;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use config::ConfigState;

/// vfio region index of configuration space (`VFIO_PCI_CONFIG_REGION_INDEX`).
pub const CONFIG_REGION: u32 = 7;

/// Configuration space and control registers of one function.
///
/// Offsets and lengths were checked against the region before a call.
pub trait ControlSide: Send {
    /// Fills `data` from `offset` of `region`; bytes that do not exist read as ones.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]);
    /// Writes, and says what the data side has to know afterwards. With `flr` set in the answer the function
    /// is to be reset: the server stops the data side and then calls [`ControlSide::reset`].
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> ConfigState;
    /// Back to the state after power-on.
    fn reset(&mut self) -> ConfigState;
    /// The present state.
    fn state(&self) -> ConfigState;
    /// Whether there are writes that could not be done yet. [`ControlSide::retry`] is called now and then while it
    /// says so.
    fn waits(&self) -> bool {
        false
    }
    /// Tries again what waits; answers as [`ControlSide::write`].
    fn retry(&mut self) -> ConfigState {
        self.state()
    }
}

/// The part of a function that carries traffic.
///
/// Calls come from the one thread that reads the client's socket, and must return in well under a
/// millisecond, [`DataSide::reset`] excepted.
pub trait DataSide: Send + Sync {
    /// Fills `data` from `offset` of `region`.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset` of `region`.
    fn write(&self, region: u32, offset: u64, data: &[u8]);
    /// Bus mastering, memory decode or MSI-X changed. With bus mastering off there must be no DMA when this
    /// returns.
    fn config_changed(&self, old: ConfigState, new: ConfigState);
    /// Stops DMA and goes back to the state after power-on; returns when all is quiet. Answers to DMA messages
    /// come through the calling thread, so it must not wait for them: those that come later are to be dropped.
    fn reset(&self);
    /// A client connected and agreed on a version; `dma` reaches memory that the client maps without a descriptor.
    fn connected(&self, dma: Arc<dma::MessageDma>);
    /// Takes the place of a data side that was killed: `dma` and `state` are those of a client that is connected
    /// already and knows nothing of it. Its memory and eventfds are there. What the former one saved is in the
    /// [`state::State`] of the function.
    fn resumed(&self, dma: Arc<dma::MessageDma>, state: ConfigState) {
        self.connected(dma);
        self.config_changed(ConfigState::default(), state);
    }
    /// The client of [`DataSide::connected`] went away: DMA has to end. Its memory is unmapped after this returns.
    fn disconnected(&self);
    /// The client gave a range of a file that was not mapped before: `mapping` is all of it. For a data side that
    /// shares guest memory with another process.
    fn memory_added(&self, mapping: &Arc<dot_iommu::HostMapping>, fd: BorrowedFd<'_>) {
        let _ = (mapping, fd);
    }
    /// Ranges were unmapped; no view of the table reaches them. Returns when nobody with whom the data side shares
    /// memory is using them either. `gone`: mappings of which no range is left, by their number.
    fn memory_removed(&self, gone: &[u64]) {
        let _ = gone;
    }
}
