//! The data side of an RDMA function: what any has for the OM, for memory and windows, and on the data path.
//!
//! Registers and commands are the face's: [`mlx5`] and [`erdma`].

mod erdma;
mod mlx5;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use dot_iommu::{DotReader, DotTable, HostMapping};
use m2m_fabric::proto::{
    FunctionState, RdmaDestination, RdmaFace, RdmaLinkLayer, RdmaPath, RdmaRequest, RdmaSpec,
    Reply, Request, WindowSpec,
};
use smartep::DataSide;
use smartep::config::ConfigState;
use smartep::dma::MessageDma;
use smartep::irq::Irqs;
use smartep::state::{Section, State};

use super::windows::Windows;
use super::{EndpointError, FunctionData, Seat, lock, report};
use crate::control::OmLink;
use crate::rdma::engine::Context;
use crate::rdma::fabric::Wires;
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::front::mlx5::MappedPages;
use crate::rdma::front::{self, Device};
use crate::rdma::function::RdmaFunction;
use crate::rdma::kept::{Kept, KeptError};
use crate::rdma::verbs::{Destination, Path, Peer};

/// How long the OM may take; a driver waits for a command for a minute, a VMM for an access 5 s.
const OM_PATIENCE: Duration = Duration::from_secs(1);
/// How long peers may take to be done with memory that a VMM takes away.
const PEER_PATIENCE: Duration = Duration::from_secs(1);
/// The same for a window: the guest's write waits for it.
const WINDOW_PATIENCE: Duration = Duration::from_millis(700);
/// Destinations of datagrams that the OM is asked for at once.
const QUESTIONS: usize = 64;

/// What outlives the process.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) state: Arc<State>,
    /// `None`: there is no memory for objects.
    pub(super) objects: Option<Arc<Kept>>,
    /// Whether a former process left them.
    pub(super) found: bool,
    /// Whether there is a client that a former process served.
    pub(super) resumes: bool,
}

impl Memory {
    /// Notes the registers. A write after which this was not done is done again by the next process.
    fn note(&self, registers: &[u8]) {
        if !self.state.save(Section::Registers, registers) {
            self.state.set_broken();
        }
    }

    /// The objects that a former process left.
    fn found(&self) -> Option<Arc<Kept>> {
        self.objects.clone().filter(|_| self.found)
    }
}

/// What the driver writes to and reads from.
#[derive(Debug)]
enum Face {
    Mlx5(mlx5::Face),
    Erdma(erdma::Face),
}

/// See the module.
#[derive(Debug)]
pub(super) struct RdmaData {
    seat: Seat,
    spec: RdmaSpec,
    face: Face,
    memory: DotReader,
    windows: Mutex<Windows>,
    connected: Mutex<bool>,
    /// What the driver was last known to be.
    running: Mutex<bool>,
    kept: Memory,
    /// Files that the peers have, by number. Whoever tells the OM of addresses and files has it locked, so that it
    /// hears of changes in order; what it is told of is true before.
    shared: Mutex<BTreeMap<u64, OwnedFd>>,
}

impl RdmaData {
    /// Puts the function on the data path; `pages`: the doorbells that the VMM maps, if it does.
    pub(super) fn new(
        seat: Seat,
        spec: RdmaSpec,
        table: &DotTable,
        irqs: Arc<Irqs>,
        pages: Option<MappedPages>,
        kept: Memory,
    ) -> Result<Self, EndpointError> {
        let (id, own) = (seat.id, Peer(seat.id));
        let doorbells = Arc::new(Doorbells::default());
        let (mut device, face) = match spec.face {
            RdmaFace::Mlx5 => {
                let device = mlx5::device(&spec, own, irqs, &doorbells, pages);
                let face = mlx5::Face::new(doorbells);
                (Device::Mlx5(device), Face::Mlx5(face))
            }
            RdmaFace::Erdma => {
                let device = front::erdma::Device::new(spec.clone(), own, irqs, doorbells.clone());
                let face = erdma::Face::new(&spec, doorbells);
                (Device::Erdma(Box::new(device)), Face::Erdma(face))
            }
        };
        match &kept.objects {
            Some(objects) if !kept.resumes => {
                objects.clear();
                device.keep_in(objects.clone());
            }
            _ => {}
        }
        let wires = Wires::new(own, asker(&seat)?);
        let windows = Windows::default();
        let memory = table.reader().with_windows(&windows.reader());
        let mut function = RdmaFunction::new(id, device, wires, memory);
        if kept.resumes {
            function = function.resuming(spec.windows);
        }
        function.addresses_changed();
        seat.worker
            .run(move |state| state.rdma.insert(id, function))
            .ok_or(EndpointError::Worker)?;
        Ok(Self {
            seat,
            spec,
            face,
            memory: table.reader(),
            windows: Mutex::new(windows),
            connected: Mutex::new(false),
            running: Mutex::new(false),
            kept,
            shared: Mutex::default(),
        })
    }

