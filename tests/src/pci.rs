//! What a guest's PCI core does with a function: identify, size the BARs, walk the capabilities, switch on.

use crate::client::Vmm;
use crate::wire::{self, CONFIG_REGION};
use crate::{Error, Result};
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Command register: memory decoding.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: bus mastering.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command register: INTx off.
pub const COMMAND_INTX_OFF: u16 = 1 << 10;

/// A base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Bytes, by writing all ones and reading back (PCI 3.0 §6.2.5.1).
    pub size: u64,
    /// Whether it takes two registers.
    pub is_64: bool,
    /// Whether it is in I/O space.
    pub is_io: bool,
    /// Address that the test's PCI core gave it.
    pub address: u64,
}

/// A capability in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// Capability id.
    pub id: u8,
    /// Offset in config space.
    pub offset: u8,
}

/// Where a virtio structure lies (virtio 1.3 §4.1.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// BAR index.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// The virtio structures of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VirtioWindows {
    /// cfg_type 1.
    pub common: Window,
    /// cfg_type 2.
    pub notify: Window,
    /// Multiplier behind the notify capability.
    pub notify_multiplier: u32,
    /// cfg_type 3.
    pub isr: Window,
    /// cfg_type 4.
    pub device: Window,
    /// Offset of the cfg_type 5 capability, 0 when there is none.
    pub pci_access: u8,
}

/// The MSI-X capability (PCIe 6.0 §7.7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Msix {
    /// Offset in config space.
    pub offset: u8,
    /// Entries of the table.
    pub vectors: u16,
    /// BAR of the table.
    pub table_bar: u8,
    /// Offset of the table.
    pub table_offset: u32,
    /// BAR of the pending bits.
    pub pba_bar: u8,
    /// Offset of the pending bits.
    pub pba_offset: u32,
}

/// A function as probed.
#[derive(Debug, Clone)]
pub struct Function {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass, programming interface as 24 bits.
    pub class: u32,
    /// Subsystem vendor and device.
    pub subsystem: (u16, u16),
    /// Interrupt pin, 0 for none.
    pub interrupt_pin: u8,
    /// BARs by index; the upper half of a 64-bit one is `None`.
    pub bars: [Option<Bar>; 6],
    /// All capabilities, in list order.
    pub capabilities: Vec<Capability>,
    /// Virtio structures.
    pub virtio: VirtioWindows,
    /// MSI-X.
    pub msix: Msix,
}

impl Function {
    /// Probes the function, places its BARs and leaves decoding and bus mastering off.
    ///
    /// # Errors
    /// Config space makes no sense, or the access failed.
    pub fn probe(vmm: &mut dyn Vmm) -> Result<Self> {
        let mut header = [0; 64];
        for (index, chunk) in header.chunks_mut(4).enumerate() {
            vmm.read(CONFIG_REGION, index as u64 * 4, chunk)?;
        }
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        if half(0) == 0xffff {
            return Err(Error::Device(
                "no function there: the vendor is ffff".into(),
            ));
        }
        if header[14] & 0x7f != 0 {
            return Err(Error::Device(format!("header type {:#x}", header[14])));
        }
        write16(vmm, 4, 0)?;
        let mut function = Self {
            vendor: half(0),
            device: half(2),
            revision: header[8],
            class: u32::from(half(10)) << 8 | u32::from(header[9]),
            subsystem: (half(0x2c), half(0x2e)),
            interrupt_pin: header[0x3d],
            bars: size_bars(vmm)?,
            capabilities: Vec::new(),
            virtio: VirtioWindows::default(),
            msix: Msix::default(),
        };
        if half(6) & (1 << 4) != 0 {
            function.walk(vmm, header[0x34])?;
        }
        Ok(function)
    }

    /// Switches on memory decoding and bus mastering, INTx off.
    ///
    /// # Errors
    /// The access failed.
    pub fn enable(&self, vmm: &mut dyn Vmm) -> Result<()> {
        write16(vmm, 4, COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF)
    }

    /// Switches bus mastering on or off and leaves the rest.
    ///
    /// # Errors
    /// The access failed.
    pub fn set_bus_master(&self, vmm: &mut dyn Vmm, on: bool) -> Result<()> {
        let command = read16(vmm, 4)?;
        let command = if on {
            command | COMMAND_MASTER
        } else {
            command & !COMMAND_MASTER
        };
        write16(vmm, 4, command)
    }

