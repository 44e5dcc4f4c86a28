//! The driver's side of a packed virtqueue (virtio 1.3 §2.8).

use super::{Buffer, INDIRECT, NEXT, WRITE};
use crate::memory::GuestMemory;
use crate::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Descriptor flag that says, with the wrap counter, whether a descriptor is available.
pub const AVAIL: u16 = 1 << 7;
/// Descriptor flag that says, with the wrap counter, whether a descriptor is used.
pub const USED: u16 = 1 << 15;
/// Event flags: none, one at a place.
const EVENTS_OFF: u16 = 1;
const EVENTS_AT: u16 = 2;

/// Index and wrap counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the descriptor.
    pub index: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl Place {
    fn forward(self, slots: u16, size: u16) -> Self {
        let index = u32::from(self.index) + u32::from(slots);
        match index.checked_sub(u32::from(size)) {
            Some(index) => Self {
                index: index as u16,
                wrap: !self.wrap,
            },
            None => Self {
                index: index as u16,
                ..self
            },
        }
    }

    /// As event structures and notifications say it: the index, and the wrap counter in bit 15.
    pub fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }
}

/// Places and ids of a packed ring.
#[derive(Debug)]
pub struct Packed {
    /// Where the next chain goes.
    pub next: Place,
    /// Where the device gives the next one back.
    pub next_used: Place,
    free_slots: u16,
    ids: Vec<u16>,
    slots: HashMap<u16, u16>,
    /// Slots made available since the last question about a kick.
    unkicked: u16,
    taken: u16,
}

impl Packed {
    pub(super) fn new(size: u16) -> Self {
        let start = Place {
            index: 0,
            wrap: true,
        };
        Self {
            next: start,
            next_used: start,
            free_slots: size,
            // Ids are the driver's business: not those of the descriptors.
            ids: (0..size).map(|id| 0x4000 ^ id).collect(),
            slots: HashMap::new(),
            unkicked: 0,
            taken: 0,
        }
    }

    pub(super) fn free(&self) -> usize {
        usize::from(self.free_slots)
    }

    /// Offers the buffers in the next descriptors, or in one that names `table` with all of them.
    pub(super) fn add(
        &mut self,
        ring: &Area,
        buffers: &[(Buffer, u16)],
        indirect: bool,
        table: impl Fn(u16) -> u64,
    ) -> Result<Option<u16>> {
        let needed = if indirect { 1 } else { buffers.len() };
        if buffers.is_empty() || usize::from(self.free_slots) < needed {
            return Ok(None);
        }
        let Some(id) = self.ids.pop() else {
            return Ok(None);
        };
        if indirect {
            let table = table(id & 0x3fff);
            for (at, (buffer, flags)) in buffers.iter().enumerate() {
                ring.write(table + 16 * at as u64, *buffer, 0, *flags)?;
            }
            let whole = (table, 16 * buffers.len() as u32);
            self.chain(ring, &[(whole, INDIRECT)], id)?;
        } else {
            self.chain(ring, buffers, id)?;
        }
        Ok(Some(id))
    }

    fn chain(&mut self, ring: &Area, buffers: &[(Buffer, u16)], id: u16) -> Result<()> {
        let slots = buffers.len() as u16;
        for n in (0..slots).rev() {
            let (buffer, flags) = buffers[usize::from(n)];
            let more = if n + 1 < slots { NEXT } else { 0 };
            let place = self.next.forward(n, ring.size);
            ring.make_available(place, buffer, id, flags | more)?;
        }
        self.next = self.next.forward(slots, ring.size);
        self.free_slots -= slots;
        self.unkicked += slots;
        self.slots.insert(id, slots);
        Ok(())
    }

    pub(super) fn wants_kick(&mut self, ring: &Area) -> Result<bool> {
        fence(Ordering::SeqCst);
        let wish = ring.memory.load_u32(ring.device)?;
        let added = std::mem::take(&mut self.unkicked);
        let event = wish as u16;
        Ok(match (wish >> 16) as u16 {
            EVENTS_OFF => false,
            EVENTS_AT => {
                let from = self.next_before(added, ring.size);
                (0..added).any(|n| from.forward(n, ring.size).bits() == event)
            }
            _ => true,
        })
    }

    fn next_before(&self, slots: u16, size: u16) -> Place {
        // One lap on and the rest forward is the same place with the counter the other way round.
        let place = self.next.forward(size - slots, size);
        Place {
            wrap: !place.wrap,
            ..place
        }
    }

    /// Id and bytes of the entry at the driver's place, if the device used it.
    pub(super) fn entry(&self, ring: &Area) -> Result<Option<(u16, u32)>> {
        let at = ring.descriptors + 16 * u64::from(self.next_used.index);
        let flags = ring.memory.load_u16(at + 14)?;
        let (avail, used) = (flags & AVAIL != 0, flags & USED != 0);
        if avail != used || used != self.next_used.wrap {
            return Ok(None);
        }
        let (len, id) = (
            ring.memory.load_u32(at + 8)?,
            ring.memory.load_u16(at + 12)?,
        );
        if (len != 0) != (flags & WRITE != 0) {
            return Err(Error::Device(format!(
                "a used descriptor with {len} bytes and flags {flags:#x}"
            )));
        }
        Ok(Some((id, len)))
    }

    /// The device gave these back with one entry.
    pub(super) fn consume(&mut self, ring: &Area, ids: &[u16]) -> Result<()> {
        let mut slots = 0;
        for id in ids {
            slots += self.slots.remove(id).ok_or_else(|| {
                Error::Device(format!("used id {id} was not given to the device"))
            })?;
            self.ids.insert(0, *id);
            self.taken = self.taken.wrapping_add(1);
        }
        self.free_slots += slots;
        self.next_used = self.next_used.forward(slots, ring.size);
        Ok(())
    }

    /// Buffers that were taken back, and one more if another is there.
    pub(super) fn used_index(&self, ring: &Area) -> Result<u16> {
        let more = self.entry(ring).map_or(true, |entry| entry.is_some());
        Ok(self.taken.wrapping_add(u16::from(more)))
    }

    pub(super) fn arm(&self, ring: &Area, event_idx: bool) -> Result<bool> {
        if event_idx {
            ring.memory.store_u16(ring.driver, self.next_used.bits())?;
            ring.memory.store_u16(ring.driver + 2, EVENTS_AT)?;
        } else {
            ring.memory.store_u16(ring.driver + 2, 0)?;
        }
        fence(Ordering::SeqCst);
        Ok(self.entry(ring)?.is_some())
    }

    pub(super) fn disarm(&self, ring: &Area) -> Result<()> {
        ring.memory.store_u16(ring.driver + 2, EVENTS_OFF)
    }
}

/// Where a packed ring lies.
#[derive(Debug, Clone)]
pub struct Area {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
}

impl Area {
    fn write(&self, at: u64, (address, len): Buffer, id: u16, flags: u16) -> Result<()> {
        let mut bytes = [0; 14];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..].copy_from_slice(&id.to_le_bytes());
        self.memory.write(at, &bytes)?;
        self.memory.store_u16(at + 14, flags)
    }

    /// Writes a descriptor and makes it available, whatever it says.
    ///
    /// # Errors
    /// The ring is outside the guest's memory.
    pub fn make_available(&self, place: Place, buffer: Buffer, id: u16, flags: u16) -> Result<()> {
        let available = if place.wrap { AVAIL } else { USED };
        let at = self.descriptors + 16 * u64::from(place.index);
        self.write(at, buffer, id, flags | available)
    }
}
