//! One function's endpoint: its vfio-user (or vhost-user) connection on one side, the data path on the other.

mod kept;
mod memory;
mod net;
mod rdma;
mod vhost_user;
mod windows;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use dot_iommu::{DotError, DotTable, HostMapping};
use m2m_fabric::proto::{
    Event, Face, FunctionKind, FunctionSpec, FunctionState, VirtioNetSpec, WindowSpec,
};
use smartep::DataSide;
use smartep::function::{FunctionError, FunctionInfo, RegionInfo};
use smartep::irq::Irqs;
use smartep::keep::Keep;
use smartep::route::{Route, RouteError, RouteTable, Side};
use smartep::server::{Server, StopFd};
use smartep::shadow::{ShadowError, ShadowReader};
use smartep::state::{State, StateError};
use thiserror::Error;

use crate::control::{OmLink, RemoteControl};
use crate::rdma::front::mlx5::MappedPages;
use crate::virtio::pci_access;
use crate::worker::{Function, Handle};
use kept::{FunctionKeeper, Opened};
use memory::MemoryData;
use net::VirtioData;
use rdma::{Memory, RdmaData};
use vhost_user::VhostUser;

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
    /// There is no memory for its state.
    #[error(transparent)]
    State(#[from] StateError),
    /// The system refused.
    #[error("cannot start the function's thread: {0}")]
    System(#[from] std::io::Error),
    /// There is no memory for what the VMM maps.
    #[error("cannot make the memory of a BAR: {0}")]
    Bar(#[from] DotError),
    /// The worker is gone.
    #[error("the data path has ended")]
    Worker,
}

/// A function's place in the EM.
#[derive(Debug, Clone)]
struct Seat {
    id: u32,
    worker: Handle,
    om: Arc<OmLink>,
}

impl Seat {
    /// Changes a network function on the worker and returns when it is done there; `None` when there is none any more.
    fn on_device<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Function) -> R + Send + 'static,
    ) -> Option<R> {
        let id = self.id;
        let done = self
            .worker
            .run(move |state| state.functions.get_mut(&id).map(change));
        if done.is_none() {
            log::error!("function {id}: the data path has ended");
        }
        done.flatten()
    }

    /// Takes a network function off the data path.
    fn leave(&self) {
        let id = self.id;
        self.worker.run(move |state| state.functions.remove(&id));
    }
}

/// A function of some kind, as the rest of the EM sees it.
trait FunctionData: Send + Sync {
    /// Bytes of the shadow changed.
    fn shadow_changed(&self);
    /// Whether a VMM is connected.
    fn is_connected(&self) -> bool;
    /// Where it is in its life.
    fn state(&self) -> FunctionState;
    /// Its thread is to stop, whatever it waits for.
    fn interrupt(&self) {}
    /// Takes the function off the data path.
    fn leave(&self);
    /// Memory of another device is there from now on. Why it is refused, in a sentence.
    fn add_window(&self, window: WindowSpec, fd: OwnedFd) -> Result<(), String> {
        let _ = (window, fd);
        Err(NO_WINDOWS.to_owned())
    }
    /// Another OM decides from now on.
    fn new_om(&self) {}
    /// Tells the OM, which does not know, what goes on from before it.
    fn tell_all(&self) {}
    /// Windows are gone, see [`m2m_fabric::proto::RdmaRequest::WindowGone`].
    fn remove_window(&self, device: Option<u32>, generation: u64) -> Result<(), String> {
        let _ = (device, generation);
        Err(NO_WINDOWS.to_owned())
    }
}

const NO_WINDOWS: &str = "a function of this kind does not reach other devices";

/// What a function is given that outlives its data path.
#[derive(Debug)]
pub struct Belongings {
    /// The listening socket.
    pub listener: OwnedFd,
    /// The memory of the shadow.
    pub shadow: OwnedFd,
    /// The way to the keeper, which may hold a client that another process served; without, nothing survives this
    /// process.
    pub keeper: Option<OwnedFd>,
}

