//! The guest's memory: a memfd mapped here and given to the device by DMA_MAP, in one of several shapes.

use crate::{Error, Result};
use rustix::fs::MemfdFlags;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Size of a guest page.
pub const PAGE: u64 = 4096;

/// How guest-physical memory lies in the memfd and in how many maps the device gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One range from guest address 0.
    Whole,
    /// Like a PC: below and above a hole, with file offsets that do not grow with the addresses, in
    /// ranges of a quarter each; neighbours in guest addresses are not neighbours in the file.
    Split,
    /// One map per 4 KiB page, as behind a vIOMMU; the pages lie in the file in reverse order.
    Pages,
    /// One range without a descriptor: the device can only ask the VMM (DMA_READ, DMA_WRITE).
    NoFd,
}

/// One range that DMA_MAP tells the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the memfd.
    pub offset: u64,
    /// Whether the descriptor goes along.
    pub with_fd: bool,
}

/// Guest memory, shared with the device.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    map: MmapRegion,
    ranges: BTreeMap<u64, Range>,
    next: Mutex<u64>,
    first: u64,
    end: u64,
}

impl GuestMemory {
    /// Memory of `len` bytes (rounded up to 4 pages) in `shape`, all zero.
    ///
    /// # Errors
    /// The memfd cannot be made.
    pub fn new(len: u64, shape: Shape) -> Result<Self> {
        let len = len.next_multiple_of(4 * PAGE);
        let fd = rustix::fs::memfd_create("guest memory", MemfdFlags::CLOEXEC)
            .map_err(std::io::Error::from)?;
        let file = File::from(fd);
        file.set_len(len)?;
        let map = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), len as usize)
            .map_err(|e| Error::Harness(format!("guest memory cannot be mapped: {e}")))?;
        let quarter = len / 4;
        let range = |address, len, offset, with_fd| Range {
            address,
            len,
            offset,
            with_fd,
        };
        let ranges: Vec<Range> = match shape {
            Shape::Whole => vec![range(0, len, 0, true)],
            Shape::NoFd => vec![range(0, len, 0, false)],
            Shape::Split => [(0, 2), (1, 0), (2, 3), (3, 1)]
                .into_iter()
                .map(|(place, in_file)| {
                    range(
                        0x1_0000_0000 + place * quarter,
                        quarter,
                        in_file * quarter,
                        true,
                    )
                })
                .collect(),
            Shape::Pages => (0..len / PAGE)
                .map(|page| {
                    range(
                        0x4000_0000 + page * PAGE,
                        PAGE,
                        len - (page + 1) * PAGE,
                        true,
                    )
                })
                .collect(),
        };
        let first = ranges[0].address;
        // Page 0 of a guest is no place for a ring: an address of 0 means "not set".
        let next = Mutex::new(first + PAGE);
        Ok(Self {
            file,
            map,
            ranges: ranges.into_iter().map(|r| (r.address, r)).collect(),
            next,
            first,
            end: first + len,
        })
    }

    /// The ranges to map, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = &Range> {
        self.ranges.values()
    }

    /// The memfd.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// First guest address.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// First guest address behind the memory.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Takes `len` bytes at a multiple of `align` (a power of two), zeroed.
    ///
    /// # Errors
    /// The memory is used up.
    pub fn allocate(&self, len: u64, align: u64) -> Result<u64> {
        let mut next = self
            .next
            .lock()
            .map_err(|_| Error::Harness("poisoned".into()))?;
        let address = next.next_multiple_of(align);
        if address + len > self.end {
            return Err(Error::Harness(format!(
                "the guest's {} bytes of memory are used up",
                self.end - self.first
            )));
        }
        *next = address + len;
        drop(next);
        self.write(address, &vec![0; len as usize])?;
        Ok(address)
    }

    /// Gives back everything that [`Self::allocate`] took.
    pub fn free_all(&self) {
        if let Ok(mut next) = self.next.lock() {
            *next = self.first + PAGE;
        }
    }

    /// Copies guest memory out.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let (offset, len) = self.piece(address + done as u64, data.len() - done)?;
            self.map
                .as_volatile_slice()
                .read_slice(&mut data[done..done + len], offset)
                .map_err(|_| Error::Memory { address, len })?;
            done += len;
        }
        Ok(())
    }

    /// Copies into guest memory.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let (offset, len) = self.piece(address + done as u64, data.len() - done)?;
            self.map
                .as_volatile_slice()
                .write_slice(&data[done..done + len], offset)
                .map_err(|_| Error::Memory { address, len })?;
            done += len;
        }
        Ok(())
    }

    /// Copies `len` bytes out.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn bytes(&self, address: u64, len: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; len];
        self.read(address, &mut data)?;
        Ok(data)
    }

    /// Loads a little-endian 16-bit word with acquire order: what follows is read after it.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn load_u16(&self, address: u64) -> Result<u16> {
        let (offset, _) = self.piece(address, 2)?;
        let word = self
            .map
            .get_atomic_ref::<AtomicU16>(offset)
            .map_err(|_| Error::Memory { address, len: 2 })?;
        Ok(u16::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores a little-endian 16-bit word with release order: what came before is seen before it.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn store_u16(&self, address: u64, value: u16) -> Result<()> {
        let (offset, _) = self.piece(address, 2)?;
        self.map
            .get_atomic_ref::<AtomicU16>(offset)
            .map_err(|_| Error::Memory { address, len: 2 })?
            .store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Loads a little-endian 32-bit word.
    ///
    /// # Errors
    /// [`Error::Memory`] outside of the ranges.
    pub fn load_u32(&self, address: u64) -> Result<u32> {
        let (offset, _) = self.piece(address, 4)?;
        let word = self
            .map
            .get_atomic_ref::<AtomicU32>(offset)
            .map_err(|_| Error::Memory { address, len: 4 })?;
        Ok(u32::from_le(word.load(Ordering::Acquire)))
    }

    /// Offset in the file and bytes until the end of the range, at most `len`.
    fn piece(&self, address: u64, len: usize) -> Result<(usize, usize)> {
        let outside = Error::Memory { address, len };
        // The usual memory is one range: benchmarks are not to measure the search.
        let range = match self.ranges.len() {
            1 => self.ranges.get(&self.first),
            _ => self.ranges.range(..=address).next_back().map(|(_, r)| r),
        };
        let Some(range) = range.filter(|range| range.address <= address) else {
            return Err(outside);
        };
        let within = address - range.address;
        if within >= range.len {
            return Err(outside);
        }
        let len = len.min((range.len - within) as usize);
        Ok(((range.offset + within) as usize, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_keeps_what_is_written_across_its_ranges() {
        for shape in [Shape::Whole, Shape::Split, Shape::Pages, Shape::NoFd] {
            let memory = GuestMemory::new(1 << 20, shape).unwrap();
            let data: Vec<u8> = (0..700_000u32).map(|n| (n * 7) as u8).collect();
            let address = memory.allocate(data.len() as u64, 64).unwrap();
            memory.write(address + 3, &data[3..]).unwrap();
            assert_eq!(
                memory.bytes(address + 3, data.len() - 3).unwrap(),
                data[3..],
                "{shape:?}"
            );
        }
    }

    #[test]
    fn an_access_outside_the_ranges_is_an_error() {
        let memory = GuestMemory::new(1 << 16, Shape::Split).unwrap();
        assert!(memory.write(memory.end() - 1, &[0, 0]).is_err());
        assert!(memory.load_u16(memory.first() - 2).is_err());
        assert!(memory.allocate(1 << 16, 1).is_err());
    }
}
