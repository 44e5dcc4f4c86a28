//! What is kept of one function, and the thread that takes it from the EM.

use crate::fd_store::FdStore;
use m2m_fabric::keeper::{Change, Key, Store};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use smartep::state::State;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long an EM that was replaced may take to be gone for good.
const LAST_BREATH: Duration = Duration::from_secs(1);

/// Keeps a function's descriptors while EMs come and go.
#[derive(Debug, Default, Clone)]
pub struct Vault(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The function's name.
    name: String,
    inside: Mutex<Inside>,
    /// The store changed, or its EM left.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inside {
    store: Store,
    /// Counts the EMs; the last one's thread may change the store.
    owner: u64,
    /// Whether that EM still lives.
    alive: bool,
    /// Holds the same as `store`, for an OM after this one.
    manager: FdStore,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vault {
    /// That of the function `name`, with what the service manager kept of it.
    pub fn new(name: &str, manager: FdStore, kept: Vec<(Key, OwnedFd)>) -> Self {
        let mut inside = Inside {
            manager,
            ..Inside::default()
        };
        if let Err(error) = inside.store.apply(Change::Keep(kept)) {
            log::error!("what was kept of {name} is too much: {error}");
            inside.clear(name);
        }
        Self(Arc::new(Shared {
            name: name.to_owned(),
            inside: Mutex::new(inside),
            changed: Condvar::new(),
        }))
    }

    /// Whether the last EM left a connected client. Waits until everything that it sent was taken; one that does
    /// not end is not waited for long, and leaves nothing.
    pub fn has_connection(&self) -> bool {
        self.settled().store.has_connection()
    }

    /// Layout version of the state of a function that has a client.
    pub fn state_version(&self) -> Option<u32> {
        let inside = self.0.lock();
        let state = inside
            .store
            .get(Key::STATE)
            .filter(|_| inside.store.has_connection());
        state.and_then(State::version_of)
    }

    /// Descriptors that are kept now.
    pub fn len(&self) -> usize {
        self.0.lock().store.len()
    }

    /// Whether none are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of a BAR that the VMM maps; waits for it, since an EM that starts gives it before anybody knows.
    pub fn bar(&self, patience: Duration) -> Option<OwnedFd> {
        let inside = self.0.lock();
        let waited = self
            .0
            .changed
            .wait_timeout_while(inside, patience, |inside| {
                inside.store.get(Key::BAR).is_none()
            });
        let inside = waited.unwrap_or_else(PoisonError::into_inner).0;
        inside.store.get(Key::BAR)?.try_clone_to_owned().ok()
    }

    /// Closes everything that the last EM left.
    pub fn clear(&self) {
        self.settled().clear(&self.0.name);
    }

    /// The keeper's socket for the next EM, which gets everything that is kept.
    ///
    /// # Errors
    /// What the system said when it has no descriptors or threads.
    pub fn open(&self) -> std::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let mut inside = self.settled();
        inside.owner += 1;
        let (shared, owner) = (self.0.clone(), inside.owner);
        std::thread::Builder::new()
            .name(format!("keep-{}", self.0.name))
            .spawn(move || shared.serve(owner, &ours))?;
        inside.alive = true;
        Ok(theirs)
    }

    /// What is kept, when no EM changes it any more.
    fn settled(&self) -> MutexGuard<'_, Inside> {
        let waited = self
            .0
            .changed
            .wait_timeout_while(self.0.lock(), LAST_BREATH, |inside| inside.alive);
        let mut inside = waited.unwrap_or_else(PoisonError::into_inner).0;
        if inside.alive {
            // What it sends from now on is nobody's.
            inside.owner += 1;
            inside.alive = false;
            inside.clear(&self.0.name);
        }
        inside
    }
}

impl Inside {
    fn change(&mut self, name: &str, change: Change) -> Result<(), Errno> {
        self.manager.follow(name, &self.store, &change);
        self.store.apply(change)
    }

    fn clear(&mut self, name: &str) {
        // Clearing does not fail.
        let _ = self.change(name, Change::Clear);
    }
}

impl Shared {
    /// Gives an EM what there is, then takes what it sends until its process is gone.
    fn serve(&self, owner: u64, socket: &OwnedFd) {
        if let Err(error) = self.lock().store.restore(socket) {
            log::warn!("an EM does not take what was kept for it: {error}");
        }
        let result = loop {
            let change = match Store::take(socket) {
                Ok(Some(change)) => change,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            let mut inside = self.lock();
            if inside.owner != owner {
                return;
            }
            if let Err(error) = inside.change(&self.name, change) {
                break Err(error);
            }
            drop(inside);
            self.changed.notify_all();
        };
        let mut inside = self.lock();
        if inside.owner != owner {
            return;
        }
        if let Err(error) = result {
            log::error!("nothing is kept of a function any more: {error}");
            inside.clear(&self.name);
        }
        inside.alive = false;
        drop(inside);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use m2m_fabric::keeper::Keeper;
    use std::os::fd::AsFd;

    #[test]
    fn it_waits_for_the_last_words_of_an_em_and_gives_them_to_the_next() {
        let vault = Vault::default();
        let (keeper, restored) = Keeper::attach(vault.open().unwrap()).unwrap();
        assert!(restored.is_empty());
        assert!(keeper.keep(Key::CONNECTION, std::io::stdin().as_fd()));
        drop(keeper);
        assert!(vault.has_connection());
        let (_keeper, restored) = Keeper::attach(vault.open().unwrap()).unwrap();
        assert!(restored.contains_key(&Key::CONNECTION));
    }

    #[test]
    fn the_memory_of_a_bar_is_there_for_others_as_soon_as_an_em_gave_it() {
        let vault = Vault::default();
        assert!(vault.bar(Duration::ZERO).is_none());
        let (keeper, _) = Keeper::attach(vault.open().unwrap()).unwrap();
        assert!(keeper.keep(Key::BAR, std::io::stdin().as_fd()));
        assert!(vault.bar(Duration::from_secs(20)).is_some());
    }

    #[test]
    fn an_em_that_does_not_end_leaves_nothing() {
        let vault = Vault::default();
        let (keeper, _) = Keeper::attach(vault.open().unwrap()).unwrap();
        assert!(keeper.keep(Key::CONNECTION, std::io::stdin().as_fd()));
        let (_next, restored) = Keeper::attach(vault.open().unwrap()).unwrap();
        assert!(restored.is_empty());
        keeper.keep(Key::STATE, std::io::stdin().as_fd());
        assert!(vault.is_empty());
    }
}
