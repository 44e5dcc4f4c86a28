//! The OM as one value: [`Om::start`] to [`Om::stop`].

use crate::conductor::{Conductor, Message, Places};
use crate::config::{Config, FunctionConfig};
use crate::control::{ControlError, FunctionControl};
use crate::fd_store::{FdStore, Inheritance, inherited};
use crate::function::Function;
use crate::northbound::server::Server;
use crate::peer::{Peer, PeerHandler};
use crate::presentation;
use crate::rdma::Subnet;
use crate::supervisor::Supervised;
use crate::vault::Vault;
use crate::windows::Windows;
use crate::wiring::Wiring;
use m2m_fabric::local::LocalListener;
use m2m_fabric::remote::RemoteListener;
use m2m_fabric::{Arrival, FabricError, Listener};
use smartep::listener::{ListenError, PathListener};
use smartep::shadow::ShadowReader;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a connection may stay without an EM's introduction.
const STRANGER: Duration = Duration::from_secs(5);

/// Why the OM could not start. Nothing is left behind then.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The folder for sockets cannot be made.
    #[error(
        "cannot make the folder {}: {source}; choose another `run_dir` or make it with the rights \
         you need",
        path.display()
    )]
    RunDir {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no program for the EMs.
    #[error("{} is not a program that can be run; build it, or name it with `em_binary`", .0.display())]
    EmBinary(PathBuf),
    /// A socket cannot be made.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The EMs' socket cannot be made.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// EMs of other hosts cannot connect.
    #[error("EMs of other hosts cannot connect to {address}: {source}")]
    Remote {
        /// Where they should.
        address: SocketAddr,
        /// Why not.
        source: FabricError,
    },
    /// A function cannot be presented.
    #[error("function {function}: {source}")]
    Presentation {
        /// Its name.
        function: String,
        /// Why.
        source: ControlError,
    },
    /// The system has no room for a thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// A running OM. Dropping it stops it.
#[derive(Debug)]
pub struct Om {
    config: Config,
    sender: Sender<Message>,
    northbound: Option<Server>,
    /// Where EMs connect to.
    m2m: Vec<Arc<dyn Listener>>,
    conductor: Option<JoinHandle<()>>,
    acceptors: Vec<JoinHandle<()>>,
}

impl Om {
    /// Makes the sockets, starts the EMs, and serves until [`stop`](Self::stop).
    ///
    /// # Errors
    /// [`StartError`], one sentence with the remedy.
    pub fn start(config: Config) -> Result<Self, StartError> {
        make_run_dir(&config.run_dir)?;
        let em_binary = em_binary(&config)?;
        let orphans = was_killed(&config);
        let (functions, listeners) = functions(&config, orphans)?;
        let m2m = listen(&config)?;
        let (sender, messages) = channel();
        let northbound = Server::start(&config.dpuctl_socket(), sender.clone())?;

        let places = Places {
            run_dir: config.run_dir.clone(),
            m2m_socket: config.m2m_socket(),
            em_binary,
        };
        let conductor = Conductor::new(
            places,
            functions.clone(),
            listeners,
            supervised(&config, &functions),
            (Wiring::new(&config), Subnet::new(&config)),
            messages,
            sender.clone(),
        );
        let conductor = match orphans {
            true => conductor.waiting_for_orphans(),
            false => conductor,
        };
        let mut om = Self {
            config,
            sender,
            northbound: Some(northbound),
            m2m,
            conductor: None,
            acceptors: Vec::new(),
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        for listener in om.m2m.clone() {
            let introductions = om.sender.clone();
            let acceptor = thread("m2m-accept")
                .spawn(move || accept(&*listener, &introductions))
                .map_err(StartError::Thread)?;
            om.acceptors.push(acceptor);
        }
        om.conductor = Some(
            thread("conductor")
                .spawn(move || conductor.run())
                .map_err(StartError::Thread)?,
        );
        Ok(om)
    }

    /// What it runs.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Ends the EMs in order, the unwilling ones by force, and removes the sockets. Takes a few
    /// seconds at most.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        let (done, stopped) = sync_channel(1);
        if self.conductor.is_some() && self.sender.send(Message::Stop(done)).is_ok() {
            let _ = stopped.recv();
        }
        self.m2m.iter().for_each(|listener| listener.close());
        self.northbound = None;
        let acceptors = std::mem::take(&mut self.acceptors);
        for thread in self.conductor.take().into_iter().chain(acceptors) {
            let _ = thread.join();
        }
    }
}

impl Drop for Om {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Where EMs connect to: the only place that knows how.
fn listen(config: &Config) -> Result<Vec<Arc<dyn Listener>>, StartError> {
    let local = LocalListener::bind(config.m2m_socket())?;
    let mut all: Vec<Arc<dyn Listener>> = vec![Arc::new(local)];
    if let Some(remote) = &config.remote {
        let address = remote.listen;
        let listener = RemoteListener::bind(address, remote.files.clone())
            .map_err(|source| StartError::Remote { address, source })?;
        log::info!("EMs of other hosts connect to {}", listener.address()?);
        all.push(Arc::new(listener));
    }
    Ok(all)
}

fn make_run_dir(path: &Path) -> Result<(), StartError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .map_err(|source| StartError::RunDir {
            path: path.to_owned(),
            source,
        })
}

/// The program of the EMs, if the OM starts any.
fn em_binary(config: &Config) -> Result<PathBuf, StartError> {
    let path = config.em_binary.clone().unwrap_or_else(|| {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name("em")
    });
    if !config.ems.iter().any(|em| em.managed) {
        return Ok(path);
    }
    let runs = std::fs::metadata(&path)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    if runs {
        Ok(path)
    } else {
        Err(StartError::EmBinary(path))
    }
}

/// Whether a former OM on the same folder ended without a word: its socket is there, and nobody listens. Its EMs may
/// live.
fn was_killed(config: &Config) -> bool {
    let path = config.m2m_socket();
    path.exists() && LocalListener::is_stale(&path)
}

fn listener(f: &FunctionConfig, orphans: bool) -> Result<PathListener, ListenError> {
    if f.dials() {
        return PathListener::of_front_end(&f.socket, !orphans);
    }
    match PathListener::bind(&f.socket) {
        Err(ListenError::InUse(path)) if orphans => Ok(PathListener::of_another(&path)),
        other => other,
    }
}

/// The functions and, in the same order, the sockets for their VMMs. With `orphans`, a path in use is taken for that
/// of an EM which will return.
fn functions(
    config: &Config,
    orphans: bool,
) -> Result<(Vec<Arc<Function>>, Vec<PathListener>), StartError> {
    let all = config
        .ems
        .iter()
        .enumerate()
        .flat_map(|(em, c)| c.functions.iter().map(move |f| (em, f)));
    let manager = FdStore::from_environment();
    let mut inherited = inherited();
    let (mut functions, mut listeners) = (Vec::new(), Vec::new());
    let mut windows = AllWindows::new(config, orphans);
    for (id, (em, f)) in (0..).zip(all) {
        let presentation = presentation::present(id, f);
        let spec = presentation.spec.clone();
        let (control, shadow) =
            FunctionControl::new(presentation).map_err(|source| StartError::Presentation {
                function: f.name.clone(),
                source,
            })?;
        let Inheritance {
            shadow: former,
            kept,
        } = inherited.remove(&f.name).unwrap_or_default();
        match former.map(ShadowReader::new) {
            Some(Ok(former)) => drop(control.restore(&former)),
            Some(Err(e)) => log::warn!("what {} presented is lost: {e}", f.name),
            None => {}
        }
        manager.keep_shadow(&f.name, shadow.as_fd());
        let vault = Vault::new(&f.name, manager, kept);
        let elsewhere = config.ems.get(em).is_some_and(|em| em.remote);
        listeners.push(match elsewhere {
            true => PathListener::of_another(&f.socket),
            false => listener(f, orphans)?,
        });
        functions.push(Arc::new(Function::new(
            f.clone(),
            em,
            spec,
            control,
            shadow,
            vault,
            windows.of(f)?,
        )));
    }
    for (name, left) in inherited {
        log::warn!("function {name}, which had a client, is not in the configuration any more");
        manager.forget_shadow(&name);
        left.kept
            .iter()
            .for_each(|(key, _)| manager.forget(&name, *key));
    }
    Ok((functions, listeners))
}

/// The windows of all VMs that have memory functions.
struct AllWindows<'c> {
    vms: BTreeSet<&'c str>,
    /// RDMA functions whose EMs may return from a former OM, with their VMs.
    returning: Vec<(&'c str, u32)>,
    started: BTreeMap<&'c str, Windows>,
}

impl<'c> AllWindows<'c> {
    fn new(config: &'c Config, orphans: bool) -> Self {
        let all = config.ems.iter().flat_map(|em| &em.functions);
        let memory = all.clone().filter(|f| f.kind.memory().is_some());
        let rdma = (0..)
            .zip(all)
            .filter(|(_, f)| orphans && f.kind.rdma().is_some());
        Self {
            vms: memory.filter_map(|f| f.vm.as_deref()).collect(),
            returning: rdma
                .filter_map(|(id, f)| Some((f.vm.as_deref()?, id)))
                .collect(),
            started: BTreeMap::new(),
        }
    }

    fn of(&mut self, function: &'c FunctionConfig) -> Result<Option<Windows>, StartError> {
        let Some(vm) = function.vm.as_deref().filter(|vm| self.vms.contains(vm)) else {
            return Ok(None);
        };
        if let Some(windows) = self.started.get(vm) {
            return Ok(Some(windows.clone()));
        }
        let returning = self.returning.iter().filter(|(of, _)| *of == vm);
        let returning = returning.map(|(_, id)| *id).collect();
        let windows = Windows::start(vm, returning).map_err(StartError::Thread)?;
        self.started.insert(vm, windows.clone());
        Ok(Some(windows))
    }
}

fn supervised(config: &Config, functions: &[Arc<Function>]) -> Vec<Supervised> {
    config
        .ems
        .iter()
        .enumerate()
        .map(|(em, c)| {
            let ids = functions.iter().filter(|f| f.em == em).map(|f| f.id());
            Supervised::new(c, ids.collect())
        })
        .collect()
}

/// Welcomes EMs until the listener is closed.
fn accept(listener: &dyn Listener, conductor: &Sender<Message>) {
    loop {
        match listener.accept() {
            Ok(pending) => {
                let conductor = conductor.clone();
                // The greeting waits for the peer, which must not keep out others.
                let spawned = std::thread::Builder::new()
                    .name("m2m-welcome".to_owned())
                    .spawn(move || welcome(pending, conductor));
                if let Err(e) = spawned {
                    log::error!("no thread for a connecting EM: {e}");
                }
            }
            Err(FabricError::Closed) => return,
            Err(e) => {
                log::error!("cannot accept an EM: {e}");
                if matches!(&e, FabricError::Io { source, .. } if source.kind() == ErrorKind::InvalidInput)
                {
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn welcome(pending: Box<dyn Arrival>, conductor: Sender<Message>) {
    let info = pending.peer();
    let peer = Peer::new(info, conductor);
    match pending.start(Arc::new(PeerHandler(peer.clone()))) {
        Ok(fabric) => {
            peer.started(fabric);
            peer.turn_away_strangers(STRANGER);
        }
        Err(e) => log::warn!("{info} did not become an EM: {e}"),
    }
}
