//! Completion queues: entries in guest memory, overrun, and when an event is due.

use super::buffer::{BadBuffer, NotMapped, QueueBuffer, Record};
use super::cqe::{Cqe, SOLICITED, opcode};
use crate::rdma::kept::QueuePlace;
use crate::rdma::verbs::{Completion, CompletionQueue, Pushed};
use dot_iommu::{Access, DotView};
use std::sync::atomic::Ordering;
use vm_memory::Bytes;

/// Counters and consumer indices have 24 bits.
const MASK: u32 = 0xff_ffff;
/// log₂ of the entries at most: a full queue must differ from an empty one.
const MAX_LOG_SIZE: u8 = 23;
/// In the arm word: an event for solicited and failed completions only.
const ARM_SOLICITED: u32 = 1 << 24;
/// Words of the doorbell record.
const CONSUMER: u64 = 0;
const ARM: u64 = 1;

/// A completion queue to be made.
#[derive(Debug)]
pub struct CqSetup {
    /// Its number.
    pub num: u32,
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its entries, 0 to 23.
    pub log_size: u8,
    /// Bytes of an entry: 64 or 128.
    pub cqe_bytes: u16,
    /// Bus address of its doorbell record of 8 bytes: consumer index, arm word.
    pub doorbell: u64,
    /// Event queue for its events.
    pub eqn: u8,
    /// Whether it is written even when it is full.
    pub overrun_ignore: bool,
    /// Whether its arm doorbells are not seen, so that [`Cq::poll_arm`] looks for them. Such a queue
    /// starts armed: the record holds 0 before and after the driver's first arming.
    pub polled: bool,
}

/// What the driver wants an event for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    Not,
    Any,
    Solicited,
}

/// Why a queue stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadResize {
    /// The new buffer cannot be used.
    #[error(transparent)]
    Buffer(#[from] BadBuffer),
    /// The driver has not taken more entries than fit in the new buffer, or none fits in the old one behind them.
    #[error("{0} entries wait for the driver")]
    Outstanding(u32),
}

/// See the module.
#[derive(Debug)]
pub struct Cq {
    num: u32,
    eqn: u8,
    buffer: QueueBuffer,
    log_size: u8,
    log_cqe: u8,
    record: Record,
    overrun_ignore: bool,
    /// Entries pushed, and the driver's last seen consumer index; only 24 bits of them count.
    producer: u32,
    consumer: u32,
    armed: Armed,
    /// Whether there are entries since the last event.
    news: bool,
    /// The producer counter after the newest solicited or failed entry since the last event.
    solicited: Option<u32>,
    /// The arm word that was acted on last.
    arm_word: u32,
    /// The producer counter at the last event.
    told_at: u32,
    failed: bool,
    /// Where it is known to who takes the place of this process.
    place: Option<QueuePlace>,
}

/// Words of a place, and in them: whether it is in use; the failed state and the producer counter; what is armed,
/// the producer counter at the last event, the arm word that was acted on last.
const PRODUCED: usize = 0;
const EVENTS: usize = 1;
const IN_USE: u64 = 1 << 63;
const FAILED: u64 = 1 << 62;
const ARMED_SHIFT: u32 = 56;
const TOLD_SHIFT: u32 = 32;

fn ring(buffer: QueueBuffer, log_size: u8, log_cqe: u8) -> Result<QueueBuffer, BadBuffer> {
    if log_size > MAX_LOG_SIZE {
        return Err(BadBuffer::Size("number of entries"));
    }
    buffer.ring(1 << (log_size + log_cqe))
}

impl Cq {
    /// A queue without entries.
    pub fn new(setup: CqSetup) -> Result<Self, BadBuffer> {
        let log_cqe = match setup.cqe_bytes {
            64 => 6,
            128 => 7,
            _ => return Err(BadBuffer::Size("size of entries")),
        };
        Ok(Self {
            num: setup.num,
            eqn: setup.eqn,
            buffer: ring(setup.buffer, setup.log_size, log_cqe)?,
            log_size: setup.log_size,
            log_cqe,
            record: Record::new(setup.doorbell)?,
            overrun_ignore: setup.overrun_ignore,
            producer: 0,
            consumer: 0,
            armed: match setup.polled {
                true => Armed::Any,
                false => Armed::Not,
            },
            news: false,
            solicited: None,
            arm_word: 0,
            told_at: 0,
            failed: false,
            place: None,
        })
    }

    /// What becomes of it outlives this process from here on.
    pub fn keep_in(&mut self, place: QueuePlace) {
        self.place = Some(place);
        self.keep_events();
        self.keep_producer();
    }

