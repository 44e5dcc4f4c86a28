//! Commands of the control queue (virtio 1.3 §5.1.6.5).

use super::VirtioNet;
use crate::time::SOON;
use crate::{Error, Result};
use std::time::Instant;

/// Acknowledgement of a command that was done.
pub const OK: u8 = 0;
/// Acknowledgement of a command that was not.
pub const ERR: u8 = 1;

/// Class and command: promiscuous mode.
pub const PROMISC: (u8, u8) = (0, 0);
/// Class and command: all multicast.
pub const ALLMULTI: (u8, u8) = (0, 1);
/// Class and command: the MAC filter table.
pub const MAC_TABLE_SET: (u8, u8) = (1, 0);
/// Class and command: the MAC address.
pub const MAC_ADDR_SET: (u8, u8) = (1, 1);
/// Class and command: let a VLAN in.
pub const VLAN_ADD: (u8, u8) = (2, 0);
/// Class and command: keep a VLAN out.
pub const VLAN_DEL: (u8, u8) = (2, 1);
/// Class and command: queue pairs in use.
pub const MQ_SET: (u8, u8) = (4, 0);

/// Class and command: the driver announced itself.
pub const ANNOUNCE_ACK: (u8, u8) = (3, 0);
/// Class and command: receive-side scaling.
pub const RSS_CONFIG: (u8, u8) = (4, 1);
/// Class and command: offloads taken.
pub const OFFLOADS_SET: (u8, u8) = (5, 0);
/// Class and command: coalescing of receive queues.
pub const COAL_RX_SET: (u8, u8) = (6, 1);
/// Class and command: the coalescing of one queue.
pub const COAL_VQ_GET: (u8, u8) = (6, 3);
/// Class and command: statistics.
pub const STATS_GET: (u8, u8) = (8, 1);

/// What a command's acknowledgement byte holds until the device writes it.
pub const UNANSWERED: u8 = 0xaa;

impl VirtioNet {
    /// Sends a command and waits for its acknowledgement.
    ///
    /// # Errors
    /// No control queue, or no answer in time.
    pub fn control(&mut self, (class, command): (u8, u8), data: &[u8]) -> Result<u8> {
        let request = [&[class, command], data].concat();
        self.control_raw(&[&request[..2], &request[2..]], 1)
    }

    /// Sends a chain of readable `parts` and `room` writable bytes; answers the first of those, or
    /// [`UNANSWERED`] when the device wrote nothing.
    ///
    /// # Errors
    /// No control queue, or the chain does not come back in time.
    pub fn control_raw(&mut self, parts: &[&[u8]], room: u32) -> Result<u8> {
        let buffer = self.control_buffer;
        let memory = self.memory.clone();
        let Some(ring) = &mut self.control_ring else {
            return Err(Error::Harness("no control queue was negotiated".into()));
        };
        let mut at = buffer + 2048;
        let mut readable = Vec::new();
        for part in parts.iter().filter(|part| !part.is_empty()) {
            memory.write(at, part)?;
            readable.push((at, part.len() as u32));
            at += part.len() as u64;
        }
        memory.write(buffer, &[UNANSWERED])?;
        let writable = [(buffer, room)];
        let writable = if room == 0 { &[][..] } else { &writable[..] };
        let index = ring.index;
        ring.arm()?;
        ring.add(&readable, writable, false)?
            .ok_or_else(|| Error::Harness("the control queue is full".into()))?;
        if ring.wants_kick()? {
            self.notify(index)?;
        }
        let end = Instant::now() + SOON;
        loop {
            if let Some(ring) = &mut self.control_ring {
                if ring.take()?.is_some() {
                    return Ok(memory.bytes(buffer, 1)?[0]);
                }
                ring.arm()?;
            }
            self.wait_queue_interrupt(&[index], "an answer on the control queue", end, SOON)?;
        }
    }

    /// Sends a command that is answered with up to `room` bytes behind the acknowledgement; both.
    ///
    /// # Errors
    /// No control queue, or no answer in time.
    pub fn ask(&mut self, (class, command): (u8, u8), data: &[u8], room: u32) -> Result<Vec<u8>> {
        let answer = self.control_raw(&[&[class, command], data], 1 + room)?;
        let rest = self.memory.bytes(self.control_buffer + 1, room as usize)?;
        Ok([&[answer][..], &rest].concat())
    }

    /// Sets the number of queue pairs in use.
    ///
    /// # Errors
    /// No answer in time.
    pub fn set_pairs(&mut self, pairs: u16) -> Result<u8> {
        self.control(MQ_SET, &pairs.to_le_bytes())
    }
}
