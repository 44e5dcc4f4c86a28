//! Notes of a client's maps for whoever serves it next.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::keep::{Keep, Kept};
use crate::state::{MapRecord, State};

/// Where maps are noted: slots of a [`State`], and files with a [`Keep`]. Without either, nowhere.
#[derive(Default)]
pub(crate) struct Record {
    place: Option<(Arc<State>, Arc<dyn Keep>)>,
    /// Slot and size by address.
    used: BTreeMap<u64, (u32, u64)>,
    /// Slots below `end` that are free.
    free: Vec<u32>,
    end: u32,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Record({} maps)", self.used.len())
    }
}

impl Record {
    pub(super) fn new(state: Arc<State>, keep: Arc<dyn Keep>) -> Self {
        Self {
            place: Some((state, keep)),
            ..Self::default()
        }
    }

    /// Takes over the notes of a former process.
    pub(super) fn resume(&mut self, maps: &[(u32, MapRecord)]) {
        self.used = maps
            .iter()
            .map(|(slot, map)| (map.address, (*slot, map.size)))
            .collect();
        self.end = maps.iter().map(|(slot, _)| slot + 1).max().unwrap_or(0);
        let taken: HashSet<u32> = maps.iter().map(|(slot, _)| *slot).collect();
        self.free = (0..self.end).filter(|s| !taken.contains(s)).collect();
    }

    /// Whether exactly this range is noted.
    pub(super) fn has(&self, address: u64, size: u64) -> bool {
        self.used
            .get(&address)
            .is_some_and(|(_, noted)| *noted == size)
    }

    /// A map is there; `new`: with the first range of this file.
    pub(super) fn add(&mut self, map: &MapRecord, new: Option<&OwnedFd>) {
        let Some((state, keep)) = &self.place else {
            return;
        };
        let kept = match (map.file, new) {
            (Some(file), Some(fd)) => keep.keep(Kept::File(file), fd.as_fd()),
            _ => true,
        };
        let slot = self.free.pop().unwrap_or(self.end);
        let noted = state.set_map(slot, map);
        if noted {
            self.end = self.end.max(slot + 1);
            self.used.insert(map.address, (slot, map.size));
        }
        if !kept || !noted {
            state.set_broken();
        }
    }

    /// The maps inside a range are gone, and with them files.
    pub(super) fn remove(&mut self, start: u64, len: u64, files: &[u32]) {
        let Some((state, keep)) = &self.place else {
            return;
        };
        let last = start.saturating_add(len - 1);
        let gone: Vec<u64> = self.used.range(start..=last).map(|(a, _)| *a).collect();
        for address in gone {
            if let Some((slot, _)) = self.used.remove(&address) {
                state.remove_map(slot);
                self.free.push(slot);
            }
        }
        for file in files {
            if !keep.forget(Kept::File(*file)) {
                state.set_broken();
            }
        }
    }

    /// Nothing is noted any more; whoever says so clears the state and what is kept.
    pub(super) fn clear(&mut self) {
        self.used.clear();
        self.free.clear();
        self.end = 0;
    }
}