    /// Goes on where a former process was. Answers whether an event is due that it owed.
    pub fn restore(&mut self, place: QueuePlace, view: &DotView<'_>) -> bool {
        let (produced, events) = (place.load(PRODUCED), place.load(EVENTS));
        self.producer = produced as u32 & MASK;
        self.failed = produced & FAILED != 0;
        // An entry may have been stored last and not counted; one, because each is counted right behind its store.
        if self.is_stored(view) {
            self.producer = self.producer.wrapping_add(1) & MASK;
        }
        // What the driver is known to have read.
        self.consumer = self.record.load(CONSUMER, view).unwrap_or(0) & MASK;
        self.told_at = (events >> TOLD_SHIFT) as u32 & MASK;
        self.arm_word = events as u32;
        self.news = self.told_at != self.producer;
        self.solicited = self.news.then_some(self.producer);
        self.armed = match events >> ARMED_SHIFT & 3 {
            1 => Armed::Any,
            2 => Armed::Solicited,
            _ => Armed::Not,
        };
        self.place = Some(place);
        let Ok(word) = self.record.load(ARM, view) else {
            return false;
        };
        // Its doorbell may be lost.
        let rang = word != self.arm_word || events & IN_USE == 0;
        (rang || self.armed != Armed::Not) && self.arm_with(word)
    }

    /// Whether the entry at the producer counter is of its round already.
    fn is_stored(&self, view: &DotView<'_>) -> bool {
        let slot = u64::from(self.producer) & ((1 << self.log_size) - 1);
        let at = ((slot + 1) << self.log_cqe) - 1;
        let mut last = [0];
        let read = self.buffer.read(at, &mut last, view);
        let [last] = last;
        let owner = (self.producer >> self.log_size & 1) as u8;
        read.is_ok() && last & 1 == owner && last >> 4 != opcode::INVALID
    }

    /// The newest entry, if there is one.
    pub fn last(&self, view: &DotView<'_>) -> Option<Cqe> {
        let newest = self.producer.wrapping_sub(1);
        let slot = u64::from(newest) & ((1 << self.log_size) - 1);
        let mut bytes = [0; 64];
        let at = ((slot + 1) << self.log_cqe) - 64;
        self.buffer.read(at, &mut bytes, view).ok()?;
        let [.., last] = bytes;
        let stored = u32::from(last & 1) == newest >> self.log_size & 1;
        (stored && last >> 4 != opcode::INVALID).then(|| Cqe::from_bytes(bytes))
    }

    /// The event that was due is in its queue.
    #[inline]
    pub fn event_stored(&self) {
        self.keep_events();
    }

    #[inline]
    fn keep_events(&self) {
        if let Some(place) = &self.place {
            let armed = match self.armed {
                Armed::Not => 0u64,
                Armed::Any => 1,
                Armed::Solicited => 2,
            };
            let told = u64::from(self.told_at & MASK) << TOLD_SHIFT;
            let word = IN_USE | armed << ARMED_SHIFT | told | u64::from(self.arm_word);
            place.store(EVENTS, word);
        }
    }

    #[inline]
    fn keep_producer(&self) {
        if let Some(place) = &self.place {
            let failed = if self.failed { FAILED } else { 0 };
            place.store(PRODUCED, IN_USE | failed | u64::from(self.producer & MASK));
        }
    }

    /// Its number.
    pub fn num(&self) -> u32 {
        self.num
    }

    /// The event queue for its events.
    pub fn eqn(&self) -> u8 {
        self.eqn
    }

    /// Entries pushed so far, 24 bits.
    pub fn producer(&self) -> u32 {
        self.producer & MASK
    }

    /// Whether it overran or its memory was not mapped.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// The driver rang the arm doorbell. Answers whether the event is due now, because an entry that
    /// the driver has not seen is there already; the queue is then not armed any more.
    ///
    /// Entries that an event told of are seen: programs ask for the next event before they take them,
    /// and some do not expect an event without a new entry.
    pub fn arm(&mut self, view: &DotView<'_>) -> bool {
        match self.record.load(ARM, view) {
            Ok(word) => self.arm_with(word),
            Err(NotMapped) => false,
        }
    }

    /// Looks whether the driver armed the queue without a doorbell; answers whether it did, and as
    /// [`Self::arm`].
    #[inline]
    pub fn poll_arm(&mut self, view: &DotView<'_>) -> (bool, bool) {
        match self.record.load(ARM, view) {
            Ok(word) if word != self.arm_word => (true, self.arm_with(word)),
            _ => (false, false),
        }
    }

    fn arm_with(&mut self, word: u32) -> bool {
        self.arm_word = word;
        let (armed, newest) = match word & ARM_SOLICITED {
            0 => (Armed::Any, self.news.then_some(self.producer)),
            _ => (Armed::Solicited, self.solicited),
        };
        // The driver may have taken more than was there when the newest solicited one was pushed.
        let unseen = newest.map_or(0, |newest| newest.wrapping_sub(word) & MASK);
        let due = (1..=1 << self.log_size).contains(&unseen);
        match due {
            true => self.told(),
            false => {
                self.armed = armed;
                self.keep_events();
            }
        }
        due
    }

    /// The driver gets an event.
    #[inline]
    fn told(&mut self) {
        self.armed = Armed::Not;
        self.news = false;
        self.solicited = None;
        self.told_at = self.producer;
    }

