//! A memory function as its guest has it: the BAR mapped as the VMM maps it, placed and switched by config space.

use crate::client::{Client, Vmm};
use crate::pci::{self, Function};
use crate::wire::CONFIG_REGION;
use crate::{Error, Result};
use std::fs::File;
use std::path::Path;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// The BAR with the memory, and its register in config space.
const BAR: u32 = 2;
const REGISTER: u64 = 0x18;

/// See the module.
pub struct DeviceMemory {
    /// The VMM's half of the connection.
    pub client: Client,
    /// The function as probed.
    pub pci: Function,
    /// Guest address of the BAR.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    map: MmapRegion,
}

impl DeviceMemory {
    /// Connects as QEMU would, maps the BAR, places it and switches memory decode on.
    ///
    /// # Errors
    /// The server refused something, or the function has no such BAR.
    pub fn open(socket: &Path, address: u64) -> Result<Self> {
        let mut client = Client::connect(socket)?;
        let Some((fd, offset)) = client.region_file(BAR)? else {
            return Err(Error::Device("the memory cannot be mapped".into()));
        };
        // As QEMU, which then waits for each write to this device.
        client.posted = false;
        let pci = Function::probe(&mut client)?;
        let len = pci.bars[BAR as usize].map_or(0, |bar| bar.size);
        let place = FileOffset::new(File::from(fd), offset);
        let map = MmapRegion::from_file(place, len as usize)
            .map_err(|e| Error::Harness(format!("the BAR cannot be mapped: {e}")))?;
        let mut memory = Self {
            client,
            pci,
            address,
            len,
            map,
        };
        memory.place(address)?;
        memory.set_decode(true)?;
        Ok(memory)
    }

    /// Writes the BAR's address, upper half first; memory decode stays as it is.
    ///
    /// # Errors
    /// The access failed.
    pub fn place(&mut self, address: u64) -> Result<()> {
        let [low, high] = [address as u32, (address >> 32) as u32];
        pci::write32(&mut self.client, REGISTER + 4, high)?;
        pci::write32(&mut self.client, REGISTER, low)?;
        self.address = address;
        Ok(())
    }

    /// Switches memory decode on or off.
    ///
    /// # Errors
    /// The access failed.
    pub fn set_decode(&mut self, on: bool) -> Result<()> {
        let command = if on { pci::COMMAND_MEMORY } else { 0 };
        pci::write16(&mut self.client, 4, command)
    }

    /// A function level reset; memory decode is off afterwards.
    ///
    /// # Errors
    /// The access failed.
    pub fn reset(&mut self) -> Result<()> {
        self.pci.function_level_reset(&mut self.client)
    }

    /// Copies out, as a guest's CPU does.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the BAR.
    pub fn bytes(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; len];
        let outside = |_| Error::Memory {
            address: offset,
            len,
        };
        let slice = self.map.as_volatile_slice();
        slice
            .read_slice(&mut data, offset as usize)
            .map_err(outside)?;
        Ok(data)
    }

    /// Copies in, as a guest's CPU does.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the BAR.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let outside = |_| Error::Memory {
            address: offset,
            len: data.len(),
        };
        let slice = self.map.as_volatile_slice();
        slice.write_slice(data, offset as usize).map_err(outside)
    }

    /// Reads 8 bytes through the server, as a VMM does that has not mapped the BAR.
    ///
    /// # Errors
    /// The access failed.
    pub fn trapped_read(&mut self, offset: u64) -> Result<u64> {
        let mut data = [0; 8];
        self.client.read(BAR, offset, &mut data)?;
        Ok(u64::from_le_bytes(data))
    }

    /// The command register.
    ///
    /// # Errors
    /// The access failed.
    pub fn command(&mut self) -> Result<u16> {
        let mut data = [0; 2];
        self.client.read(CONFIG_REGION, 4, &mut data)?;
        Ok(u16::from_le_bytes(data))
    }
}
