//! Receive-side scaling and hash reports (virtio 1.3 §5.1.6.5.6.4 and §5.1.6.5.7).

use super::super::hash::{Hash, Hasher, types};
use crate::flow::toeplitz::{KEY_BYTES, Toeplitz};

/// Entries of the indirection table at the most (`rss_max_indirection_table_length`).
pub const MAX_TABLE: usize = 128;

/// Which queue pair a hash leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indirection {
    /// A power of two of queue pairs.
    table: Vec<u16>,
    /// For frames without a hash.
    unclassified: u16,
}

impl Indirection {
    /// The queue pair of a frame.
    pub fn pair(&self, hash: Hash) -> u16 {
        if !hash.is_there() {
            return self.unclassified;
        }
        let mask = self.table.len().wrapping_sub(1);
        let entry = self.table.get(hash.value as usize & mask);
        entry.copied().unwrap_or(self.unclassified)
    }
}

/// `struct virtio_net_rss_config`.
pub(super) struct RssConfig {
    pub(super) hasher: Hasher,
    pub(super) indirection: Indirection,
    /// Queue pairs in use.
    pub(super) pairs: u16,
}

/// `None`: it makes no sense for a device with `max_pairs` queue pairs.
pub(super) fn rss(data: &[u8], max_pairs: u16) -> Option<RssConfig> {
    let mut data = data;
    let kinds = u32::from_le_bytes(take(&mut data)?);
    let mask = usize::from(u16::from_le_bytes(take(&mut data)?));
    let unclassified = u16::from_le_bytes(take(&mut data)?);
    let len = mask + 1;
    if len > MAX_TABLE || !len.is_power_of_two() {
        return None;
    }
    let table = (0..len).map(|_| take(&mut data).map(u16::from_le_bytes));
    let table: Vec<u16> = table.collect::<Option<_>>()?;
    let transmit = u16::from_le_bytes(take(&mut data)?);
    let receive = table.iter().chain([&unclassified]).copied().max()?;
    if receive >= max_pairs || transmit == 0 || transmit > max_pairs {
        return None;
    }
    Some(RssConfig {
        hasher: hasher(kinds, data)?,
        indirection: Indirection {
            table,
            unclassified,
        },
        pairs: transmit.max(receive + 1),
    })
}

/// `struct virtio_net_hash_config`.
pub(super) fn hash(data: &[u8]) -> Option<Hasher> {
    let mut data = data;
    let kinds = u32::from_le_bytes(take(&mut data)?);
    let _reserved: [u8; 8] = take(&mut data)?;
    hasher(kinds, data)
}

/// Length of the key and the key.
fn hasher(kinds: u32, data: &[u8]) -> Option<Hasher> {
    let (len, data) = data.split_first()?;
    let given = data.get(..usize::from(*len))?;
    if kinds & !types::ALL != 0 {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    key.get_mut(..given.len())?.copy_from_slice(given);
    Some(Hasher::new(kinds, Toeplitz::new(&key)))
}

fn take<const N: usize>(data: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = data.split_first_chunk::<N>()?;
    *data = rest;
    Some(*first)
}
