//! Lays out a configuration space from a description.

use thiserror::Error;

use super::{CONFIG_SIZE, ConfigSpace, MSIX_ENABLE, MSIX_MASK_ALL};

/// Address space of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit memory.
    Mem32,
    /// 64-bit memory; takes the next BAR's register too.
    Mem64,
    /// I/O ports.
    Io,
}

/// One base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarSpec {
    /// Bytes, a power of two: at least 16 for memory and 4 for I/O.
    pub size: u64,
    /// Address space.
    pub kind: BarKind,
    /// Reads have no side effects.
    pub prefetchable: bool,
}

/// A capability in the first 256 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capability {
    /// PCI Express endpoint with function-level reset (PCIe 4.0 §7.5.3).
    PciExpress,
    /// Power management, D0 and D3hot without a reset between (PM 1.2 §3.2).
    PowerManagement,
    /// MSI-X (PCI 3.0 §6.8.2).
    MsiX {
        /// Vectors, 1 to 2048.
        vectors: u16,
        /// BAR of the table.
        table_bar: u8,
        /// Offset of the table, a multiple of 8.
        table_offset: u32,
        /// BAR of the pending bits.
        pba_bar: u8,
        /// Offset of the pending bits, a multiple of 8.
        pba_offset: u32,
    },
    /// Vendor specific: all bytes after the id and the next pointer, beginning with the length of the whole
    /// capability.
    Vendor(Vec<u8>),
}

/// Why a description has no configuration space.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A BAR's size is not usable.
    #[error(
        "BAR {0} has a size of {1:#x}; it must be a power of two of at least 16 (4 for I/O) that fits its kind"
    )]
    BarSize(usize, u64),
    /// A 64-bit BAR has no room for its upper half.
    #[error("BAR {0} is 64-bit but the next register is taken or missing")]
    BarPair(usize),
    /// Too many capabilities.
    #[error("the capabilities need more than the {0} bytes that follow the header")]
    NoRoom(usize),
    /// An MSI-X capability is out of range.
    #[error(
        "MSI-X with {0} vectors is not possible; 1 to 2048 are, with table offsets in multiples of 8 and BARs below 6"
    )]
    MsiX(u16),
    /// A vendor capability's length byte is wrong.
    #[error("a vendor capability of {0} bytes says it has {1}")]
    VendorLength(usize, u8),
}

/// Describes a function; [`ConfigBuilder::build`] makes its configuration space.
#[derive(Debug, Clone, Default)]
pub struct ConfigBuilder {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision id.
    pub revision: u8,
    /// Class code, 24 bits: base class, subclass, interface.
    pub class: u32,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
    /// BARs by index.
    pub bars: [Option<BarSpec>; 6],
    /// Capabilities in the order of the list.
    pub capabilities: Vec<Capability>,
}

/// All up to the last byte that is not zero: most of the 4096 bytes of a configuration space are, and an OM holds many.
fn without_zeros(bytes: &[u8]) -> Vec<u8> {
    let end = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |last| last + 1);
    bytes.get(..end).unwrap_or_default().to_vec()
}

impl ConfigBuilder {
    /// Lays everything out. INTx is not offered (pin 0), nor an expansion ROM.
    pub fn build(&self) -> Result<ConfigSpace, ConfigError> {
        let mut space = Layout {
            bytes: vec![0; CONFIG_SIZE],
            writable: vec![0; CONFIG_SIZE],
            clears: vec![0; CONFIG_SIZE],
        };
        space.put16(0x00, self.vendor, 0);
        space.put16(0x02, self.device, 0);
        // Command: memory, bus master, parity response, SERR, INTx disable.
        space.put16(0x04, 0, 0x0546);
        // Status: capability list; the error bits are write-one-to-clear.
        space.put16(0x06, 0x0010, 0);
        space.clear16(0x06, 0xf900);
        space.put32(0x08, self.class << 8 | u32::from(self.revision), 0);
        space.put8(0x0c, 0, 0xff);
        self.bars(&mut space)?;
        space.put16(0x2c, self.subsystem_vendor, 0);
        space.put16(0x2e, self.subsystem, 0);
        space.put8(0x3c, 0, 0xff);
        let (msix, pcie) = self.capabilities(&mut space)?;
        Ok(ConfigSpace {
            initial: without_zeros(&space.bytes),
            bytes: space.bytes,
            writable: without_zeros(&space.writable),
            clears: without_zeros(&space.clears),
            msix,
            pcie,
        })
    }

