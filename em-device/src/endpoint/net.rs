//! The data side of a virtio network function: registers, and the way to the data path.

use std::sync::{Arc, Mutex};

use dot_iommu::DotTable;
use m2m_fabric::proto::{FunctionState, VirtioNetSpec, VirtioPciLayout};
use smartep::DataSide;
use smartep::config::ConfigState;
use smartep::dma::MessageDma;
use smartep::irq::Irqs;
use smartep::shadow::ShadowReader;
use smartep::state::{Section, State};

use super::{EndpointError, FunctionData, Seat, lock, report};
use crate::control::ConfigOverlay;
use crate::net::config::ConfigOverride;
use crate::net::device::{NetDevice, queue_count};
use crate::net::features;
use crate::net::links::Links;
use crate::virtio::common::{Action, CommonConfig, Offer};
use crate::virtio::layout::{Area, area};
use crate::virtio::saved::SavedRegisters;
use crate::virtio::signals::Signals;
use crate::worker::Function;

/// See the module.
#[derive(Debug)]
pub(super) struct VirtioData {
    seat: Seat,
    spec: VirtioNetSpec,
    common: Mutex<CommonConfig>,
    signals: Arc<Signals>,
    shadow: Arc<ShadowReader>,
    connected: Mutex<bool>,
    /// Where registers are noted for the next process.
    state: Arc<State>,
}

/// `status` of the device configuration (virtio 1.3 §5.1.4), and its bit for a link that is up.
const NET_STATUS: u64 = 6;
const NET_STATUS_LINK_UP: u8 = 1;

/// Whether the OM lets the link be up.
pub(super) fn link_is_up(shadow: &ShadowReader, layout: &VirtioPciLayout) -> bool {
    let mut status = [0];
    let offset = u64::from(layout.device.offset) + NET_STATUS;
    shadow.read(layout.bar, offset, &mut status) && status[0] & NET_STATUS_LINK_UP != 0
}

impl VirtioData {
    /// Puts the function on the data path. Also answers what it adds to the device configuration.
    pub(super) fn new(
        seat: Seat,
        spec: VirtioNetSpec,
        vectors: u16,
        table: &DotTable,
        irqs: Arc<Irqs>,
        (shadow, state, resumes): (Arc<ShadowReader>, Arc<State>, bool),
    ) -> Result<(Self, ConfigOverlay), EndpointError> {
        let id = seat.id;
        let signals = Arc::new(Signals::new(irqs, queue_count(&spec)));
        let news = {
            let om = seat.om.clone();
            Arc::new(move |state| report(&om, id, state))
        };
        let config = Arc::new(ConfigOverride::default());
        let overlay = ConfigOverlay {
            region: spec.layout.bar,
            offset: u64::from(spec.layout.device.offset),
            config: config.clone(),
        };
        let mut device = NetDevice::new(
            id,
            spec.clone(),
            signals.clone(),
            table.reader(),
            config,
            news,
        )
        .noted_in(state.clone());
        if resumes {
            device.resuming();
        }
        let function = Function {
            device,
            links: Links::default(),
        };
        seat.worker
            .run(move |state| state.functions.insert(id, function))
            .ok_or(EndpointError::Worker)?;
        let offer = Offer {
            features: features::OFFERED,
            queues: queue_count(&spec),
            queue_size: spec.queue_size,
            vectors,
            acceptable: features::acceptable,
        };
        let data = Self {
            seat,
            spec,
            common: Mutex::new(CommonConfig::new(offer, signals.clone())),
            signals,
            shadow,
            connected: Mutex::new(false),
            state,
        };
        data.link_changed();
        Ok((data, overlay))
    }

    /// Takes the link status from the shadow to the data path.
    fn link_changed(&self) {
        let up = link_is_up(&self.shadow, &self.spec.layout);
        self.on_device(move |function| function.device.set_link_up(up));
    }

    /// Runs on the worker and returns when it is done there.
    fn on_device(&self, change: impl FnOnce(&mut Function) + Send + 'static) {
        self.seat.on_device(change);
    }

