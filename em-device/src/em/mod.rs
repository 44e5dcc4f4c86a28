//! The Execution Module as a whole: what the OM asks of it.

mod life;
mod om;
mod rdma;
mod shadows;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use m2m_fabric::proto::{
    EmStats, Event, Formats, FunctionSpec, Image, LinkKind, LinkSpec, Reply, Request,
};
use m2m_fabric::{Fabric, FabricError, Handler};
use smartep::listener::PathListener;
use thiserror::Error;

use crate::control::OmLink;
use crate::endpoint::{Belongings, Endpoint};
use crate::net::links::Link;
use crate::port::open::open;
use crate::port::shm::ShmPort;
use crate::rdma::verbs::Peer;
use crate::worker::Handle;

pub use om::OmAddress;
use shadows::Shadows;

/// Why an EM cannot work.
#[derive(Debug, Error)]
pub enum EmError {
    /// The OM cannot be reached.
    #[error("cannot reach the OM at {place}: {source}")]
    Om {
        /// Its socket or address.
        place: String,
        /// What happened.
        source: FabricError,
    },
    /// The OM does not want this EM.
    #[error("the OM refuses this EM: {0}")]
    Refused(String),
    /// The system refused.
    #[error("cannot start the data path: {0}")]
    System(#[from] std::io::Error),
}

/// How an EM is started.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name in the OM's configuration.
    pub name: String,
    /// Where the OM is.
    pub om: OmAddress,
    /// How long the data path looks for work at the most before it sleeps.
    pub poll: Duration,
}

/// What this program takes over from another EM.
pub fn formats() -> Formats {
    Formats {
        m2m: m2m_fabric::proto::VERSION,
        state: vec![smartep::state::VERSION],
    }
}

/// A running EM.
pub struct Em {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Em {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Em")
            .field("om", &self.shared.om)
            .finish_non_exhaustive()
    }
}

impl Em {
    /// Starts the data path. [`Em::introduce`] follows.
    pub fn start(settings: &Settings) -> Result<Self, EmError> {
        let handle = Handle::start(settings.poll)?;
        let shared = Arc::new(Shared {
            settings: settings.clone(),
            worker: handle,
            om: Arc::default(),
            functions: Mutex::default(),
            sockets: Mutex::default(),
            shadows: Shadows::default(),
            links: Mutex::default(),
            returning: Mutex::default(),
            looking: AtomicBool::new(false),
            phase: Mutex::new(Phase::Serving),
            changed: Condvar::new(),
        });
        Ok(Self { shared })
    }

    /// Introduces the EM to its OM, which then gives it functions. Waits for an OM on another host that cannot be
    /// reached, until [`Em::stopper`] is called.
    ///
    /// # Errors
    /// [`EmError`].
    pub fn introduce(&self) -> Result<(), EmError> {
        self.shared.introduce()
    }

    /// Serves until the OM says to stop; or, without an OM, until no guest needs the EM any more. An EM whose OM is on
    /// another host serves until it is stopped.
    pub fn wait(&self) {
        loop {
            let phase = lock(&self.shared.phase);
            // Wakes now and then because guests leave without a notice to this thread.
            let wait = self
                .shared
                .changed
                .wait_timeout(phase, Duration::from_secs(1));
            let phase = *wait.unwrap_or_else(PoisonError::into_inner).0;
            match phase {
                Phase::Serving => {}
                Phase::Stop => return,
                Phase::Orphan if self.shared.settings.om.is_remote() => {}
                Phase::Orphan if self.shared.has_guests() => {}
                Phase::Orphan => return,
            }
        }
    }

    /// Ends [`Em::wait`] when called, from any thread.
    pub fn stopper(&self) -> impl Fn() + Send + 'static {
        let shared = self.shared.clone();
        move || shared.set_phase(Phase::Stop)
    }

    /// Ends all functions in order.
    pub fn stop(self) {
        // The reply to the OM's request is on its way; it is not cut off.
        std::thread::sleep(Duration::from_millis(50));
        self.shared.drop_functions();
        if let Some(om) = self.shared.om.get() {
            om.close();
        }
        self.shared.om.set(None);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    Orphan,
    Stop,
}

/// An OM that is about to adopt this EM.
struct Returning {
    fabric: Arc<dyn Fabric>,
    /// Functions that it has not adopted yet.
    missing: BTreeSet<u32>,
}

