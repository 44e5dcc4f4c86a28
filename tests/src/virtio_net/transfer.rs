//! Frames in and out.

use super::{VirtioNet, features};
use crate::packet::{NET_HEADER, NetHeader, Packet};
use crate::ring::{Buffer, TABLE_ENTRIES};
use crate::time::SOON;
use crate::{Error, Result};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Bytes of a transmit slot: header and the largest frame.
const TRANSMIT_SLOT: u64 = 66 * 1024;
/// Transmit slots of a queue.
const TRANSMIT_SLOTS: u16 = 24;
/// A receive buffer for the largest frame.
const WHOLE_FRAME: u32 = 65562;

/// Which slot each head in flight uses, and which are free.
#[derive(Debug, Default)]
pub(super) struct Slots {
    free: Vec<u16>,
    by_head: HashMap<u16, u16>,
}

impl VirtioNet {
    pub(super) fn make_buffers(&mut self) -> Result<()> {
        let large = self.features & (features::GUEST_TSO4 | features::GUEST_TSO6) != 0;
        self.receive_buffer = match (
            self.setup.receive_buffer,
            self.features & features::MRG_RXBUF,
        ) {
            (0, 0) if large => WHOLE_FRAME,
            (0, 0) => 9100,
            (0, _) => 2048,
            (chosen, _) => chosen,
        };
        let active = usize::from(self.setup.pairs.max(1)).min(self.receive_rings.len());
        for pair in 0..active {
            let ring = &self.receive_rings[pair];
            let pieces = self.setup.receive_pieces.max(1) as u16;
            let count = self.setup.receive_buffers.min(ring.size / pieces);
            let bytes = u64::from(self.receive_buffer) * u64::from(count);
            self.receive_base.push(self.memory.allocate(bytes, 16)?);
            self.receive_slots.push(HashMap::new());
            let slots = TRANSMIT_SLOTS.min(ring.size);
            let bytes = TRANSMIT_SLOT * u64::from(slots);
            self.transmit_base.push(self.memory.allocate(bytes, 16)?);
            self.transmit_slots.push(Slots {
                free: (0..slots).rev().collect(),
                by_head: HashMap::new(),
            });
            self.transmit_rings[pair].disarm()?;
            if self.setup.fill {
                for slot in 0..count {
                    self.post_receive(pair, slot)?;
                }
            }
        }
        Ok(())
    }

    /// Makes all receive buffers available that are not; for a start without `fill`.
    ///
    /// # Errors
    /// The guest's memory or the socket failed.
    pub fn fill_receive(&mut self, pair: usize) -> Result<()> {
        let pieces = self.setup.receive_pieces.max(1) as u16;
        let count = self
            .setup
            .receive_buffers
            .min(self.receive_rings[pair].size / pieces);
        for slot in 0..count {
            if !self.receive_slots[pair].values().any(|s| *s == slot) {
                self.post_receive(pair, slot)?;
            }
        }
        self.kick_receive(pair)
    }

    /// Forgets the receive buffers that the device had, after a reset of their queue.
    pub fn forget_receive(&mut self, pair: usize) {
        self.receive_slots[pair].clear();
    }

    fn post_receive(&mut self, pair: usize, slot: u16) -> Result<()> {
        let address = self.receive_base[pair] + u64::from(slot) * u64::from(self.receive_buffer);
        let buffers = cut(address, self.receive_buffer, self.setup.receive_pieces);
        let head = self.receive_rings[pair]
            .add(&[], &buffers, false)?
            .ok_or_else(|| Error::Harness("no room for a receive buffer".into()))?;
        self.receive_slots[pair].insert(head, slot);
        Ok(())
    }

    pub(super) fn kick_all(&mut self) -> Result<()> {
        for pair in 0..self.receive_base.len() {
            self.kick_receive(pair)?;
        }
        Ok(())
    }

