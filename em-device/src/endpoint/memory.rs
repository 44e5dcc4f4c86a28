//! The data side of a memory function: a BAR that is one file.
//!
//! The VMM maps the file, and so do the EMs of the guest's RDMA functions through windows that the OM gives them
//! (`super::windows`); here are only accesses that the VMM does not do by itself. A reset leaves the memory as it is. A
//! client that leaves takes its content along: the next one finds zeroes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use dot_iommu::{Access, DotError, HostMapping};
use m2m_fabric::proto::{FunctionState, MemorySpec};
use rustix::fs::FallocateFlags;
use smartep::DataSide;
use smartep::config::ConfigState;
use smartep::dma::MessageDma;
use smartep::function::RegionMmap;

use super::{FunctionData, lock, report};
use crate::control::OmLink;

/// See the module.
#[derive(Debug)]
pub(super) struct MemoryData {
    id: u32,
    bar: u32,
    om: Arc<OmLink>,
    file: OwnedFd,
    memory: Arc<HostMapping>,
    state: Mutex<FunctionState>,
}

impl MemoryData {
    /// A function whose BAR is `file`, and what the VMM is told of it.
    pub(super) fn new(
        id: u32,
        om: Arc<OmLink>,
        spec: &MemorySpec,
        file: OwnedFd,
    ) -> Result<(Self, RegionMmap), super::EndpointError> {
        let memory = HostMapping::of_file(file.as_fd(), spec.bytes)?;
        let mmap = RegionMmap {
            fd: file.try_clone()?,
            offset: 0,
            areas: Vec::new(),
        };
        let data = Self {
            id,
            bar: spec.bar,
            om,
            file,
            memory,
            state: Mutex::new(FunctionState::Waiting),
        };
        Ok((data, mmap))
    }

    fn set_state(&self, state: FunctionState) {
        if std::mem::replace(&mut *lock(&self.state), state) != state {
            report(&self.om, self.id, state);
        }
    }

    /// Gives the pages back; the file reads as zeroes.
    fn clear(&self) -> Result<(), DotError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(&self.file, flags, 0, self.memory.len());
        punched.map_err(|errno| DotError::Sys {
            call: "fallocate",
            errno,
        })
    }
}

impl DataSide for MemoryData {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let len = data.len() as u64;
        let span = self.memory.span(offset, len, Access::Read);
        if let Some(span) = span.filter(|_| region == self.bar) {
            // Translated for reading.
            let _ = span.copy_to(data);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let span = self.memory.span(offset, data.len() as u64, Access::Write);
        if let Some(span) = span.filter(|_| region == self.bar) {
            // Translated for writing.
            let _ = span.copy_from(data);
        }
    }

    fn config_changed(&self, _old: ConfigState, new: ConfigState) {
        // Without a client it is taken back to the state after power-on.
        if self.is_connected() {
            self.set_state(match new.memory {
                true => FunctionState::Running,
                false => FunctionState::Connected,
            });
        }
    }

    fn reset(&self) {}

    fn connected(&self, _dma: Arc<MessageDma>) {
        self.set_state(FunctionState::Connected);
    }

    fn disconnected(&self) {
        // First no other function of the guest reaches the memory any more.
        self.om.reset_function(self.id);
        if let Err(error) = self.clear() {
            log::error!(
                "function {}: its memory keeps its content: {error}",
                self.id
            );
        }
        self.set_state(FunctionState::Waiting);
    }
}

impl FunctionData for MemoryData {
    fn shadow_changed(&self) {}

    fn is_connected(&self) -> bool {
        *lock(&self.state) != FunctionState::Waiting
    }

    fn state(&self) -> FunctionState {
        *lock(&self.state)
    }

    fn leave(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 20;

    fn data() -> MemoryData {
        let spec = MemorySpec {
            bar: 2,
            bytes: BYTES,
        };
        let file = HostMapping::memfd(BYTES).unwrap();
        let (data, mmap) = MemoryData::new(3, Arc::default(), &spec, file).unwrap();
        assert!(mmap.areas.is_empty() && mmap.offset == 0, "all of it");
        data
    }

    fn word(data: &MemoryData, region: u32, offset: u64) -> u64 {
        let mut bytes = [0xee; 8];
        data.read(region, offset, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn accesses_that_the_vmm_does_not_do_itself_reach_the_memory() {
        let data = data();
        data.write(2, BYTES - 8, &7u64.to_le_bytes());
        assert_eq!(word(&data, 2, BYTES - 8), 7);
        data.write(2, BYTES - 4, &[9; 8]);
        data.write(0, 0, &[9; 8]);
        assert_eq!((word(&data, 2, 0), word(&data, 0, 0)), (0, 0));
        assert_eq!(word(&data, 2, BYTES - 8), 7, "nothing of what does not fit");
    }

    #[test]
    fn a_reset_keeps_the_memory_and_the_next_client_finds_none_of_it() {
        let data = data();
        data.write(2, 0, &7u64.to_le_bytes());
        data.reset();
        assert_eq!(word(&data, 2, 0), 7);
        data.disconnected();
        assert_eq!(word(&data, 2, 0), 0);
    }

    #[test]
    fn its_state_follows_memory_decode() {
        let data = data();
        let config = |memory| ConfigState {
            memory,
            ..ConfigState::default()
        };
        assert!(!data.is_connected());
        data.set_state(FunctionState::Connected);
        data.config_changed(config(false), config(true));
        assert_eq!(data.state(), FunctionState::Running);
        data.config_changed(config(true), config(false));
        assert_eq!(data.state(), FunctionState::Connected);
        data.disconnected();
        data.config_changed(config(true), config(false));
        assert!(!data.is_connected());
    }
}
