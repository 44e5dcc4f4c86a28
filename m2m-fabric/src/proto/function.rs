//! A function as the OM presents it and the EM serves it.

use serde::{Deserialize, Serialize};

/// All an EM needs to serve one PCIe function. What the guest sees in config space is not here: the
/// OM keeps that and shares it as the shadow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// Unique in the DPU, below [`super::MAX_FUNCTIONS`].
    pub id: u32,
    /// Name for people, for example `net0`.
    pub name: String,
    /// Regions that exist, by vfio region index (0–5 BARs, 7 config space).
    pub regions: Vec<RegionSpec>,
    /// Parts of regions that are on the control side; everything else is on the data side.
    pub control: Vec<ControlWindow>,
    /// MSI-X vectors offered, at most 2048; the table lies where config space says.
    pub msix_vectors: u16,
    /// Path of the socket that the VMM connects to, or listens on if [`Self::dials`], on the EM's host.
    pub socket: String,
    /// What the function is.
    pub kind: FunctionKind,
}

impl FunctionSpec {
    /// Whether the EM connects to the socket, instead of whoever uses the function.
    pub fn dials(&self) -> bool {
        match &self.kind {
            FunctionKind::VirtioNet(net) => matches!(net.face, Face::VhostUserClient { .. }),
            FunctionKind::Rdma(_) | FunctionKind::Memory(_) => false,
        }
    }
}

/// One vfio region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionSpec {
    /// vfio region index.
    pub index: u32,
    /// Bytes; for a BAR a power of two.
    pub size: u64,
}

/// A part of a region whose accesses are answered by the control side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlWindow {
    /// vfio region index.
    pub region: u32,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What a function is to its driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FunctionKind {
    /// A virtio network device (virtio 1.3 §5.1).
    VirtioNet(VirtioNetSpec),
    /// An RDMA device.
    Rdma(RdmaSpec),
    /// Memory behind a BAR.
    Memory(MemorySpec),
}

/// Parameters of a memory function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySpec {
    /// The BAR with the memory; all of it is one file, which the VMM maps and the keeper holds.
    pub bar: u32,
    /// Bytes, a power of two.
    pub bytes: u64,
}

/// Parameters of an RDMA function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaSpec {
    /// What its guest sees.
    pub face: RdmaFace,
    /// What its port is.
    pub link: RdmaLinkLayer,
    /// Permanent MAC address.
    pub mac: [u8; 6],
    /// Largest payload of an Ethernet frame in bytes, 68 to 9000.
    pub mtu: u16,
    /// GUID of node and port (EUI-64).
    pub guid: u64,
    /// LID that the subnet gave the port, 1 to 0xbfff; 0 with [`RdmaLinkLayer::Ethernet`].
    pub lid: u16,
    /// BAR with registers and doorbells.
    pub bar: u32,
    /// Whether the VMM may map the doorbell pages, which the EM then polls.
    pub mapped_doorbells: bool,
    /// Whether the administrator lets the link be up.
    pub link_up: bool,
    /// Whether there may be windows: one that takes the place of another waits for
    /// [`WindowsGiven`](super::RdmaRequest::WindowsGiven) as for its wires.
    pub windows: bool,
}

/// Whose driver an RDMA function is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RdmaFace {
    /// The drivers of the ConnectX family.
    Mlx5,
    /// The `erdma` driver; its port is an Ethernet one.
    Erdma,
}

/// What an RDMA port is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RdmaLinkLayer {
    /// InfiniBand: addressed by LID, the OM is the subnet manager.
    Infiniband,
    /// Ethernet: RoCEv2, and a network interface beside it.
    Ethernet,
}

/// Parameters of a virtio network function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioNetSpec {
    /// Permanent MAC address.
    pub mac: [u8; 6],
    /// Largest payload of an Ethernet frame in bytes, 68 to 9000.
    pub mtu: u16,
    /// Receive/transmit pairs offered, 1 to 32.
    pub queue_pairs: u16,
    /// Largest size of a queue, a power of two from 16 to 32768.
    pub queue_size: u16,
    /// Where the virtio structures lie (virtio 1.3 §4.1.4), as the vendor capabilities say.
    pub layout: VirtioPciLayout,
    /// What a VMM sees of it.
    pub face: Face,
}

/// What a VMM sees of a virtio network function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Face {
    /// A PCIe function: vfio-user on the socket that comes with the function.
    VfioUser,
    /// Virtqueues: vhost-user on the socket that comes with the function.
    VhostUser,
    /// Virtqueues: vhost-user, and the EM connects. The socket that comes with the function is of no use.
    VhostUserClient {
        /// Where the front end listens.
        path: String,
    },
}

/// Placement of the virtio-pci structures in one BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioPciLayout {
    /// BAR index.
    pub bar: u32,
    /// Common configuration (§4.1.4.3).
    pub common: Window,
    /// ISR status (§4.1.4.5).
    pub isr: Window,
    /// Device-specific configuration (§4.1.4.6); the control side answers it.
    pub device: Window,
    /// Notification area (§4.1.4.4).
    pub notify: Window,
    /// Bytes between the notification addresses of two queues.
    pub notify_multiplier: u32,
}

/// A range of bytes in a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Where a function is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FunctionState {
    /// Listening; no VMM connected.
    Waiting,
    /// A VMM is connected; no driver is.
    Connected,
    /// The driver set DRIVER_OK (or its kind's equivalent).
    Running,
    /// The function asked for a reset (DEVICE_NEEDS_RESET).
    NeedsReset,
}
