//! The sending end of a ring.

use super::record::{ALIGN, Header, record_len};
use super::ring_mem::{ATTACHED, LEFT, RING, RingMem};
use super::sync::{Ordering, fence};
use super::{Corrupt, MAX_FRAME};
use crate::frame::{Frame, FrameMeta};
use vm_memory::VolatileSlice;

/// Bytes after which records become visible without a flush, so that a polling consumer works on the
/// first half of a burst while the second is being written.
const PUBLISH_BYTES: u64 = 128 << 10;

/// What [`Producer::push`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// The record is in the ring.
    Done,
    /// There is no room; the consumer will wake this side once there is.
    Full,
}

/// The sending end.
#[derive(Debug)]
pub(super) struct Producer {
    ring: RingMem,
    /// Where the next record goes.
    tail: u64,
    /// What the consumer may see.
    published: u64,
    /// The consumer's index when last looked at.
    head: u64,
    /// Something was published since the last flush.
    unflushed: bool,
    /// This side said that it waits for room.
    waits: bool,
}

impl Producer {
    /// Goes on where the ring is: at 0, or where a former process published last. What that one had not published
    /// is lost.
    pub(super) fn new(ring: RingMem) -> Result<Self, Corrupt> {
        let tail = ring.indices().tail.0.load(Ordering::Acquire);
        if tail % ALIGN as u64 != 0 {
            return Err(Corrupt::Tail { tail, head: tail });
        }
        let mut producer = Self {
            ring,
            tail,
            published: tail,
            // The oldest that there can be; `refresh` believes what lies between the two.
            head: tail.wrapping_sub(RING as u64),
            unflushed: false,
            waits: false,
        };
        producer.refresh()?;
        let state = &producer.ring.indices().producer_state.0;
        state.store(ATTACHED, Ordering::Release);
        Ok(producer)
    }

    /// Says that this side is gone.
    pub(super) fn leave(&self) {
        let state = &self.ring.indices().producer_state.0;
        state.store(LEFT, Ordering::Release);
    }

    /// Bytes ever put in the ring.
    pub(super) fn sent(&self) -> u64 {
        self.tail
    }

    /// Whether the consumer gave back all that was put in before `sent`.
    pub(super) fn is_consumed(&mut self, sent: u64) -> Result<bool, Corrupt> {
        self.publish();
        self.refresh()?;
        Ok(self.tail.wrapping_sub(self.head) <= self.tail.wrapping_sub(sent))
    }

    fn room(&self) -> usize {
        RING - self.tail.wrapping_sub(self.head) as usize
    }

    /// Looks at the consumer's index once and believes it only if it moved forward, over whole
    /// records' alignment, and not past what was published.
    fn refresh(&mut self) -> Result<(), Corrupt> {
        let head = self.ring.indices().head.0.load(Ordering::Acquire);
        if head.wrapping_sub(self.head) > self.published.wrapping_sub(self.head)
            || head % ALIGN as u64 != 0
        {
            return Err(Corrupt::Head {
                head,
                last: self.head,
                published: self.published,
            });
        }
        self.head = head;
        Ok(())
    }

    fn publish(&mut self) {
        if self.published != self.tail {
            let tail = &self.ring.indices().tail.0;
            tail.store(self.tail, Ordering::Release);
            self.published = self.tail;
            self.unflushed = true;
        }
    }

    /// Writes a record. `frame` is no longer than [`MAX_FRAME`].
    pub(super) fn push(&mut self, frame: &Frame<'_>) -> Result<Pushed, Corrupt> {
        self.record(frame.len(), frame.meta, |space| {
            frame.copy_into(0, &[space], 0);
        })
    }

    /// Writes a record of these bytes, no more than [`MAX_FRAME`].
    #[inline]
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Result<Pushed, Corrupt> {
        self.record(bytes.len(), FrameMeta::default(), |space| {
            space.copy_from(bytes);
        })
    }

    #[inline]
    fn record(
        &mut self,
        len: usize,
        meta: FrameMeta,
        fill: impl FnOnce(VolatileSlice<'_>),
    ) -> Result<Pushed, Corrupt> {
        debug_assert!(len <= MAX_FRAME);
        let record = record_len(len);
        if self.room() < record {
            self.publish();
            self.refresh()?;
            if self.room() < record && !self.wait_for(record)? {
                return Ok(Pushed::Full);
            }
        }
        self.stop_waiting();
        let header = Header {
            len: len as u32,
            meta,
        };
        // Neither can fail: `tail` is aligned, and the record fits in the ring.
        let stored = self.ring.store_header(self.tail, header.to_words());
        let space = self.ring.bytes(self.tail.wrapping_add(ALIGN as u64), len);
        let (Some(()), Some(space)) = (stored, space) else {
            return Ok(Pushed::Full);
        };
        fill(space);
        self.tail = self.tail.wrapping_add(record as u64);
        if self.tail.wrapping_sub(self.published) >= PUBLISH_BYTES {
            self.publish();
        }
        Ok(Pushed::Done)
    }

    /// Says that this side waits for room, and looks again. Returns whether there is room now.
    fn wait_for(&mut self, record: usize) -> Result<bool, Corrupt> {
        let waits = &self.ring.indices().producer_waits.0;
        waits.store(1, Ordering::Relaxed);
        self.waits = true;
        // The consumer stores its index, fences, and looks at the flag. So either it sees the flag,
        // or this side sees the index.
        fence(Ordering::SeqCst);
        self.refresh()?;
        Ok(self.room() >= record)
    }

    fn stop_waiting(&mut self) {
        if self.waits {
            self.waits = false;
            let waits = &self.ring.indices().producer_waits.0;
            waits.store(0, Ordering::Relaxed);
        }
    }

    /// Whether this side was refused room and has some now; if not, asks again to be woken.
    pub(super) fn room_is_back(&mut self) -> Result<bool, Corrupt> {
        if !self.waits {
            return Ok(false);
        }
        let back = self.wait_for(record_len(MAX_FRAME))?;
        if back {
            self.stop_waiting();
        }
        Ok(back)
    }

    /// Publishes everything. Returns whether the consumer sleeps and must be woken.
    pub(super) fn flush(&mut self) -> bool {
        self.publish();
        if !self.unflushed {
            return false;
        }
        self.unflushed = false;
        // Against the consumer's `arm`: it stores the flag, fences, and looks at the index.
        fence(Ordering::SeqCst);
        let waits = &self.ring.indices().consumer_waits.0;
        if waits.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // A consumer that armed anew meanwhile has looked at the index after it; and whoever clears
        // the flag also wakes, so that no wish is lost.
        waits.store(0, Ordering::Relaxed);
        true
    }
}
