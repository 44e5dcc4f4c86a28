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
use crate::config::{self, FunctionConfig, NetConfig, VhostMode};
use m2m_fabric::proto::{
    ControlWindow, Face, FunctionKind, FunctionSpec, RegionSpec, VirtioNetSpec, VirtioPciLayout,
    Window,
};
use smartep::CONFIG_REGION;
use smartep::config::{BarKind, BarSpec, CONFIG_SIZE, Capability, ConfigBuilder};
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
/// MSI-X vectors at the most: a guest's system may refuse a device with more, and with fewer than it has
/// queues a driver lets queues share them.
const MAX_VECTORS: u16 = 64;
/// Network controller, Ethernet (PCI code and id assignment, §1.3).
const CLASS: u32 = 0x02_00_00;

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

/// Receive-side scaling as the EM does it: bytes of a key, entries of the table, types of hashes (virtio 1.3
/// §5.1.6.4.3.1).
const RSS_KEY_BYTES: u8 = 40;
const RSS_TABLE: u16 = 128;
const HASH_TYPES: u32 = 0x1ff;

/// `struct virtio_net_config` (virtio 1.3 §5.1.4) up to `supported_hash_types`; what follows belongs to features that
/// are not offered.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct VirtioNetConfig {
    mac: [u8; 6],
    status: U16,
    max_virtqueue_pairs: U16,
    mtu: U16,
    speed: U32,
    duplex: u8,
    rss_max_key_size: u8,
    rss_max_indirection_table_length: U16,
    supported_hash_types: U32,
}

/// The byte of the device configuration that has the link bit.
const STATUS: usize = 6;
// `set_link` writes that bit as bit 0.
const _: () = assert!(VIRTIO_NET_S_LINK_UP == 1);

/// How function `id` looks. Its link is down.
pub fn present(id: u32, function: &FunctionConfig, net: &NetConfig) -> Presentation {
    // One for every receive, transmit and control queue, one for changes of the configuration.
    let msix_vectors = (2 * net.queue_pairs + 2).min(MAX_VECTORS);
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
    // The whole page goes to the control side; behind the structure it reads as ones.
    let window = ControlWindow {
        region: BAR,
        offset: LAYOUT.device.offset.into(),
        len: 0x1000,
    };
    Presentation {
        config,
        windows: vec![device_config(function, net)],
        spec: FunctionSpec {
            id,
            name: function.name.clone(),
            socket: function.socket.to_string_lossy().into_owned(),
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
                    size: CONFIG_SIZE as u64,
                },
            ],
            control: vec![window],
            msix_vectors,
            kind: FunctionKind::VirtioNet(VirtioNetSpec {
                mac: function.mac.0,
                mtu: function.mtu,
                queue_pairs: net.queue_pairs,
                queue_size: net.queue_size,
                layout: LAYOUT,
                face: face(function),
            }),
        },
        link_status: Some((0, STATUS)),
    }
}

fn face(function: &FunctionConfig) -> Face {
    match function.face() {
        config::Face::VfioUser => Face::VfioUser,
        config::Face::VhostUser(VhostMode::Server) => Face::VhostUser,
        config::Face::VhostUser(VhostMode::Client) => Face::VhostUserClient {
            path: function.socket.to_string_lossy().into_owned(),
        },
    }
}

