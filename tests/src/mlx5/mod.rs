//! An mlx5 driver for tests: enough of `mlx5_core`, `mlx5_ib` and the user-space provider to move data and to
//! see errors, and on demand hostile.
//!
//! All offsets are written out here a second time (ConnectX programmer's reference manual, `mlx5_ifc.h`), so
//! that a wrong one in the device is seen.

mod command;
mod objects;
mod queues;
mod srq;

use crate::client::{Client, Vmm};
use crate::mapped::MappedRegion;
use crate::memory::GuestMemory;
use crate::pci::Function;
use crate::virtio_net::Guest;
use crate::{Error, Result};
pub use command::opcode;
pub use objects::{Buffer, QpPlan, Service};
pub use queues::{Cq, Cqe, Qp, Send};
pub use srq::Srq;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Offset of the command doorbell.
const COMMAND_DOORBELL: u64 = 0x18;

/// The driver and its device.
pub struct Mlx5 {
    /// The VMM's half of the connection.
    pub vmm: Box<dyn Vmm>,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The function as probed.
    pub pci: Function,
    interrupts: Vec<OwnedFd>,
    /// Guest address of the command queue, and of mailboxes for input and output.
    commands: u64,
    input: u64,
    output: u64,
    /// Of the last command.
    token: u8,
    /// Where the queue for command events is, and how many came: see [`Self::expect_command_events`].
    command_events: Option<(u64, u64)>,
    /// Doorbell page.
    pub uar: u32,
    /// Event queue of completions.
    pub eqn: u8,
    /// LID of the port.
    pub lid: u16,
    eq: u64,
    eq_index: u32,
    /// Doorbell pages, when the server lets the VMM map them.
    mapped: Option<MappedRegion>,
}

/// Bytes of mailboxes for input: page lists of a little more than 1 GiB.
const MAILBOXES: u64 = (4 << 20) + (64 << 10);
/// log₂ of the entries of the completion event queue.
const LOG_EQ: u8 = 11;

impl Mlx5 {
    /// Connects as QEMU would, maps the memory, probes and switches the function on.
    ///
    /// # Errors
    /// The server refused something, or the function is not of this family.
    pub fn open(socket: &Path, guest: Guest) -> Result<Self> {
        let mut client = Client::connect(socket)?;
        client.posted = guest.posted;
        let memory = Arc::new(GuestMemory::new(guest.memory, guest.shape)?);
        let mut vmm: Box<dyn Vmm> = Box::new(client);
        vmm.map_all(&memory)?;
        let mapped = vmm.map_region(0)?;
        let pci = Function::probe(vmm.as_mut())?;
        if (pci.vendor, pci.device) != (0x15b3, 0x101e) {
            return Err(Error::Device(format!(
                "{:04x}:{:04x} is not an RDMA function",
                pci.vendor, pci.device
            )));
        }
        let mut driver = Self {
            commands: memory.allocate(4096, 4096)?,
            input: memory.allocate(MAILBOXES, 4096)?,
            output: memory.allocate(64 << 10, 4096)?,
            token: 0,
            command_events: None,
            vmm,
            memory,
            pci,
            interrupts: Vec::new(),
            uar: 0,
            eqn: 0,
            lid: 0,
            eq: 0,
            eq_index: 0,
            mapped,
        };
        driver.switch_on()?;
        Ok(driver)
    }

    /// Decoding, bus mastering and MSI-X on, an eventfd for each vector.
    ///
    /// # Errors
    /// The server refused something.
    pub fn switch_on(&mut self) -> Result<()> {
        self.pci.enable(self.vmm.as_mut())?;
        self.pci
            .connect_msix(self.vmm.as_mut(), &mut self.interrupts)
    }

