//! Places of queues: a few words each that the data path stores to.
//!
//! A completion queue entry is stored by one store of the guest's memory, and what it means for the queue it
//! completes by another one here. A process can die between the two. So *before* the entry its meaning is stored as
//! "finishing", with the index of the entry: it counts if the completion queue has that entry. Afterwards it is
//! stored as what stands.

use super::memory::{Memory, QP_BYTES, QP_PLACES, QUEUE_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Old values of atomics that are kept: as many as may be under way at once.
const ATOMICS: usize = 16;
const VALID: u64 = 1 << 63;
const LOW24: u64 = 0xff_ffff;
/// In the word of the responder: the second copy of the detail is in use.
const SECOND_COPY: u64 = 1 << 41;

/// Words of a queue pair's place.
const STATE: usize = 0;
const SENT: usize = 1;
const SENDING: usize = 2;
const RECEIVED: usize = 3;
const RECEIVING: usize = 4;
const ATOMIC: usize = 5;
const COUNT: usize = 6;
const DETAILS: [usize; 2] = [8, 12];
const OLD_VALUES: usize = 16;
const _: () = assert!(OLD_VALUES + 2 * ATOMICS <= QP_BYTES / 8);

/// How far one side of a queue pair is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Finished {
    /// Position in the work queue behind the last entry that is done with; 16 bits count.
    pub position: u16,
    /// PSN behind it, 24 bits: as requester the oldest without answer, as responder the one expected.
    pub psn: u32,
}

impl Finished {
    fn bits(self) -> u64 {
        u64::from(self.psn) & LOW24 | u64::from(self.position) << 24
    }

    fn of(bits: u64) -> Self {
        Self {
            position: (bits >> 24) as u16,
            psn: (bits & LOW24) as u32,
        }
    }
}

/// A message that has begun to come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// There is none.
    None,
    /// A SEND of which `len` bytes came, or a receive that was taken for nothing yet.
    Send {
        /// Bytes.
        len: u32,
        /// The receive's name when it is of a shared queue.
        receive: Option<u16>,
    },
    /// An RDMA WRITE or READ.
    Access {
        /// A READ.
        read: bool,
        /// Where the next packet's bytes are.
        next: u64,
        /// Key.
        key: u32,
        /// Bytes that have not come.
        left: u32,
        /// Bytes of the message.
        total: u32,
    },
}

/// What a queue pair's place says.
#[derive(Debug, Clone)]
pub struct Standing {
    /// What [`QpPlace::set_state`] stored.
    pub state: u8,
    /// Requester.
    pub sent: Finished,
    /// Responder.
    pub received: Finished,
    /// Of the message that comes in.
    pub detail: Detail,
    /// PSN of an atomic that was begun: whether it was done is not known when it is the one expected.
    pub atomic: Option<u32>,
    /// Old values of the last atomics by PSN, in order.
    pub atomics: Vec<(u32, u64)>,
}

/// A queue pair's place.
#[derive(Debug)]
pub struct QpPlace {
    memory: Arc<Memory>,
    at: usize,
    /// Which copy of the detail is in use.
    copy: bool,
}

impl QpPlace {
    pub(super) fn new(memory: &Arc<Memory>, number: u32) -> Option<Self> {
        let at = QP_PLACES + number as usize * QP_BYTES;
        ((number as usize) < super::memory::NUMBERS).then(|| Self {
            memory: memory.clone(),
            at,
            copy: false,
        })
    }

    #[inline]
    fn word(&self, number: usize) -> Option<&AtomicU64> {
        self.memory.word(self.at + 8 * number)
    }

    #[inline]
    fn store(&self, number: usize, value: u64) {
        #[cfg(test)]
        crate::testing::kill::before_store();
        if let Some(word) = self.word(number) {
            word.store(value, Ordering::Release);
        }
    }