    fn kick_receive(&mut self, pair: usize) -> Result<()> {
        if self.receive_rings[pair].wants_kick()? {
            self.notify(self.receive_rings[pair].index)?;
        }
        Ok(())
    }

    /// Sends a frame on queue pair 0.
    ///
    /// # Errors
    /// No room within [`SOON`], or the device misbehaved.
    pub fn send(&mut self, packet: &Packet) -> Result<()> {
        self.send_on(0, packet)
    }

    /// Sends a frame on a queue pair; waits for room.
    ///
    /// # Errors
    /// No room within [`SOON`], or the device misbehaved.
    pub fn send_on(&mut self, pair: usize, packet: &Packet) -> Result<()> {
        self.queue_on(pair, packet)?;
        self.kick_transmit(pair)
    }

    /// Sends frames with one kick at the end (more when the queue is full before).
    ///
    /// # Errors
    /// No room within [`SOON`], or the device misbehaved.
    pub fn send_burst(&mut self, pair: usize, packets: &[Packet]) -> Result<()> {
        for packet in packets {
            self.queue_on(pair, packet)?;
        }
        self.kick_transmit(pair)
    }

    /// Tells the device of queued frames, if it wants to know.
    ///
    /// # Errors
    /// The socket failed.
    pub fn kick_transmit(&mut self, pair: usize) -> Result<()> {
        if self.transmit_rings[pair].wants_kick()? {
            self.notify(self.transmit_rings[pair].index)?;
        }
        Ok(())
    }

    fn queue_on(&mut self, pair: usize, packet: &Packet) -> Result<()> {
        let end = Instant::now() + SOON;
        loop {
            if self.try_queue(pair, packet)? {
                return Ok(());
            }
            self.kick_transmit(pair)?;
            if !self.transmit_rings[pair].arm()? {
                let queue = self.transmit_rings[pair].index;
                self.wait_queue_interrupt(&[queue], "room on a transmit queue", end, SOON)?;
            }
            self.transmit_rings[pair].disarm()?;
        }
    }

    /// Makes a frame available without a kick; `false` without room.
    ///
    /// # Errors
    /// The device misbehaved.
    pub fn try_queue(&mut self, pair: usize, packet: &Packet) -> Result<bool> {
        self.reclaim(pair)?;
        let Some(slot) = self.transmit_slots[pair].free.pop() else {
            return Ok(false);
        };
        let address = self.transmit_base[pair] + TRANSMIT_SLOT * u64::from(slot);
        self.memory.write(address, &packet.header.to_bytes())?;
        self.memory
            .write(address + NET_HEADER as u64, &packet.frame)?;
        let indirect = self.setup.indirect && self.features & features::INDIRECT != 0;
        let mut readable = vec![(address, NET_HEADER as u32)];
        let pieces = self.setup.transmit_pieces.min(u32::from(TABLE_ENTRIES) - 1);
        if pieces == 0 {
            readable[0].1 += packet.frame.len() as u32;
        } else {
            let data = address + NET_HEADER as u64;
            readable.extend(cut(data, packet.frame.len() as u32, pieces));
        }
        match self.transmit_rings[pair].add(&readable, &[], indirect)? {
            Some(head) => {
                self.transmit_slots[pair].by_head.insert(head, slot);
                Ok(true)
            }
            None => {
                self.transmit_slots[pair].free.push(slot);
                Ok(false)
            }
        }
    }

    /// Takes sent frames' buffers back; how many are still in flight.
    ///
    /// # Errors
    /// The device misbehaved.
    pub fn reclaim(&mut self, pair: usize) -> Result<usize> {
        while let Some((head, _)) = self.transmit_rings[pair].take()? {
            if let Some(slot) = self.transmit_slots[pair].by_head.remove(&head) {
                self.transmit_slots[pair].free.push(slot);
            }
        }
        Ok(self.transmit_rings[pair].in_flight())
    }