    /// From the hand-over of the command queue to a port that is active, as `mlx5_core` and `mlx5_ib` do.
    ///
    /// # Errors
    /// The device failed a command, or says something that a driver would not accept.
    pub fn start(&mut self) -> Result<()> {
        self.start_commands()?;
        self.command(opcode::ENABLE_HCA, 0, &[], 16)?;
        self.command(opcode::SET_ISSI, 0, &[0, 0, 0, 1, 0, 0, 0, 0], 16)?;
        let pages = self.command(opcode::QUERY_PAGES, 1, &[], 16)?;
        if pages[12..16] != [0; 4] {
            return Err(Error::Device("it wants pages".into()));
        }
        let caps = self.command(opcode::QUERY_HCA_CAP, 1, &[], 16 + 4096)?;
        self.command(opcode::SET_HCA_CAP, 0, &caps[8..], 16)?;
        self.command(opcode::QUERY_PAGES, 2, &[], 16)?;
        self.command(opcode::INIT_HCA, 0, &[], 16)?;
        self.uar = self.allocate(opcode::ALLOC_UAR)?;
        self.eq = self.memory.allocate(64 << LOG_EQ, 4096)?;
        for entry in 0..1u64 << LOG_EQ {
            self.memory.write(self.eq + entry * 64 + 63, &[1])?;
        }
        self.eqn = self.create_eq(self.eq, LOG_EQ, 1, 0)?;
        self.arm_eq()?;
        let port = self.command(
            opcode::QUERY_HCA_VPORT_CONTEXT,
            0,
            &[0, 0, 0, 0, 1, 0, 0, 0],
            0x110,
        );
        if let Ok(context) = port {
            self.lid = u16::from_be_bytes([context[0x10 + 0x60], context[0x10 + 0x61]]);
        }
        Ok(())
    }

    /// Hands the command queue over.
    ///
    /// # Errors
    /// The device speaks another revision, or the access failed.
    pub fn start_commands(&mut self) -> Result<()> {
        if self.read32(4)? >> 16 != 5 {
            return Err(Error::Device("command interface revision is not 5".into()));
        }
        self.write32(0x10, (self.commands >> 32) as u32)?;
        let low = self.read32(0x14)? & 0xff;
        if low != 5 << 4 | 6 {
            return Err(Error::Device(format!("command queue shape {low:#x}")));
        }
        self.write32(0x14, self.commands as u32 & !0xfff)?;
        match self.read32(0x1fc)? >> 31 {
            0 => Ok(()),
            _ => Err(Error::Device("it stays initializing".into())),
        }
    }

    /// Reads a big-endian word of BAR0.
    ///
    /// # Errors
    /// The access failed.
    pub fn read32(&mut self, offset: u64) -> Result<u32> {
        let mut word = [0; 4];
        self.vmm.read(0, offset, &mut word)?;
        Ok(u32::from_be_bytes(word))
    }

    /// Writes a big-endian word of BAR0.
    ///
    /// # Errors
    /// The access failed.
    pub fn write32(&mut self, offset: u64, value: u32) -> Result<()> {
        self.vmm.write(0, offset, &value.to_be_bytes())
    }

    /// Whether doorbells are stores to memory instead of messages.
    pub fn has_mapped_doorbells(&self) -> bool {
        self.mapped.is_some()
    }

    /// Rings in the doorbell page.
    fn doorbell(&mut self, place: u64, data: &[u8]) -> Result<()> {
        let at = u64::from(self.uar) * 4096 + place;
        match &self.mapped {
            Some(mapped) if mapped.store(at, data) => Ok(()),
            _ => self.vmm.write(0, at, data),
        }
    }

    /// Whether the vector was signalled since the last question.
    pub fn interrupted(&self, vector: u16) -> bool {
        let mut count = [0; 8];
        self.interrupts
            .get(usize::from(vector))
            .is_some_and(|fd| rustix::io::read(fd, &mut count).is_ok())
    }

    /// The next event of the completion event queue: type and the number that it is about.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn event(&mut self) -> Result<Option<(u8, u32)>> {
        let size = 1u32 << LOG_EQ;
        let at = self.eq + u64::from(self.eq_index % size) * 64;
        let entry = self.memory.bytes(at, 64)?;
        if u32::from(entry[63] & 1) != self.eq_index >> LOG_EQ & 1 {
            return Ok(None);
        }
        self.eq_index += 1;
        let number = u32::from_be_bytes([0, entry[57], entry[58], entry[59]]);
        Ok(Some((entry[1], number)))
    }

    /// Tells the device how far events were read, and asks for an interrupt at the next one.
    ///
    /// # Errors
    /// The access failed.
    pub fn arm_eq(&mut self) -> Result<()> {
        let word = u32::from(self.eqn) << 24 | self.eq_index & 0xff_ffff;
        self.doorbell(0x40, &word.to_be_bytes())
    }
}
