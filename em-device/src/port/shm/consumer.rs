//! The receiving end of a ring.

use super::record::{ALIGN, Header, record_len};
use super::ring_mem::{ATTACHED, RING, RingMem};
use super::sync::{Ordering, fence};
use super::{Corrupt, MAX_FRAME};
use vm_memory::VolatileSlice;

/// Room in bytes that a waiting producer is woken for: waking it for each record's room would make
/// it sleep and wake once a record.
const WAKE_ROOM: u64 = RING as u64 / 4;

/// The receiving end.
#[derive(Debug)]
pub(super) struct Consumer {
    ring: RingMem,
    /// Where the next record is.
    head: u64,
    /// What the producer is known to know of that.
    published: u64,
    /// The producer's index when last looked at.
    tail: u64,
}

impl Consumer {
    /// Goes on where the ring is: at 0, or where a former process gave room back last. What that one took after
    /// that comes again.
    pub(super) fn new(ring: RingMem) -> Result<Self, Corrupt> {
        let head = ring.indices().head.0.load(Ordering::Acquire);
        let mut consumer = Self {
            ring,
            head,
            published: head,
            tail: head,
        };
        if head % ALIGN as u64 != 0 {
            return Err(Corrupt::Tail { tail: head, head });
        }
        consumer.refresh()?;
        Ok(consumer)
    }

    /// Whether the producer is there.
    pub(super) fn producer_attached(&self) -> bool {
        let state = &self.ring.indices().producer_state.0;
        state.load(Ordering::Acquire) == ATTACHED
    }

    /// Looks at the producer's index once and believes it only if it moved forward and by no more
    /// than fits.
    fn refresh(&mut self) -> Result<(), Corrupt> {
        let tail = self.ring.indices().tail.0.load(Ordering::Acquire);
        let waiting = tail.wrapping_sub(self.head);
        if waiting < self.tail.wrapping_sub(self.head)
            || waiting > RING as u64
            || tail % ALIGN as u64 != 0
        {
            return Err(Corrupt::Tail {
                tail,
                head: self.head,
            });
        }
        self.tail = tail;
        Ok(())
    }

    /// Shows at most `budget` records to `take`, which returns whether the record is done with. The
    /// header was read once; the bytes may change at any time. The room is given back by
    /// [`Self::publish`] only.
    ///
    /// The header goes as its words ([`Header::from_words`]) and the slice by reference: a copy of either would be read in
    /// wider pieces than it was written in, for which a processor waits until all stores before it are done, those to the
    /// guest's memory among them.
    pub(super) fn batch(
        &mut self,
        budget: usize,
        take: &mut dyn FnMut([u64; 2], &[VolatileSlice<'_>; 1]) -> bool,
    ) -> Result<usize, Corrupt> {
        if self.head == self.tail {
            self.refresh()?;
        }
        let mut count = 0;
        while count < budget && self.head != self.tail {
            let waiting = self.tail.wrapping_sub(self.head) as usize;
            let words = self.ring.load_header(self.head);
            let len = words.map_or(0, |words| Header::from_words(words).len as usize);
            let bytes = self.ring.bytes(self.head.wrapping_add(ALIGN as u64), len);
            let (Some(words), Some(bytes), true, true) = (
                words,
                bytes,
                (1..=MAX_FRAME).contains(&len),
                record_len(len) <= waiting,
            ) else {
                return Err(Corrupt::Record { len, waiting });
            };
            if !take(words, &[bytes]) {
                break;
            }
            self.head = self.head.wrapping_add(record_len(len) as u64);
            count += 1;
        }
        Ok(count)
    }

    /// Gives the room of all that was taken back. Returns whether the producer waits for it and must
    /// be woken.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.head {
            return false;
        }
        self.published = self.head;
        let indices = self.ring.indices();
        indices.head.0.store(self.head, Ordering::Release);
        // Against the producer's `wait_for`: it stores the flag, fences, and looks at the index.
        fence(Ordering::SeqCst);
        if indices.producer_waits.0.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // A producer that waits has published all it has, so `tail` as of now is what fills the ring;
        // an older one only makes the wake-up come early.
        let room = RING as u64 - self.tail.wrapping_sub(self.head);
        if room < WAKE_ROOM {
            return false;
        }
        indices.producer_waits.0.store(0, Ordering::Relaxed);
        true
    }

    /// Asks for a wake-up. Returns whether records are waiting already, and then asks for nothing.
    pub(super) fn arm(&mut self) -> Result<bool, Corrupt> {
        if self.head != self.tail {
            return Ok(true);
        }
        let waits = &self.ring.indices().consumer_waits.0;
        waits.store(1, Ordering::Relaxed);
        // Against the producer's `flush`: it stores the index, fences, and looks at the flag.
        fence(Ordering::SeqCst);
        let refreshed = self.refresh();
        let waiting = self.head != self.tail;
        if waiting || refreshed.is_err() {
            self.disarm();
        }
        refreshed.map(|()| waiting)
    }

    /// Asks for no wake-up any more.
    pub(super) fn disarm(&mut self) {
        let waits = &self.ring.indices().consumer_waits.0;
        waits.store(0, Ordering::Relaxed);
    }
}
