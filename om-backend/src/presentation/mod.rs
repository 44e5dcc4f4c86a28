//! How functions look to their guests: ids, capabilities, BARs, registers.
//!
//! One file per kind of function. Each makes a [`Presentation`], which the OM keeps as a
//! [`crate::control::FunctionControl`].

pub mod erdma;
pub mod memory;
pub mod rdma;
pub mod virtio_net;
pub mod virtio_pci;

use crate::config::{FunctionConfig, FunctionKind, RdmaFace};
use m2m_fabric::proto::FunctionSpec;
use smartep::config::{BarKind, BarSpec, ConfigBuilder};

/// Subsystem vendor and id that QEMU gives to emulated devices without ids of their own (`pci.h`); the drivers of devices
/// that have them do not look.
const SUBSYSTEM: (u16, u16) = (0x1af4, 0x1100);

/// A 64-bit prefetchable memory BAR of `size` bytes.
fn memory_bar(size: u64) -> BarSpec {
    BarSpec {
        size,
        kind: BarKind::Mem64,
        prefetchable: true,
    }
}

/// All that a guest and an EM need to know of a function.
pub struct Presentation {
    /// Config space.
    pub config: ConfigBuilder,
    /// Bytes of the control windows of `spec`, in their order.
    pub windows: Vec<Vec<u8>>,
    /// For the EM.
    pub spec: FunctionSpec,
    /// Where the link status lies, if the control side has it: window, and byte in it. Bit 0 is "up".
    pub link_status: Option<(usize, usize)>,
}

/// How function `id` looks, whatever its kind. Its link is down.
pub fn present(id: u32, function: &FunctionConfig) -> Presentation {
    match &function.kind {
        FunctionKind::VirtioNet(net) => virtio_net::present(id, function, net),
        FunctionKind::Rdma(rdma) => match rdma.face {
            RdmaFace::Mlx5 => rdma::present(id, function, rdma),
            RdmaFace::Erdma => erdma::present(id, function, rdma),
        },
        FunctionKind::Memory(memory) => memory::present(id, function, memory),
    }
}
