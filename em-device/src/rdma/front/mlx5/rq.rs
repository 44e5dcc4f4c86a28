//! Receive queues: rings of a queue pair, and the linked lists of shared ones.

use super::buffer::{BadBuffer, NotMapped, QueueBuffer, Record};
use super::wqe::{DS, DataSeg, INLINE, LIST_END, SrqNext, take};
use crate::rdma::verbs::{MAX_SGE, MemKey, Next, ReceiveQueue, ReceiveRequest, Sge, Sges};
use dot_iommu::DotView;

/// log₂ of the entries at most: counters and indices have 16 bits.
const MAX_LOG_SIZE: u8 = 15;
/// log₂ of an entry's bytes, at least and at most.
const MIN_LOG_STRIDE: u8 = 4;
const MAX_LOG_STRIDE: u8 = 10;
/// Word of the doorbell record: entries posted so far.
const RECEIVE_COUNTER: u64 = 0;

/// A queue pair's receive queue to be made.
#[derive(Debug)]
pub struct RqSetup {
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its entries, 0 to 15.
    pub log_size: u8,
    /// log₂ of an entry's bytes, 4 to 10.
    pub log_stride: u8,
    /// Bus address of the doorbell record of 8 bytes; word 0 is the receive counter.
    pub doorbell: u64,
    /// Whether entries begin with a signature segment, which is not checked.
    pub signature: bool,
}

/// A shared receive queue to be made.
#[derive(Debug)]
pub struct SrqSetup {
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its entries, 0 to 15.
    pub log_size: u8,
    /// log₂ of an entry's bytes, 5 to 10: the first 16 link it to the next.
    pub log_stride: u8,
    /// Bus address of the doorbell record of 8 bytes; word 0 is the receive counter.
    pub doorbell: u64,
}

/// A receive queue.
#[derive(Debug)]
pub enum Receive {
    /// Entries follow each other in a ring.
    Cyclic(Cyclic),
    /// Each entry says which is next.
    Linked(Linked),
}

impl Receive {
    /// A queue pair's queue, empty.
    pub fn cyclic(setup: RqSetup) -> Result<Self, BadBuffer> {
        let entries = Entries::new(
            setup.buffer,
            setup.log_size,
            setup.log_stride,
            setup.doorbell,
            setup.signature,
        )?;
        Ok(Self::Cyclic(Cyclic { entries }))
    }

    /// A shared queue, empty: its first entry has index 0.
    pub fn linked(setup: SrqSetup) -> Result<Self, BadBuffer> {
        let entries = Entries::new(
            setup.buffer,
            setup.log_size,
            setup.log_stride,
            setup.doorbell,
            true,
        )?;
        let head = 0;
        Ok(Self::Linked(Linked { entries, head }))
    }

    /// Entries that are posted and not taken, as the driver's counter says.
    fn waiting(&mut self, view: &DotView<'_>) -> u16 {
        let entries = match self {
            Self::Cyclic(Cyclic { entries }) | Self::Linked(Linked { entries, .. }) => entries,
        };
        // Without the counter nothing can be taken either.
        let _ = entries.refresh(view);
        entries.posted().min(entries.size)
    }
}

/// See [`Receive::Cyclic`].
#[derive(Debug)]
pub struct Cyclic {
    entries: Entries,
}

/// See [`Receive::Linked`].
#[derive(Debug)]
pub struct Linked {
    entries: Entries,
    /// Index of the next entry; out of range after an entry that linked to nowhere.
    head: u16,
}

/// What both kinds are made of.
#[derive(Debug)]
struct Entries {
    buffer: QueueBuffer,
    /// At most 2¹⁵.
    size: u16,
    log_stride: u8,
    record: Record,
    /// Whether a segment of 16 bytes comes before the data segments.
    head: bool,
    /// Entries taken so far, and posted so far as last seen.
    consumer: u16,
    producer: u16,
    /// Copy of the entry that is being parsed; of its size.
    entry: Box<[u8]>,
}

impl Entries {
    fn new(
        buffer: QueueBuffer,
        log_size: u8,
        log_stride: u8,
        doorbell: u64,
        head: bool,
    ) -> Result<Self, BadBuffer> {
        if log_size > MAX_LOG_SIZE {
            return Err(BadBuffer::Size("number of entries"));
        }
        if !(MIN_LOG_STRIDE + u8::from(head)..=MAX_LOG_STRIDE).contains(&log_stride) {
            return Err(BadBuffer::Size("size of entries"));
        }
        Ok(Self {
            buffer: buffer.ring(1 << (log_size + log_stride))?,
            size: 1 << log_size,
            log_stride,
            record: Record::new(doorbell)?,
            head,
            consumer: 0,
            producer: 0,
            entry: vec![0; 1 << log_stride].into(),
        })
    }

    #[inline]
    fn posted(&self) -> u16 {
        self.producer.wrapping_sub(self.consumer)
    }

    #[inline]
    fn refresh(&mut self, view: &DotView<'_>) -> Result<(), NotMapped> {
        // Only 16 bits of it count.
        self.producer = self.record.load(RECEIVE_COUNTER, view)? as u16;
        Ok(())
    }

