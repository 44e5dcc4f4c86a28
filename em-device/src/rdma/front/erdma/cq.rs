//! Completion queues: entries of 32 bytes, and when an event is due.
//!
//! The driver never says what it has read but when it wants an event, so an overrun cannot be seen.

use crate::rdma::front::allowance::Charge;
use crate::rdma::front::buffer::{BadBuffer, NotMapped, QueueBuffer, Record};
use crate::rdma::kept::QueuePlace;
use crate::rdma::verbs::{Completion, CompletionQueue, Done, Pushed, Status};
use dot_iommu::{Access, DotView};
use std::sync::atomic::Ordering;
use vm_memory::Bytes;

/// Bytes of an entry.
pub(super) const CQE: u64 = 32;
/// log₂ of the entries at most.
const MAX_LOG_SIZE: u32 = 20;
/// Consumer indices have 24 bits.
const MASK: u32 = 0xff_ffff;
/// In the doorbell record: an event for solicited and failed completions only.
const SOLICITED: u64 = 1 << 30;
/// See [`SOLICITED`]: an event at all. The driver rings for nothing else.
const ARM: u64 = 1 << 31;

/// Queue that an entry is about.
const SEND: u32 = 0;
const RECEIVE: u32 = 1;
/// See [`SEND`]: the command queue.
pub(super) const COMMANDS: u32 = 2;

/// Opcodes of work requests, which stand in completions too.
pub(super) mod opcode {
    pub(crate) const WRITE: u8 = 0;
    pub(crate) const READ: u8 = 1;
    pub(crate) const SEND: u8 = 2;
    pub(crate) const SEND_IMMEDIATE: u8 = 3;
    pub(crate) const RECEIVE: u8 = 4;
    pub(crate) const RECEIVE_WRITE_IMMEDIATE: u8 = 5;
    pub(crate) const RECEIVE_INVALIDATE: u8 = 6;
    pub(crate) const WRITE_IMMEDIATE: u8 = 9;
    pub(crate) const RECEIVE_IMMEDIATE: u8 = 12;
    pub(crate) const SEND_INVALIDATE: u8 = 13;
    pub(crate) const REGISTER: u8 = 14;
    pub(crate) const INVALIDATE: u8 = 15;
    pub(crate) const READ_INVALIDATE: u8 = 16;
    pub(crate) const COMPARE_SWAP: u8 = 17;
    pub(crate) const FETCH_ADD: u8 = 18;
}

/// How a request ended, in an entry.
mod syndrome {
    pub(super) const OK: u32 = 0;
    pub(super) const GENERAL: u32 = 1;
    pub(super) const BAD_RECEIVE: u32 = 2;
    pub(super) const REMOTE_KEY: u32 = 3;
    pub(super) const BAD_SEND: u32 = 8;
    pub(super) const LOCAL_KEY: u32 = 10;
    pub(super) const FLUSHED: u32 = 15;
    pub(super) const RETRY_EXCEEDED: u32 = 16;
}

/// A work request's name in its completion: index of its first block, and opcode.
pub(super) fn cookie(index: u16, opcode: u8) -> u32 {
    u32::from(opcode) << 16 | u32::from(index)
}

/// What an entry says: eight words, of which the first lacks the owner bit.
pub(super) type Cqe = [u32; 8];

/// An entry for the owner bit's word: queue, opcode, how it ended.
pub(super) fn header(opcode: u32, queue: u32, syndrome: u32) -> u32 {
    opcode << 16 | queue << 8 | syndrome
}

fn syndrome(status: Status, receive: bool) -> u32 {
    match status {
        Status::Success => syndrome::OK,
        Status::LocalQpOperation if receive => syndrome::BAD_RECEIVE,
        Status::LocalQpOperation => syndrome::BAD_SEND,
        Status::LocalProtection | Status::Bind | Status::LocalAccess => syndrome::LOCAL_KEY,
        Status::Flushed => syndrome::FLUSHED,
        Status::RemoteAccess => syndrome::REMOTE_KEY,
        Status::RetryExceeded | Status::RnrRetryExceeded => syndrome::RETRY_EXCEEDED,
        // The device has no word for these.
        Status::LocalLength
        | Status::BadResponse
        | Status::RemoteInvalidRequest
        | Status::RemoteOperation => syndrome::GENERAL,
    }
}