    /// Sets MSI-X enable and function mask.
    ///
    /// # Errors
    /// The access failed.
    pub fn set_msix(&self, vmm: &mut dyn Vmm, enable: bool, mask: bool) -> Result<()> {
        let at = u64::from(self.msix.offset) + 2;
        write16(vmm, at, u16::from(enable) << 15 | u16::from(mask) << 14)
    }

    /// MSI-X on, with an eventfd for each vector as a VMM sets them; `interrupts` keeps those it has.
    ///
    /// # Errors
    /// The server refused something.
    pub fn connect_msix(&self, vmm: &mut dyn Vmm, interrupts: &mut Vec<OwnedFd>) -> Result<()> {
        while interrupts.len() < usize::from(self.msix.vectors) {
            let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
            interrupts.push(rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?);
        }
        self.set_msix(vmm, true, false)?;
        for (chunk, fds) in interrupts.chunks(16).enumerate() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            vmm.set_irqs(
                wire::IRQ_MSIX,
                wire::IRQ_EVENTFD_TRIGGER,
                chunk as u32 * 16,
                fds.len() as u32,
                &fds,
            )?;
        }
        Ok(())
    }

    /// Offset of the first capability `id`.
    pub fn capability(&self, id: u8) -> Option<u64> {
        self.capabilities
            .iter()
            .find(|c| c.id == id)
            .map(|c| u64::from(c.offset))
    }

    /// Initiates a function level reset (PCIe 6.0 §6.6.2): bit 15 of Device Control.
    ///
    /// # Errors
    /// No PCI Express capability, or the access failed.
    pub fn function_level_reset(&self, vmm: &mut dyn Vmm) -> Result<()> {
        let pcie = self
            .capability(0x10)
            .ok_or_else(|| Error::Device("no PCI Express capability".into()))?;
        let control = read16(vmm, pcie + 8)?;
        write16(vmm, pcie + 8, control | 1 << 15)
    }

    /// Points the PCI configuration access capability at `len` bytes of a structure (virtio 1.3 §4.1.4.9) and
    /// gives the offset of its data in config space.
    fn point(&self, vmm: &mut dyn Vmm, window: Window, offset: u32, len: usize) -> Result<u64> {
        let at = match self.virtio.pci_access {
            0 => return Err(Error::Device("no PCI configuration access".into())),
            at => u64::from(at),
        };
        vmm.write(CONFIG_REGION, at + 4, &[window.bar])?;
        write32(vmm, at + 12, len as u32)?;
        write32(vmm, at + 8, window.offset + offset)?;
        Ok(at + 16)
    }

    /// Reads 1, 2 or 4 bytes of a structure without its BAR.
    ///
    /// # Errors
    /// The function does not offer that, or the access failed.
    pub fn read_through_config(
        &self,
        vmm: &mut dyn Vmm,
        window: Window,
        offset: u32,
        data: &mut [u8],
    ) -> Result<()> {
        let at = self.point(vmm, window, offset, data.len())?;
        vmm.read(CONFIG_REGION, at, data)
    }

    /// Writes 1, 2 or 4 bytes of a structure without its BAR.
    ///
    /// # Errors
    /// The function does not offer that, or the access failed.
    pub fn write_through_config(
        &self,
        vmm: &mut dyn Vmm,
        window: Window,
        offset: u32,
        data: &[u8],
    ) -> Result<()> {
        let at = self.point(vmm, window, offset, data.len())?;
        vmm.write(CONFIG_REGION, at, data)
    }

    fn walk(&mut self, vmm: &mut dyn Vmm, first: u8) -> Result<()> {
        let mut offset = first;
        while offset != 0 {
            if offset < 0x40 || offset & 3 != 0 || self.capabilities.len() > 48 {
                return Err(Error::Device(format!("capability at {offset:#x}")));
            }
            let at = u64::from(offset);
            let [id, next] = read16(vmm, at)?.to_le_bytes();
            self.capabilities.push(Capability { id, offset });
            match id {
                0x09 => self.virtio_capability(vmm, offset)?,
                0x11 => {
                    let table = read32(vmm, at + 4)?;
                    let pba = read32(vmm, at + 8)?;
                    self.msix = Msix {
                        offset,
                        vectors: (read16(vmm, at + 2)? & 0x7ff) + 1,
                        table_bar: (table & 7) as u8,
                        table_offset: table & !7,
                        pba_bar: (pba & 7) as u8,
                        pba_offset: pba & !7,
                    };
                }
                _ => {}
            }
            offset = next;
        }
        Ok(())
    }

    fn virtio_capability(&mut self, vmm: &mut dyn Vmm, offset: u8) -> Result<()> {
        let at = u64::from(offset);
        let head = read32(vmm, at)?.to_le_bytes();
        let [bar, _id, _, _] = read32(vmm, at + 4)?.to_le_bytes();
        let window = Window {
            bar,
            offset: read32(vmm, at + 8)?,
            len: read32(vmm, at + 12)?,
        };
        // virtio 1.3 §4.1.4: a driver takes the first capability of each type it can use.
        let place = match head[3] {
            1 => &mut self.virtio.common,
            2 => &mut self.virtio.notify,
            3 => &mut self.virtio.isr,
            4 => &mut self.virtio.device,
            5 => {
                self.virtio.pci_access = offset;
                return Ok(());
            }
            _ => return Ok(()),
        };
        if place.len == 0 {
            *place = window;
            if head[3] == 2 {
                self.virtio.notify_multiplier = read32(vmm, at + 16)?;
            }
        }
        Ok(())
    }
}