/// A function that is served until [`Endpoint::stop`].
pub struct Endpoint {
    seat: Seat,
    table: Arc<DotTable>,
    data: Arc<dyn FunctionData>,
    keeper: Arc<FunctionKeeper>,
    state: Arc<State>,
    reader: Arc<ShadowReader>,
    /// The listening socket, for another OM.
    listener: OwnedFd,
    /// The shadow of the OM that presents the function now, for another OM.
    shadow: Mutex<OwnedFd>,
    stop: StopFd,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("seat", &self.seat)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Puts the function on the data path and serves it.
    pub fn start(
        spec: FunctionSpec,
        Belongings {
            listener,
            shadow,
            keeper,
        }: Belongings,
        worker: Handle,
        om: Arc<OmLink>,
    ) -> Result<Self, EndpointError> {
        let id = spec.id;
        let mut kept = kept::open(id, keeper)?;
        let belongings = (listener.try_clone()?, Mutex::new(shadow.try_clone()?));
        if let FunctionKind::VirtioNet(net) = &spec.kind {
            if net.face != Face::VfioUser {
                let (seat, net) = (Seat { id, worker, om }, net.clone());
                return Self::vhost_user(seat, &spec.name, net, kept, belongings, listener);
            }
        }
        let routes = spec.control.iter().map(|w| Route {
            region: w.region,
            start: w.offset,
            end: w.offset.saturating_add(w.len),
            side: Side::Control,
        });
        let mut regions: Vec<_> = spec
            .regions
            .iter()
            .map(|r| RegionInfo::trapped(r.index, r.size))
            .collect();
        let mut memory = None;
        let pages = match &spec.kind {
            FunctionKind::Memory(spec) => {
                let file = kept.bar(|| HostMapping::memfd(spec.bytes))?;
                let (data, mmap) = MemoryData::new(id, om.clone(), spec, file)?;
                if let Some(bar) = regions.iter_mut().find(|r| r.index == spec.bar) {
                    bar.mmap = Some(mmap);
                }
                memory = Some(Arc::new(data));
                None
            }
            FunctionKind::Rdma(rdma) if rdma.mapped_doorbells => {
                let memory = kept.bar(MappedPages::memory)?;
                let (pages, mmap) = MappedPages::of(memory)?;
                if let Some(bar) = regions.iter_mut().find(|r| r.index == rdma.bar) {
                    bar.mmap = Some(mmap);
                }
                Some(pages)
            }
            _ => None,
        };
        let mut info = FunctionInfo::new(
            regions,
            RouteTable::new(routes.collect())?,
            spec.msix_vectors,
        )?;
        let (table, irqs) = (Arc::new(DotTable::new()), Irqs::new(spec.msix_vectors));
        let shadow = Arc::new(ShadowReader::new(&shadow)?);
        let seat = Seat { id, worker, om };
        let mut overlay = None;
        let (data, side): (Arc<dyn FunctionData>, Arc<dyn DataSide>) = match (spec.kind, memory) {
            (_, Some(data)) => (data.clone(), data),
            (FunctionKind::Memory(_), None) => return Err(EndpointError::Worker),
            (FunctionKind::VirtioNet(net), None) => {
                if let Some(at) = pci_access::find(&shadow) {
                    info = info.with_window(at);
                }
                let irqs = irqs.clone();
                let memory = (shadow.clone(), kept.state.clone(), kept.resume.is_some());
                let (data, mac) =
                    VirtioData::new(seat.clone(), net, spec.msix_vectors, &table, irqs, memory)?;
                overlay = Some(mac);
                let data = Arc::new(data);
                (data.clone(), data)
            }
            (FunctionKind::Rdma(rdma), None) => {
                let objects = kept.objects(id);
                let kept = Memory {
                    state: kept.state.clone(),
                    found: objects.as_ref().is_some_and(|(_, found)| *found),
                    objects: objects.map(|(objects, _)| objects),
                    resumes: kept.resume.is_some(),
                };
                let irqs = irqs.clone();
                let data = RdmaData::new(seat.clone(), rdma, &table, irqs, pages, kept)?;
                let data = Arc::new(data);
                (data.clone(), data)
            }
        };
        let (keeper, reader) = (kept.keeper.clone(), shadow.clone());
        let state = kept.state.clone();
        let control = Box::new(RemoteControl::new(id, shadow, seat.om.clone(), overlay));
        let mut server =
            Server::new(info, table.clone(), irqs, control, side).kept(kept.state, kept.keeper);
        let stop = StopFd::new()?;
        let listener = UnixListener::from(listener);
        let thread = std::thread::Builder::new()
            .name(format!("vfio-{}", spec.name))
            .spawn({
                let (stop, om) = (stop.clone(), seat.om.clone());
                let resume = kept.resume;
                move || {
                    let served = match resume {
                        Some(resume) => server.resume(resume, &listener, &stop),
                        None => {
                            report(&om, id, FunctionState::Waiting);
                            server.run(&listener, &stop)
                        }
                    };
                    if let Err(e) = served {
                        log::error!("function {id} is not served any more: {e}");
                    }
                }
            })?;
        Ok(Self {
            seat,
            table,
            data,
            keeper,
            state,
            reader,
            listener: belongings.0,
            shadow: belongings.1,
            stop,
            thread: Some(thread),
        })
    }