fn device_config(function: &FunctionConfig, net: &NetConfig) -> Vec<u8> {
    let (speed, duplex) = match net.speed_mbps {
        Some(speed) => (speed, DUPLEX_FULL),
        None => (SPEED_UNKNOWN, DUPLEX_UNKNOWN),
    };
    let known = VirtioNetConfig {
        mac: function.mac.0,
        status: 0.into(),
        max_virtqueue_pairs: net.queue_pairs.into(),
        mtu: function.mtu.into(),
        speed: speed.into(),
        duplex,
        rss_max_key_size: RSS_KEY_BYTES,
        rss_max_indirection_table_length: RSS_TABLE.into(),
        supported_hash_types: HASH_TYPES.into(),
    };
    let mut bytes = known.as_bytes().to_vec();
    bytes.resize(LAYOUT.device.len as usize, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use smartep::config::ConfigSpace;

    fn presented(lines: &str) -> (Presentation, ConfigSpace) {
        let text = format!(
            "[[em]]\nname = \"em0\"\n[[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\n\
             mac = \"02:00:00:00:00:0a\"\nport = {{ null = true }}\n{lines}\n"
        );
        let config = Config::parse("test", &text).unwrap();
        let presentation = super::super::present(3, &config.ems[0].functions[0]);
        let space = presentation.config.build().unwrap();
        (presentation, space)
    }

    fn vectors_of(pairs: u16) -> u16 {
        presented(&format!("queue_pairs = {pairs}"))
            .0
            .spec
            .msix_vectors
    }

    fn word(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }

    fn dword(bytes: &[u8], at: usize) -> u32 {
        u32::from(word(bytes, at)) | u32::from(word(bytes, at + 2)) << 16
    }

    /// Offsets of the capabilities by id, as a driver finds them.
    fn chain(bytes: &[u8]) -> Vec<(u8, usize)> {
        assert_ne!(word(bytes, 6) & 0x10, 0, "status has no capability list");
        let mut found = Vec::new();
        let mut at = usize::from(bytes[0x34]);
        while at != 0 {
            assert!(
                at >= 0x40 && at % 4 == 0 && found.len() < 48,
                "bad pointer {at:#x}"
            );
            found.push((bytes[at], at));
            at = usize::from(bytes[at + 1]);
        }
        found
    }

    #[test]
    fn a_driver_recognises_a_virtio_network_device() {
        let (_, space) = presented("");
        let bytes = space.bytes();
        assert_eq!((word(bytes, 0), word(bytes, 2)), (0x1af4, 0x1041));
        assert_eq!(dword(bytes, 8), 0x0200_0001, "class and revision");
        assert_eq!((word(bytes, 0x2c), word(bytes, 0x2e)), (0x1af4, 1));
        assert_eq!(bytes[0x3d], 0, "no INTx pin");
    }

    #[test]
    fn a_driver_finds_every_structure_inside_its_bar() {
        let (presentation, space) = presented("queue_pairs = 32");
        let bytes = space.bytes();
        let chain = chain(bytes);
        let ids: Vec<u8> = chain.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [0x10, 0x01, 0x11, 9, 9, 9, 9, 9]);
        let mut ends = Vec::new();
        for (_, at) in chain.iter().filter(|(id, _)| *id == 9) {
            let kind = bytes[at + 3];
            let (bar, offset, length) =
                (bytes[at + 4], dword(bytes, at + 8), dword(bytes, at + 12));
            let length_byte = if matches!(kind, 2 | 5) { 20 } else { 16 };
            assert_eq!(bytes[at + 2], length_byte);
            if kind == 5 {
                assert_eq!(
                    (offset, length),
                    (0, 0),
                    "the driver chooses what to access"
                );
                continue;
            }
            assert_eq!(bar, 0);
            assert!(u64::from(offset) + u64::from(length) <= BAR_BYTES);
            ends.push((offset, offset + length, kind));
        }
        ends.sort_unstable();
        assert!(
            ends.windows(2).all(|w| w[0].1 <= w[1].0),
            "overlap: {ends:?}"
        );
        let mut kinds: Vec<u8> = ends.iter().map(|(_, _, kind)| *kind).collect();
        kinds.sort_unstable();
        assert_eq!(kinds, [1, 2, 3, 4]);
        let (_, notify) = chain[4];
        let multiplier = dword(bytes, notify + 16);
        let queues = 2 * 32 + 1;
        assert!(multiplier * (queues - 1) + 2 <= dword(bytes, notify + 12));

        let (_, msix) = chain[2];
        let vectors = (word(bytes, msix + 2) & 0x7ff) + 1;
        assert_eq!((vectors, presentation.spec.msix_vectors), (64, 64));
        assert_eq!(vectors_of(31), 64);
        assert_eq!(vectors_of(1), 4);
        let (table, pba) = (dword(bytes, msix + 4), dword(bytes, msix + 8));
        assert_eq!((table & 7, pba & 7), (2, 2));
        assert!(u32::from(vectors) * 16 <= (pba & !7) - (table & !7));
    }

    #[test]
    fn device_configuration_is_laid_out_as_the_driver_reads_it() {
        let (p, _) = presented("mtu = 9000\nqueue_pairs = 4\nspeed_mbps = 25000");
        let config = &p.windows[0];
        assert_eq!(config.len(), 0x40);
        assert_eq!(config[..6], [2, 0, 0, 0, 0, 10]);
        assert_eq!(
            (word(config, 6), word(config, 8), word(config, 10)),
            (0, 4, 9000)
        );
        assert_eq!((dword(config, 12), config[16]), (25000, 1));
        assert_eq!(
            (config[17], word(config, 18), dword(config, 20)),
            (40, 128, 0x1ff)
        );
        assert!(config[24..].iter().all(|b| *b == 0));
        let (p, _) = presented("");
        assert_eq!(
            (dword(&p.windows[0], 12), p.windows[0][16]),
            (u32::MAX, 0xff)
        );
    }

    #[test]
    fn the_em_hears_what_the_capabilities_say() {
        let (p, _) = presented("queue_size = 1024");
        assert_eq!((p.spec.id, p.spec.name.as_str()), (3, "net0"));
        let FunctionKind::VirtioNet(net) = &p.spec.kind else {
            panic!("{:?}", p.spec);
        };
        assert_eq!((net.queue_size, net.queue_pairs, net.mtu), (1024, 1, 1500));
        assert_eq!(net.layout, LAYOUT);
        let window = p.spec.control[0];
        assert_eq!(
            (window.region, window.offset, window.len),
            (0, 0x2000, 0x1000)
        );
        let sizes: Vec<(u32, u64)> = p.spec.regions.iter().map(|r| (r.index, r.size)).collect();
        assert_eq!(sizes, [(0, 32768), (2, 32768), (7, 4096)]);
    }
}