/// The entry of a completion.
fn entry(completion: &Completion) -> Cqe {
    let receive = completion.done.is_receive();
    let (opcode, value) = match completion.done {
        Done::Receive => (opcode::RECEIVE, 0),
        // As the bytes of the sender's number in the opposite order.
        Done::ReceiveImmediate(value) => (opcode::RECEIVE_IMMEDIATE, value.swap_bytes()),
        Done::ReceiveWriteImmediate(value) => (opcode::RECEIVE_WRITE_IMMEDIATE, value.swap_bytes()),
        Done::ReceiveInvalidate(key) => (opcode::RECEIVE_INVALIDATE, key.0),
        _ => ((completion.cookie >> 16) as u8, 0),
    };
    let queue = if receive { RECEIVE } else { SEND };
    let source = completion.source.map_or(0, |source| {
        let ipv6 = u32::from(!source.ipv4) << 31;
        ipv6 | u32::from(source.service_level) << 20 | source.qp.0 & 0xf_ffff
    });
    [
        header(opcode.into(), queue, syndrome(completion.status, receive)),
        completion.cookie & 0xffff,
        completion.qp.0,
        value,
        completion.len,
        0,
        0,
        source,
    ]
}

/// What the driver wants an event for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    Not,
    Any,
    Solicited,
}

/// See the module. A new one is not armed.
#[derive(Debug)]
pub struct Cq {
    eqn: u32,
    buffer: QueueBuffer,
    /// What its page list takes.
    _charge: Option<Charge>,
    log_size: u32,
    record: Record,
    producer: u32,
    armed: Armed,
    /// Whether there are entries since the last event.
    news: bool,
    /// The producer counter after the newest solicited or failed entry since the last event.
    solicited: Option<u32>,
    /// What was in the doorbell record when it was acted on last, see [`arm_word`].
    arm_word: u32,
    /// The producer counter at the last event, 24 bits.
    told_at: u32,
    /// Where it is known to who takes the place of this process.
    place: Option<QueuePlace>,
}

/// Words of a place, and in the second: what is armed, the producer counter at the last event, the record's word that
/// was acted on last.
const PRODUCED: usize = 0;
const EVENTS: usize = 1;
const ARMED_SHIFT: u32 = 56;
const TOLD_SHIFT: u32 = 32;

/// What of a doorbell record tells one arming from the next: all of the lower half but for the bits without a meaning,
/// in whose place the count of armings stands.
fn arm_word(record: u64) -> u32 {
    const UNUSED: u32 = 0xf << 24;
    record as u32 & !UNUSED | (record >> 56 << 24) as u32 & UNUSED
}

impl Cq {
    /// A queue of 2^`log_size` entries with its doorbell record at `record`; `eqn` is the event queue for its events.
    pub(super) fn new(
        buffer: QueueBuffer,
        log_size: u32,
        record: u64,
        eqn: u32,
    ) -> Result<Self, BadBuffer> {
        if log_size > MAX_LOG_SIZE {
            return Err(BadBuffer::Size("number of entries"));
        }
        Ok(Self {
            eqn,
            buffer: buffer.ring(CQE << log_size)?,
            _charge: None,
            log_size,
            record: Record::new(record)?,
            producer: 0,
            armed: Armed::Not,
            news: false,
            solicited: None,
            arm_word: 0,
            told_at: 0,
            place: None,
        })
    }

    /// Holds what its page list takes from the function's allowance.
    pub(super) fn hold(&mut self, charge: Charge) {
        self._charge = Some(charge);
    }

    /// What becomes of it outlives this process from here on.
    pub(super) fn keep_in(&mut self, place: QueuePlace) {
        self.place = Some(place);
        self.keep_events();
        self.keep_producer();
    }

    /// Goes on where a former process was. Answers whether an event is due that it owed.
    pub(super) fn restore(&mut self, place: QueuePlace, view: &DotView<'_>) -> bool {
        let events = place.load(EVENTS);
        self.producer = place.load(PRODUCED) as u32;
        // An entry may have been stored last and not counted; one, because each is counted right behind its store.
        let mut next = [0; CQE as usize];
        if self.read(self.producer, &mut next, view).is_ok() {
            let [first, ..] = next;
            if u32::from(first >> 7) == self.owner() {
                self.producer = self.producer.wrapping_add(1);
            }
        }
        self.told_at = (events >> TOLD_SHIFT) as u32 & MASK;
        self.arm_word = events as u32;
        self.news = self.told_at != self.producer & MASK;
        self.solicited = self.news.then_some(self.producer);
        self.armed = match events >> ARMED_SHIFT & 3 {
            1 => Armed::Any,
            2 => Armed::Solicited,
            _ => Armed::Not,
        };
        self.place = Some(place);
        self.keep_producer();
        let Ok(word) = self.record.load_whole(view) else {
            return false;
        };
        // Its doorbell may be lost.
        let rang = word & ARM != 0 && arm_word(word) != self.arm_word;
        (rang || self.armed != Armed::Not) && self.arm_with(word)
    }

    /// The event that was due is in its queue.
    pub(super) fn event_stored(&self) {
        self.keep_events();
    }

    fn keep_producer(&self) {
        if let Some(place) = &self.place {
            place.store(PRODUCED, self.producer.into());
        }
    }

    fn keep_events(&self) {
        if let Some(place) = &self.place {
            let armed = match self.armed {
                Armed::Not => 0u64,
                Armed::Any => 1,
                Armed::Solicited => 2,
            };
            let told = u64::from(self.told_at) << TOLD_SHIFT;
            place.store(
                EVENTS,
                armed << ARMED_SHIFT | told | u64::from(self.arm_word),
            );
        }
    }

