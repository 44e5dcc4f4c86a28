//! Cloud Hypervisor's own vfio-user client as a [`Vmm`]: what it cannot work with, Cloud Hypervisor cannot.

use crate::client::Vmm;
use crate::memory::{GuestMemory, Range};
use crate::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

/// The client of the published `vfio_user` crate.
pub struct CloudHypervisor {
    client: vfio_user::Client,
}

impl CloudHypervisor {
    /// Connects, agrees on the version and reads the regions.
    ///
    /// # Errors
    /// That client's.
    pub fn connect(path: &Path) -> Result<Self> {
        let client = vfio_user::Client::new(path).map_err(failed)?;
        Ok(Self { client })
    }

    /// Vectors of an interrupt index.
    ///
    /// # Errors
    /// That client's.
    pub fn irq_count(&mut self, index: u32) -> Result<u32> {
        Ok(self.client.get_irq_info(index).map_err(failed)?.count)
    }
}

fn failed(error: vfio_user::Error) -> Error {
    Error::Protocol(format!("Cloud Hypervisor's client: {error}"))
}

impl Vmm for CloudHypervisor {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.client
            .region_read(region, offset, data)
            .map_err(failed)
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.client
            .region_write(region, offset, data)
            .map_err(failed)
    }

    fn map(&mut self, memory: &Arc<GuestMemory>, range: &Range) -> Result<()> {
        self.client
            .dma_map(
                range.offset,
                range.address,
                range.len,
                memory.fd().as_raw_fd(),
            )
            .map_err(failed)
    }

    fn unmap(&mut self, address: u64, len: u64) -> Result<()> {
        self.client.dma_unmap(address, len).map_err(failed)
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let fds: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        self.client
            .set_irqs(index, flags, start, count, &fds)
            .map_err(failed)
    }

    fn reset(&mut self) -> Result<()> {
        self.client.reset().map_err(failed)
    }

    fn region_size(&mut self, region: u32) -> Result<u64> {
        Ok(self.client.region(region).map_or(0, |r| r.size))
    }

    fn serve(&mut self) -> Result<()> {
        Ok(())
    }

    fn inject(&mut self, _message: &[u8]) -> Result<()> {
        Err(Error::Harness(
            "Cloud Hypervisor's client sends only its own messages".into(),
        ))
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
