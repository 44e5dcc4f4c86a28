//! Work queues and completion queues as the kernel's driver and the provider library write and read them.

use super::{Erdma, ring_owner};
use crate::memory::GuestMemory;
use crate::time::look_for;
use crate::{Error, Result};
use std::sync::Arc;

/// Syndromes of completions.
pub mod syndrome {
    #![allow(missing_docs)] // the names are the driver's
    pub const OK: u8 = 0;
    pub const REMOTE_KEY: u8 = 3;
    pub const REMOTE_ADDRESS: u8 = 4;
    pub const REMOTE_RIGHTS: u8 = 5;
    pub const REMOTE_DOMAIN: u8 = 6;
    pub const FORMAT: u8 = 8;
    pub const LOCAL_KEY: u8 = 10;
    pub const LOCAL_ADDRESS: u8 = 11;
    pub const LOCAL_RIGHTS: u8 = 12;
    pub const LOCAL_DOMAIN: u8 = 13;
    pub const FLUSHED: u8 = 15;
    pub const RETRIES: u8 = 16;
}

/// Opcode of a send queue entry, with what belongs to it.
#[derive(Debug, Clone, Copy)]
pub enum Send<'a> {
    /// SEND, with immediate data or not.
    Send(Option<u32>),
    /// SEND that invalidates a key of the receiver.
    SendInvalidate(u32),
    /// RDMA WRITE to address and key, with immediate data or not.
    Write(u64, u32, Option<u32>),
    /// RDMA READ from address and key.
    Read(u64, u32),
    /// RDMA READ that invalidates the local key (the last) behind it.
    ReadInvalidate(u64, u32, u32),
    /// Compare and swap at address and key: compare, swap.
    CompareSwap(u64, u32, u64, u64),
    /// Fetch and add at address and key: add.
    FetchAdd(u64, u32, u64),
    /// Datagram by address handle to queue pair and Q_Key.
    Datagram(u32, u32, u32),
    /// Activates a fast region: key, virtual address, bytes, rights, page addresses of which there are at most 4.
    Register(u32, u64, u32, u32, &'a [u64]),
    /// The same with this many page addresses in the region's table.
    RegisterByTable(u32, u64, u32, u32, u32),
    /// Ends a key.
    Invalidate(u32),
    /// An opcode with a body that is anything, from behind the header.
    Raw(u8, &'a [u8]),
}

impl Send<'_> {
    /// Opcode.
    pub fn opcode(&self) -> u8 {
        match self {
            Self::Write(_, _, None) => 0,
            Self::Read(..) => 1,
            Self::Send(None) | Self::Datagram(..) => 2,
            Self::Send(Some(_)) => 3,
            Self::Write(_, _, Some(_)) => 9,
            Self::SendInvalidate(_) => 13,
            Self::Register(..) | Self::RegisterByTable(..) => 14,
            Self::Invalidate(_) => 15,
            Self::ReadInvalidate(..) => 16,
            Self::CompareSwap(..) => 17,
            Self::FetchAdd(..) => 18,
            Self::Raw(opcode, _) => *opcode,
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    /// CQN.
    pub number: u32,
    memory: Arc<GuestMemory>,
    at: u64,
    log_size: u8,
    record: u64,
    doorbell: u64,
    index: u32,
    arms: u8,
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Opcode: of the entry for a sender; 4, 12, 6, 5 for a receiver's SEND, with immediate, with invalidation, and
    /// WRITE with immediate.
    pub opcode: u8,
    /// Whether it is about a receive.
    pub receive: bool,
    /// 0, or what went wrong.
    pub syndrome: u8,
    /// First block of the entry, or index of the receive.
    pub index: u16,
    /// Queue pair.
    pub qpn: u32,
    /// Immediate data.
    pub immediate: u32,
    /// Key that was invalidated: the same field in the other byte order.
    pub invalidated: u32,
    /// Bytes.
    pub len: u32,
    /// The last word: of datagrams the source.
    pub source: u32,
}

impl Cq {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        number: u32,
        (at, log_size): (u64, u8),
        record: u64,
        doorbell: u64,
    ) -> Self {
        Self {
            number,
            memory: memory.clone(),
            at,
            log_size,
            record,
            doorbell,
            index: 0,
            arms: 0,
        }
    }

    /// The next completion, if there is one.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn poll(&mut self) -> Result<Option<Cqe>> {
        let size = 1u32 << self.log_size;
        let at = self.at + u64::from(self.index & (size - 1)) * 32;
        // The owner is in the first word: read it first, with acquire order.
        let header = self.memory.load_u32(at)?.swap_bytes();
        if header >> 31 != ring_owner(self.index, size) {
            return Ok(None);
        }
        let mut bytes = [0; 32];
        self.memory.read(at, &mut bytes)?;
        self.index = self.index.wrapping_add(1);
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok(Some(Cqe {
            opcode: (header >> 16) as u8,
            receive: header >> 8 & 0xff == 1,
            syndrome: header as u8,
            index: word(4) as u16,
            qpn: word(8),
            immediate: word(12).swap_bytes(),
            invalidated: word(12),
            len: word(16),
            source: word(28),
        }))
    }

    /// Waits for the next completion, looking all the time.
    ///
    /// # Errors
    /// None came within seconds.
    pub fn wait(&mut self) -> Result<Cqe> {
        let number = self.number;
        let none = || Error::Device(format!("CQ {number}: no completion"));
        look_for(|| self.poll())?.ok_or_else(none)
    }

    /// Waits for the next completion, which has to be a good one.
    ///
    /// # Errors
    /// None came within seconds, or it has a syndrome.
    pub fn success(&mut self) -> Result<Cqe> {
        match self.wait()? {
            cqe if cqe.syndrome == syndrome::OK => Ok(cqe),
            cqe => Err(Error::Device(format!("{cqe:?}"))),
        }
    }
}

