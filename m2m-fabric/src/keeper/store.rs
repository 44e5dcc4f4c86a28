//! The OM's side: what is kept of one function.

use super::Key;
use super::wire::{self, MAX_KEYS, Packet};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Descriptors kept of one function: connection, state, 2048 vectors, and files.
pub const MAX_KEPT: usize = 8192;
/// How long an EM that starts may leave its socket full.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is kept of one function.
#[derive(Debug, Default)]
pub struct Store {
    kept: BTreeMap<Key, OwnedFd>,
}

impl Store {
    /// Whether there is a connection that an EM can take over.
    pub fn has_connection(&self) -> bool {
        self.kept.contains_key(&Key::CONNECTION)
    }

    /// What is kept under a key.
    pub fn get(&self, key: Key) -> Option<BorrowedFd<'_>> {
        self.kept.get(&key).map(AsFd::as_fd)
    }

    /// How many descriptors there are.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Whether there is a descriptor with this key.
    pub fn has(&self, key: Key) -> bool {
        self.kept.contains_key(&key)
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.kept.keys().copied()
    }

    /// Sends everything and the end mark to the EM at the other end of `socket`.
    ///
    /// # Errors
    /// What the system said, when the EM ended or does not read.
    pub fn restore(&self, socket: &OwnedFd) -> Result<(), Errno> {
        let all: Vec<_> = self.kept.iter().map(|(k, fd)| (*k, fd.as_fd())).collect();
        for some in all.chunks(MAX_KEYS) {
            wire::send_keep(socket, some, PATIENCE)?;
        }
        wire::send_end(socket, PATIENCE)
    }

    /// Takes one packet of the EM; waits for it. `false` at the end of its process, when everything it ever sent
    /// was taken.
    ///
    /// # Errors
    /// What the system said, EPROTO for something that is no packet. Nothing that is kept can be relied on then.
    pub fn take(packet_from: &OwnedFd) -> Result<Option<Change>, Errno> {
        match wire::receive(packet_from, None)? {
            Some(Packet::Keep(kept)) => Ok(Some(Change::Keep(kept))),
            Some(Packet::Forget(keys)) => Ok(Some(Change::Forget(keys))),
            Some(Packet::Clear) => Ok(Some(Change::Clear)),
            Some(Packet::End) => Err(Errno::PROTO),
            None => Ok(None),
        }
    }

    /// Applies what [`Self::take`] took.
    ///
    /// # Errors
    /// E2BIG beyond [`MAX_KEPT`]. Nothing that is kept can be relied on then.
    pub fn apply(&mut self, change: Change) -> Result<(), Errno> {
        match change {
            Change::Keep(kept) => {
                self.kept.extend(kept);
                if self.kept.len() > MAX_KEPT {
                    return Err(Errno::TOOBIG);
                }
            }
            Change::Forget(keys) => keys.iter().for_each(|key| drop(self.kept.remove(key))),
            Change::Clear => self.kept.clear(),
        }
        Ok(())
    }
}

/// Something an EM wants kept or forgotten.
#[derive(Debug)]
pub enum Change {
    /// Hold these, in place of what had the same keys.
    Keep(Vec<(Key, OwnedFd)>),
    /// Close these.
    Forget(Vec<Key>),
    /// Close everything.
    Clear,
}
