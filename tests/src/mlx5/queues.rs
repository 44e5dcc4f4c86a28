//! Work queues and completion queues as the provider library writes and reads them.

use crate::memory::GuestMemory;
use crate::time::look_for;
use crate::{Error, Result};
use std::sync::Arc;

/// Opcode of a send queue entry, with what belongs to it.
#[derive(Debug, Clone, Copy)]
pub enum Send<'a> {
    /// SEND, with immediate data or not.
    Send(Option<u32>),
    /// RDMA WRITE to address and key, with immediate data or not.
    Write(u64, u32, Option<u32>),
    /// RDMA READ from address and key.
    Read(u64, u32),
    /// Compare and swap at address and key: compare, swap.
    CompareSwap(u64, u32, u64, u64),
    /// Fetch and add at address and key: add.
    FetchAdd(u64, u32, u64),
    /// SEND of an unreliable datagram to LID, queue pair and Q_Key.
    Datagram(u16, u32, u32),
    /// Any bytes as an entry, a multiple of 16.
    Raw(&'a [u8]),
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    /// CQN.
    pub number: u32,
    memory: Arc<GuestMemory>,
    at: u64,
    record: u64,
    log_size: u8,
    index: u32,
    arms: u32,
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Opcode of the completion: 0 requester, 1–4 responder, 0xd and 0xe errors.
    pub opcode: u8,
    /// Queue pair.
    pub qpn: u32,
    /// Index of the entry that completed.
    pub counter: u16,
    /// Bytes.
    pub len: u32,
    /// Immediate data or key.
    pub immediate: u32,
    /// Syndrome of an error.
    pub syndrome: u8,
}

impl Cq {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        number: u32,
        at: u64,
        record: u64,
        log_size: u8,
    ) -> Result<Self> {
        Ok(Self {
            number,
            memory: memory.clone(),
            at,
            record,
            log_size,
            index: 0,
            arms: 0,
        })
    }

    /// The next completion, if there is one.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn poll(&mut self) -> Result<Option<Cqe>> {
        let size = 1u32 << self.log_size;
        let at = self.at + u64::from(self.index & (size - 1)) * 64;
        // The last word has the owner bit: read it first, with acquire order.
        let last = self.memory.load_u32(at + 60)?.to_le_bytes();
        let owner = self.index >> self.log_size & 1;
        if last[3] >> 4 == 0xf || u32::from(last[3] & 1) != owner {
            return Ok(None);
        }
        let mut entry = [0; 64];
        self.memory.read(at, &mut entry)?;
        self.index = self.index.wrapping_add(1);
        self.memory
            .write(self.record, &(self.index & 0xff_ffff).to_be_bytes())?;
        let word = |at: usize| {
            u32::from_be_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
        };
        Ok(Some(Cqe {
            opcode: entry[63] >> 4,
            qpn: word(56) & 0xff_ffff,
            counter: u16::from_be_bytes([entry[60], entry[61]]),
            len: word(44),
            immediate: word(36),
            syndrome: entry[55],
        }))
    }

    /// Waits for the next completion, looking all the time.
    ///
    /// # Errors
    /// None came within seconds.
    pub fn wait(&mut self) -> Result<Cqe> {
        let number = self.number;
        let none = || Error::Device(format!("CQ {number:#x}: no completion"));
        look_for(|| self.poll())?.ok_or_else(none)
    }

    /// Writes the arm word; answers the 8 bytes for the doorbell.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn arm(&mut self, solicited: bool) -> Result<[u8; 8]> {
        self.arms += 1;
        let command = u32::from(solicited) << 24;
        let word = (self.arms & 3) << 28 | command | self.index & 0xff_ffff;
        self.memory.write(self.record + 4, &word.to_be_bytes())?;
        let mut doorbell = [0; 8];
        doorbell[..4].copy_from_slice(&word.to_be_bytes());
        doorbell[4..].copy_from_slice(&self.number.to_be_bytes());
        Ok(doorbell)
    }
}

/// A queue pair's queues.
#[derive(Debug)]
pub struct Qp {
    /// QPN.
    pub number: u32,
    memory: Arc<GuestMemory>,
    receives: u64,
    log_receives: u8,
    received: u16,
    sends: u64,
    log_sends: u8,
    sent: u16,
    record: u64,
    doorbell: [u8; 8],
}

