//! The driver's side of a virtqueue, split (virtio 1.3 §2.7) or packed (§2.8), with every field open to misuse.

pub mod packed;

use crate::memory::GuestMemory;
use crate::virtio_net::features::{EVENT_IDX, IN_ORDER, RING_PACKED};
use crate::{Error, Result};
use packed::{Area, Packed};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Descriptor flag: another one follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes.
pub const WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Longest chain that [`Ring::add`] puts into an indirect table.
pub const TABLE_ENTRIES: u16 = 20;

/// A buffer of guest memory: address and bytes.
pub type Buffer = (u64, u32);

/// What the device has, in order, and what it gave back of a batch.
type Order = (VecDeque<u16>, VecDeque<(u16, u32)>);

/// One virtqueue.
#[derive(Debug)]
pub struct Ring {
    memory: Arc<GuestMemory>,
    /// Index of the queue in the device.
    pub index: u16,
    /// Entries.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the available ring, or of the driver's events.
    pub available: u64,
    /// Guest address of the used ring, or of the device's events.
    pub used: u64,
    /// Places of a packed ring.
    pub packed: Option<Packed>,
    tables: u64,
    free: Vec<u16>,
    chains: HashMap<u16, Vec<u16>>,
    /// Available index as published last.
    pub next_available: u16,
    /// Used index up to which buffers were taken back.
    pub last_used: u16,
    kicked_at: u16,
    event_idx: bool,
    /// With IN_ORDER.
    in_order: Option<Order>,
}

impl Ring {
    /// An empty ring of `size` entries in fresh guest memory, as these features have it.
    ///
    /// # Errors
    /// The guest's memory is used up.
    pub fn new(memory: &Arc<GuestMemory>, index: u16, size: u16, features: u64) -> Result<Self> {
        let entries = u64::from(size);
        let packed = features & RING_PACKED != 0;
        Ok(Self {
            memory: Arc::clone(memory),
            index,
            size,
            descriptors: memory.allocate(16 * entries, 16)?,
            available: memory.allocate(6 + 2 * entries, 4)?,
            used: memory.allocate(6 + 8 * entries, 4)?,
            packed: packed.then(|| Packed::new(size)),
            tables: memory.allocate(16 * entries * u64::from(TABLE_ENTRIES), 16)?,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
            next_available: 0,
            last_used: 0,
            kicked_at: 0,
            event_idx: features & EVENT_IDX != 0,
            in_order: (features & IN_ORDER != 0).then(Default::default),
        })
    }

    /// Where a packed ring lies.
    pub fn area(&self) -> Area {
        Area {
            memory: self.memory.clone(),
            size: self.size,
            descriptors: self.descriptors,
            driver: self.available,
            device: self.used,
        }
    }

    /// Descriptors that are free.
    pub fn free(&self) -> usize {
        self.packed.as_ref().map_or(self.free.len(), Packed::free)
    }

    /// Chains that the device has.
    pub fn in_flight(&self) -> usize {
        let batch = self.in_order.as_ref().map_or(0, |(_, batch)| batch.len());
        self.chains.len() + batch
    }

    /// What a notification with data says (virtio 1.3 §4.1.5.2) in its upper half.
    pub fn notification_data(&self) -> u16 {
        self.packed
            .as_ref()
            .map_or(self.next_available, |packed| packed.next.bits())
    }

