//! The RDMA device: a function that the drivers of the ConnectX family recognise.
//!
//! | BAR | offset | what | answered by |
//! |---|---|---|---|
//! | 0 | 0x0000 | initialization segment | EM |
//! | 0 | 0x2000 | MSI-X table | VMM |
//! | 0 | 0x3000 | MSI-X pending bits | VMM |
//! | 0 | 0x8000 | doorbell pages (UARs), 4 KiB each | EM |
//!
//! Only config space belongs to the OM: the drivers find everything else by commands, which the EM
//! answers.

use super::{Presentation, SUBSYSTEM, memory_bar};
use crate::config::{FunctionConfig, LinkType, MacAddress, RdmaConfig};
use m2m_fabric::proto::{
    FunctionKind, FunctionSpec, RdmaFace, RdmaLinkLayer, RdmaSpec, RegionSpec,
};
use smartep::CONFIG_REGION;
use smartep::config::{CONFIG_SIZE, Capability, ConfigBuilder};

/// vfio index of the only BAR.
pub const BAR: u32 = 0;
/// Bytes of [`BAR`].
pub const BAR_BYTES: u64 = 16 << 20;
/// Offset of the MSI-X table in [`BAR`], behind the initialization segment's 8 KiB.
pub const MSIX_TABLE: u32 = 0x2000;
/// Offset of the MSI-X pending bits in [`BAR`].
pub const MSIX_PBA: u32 = 0x3000;
/// One vector for commands and asynchronous events, the others for completions.
pub const MSIX_VECTORS: u16 = 32;
// A table entry has 16 bytes (PCI Express 6.0 §7.7.2).
const _: () = assert!(MSIX_VECTORS <= 64 && MSIX_TABLE + 16 * MSIX_VECTORS as u32 <= MSIX_PBA);

/// Mellanox.
const VENDOR: u16 = 0x15b3;
/// "ConnectX Family mlx5Gen Virtual Function" (pci.ids): every driver of the family takes it.
const DEVICE: u16 = 0x101e;
/// Network controller, InfiniBand and Ethernet (PCI code and id assignment, §1.3).
const CLASS_INFINIBAND: u32 = 0x02_07_00;
const CLASS_ETHERNET: u32 = 0x02_00_00;

/// GUID of a MAC address: its EUI-64, `ff:fe` in the middle.
pub fn guid(mac: MacAddress) -> u64 {
    let [a, b, c, d, e, f] = mac.0;
    u64::from_be_bytes([a, b, c, 0xff, 0xfe, d, e, f])
}

/// LID of function `id`; 0 on Ethernet, which has none.
pub fn lid(id: u32, link_type: LinkType) -> u16 {
    match link_type {
        LinkType::Ethernet => 0,
        // ids are below 256, so that every LID is a unicast one
        LinkType::Infiniband => u16::try_from(id + 1).unwrap_or(0),
    }
}

