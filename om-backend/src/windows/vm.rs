//! Tells the EMs of one VM's RDMA functions which windows there are.

use super::plan::{Plan, Range, Window};
use crate::vault::Vault;
use m2m_fabric::Fabric;
use m2m_fabric::proto::{RdmaRequest, Reply, Request, WindowSpec};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// How long an EM may take. It waits for its peers for less.
const EM_PATIENCE: Duration = Duration::from_millis(900);
/// How long the file of a function that just started may be on its way.
const FILE: Duration = Duration::from_millis(500);

/// One VM.
pub(super) struct Vm {
    name: String,
    plan: Plan,
    vaults: BTreeMap<u32, Vault>,
    /// EMs by RDMA function.
    ems: BTreeMap<u32, Arc<dyn Fabric>>,
}

impl Vm {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            plan: Plan::default(),
            vaults: BTreeMap::new(),
            ems: BTreeMap::new(),
        }
    }

    /// The memory of a function is here now. Returns when the EMs know.
    pub(super) fn placed(&mut self, device: u32, range: Option<Range>, vault: Vault) {
        self.vaults.insert(device, vault);
        if let Some(old) = self.plan.moved(device, range) {
            for function in self.ems.keys() {
                self.take_away(*function, Some(device), old.generation);
            }
        }
        for window in self.plan.settle() {
            log::info!(
                "VM {}: memory of function {} is at {:#x}",
                self.name,
                window.device,
                window.range.start
            );
            for function in self.ems.keys() {
                self.give(*function, &window);
            }
        }
        if self.plan.is_hidden(device) {
            log::warn!(
                "VM {}: the BAR of function {device} lies over another's; RDMA does not reach it",
                self.name
            );
        }
    }

    pub(super) fn up(&mut self, function: u32, fabric: Arc<dyn Fabric>) {
        self.ems.insert(function, fabric);
        for window in self.plan.given() {
            self.give(function, window);
        }
        // What it has of a former OM and this one knows to be elsewhere.
        for device in self.vaults.keys() {
            if !self.plan.is_given(*device) {
                self.take_away(function, Some(*device), 0);
            }
        }
        self.tell(function, RdmaRequest::WindowsGiven { function }, &[]);
    }

    /// Windows that the EMs have of an OM whose place this one took, and that this one does not know, are no more.
    pub(super) fn sweep(&self) {
        for function in self.ems.keys() {
            self.take_away(*function, None, 0);
        }
    }

    pub(super) fn down(&mut self, function: u32) {
        self.ems.remove(&function);
    }

    fn take_away(&self, function: u32, device: Option<u32>, generation: u64) {
        let request = RdmaRequest::WindowGone {
            function,
            device,
            generation,
        };
        self.tell(function, request, &[]);
    }

    fn give(&self, function: u32, window: &Window) {
        let vault = self.vaults.get(&window.device);
        let Some(fd) = vault.and_then(|vault| vault.bar(FILE)) else {
            log::error!("no EM has given the memory of function {}", window.device);
            return;
        };
        let request = RdmaRequest::Window {
            function,
            window: WindowSpec {
                device: window.device,
                generation: window.generation,
                start: window.range.start,
                len: window.range.len,
                offset: 0,
            },
        };
        self.tell(function, request, &[fd.as_fd()]);
    }

    fn tell(&self, function: u32, request: RdmaRequest, fds: &[BorrowedFd<'_>]) {
        let Some(fabric) = self.ems.get(&function).filter(|fabric| fabric.is_up()) else {
            return;
        };
        match fabric.call(Request::Rdma(request), fds, EM_PATIENCE) {
            Ok(Reply::Ok) => {}
            Ok(Reply::Failed(why)) => log::error!("function {function} and a window: {why}"),
            Ok(other) => log::error!("function {function} and a window: it answers {other:?}"),
            // An EM that is gone uses nothing.
            Err(e) => log::warn!("function {function} and a window: {e}"),
        }
    }
}
