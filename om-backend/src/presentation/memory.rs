//! The memory device: a BAR with memory of its own, as a GPU has one, and nothing else.
//!
//! | BAR | what | answered by |
//! |---|---|---|
//! | 2 | the memory, 64-bit and prefetchable | the VMM, which maps it; else the EM |
//!
//! It has no registers, does no DMA and raises no interrupts.

use super::{Presentation, SUBSYSTEM, memory_bar};
use crate::config::{FunctionConfig, MemoryConfig};
use m2m_fabric::proto::{FunctionKind, FunctionSpec, MemorySpec, RegionSpec};
use smartep::CONFIG_REGION;
use smartep::config::{CONFIG_SIZE, Capability, ConfigBuilder};

/// vfio index of the BAR with the memory.
pub const BAR: u32 = 2;
/// The vendor id that QEMU's own devices without an assigned one use (`pci-ids.rst`), and a device id that no
/// driver takes: the guest leaves the function to `vfio-pci`.
const VENDOR: u16 = 0x1234;
const DEVICE: u16 = 0x6dba;
/// Processing accelerator (PCI code and id assignment, §1.19).
const CLASS: u32 = 0x12_00_00;

/// How function `id` looks.
pub fn present(id: u32, function: &FunctionConfig, memory: &MemoryConfig) -> Presentation {
    let config = ConfigBuilder {
        vendor: VENDOR,
        device: DEVICE,
        revision: 0,
        class: CLASS,
        subsystem_vendor: SUBSYSTEM.0,
        subsystem: SUBSYSTEM.1,
        bars: [None, None, Some(memory_bar(memory.bytes)), None, None, None],
        capabilities: vec![Capability::PciExpress, Capability::PowerManagement],
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
                    size: memory.bytes,
                },
                RegionSpec {
                    index: CONFIG_REGION,
                    size: CONFIG_SIZE as u64,
                },
            ],
            control: Vec::new(),
            msix_vectors: 0,
            kind: FunctionKind::Memory(MemorySpec {
                bar: BAR,
                bytes: memory.bytes,
            }),
        },
        link_status: None,
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn the_guest_sees_an_accelerator_with_a_large_bar() {
        let text = "[[em]]\nname = \"em0\"\n[[em.function]]\nname = \"gpu0\"\nkind = \"memory\"\n\
                    vm = \"vm0\"\nsize_mib = 8192\n";
        let config = Config::parse("test", text).unwrap();
        let presentation = super::super::present(3, &config.ems[0].functions[0]);
        let mut space = presentation.config.build().unwrap();
        let bytes = space.bytes().to_vec();
        assert_eq!(bytes[..4], [0x34, 0x12, 0xba, 0x6d]);
        assert_eq!(bytes[9..12], [0, 0, 0x12], "class");
        assert_eq!(bytes[0x10..0x18], [0; 8], "no other BAR");
        assert_eq!(bytes[0x18] & 0xf, 0xc, "64-bit prefetchable memory");
        assert_eq!(bytes[0x3d], 0, "no INTx pin");
        space.write(0x18, &[0xff; 8]);
        let mut size = [0; 8];
        space.read(0x18, &mut size);
        assert_eq!(u64::from_le_bytes(size) & !0xf, !((8 << 30) - 1));
        let spec = presentation.spec;
        assert_eq!(spec.regions[0].size, 8 << 30);
        assert_eq!((spec.msix_vectors, spec.control.len()), (0, 0));
    }
}
