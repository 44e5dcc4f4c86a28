//! What the keeper holds of a function, as the endpoint needs it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use dot_iommu::DotError;
use m2m_fabric::keeper::{Keeper, KeeperError, Key, Restored};
use smartep::keep::{Keep, Kept};
use smartep::server::Resume;
use smartep::state::State;

use super::EndpointError;
use crate::rdma::kept::Kept as Objects;

/// The keeper of a function and what it had.
pub(super) struct Opened {
    pub(super) state: Arc<State>,
    pub(super) keeper: Arc<FunctionKeeper>,
    /// A client to take over.
    pub(super) resume: Option<Resume>,
    bar: Option<OwnedFd>,
    objects: Option<OwnedFd>,
}

impl Opened {
    /// The memory of a BAR that the client may have mapped: what was kept, or else what `make` makes.
    pub(super) fn bar(
        &mut self,
        make: impl FnOnce() -> Result<OwnedFd, DotError>,
    ) -> Result<OwnedFd, DotError> {
        if let Some(bar) = self.bar.take() {
            return Ok(bar);
        }
        let bar = make()?;
        if !self.keeper.keep(Kept::Bar, bar.as_fd()) {
            self.state.set_broken();
        }
        Ok(bar)
    }

    /// What is kept of an RDMA function's objects, and whether a former process left it. `None`: there is no memory
    /// for it.
    pub(super) fn objects(&mut self, id: u32) -> Option<(Arc<Objects>, bool)> {
        if let Some(fd) = self.objects.take() {
            match Objects::open(fd) {
                Ok(objects) => return Some((objects, true)),
                Err(error) => log::error!("function {id}: {error}"),
            }
        }
        let objects = match Objects::create() {
            Ok(objects) => objects,
            Err(error) => {
                log::error!("function {id}: {error}");
                return None;
            }
        };
        if !self.keeper.keep(Kept::Objects, objects.fd()) {
            self.state.set_broken();
        }
        Some((objects, false))
    }
}

/// The keeper under the names of the endpoint.
#[derive(Debug, Default)]
pub(super) struct FunctionKeeper(Keeper);

impl FunctionKeeper {
    /// Another OM keeps from now on.
    pub(super) fn move_to(&self, socket: OwnedFd) -> Result<(), KeeperError> {
        self.0.move_to(socket)
    }
}

impl Keep for FunctionKeeper {
    fn keep(&self, what: Kept, fd: BorrowedFd<'_>) -> bool {
        self.0.keep(key(what), fd)
    }

    fn forget(&self, what: Kept) -> bool {
        self.0.forget(key(what))
    }

    fn clear(&self) -> bool {
        self.0.clear()
    }
}

fn key(what: Kept) -> Key {
    match what {
        Kept::Connection => Key::CONNECTION,
        Kept::State => Key::STATE,
        Kept::Bar => Key::BAR,
        Kept::Objects => Key::OBJECTS,
        Kept::File(number) => Key::file(number),
        Kept::Vector(number) => Key::vector(number),
    }
}

/// Takes what is kept of function `id`, if there is a way to its keeper. What cannot be used is dropped, and with it the client's connection.
pub(super) fn open(id: u32, socket: Option<OwnedFd>) -> Result<Opened, EndpointError> {
    let (keeper, restored) = match socket.map(Keeper::attach) {
        None => (FunctionKeeper::default(), Restored::new()),
        Some(Ok((keeper, restored))) => (FunctionKeeper(keeper), restored),
        Some(Err(error)) => {
            log::error!("function {id}: nothing will survive this process: {error}");
            (FunctionKeeper::default(), Restored::new())
        }
    };
    let keeper = Arc::new(keeper);
    if let Some((state, resume, [bar, objects])) = take_over(id, restored) {
        return Ok(Opened {
            state: Arc::new(state),
            keeper,
            resume: Some(resume),
            bar,
            objects,
        });
    }
    let (state, memory) = State::create()?;
    if !keeper.clear() || !keeper.keep(Kept::State, memory.as_fd()) {
        state.set_broken();
    }
    Ok(Opened {
        state: Arc::new(state),
        keeper,
        resume: None,
        bar: None,
        objects: None,
    })
}

/// State, client, and the memory of a BAR and of objects.
type Left = (State, Resume, [Option<OwnedFd>; 2]);

fn take_over(id: u32, mut restored: Restored) -> Option<Left> {
    let connection = restored.remove(&Key::CONNECTION)?;
    let state = match State::open(&restored.remove(&Key::STATE)?) {
        Ok(state) => state,
        Err(error) => {
            log::error!("function {id}: its client is cut off: {error}");
            return None;
        }
    };
    let memory = [Key::BAR, Key::OBJECTS].map(|key| restored.remove(&key));
    let mut resume = Resume {
        stream: UnixStream::from(connection),
        files: HashMap::new(),
        vectors: Vec::new(),
    };
    for (key, fd) in restored {
        if let Some(number) = key.as_file() {
            resume.files.insert(number, fd);
        } else if let Some(number) = key.as_vector() {
            resume.vectors.push((number, fd));
        }
    }
    Some((state, resume, memory))
}