    fn bars(&self, space: &mut Layout) -> Result<(), ConfigError> {
        for (i, bar) in self.bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let (least, most) = match bar.kind {
                BarKind::Io => (4, 1 << 16),
                BarKind::Mem32 => (16, 1 << 31),
                BarKind::Mem64 => (16, 1 << 62),
            };
            if !bar.size.is_power_of_two() || bar.size < least || bar.size > most {
                return Err(ConfigError::BarSize(i, bar.size));
            }
            let at = 0x10 + 4 * i;
            let mask = !(bar.size - 1);
            let flags = match bar.kind {
                BarKind::Io => 1,
                BarKind::Mem32 => 0,
                BarKind::Mem64 => 4,
            } | if bar.prefetchable { 8 } else { 0 };
            space.put32(at, flags, mask as u32);
            if bar.kind == BarKind::Mem64 {
                if !matches!(self.bars.get(i + 1), Some(None)) {
                    return Err(ConfigError::BarPair(i));
                }
                space.put32(at + 4, 0, (mask >> 32) as u32);
            }
        }
        Ok(())
    }

    fn capabilities(
        &self,
        space: &mut Layout,
    ) -> Result<(Option<usize>, Option<usize>), ConfigError> {
        let (mut msix, mut pcie) = (None, None);
        let (mut link, mut at) = (0x34, 0x40);
        for capability in &self.capabilities {
            let len = match capability {
                Capability::PciExpress => 0x3c,
                Capability::PowerManagement => 8,
                Capability::MsiX { .. } => 12,
                Capability::Vendor(bytes) => 2 + bytes.len(),
            };
            if at + len > 0x100 {
                return Err(ConfigError::NoRoom(0xc0));
            }
            space.put8(link, at as u8, 0);
            match capability {
                Capability::PciExpress => {
                    pcie = Some(at);
                    pci_express(space, at);
                }
                Capability::PowerManagement => {
                    space.put8(at, 0x01, 0);
                    space.put16(at + 2, 0x0003, 0);
                    // PMCSR: power state is writable; No_Soft_Reset.
                    space.put16(at + 4, 0x0008, 0x0003);
                }
                &Capability::MsiX {
                    vectors,
                    table_bar,
                    table_offset,
                    pba_bar,
                    pba_offset,
                } => {
                    if !(1..=2048).contains(&vectors)
                        || table_offset % 8 != 0
                        || pba_offset % 8 != 0
                        || table_bar > 5
                        || pba_bar > 5
                    {
                        return Err(ConfigError::MsiX(vectors));
                    }
                    msix = Some(at);
                    space.put8(at, 0x11, 0);
                    space.put16(at + 2, vectors - 1, MSIX_ENABLE | MSIX_MASK_ALL);
                    space.put32(at + 4, table_offset | u32::from(table_bar), 0);
                    space.put32(at + 8, pba_offset | u32::from(pba_bar), 0);
                }
                Capability::Vendor(bytes) => {
                    let said = bytes.first().copied().unwrap_or(0);
                    if usize::from(said) != len {
                        return Err(ConfigError::VendorLength(len, said));
                    }
                    space.put8(at, 0x09, 0);
                    for (i, &byte) in bytes.iter().enumerate() {
                        space.put8(at + 2 + i, byte, 0);
                    }
                }
            }
            link = at + 1;
            at = (at + len).next_multiple_of(4);
        }
        Ok((msix, pcie))
    }
}

fn pci_express(space: &mut Layout, at: usize) {
    space.put8(at, 0x10, 0);
    space.put16(at + 0x02, 0x0002, 0); // version 2, endpoint
    space.put32(at + 0x04, 1 << 28 | 1 << 15, 0); // function-level reset, role-based errors
    space.put16(at + 0x08, 0x2810, 0x7fff); // device control; bit 15 starts the reset and reads as zero
    space.clear16(at + 0x0a, 0x000f);
    space.put32(at + 0x0c, 0x0011, 0); // 2.5 GT/s, one lane
    space.put16(at + 0x10, 0, 0x01c3);
    space.put16(at + 0x12, 0x0011, 0);
    space.put16(at + 0x28, 0, 0x001f);
    space.put16(at + 0x30, 0x0001, 0x000f);
}

struct Layout {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    clears: Vec<u8>,
}

impl Layout {
    fn put8(&mut self, at: usize, value: u8, mask: u8) {
        if let (Some(byte), Some(writable)) = (self.bytes.get_mut(at), self.writable.get_mut(at)) {
            *byte = value;
            *writable = mask;
        }
    }

    fn put16(&mut self, at: usize, value: u16, mask: u16) {
        for (i, (v, m)) in value
            .to_le_bytes()
            .into_iter()
            .zip(mask.to_le_bytes())
            .enumerate()
        {
            self.put8(at + i, v, m);
        }
    }

    fn put32(&mut self, at: usize, value: u32, mask: u32) {
        self.put16(at, value as u16, mask as u16);
        self.put16(at + 2, (value >> 16) as u16, (mask >> 16) as u16);
    }

    fn clear16(&mut self, at: usize, mask: u16) {
        for (i, m) in mask.to_le_bytes().into_iter().enumerate() {
            if let Some(byte) = self.clears.get_mut(at + i) {
                *byte = m;
            }
        }
    }
}
