//! An erdma driver for tests: enough of Linux's `erdma` and of the user-space provider to move data and to see
//! errors, and on demand hostile.
//!
//! All offsets are written out here a second time (Linux 7.3 `drivers/infiniband/hw/erdma/erdma_hw.h`), so that a
//! wrong one in the device is seen. It does what the driver does in the order in which that does it; above all it
//! sleeps until an interrupt comes where the driver sleeps.

mod commands;
mod objects;
mod queues;

use crate::client::{Client, Vmm};
use crate::mapped::MappedRegion;
use crate::memory::GuestMemory;
use crate::pci::Function;
use crate::time::{SOON, wait_for};
use crate::virtio_net::Guest;
use crate::{Error, Result};
use commands::Commands;
pub use commands::{Reply, Request, command};
pub use objects::{Buffer, CqPlan, Pages, Path, QpPlan, modify, rights, state};
pub use queues::{Cq, Cqe, Qp, Send, syndrome};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Registers of BAR0.
pub mod regs {
    #![allow(missing_docs)] // the names are the driver's
    pub const VERSION: u64 = 0;
    pub const PROTOCOL: u64 = 0xc;
    pub const CONTROL: u64 = 0x10;
    pub const STATUS: u64 = 0x14;
    pub const MAC_LOW: u64 = 0x18;
    pub const MAC_HIGH: u64 = 0x1c;
    pub const CMD_SQ: u64 = 0x20;
    pub const CMD_CQ: u64 = 0x28;
    pub const CMD_DEPTH: u64 = 0x30;
    pub const CMD_EQ_DEPTH: u64 = 0x34;
    pub const CMD_EQ: u64 = 0x38;
    pub const AEQ: u64 = 0x40;
    pub const AEQ_DEPTH: u64 = 0x48;
    pub const AEQ_DOORBELL: u64 = 0x50;
    pub const CMD_SQ_RECORD: u64 = 0x60;
    pub const CMD_CQ_RECORD: u64 = 0x68;
    pub const CMD_EQ_RECORD: u64 = 0x70;
    pub const AEQ_RECORD: u64 = 0x78;
    pub const EQ_DOORBELLS: u64 = 0x100;
    pub const CMD_SQ_DOORBELL: u64 = 0x200;
    pub const CMD_CQ_DOORBELL: u64 = 0x300;
}

/// Doorbell pages that the kernel's queues share.
const KERNEL_PAGES: DoorbellPages = DoorbellPages {
    sq: 0x5f000,
    rq: 0x61000,
    cq: 0x79000,
};
/// Entries of the event queues that are no command's.
const EQ_DEPTH: u32 = 4096;
/// Completion event queues, which is one for each processor of a guest with two.
const CEQS: u8 = 2;
/// Capability flags.
const CAP_EXTEND_DB: u64 = 1 << 3;
const CAP_MTT_VA: u64 = 1 << 5;

/// The owner bit that a new entry has at a free-running index.
fn ring_owner(index: u32, depth: u32) -> u32 {
    u32::from(index & depth == 0)
}

/// Offsets in BAR0 of a context's doorbell pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoorbellPages {
    /// Send queues.
    pub sq: u64,
    /// Receive queues.
    pub rq: u64,
    /// Completion queues.
    pub cq: u64,
}

/// An event queue other than the commands'.
#[derive(Debug, Clone, Copy, Default)]
struct EventQueue {
    at: u64,
    record: u64,
    index: u32,
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// 0 QP fatal, 1 receive queue, 2 access, 3 CQ, 4 other.
    pub kind: u8,
    /// Queue pair or completion queue.
    pub number: u32,
}

/// What QUERY_DEVICE says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// The first word.
    pub first: u64,
    /// The second word.
    pub second: u64,
}

impl Capabilities {
    /// Key of all memory by its address.
    pub fn dma_key(self) -> u32 {
        (self.second >> 32) as u32
    }

    /// Flags.
    pub fn flags(self) -> u64 {
        self.first >> 24 & 0xff
    }

    /// Queue pairs.
    pub fn max_qp(self) -> u32 {
        1024 * (self.second >> 16 & 0xfff) as u32
    }

    /// Whether the tables of regions may have levels.
    pub fn has_levels(self) -> bool {
        self.flags() & CAP_MTT_VA != 0
    }
}