impl Qp {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        number: u32,
        (receives, log_receives): (u64, u8),
        (sends, log_sends): (u64, u8),
        record: u64,
    ) -> Result<Self> {
        Ok(Self {
            number,
            memory: memory.clone(),
            receives,
            log_receives,
            received: 0,
            sends,
            log_sends,
            sent: 0,
            record,
            doorbell: [0; 8],
        })
    }

    /// Posts a receive of one buffer: key, address, bytes.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_receive(&mut self, key: u32, address: u64, len: u32) -> Result<()> {
        let place = u64::from(self.received & ((1 << self.log_receives) - 1));
        self.memory
            .write(self.receives + place * 16, &segment(key, address, len))?;
        self.received = self.received.wrapping_add(1);
        let counter = u32::from(self.received);
        self.memory.write(self.record, &counter.to_be_bytes())
    }

    /// Writes an entry of the send queue, without telling the device. Answers its index.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_send(
        &mut self,
        send: Send<'_>,
        buffers: &[(u32, u64, u32)],
        signaled: bool,
    ) -> Result<u16> {
        let mut entry = vec![0u8; 16];
        let mut immediate = 0;
        let remote = |entry: &mut Vec<u8>, address: u64, key: u32| {
            entry.extend(address.to_be_bytes());
            entry.extend(key.to_be_bytes());
            entry.extend([0; 4]);
        };
        let opcode = match send {
            Send::Send(None) => 0x0a,
            Send::Send(Some(value)) => {
                immediate = value;
                0x0b
            }
            Send::Write(address, key, value) => {
                remote(&mut entry, address, key);
                immediate = value.unwrap_or(0);
                if value.is_some() { 0x09 } else { 0x08 }
            }
            Send::Read(address, key) => {
                remote(&mut entry, address, key);
                0x10
            }
            Send::CompareSwap(address, key, compare, swap) => {
                remote(&mut entry, address, key);
                entry.extend(swap.to_be_bytes());
                entry.extend(compare.to_be_bytes());
                0x11
            }
            Send::FetchAdd(address, key, add) => {
                remote(&mut entry, address, key);
                entry.extend(add.to_be_bytes());
                entry.extend([0; 8]);
                0x12
            }
            Send::Datagram(lid, qpn, qkey) => {
                entry.extend(qkey.to_be_bytes());
                entry.extend([0; 4]);
                entry.extend(qpn.to_be_bytes());
                entry.extend([0; 2]);
                entry.extend(lid.to_be_bytes());
                0x0a
            }
            Send::Raw(bytes) => {
                entry.clear();
                entry.extend(bytes);
                0
            }
        };
        for &(key, address, len) in buffers {
            entry.extend(segment(key, address, len));
        }
        if !matches!(send, Send::Raw(_)) {
            let size = (entry.len() / 16) as u32;
            let head = u32::from(self.sent) << 8 | opcode;
            entry[..4].copy_from_slice(&head.to_be_bytes());
            entry[4..8].copy_from_slice(&(self.number << 8 | size).to_be_bytes());
            entry[11] = if signaled { 2 << 2 } else { 0 };
            entry[12..16].copy_from_slice(&immediate.to_be_bytes());
        }
        self.doorbell.copy_from_slice(&entry[..8]);
        self.put(&entry)
    }

    /// Writes an entry for an RDMA WRITE of one buffer, as fast as a driver does: a benchmark is not to measure
    /// its own driver. As [`Self::post_send`] else.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_write(
        &mut self,
        (remote, rkey): (u64, u32),
        (lkey, local, len): (u32, u64, u32),
        signaled: bool,
    ) -> Result<u16> {
        let mut entry = [0u8; 64];
        let head = u32::from(self.sent) << 8 | 0x08;
        entry[..4].copy_from_slice(&head.to_be_bytes());
        entry[4..8].copy_from_slice(&(self.number << 8 | 3).to_be_bytes());
        entry[11] = if signaled { 2 << 2 } else { 0 };
        entry[16..24].copy_from_slice(&remote.to_be_bytes());
        entry[24..28].copy_from_slice(&rkey.to_be_bytes());
        entry[32..48].copy_from_slice(&segment(lkey, local, len));
        self.doorbell.copy_from_slice(&entry[..8]);
        self.put(&entry)
    }

    /// Writes an entry with its data inline.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_inline(
        &mut self,
        address: u64,
        key: u32,
        data: &[u8],
        signaled: bool,
    ) -> Result<u16> {
        let mut entry = vec![0u8; 16];
        entry.extend(address.to_be_bytes());
        entry.extend(key.to_be_bytes());
        entry.extend([0; 4]);
        entry.extend((1u32 << 31 | data.len() as u32).to_be_bytes());
        entry.extend(data);
        entry.resize(entry.len().next_multiple_of(16), 0);
        let size = (entry.len() / 16) as u32;
        let head = u32::from(self.sent) << 8 | 0x08;
        entry[..4].copy_from_slice(&head.to_be_bytes());
        entry[4..8].copy_from_slice(&(self.number << 8 | size).to_be_bytes());
        entry[11] = if signaled { 2 << 2 } else { 0 };
        self.doorbell.copy_from_slice(&entry[..8]);
        self.put(&entry)
    }

    fn put(&mut self, entry: &[u8]) -> Result<u16> {
        let blocks = 1u64 << self.log_sends;
        let first = self.sent;
        for (n, block) in entry.chunks(64).enumerate() {
            let place = (u64::from(first) + n as u64) & (blocks - 1);
            self.memory.write(self.sends + place * 64, block)?;
        }
        self.sent = first.wrapping_add(entry.len().div_ceil(64) as u16);
        Ok(first)
    }

    /// Publishes what was posted; answers the 8 bytes for the doorbell.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn publish(&mut self) -> Result<[u8; 8]> {
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let counter = u32::from(self.sent);
        self.memory.write(self.record + 4, &counter.to_be_bytes())?;
        Ok(self.doorbell)
    }

    /// What a driver does to its queues when it resets the queue pair.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn forget(&mut self) -> Result<()> {
        self.sent = 0;
        self.received = 0;
        self.memory.write(self.record, &[0; 8])
    }
}

pub(super) fn segment(key: u32, address: u64, len: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes[4..8].copy_from_slice(&key.to_be_bytes());
    bytes[8..].copy_from_slice(&address.to_be_bytes());
    bytes
}

impl super::Mlx5 {
    /// Rings the send doorbell for what was posted.
    ///
    /// # Errors
    /// The access failed.
    pub fn ring(&mut self, qp: &mut Qp) -> Result<()> {
        let doorbell = qp.publish()?;
        self.doorbell(0x800, &doorbell)
    }

    /// Asks for an event at the next completion.
    ///
    /// # Errors
    /// The access failed.
    pub fn arm(&mut self, cq: &mut Cq, solicited: bool) -> Result<()> {
        let doorbell = cq.arm(solicited)?;
        self.doorbell(0x20, &doorbell)
    }
}