/// A queue pair's queues. Indices are free-running.
#[derive(Debug)]
pub struct Qp {
    /// QPN.
    pub number: u32,
    memory: Arc<GuestMemory>,
    sends: u64,
    log_sends: u8,
    sent: u16,
    receives: u64,
    log_receives: u8,
    received: u16,
    /// Doorbell records and doorbells of both queues.
    records: (u64, u64),
    doorbells: (u64, u64),
    last_send: u64,
    last_receive: u64,
}

impl Qp {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        number: u32,
        (sends, log_sends): (u64, u8),
        (receives, log_receives): (u64, u8),
        records: (u64, u64),
        doorbells: (u64, u64),
    ) -> Self {
        Self {
            number,
            memory: memory.clone(),
            sends,
            log_sends,
            sent: 0,
            receives,
            log_receives,
            received: 0,
            records,
            doorbells,
            last_send: 0,
            last_receive: 0,
        }
    }

    /// How far the queues are: blocks of sends, receives.
    pub fn produced(&self) -> (u16, u16) {
        (self.sent, self.received)
    }

    /// Writes a receive of one buffer (key, address, bytes), or of none, without telling the device. Answers its
    /// index.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_receive(&mut self, buffer: Option<(u32, u64, u32)>) -> Result<u16> {
        let place = u64::from(self.received & ((1 << self.log_receives) - 1));
        let (key, address, len) = buffer.unwrap_or((0xdead, 0xdead_beef, 0));
        let index = self.received;
        self.received = index.wrapping_add(1);
        let mut entry = [0; 32];
        let head = u64::from(self.received) | u64::from(self.number) << 32;
        entry[..8].copy_from_slice(&head.to_le_bytes());
        entry[16..].copy_from_slice(&segment(key, address, len));
        self.memory.write(self.receives + place * 32, &entry)?;
        self.last_receive = head;
        Ok(index)
    }

    /// Writes an entry of the send queue, without telling the device. Answers its first block. Buffers are key,
    /// address, bytes.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_send(
        &mut self,
        send: Send<'_>,
        buffers: &[(u32, u64, u32)],
        signaled: bool,
    ) -> Result<u16> {
        let len = buffers.iter().map(|b| b.2).fold(0, u32::wrapping_add);
        let mut body = body(send, len, buffers.first().copied().unwrap_or_default());
        let lists = matches!(
            send,
            Send::Send(_) | Send::SendInvalidate(_) | Send::Write(..) | Send::Datagram(..)
        );
        if lists {
            for &(key, address, len) in buffers {
                body.extend(segment(key, address, len));
            }
        }
        let count = if lists { buffers.len() as u8 } else { 1 };
        let flags = u64::from(signaled) << 22;
        self.put(send.opcode(), &body, u64::from(count) << 56 | flags)
    }

    /// Writes an entry with its data inline.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_inline(&mut self, send: Send<'_>, data: &[u8], signaled: bool) -> Result<u16> {
        let mut body = body(send, data.len() as u32, (0, 0, 0));
        body.extend(data);
        let flags = u64::from(signaled) << 22 | 1 << 25 | (data.len() as u64) << 56;
        self.put(send.opcode(), &body, flags)
    }

    /// Writes an entry with more bits of its header: 23 solicited, 24 fence.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post_flagged(
        &mut self,
        send: Send<'_>,
        buffer: (u32, u64, u32),
        flags: u64,
    ) -> Result<u16> {
        let mut body = body(send, buffer.2, buffer);
        body.extend(segment(buffer.0, buffer.1, buffer.2));
        self.put(send.opcode(), &body, 1 << 56 | 1 << 22 | flags)
    }

    /// Writes header and body, block by block around the end of the ring.
    fn put(&mut self, opcode: u8, body: &[u8], flags: u64) -> Result<u16> {
        let blocks = (8 + body.len()).div_ceil(32) as u16;
        let first = self.sent;
        self.sent = first.wrapping_add(blocks);
        let header = flags
            | u64::from(blocks.wrapping_sub(1) & 7) << 52
            | u64::from(self.number) << 32
            | u64::from(opcode) << 27
            | u64::from(self.sent);
        self.write_raw(first, header, body)?;
        Ok(first)
    }

    /// Writes an entry with this header, whatever it is, at this block; the doorbell will be the header.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn write_raw(&mut self, first: u16, header: u64, body: &[u8]) -> Result<()> {
        let mut entry = header.to_le_bytes().to_vec();
        entry.extend(body);
        let mask = (1u64 << self.log_sends) - 1;
        for (n, block) in entry.chunks(32).enumerate() {
            let place = (u64::from(first) + n as u64) & mask;
            self.memory.write(self.sends + place * 32, block)?;
        }
        self.last_send = header;
        Ok(())
    }

    /// What a driver does to its queues when it resets the queue pair.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn forget(&mut self) -> Result<()> {
        self.sent = 0;
        self.received = 0;
        self.memory.write(self.records.0, &[0; 8])?;
        self.memory.write(self.records.1, &[0; 8])
    }
}