/// The driver and its device.
pub struct Erdma {
    /// The VMM's half of the connection.
    pub vmm: Box<dyn Vmm>,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The function as probed.
    pub pci: Function,
    /// What QUERY_DEVICE said at the last start.
    pub capabilities: Capabilities,
    /// MAC address by the registers.
    pub mac: [u8; 6],
    /// Doorbell pages of the one user context.
    pub user_pages: DoorbellPages,
    interrupts: Vec<OwnedFd>,
    commands: Commands,
    aeq: EventQueue,
    async_events: Vec<AsyncEvent>,
    ceqs: Vec<EventQueue>,
    next_qpn: u32,
    next_cqn: u32,
    next_region: u32,
    mapped: Option<MappedRegion>,
}

impl Erdma {
    /// Connects as QEMU would, maps the memory, probes and switches the function on.
    ///
    /// # Errors
    /// The server refused something, or the function is not one that the driver takes.
    pub fn open(socket: &std::path::Path, guest: Guest) -> Result<Self> {
        let mut client = Client::connect(socket)?;
        client.posted = guest.posted;
        let memory = Arc::new(GuestMemory::new(guest.memory, guest.shape)?);
        let mut vmm: Box<dyn Vmm> = Box::new(client);
        vmm.map_all(&memory)?;
        let mapped = vmm.map_region(0)?;
        let pci = Function::probe(vmm.as_mut())?;
        if (pci.vendor, pci.device) != (0x1ded, 0x107f) {
            let (vendor, device) = (pci.vendor, pci.device);
            return Err(Error::Device(format!("{vendor:04x}:{device:04x}")));
        }
        // The driver takes no other set of memory BARs.
        let bars: Vec<usize> = (0..6).filter(|&n| pci.bars[n].is_some()).collect();
        if bars != [0, 2] {
            return Err(Error::Device(format!("it has the BARs {bars:?}")));
        }
        let mut driver = Self {
            vmm,
            memory,
            pci,
            capabilities: Capabilities::default(),
            mac: [0; 6],
            user_pages: KERNEL_PAGES,
            interrupts: Vec::new(),
            commands: Commands::default(),
            aeq: EventQueue::default(),
            async_events: Vec::new(),
            ceqs: Vec::new(),
            next_qpn: 2,
            next_cqn: 1,
            next_region: 1,
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

    /// From the registers to a device with doorbell pages for a user, as the driver's probe and an application's
    /// opening of the device do it. Also after a reset.
    ///
    /// # Errors
    /// The device failed a command, or says something that a driver would not accept.
    pub fn start(&mut self) -> Result<()> {
        self.start_commands()?;
        for vector in 1..=CEQS {
            self.create_ceq(vector)?;
        }
        self.arm_commands()?;
        let [first, second] = self.command(&Request::new(command::QUERY_DEVICE))?;
        self.capabilities = Capabilities { first, second };
        self.command(&Request::new(command::QUERY_FW_INFO))?;
        let extended = self.capabilities.flags() & CAP_EXTEND_DB != 0;
        if extended {
            self.command(&Request::new(command::CONF_DEVICE).word(8, 1 << 31 | 12))?;
        }
        self.mac = self.read_mac()?;
        self.statistics()?;
        if extended {
            self.user_pages = self.allocate_doorbells()?;
        }
        Ok(())
    }

    /// Hands the command queue and the queue of asynchronous events over, and waits until the device has them.
    ///
    /// # Errors
    /// The device is none for the driver, or does not come up.
    pub fn start_commands(&mut self) -> Result<()> {
        if self.read32(regs::VERSION)? == 0 {
            return Err(Error::Device("its version is 0".into()));
        }
        if self.read32(regs::PROTOCOL)? != 1 {
            return Err(Error::Device("it speaks no RoCE v2".into()));
        }
        let records = self.memory.allocate(64, 64)?;
        let blocks = u64::from(commands::DEPTH) * 32;
        self.commands = Commands {
            sq: self.memory.allocate(blocks, 4096)?,
            cq: self.memory.allocate(blocks, 4096)?,
            eq: self
                .memory
                .allocate(u64::from(commands::EQ_DEPTH) * 16, 4096)?,
            records,
            ..Commands::default()
        };
        self.aeq = self.event_queue(records + 24)?;
        self.async_events.clear();
        self.ceqs.clear();
        self.write_address(regs::AEQ, self.aeq.at)?;
        self.write32(regs::AEQ_DEPTH, EQ_DEPTH)?;
        self.write64(regs::AEQ_RECORD, self.aeq.record)?;
        self.write_address(regs::CMD_SQ, self.commands.sq)?;
        self.write32(regs::CMD_DEPTH, commands::DEPTH.into())?;
        self.write64(regs::CMD_SQ_RECORD, records)?;
        self.write_address(regs::CMD_CQ, self.commands.cq)?;
        self.write64(regs::CMD_CQ_RECORD, records + 8)?;
        self.write_address(regs::CMD_EQ, self.commands.eq)?;
        self.write32(regs::CMD_EQ_DEPTH, commands::EQ_DEPTH.into())?;
        self.write64(regs::CMD_EQ_RECORD, records + 16)?;
        self.write32(regs::CONTROL, 2)?;
        wait_for("the device to be initialized", SOON, || {
            match self.read32(regs::STATUS) {
                Ok(status) if status & 2 == 0 => None,
                other => Some(other),
            }
        })??;
        Ok(())
    }

    /// DEV_CTRL reset: the device forgets everything.
    ///
    /// # Errors
    /// The access failed.
    pub fn reset(&mut self) -> Result<()> {
        self.write32(regs::CONTROL, 1)
    }

    fn event_queue(&self, record: u64) -> Result<EventQueue> {
        Ok(EventQueue {
            at: self.memory.allocate(u64::from(EQ_DEPTH) * 16, 4096)?,
            record,
            index: 0,
        })
    }

    /// CREATE_EQ for the completions of a vector, which is its number too.
    fn create_ceq(&mut self, vector: u8) -> Result<()> {
        let record = self.memory.allocate(64, 64)?;
        let queue = self.event_queue(record)?;
        let request = Request::new(command::CREATE_EQ)
            .long(8, queue.at)
            .bytes(16, &[vector, vector, EQ_DEPTH.ilog2() as u8, 1])
            .long(20, record);
        self.command(&request)?;
        self.ceqs.push(queue);
        Ok(())
    }

    /// The MAC address by the registers.
    ///
    /// # Errors
    /// The access failed.
    pub fn read_mac(&mut self) -> Result<[u8; 6]> {
        let [a, b, c, d] = self.read32(regs::MAC_LOW)?.to_be_bytes();
        let [_, _, high, low] = self.read32(regs::MAC_HIGH)?.to_be_bytes();
        Ok([high, low, a, b, c, d])
    }

    /// GET_STATS: the eleven counters.
    ///
    /// # Errors
    /// The command failed, or what it wrote has no magic number.
    pub fn statistics(&mut self) -> Result<[u64; 11]> {
        let at = self.memory.allocate(256, 256)?;
        let request = Request::new(command::GET_STATS).long(16, at).word(24, 256);
        self.command(&request)?;
        let bytes = self.memory.bytes(at, 256)?;
        if bytes[..2] != 0x5566u16.to_le_bytes() {
            return Err(Error::Device("statistics without their magic".into()));
        }
        let mut counters = [0; 11];
        for (counter, chunk) in counters.iter_mut().zip(bytes[16..].chunks_exact(8)) {
            *counter = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
        }
        Ok(counters)
    }

    /// ALLOC_DB: doorbell pages of a user context. The fields of the response are called after the other queue.
    ///
    /// # Errors
    /// The command failed, or gave pages outside of their parts of the BAR.
    pub fn allocate_doorbells(&mut self) -> Result<DoorbellPages> {
        let [words, _] = self.command(&Request::new(command::ALLOC_DB).word(8, 7))?;
        let page = |shift: u32| (words >> shift & 0xffff) * 4096;
        let pages = DoorbellPages {
            sq: page(0),
            rq: page(32),
            cq: page(48),
        };
        let parts = (
            (0x1000..0x61000).contains(&pages.sq),
            (0x61000..0x79000).contains(&pages.rq),
            (0x79000..0x80000).contains(&pages.cq),
        );
        match parts {
            (true, true, true) => Ok(pages),
            _ => Err(Error::Device(format!("doorbell pages {pages:x?}"))),
        }
    }

    /// Reads a register.
    ///
    /// # Errors
    /// The access failed.
    pub fn read32(&mut self, offset: u64) -> Result<u32> {
        let mut word = [0; 4];
        self.vmm.read(0, offset, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Writes a register.
    ///
    /// # Errors
    /// The access failed.
    pub fn write32(&mut self, offset: u64, value: u32) -> Result<()> {
        self.vmm.write(0, offset, &value.to_le_bytes())
    }

    /// Writes a register of 64 bits at once.
    ///
    /// # Errors
    /// The access failed.
    pub fn write64(&mut self, offset: u64, value: u64) -> Result<()> {
        self.vmm.write(0, offset, &value.to_le_bytes())
    }

    /// Writes an address to a pair of registers, the upper half first.
    fn write_address(&mut self, low: u64, address: u64) -> Result<()> {
        self.write32(low + 4, (address >> 32) as u32)?;
        self.write32(low, address as u32)
    }

    /// Whether doorbells are stores to memory instead of messages.
    pub fn has_mapped_doorbells(&self) -> bool {
        self.mapped.is_some()
    }

    /// Stores a doorbell's value in its record, then rings it.
    fn publish(&mut self, record: u64, doorbell: u64, value: u64) -> Result<()> {
        self.memory.write(record, &value.to_le_bytes())?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        self.ring_at(doorbell, value)
    }

    /// Writes a doorbell.
    ///
    /// # Errors
    /// The access failed.
    pub fn ring_at(&mut self, doorbell: u64, value: u64) -> Result<()> {
        match &self.mapped {
            Some(mapped) if mapped.store(doorbell, &value.to_le_bytes()) => Ok(()),
            _ => self.write64(doorbell, value),
        }
    }

    /// Whether the vector was signalled since the last question.
    pub fn interrupted(&self, vector: u16) -> bool {
        let mut count = [0; 8];
        self.interrupts
            .get(usize::from(vector))
            .is_some_and(|fd| rustix::io::read(fd, &mut count).is_ok())
    }

    /// The queue of this completion event queue's next event, as its interrupt handler takes it; arms it again when
    /// there is none.
    ///
    /// # Errors
    /// The access failed.
    pub fn completion_event(&mut self, eqn: u8) -> Result<Option<u32>> {
        let place = usize::from(eqn).wrapping_sub(1);
        let queue = self.ceqs.get_mut(place);
        let queue = queue.ok_or_else(|| Error::Harness(format!("no event queue {eqn}")))?;
        if let Some(entry) = queue.next(&self.memory)? {
            return Ok(Some(entry[0] & 0xf_ffff));
        }
        let queue = *queue;
        self.publish(
            queue.record,
            regs::EQ_DOORBELLS + u64::from(eqn) * 8,
            queue.arm(),
        )?;
        Ok(None)
    }

    /// Takes what is in the queue of asynchronous events, and arms it again.
    fn take_async_events(&mut self) -> Result<()> {
        while let Some([first, number]) = self.aeq.next(&self.memory)? {
            let kind = (first >> 16) as u8;
            self.async_events.push(AsyncEvent { kind, number });
        }
        self.publish(self.aeq.record, regs::AEQ_DOORBELL, self.aeq.arm())
    }

    /// Waits for the next asynchronous event.
    ///
    /// # Errors
    /// None came within seconds, by interrupt.
    pub fn async_event(&mut self) -> Result<AsyncEvent> {
        wait_for("an asynchronous event", SOON, || {
            if let Err(e) = self.serve_interrupt() {
                return Some(Err(e));
            }
            (!self.async_events.is_empty()).then(|| Ok(self.async_events.remove(0)))
        })?
    }

    /// Asynchronous events that came and were not asked for.
    ///
    /// # Errors
    /// The access failed.
    pub fn unexpected_async_events(&mut self) -> Result<Vec<AsyncEvent>> {
        self.take_async_events()?;
        Ok(std::mem::take(&mut self.async_events))
    }
}

impl EventQueue {
    /// The first two words of the next entry.
    fn next(&mut self, memory: &GuestMemory) -> Result<Option<[u32; 2]>> {
        let at = self.at + u64::from(self.index % EQ_DEPTH) * 16;
        let first = memory.load_u32(at)?;
        if first >> 31 != ring_owner(self.index, EQ_DEPTH) {
            return Ok(None);
        }
        self.index += 1;
        Ok(Some([first, memory.load_u32(at + 4)?]))
    }

    /// The doorbell that asks for an interrupt at the next event.
    fn arm(&self) -> u64 {
        1 << 31 | u64::from(self.index as u16)
    }
}