    /// The same for vhost-user. Nothing is kept of its clients: they connect again.
    fn vhost_user(
        seat: Seat,
        name: &str,
        spec: VirtioNetSpec,
        kept: Opened,
        belongings: (OwnedFd, Mutex<OwnedFd>),
        listener: OwnedFd,
    ) -> Result<Self, EndpointError> {
        // A client of another face, from before the configuration changed.
        if kept.resume.is_some() && !kept.keeper.clear() {
            kept.state.set_broken();
        }
        let table = Arc::new(DotTable::new());
        let reader = Arc::new(ShadowReader::new(&*lock(&belongings.1))?);
        let data = VhostUser::new(seat.clone(), spec, table.clone(), reader.clone())?;
        let stop = StopFd::new()?;
        let thread = data.serve(name, listener, stop.clone())?;
        Ok(Self {
            seat,
            table,
            data: Arc::new(data),
            keeper: kept.keeper,
            state: kept.state,
            reader,
            listener: belongings.0,
            shadow: belongings.1,
            stop,
            thread: Some(thread),
        })
    }

    /// Bytes of the shadow changed: a new link status, say. Tells data path and driver.
    pub fn config_changed(&self) {
        self.data.shadow_changed();
    }

    /// Whether a VMM is connected.
    pub fn is_connected(&self) -> bool {
        self.data.is_connected()
    }

    /// Where the function is in its life.
    pub fn state(&self) -> FunctionState {
        self.data.state()
    }

    /// Calls `give` with the listening socket and the shadow.
    pub fn with_belongings<R>(&self, give: impl FnOnce(&OwnedFd, &OwnedFd) -> R) -> R {
        give(&self.listener, &lock(&self.shadow))
    }

    /// Another OM presents and keeps the function from now on: in the memory of this shadow, with this keeper. One on
    /// another host has neither.
    ///
    /// # Errors
    /// Why not, in a sentence.
    pub fn adopted(&self, fds: Option<[OwnedFd; 2]>) -> Result<(), String> {
        if let Some([shadow, keeper]) = fds {
            self.reader.replace(&shadow).map_err(|e| e.to_string())?;
            // What the guest writes from here on is in this one only.
            *lock(&self.shadow) = shadow;
            self.keeper.move_to(keeper).map_err(|e| e.to_string())?;
            self.state.set_whole();
        }
        self.data.new_om();
        Ok(())
    }

    /// What the OM says of memory of other devices goes here, and what takes as long as a peer or the OM does.
    pub fn patient(&self) -> Patient {
        Patient(self.data.clone())
    }

    /// Ranges and bytes of guest memory that are mapped.
    pub fn dma(&self) -> (u64, u64) {
        let ranges = self.table.ranges();
        (ranges.len() as u64, ranges.iter().map(|r| r.len).sum())
    }

    /// Ends the connection and takes the function off the data path.
    pub fn stop(mut self) {
        self.stop.stop();
        self.data.interrupt();
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                log::error!("the thread of function {} panicked", self.seat.id);
            }
        }
        self.data.leave();
    }
}

/// An endpoint for a thread that waits for others and must not hold up its EM meanwhile.
pub struct Patient(Arc<dyn FunctionData>);

impl Patient {
    /// Memory of another device is there from now on.
    ///
    /// # Errors
    /// Why it is refused, in a sentence.
    pub fn add(&self, window: WindowSpec, fd: OwnedFd) -> Result<(), String> {
        self.0.add_window(window, fd)
    }

    /// Tells another OM what it has to know beside what it was given back. It answers or is gone.
    pub fn tell_all(&self) {
        self.0.tell_all();
    }

    /// Windows are gone, see [`m2m_fabric::proto::RdmaRequest::WindowGone`].
    ///
    /// # Errors
    /// Why they may be in use still, in a sentence.
    pub fn remove(&self, device: Option<u32>, generation: u64) -> Result<(), String> {
        self.0.remove_window(device, generation)
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
