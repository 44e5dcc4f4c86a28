//! One function's endpoint: its vfio-user connection on one side, the data path on the other.

mod kept;
mod memory;
mod net;
mod rdma;
mod windows;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use dot_iommu::{DotError, DotTable, HostMapping};
use m2m_fabric::proto::{Event, FunctionKind, FunctionSpec, FunctionState, WindowSpec};
use smartep::DataSide;
use smartep::function::{FunctionError, FunctionInfo, RegionInfo};
use smartep::irq::Irqs;
use smartep::route::{Route, RouteError, RouteTable, Side};
use smartep::server::{Server, StopFd};
use smartep::shadow::{ShadowError, ShadowReader};
use smartep::state::{State, StateError};
use thiserror::Error;

use crate::control::{OmLink, RemoteControl};
use crate::rdma::front::mlx5::MappedPages;
use crate::virtio::pci_access;
use crate::worker::Handle;
use kept::FunctionKeeper;
use memory::MemoryData;
use net::VirtioData;
use rdma::{Memory, RdmaData};

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

/// The data side of a function of some kind.
trait FunctionData: DataSide {
    /// Bytes of the shadow changed.
    fn shadow_changed(&self);
    /// Whether a VMM is connected.
    fn is_connected(&self) -> bool;
    /// Where it is in its life.
    fn state(&self) -> FunctionState;
    /// Takes the function off the data path.
    fn leave(&self);
    /// Memory of another device is there from now on. Why it is refused, in a sentence.
    fn add_window(&self, window: WindowSpec, fd: OwnedFd) -> Result<(), String> {
        let _ = (window, fd);
        Err(NO_WINDOWS.to_owned())
    }
    /// Another OM decides from now on.
    fn new_om(&self) {}
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
    /// The listening socket and the shadow, for another OM.
    belongings: [OwnedFd; 2],
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
        let belongings = [listener.try_clone()?, shadow.try_clone()?];
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
            belongings,
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

    /// The listening socket and the shadow.
    pub fn belongings(&self) -> &[OwnedFd; 2] {
        &self.belongings
    }

    /// Another OM presents and keeps the function from now on: in the memory of this shadow, with this keeper. One on
    /// another host has neither.
    ///
    /// # Errors
    /// Why not, in a sentence.
    pub fn adopted(&self, fds: Option<[OwnedFd; 2]>) -> Result<(), String> {
        if let Some([shadow, keeper]) = fds {
            self.reader.replace(&shadow).map_err(|e| e.to_string())?;
            self.keeper.move_to(keeper).map_err(|e| e.to_string())?;
            self.state.set_whole();
        }
        self.data.new_om();
        Ok(())
    }

    /// What the OM says of memory of other devices goes here; may take as long as a peer does.
    pub fn windows(&self) -> EndpointWindows {
        EndpointWindows(self.data.clone())
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
                log::error!("the thread of function {} panicked", self.seat.id);
            }
        }
        self.data.leave();
    }
}

/// The windows of an endpoint, for a thread that must not hold up others of its EM.
pub struct EndpointWindows(Arc<dyn FunctionData>);

impl EndpointWindows {
    /// Memory of another device is there from now on.
    ///
    /// # Errors
    /// Why it is refused, in a sentence.
    pub fn add(&self, window: WindowSpec, fd: OwnedFd) -> Result<(), String> {
        self.0.add_window(window, fd)
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