    /// Goes on in another buffer of 2^`log_size` entries, after an entry in the old one that says so
    /// ([`opcode::RESIZE`]). The driver copies the entries before it that it has not taken to the
    /// places behind their own.
    ///
    /// # Errors
    /// [`BadResize`]; nothing happened then.
    pub fn resize(
        &mut self,
        buffer: QueueBuffer,
        log_size: u8,
        view: &DotView<'_>,
    ) -> Result<Pushed, BadResize> {
        let buffer = ring(buffer, log_size, self.log_cqe)?;
        let last = Cqe {
            op_own: opcode::RESIZE << 4,
            ..Cqe::default()
        };
        // A former process may have stored it and not come further; after a finished resize the buffer is another.
        let there = self.last(view);
        let there = there.is_some_and(|cqe| cqe.op_own >> 4 == opcode::RESIZE);
        // Of an entry that is there already the driver copies only what comes before it.
        let outstanding = self.outstanding(view).saturating_sub(u32::from(there));
        if outstanding > 1 << log_size || !there && outstanding >= 1 << self.log_size {
            return Err(BadResize::Outstanding(outstanding));
        }
        if !there && self.store(last.to_bytes(), view).is_err() {
            return Ok(Pushed::Overrun);
        }
        self.buffer = buffer;
        self.log_size = log_size;
        Ok(Pushed::Stored)
    }

    /// Goes on in the buffer that a former process had moved on to.
    pub fn restore_buffer(&mut self, buffer: QueueBuffer, log_size: u8) -> Result<(), BadBuffer> {
        self.buffer = ring(buffer, log_size, self.log_cqe)?;
        self.log_size = log_size;
        Ok(())
    }

    /// Adds an entry of these 64 bytes. The owner bit in the last is set here.
    #[inline]
    pub fn push_raw(&mut self, cqe: [u8; 64], view: &DotView<'_>) -> Pushed {
        let [.., op_own] = cqe;
        if self.store(cqe, view).is_err() {
            return Pushed::Overrun;
        }
        let solicited = op_own & SOLICITED != 0
            || matches!(
                op_own >> 4,
                opcode::REQUESTER_ERROR | opcode::RESPONDER_ERROR
            );
        self.news = true;
        if solicited {
            self.solicited = Some(self.producer);
        }
        match self.armed {
            Armed::Any => {}
            Armed::Solicited if solicited => {}
            _ => return Pushed::Stored,
        }
        self.told();
        Pushed::Notify
    }

    #[inline]
    fn store(&mut self, cqe: [u8; 64], view: &DotView<'_>) -> Result<(), NotMapped> {
        if self.failed || !self.has_room(view) || self.write(cqe, view).is_err() {
            self.failed = true;
            self.keep_producer();
            return Err(NotMapped);
        }
        self.producer = self.producer.wrapping_add(1);
        self.keep_producer();
        Ok(())
    }

    #[inline]
    fn has_room(&mut self, view: &DotView<'_>) -> bool {
        if self.overrun_ignore || !self.is_full() {
            return true;
        }
        match self.record.load(CONSUMER, view) {
            Ok(index) => self.consumer = index,
            Err(NotMapped) => return false,
        }
        !self.is_full()
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.untaken() >= 1 << self.log_size
    }

    /// Entries that the driver had not taken when its index was read last.
    #[inline]
    fn untaken(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & MASK
    }

    /// Entries that the driver has not taken by now; where that is not to be seen, when it was seen last.
    fn outstanding(&mut self, view: &DotView<'_>) -> u32 {
        if self.overrun_ignore {
            return 0;
        }
        if let Ok(index) = self.record.load(CONSUMER, view) {
            self.consumer = index;
        }
        self.untaken()
    }

    /// Writes the entry at the producer counter; the owner bit becomes visible last.
    #[inline]
    fn write(&self, cqe: [u8; 64], view: &DotView<'_>) -> Result<(), NotMapped> {
        let slot = u64::from(self.producer) & ((1 << self.log_size) - 1);
        let owner = u64::from(self.producer >> self.log_size & 1);
        // The entry is the last 64 of its bytes.
        let at = ((slot + 1) << self.log_cqe) - 64;
        let span = self.buffer.span(at, 64, Access::Write, view)?;
        let Some((head, tail)) = cqe.split_last_chunk::<8>() else {
            return Err(NotMapped);
        };
        span.copy_from(head).map_err(|_| NotMapped)?;
        let tail = u64::from_be_bytes(*tail) & !1 | owner;
        span.as_volatile_slice()
            .store(tail.to_be(), head.len(), Ordering::Release)
            .map_err(|_| NotMapped)
    }
}

impl CompletionQueue for Cq {
    #[inline]
    fn push(&mut self, completion: &Completion, memory: &DotView<'_>) -> Pushed {
        self.push_raw(Cqe::new(completion).to_bytes(), memory)
    }

    #[inline]
    fn index(&self) -> u32 {
        self.producer & MASK
    }
}