    /// Waits until every frame of a pair was taken by the device.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn drain(&mut self, pair: usize) -> Result<()> {
        let end = Instant::now() + SOON;
        while self.reclaim(pair)? > 0 {
            if !self.transmit_rings[pair].arm()? {
                let queue = self.transmit_rings[pair].index;
                self.wait_queue_interrupt(&[queue], "sent frames to come back", end, SOON)?;
            }
        }
        self.transmit_rings[pair].disarm()
    }

    /// The next frame on any pair in use, asleep until its interrupt.
    ///
    /// # Errors
    /// [`Error::Timeout`] after [`SOON`], or the device misbehaved.
    pub fn receive(&mut self) -> Result<Packet> {
        Ok(self.receive_within(SOON)?.1)
    }

    /// The next frame and the pair it came on, within `limit`.
    ///
    /// # Errors
    /// [`Error::Timeout`], or the device misbehaved.
    pub fn receive_within(&mut self, limit: Duration) -> Result<(usize, Packet)> {
        let end = Instant::now() + limit;
        let pairs = self.receive_base.len();
        let queues: Vec<u16> = self.receive_rings[..pairs]
            .iter()
            .map(|r| r.index)
            .collect();
        loop {
            for pair in 0..pairs {
                if let Some(packet) = self.try_receive(pair)? {
                    return Ok((pair, packet));
                }
            }
            let mut ready = false;
            for ring in &self.receive_rings[..pairs] {
                ready |= ring.arm()?;
            }
            if !ready {
                self.wait_queue_interrupt(&queues, "a frame", end, limit)?;
            }
        }
    }

    /// A frame that is there already.
    ///
    /// # Errors
    /// The device misbehaved.
    pub fn try_receive(&mut self, pair: usize) -> Result<Option<Packet>> {
        let Some(first) = self.take_receive(pair)? else {
            return Ok(None);
        };
        let Some(header) = NetHeader::from_bytes(&first) else {
            return Err(Error::Device(format!(
                "a receive buffer with {} bytes, less than a header",
                first.len()
            )));
        };
        let mut frame = first[NET_HEADER..].to_vec();
        let merged = self.features & features::MRG_RXBUF != 0;
        if header.num_buffers == 0 || !merged && header.num_buffers != 1 {
            return Err(Error::Device(format!(
                "num_buffers is {} (virtio 1.3 §5.1.6.4)",
                header.num_buffers
            )));
        }
        for _ in 1..header.num_buffers {
            // A device makes all buffers of a frame used at once (§5.1.6.4.1).
            let more = self.take_receive(pair)?.ok_or_else(|| {
                Error::Device("the used index covers only a part of a merged frame".into())
            })?;
            frame.extend_from_slice(&more);
        }
        self.kick_receive(pair)?;
        Ok(Some(Packet { header, frame }))
    }

    fn take_receive(&mut self, pair: usize) -> Result<Option<Vec<u8>>> {
        let Some((head, len)) = self.receive_rings[pair].take()? else {
            return Ok(None);
        };
        if len > self.receive_buffer {
            return Err(Error::Device(format!(
                "{len} bytes used of a receive buffer of {}",
                self.receive_buffer
            )));
        }
        let Some(slot) = self.receive_slots[pair].remove(&head) else {
            return Err(Error::Device(format!("receive head {head} has no buffer")));
        };
        let address = self.receive_base[pair] + u64::from(slot) * u64::from(self.receive_buffer);
        let bytes = self.memory.bytes(address, len as usize)?;
        self.post_receive(pair, slot)?;
        Ok(Some(bytes))
    }
}

/// Cuts a buffer into at most `pieces` of about the same size.
fn cut(address: u64, len: u32, pieces: u32) -> Vec<Buffer> {
    let step = len.div_ceil(pieces.max(1)).max(1);
    (0..len)
        .step_by(step as usize)
        .map(|at| (address + u64::from(at), step.min(len - at)))
        .collect()
}