    /// Whether there is an entry; `None` when the counter makes no sense.
    #[inline]
    fn ready(&mut self, view: &DotView<'_>) -> Result<Option<bool>, NotMapped> {
        if self.posted() == 0 {
            self.refresh(view)?;
        }
        let posted = self.posted();
        Ok((posted <= self.size).then_some(posted != 0))
    }

    #[inline]
    fn read(&mut self, index: u16, view: &DotView<'_>) -> Result<(), NotMapped> {
        let at = u64::from(index) << self.log_stride;
        self.buffer.read(at, &mut self.entry, view)
    }

    /// The data segments of the copied entry; `None` when there are too many.
    #[inline]
    fn sges(&self) -> Option<Sges> {
        let mut bytes = &self.entry[..];
        if self.head {
            bytes = bytes.get(DS..)?;
        }
        let mut sges = Sges::new();
        while !bytes.is_empty() {
            let seg: DataSeg = take(&mut bytes)?;
            // The bit allows to pad up to a cache line, which this device never does.
            let (len, key) = (seg.count.get() & !INLINE, seg.key.get());
            if len == 0 && key == LIST_END {
                break;
            }
            if len == 0 {
                continue;
            }
            if sges.len() == MAX_SGE {
                return None;
            }
            sges.push(Sge {
                key: MemKey(key),
                addr: seg.addr.get(),
                len,
            });
        }
        Some(sges)
    }
}

impl Cyclic {
    #[inline]
    fn take(&mut self, view: &DotView<'_>) -> Result<Next<ReceiveRequest>, NotMapped> {
        let entries = &mut self.entries;
        let cookie = u32::from(entries.consumer);
        match entries.ready(view)? {
            Some(true) => {}
            Some(false) => return Ok(Next::Empty),
            None => {
                entries.consumer = entries.producer;
                return Ok(Next::Bad(cookie));
            }
        }
        entries.read(entries.consumer & (entries.size - 1), view)?;
        entries.consumer = entries.consumer.wrapping_add(1);
        Ok(match entries.sges() {
            Some(sges) => Next::Entry(ReceiveRequest { cookie, sges }),
            None => Next::Bad(cookie),
        })
    }
}

impl Linked {
    fn take(&mut self, view: &DotView<'_>) -> Result<Next<ReceiveRequest>, NotMapped> {
        let entries = &mut self.entries;
        match entries.ready(view)? {
            Some(true) if self.head < entries.size => {}
            Some(false) => return Ok(Next::Empty),
            // The list leads nowhere: nobody knows where it goes on.
            _ => return Err(NotMapped),
        }
        entries.read(self.head, view)?;
        let next: SrqNext = take(&mut &entries.entry[..]).ok_or(NotMapped)?;
        let cookie = u32::from(self.head);
        self.head = next.next_wqe_index.get();
        entries.consumer = entries.consumer.wrapping_add(1);
        Ok(match entries.sges() {
            Some(sges) => Next::Entry(ReceiveRequest { cookie, sges }),
            None => Next::Bad(cookie),
        })
    }
}

impl ReceiveQueue for Receive {
    #[inline]
    fn next(&mut self, memory: &DotView<'_>) -> Next<ReceiveRequest> {
        let next = match self {
            Self::Cyclic(queue) => queue.take(memory),
            Self::Linked(queue) => queue.take(memory),
        };
        next.unwrap_or(Next::Unreadable)
    }

    fn posted(&mut self, memory: &DotView<'_>) -> u32 {
        self.waiting(memory).into()
    }

    /// Entries taken so far; of a list also, in the upper half, the index of its first.
    #[inline]
    fn position(&self) -> u32 {
        match self {
            Self::Cyclic(Cyclic { entries }) => entries.consumer.into(),
            Self::Linked(Linked { entries, head }) => {
                u32::from(*head) << 16 | u32::from(entries.consumer)
            }
        }
    }

    fn seek(&mut self, position: u32) {
        let entries = match self {
            Self::Cyclic(Cyclic { entries }) => entries,
            Self::Linked(Linked { entries, head }) => {
                *head = (position >> 16) as u16;
                entries
            }
        };
        entries.consumer = position as u16;
        entries.producer = entries.consumer;
    }

    fn next_cookie(&self) -> u32 {
        match self {
            Self::Cyclic(Cyclic { entries }) => entries.consumer.into(),
            Self::Linked(Linked { head, .. }) => (*head).into(),
        }
    }

    fn again(&mut self, cookie: u32, memory: &DotView<'_>) -> Option<ReceiveRequest> {
        let (entries, index) = match self {
            Self::Cyclic(Cyclic { entries }) => {
                let index = cookie as u16 & (entries.size - 1);
                (entries, index)
            }
            Self::Linked(Linked { entries, .. }) => (entries, cookie as u16),
        };
        if index >= entries.size {
            return None;
        }
        entries.read(index, memory).ok()?;
        let sges = entries.sges()?;
        Some(ReceiveRequest { cookie, sges })
    }

    fn reset(&mut self) {
        let entries = match self {
            Self::Cyclic(Cyclic { entries }) => entries,
            Self::Linked(Linked { entries, head }) => {
                *head = 0;
                entries
            }
        };
        entries.consumer = 0;
        entries.producer = 0;
    }
}