    fn load(&self, number: usize) -> u64 {
        self.word(number)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Begins anew: from here on the place belongs to `owner`, a number that is not 0.
    pub fn begin(&mut self, owner: u32, standing: &Standing) {
        self.store(STATE, 0);
        self.store(SENT, standing.sent.bits());
        self.store(SENDING, 0);
        self.store(RECEIVING, 0);
        self.store(ATOMIC, 0);
        self.store(COUNT, 0);
        for (psn, value) in &standing.atomics {
            self.atomic_done(*psn, *value);
        }
        self.received(standing.received, standing.detail);
        self.store(STATE, u64::from(owner) << 32 | u64::from(standing.state));
    }

    /// As [`Self::begin`] where the place may be `owner`'s already: then what it says never goes, whenever the process
    /// dies.
    pub fn go_on(&mut self, owner: u32, standing: &Standing) {
        if self.load(STATE) >> 32 != u64::from(owner) {
            return self.begin(owner, standing);
        }
        self.copy = self.load(RECEIVED) & SECOND_COPY != 0;
        self.sent(standing.sent);
        self.received(standing.received, standing.detail);
        self.set_state(standing.state);
    }

    /// Nobody's.
    pub fn forget(&self) {
        self.store(STATE, 0);
    }

    /// A state that is not a command's doing.
    pub fn set_state(&self, state: u8) {
        let owner = self.load(STATE) >> 32;
        if owner != 0 {
            self.store(STATE, owner << 32 | u64::from(state));
        }
    }

    /// As requester it is so far.
    #[inline]
    pub fn sent(&self, now: Finished) {
        self.store(SENT, now.bits());
        // PSNs wrap: an old one would be ahead some day.
        self.store(SENDING, 0);
    }

    /// It is so far when its completion queue has the entry `index`.
    #[inline]
    pub fn sending(&self, then: Finished, index: u32) {
        self.store(SENDING, finishing(then, index));
    }

    /// As responder it is so far, with a message that has begun.
    #[inline]
    pub fn received(&mut self, now: Finished, detail: Detail) {
        let bits = now.bits();
        if detail == Detail::None {
            self.store(RECEIVED, bits);
            self.store(RECEIVING, 0);
            return;
        }
        self.copy = !self.copy;
        let [first, second] = DETAILS;
        let at = if self.copy { second } else { first };
        let words = match detail {
            Detail::None => [0; 3],
            Detail::Send { len, receive } => {
                let receive = receive.map_or(0, |receive| VALID | u64::from(receive));
                [u64::from(len), receive, 1]
            }
            Detail::Access {
                read,
                next,
                key,
                left,
                total,
            } => [
                next,
                u64::from(key) << 32 | u64::from(left),
                u64::from(total) << 32 | if read { 3 } else { 2 },
            ],
        };
        for (n, word) in words.into_iter().enumerate() {
            self.store(at + n, word);
        }
        let copy = if self.copy { SECOND_COPY } else { 0 };
        self.store(RECEIVED, bits | 1 << 40 | copy);
        self.store(RECEIVING, 0);
    }

    /// It is so far when its completion queue has the entry `index`; no message has begun then.
    #[inline]
    pub fn receiving(&self, then: Finished, index: u32) {
        self.store(RECEIVING, finishing(then, index));
    }

    /// An atomic is going to be done.
    pub fn atomic(&self, psn: u32) {
        self.store(ATOMIC, VALID | u64::from(psn));
    }

    /// It was done; it counts when the PSN behind it is expected.
    pub fn atomic_done(&self, psn: u32, value: u64) {
        let count = self.load(COUNT);
        let at = OLD_VALUES + 2 * (count as usize % ATOMICS);
        self.store(at + 1, value);
        self.store(at, VALID | u64::from(psn));
        self.store(COUNT, count.wrapping_add(1));
    }

    /// What is there, if it is `owner`'s. `sent` and `received` answer whether the queue pair's completion queues
    /// for sends and receives have an entry.
    pub fn standing(
        &self,
        owner: u32,
        has_sent: impl Fn(u32) -> bool,
        has_received: impl Fn(u32) -> bool,
    ) -> Option<Standing> {
        let state = self.load(STATE);
        if owner == 0 || state >> 32 != u64::from(owner) {
            return None;
        }
        let sent = Finished::of(self.load(SENT));
        let stood = self.load(RECEIVED);
        let received = Finished::of(stood);
        let ahead = |to: Finished, from: Finished| {
            let psn = (to.psn.wrapping_sub(from.psn) << 8) as i32;
            let position = to.position.wrapping_sub(from.position) as i16;
            psn > 0 || psn == 0 && position > 0
        };
        let finished = |word: u64, from: Finished, has: &dyn Fn(u32) -> bool| {
            let then = Finished::of(word & ((1 << 40) - 1));
            let index = (word >> 40) as u32;
            (word != 0 && ahead(then, from) && has(index)).then_some(then)
        };
        let done = finished(self.load(RECEIVING), received, &has_received);
        let detail = match (done, stood >> 40 & 3) {
            (Some(_), _) | (None, 0 | 2) => Detail::None,
            (None, copy) => self.detail(copy == 3),
        };
        let received = done.unwrap_or(received);
        let atomic = self.load(ATOMIC);
        Some(Standing {
            state: state as u8,
            sent: finished(self.load(SENDING), sent, &has_sent).unwrap_or(sent),
            received,
            detail,
            atomic: (atomic & VALID != 0).then_some((atomic & LOW24) as u32),
            atomics: self.atomics(),
        })
    }

    fn detail(&self, copy: bool) -> Detail {
        let [first, second] = DETAILS;
        let at = if copy { second } else { first };
        let [a, b, c] = [at, at + 1, at + 2].map(|number| self.load(number));
        match c & 3 {
            1 => Detail::Send {
                len: a as u32,
                receive: (b & VALID != 0).then_some(b as u16),
            },
            kind @ (2 | 3) => Detail::Access {
                read: kind == 3,
                next: a,
                key: (b >> 32) as u32,
                left: b as u32,
                total: (c >> 32) as u32,
            },
            _ => Detail::None,
        }
    }

    fn atomics(&self) -> Vec<(u32, u64)> {
        let count = self.load(COUNT);
        let first = count.saturating_sub(ATOMICS as u64);
        let one = |n: u64| {
            let at = OLD_VALUES + 2 * (n as usize % ATOMICS);
            let psn = self.load(at);
            (psn & VALID != 0).then(|| ((psn & LOW24) as u32, self.load(at + 1)))
        };
        (first..count).filter_map(one).collect()
    }
}

/// "So far, when there is that entry"; the index has 24 bits. Never 0 but where nothing is ahead of it.
#[inline]
fn finishing(then: Finished, index: u32) -> u64 {
    then.bits() | u64::from(index) << 40
}

/// The place of a queue of another kind: two words.
#[derive(Debug)]
pub struct QueuePlace {
    memory: Arc<Memory>,
    at: usize,
}

impl QueuePlace {
    pub(super) fn new(
        memory: &Arc<Memory>,
        first: usize,
        count: usize,
        number: u32,
    ) -> Option<Self> {
        let at = first + number as usize * QUEUE_BYTES;
        ((number as usize) < count).then(|| Self {
            memory: memory.clone(),
            at,
        })
    }

    /// Stores the first word (0) or the second.
    #[inline]
    pub fn store(&self, number: usize, value: u64) {
        let word = self.memory.word(self.at + 8 * (number & 1));
        if let Some(word) = word {
            word.store(value, Ordering::Release);
        }
    }

    /// The first word (0) or the second.
    pub fn load(&self, number: usize) -> u64 {
        let word = self.memory.word(self.at + 8 * (number & 1));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }
}
