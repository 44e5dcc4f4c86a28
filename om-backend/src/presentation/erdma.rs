//! The RDMA device that the `erdma` driver recognises.
//!
//! | BAR | what | answered by |
//! |---|---|---|
//! | 0 | registers and doorbells, 64-bit | EM |
//! | 2 | MSI-X table and, from 0x800 on, pending bits, 64-bit | VMM |
//!
//! The driver refuses a function with other memory BARs or an expansion ROM. It has no network interface: the driver
//! takes the one of the virtio network function with the same MAC address.

use super::rdma::{guid, lid};
use super::{Presentation, SUBSYSTEM, memory_bar};
use crate::config::{FunctionConfig, RdmaConfig};
use m2m_fabric::proto::{
    FunctionKind, FunctionSpec, RdmaFace, RdmaLinkLayer, RdmaSpec, RegionSpec,
};
use smartep::CONFIG_REGION;
use smartep::config::{CONFIG_SIZE, Capability, ConfigBuilder};

/// vfio index of the BAR with registers and doorbells.
pub const BAR: u32 = 0;
/// Bytes of [`BAR`].
pub const BAR_BYTES: u64 = 512 << 10;
/// vfio index of the BAR with the MSI-X table, which is at its beginning.
pub const MSIX_BAR: u32 = 2;
/// Bytes of [`MSIX_BAR`].
pub const MSIX_BAR_BYTES: u64 = 4096;
/// Offset of the MSI-X pending bits in [`MSIX_BAR`].
pub const MSIX_PBA: u32 = 0x800;
/// One vector for commands and asynchronous events, the others for completions: as many as the driver takes.
pub const MSIX_VECTORS: u16 = 32;
// A table entry has 16 bytes (PCI Express 6.0 §7.7.2).
const _: () = assert!(16 * MSIX_VECTORS as u32 <= MSIX_PBA);

/// Alibaba (pci.ids).
const VENDOR: u16 = 0x1ded;
/// "Elastic RDMA Adapter".
const DEVICE: u16 = 0x107f;
/// Network controller, other (PCI code and id assignment, §1.3).
const CLASS: u32 = 0x02_80_00;

/// How function `id` looks.
pub fn present(id: u32, function: &FunctionConfig, rdma: &RdmaConfig) -> Presentation {
    let bar = |size| Some(memory_bar(size));
    let config = ConfigBuilder {
        vendor: VENDOR,
        device: DEVICE,
        revision: 0,
        class: CLASS,
        subsystem_vendor: SUBSYSTEM.0,
        subsystem: SUBSYSTEM.1,
        bars: [bar(BAR_BYTES), None, bar(MSIX_BAR_BYTES), None, None, None],
        capabilities: vec![
            Capability::PciExpress,
            Capability::PowerManagement,
            Capability::MsiX {
                vectors: MSIX_VECTORS,
                table_bar: MSIX_BAR as u8,
                table_offset: 0,
                pba_bar: MSIX_BAR as u8,
                pba_offset: MSIX_PBA,
            },
        ],
    };
    let region = |index, size| RegionSpec { index, size };
    Presentation {
        config,
        windows: Vec::new(),
        spec: FunctionSpec {
            id,
            name: function.name.clone(),
            socket: function.socket.to_string_lossy().into_owned(),
            regions: vec![
                region(BAR, BAR_BYTES),
                region(MSIX_BAR, MSIX_BAR_BYTES),
                region(CONFIG_REGION, CONFIG_SIZE as u64),
            ],
            control: Vec::new(),
            msix_vectors: MSIX_VECTORS,
            kind: FunctionKind::Rdma(RdmaSpec {
                face: RdmaFace::Erdma,
                link: RdmaLinkLayer::Ethernet,
                mac: function.mac.0,
                mtu: function.mtu,
                guid: guid(function.mac),
                lid: lid(id, rdma.link_type),
                bar: BAR,
                mapped_doorbells: false,
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

    #[test]
    fn the_driver_finds_its_ids_and_exactly_the_bars_that_it_wants() {
        let text = "[[network]]\nname = \"blue\"\n[[em]]\nname = \"em0\"\n\
                    [[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\nmac = \"02:00:00:00:00:0a\"\n\
                    network = \"blue\"\n\
                    [[em.function]]\nname = \"rdma0\"\nkind = \"erdma\"\nmac = \"02:00:00:00:00:0a\"\n\
                    network = \"blue\"\nmtu = 4096\n";
        let config = Config::parse("test", text).unwrap();
        let presentation = super::super::present(3, &config.ems[0].functions[1]);
        let space = presentation.config.build().unwrap();
        let bytes = space.bytes();
        assert_eq!(bytes[..4], [0xed, 0x1d, 0x7f, 0x10]);
        let bars: Vec<u8> = (0..6).map(|n| bytes[0x10 + 4 * n]).collect();
        assert_eq!(bars, [0xc, 0, 0xc, 0, 0, 0]);
        assert_eq!(bytes[0x30..0x34], [0; 4], "no expansion ROM");
        let spec = presentation.spec;
        let sizes: Vec<_> = spec.regions.iter().map(|r| (r.index, r.size)).collect();
        assert_eq!(sizes, [(0, 0x8_0000), (2, 4096), (7, 4096)]);
        let FunctionKind::Rdma(rdma) = spec.kind else {
            panic!();
        };
        assert_eq!((rdma.face, rdma.mtu), (RdmaFace::Erdma, 4096));
        assert_eq!(rdma.mac, [2, 0, 0, 0, 0, 10]);
    }
}
