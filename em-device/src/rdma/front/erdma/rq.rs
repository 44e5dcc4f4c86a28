//! Receive queues: rings of entries of 32 bytes with one scatter element each.

use super::bytes::{u32_at, u64_at};
use super::memory::QueueMemory;
use super::tables::DmaKey;
use crate::rdma::front::allowance::Charge;
use crate::rdma::front::buffer::{BadBuffer, NotMapped, QueueBuffer, Record};
use crate::rdma::verbs::{MemKey, Next, ReceiveQueue, ReceiveRequest, Sge, Sges};
use dot_iommu::DotView;

/// Bytes of an entry.
pub(super) const RQE: u64 = 32;
/// log₂ of the entries at most: indices have 16 bits.
const MAX_LOG_SIZE: u32 = 15;

/// See the module.
#[derive(Debug)]
pub struct Rq {
    buffer: QueueBuffer,
    _charge: Charge,
    /// Entries, at most 2¹⁵.
    size: u16,
    record: Record,
    dma_key: Option<DmaKey>,
    /// Whether its doorbell was seen since the last reset: what the record held before is of no account.
    rung: bool,
    consumer: u16,
    producer: u16,
}

impl Rq {
    /// An empty queue of 2^`log_size` entries with its doorbell record at `record`.
    pub(super) fn new(
        memory: QueueMemory,
        log_size: u32,
        record: u64,
        dma_key: Option<DmaKey>,
    ) -> Result<Self, BadBuffer> {
        if log_size > MAX_LOG_SIZE {
            return Err(BadBuffer::Size("number of entries"));
        }
        Ok(Self {
            buffer: memory.buffer.ring(RQE << log_size)?,
            _charge: memory.charge,
            size: 1 << log_size,
            record: Record::new(record)?,
            dma_key,
            rung: false,
            consumer: 0,
            producer: 0,
        })
    }

    /// Its doorbell was rung.
    pub(super) fn ring(&mut self) {
        self.rung = true;
    }

    fn take(&mut self, view: &DotView<'_>) -> Result<Next<ReceiveRequest>, NotMapped> {
        if !self.rung {
            return Ok(Next::Empty);
        }
        if self.producer == self.consumer {
            self.producer = self.record.load_whole(view)? as u16;
        }
        let cookie = u32::from(self.consumer);
        match self.producer.wrapping_sub(self.consumer) {
            0 => return Ok(Next::Empty),
            posted if posted <= self.size => {}
            _ => {
                self.consumer = self.producer;
                return Ok(Next::Bad(cookie));
            }
        }
        let mut entry = [0; RQE as usize];
        let slot = u64::from(self.consumer & (self.size - 1));
        self.buffer.read(slot * RQE, &mut entry, view)?;
        self.consumer = self.consumer.wrapping_add(1);
        let mut sges = Sges::new();
        let len = u32_at(&entry, 24);
        if len != 0 {
            sges.push(Sge {
                key: DmaKey::meant(self.dma_key, MemKey(u32_at(&entry, 28))),
                addr: u64_at(&entry, 16),
                len,
            });
        }
        Ok(Next::Entry(ReceiveRequest { cookie, sges }))
    }
}

impl ReceiveQueue for Rq {
    fn next(&mut self, memory: &DotView<'_>) -> Next<ReceiveRequest> {
        self.take(memory).unwrap_or(Next::Unreadable)
    }

    fn reset(&mut self) {
        self.rung = false;
        self.consumer = 0;
        self.producer = 0;
    }

    fn position(&self) -> u32 {
        self.consumer.into()
    }

    /// Doorbells of a queue that is taken over were rung.
    fn seek(&mut self, position: u32) {
        self.rung = true;
        self.consumer = position as u16;
        self.producer = self.consumer;
    }
}
