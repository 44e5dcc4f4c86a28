//! How functions look to their guests: ids, capabilities, BARs, registers.
//!
//! One file per kind of function. Each makes a [`Presentation`], which the OM keeps as a
//! [`crate::control::FunctionControl`].

pub mod virtio_net;
pub mod virtio_pci;

use m2m_fabric::proto::FunctionSpec;
use smartep::config::ConfigBuilder;

/// All that a guest and an EM need to know of a function.
pub struct Presentation {
    /// Config space.
    pub config: ConfigBuilder,
    /// Bytes of the control windows of `spec`, in their order.
    pub windows: Vec<Vec<u8>>,
    /// For the EM.
    pub spec: FunctionSpec,
    /// Where the link status lies: window, and byte in it. Bit 0 is "up".
    pub link_status: (usize, usize),
}