    fn tell_gids(&self, gids: Vec<(u16, [u8; 16])>) {
        let function = self.seat.id;
        let _order = lock(&self.shared);
        for (index, gid) in gids {
            let request = RdmaRequest::SetGid {
                function,
                index,
                gid,
            };
            self.tell(request, &[]);
        }
    }

    /// No object is left, and those that are made from now on outlive the process.
    fn begin_anew(&self) {
        let objects = self.kept.objects.clone();
        self.on_function(move |f| {
            f.reset();
            if let Some(objects) = objects {
                objects.clear();
                f.with(|device, _| device.keep_in(objects));
            }
        });
    }

    /// Runs on the data path, when the function is there.
    fn on_function<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut RdmaFunction) -> R + Send + 'static,
    ) -> Option<R> {
        let id = self.seat.id;
        let done = self
            .seat
            .worker
            .run(move |state| state.rdma.get_mut(&id).map(act));
        if done.is_none() {
            log::error!("function {id}: the data path has ended");
        }
        done.flatten()
    }

    /// Asks the OM for the way to a destination, if there is one.
    fn resolve(&self, to: Option<Destination>) -> Option<Path> {
        resolve(&self.seat.om, self.seat.id, &to?)
    }

    /// Does something with the device after which it may have other addresses, or be in another state.
    fn change_device(&self, act: impl FnOnce(&mut RdmaFunction) + Send + 'static) {
        let outcome = self.on_function(move |function| {
            act(function);
            let (running, gids) =
                function.with(|device, _| (device.running(), device.take_gid_changes()));
            if !gids.is_empty() {
                function.addresses_changed();
            }
            function.wires.flush();
            (running, gids)
        });
        if let Some((running, gids)) = outcome {
            self.tell_gids(gids);
            self.report_running(running);
        }
    }

    /// Makes the objects again that a former process left, by `act`; answers whether those are all that the driver
    /// relies on.
    fn restore(
        &self,
        act: impl FnOnce(&mut Device, &mut Context<'_>) -> Result<(), KeptError> + Send + 'static,
    ) -> bool {
        let restored = self.on_function(move |f| {
            f.restore(act)?;
            Ok::<_, KeptError>(f.with(|device, _| (device.running(), device.take_gid_changes())))
        });
        match restored {
            Some(Ok((running, gids))) => {
                self.tell_gids(gids);
                *lock(&self.running) = running;
                true
            }
            Some(Err(error)) => {
                log::error!("function {}: {error}", self.seat.id);
                false
            }
            None => false,
        }
    }

    fn reset_registers(&self) {
        match &self.face {
            Face::Mlx5(face) => face.reset(),
            Face::Erdma(face) => face.reset(),
        }
    }

    fn report_running(&self, running: bool) {
        let before = std::mem::replace(&mut *lock(&self.running), running);
        if before != running {
            let state = match running {
                true => FunctionState::Running,
                false => FunctionState::Connected,
            };
            report(&self.seat.om, self.seat.id, state);
        }
    }

    fn stop_device(&self) {
        self.on_function(RdmaFunction::reset);
        self.drain(PEER_PATIENCE);
        self.report_running(false);
    }

    /// Waits until nobody uses this function's memory on account of what was sent until now. `false`: somebody does not
    /// get done in time.
    fn drain(&self, patience: Duration) -> bool {
        let Some(sent) = self.on_function(|f| {
            f.wires.flush();
            f.wires.sent()
        }) else {
            return true;
        };
        let begin = Instant::now();
        loop {
            let sent = sent.clone();
            if self.on_function(move |f| f.wires.is_done(&sent)) != Some(false) {
                return true;
            }
            if begin.elapsed() > patience {
                log::error!(
                    "function {}: a peer does not get done with its memory",
                    self.seat.id
                );
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Gives memory of other devices to the peers, like the guest's own.
    fn share_windows(&self) {
        let unshared = lock(&self.windows).take_unshared();
        for (mapping, fd) in unshared {
            self.memory_added(&mapping, fd.as_fd());
        }
    }

    /// A file is not used any more.
    fn unshare(&self, file: u64) {
        let (function, own) = (self.seat.id, Peer(self.seat.id));
        self.on_function(move |f| f.wires.remove_file(own, Some(file)));
        let mut shared = lock(&self.shared);
        shared.remove(&file);
        let file = Some(file);
        self.tell(RdmaRequest::UnshareMemory { function, file }, &[]);
    }

    /// Tells the OM what there is now, files aside that it was not told of before.
    fn hold(&self, shared: &BTreeMap<u64, OwnedFd>) {
        let Some((gids, paths)) = self.on_function(|f| (f.gids(), f.paths())) else {
            return;
        };
        let path = |path: Path| RdmaPath {
            peer: path.peer.0,
            generation: path.generation,
        };
        let request = RdmaRequest::Holds {
            function: self.seat.id,
            // Those of an InfiniBand port are the OM's.
            gids: match self.spec.link {
                RdmaLinkLayer::Ethernet => gids,
                RdmaLinkLayer::Infiniband => Vec::new(),
            },
            paths: paths.into_iter().map(path).collect(),
            files: shared.keys().copied().collect(),
        };
        self.tell(request, &[]);
    }

    /// Tells the OM something. That it is away is no error: the next one is told everything.
    fn tell(&self, request: RdmaRequest, fds: &[BorrowedFd<'_>]) {
        let Some(om) = self.seat.om.get() else {
            return;
        };
        match om.call(Request::Rdma(request), fds, OM_PATIENCE) {
            Ok(Reply::Ok) => {}
            Ok(other) => log::warn!("function {}: the OM answers {other:?}", self.seat.id),
            Err(e) => log::warn!("function {}: the OM does not answer: {e}", self.seat.id),
        }
    }
}

/// Asks the OM for the way to a destination.
fn resolve(om: &OmLink, function: u32, to: &Destination) -> Option<Path> {
    let to = RdmaDestination {
        lid: to.lid,
        gid: to.gid,
        mac: to.mac,
    };
    let request = Request::Rdma(RdmaRequest::Resolve { function, to });
    match om.get()?.call(request, &[], OM_PATIENCE) {
        Ok(Reply::Path(path)) => Some(Path {
            peer: Peer(path.peer),
            generation: path.generation,
        }),
        Ok(Reply::Failed(why)) => {
            log::info!("function {function} is refused a path: {why}");
            None
        }
        Ok(other) => {
            log::warn!("function {function}: the OM answers {other:?}");
            None
        }
        Err(e) => {
            log::warn!("function {function}: the OM does not answer: {e}");
            None
        }
    }
}

/// A thread that asks the OM, so that the data path need not wait. It ends with the function.
fn asker(seat: &Seat) -> std::io::Result<crate::rdma::fabric::Ask> {
    let (questions, inbox) = mpsc::sync_channel::<Destination>(QUESTIONS);
    let Seat { id, worker, om } = seat.clone();
    std::thread::Builder::new()
        .name(format!("paths-{id}"))
        .spawn(move || {
            for to in inbox {
                let path = resolve(&om, id, &to);
                let told = worker.run(move |state| {
                    if let Some(function) = state.rdma.get_mut(&id) {
                        function.wires.answered(to, path);
                    }
                });
                if told.is_none() {
                    return;
                }
            }
        })?;
    // With too many questions at once, one is asked again later.
    Ok(Box::new(move |to| {
        let _ = questions.try_send(to);
    }))
}

impl DataSide for RdmaData {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if region == self.spec.bar {
            match &self.face {
                Face::Mlx5(face) => face.read(offset, data),
                Face::Erdma(face) => face.read(offset, data),
            }
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if region != self.spec.bar {
            return;
        }
        match &self.face {
            Face::Mlx5(face) => face.write(self, offset, data),
            Face::Erdma(face) => face.write(self, offset, data),
        }
    }

    fn config_changed(&self, old: ConfigState, new: ConfigState) {
        if old.bus_master != new.bus_master {
            self.on_function(move |f| f.set_bus_master(new.bus_master));
            if !new.bus_master {
                self.drain(PEER_PATIENCE);
            }
        }
    }

    fn reset(&self) {
        self.reset_registers();
        self.stop_device();
        match &self.face {
            Face::Mlx5(face) => face.note(&self.kept),
            Face::Erdma(face) => face.note(&self.kept),
        }
    }

    fn connected(&self, _dma: Arc<MessageDma>) {
        *lock(&self.connected) = true;
        if self.kept.resumes {
            // The client that was to be taken over is gone.
            self.begin_anew();
        }
        self.share_windows();
        report(&self.seat.om, self.seat.id, FunctionState::Connected);
    }

    fn resumed(&self, _dma: Arc<MessageDma>, state: ConfigState) {
        *lock(&self.connected) = true;
        self.share_windows();
        self.on_function(move |f| f.set_bus_master(state.bus_master));
        let taken_over = match &self.face {
            Face::Mlx5(face) => face.take_over(self),
            Face::Erdma(face) => face.take_over(self),
        };
        let now = match *lock(&self.running) {
            true => FunctionState::Running,
            false => FunctionState::Connected,
        };
        if taken_over {
            self.hold(&lock(&self.shared));
        }
        report(&self.seat.om, self.seat.id, now);
    }

    fn disconnected(&self) {
        self.reset_registers();
        self.stop_device();
        *lock(&self.connected) = false;
        lock(&self.windows).forget_shared();
        let (function, own) = (self.seat.id, Peer(self.seat.id));
        self.on_function(move |f| f.wires.remove_file(own, None));
        {
            let mut shared = lock(&self.shared);
            shared.clear();
            self.tell(
                RdmaRequest::UnshareMemory {
                    function,
                    file: None,
                },
                &[],
            );
        }
        self.seat.om.reset_function(function);
        report(&self.seat.om, function, FunctionState::Waiting);
    }

    fn memory_added(&self, mapping: &Arc<HostMapping>, fd: BorrowedFd<'_>) {
        let (own, number, mapping) = (Peer(self.seat.id), mapping.id(), mapping.clone());
        if self.on_function(move |f| f.wires.add_file(own, number, mapping)) == Some(false) {
            log::warn!(
                "function {}: its memory lies in too many files; some of it cannot be used for RDMA",
                self.seat.id
            );
            return;
        }
        let function = self.seat.id;
        let mut shared = lock(&self.shared);
        match fd.try_clone_to_owned() {
            Ok(copy) => drop(shared.insert(number, copy)),
            Err(e) => log::error!("function {function}: another OM will not know its memory: {e}"),
        }
        self.tell(
            RdmaRequest::ShareMemory {
                function,
                file: number,
            },
            &[fd],
        );
    }

    fn memory_removed(&self, gone: &[u64]) {
        self.drain(PEER_PATIENCE);
        gone.iter().for_each(|file| self.unshare(*file));
    }
}

impl FunctionData for RdmaData {
    fn shadow_changed(&self) {}

    fn is_connected(&self) -> bool {
        *lock(&self.connected)
    }

    fn state(&self) -> FunctionState {
        match (*lock(&self.connected), *lock(&self.running)) {
            (false, _) => FunctionState::Waiting,
            (true, false) => FunctionState::Connected,
            (true, true) => FunctionState::Running,
        }
    }

    fn add_window(&self, window: WindowSpec, fd: OwnedFd) -> Result<(), String> {
        let added = lock(&self.windows).add(window, fd);
        if let Some(former) = added.map_err(|e| e.to_string())? {
            self.unshare(former);
        }
        if self.is_connected() {
            self.share_windows();
        }
        Ok(())
    }

    fn remove_window(&self, device: Option<u32>, generation: u64) -> Result<(), String> {
        let removed = lock(&self.windows).remove(device, generation);
        if !removed.map_err(|e| e.to_string())? || self.drain(WINDOW_PATIENCE) {
            return Ok(());
        }
        Err("a peer does not get done with a window's memory".to_owned())
    }

    fn new_om(&self) {
        lock(&self.windows).new_om();
    }

    fn tell_all(&self) {
        let shared = lock(&self.shared);
        let function = self.seat.id;
        for (file, fd) in &*shared {
            let file = *file;
            self.tell(RdmaRequest::ShareMemory { function, file }, &[fd.as_fd()]);
        }
        self.hold(&shared);
    }

    fn leave(&self) {
        let id = self.seat.id;
        self.seat.worker.run(move |state| state.rdma.remove(&id));
    }
}
