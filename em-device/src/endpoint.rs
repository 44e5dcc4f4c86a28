//! One function's endpoint: its vfio-user connection on one side, the data path on the other.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use dot_iommu::DotTable;
use m2m_fabric::proto::{Event, FunctionKind, FunctionSpec, FunctionState, VirtioNetSpec};
use smartep::DataSide;
use smartep::config::ConfigState;
use smartep::dma::MessageDma;
use smartep::function::{FunctionError, FunctionInfo, RegionInfo};
use smartep::irq::Irqs;
use smartep::route::{Route, RouteError, RouteTable, Side};
use smartep::server::{Server, StopFd};
use smartep::shadow::{ShadowError, ShadowReader};
use thiserror::Error;

use crate::control::{MacOverlay, OmLink, RemoteControl};
use crate::net::device::{MacOverride, NetDevice, queue_count};
use crate::net::features;
use crate::net::links::Links;
use crate::virtio::common::{Action, CommonConfig, Offer};
use crate::virtio::layout::{Area, area};
use crate::virtio::signals::Signals;
use crate::worker::{Function, Handle};

/// Why a function cannot be served.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// The presentation makes no sense.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The control windows make no sense.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The shadow cannot be used.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
    /// The system refused.
    #[error("cannot start the function's thread: {0}")]
    System(#[from] std::io::Error),
    /// The worker is gone.
    #[error("the data path has ended")]
    Worker,
}

/// A function that is served until [`Endpoint::stop`].
#[derive(Debug)]
pub struct Endpoint {
    id: u32,
    table: Arc<DotTable>,
    data: Arc<VirtioData>,
    stop: StopFd,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Puts the function on the data path and serves it on `listener`.
    pub fn start(
        spec: FunctionSpec,
        listener: OwnedFd,
        shadow: &OwnedFd,
        worker: Handle,
        om: Arc<OmLink>,
    ) -> Result<Self, EndpointError> {
        let id = spec.id;
        let FunctionKind::VirtioNet(net) = spec.kind else {
            return Err(EndpointError::Worker);
        };
        let routes = spec.control.iter().map(|w| Route {
            region: w.region,
            start: w.offset,
            end: w.offset.saturating_add(w.len),
            side: Side::Control,
        });
        let regions = spec
            .regions
            .iter()
            .map(|r| RegionInfo::trapped(r.index, r.size))
            .collect();
        let info = FunctionInfo::new(
            regions,
            RouteTable::new(routes.collect())?,
            spec.msix_vectors,
        )?;
        let (table, irqs) = (Arc::new(DotTable::new()), Irqs::new(spec.msix_vectors));
        let signals = Arc::new(Signals::new(irqs.clone(), queue_count(&net)));
        let shadow = Arc::new(ShadowReader::new(shadow)?);
        let report = {
            let om = om.clone();
            Arc::new(move |state| report(&om, id, state))
        };
        let (reader, device_spec, device_signals) = (table.reader(), net.clone(), signals.clone());
        let mac = Arc::new(MacOverride::default());
        let overlay = MacOverlay {
            region: net.layout.bar,
            offset: u64::from(net.layout.device.offset),
            mac: mac.clone(),
        };
        worker
            .run(move |state| {
                let device = NetDevice::new(id, device_spec, device_signals, reader, mac, report);
                state.functions.insert(
                    id,
                    Function {
                        device,
                        links: Links::default(),
                    },
                );
            })
            .ok_or(EndpointError::Worker)?;
        let data = Arc::new(VirtioData::new(
            id,
            net,
            spec.msix_vectors,
            signals,
            worker,
            shadow.clone(),
            om.clone(),
        ));
        data.link_changed();
        let control = Box::new(RemoteControl::new(id, shadow, om, Some(overlay)));
        let mut server = Server::new(info, table.clone(), irqs, control, data.clone());
        let stop = StopFd::new()?;
        let listener = UnixListener::from(listener);
        let thread = std::thread::Builder::new()
            .name(format!("vfio-{}", spec.name))
            .spawn({
                let stop = stop.clone();
                move || {
                    if let Err(e) = server.run(&listener, &stop) {
                        log::error!("function {id} is not served any more: {e}");
                    }
                }
            })?;
        report_waiting(&data.om, id);
        Ok(Self {
            id,
            table,
            data,
            stop,
            thread: Some(thread),
        })
    }

    /// Bytes of the shadow changed: a new link status, say. Tells data path and driver.
    pub fn config_changed(&self) {
        self.data.link_changed();
        self.data.signals.config_changed();
    }

    /// Whether a VMM is connected.
    pub fn is_connected(&self) -> bool {
        *lock(&self.data.connected)
    }

    /// Ranges and bytes of guest memory that are mapped.
    pub fn dma(&self) -> (u64, u64) {
        let ranges = self.table.ranges();
        (ranges.len() as u64, ranges.iter().map(|r| r.len).sum())
    }

