//! What the OM says about RDMA.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dot_iommu::{DotError, HostMapping};
use m2m_fabric::proto::RdmaRequest;

use super::{Shared, lock};
use crate::endpoint::{Endpoint, Patient};
use crate::rdma::function::RdmaFunction;
use crate::rdma::verbs::Peer;

impl Shared {
    /// The windows of an RDMA function.
    fn windows(&self, id: u32) -> Result<Patient, String> {
        let functions = lock(&self.functions);
        let endpoint = functions.get(&id).map(Endpoint::patient);
        endpoint.ok_or_else(|| format!("there is no function {id}"))
    }

    pub(super) fn rdma(&self, request: RdmaRequest, fds: Vec<OwnedFd>) -> Result<(), String> {
        let done = match request {
            RdmaRequest::Window { function, window } => {
                let [fd] = <[OwnedFd; 1]>::try_from(fds)
                    .map_err(|fds| format!("a window is 1 descriptor, not {}", fds.len()))?;
                return self.windows(function)?.add(window, fd);
            }
            RdmaRequest::WindowGone {
                function,
                device,
                generation,
            } => return self.windows(function)?.remove(device, generation),
            RdmaRequest::PeerMemory { function, file } => {
                let [fd] = <[OwnedFd; 1]>::try_from(fds)
                    .map_err(|fds| format!("memory is 1 descriptor, not {}", fds.len()))?;
                let mapping = map_whole(&fd).map_err(|e| e.to_string())?;
                self.for_peers(function, move |f| {
                    f.wires.add_file(Peer(function), file, mapping.clone())
                })
            }
            RdmaRequest::PeerMemoryGone { function, file } => self.for_peers(function, move |f| {
                f.wires.remove_file(Peer(function), file);
                true
            }),
            RdmaRequest::PeerMemoryKept { function, files } => self.for_peers(function, move |f| {
                f.wires.keep_files(Peer(function), &files);
                true
            }),
            RdmaRequest::Revoke {
                function,
                peer,
                generation,
            } => self.worker.run(move |state| {
                let function = state.rdma.get_mut(&function);
                function.is_some_and(|f| {
                    f.revoke(Peer(peer), generation);
                    true
                })
            }),
            RdmaRequest::WindowsGiven { function } => self.worker.run(move |state| {
                let function = state.rdma.get_mut(&function);
                function.map(RdmaFunction::windowed).is_some()
            }),
            RdmaRequest::SetLink { function, up } => self.worker.run(move |state| {
                let function = state.rdma.get_mut(&function);
                function.is_some_and(|f| {
                    f.with(|device, _| device.set_link(up));
                    true
                })
            }),
            RdmaRequest::Resolve { .. }
            | RdmaRequest::SetGid { .. }
            | RdmaRequest::ShareMemory { .. }
            | RdmaRequest::Holds { .. }
            | RdmaRequest::UnshareMemory { .. } => return Err("an EM answers no such thing".into()),
        };
        match done {
            Some(true) => Ok(()),
            Some(false) => Err("there is no such function, or no room".into()),
            None => Err("the data path has ended".into()),
        }
    }

    /// Tells all RDMA functions but one, which knows what it has itself, until one has no room.
    fn for_peers(
        &self,
        own: u32,
        act: impl Fn(&mut RdmaFunction) -> bool + Send + 'static,
    ) -> Option<bool> {
        self.worker.run(move |state| {
            let mut peers = state.rdma.iter_mut().filter(|(id, _)| **id != own);
            peers.all(|(_, function)| act(function))
        })
    }
}

/// All of a file of guest memory.
fn map_whole(fd: &OwnedFd) -> Result<Arc<HostMapping>, DotError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| DotError::Sys {
        call: "fstat",
        errno,
    })?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    HostMapping::of_file(fd.as_fd(), size)
}
