//! The requests of the protocol (QEMU `docs/interop/vhost-user.rst`), each in terms of [`Face`].

use std::fs::File;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures as Protocol,
};

use super::error::FaceError;
use super::face::Face;
use super::features;
use super::memory::{Region, SLOTS, check_sum};

fn not_offered<T>(what: &'static str) -> Result<T> {
    Err(FaceError::NotOffered(what).into())
}

impl VhostUserBackendReqHandlerMut for Face {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(features::OFFERED)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        Ok(Face::set_features(self, features)?)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        check_sum(regions.iter().map(|region| region.memory_size))?;
        let all = regions.iter().zip(&files);
        let regions: std::result::Result<_, _> = all
            .map(|(region, file)| Region::map(region, file))
            .collect();
        self.set_memory(regions?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.idle_ring(index, "its size")?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        Ok(self.set_addresses(index, descriptor, available, used)?)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.idle_ring(index, "its position")?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.stop_ring(index)?;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        Ok(self.set_kick(index, fd)?)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        Ok(self.set_call(index, fd)?)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        Ok(self.set_error(index, fd)?)
    }

    fn get_protocol_features(&mut self) -> Result<Protocol> {
        Ok(Protocol::MQ
            | Protocol::LOG_SHMFD
            | Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        self.acknowledges = features & Protocol::REPLY_ACK.bits() != 0;
        match features & !offered {
            0 => Ok(()),
            unknown => Err(FaceError::Features(unknown).into()),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.parts.rings()))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        Ok(self.enable(index, enable)?)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let layout = &self.parts.spec.layout;
        let window = layout.device;
        let inside = offset
            .checked_add(size)
            .is_some_and(|end| end <= window.len);
        let mut bytes = vec![0; size as usize];
        let at = u64::from(window.offset) + u64::from(offset);
        if inside && self.parts.shadow.read(layout.bar, at, &mut bytes) {
            return Ok(bytes);
        }
        Err(FaceError::Config {
            offset,
            size: size as usize,
            verb: "read",
        }
        .into())
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // A driver may try it, and has no other device for that.
        self.refused = true;
        Err(FaceError::Config {
            offset,
            size: buf.len(),
            verb: "written",
        }
        .into())
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        not_offered("a GPU")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered("shared objects")
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        not_offered("a log of buffers in flight")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        not_offered("a log of buffers in flight")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        self.memory.check_room(region.memory_size)?;
        self.add_memory(Region::map(region, &fd)?)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        Ok(self.remove_memory(region)?)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        not_offered("a transfer of state")
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered("a transfer of state")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered("shared memory")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        Ok(self.set_log(log.mmap_offset, log.mmap_size, &file)?)
    }
}