    /// The bytes of entry `index`.
    fn read(
        &self,
        index: u32,
        into: &mut [u8; CQE as usize],
        view: &DotView<'_>,
    ) -> Result<(), NotMapped> {
        let slot = u64::from(index) & ((1 << self.log_size) - 1);
        self.buffer.read(slot * CQE, into, view)
    }

    /// The newest entry, if there is one.
    pub(super) fn last(&self, view: &DotView<'_>) -> Option<[u8; CQE as usize]> {
        let mut entry = [0; CQE as usize];
        let newest = self.producer.checked_sub(1)?;
        self.read(newest, &mut entry, view).ok()?;
        Some(entry)
    }

    /// The owner bit of the next entry.
    fn owner(&self) -> u32 {
        !self.producer >> self.log_size & 1
    }

    /// The event queue for its events.
    pub(super) fn eqn(&self) -> u32 {
        self.eqn
    }

    /// The driver rang. Answers whether the event is due now, because an entry that the driver has not seen is there
    /// already; the queue is then not armed any more.
    ///
    /// Entries that an event told of are seen: programs ask for the next event before they take them, and some do not
    /// expect an event without a new entry.
    pub(super) fn arm(&mut self, view: &DotView<'_>) -> bool {
        match self.record.load_whole(view) {
            Ok(word) => self.arm_with(word),
            Err(NotMapped) => false,
        }
    }

    fn arm_with(&mut self, word: u64) -> bool {
        self.arm_word = arm_word(word);
        let (armed, newest) = match word & SOLICITED {
            0 => (Armed::Any, self.news.then_some(self.producer)),
            _ => (Armed::Solicited, self.solicited),
        };
        // The driver may have taken more than was there when the newest solicited one was pushed.
        let unread = newest.map_or(0, |newest| newest.wrapping_sub(word as u32) & MASK);
        let due = (1..1 << 23).contains(&unread);
        match due {
            true => self.told(),
            false => {
                self.armed = armed;
                self.keep_events();
            }
        }
        due
    }

    /// As [`Self::arm`] for commands: entries that the driver has not taken are not seen, whatever it was told. A
    /// command that it does not hear of ends the device for it.
    pub(super) fn arm_for_commands(&mut self, view: &DotView<'_>) -> bool {
        self.news = true;
        self.arm(view)
    }

    /// Whether the driver ever asked for an event.
    pub(super) fn ever_armed(&self, view: &DotView<'_>) -> bool {
        let record = self.record.load_whole(view);
        record.is_ok_and(|word| word & ARM != 0)
    }

    /// The driver gets an event.
    fn told(&mut self) {
        self.armed = Armed::Not;
        self.news = false;
        self.solicited = None;
        self.told_at = self.producer & MASK;
    }

    /// Adds an entry; the driver polls the owner bit, so its word comes last.
    pub(super) fn store(&mut self, cqe: &Cqe, view: &DotView<'_>) -> Result<(), NotMapped> {
        let slot = u64::from(self.producer) & ((1 << self.log_size) - 1);
        let span = self.buffer.span(slot * CQE, CQE, Access::Write, view)?;
        let mut bytes = [0; CQE as usize];
        for (at, word) in bytes.chunks_exact_mut(4).zip(cqe) {
            at.copy_from_slice(&word.to_be_bytes());
        }
        let rest = span.subspan(4, CQE as usize - 4).ok_or(NotMapped)?;
        rest.copy_from(bytes.get(4..).unwrap_or_default())
            .map_err(|_| NotMapped)?;
        let [first, ..] = cqe;
        let word = (first & !(1 << 31) | self.owner() << 31).to_be();
        span.as_volatile_slice()
            .store(word, 0, Ordering::Release)
            .map_err(|_| NotMapped)?;
        self.producer = self.producer.wrapping_add(1);
        self.keep_producer();
        Ok(())
    }

    /// Whether there is an event for a new entry; the queue is then not armed any more.
    pub(super) fn fires(&mut self, solicited: bool) -> bool {
        self.news = true;
        if solicited {
            self.solicited = Some(self.producer);
        }
        let fires = match self.armed {
            Armed::Not => false,
            Armed::Any => true,
            Armed::Solicited => solicited,
        };
        if fires {
            self.told();
        }
        fires
    }
}

impl CompletionQueue for Cq {
    fn push(&mut self, completion: &Completion, memory: &DotView<'_>) -> Pushed {
        if self.store(&entry(completion), memory).is_err() {
            return Pushed::Overrun;
        }
        let solicited = completion.solicited || completion.status != Status::Success;
        match self.fires(solicited) {
            true => Pushed::Notify,
            false => Pushed::Stored,
        }
    }

    fn index(&self) -> u32 {
        self.producer & MASK
    }
}
