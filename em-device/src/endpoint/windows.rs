//! Memory of other devices of the guest: what the OM says of it, and the table that the data path reads.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dot_iommu::{Backing, DotError, DotReader, DotTable, HostMapping, Perm};
use m2m_fabric::proto::WindowSpec;
use thiserror::Error;

/// Why a window is refused.
#[derive(Debug, Error)]
pub(super) enum WindowError {
    /// It is older than one that was taken away.
    #[error("window {generation} of function {device} is gone already")]
    Gone {
        /// The function with the memory.
        device: u32,
        /// Number of the window.
        generation: u64,
    },
    /// The range or the file makes no sense.
    #[error(transparent)]
    Range(#[from] DotError),
    /// The file cannot be looked at.
    #[error("the file of function {0} cannot be used: {1}")]
    File(u32, std::io::Error),
}

/// The memory of a device. It stays mapped while its windows come and go.
#[derive(Debug)]
struct Memory {
    /// Device number and inode of the file.
    identity: (u64, u64),
    mapping: Arc<HostMapping>,
    fd: OwnedFd,
    /// Whether the peers have the file.
    shared: bool,
}

#[derive(Debug, Default)]
struct Device {
    memory: Option<Memory>,
    window: Option<WindowSpec>,
    /// Up to which generation windows are gone.
    gone: u64,
}

/// All windows of one RDMA function.
#[derive(Debug, Default)]
pub(super) struct Windows {
    table: DotTable,
    /// By the id of the function with the memory.
    devices: BTreeMap<u32, Device>,
}

impl Windows {
    /// For the data path.
    pub(super) fn reader(&self) -> DotReader {
        self.table.reader()
    }

    /// Adds a window, in place of an older one of the device. Answers with the number of a file that this one
    /// takes the place of.
    pub(super) fn add(
        &mut self,
        spec: WindowSpec,
        fd: OwnedFd,
    ) -> Result<Option<u64>, WindowError> {
        let device = self.devices.entry(spec.device).or_default();
        if spec.generation <= device.gone {
            return Err(WindowError::Gone {
                device: spec.device,
                generation: spec.generation,
            });
        }
        let failed = |errno: rustix::io::Errno| WindowError::File(spec.device, errno.into());
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        let identity = (stat.st_dev, stat.st_ino);
        let mut former = None;
        if device
            .memory
            .as_ref()
            .is_none_or(|m| m.identity != identity)
        {
            former = device.memory.take().map(|memory| memory.mapping.id());
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            device.memory = Some(Memory {
                identity,
                mapping: HostMapping::of_file(fd.as_fd(), size)?,
                fd,
                shared: false,
            });
        }
        if let Some(old) = &mut device.window {
            let same = WindowSpec {
                generation: spec.generation,
                ..*old
            };
            // What another OM says again is not interrupted.
            if same == spec && former.is_none() {
                old.generation = spec.generation;
                return Ok(None);
            }
            let old = *old;
            device.window = None;
            self.table.unmap(old.start, old.len)?;
        }
        if let Some(memory) = &device.memory {
            let backing = Backing::Mapped {
                mapping: memory.mapping.clone(),
                offset: spec.offset,
            };
            self.table.map(spec.start, spec.len, Perm::RW, backing)?;
            device.window = Some(spec);
        }
        Ok(former)
    }