/// Everything behind the header and before segments or inline data.
fn body(send: Send<'_>, len: u32, (key, address, _): (u32, u64, u32)) -> Vec<u8> {
    let mut body = Vec::with_capacity(120);
    let mut word = |value: u32| body.extend(value.to_le_bytes());
    let halves = |value: u64| (value as u32, (value >> 32) as u32);
    match send {
        Send::Send(immediate) => {
            word(immediate.unwrap_or(0).swap_bytes());
            word(len);
        }
        Send::SendInvalidate(key) => {
            word(key);
            word(len);
        }
        Send::Write(address, key, immediate) => {
            word(immediate.unwrap_or(0).swap_bytes());
            word(len);
            word(key);
            let (low, high) = halves(address);
            word(low);
            word(high);
            word(0);
        }
        Send::Read(remote, rkey) | Send::ReadInvalidate(remote, rkey, _) => {
            let ended = match send {
                Send::ReadInvalidate(_, _, ended) => ended,
                _ => 0,
            };
            let (local, high) = halves(address);
            let (from, from_high) = halves(remote);
            for value in [ended, len, key, local, high, 0, from, from_high, len, rkey] {
                word(value);
            }
        }
        Send::CompareSwap(remote, rkey, ..) | Send::FetchAdd(remote, rkey, _) => {
            let (first, second) = match send {
                Send::CompareSwap(_, _, compare, swap) => (swap, compare),
                Send::FetchAdd(_, _, add) => (add, 0),
                _ => (0, 0),
            };
            for value in [0, 0] {
                word(value);
            }
            for value in [first, second, remote] {
                let (low, high) = halves(value);
                word(low);
                word(high);
            }
            let (local, high) = halves(address);
            for value in [0, rkey, local, high, 8, key] {
                word(value);
            }
        }
        Send::Datagram(ahn, qpn, qkey) => {
            for value in [0, len, qkey, qpn, ahn, 0] {
                word(value);
            }
        }
        Send::Register(key, start, len, rights, _)
        | Send::RegisterByTable(key, start, len, rights, _) => {
            let (low, high) = halves(start);
            let (kind, count) = match send {
                Send::RegisterByTable(.., count) => (1 << 6, count),
                Send::Register(.., pages) => (0, pages.len() as u32),
                _ => (0, 0),
            };
            for value in [low, high, len, key, rights << 1 | kind | count << 12, 0] {
                word(value);
            }
            if let Send::Register(.., pages) = send {
                body.extend(pages.iter().flat_map(|page| page.to_le_bytes()));
            }
        }
        Send::Invalidate(key) => {
            for value in [0, 0, 0, key, 0, 0] {
                word(value);
            }
        }
        Send::Raw(_, bytes) => body.extend(bytes),
    }
    body
}

