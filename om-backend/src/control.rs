//! The control side of one function: config space and device configuration, written by its guest
//! through its EM and by the OM, read by the EM from the shadow.

use crate::northbound::view::PresentationView;
use crate::presentation::Presentation;
use m2m_fabric::proto::{ControlWindow, FunctionSpec};
use rustix::fs::MemfdFlags;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why a function cannot be presented.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The memory of the shadow could not be made.
    #[error("no memory for its shadow: {0}")]
    Shadow(std::io::Error),
}

/// One function's control side.
#[derive(Debug)]
pub struct FunctionControl {
    bytes: Mutex<Vec<(ControlWindow, Vec<u8>)>>,
    link_status: (usize, usize),
}

impl FunctionControl {
    /// As powered on, and the memory of its shadow for the EM.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn new(presentation: Presentation) -> Result<(Self, OwnedFd), ControlError> {
        let shadow = rustix::fs::memfd_create("shadow", MemfdFlags::CLOEXEC)
            .map_err(|e| ControlError::Shadow(e.into()))?;
        let control = Self {
            bytes: Mutex::new(
                presentation
                    .spec
                    .control
                    .iter()
                    .copied()
                    .zip(presentation.windows)
                    .collect(),
            ),
            link_status: presentation.link_status,
        };
        Ok((control, shadow))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(ControlWindow, Vec<u8>)>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the 4 bytes at `offset` of `region`; what is not there reads as all-ones.
    pub fn read(&self, region: u32, offset: u32) -> u32 {
        let mut value = [0xff; 4];
        for (window, bytes) in self.lock().iter() {
            if window.region == region && u64::from(offset) >= window.offset {
                let start = (u64::from(offset) - window.offset) as usize;
                for (to, from) in value.iter_mut().zip(bytes.iter().skip(start)) {
                    *to = *from;
                }
            }
        }
        u32::from_le_bytes(value)
    }

    /// Writes the bytes of `value` that `byte_enable` names; the answer is the new `ConfigState`.
    pub fn write(&self, _region: u32, _offset: u32, _byte_enable: u8, _value: u32) -> u32 {
        0
    }

    /// Back to as powered on, but for the link; the answer is the new `ConfigState`.
    pub fn reset(&self) -> u32 {
        0
    }

    /// Makes the link status `up` or not; `true` if it was otherwise.
    pub fn set_link(&self, up: bool) -> bool {
        let mut windows = self.lock();
        let (window, byte) = self.link_status;
        let status = windows.get_mut(window).and_then(|(_, b)| b.get_mut(byte));
        match status {
            Some(status) => std::mem::replace(status, u8::from(up)) != u8::from(up),
            None => false,
        }
    }

    /// What the guest sees, for people.
    pub fn inspect(&self, spec: &FunctionSpec) -> PresentationView {
        PresentationView {
            regions: spec.regions.iter().map(|r| (r.index, r.size)).collect(),
            msix_vectors: spec.msix_vectors,
            bus_master: false,
            memory: false,
            msix_enabled: false,
            config_header: String::new(),
        }
    }
}
