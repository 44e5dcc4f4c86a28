//! What queues and commands both look at: addresses of datagrams, lists of regions that a work request registers.

use crate::rdma::verbs::{Destination, MemKey};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Queue pairs have numbers below this.
pub(super) const MAX_QPS: u32 = 4096;
/// Completion queues and regions have numbers below this: what the driver makes of [`MAX_QPS`].
pub(super) const MAX_CQS: u32 = 2 * MAX_QPS;
/// See [`MAX_CQS`].
pub(super) const MAX_REGIONS: u32 = 2 * MAX_QPS;
/// Address handles have numbers below this.
pub(super) const MAX_ADDRESSES: u32 = 1 << 10;
/// The key by which the guest's kernel names all memory, above all keys of regions.
pub(super) const DMA_KEY: MemKey = MemKey(0xffff_ff00);

/// A kernel's queue pair has a region of all memory, whose key this is: [`DMA_KEY`] is known to no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DmaKey(MemKey);

impl DmaKey {
    /// Of a queue pair.
    pub(super) fn of(qpn: u32) -> Self {
        Self(MemKey((MAX_REGIONS + qpn) << 8))
    }

    /// The key of the region.
    pub(super) fn key(self) -> MemKey {
        self.0
    }

    /// Which key a work request means that names `key`.
    pub(super) fn meant(own: Option<Self>, key: MemKey) -> MemKey {
        match own {
            Some(own) if key == DMA_KEY => own.0,
            // Those regions have no name of their own.
            _ if (MAX_REGIONS..MAX_REGIONS + MAX_QPS).contains(&(key.0 >> 8)) => DMA_KEY,
            _ => key,
        }
    }
}

/// Where datagrams of an address handle go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) pd: u32,
    pub(super) to: Destination,
    pub(super) source_gid: u8,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) service_level: u8,
}

/// A page list in guest memory, for a region that a work request registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageTable {
    /// Bus address.
    pub(super) at: u64,
    /// Entries of 8 bytes.
    pub(super) count: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// By number.
    pub(super) addresses: HashMap<u32, Address>,
    /// By index of the region.
    pub(super) page_tables: HashMap<u32, PageTable>,
}

/// [`Tables`] of one function, all of whose users are on the data path.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedTables(Arc<Mutex<Tables>>);

impl SharedTables {
    /// The tables.
    pub(super) fn get(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