    /// Makes a chain available, in an indirect table when `indirect`; `None` without room. The device sees
    /// it at once.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn add(
        &mut self,
        readable: &[Buffer],
        writable: &[Buffer],
        indirect: bool,
    ) -> Result<Option<u16>> {
        let buffers: Vec<(Buffer, u16)> = readable
            .iter()
            .map(|b| (*b, 0))
            .chain(writable.iter().map(|b| (*b, WRITE)))
            .collect();
        let area = self.area();
        let (tables, entries) = (self.tables, u64::from(TABLE_ENTRIES));
        if let Some(packed) = &mut self.packed {
            let table = |id| tables + 16 * entries * u64::from(id);
            let added = packed.add(&area, &buffers, indirect, table)?;
            if let Some(id) = added {
                self.chains.insert(id, Vec::new());
                self.remember(id);
            }
            return Ok(added);
        }
        let needed = if indirect { 1 } else { buffers.len() };
        if buffers.is_empty() || self.free.len() < needed {
            return Ok(None);
        }
        let taken = self.free.split_off(self.free.len() - needed);
        let head = taken[0];
        if indirect {
            let table = self.table_of(head);
            for (at, (buffer, flags)) in buffers.iter().enumerate() {
                let last = at + 1 == buffers.len();
                let flags = flags | if last { 0 } else { NEXT };
                self.write_descriptor_at(table, at as u16, *buffer, flags, at as u16 + 1)?;
            }
            let len = 16 * buffers.len() as u32;
            self.write_descriptor(head, (table, len), INDIRECT, 0)?;
        } else {
            for (at, (buffer, flags)) in buffers.iter().enumerate() {
                let next = taken.get(at + 1).copied();
                let flags = flags | if next.is_some() { NEXT } else { 0 };
                self.write_descriptor(taken[at], *buffer, flags, next.unwrap_or(0))?;
            }
        }
        self.chains.insert(head, taken);
        self.remember(head);
        self.offer(head)?;
        Ok(Some(head))
    }

    fn remember(&mut self, head: u16) {
        if let Some((given, _)) = &mut self.in_order {
            given.push_back(head);
        }
    }

    /// Puts `head` into the available ring, whatever it is.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn offer(&mut self, head: u16) -> Result<()> {
        let slot = u64::from(self.next_available % self.size);
        self.memory.store_u16(self.available + 4 + 2 * slot, head)?;
        self.set_available_index(self.next_available.wrapping_add(1))
    }

    /// Publishes an available index, whatever it is.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn set_available_index(&mut self, index: u16) -> Result<()> {
        self.next_available = index;
        self.memory.store_u16(self.available + 2, index)
    }

    /// Writes a descriptor of the ring's table, whatever it says.
    ///
    /// # Errors
    /// The table is outside the guest's memory.
    pub fn write_descriptor(
        &self,
        index: u16,
        buffer: Buffer,
        flags: u16,
        next: u16,
    ) -> Result<()> {
        self.write_descriptor_at(self.descriptors, index, buffer, flags, next)
    }

    /// Writes a descriptor of the table at `table`.
    ///
    /// # Errors
    /// The table is outside the guest's memory.
    pub fn write_descriptor_at(
        &self,
        table: u64,
        index: u16,
        (address, len): Buffer,
        flags: u16,
        next: u16,
    ) -> Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write(table + 16 * u64::from(index), &bytes)
    }

    /// Guest address of the indirect table that belongs to a head.
    pub fn table_of(&self, head: u16) -> u64 {
        self.tables + 16 * u64::from(TABLE_ENTRIES) * u64::from(head)
    }

    /// Whether the device wants to be told of what was published since the last call.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn wants_kick(&mut self) -> Result<bool> {
        // The index must be visible before the device's wish is read (virtio 1.3 §2.7.13.4.1).
        let area = self.area();
        if let Some(packed) = &mut self.packed {
            return packed.wants_kick(&area);
        }
        fence(Ordering::SeqCst);
        let (old, new) = (self.kicked_at, self.next_available);
        self.kicked_at = new;
        if self.event_idx {
            let at = self.used + 4 + 8 * u64::from(self.size);
            let event = self.memory.load_u16(at)?;
            return Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old));
        }
        Ok(self.memory.load_u16(self.used)? & 1 == 0)
    }

    /// Used index of the device; in a packed ring it grows at least when the device uses the next buffer.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn used_index(&self) -> Result<u16> {
        if let Some(packed) = &self.packed {
            return packed.used_index(&self.area());
        }
        self.memory.load_u16(self.used + 2)
    }

    /// Takes a used chain back: its head and the bytes the device wrote.
    ///
    /// # Errors
    /// The device returned a head that it was not given, or more chains than it has.
    pub fn take(&mut self) -> Result<Option<(u16, u32)>> {
        if let Some((_, batch)) = &mut self.in_order {
            if let Some(taken) = batch.pop_front() {
                return Ok(Some(taken));
            }
        }
        let Some((head, len)) = self.entry()? else {
            return Ok(None);
        };
        let mut ids = vec![head];
        if let Some((given, batch)) = &mut self.in_order {
            let place = given
                .iter()
                .position(|id| *id == head)
                .ok_or_else(|| Error::Device(format!("used head {head} is not among {given:?}")))?;
            ids = given.drain(..=place).collect();
            // Those before the last are without bytes.
            let bytes = |id: &u16| (*id, if *id == head { len } else { 0 });
            batch.extend(ids.iter().map(bytes));
        }
        let area = self.area();
        if let Some(packed) = &mut self.packed {
            packed.consume(&area, &ids)?;
        }
        for id in &ids {
            let Some(chain) = self.chains.remove(id) else {
                return Err(Error::Device(format!(
                    "queue {}: used head {id} was not available",
                    self.index
                )));
            };
            self.free.extend(chain.iter().rev());
        }
        self.last_used = self.last_used.wrapping_add(ids.len() as u16);
        match &mut self.in_order {
            Some((_, batch)) => Ok(batch.pop_front()),
            None => Ok(Some((head, len))),
        }
    }

    /// The next used entry.
    fn entry(&self) -> Result<Option<(u16, u32)>> {
        if let Some(packed) = &self.packed {
            return packed.entry(&self.area());
        }
        let index = self.used_index()?;
        if index == self.last_used {
            return Ok(None);
        }
        if usize::from(index.wrapping_sub(self.last_used)) > self.chains.len() {
            return Err(Error::Device(format!(
                "queue {}: used index {index} with {} chains in flight from {}",
                self.index,
                self.chains.len(),
                self.last_used
            )));
        }
        let at = self.used + 4 + 8 * u64::from(self.last_used % self.size);
        let (head, len) = (self.memory.load_u32(at)?, self.memory.load_u32(at + 4)?);
        let head = u16::try_from(head)
            .map_err(|_| Error::Device(format!("queue {}: used head {head}", self.index)))?;
        Ok(Some((head, len)))
    }

    /// Asks for an interrupt with the next used chain; answers whether one is there already.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn arm(&self) -> Result<bool> {
        if self
            .in_order
            .as_ref()
            .is_some_and(|(_, batch)| !batch.is_empty())
        {
            return Ok(true);
        }
        if let Some(packed) = &self.packed {
            return packed.arm(&self.area(), self.event_idx);
        }
        if self.event_idx {
            let at = self.available + 4 + 2 * u64::from(self.size);
            self.memory.store_u16(at, self.last_used)?;
        } else {
            self.memory.store_u16(self.available, 0)?;
        }
        fence(Ordering::SeqCst);
        Ok(self.used_index()? != self.last_used)
    }

    /// Where both sides stand, for people who look at a failed test.
    pub fn describe(&self) -> String {
        let word = |address| self.memory.load_u16(address).unwrap_or(0xdead);
        let size = u64::from(self.size);
        if let Some(packed) = &self.packed {
            return format!(
                "queue {}: {packed:?} in flight {}; driver's events {} {}; device's events {} {}",
                self.index,
                self.chains.len(),
                word(self.available),
                word(self.available + 2),
                word(self.used),
                word(self.used + 2),
            );
        }
        format!(
            "queue {}: available {} used {} taken {} in flight {}; driver's flags {} event {}; \
             device's flags {} event {}",
            self.index,
            self.next_available,
            word(self.used + 2),
            self.last_used,
            self.chains.len(),
            word(self.available),
            word(self.available + 4 + 2 * size),
            word(self.used),
            word(self.used + 4 + 8 * size),
        )
    }

    /// Asks for no interrupts (a hint).
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn disarm(&self) -> Result<()> {
        if let Some(packed) = &self.packed {
            return packed.disarm(&self.area());
        }
        if self.event_idx {
            let at = self.available + 4 + 2 * u64::from(self.size);
            self.memory.store_u16(at, self.last_used.wrapping_sub(1))
        } else {
            self.memory.store_u16(self.available, 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Shape;

    fn ring(event_idx: bool) -> Ring {
        let memory = Arc::new(GuestMemory::new(1 << 20, Shape::Whole).unwrap());
        let features = if event_idx { EVENT_IDX } else { 0 };
        Ring::new(&memory, 0, 4, features).unwrap()
    }

    /// What a device would do with the next available head.
    fn consume(ring: &Ring, at: u16, head: u32, len: u32) {
        let slot = ring.used + 4 + 8 * u64::from(at % ring.size);
        ring.memory.write(slot, &head.to_le_bytes()).unwrap();
        ring.memory.write(slot + 4, &len.to_le_bytes()).unwrap();
        ring.memory
            .store_u16(ring.used + 2, at.wrapping_add(1))
            .unwrap();
    }

    #[test]
    fn a_chain_comes_back_with_its_descriptors() {
        let mut ring = ring(false);
        let head = ring
            .add(&[(0x1000, 1), (0x2000, 2)], &[(0x3000, 3)], false)
            .unwrap()
            .unwrap();
        assert_eq!(ring.free(), 1);
        assert!(
            ring.add(&[(0x1000, 1), (0x2000, 2)], &[], false)
                .unwrap()
                .is_none()
        );
        assert!(ring.wants_kick().unwrap());
        consume(&ring, 0, u32::from(head), 3);
        assert_eq!(ring.take().unwrap(), Some((head, 3)));
        assert_eq!((ring.free(), ring.take().unwrap()), (4, None));
    }

    #[test]
    fn a_head_that_was_not_given_is_an_error() {
        let mut ring = ring(false);
        ring.add(&[(0x1000, 1)], &[], false).unwrap();
        consume(&ring, 0, 3, 0);
        assert!(ring.take().is_err());
    }

    #[test]
    fn kicks_follow_the_event_index() {
        let mut ring = ring(true);
        ring.add(&[(0x1000, 1)], &[], false).unwrap();
        assert!(ring.wants_kick().unwrap());
        ring.add(&[(0x1000, 1)], &[], false).unwrap();
        assert!(!ring.wants_kick().unwrap());
        let event = ring.used + 4 + 8 * u64::from(ring.size);
        ring.memory.store_u16(event, 2).unwrap();
        ring.add(&[(0x1000, 1)], &[], false).unwrap();
        assert!(ring.wants_kick().unwrap());
    }
}
