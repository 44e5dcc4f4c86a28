//! The virtio network function as virtqueues for a vhost-user front end: QEMU, Cloud Hypervisor, DPDK's virtio-user.
//!
//! The protocol is the `vhost` crate's; memory, rings and worker are the same as behind vfio-user.
//!
//! * [`serve`]: the function's thread: connections, requests, notifications;
//! * [`requests`]: the requests, in terms of
//! * [`face`]: what a front end said, and how it becomes the data path's;
//! * [`early`]: one request that has to be done otherwise;
//! * [`memory`], [`ring`], [`features`], [`descriptors`]: parts of that;
//! * [`kicks`]: what the thread waits for.
//!
//! The front end shows the device to its driver. So configuration space, control queue and interrupts' vectors are its
//! own; the function lets all frames in, and pairs are in use when their rings are enabled.

mod descriptors;
mod early;
mod error;
mod face;
mod features;
mod kicks;
mod memory;
mod requests;
mod ring;
mod serve;

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use dot_iommu::DotTable;
use m2m_fabric::proto::{Face as FaceSpec, FunctionState, VirtioNetSpec};
use smartep::irq::Irqs;
use smartep::server::StopFd;
use smartep::shadow::ShadowReader;

use super::net::link_is_up;
use super::{EndpointError, FunctionData, Seat, lock, report};
use crate::net::config::ConfigOverride;
use crate::net::device::{NetDevice, queue_count};
use crate::net::links::Links;
use crate::virtio::signals::Signals;
use crate::worker::Function;
use face::Parts;
use serve::Source;

/// What the thread and the rest of the EM share.
#[derive(Debug, Default)]
struct Shared {
    /// The front end's connection.
    stream: Mutex<Option<UnixStream>>,
    /// Whether some ring runs.
    running: Mutex<bool>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct VhostUser {
    parts: Arc<Parts>,
    shared: Arc<Shared>,
}

impl VhostUser {
    /// Puts the function on the data path.
    pub(super) fn new(
        seat: Seat,
        spec: VirtioNetSpec,
        table: Arc<DotTable>,
        shadow: Arc<ShadowReader>,
    ) -> Result<Self, EndpointError> {
        let id = seat.id;
        let irqs = Irqs::new(Parts::vectors(spec.queue_pairs));
        let signals = Arc::new(Signals::new(irqs.clone(), queue_count(&spec)));
        let om = seat.om.clone();
        let mut device = NetDevice::new(
            id,
            spec.clone(),
            signals.clone(),
            table.reader(),
            Arc::new(ConfigOverride::default()),
            Arc::new(move |state| report(&om, id, state)),
        );
        // There is no command register in between.
        device.set_bus_master(true);
        device.set_link_up(link_is_up(&shadow, &spec.layout));
        let function = Function {
            device,
            links: Links::default(),
        };
        seat.worker
            .run(move |state| state.functions.insert(id, function))
            .ok_or(EndpointError::Worker)?;
        let parts = Parts {
            seat,
            spec,
            table,
            irqs,
            signals,
            shadow,
            told: Mutex::default(),
        };
        Ok(Self {
            parts: Arc::new(parts),
            shared: Arc::default(),
        })
    }

    /// Serves front ends until `stop`.
    pub(super) fn serve(
        &self,
        name: &str,
        listener: OwnedFd,
        stop: StopFd,
    ) -> std::io::Result<JoinHandle<()>> {
        let source = match &self.parts.spec.face {
            FaceSpec::VhostUserClient { path } => Source::FrontEnd(path.clone()),
            FaceSpec::VfioUser | FaceSpec::VhostUser => {
                Source::Listener(UnixListener::from(listener))
            }
        };
        let (parts, shared) = (self.parts.clone(), self.shared.clone());
        std::thread::Builder::new()
            .name(format!("vhost-{name}"))
            .spawn(move || {
                parts.report(FunctionState::Waiting);
                serve::run(&parts, &shared, &source, &stop);
            })
    }
}

impl FunctionData for VhostUser {
    /// A front end that shows a link to its driver has its own.
    fn shadow_changed(&self) {
        let up = link_is_up(&self.parts.shadow, &self.parts.spec.layout);
        self.parts.seat.on_device(move |f| f.device.set_link_up(up));
    }

    fn is_connected(&self) -> bool {
        lock(&self.shared.stream).is_some()
    }

    fn state(&self) -> FunctionState {
        if !self.is_connected() {
            FunctionState::Waiting
        } else if self.parts.signals.needs_reset() {
            FunctionState::NeedsReset
        } else if *lock(&self.shared.running) {
            FunctionState::Running
        } else {
            FunctionState::Connected
        }
    }

    fn interrupt(&self) {
        serve::interrupt(lock(&self.shared.stream).as_ref());
    }

    fn leave(&self) {
        self.parts.seat.leave();
    }
}
