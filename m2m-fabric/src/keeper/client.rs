//! The EM's side.

use super::Key;
use super::wire::{self, MAX_KEYS, Packet};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the keeper may take to read. A VMM waits for what is to be kept, and gives up after 5 s.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the keeper may take to send what it has.
const RESTORE: Duration = Duration::from_secs(5);

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The system refused, or the OM ended.
    #[error("the keeper cannot be reached: {0}")]
    System(#[from] Errno),
    /// Something else came than what was kept.
    #[error("the keeper does not follow its protocol")]
    Protocol,
}

/// What was kept, in the order of the keys.
pub type Restored = BTreeMap<Key, OwnedFd>;

/// Gives descriptors of one function to the OM.
#[derive(Debug, Default)]
pub struct Keeper {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    socket: Option<OwnedFd>,
    /// Copies of what is kept, for an OM that comes later.
    kept: BTreeMap<Key, OwnedFd>,
}

impl Keeper {
    /// Takes what an earlier EM gave, and the way to give more.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn attach(socket: OwnedFd) -> Result<(Self, Restored), KeeperError> {
        let deadline = Instant::now() + RESTORE;
        let mut restored = Restored::new();
        loop {
            match wire::receive(&socket, Some(deadline))? {
                Some(Packet::Keep(kept)) => restored.extend(kept),
                Some(Packet::End) => break,
                _ => return Err(KeeperError::Protocol),
            }
        }
        let mut copies = BTreeMap::new();
        for (key, fd) in &restored {
            copies.insert(*key, copy(fd.as_fd())?);
        }
        let state = Mutex::new(State {
            socket: Some(socket),
            kept: copies,
        });
        Ok((Self { state }, restored))
    }

    /// Another OM keeps from now on: gives it everything.
    ///
    /// # Errors
    /// [`KeeperError`]; nothing is kept then.
    pub fn move_to(&self, socket: OwnedFd) -> Result<(), KeeperError> {
        let mut state = self.lock();
        state.socket = None;
        let first = wire::receive(&socket, Some(Instant::now() + RESTORE))?;
        if !matches!(first, Some(Packet::End)) {
            return Err(KeeperError::Protocol);
        }
        let all: Vec<_> = state.kept.iter().map(|(k, fd)| (*k, fd.as_fd())).collect();
        for some in all.chunks(MAX_KEYS) {
            wire::send_keep(&socket, some, PATIENCE)?;
        }
        state.socket = Some(socket);
        Ok(())
    }

    /// Has `fd` kept, in place of what had the same key. When this answers `true` it outlives the process. `false`:
    /// the keeper is gone or missed something, and what it has must not be relied on.
    pub fn keep(&self, key: Key, fd: BorrowedFd<'_>) -> bool {
        let mut state = self.lock();
        match copy(fd) {
            Ok(fd) => drop(state.kept.insert(key, fd)),
            Err(error) => {
                log::warn!("there is no room for another descriptor: {error}");
                return false;
            }
        }
        state.send(|socket| wire::send_keep(socket, &[(key, fd)], PATIENCE))
    }

    /// Has a descriptor kept no longer. Answers as [`Self::keep`].
    pub fn forget(&self, key: Key) -> bool {
        let mut state = self.lock();
        state.kept.remove(&key).is_none()
            || state.send(|socket| wire::send_forget(socket, &[key], PATIENCE))
    }

    /// Has nothing kept any longer. Answers as [`Self::keep`].
    pub fn clear(&self) -> bool {
        let mut state = self.lock();
        state.kept.clear();
        state.send(|socket| wire::send_clear(socket, PATIENCE))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A keeper that missed something gets nothing more.
    fn send(&mut self, send: impl FnOnce(&OwnedFd) -> Result<(), Errno>) -> bool {
        let Some(socket) = &self.socket else {
            return false;
        };
        let sent = send(socket);
        if let Err(error) = sent {
            log::warn!("the keeper is gone: {error}");
            self.socket = None;
        }
        sent.is_ok()
    }
}

fn copy(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(fd, 0)
}