/// How function `id` looks.
pub fn present(id: u32, function: &FunctionConfig, rdma: &RdmaConfig) -> Presentation {
    let (class, link) = match rdma.link_type {
        LinkType::Ethernet => (CLASS_ETHERNET, RdmaLinkLayer::Ethernet),
        LinkType::Infiniband => (CLASS_INFINIBAND, RdmaLinkLayer::Infiniband),
    };
    let config = ConfigBuilder {
        vendor: VENDOR,
        device: DEVICE,
        revision: 0,
        class,
        subsystem_vendor: SUBSYSTEM.0,
        subsystem: SUBSYSTEM.1,
        bars: [Some(memory_bar(BAR_BYTES)), None, None, None, None, None],
        capabilities: vec![
            Capability::PciExpress,
            Capability::PowerManagement,
            Capability::MsiX {
                vectors: MSIX_VECTORS,
                table_bar: BAR as u8,
                table_offset: MSIX_TABLE,
                pba_bar: BAR as u8,
                pba_offset: MSIX_PBA,
            },
        ],
    };
    Presentation {
        config,
        windows: Vec::new(),
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
                    index: CONFIG_REGION,
                    size: CONFIG_SIZE as u64,
                },
            ],
            control: Vec::new(),
            msix_vectors: MSIX_VECTORS,
            kind: FunctionKind::Rdma(RdmaSpec {
                face: RdmaFace::Mlx5,
                link,
                mac: function.mac.0,
                mtu: function.mtu,
                guid: guid(function.mac),
                lid: lid(id, rdma.link_type),
                bar: BAR,
                mapped_doorbells: rdma.mapped_doorbells,
                link_up: function.link_up,
                windows: false,
            }),
        },
        link_status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn presented(lines: &str) -> (FunctionSpec, Vec<u8>) {
        let text = format!(
            "[[network]]\nname = \"blue\"\n[[em]]\nname = \"em0\"\n[[em.function]]\n\
             name = \"rdma0\"\nkind = \"rdma\"\nmac = \"02:00:00:00:00:0a\"\nnetwork = \"blue\"\n\
             {lines}\n"
        );
        let config = Config::parse("test", &text).unwrap();
        let presentation = super::super::present(3, &config.ems[0].functions[0]);
        let space = presentation.config.build().unwrap();
        (presentation.spec, space.bytes().to_vec())
    }

    fn word(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }

    fn dword(bytes: &[u8], at: usize) -> u32 {
        u32::from(word(bytes, at)) | u32::from(word(bytes, at + 2)) << 16
    }

    #[test]
    fn a_driver_recognises_the_device_by_its_ids_and_the_class_tells_the_link_type() {
        let (_, bytes) = presented("link_type = \"infiniband\"");
        assert_eq!((word(&bytes, 0), word(&bytes, 2)), (0x15b3, 0x101e));
        assert_eq!(dword(&bytes, 8), 0x0207_0000, "class and revision");
        assert_eq!((word(&bytes, 0x2c), word(&bytes, 0x2e)), (0x1af4, 0x1100));
        assert_eq!(bytes[0x3d], 0, "no INTx pin");
        assert_eq!(bytes[0x10] & 0xf, 0xc, "64-bit prefetchable memory");
        let (_, bytes) = presented("");
        assert_eq!(dword(&bytes, 8), 0x0200_0000);
    }

    #[test]
    fn table_and_pending_bits_of_msi_x_lie_where_real_parts_have_them() {
        let (spec, bytes) = presented("");
        let mut at = usize::from(bytes[0x34]);
        let mut ids = Vec::new();
        let mut msix = 0;
        while at != 0 {
            ids.push(bytes[at]);
            if bytes[at] == 0x11 {
                msix = at;
            }
            at = usize::from(bytes[at + 1]);
        }
        assert_eq!(ids, [0x10, 0x01, 0x11]);
        assert_eq!((word(&bytes, msix + 2) & 0x7ff) + 1, spec.msix_vectors);
        assert_eq!(dword(&bytes, msix + 4), 0x2000, "BAR 0");
        assert_eq!(dword(&bytes, msix + 8), 0x3000, "BAR 0");
    }

    #[test]
    fn the_em_hears_addresses_and_that_all_of_the_bar_is_its_own() {
        let lines =
            "mtu = 4096\nmapped_doorbells = false\nlink = \"down\"\nlink_type = \"infiniband\"";
        let (spec, _) = presented(lines);
        assert!(spec.control.is_empty());
        let sizes: Vec<(u32, u64)> = spec.regions.iter().map(|r| (r.index, r.size)).collect();
        assert_eq!(sizes, [(0, 16 << 20), (7, 4096)]);
        let rdma = RdmaSpec {
            face: RdmaFace::Mlx5,
            link: RdmaLinkLayer::Infiniband,
            mac: [2, 0, 0, 0, 0, 10],
            mtu: 4096,
            guid: 0x0200_00ff_fe00_000a,
            lid: 4,
            bar: 0,
            mapped_doorbells: false,
            link_up: false,
            windows: false,
        };
        assert_eq!(spec.kind, FunctionKind::Rdma(rdma.clone()));
        let (spec, _) = presented("link_type = \"ethernet\"");
        assert_eq!(
            spec.kind,
            FunctionKind::Rdma(RdmaSpec {
                link: RdmaLinkLayer::Ethernet,
                mtu: 1500,
                lid: 0,
                mapped_doorbells: true,
                link_up: true,
                ..rdma
            })
        );
    }
}