fn size_bars(vmm: &mut dyn Vmm) -> Result<[Option<Bar>; 6]> {
    let mut bars = [None; 6];
    let mut low = 0xe000_0000u64;
    let mut high = 0x80_0000_0000u64;
    let mut index = 0;
    while index < 6 {
        let at = 0x10 + index as u64 * 4;
        let before = read32(vmm, at)?;
        write32(vmm, at, u32::MAX)?;
        let mask = read32(vmm, at)?;
        if mask == 0 {
            index += 1;
            continue;
        }
        let is_io = before & 1 != 0;
        let is_64 = !is_io && before & 6 == 4;
        let mut size_mask = u64::from(mask & if is_io { !3 } else { !15 }) | 0xffff_ffff_0000_0000;
        if is_64 {
            write32(vmm, at + 4, u32::MAX)?;
            size_mask = size_mask & 0xffff_ffff | u64::from(read32(vmm, at + 4)?) << 32;
        }
        let size = (!size_mask).wrapping_add(1);
        if !size.is_power_of_two() {
            return Err(Error::Device(format!("BAR {index} has size {size:#x}")));
        }
        let place = if is_64 { &mut high } else { &mut low };
        let address = place.next_multiple_of(size);
        *place = address + size;
        write32(vmm, at, address as u32)?;
        if is_64 {
            write32(vmm, at + 4, (address >> 32) as u32)?;
        }
        bars[index] = Some(Bar {
            size,
            is_64,
            is_io,
            address,
        });
        index += if is_64 { 2 } else { 1 };
    }
    Ok(bars)
}

/// Reads 16 bits of config space.
///
/// # Errors
/// The access failed.
pub fn read16(vmm: &mut dyn Vmm, offset: u64) -> Result<u16> {
    let mut data = [0; 2];
    vmm.read(CONFIG_REGION, offset, &mut data)?;
    Ok(u16::from_le_bytes(data))
}

/// Reads 32 bits of config space.
///
/// # Errors
/// The access failed.
pub fn read32(vmm: &mut dyn Vmm, offset: u64) -> Result<u32> {
    let mut data = [0; 4];
    vmm.read(CONFIG_REGION, offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

/// Writes 16 bits of config space.
///
/// # Errors
/// The access failed.
pub fn write16(vmm: &mut dyn Vmm, offset: u64, value: u16) -> Result<()> {
    vmm.write(CONFIG_REGION, offset, &value.to_le_bytes())
}

/// Writes 32 bits of config space.
///
/// # Errors
/// The access failed.
pub fn write32(vmm: &mut dyn Vmm, offset: u64, value: u32) -> Result<()> {
    vmm.write(CONFIG_REGION, offset, &value.to_le_bytes())
}
