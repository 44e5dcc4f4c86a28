//! The service manager's descriptor store (`FDSTORE=1` of sd_notify(3)): what is kept of the functions outlives the
//! OM here, also when its EMs die with it. A service manager that has such a store hands everything back to the next
//! OM (`LISTEN_FDS`, sd_listen_fds(3)). Without one nothing of this happens.
//!
//! A descriptor's name is the function's, a slash, and `shadow` or the hexadecimal number of its key.

mod inherited;

use m2m_fabric::keeper::{Change, Key, Store};
use sd_notify::NotifyState;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use inherited::inherited;

/// Variables of the environment that are for the OM alone.
pub const VARIABLES: [&str; 4] = [
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];
/// What follows the function's name in the name of its shadow.
const SHADOW: &str = "shadow";

/// The service manager as the OM of one process sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct FdStore {
    there: bool,
}

impl FdStore {
    /// That of this process, if a service manager started it.
    pub fn from_environment() -> Self {
        Self {
            there: std::env::var_os("NOTIFY_SOCKET").is_some(),
        }
    }

    /// Has a function's shadow kept in place of a former one.
    pub fn keep_shadow(&self, function: &str, shadow: BorrowedFd<'_>) {
        self.remove(&name(function, SHADOW));
        self.keep(&name(function, SHADOW), shadow);
    }

    /// Has a function's shadow kept no longer.
    pub fn forget_shadow(&self, function: &str) {
        self.remove(&name(function, SHADOW));
    }

    /// Follows what is about to happen to `store`, which holds what is kept of a function.
    pub fn follow(&self, function: &str, store: &Store, change: &Change) {
        if !self.there {
            return;
        }
        match change {
            Change::Keep(kept) => {
                for (key, fd) in kept {
                    if store.has(*key) {
                        self.remove(&key_name(function, *key));
                    }
                    self.keep(&key_name(function, *key), fd.as_fd());
                }
            }
            Change::Forget(keys) => keys.iter().for_each(|key| self.forget(function, *key)),
            Change::Clear => store.keys().for_each(|key| self.forget(function, key)),
        }
    }

    /// Has one descriptor of a function kept no longer.
    pub fn forget(&self, function: &str, key: Key) {
        self.remove(&key_name(function, key));
    }

    fn keep(&self, name: &str, fd: BorrowedFd<'_>) {
        let state = [NotifyState::FdStore, NotifyState::FdName(name)];
        self.said(sd_notify::notify_with_fds(&state, &[fd]));
    }

    fn remove(&self, name: &str) {
        if self.there {
            let state = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
            self.said(sd_notify::notify(&state));
        }
    }

    fn said(&self, result: std::io::Result<()>) {
        if let Err(error) = result {
            log::warn!("the service manager does not keep what it should: {error}");
        }
    }
}

fn name(function: &str, what: &str) -> String {
    format!("{function}/{what}")
}

fn key_name(function: &str, key: Key) -> String {
    name(function, &format!("{:x}", key.to_bits()))
}

/// What a service manager kept of one function.
#[derive(Debug, Default)]
pub struct Inheritance {
    /// The memory of its shadow.
    pub shadow: Option<OwnedFd>,
    /// What its EM gave.
    pub kept: Vec<(Key, OwnedFd)>,
}

/// Sorts descriptors by function. What has no name of this module is closed.
fn sort(descriptors: impl IntoIterator<Item = (String, OwnedFd)>) -> HashMap<String, Inheritance> {
    let mut all: HashMap<String, Inheritance> = HashMap::new();
    for (name, fd) in descriptors {
        let Some((function, what)) = name.split_once('/') else {
            log::warn!("descriptor {name} of the service manager is not the OM's");
            continue;
        };
        let of = all.entry(function.to_owned()).or_default();
        match (what, u64::from_str_radix(what, 16)) {
            (SHADOW, _) => of.shadow = Some(fd),
            (_, Ok(bits)) => of.kept.push((Key::from_bits(bits), fd)),
            _ => log::warn!("descriptor {name} of the service manager is not the OM's"),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_comes_back_under_the_function_and_key_it_had() {
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let names = [
            name("net0", SHADOW),
            key_name("net0", Key::CONNECTION),
            key_name("net0", Key::vector(7)),
            key_name("rdma0", Key::file(3)),
            "stranger".to_owned(),
            "net0/stranger".to_owned(),
        ];
        let all = sort(names.map(|name| (name, fd())));
        let keys = |f: &str| all[f].kept.iter().map(|(key, _)| *key).collect::<Vec<_>>();
        assert_eq!(keys("net0"), [Key::CONNECTION, Key::vector(7)]);
        assert_eq!(keys("rdma0"), [Key::file(3)]);
        assert!(all["net0"].shadow.is_some() && all["rdma0"].shadow.is_none());
        assert_eq!(all.len(), 2);
    }
}