    /// Ends the connection and takes the function off the data path.
    pub fn stop(mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                log::error!("the thread of function {} panicked", self.id);
            }
        }
        let id = self.id;
        self.data.worker.run(move |state| {
            state.functions.remove(&id);
        });
    }
}

fn report(om: &OmLink, function: u32, state: FunctionState) {
    if let Some(fabric) = om.get() {
        // Full or down: the OM asks again when it is back.
        if let Err(e) = fabric.notify(Event::Function { function, state }) {
            log::debug!("function {function} is {state:?}, and the OM does not know: {e}");
        }
    }
}

fn report_waiting(om: &OmLink, function: u32) {
    report(om, function, FunctionState::Waiting);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The data side of a virtio function: registers, and the way to the worker.
#[derive(Debug)]
struct VirtioData {
    id: u32,
    spec: VirtioNetSpec,
    common: Mutex<CommonConfig>,
    signals: Arc<Signals>,
    worker: Handle,
    shadow: Arc<ShadowReader>,
    om: Arc<OmLink>,
    connected: Mutex<bool>,
}

/// `status` of the device configuration (virtio 1.3 §5.1.4), and its bit for a link that is up.
const NET_STATUS: u64 = 6;
const NET_STATUS_LINK_UP: u8 = 1;

impl VirtioData {
    fn new(
        id: u32,
        spec: VirtioNetSpec,
        vectors: u16,
        signals: Arc<Signals>,
        worker: Handle,
        shadow: Arc<ShadowReader>,
        om: Arc<OmLink>,
    ) -> Self {
        let offer = Offer {
            features: features::OFFERED,
            queues: queue_count(&spec),
            queue_size: spec.queue_size,
            vectors,
            acceptable: features::acceptable,
        };
        let common = Mutex::new(CommonConfig::new(offer, signals.clone()));
        Self {
            id,
            spec,
            common,
            signals,
            worker,
            shadow,
            om,
            connected: Mutex::new(false),
        }
    }

    /// Takes the link status from the shadow to the data path.
    fn link_changed(&self) {
        let mut status = [0];
        let offset = u64::from(self.spec.layout.device.offset) + NET_STATUS;
        let up = self.shadow.read(self.spec.layout.bar, offset, &mut status)
            && status[0] & NET_STATUS_LINK_UP != 0;
        self.on_device(move |function| function.device.set_link_up(up));
    }

    /// Runs on the worker and returns when it is done there.
    fn on_device(&self, change: impl FnOnce(&mut Function) + Send + 'static) {
        let id = self.id;
        let done = self.worker.run(move |state| {
            if let Some(function) = state.functions.get_mut(&id) {
                change(function);
            }
        });
        if done.is_none() {
            log::error!("function {id}: the data path has ended");
        }
    }

    fn stop_device(&self) {
        self.on_device(|f| f.device.stop(&mut f.links));
        lock(&self.common).reset();
    }

    fn common_write(&self, at: u64, data: &[u8]) {
        let action = lock(&self.common).write(at, data);
        match action {
            Action::None => {}
            Action::Reset => {
                self.stop_device();
                report(&self.om, self.id, FunctionState::Connected);
            }
            Action::Start => {
                let (features, queues) = {
                    let common = lock(&self.common);
                    (common.features(), common.queues().to_vec())
                };
                log::info!("function {}: driver ready, features {features:#x}", self.id);
                self.on_device(move |f| f.device.start(features, &queues, &mut f.links));
                report(&self.om, self.id, FunctionState::Running);
            }
        }
    }
}

impl DataSide for VirtioData {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        match area(&self.spec.layout, region, offset) {
            Area::Common(at) => lock(&self.common).read(at, data),
            Area::Isr(0) => {
                data.fill(0);
                if let Some(isr) = data.first_mut() {
                    *isr = self.signals.take_isr();
                }
            }
            Area::Isr(_) | Area::Notify(_) | Area::Nothing => data.fill(0),
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        match area(&self.spec.layout, region, offset) {
            Area::Notify(queue) => {
                if self.signals.count_kick(queue) {
                    self.worker.kick();
                }
            }
            Area::Common(at) => self.common_write(at, data),
            Area::Isr(_) | Area::Nothing => {}
        }
    }

    fn config_changed(&self, old: ConfigState, new: ConfigState) {
        self.signals.set_msix(new.msix_enabled);
        if old.bus_master != new.bus_master {
            self.on_device(move |f| f.device.set_bus_master(new.bus_master));
        }
    }

    fn reset(&self) {
        self.stop_device();
    }

    fn connected(&self, _dma: Arc<MessageDma>) {
        *lock(&self.connected) = true;
        report(&self.om, self.id, FunctionState::Connected);
    }

    fn disconnected(&self) {
        self.stop_device();
        self.om.reset_function(self.id);
        *lock(&self.connected) = false;
        report(&self.om, self.id, FunctionState::Waiting);
    }
}