    fn stop_device(&self) {
        self.on_device(|f| f.device.stop(&mut f.links));
        lock(&self.common).reset();
        self.note();
    }

    /// Notes the registers. A write after which this was not done is done again by the next process.
    fn note(&self) {
        let registers = lock(&self.common).save().to_bytes();
        if !self.state.save(Section::Registers, &registers) {
            self.state.set_broken();
        }
    }

    /// Takes over what a former process noted; answers whether there was something.
    fn take_over(&self) -> bool {
        let noted = self.state.load(Section::Registers);
        let Some(saved) = noted.and_then(|bytes| SavedRegisters::from_bytes(&bytes)) else {
            return false;
        };
        if !lock(&self.common).restore(&saved) {
            return false;
        }
        // The link may have changed unseen.
        self.signals.config_changed();
        if lock(&self.common).is_running() {
            let (features, queues) = {
                let common = lock(&self.common);
                (common.features(), common.queues().to_vec())
            };
            self.on_device(move |f| f.device.resume(features, &queues));
        }
        true
    }

    fn common_write(&self, at: u64, data: &[u8]) {
        let action = lock(&self.common).write(at, data);
        match action {
            Action::None => self.note(),
            Action::Reset => {
                self.stop_device();
                report(&self.seat.om, self.seat.id, FunctionState::Connected);
            }
            Action::Start => {
                let (features, queues) = {
                    let common = lock(&self.common);
                    (common.features(), common.queues().to_vec())
                };
                log::info!(
                    "function {}: driver ready, features {features:#x}",
                    self.seat.id
                );
                self.state.clear_queues();
                // Before a ring is touched: who finds it noted goes on where the ring is, who does not begins at 0.
                self.note();
                self.on_device(move |f| f.device.start(features, &queues, &mut f.links));
                report(&self.seat.om, self.seat.id, FunctionState::Running);
            }
            Action::ResetQueue(queue) => {
                self.on_device(move |f| {
                    f.device.stop_queue(queue, &mut f.links);
                });
                lock(&self.common).reset_queue(queue);
                self.note();
            }
            Action::StartQueue(queue) => {
                let setup = lock(&self.common).queues().get(usize::from(queue)).copied();
                if let Some(place) = self.state.queue(queue) {
                    place.clear();
                }
                self.note();
                if let Some(setup) = setup {
                    self.on_device(move |f| f.device.start_queue(queue, setup));
                }
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
                    self.seat.worker.kick();
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
        report(&self.seat.om, self.seat.id, FunctionState::Connected);
    }

    fn resumed(&self, _dma: Arc<MessageDma>, state: ConfigState) {
        *lock(&self.connected) = true;
        self.signals.set_msix(state.msix_enabled);
        self.on_device(move |f| f.device.set_bus_master(state.bus_master));
        let known = self.take_over();
        self.on_device(|f| f.device.taken_over());
        let running = known && lock(&self.common).is_running();
        let now = if running {
            FunctionState::Running
        } else {
            FunctionState::Connected
        };
        report(&self.seat.om, self.seat.id, now);
    }

    fn disconnected(&self) {
        self.stop_device();
        self.seat.om.reset_function(self.seat.id);
        *lock(&self.connected) = false;
        report(&self.seat.om, self.seat.id, FunctionState::Waiting);
    }
}

impl FunctionData for VirtioData {
    fn shadow_changed(&self) {
        self.link_changed();
        self.signals.config_changed();
    }

    fn is_connected(&self) -> bool {
        *lock(&self.connected)
    }

    fn state(&self) -> FunctionState {
        if !self.is_connected() {
            FunctionState::Waiting
        } else if self.signals.needs_reset() {
            FunctionState::NeedsReset
        } else if lock(&self.common).is_running() {
            FunctionState::Running
        } else {
            FunctionState::Connected
        }
    }

    fn leave(&self) {
        self.seat.leave();
    }
}
