//! The virtio network device (virtio 1.3 §5.1).
//!
//! | BAR | offset | what | answered by |
//! |---|---|---|---|
//! | 0 | 0x0000 | common configuration | EM |
//! | 0 | 0x1000 | ISR status | EM |
//! | 0 | 0x2000 | device configuration | OM |
//! | 0 | 0x3000 | notifications, 4 bytes a queue | EM |
//! | 2 | 0x0000 | MSI-X table | VMM |
//! | 2 | 0x4000 | MSI-X pending bits | VMM |

use super::Presentation;
use super::virtio_pci::{self, DEVICE_BASE, REVISION, VENDOR};
use crate::config::FunctionConfig;
use crate::interim::config::{BarKind, BarSpec, Capability, ConfigBuilder};
use m2m_fabric::proto::{
    ControlWindow, FunctionKind, FunctionSpec, RegionSpec, VirtioNetSpec, VirtioPciLayout, Window,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_S_LINK_UP;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

/// vfio index of the region with the virtio structures.
pub const BAR: u32 = 0;
/// vfio index of the region with the MSI-X table.
pub const MSIX_BAR: u32 = 2;
/// Bytes of each BAR.
pub const BAR_BYTES: u64 = 32 << 10;
/// Offset of the MSI-X pending bits in [`MSIX_BAR`].
pub const MSIX_PBA: u32 = 0x4000;
/// vfio index of config space.
const CONFIG_REGION: u32 = 7;
/// Bytes of config space.
const CONFIG_BYTES: u64 = 4096;
/// Network controller, Ethernet (PCI code and id assignment, §1.3).
const CLASS: [u8; 3] = [0x02, 0x00, 0x00];

/// Where the structures lie in [`BAR`].
pub const LAYOUT: VirtioPciLayout = VirtioPciLayout {
    bar: BAR,
    common: Window {
        offset: 0,
        len: 0x40,
    },
    isr: Window {
        offset: 0x1000,
        len: 4,
    },
    device: Window {
        offset: 0x2000,
        len: 0x40,
    },
    notify: Window {
        offset: 0x3000,
        len: 0x1000,
    },
    notify_multiplier: 4,
};

/// `speed` when it is not known (virtio 1.3 §5.1.4).
const SPEED_UNKNOWN: u32 = u32::MAX;
/// `duplex` of a full-duplex link, and when it is not known (virtio 1.3 §5.1.4).
const DUPLEX_FULL: u8 = 1;
const DUPLEX_UNKNOWN: u8 = 0xff;

/// `struct virtio_net_config` (virtio 1.3 §5.1.4) up to `duplex`; what follows belongs to features
/// that are not offered.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct VirtioNetConfig {
    mac: [u8; 6],
    status: U16,
    max_virtqueue_pairs: U16,
    mtu: U16,
    speed: U32,
    duplex: u8,
}

/// The byte of the device configuration that has the link bit.
const STATUS: usize = 6;
// `set_link` writes that bit as bit 0.
const _: () = assert!(VIRTIO_NET_S_LINK_UP == 1);

/// How function `id` looks. Its link is down.
pub fn present(id: u32, function: &FunctionConfig) -> Presentation {
    // one for every receive, transmit and control queue, one for changes of the configuration
    let msix_vectors = 2 * function.queue_pairs + 2;
    let bar = |kind| {
        Some(BarSpec {
            size: BAR_BYTES,
            kind,
            prefetchable: false,
        })
    };
    let mut capabilities = vec![
        Capability::PciExpress,
        Capability::PowerManagement,
        Capability::MsiX {
            vectors: msix_vectors,
            table_bar: MSIX_BAR as u8,
            table_offset: 0,
            pba_bar: MSIX_BAR as u8,
            pba_offset: MSIX_PBA,
        },
    ];
    let vendor = virtio_pci::capabilities(&LAYOUT);
    capabilities.extend(vendor.into_iter().map(Capability::Vendor));
    let virtio_id = VIRTIO_ID_NET as u16;
    let config = ConfigBuilder {
        vendor: VENDOR,
        device: DEVICE_BASE + virtio_id,
        revision: REVISION,
        class: CLASS,
        subsystem_vendor: VENDOR,
        subsystem: virtio_id,
        bars: [
            bar(BarKind::Mem64),
            None,
            bar(BarKind::Mem32),
            None,
            None,
            None,
        ],
        capabilities,
    };
    let window = ControlWindow {
        region: BAR,
        offset: LAYOUT.device.offset.into(),
        len: 0x1000,
    };
    Presentation {
        config,
        windows: vec![device_config(function)],
        spec: FunctionSpec {
            id,
            name: function.name.clone(),
            regions: vec![
                RegionSpec {
                    index: BAR,
                    size: BAR_BYTES,
                },
                RegionSpec {
                    index: MSIX_BAR,
                    size: BAR_BYTES,
                },
                RegionSpec {
                    index: CONFIG_REGION,
                    size: CONFIG_BYTES,
                },
            ],
            control: vec![window],
            msix_vectors,
            kind: FunctionKind::VirtioNet(VirtioNetSpec {
                mac: function.mac.0,
                mtu: function.mtu,
                queue_pairs: function.queue_pairs,
                queue_size: function.queue_size,
                layout: LAYOUT,
            }),
        },
        link_status: (0, STATUS),
    }
}

fn device_config(function: &FunctionConfig) -> Vec<u8> {
    let (speed, duplex) = match function.speed_mbps {
        Some(speed) => (speed, DUPLEX_FULL),
        None => (SPEED_UNKNOWN, DUPLEX_UNKNOWN),
    };
    let known = VirtioNetConfig {
        mac: function.mac.0,
        status: 0.into(),
        max_virtqueue_pairs: function.queue_pairs.into(),
        mtu: function.mtu.into(),
        speed: speed.into(),
        duplex,
    };
    let mut bytes = known.as_bytes().to_vec();
    bytes.resize(0x1000, 0);
    bytes
}
