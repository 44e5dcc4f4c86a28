//! Rings of send entries: what is posted, and copies of it.

use super::buffer::{BadBuffer, NotMapped, QueueBuffer, Record};
use super::wqe::{Ctrl, WQEBB, take};
use dot_iommu::DotView;

/// log₂ of the basic blocks at most: counters have 16 bits.
const MAX_LOG_WQEBBS: u8 = 15;
/// Word of the doorbell record: basic blocks posted so far.
const SEND_COUNTER: u64 = 1;

/// A ring of 64-byte basic blocks in guest memory.
#[derive(Debug)]
pub(super) struct SendRing {
    buffer: QueueBuffer,
    /// Basic blocks, at most 2¹⁵.
    size: u16,
    record: Record,
    /// Basic blocks taken so far, and posted so far as last seen.
    consumer: u16,
    producer: u16,
}

/// An entry at the head of the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    /// Counter of its first basic block.
    pub(super) counter: u16,
    /// Copy of its first basic block.
    pub(super) first: [u8; WQEBB],
    /// Bytes, 16 to [`super::wqe::MAX_WQE`].
    pub(super) len: usize,
}

/// What is at the head of the ring.
#[derive(Debug)]
pub(super) enum Head {
    Empty,
    /// Memory is not mapped.
    Unreadable,
    /// No entry, by its counter; all that was posted is given up.
    Bad(u16),
    Entry(Posted),
}

impl SendRing {
    pub(super) fn new(
        buffer: QueueBuffer,
        log_wqebbs: u8,
        doorbell: u64,
    ) -> Result<Self, BadBuffer> {
        if log_wqebbs > MAX_LOG_WQEBBS {
            return Err(BadBuffer::Size("number of basic blocks"));
        }
        let size = 1u16 << log_wqebbs;
        Ok(Self {
            buffer: buffer.ring(u64::from(size) * WQEBB as u64)?,
            size,
            record: Record::new(doorbell)?,
            consumer: 0,
            producer: 0,
        })
    }

    /// Whether something is posted.
    #[inline]
    pub(super) fn is_posted(&self, view: &DotView<'_>) -> bool {
        self.producer != self.consumer
            || self
                .record
                .load(SEND_COUNTER, view)
                .is_ok_and(|counter| counter as u16 != self.consumer)
    }

    /// The entry at the head, which stays there until [`Self::advance`].
    #[inline]
    pub(super) fn head(&mut self, view: &DotView<'_>) -> Head {
        if self.producer == self.consumer {
            match self.record.load(SEND_COUNTER, view) {
                // Only 16 bits of it count.
                Ok(counter) => self.producer = counter as u16,
                Err(NotMapped) => return Head::Unreadable,
            }
        }
        let posted = self.producer.wrapping_sub(self.consumer);
        if posted == 0 {
            return Head::Empty;
        }
        if posted > self.size {
            return self.give_up();
        }
        let at = u64::from(self.consumer & (self.size - 1)) * WQEBB as u64;
        let mut first = [0; WQEBB];
        if self.buffer.read(at, &mut first, view).is_err() {
            return Head::Unreadable;
        }
        match take::<Ctrl>(&mut &first[..]).and_then(|ctrl| ctrl.len()) {
            Some(len) if blocks(len) <= posted => Head::Entry(Posted {
                counter: self.consumer,
                first,
                len,
            }),
            _ => self.give_up(),
        }
    }

    fn give_up(&mut self) -> Head {
        let counter = self.consumer;
        self.consumer = self.producer;
        Head::Bad(counter)
    }

    /// The whole of an entry, copied to `space` (of [`super::wqe::MAX_WQE`] bytes) when it is longer than its first
    /// basic block.
    #[inline]
    pub(super) fn whole<'w>(
        &self,
        posted: &'w Posted,
        space: &'w mut [u8],
        view: &DotView<'_>,
    ) -> Result<&'w [u8], NotMapped> {
        if let Some(wqe) = posted.first.get(..posted.len) {
            return Ok(wqe);
        }
        let wqe = space.get_mut(..posted.len).ok_or(NotMapped)?;
        let (head, rest) = wqe.split_first_chunk_mut::<WQEBB>().ok_or(NotMapped)?;
        *head = posted.first;
        let blocks = u64::from(self.size);
        let at = (u64::from(posted.counter) + 1) % blocks * WQEBB as u64;
        self.buffer.read(at, rest, view)?;
        Ok(wqe)
    }

    /// Moves past an entry.
    #[inline]
    pub(super) fn advance(&mut self, posted: &Posted) {
        self.consumer = self.consumer.wrapping_add(blocks(posted.len));
    }

    /// Basic blocks taken so far.
    #[inline]
    pub(super) fn position(&self) -> u16 {
        self.consumer
    }

    /// Goes on behind as many.
    pub(super) fn seek(&mut self, position: u16) {
        self.consumer = position;
        self.producer = position;
    }

    /// Back to the beginning.
    pub(super) fn reset(&mut self) {
        self.consumer = 0;
        self.producer = 0;
    }
}

/// Basic blocks of an entry of `len` bytes, at most 16.
#[inline]
fn blocks(len: usize) -> u16 {
    len.div_ceil(WQEBB) as u16
}