fn segment(key: u32, address: u64, len: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..].copy_from_slice(&key.to_le_bytes());
    bytes
}

impl Erdma {
    /// Stores both doorbell records for what was posted and rings nothing, as if the doorbells got lost.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn record_only(&mut self, qp: &Qp) -> Result<()> {
        let (sends, receives) = qp.records;
        self.memory.write(sends, &qp.last_send.to_le_bytes())?;
        self.memory.write(receives, &qp.last_receive.to_le_bytes())
    }

    /// Rings the send doorbell for what was posted.
    ///
    /// # Errors
    /// The access failed.
    pub fn ring(&mut self, qp: &Qp) -> Result<()> {
        self.publish(qp.records.0, qp.doorbells.0, qp.last_send)
    }

    /// Rings the receive doorbell for what was posted.
    ///
    /// # Errors
    /// The access failed.
    pub fn ring_receives(&mut self, qp: &Qp) -> Result<()> {
        self.publish(qp.records.1, qp.doorbells.1, qp.last_receive)
    }

    /// Posts one receive and rings, as drivers do for each.
    ///
    /// # Errors
    /// The access failed.
    pub fn receive(&mut self, qp: &mut Qp, buffer: Option<(u32, u64, u32)>) -> Result<u16> {
        let index = qp.post_receive(buffer)?;
        self.ring_receives(qp)?;
        Ok(index)
    }

    /// Asks for an event at the next completion, or only at a solicited one.
    ///
    /// # Errors
    /// The access failed.
    pub fn arm(&mut self, cq: &mut Cq, solicited: bool) -> Result<()> {
        cq.arms = cq.arms.wrapping_add(1);
        let value = u64::from(cq.arms) << 56
            | u64::from(cq.number) << 32
            | 1 << 31
            | u64::from(solicited) << 30
            | u64::from(cq.arms & 3) << 28
            | u64::from(cq.index & 0xff_ffff);
        self.publish(cq.record, cq.doorbell, value)
    }
}