    /// Removes the window of a device if it is of this generation or older, without a device all such. Returns when
    /// the data path does not use them any more. Answers whether there were any.
    pub(super) fn remove(
        &mut self,
        device: Option<u32>,
        generation: u64,
    ) -> Result<bool, WindowError> {
        if let Some(id) = device {
            // It may not have come yet.
            self.devices.entry(id).or_default();
        }
        let mut any = false;
        for (id, known) in &mut self.devices {
            if device.is_some_and(|device| device != *id) {
                continue;
            }
            known.gone = known.gone.max(generation);
            if let Some(old) = known.window.take_if(|w| w.generation <= generation) {
                self.table.unmap(old.start, old.len)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Another OM says from now on what there is, and counts anew.
    pub(super) fn new_om(&mut self) {
        for device in self.devices.values_mut() {
            device.gone = 0;
            if let Some(window) = &mut device.window {
                window.generation = 0;
            }
        }
    }

    /// What the peers have not got yet; they have it from now on.
    pub(super) fn take_unshared(&mut self) -> Vec<(Arc<HostMapping>, OwnedFd)> {
        let all = self.devices.values_mut().filter(|d| d.window.is_some());
        let unshared = all.filter_map(|d| d.memory.as_mut()).filter(|m| !m.shared);
        unshared
            .filter_map(|memory| {
                let copy = memory.fd.try_clone().ok()?;
                memory.shared = true;
                Some((memory.mapping.clone(), copy))
            })
            .collect()
    }

    /// The peers have nothing any more.
    pub(super) fn forget_shared(&mut self) {
        let all = self.devices.values_mut().filter_map(|d| d.memory.as_mut());
        all.for_each(|memory| memory.shared = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dot_iommu::Access;

    const BYTES: u64 = 1 << 20;

    fn window(device: u32, generation: u64, start: u64) -> WindowSpec {
        WindowSpec {
            device,
            generation,
            start,
            len: BYTES,
            offset: 0,
        }
    }

    fn memory() -> OwnedFd {
        HostMapping::memfd(BYTES).unwrap()
    }

    fn copy(fd: &OwnedFd) -> OwnedFd {
        fd.try_clone().unwrap()
    }

    fn reaches(windows: &Windows, address: u64) -> bool {
        let reader = windows.reader();
        let view = reader.pin();
        view.translate(address, 8, Access::Write).is_ok()
    }

    #[test]
    fn a_window_that_moves_is_where_it_was_last() {
        let mut windows = Windows::default();
        let fd = memory();
        windows.add(window(7, 1, 0x1000_0000), copy(&fd)).unwrap();
        windows.add(window(7, 2, 0x2000_0000), copy(&fd)).unwrap();
        assert!(!reaches(&windows, 0x1000_0000) && reaches(&windows, 0x2000_0000));
        assert_eq!(windows.take_unshared().len(), 1, "one file");
        assert!(windows.take_unshared().is_empty());
    }

    #[test]
    fn a_window_that_comes_behind_its_revocation_is_refused() {
        let mut windows = Windows::default();
        assert!(!windows.remove(Some(7), 3).unwrap());
        let late = windows.add(window(7, 3, 0x1000_0000), memory());
        assert!(matches!(late, Err(WindowError::Gone { .. })));
        windows.add(window(7, 4, 0x1000_0000), memory()).unwrap();
        assert!(!windows.remove(Some(7), 3).unwrap(), "an older one");
        assert!(windows.remove(Some(7), 4).unwrap());
        assert!(!reaches(&windows, 0x1000_0000));
    }

    #[test]
    fn windows_that_overlap_or_exceed_their_file_are_refused() {
        let mut windows = Windows::default();
        windows.add(window(7, 1, 0x1000_0000), memory()).unwrap();
        let beside = windows.add(window(8, 1, 0x1000_0000 + BYTES - 1), memory());
        assert!(matches!(beside, Err(WindowError::Range(_))));
        let mut long = window(9, 1, 0x2000_0000);
        long.len = 2 * BYTES;
        assert!(matches!(
            windows.add(long, memory()),
            Err(WindowError::Range(_))
        ));
        assert!(reaches(&windows, 0x1000_0000) && !reaches(&windows, 0x2000_0000));
    }

    #[test]
    fn windows_that_another_om_knows_too_are_not_interrupted_and_the_others_go() {
        let mut windows = Windows::default();
        let fd = memory();
        windows.add(window(7, 90, 0x1000_0000), copy(&fd)).unwrap();
        windows.add(window(8, 91, 0x2000_0000), memory()).unwrap();
        windows.new_om();
        let version = windows.reader().pin().version();
        windows.add(window(7, 1, 0x1000_0000), fd).unwrap();
        assert_eq!(windows.reader().pin().version(), version);
        assert!(windows.remove(None, 0).unwrap());
        assert!(reaches(&windows, 0x1000_0000) && !reaches(&windows, 0x2000_0000));
        assert!(windows.remove(Some(7), 1).unwrap());
        assert!(!reaches(&windows, 0x1000_0000));
    }
}