struct Shared {
    settings: Settings,
    worker: Handle,
    om: Arc<OmLink>,
    functions: Mutex<BTreeMap<u32, Endpoint>>,
    /// The functions' sockets that this EM made itself.
    sockets: Mutex<BTreeMap<u32, PathListener>>,
    /// What an OM on another host presents.
    shadows: Shadows,
    /// Wires with copies of what came with them, for another OM.
    links: Mutex<BTreeMap<u32, (LinkSpec, Vec<OwnedFd>)>>,
    returning: Mutex<Option<Returning>>,
    /// Whether a thread looks for another OM.
    looking: AtomicBool,
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl Shared {
    fn set_phase(&self, phase: Phase) {
        let mut now = lock(&self.phase);
        if *now != Phase::Stop {
            *now = phase;
        }
        self.changed.notify_all();
    }

    fn has_guests(&self) -> bool {
        lock(&self.functions).values().any(Endpoint::is_connected)
    }

    fn add_function(&self, spec: FunctionSpec, fds: Vec<OwnedFd>) -> Result<(), String> {
        let mut functions = lock(&self.functions);
        if functions.contains_key(&spec.id) {
            return Err(format!("function {} is served already", spec.id));
        }
        let id = spec.id;
        let belongings = match fds.is_empty() && self.settings.om.is_remote() {
            true => self.own_belongings(&spec)?,
            false => {
                let [listener, shadow, keeper] = <[OwnedFd; 3]>::try_from(fds).map_err(|fds| {
                    format!("a function comes with 3 descriptors, not {}", fds.len())
                })?;
                Belongings {
                    listener,
                    shadow,
                    keeper: Some(keeper),
                }
            }
        };
        let endpoint = Endpoint::start(spec, belongings, self.worker.clone(), self.om.clone())
            .map_err(|e| {
                lock(&self.sockets).remove(&id);
                e.to_string()
            })?;
        functions.insert(id, endpoint);
        Ok(())
    }

    /// What a function needs, made here because no descriptors came.
    fn own_belongings(&self, spec: &FunctionSpec) -> Result<Belongings, String> {
        let id = spec.id;
        let none = || format!("nobody said what function {id} presents");
        let shadow = self.shadows.get(id).ok_or_else(none)?;
        let path = Path::new(&spec.socket);
        let socket = match spec.dials() {
            // The path is the front end's.
            true => PathListener::of_front_end(path, true),
            false => PathListener::make(path),
        };
        let socket = socket.map_err(|e| e.to_string())?;
        let listener = socket.socket().map(|socket| socket.try_clone_to_owned());
        let listener = listener.ok_or_else(none)?.map_err(|e| e.to_string())?;
        lock(&self.sockets).insert(id, socket);
        Ok(Belongings {
            listener,
            shadow,
            keeper: None,
        })
    }

    /// Ends all functions in order.
    fn drop_functions(&self) {
        let functions = std::mem::take(&mut *lock(&self.functions));
        for (id, endpoint) in functions {
            endpoint.stop();
            lock(&self.sockets).remove(&id);
            self.shadows.forget(id);
        }
        lock(&self.links).clear();
    }

    /// All wires of a function are there that there are for now.
    fn wired(&self, id: u32) -> Result<(), String> {
        let done = self.worker.run(move |state| {
            if let Some(function) = state.functions.get_mut(&id) {
                function.device.wired();
            }
            if let Some(function) = state.rdma.get_mut(&id) {
                function.wired();
            }
        });
        done.ok_or_else(|| "the data path has ended".to_owned())
    }

    fn remove_function(&self, id: u32) -> Result<(), String> {
        let endpoint = lock(&self.functions).remove(&id);
        lock(&self.sockets).remove(&id);
        self.shadows.forget(id);
        endpoint
            .map(Endpoint::stop)
            .ok_or_else(|| format!("there is no function {id}"))
    }

    fn add_link(&self, spec: LinkSpec, fds: Vec<OwnedFd>) -> Result<(), String> {
        let copies: std::io::Result<Vec<_>> = fds.iter().map(OwnedFd::try_clone).collect();
        let copies = copies.map_err(|e| e.to_string())?;
        self.open_link(spec.clone(), fds)?;
        lock(&self.links).insert(spec.id, (spec, copies));
        Ok(())
    }

    fn open_link(&self, spec: LinkSpec, fds: Vec<OwnedFd>) -> Result<(), String> {
        if let LinkKind::Rdma {
            side,
            peer,
            peer_function,
        } = spec.kind
        {
            return self.add_wire(spec.id, spec.function, (side, &peer, peer_function), fds);
        }
        let peer = match &spec.kind {
            LinkKind::Shm { peer_mac, .. } => Some(*peer_mac),
            _ => None,
        };
        let recorder = matches!(spec.kind, LinkKind::Capture { .. });
        let port = open(&spec.kind, fds).map_err(|e| e.to_string())?;
        let (id, function) = (spec.id, spec.function);
        let added = self.worker.run(move |state| {
            let links = state.links_of(function)?;
            Some(links.add(Link::new(id, port, peer), recorder))
        });
        match added.flatten() {
            Some(true) => Ok(()),
            Some(false) => Err(format!("function {function} has no room for link {id}")),
            None => Err(format!("there is no function {function} for link {id}")),
        }
    }

    fn add_wire(
        &self,
        id: u32,
        function: u32,
        (side, name, peer): (u8, &str, u32),
        fds: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let [memory, wake, wake_peer] = <[OwnedFd; 3]>::try_from(fds)
            .map_err(|fds| format!("an RDMA wire comes with 3 descriptors, not {}", fds.len()))?;
        let port = ShmPort::attach(format!("rdma to {name}"), side, memory, wake, wake_peer)
            .map_err(|e| e.to_string())?;
        let added = self.worker.run(move |state| {
            let function = state.rdma.get_mut(&function)?;
            function.wires.add(id, Peer(peer), port);
            Some(())
        });
        let none = || format!("there is no RDMA function {function} for link {id}");
        added.flatten().ok_or_else(none)
    }

    fn remove_link(&self, id: u32) -> Result<(), String> {
        lock(&self.links).remove(&id);
        let removed = self.worker.run(move |state| {
            let mut net = state.functions.values_mut().map(|f| &mut f.links);
            net.any(|links| links.remove(id))
                || state
                    .rdma
                    .values_mut()
                    .any(|f| f.links.remove(id) || f.remove_wire(id))
        });
        match removed {
            Some(true) => Ok(()),
            _ => Err(format!("there is no link {id}")),
        }
    }

    fn stats(&self) -> Option<EmStats> {
        let mut stats = self.worker.run(|state| state.stats())?;
        let functions = lock(&self.functions);
        for function in &mut stats.functions {
            if let Some(endpoint) = functions.get(&function.function) {
                (function.dma_ranges, function.dma_bytes) = endpoint.dma();
            }
        }
        Some(stats)
    }
}

/// What arrives from the OM.
struct FromOm(Arc<Shared>);

impl Handler for FromOm {
    fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        let em = &self.0;
        let done = match request {
            Request::AddFunction(spec) => em.add_function(*spec, fds),
            Request::RemoveFunction { function } => em.remove_function(function),
            Request::AddLink(spec) => em.add_link(spec, fds),
            Request::Wired { function } => em.wired(function),
            Request::RemoveLink { link } => em.remove_link(link),
            Request::Stats => match em.stats() {
                Some(stats) => return Reply::Stats(Box::new(stats)),
                None => Err("the data path has ended".into()),
            },
            // The EMs of this host are another's to end: that of an OM elsewhere waits for the next.
            Request::Shutdown if em.settings.om.is_remote() => {
                em.drop_functions();
                Ok(())
            }
            Request::Shutdown => {
                em.set_phase(Phase::Stop);
                Ok(())
            }
            Request::Rdma(request) => em.rdma(request, fds),
            Request::Adopt { function } => em.adopted(function, fds),
            Request::Hello(_)
            | Request::ReturnFunction { .. }
            | Request::ReturnLink(_)
            | Request::Returned => Err("an EM has no EMs".into()),
        };
        match done {
            Ok(()) => Reply::Ok,
            Err(why) => {
                log::warn!("a request of the OM failed: {why}");
                Reply::Failed(why)
            }
        }
    }

    fn event(&self, event: Event) {
        if let Event::ConfigChanged { function } = event {
            if let Some(endpoint) = lock(&self.0.functions).get(&function) {
                endpoint.config_changed();
            }
        }
    }

    fn image(&self, image: Image) {
        if !self.0.settings.om.is_remote() {
            return;
        }
        if let Err(error) = self.0.shadows.take(&image) {
            log::error!("what function {} presents is lost: {error}", image.function);
        }
    }

    fn register_read(&self, _address: u32) -> u32 {
        // Every register of the control side is the OM's.
        u32::MAX
    }

    fn register_write(&self, _address: u32, _byte_enable: u8, _value: u32) -> u32 {
        u32::MAX
    }

    fn down(&self, reason: &FabricError) {
        log::warn!("the OM is gone ({reason}); guests are served, and another OM is looked for");
        self.0.do_not_return();
        self.0.set_phase(Phase::Orphan);
        self.0.look_for_another();
    }

    fn heartbeat(&self) -> (u64, bool) {
        self.0.worker.progress()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
