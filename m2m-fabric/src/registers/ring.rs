//! The protocol of one ring.
//!
//! The requester counts accesses: access number `p` uses slot `p % SLOTS`. A slot's state word holds
//! the number (its low 29 bits) and a tag:
//!
//! ```text
//!            requester              server
//!   free(p) ───────────► Request(p) ───────► Done(p) = free(p + SLOTS)
//!     │ ▲                    │ requester          ▲
//!     │ server               ▼ falls asleep       │ server, and wakes the requester
//!     ▼ falls asleep     Waited(p) ───────────────┘
//!   Asleep(p) ─► Request(p), and wakes the server
//! ```
//!
//! `free(p)` is `Done(p − SLOTS)`, or zero in the first lap. As the number is part of the word:
//!
//! * a completion that comes after its requester gave up is never taken for a later one: the later
//!   access has another number, in another slot or in the same slot after `Done` of the first;
//! * "I fall asleep" and "here is news" are changes of the same word, each a read-modify-write, so one
//!   of the two sees the other and no wake-up is lost; nobody needs a fence between two words.
//!
//! Orderings: whoever hands a slot over does so by a *release* operation on the state word, whoever
//! takes it over by an *acquire* operation; the other words of a slot belong to one side at a time and
//! are accessed *relaxed*. They are atomics all the same, because a hostile peer keeps to nothing:
//! each is copied once and checked after.
//!
//! Nothing here believes an index from shared memory: both sides count by themselves and only compare.

use super::sync::{AtomicU32, Ordering, StateWord};
use std::time::Duration;

/// Slots of a ring: accesses that can be outstanding in one direction.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 256 };

const TAG_BITS: u32 = 3;
const REQUEST: u32 = 1;
const WAITED: u32 = 2;
const DONE: u32 = 3;
const ASLEEP: u32 = 4;

const OP_READ: u32 = 1;
const OP_WRITE: u32 = 2;
const OP_POST: u32 = 3;

/// One access in shared memory: a cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    state: StateWord,
    op: AtomicU32,
    address: AtomicU32,
    byte_enable: AtomicU32,
    value: AtomicU32,
    completion: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 64);

/// A register access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read {
        address: u32,
    },
    Write {
        address: u32,
        byte_enable: u8,
        value: u32,
    },
    Post {
        address: u32,
        byte_enable: u8,
        value: u32,
    },
}

/// The other side wrote something into the ring that the protocol does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Corrupt(pub(crate) &'static str);

fn word(position: u64, tag: u32) -> u32 {
    (position as u32) << TAG_BITS | tag
}

/// The state of `position`'s slot before its request.
fn free(position: u64) -> u32 {
    position
        .checked_sub(SLOTS as u64)
        .map_or(0, |last| word(last, DONE))
}

/// The slots of one direction, wherever they lie.
pub(crate) trait Slots {
    /// The slot at `index % SLOTS`.
    fn slot(&self, index: u64) -> &Slot;
}

/// What [`Requester::submit`] did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    /// The access has this number.
    At(u64),
    /// The server has not done the access of this number yet, whose slot is needed.
    Full(u64),
}

/// State of the requesting side.
#[derive(Debug, Default)]
pub(crate) struct Requester {
    next: u64,
}

impl Requester {
    /// Puts an access into the ring if there is room, and wakes the server if it sleeps.
    pub(crate) fn submit(
        &mut self,
        slots: &impl Slots,
        access: Access,
    ) -> Result<Submitted, Corrupt> {
        let position = self.next;
        let slot = slots.slot(position);
        // Acquire: the server has read the slot's old access before we overwrite it.
        let state = slot.state.atomic().load(Ordering::Acquire);
        if state != free(position) && state != word(position, ASLEEP) {
            return match position.checked_sub(SLOTS as u64) {
                Some(last) if state == word(last, REQUEST) || state == word(last, WAITED) => {
                    Ok(Submitted::Full(last))
                }
                _ => Err(Corrupt("a slot that must be free is not")),
            };
        }
        let (op, address, byte_enable, value) = match access {
            Access::Read { address } => (OP_READ, address, 0, 0),
            Access::Write {
                address,
                byte_enable,
                value,
            } => (OP_WRITE, address, byte_enable, value),
            Access::Post {
                address,
                byte_enable,
                value,
            } => (OP_POST, address, byte_enable, value),
        };
        slot.op.store(op, Ordering::Relaxed);
        slot.address.store(address, Ordering::Relaxed);
        slot.byte_enable
            .store(byte_enable.into(), Ordering::Relaxed);
        slot.value.store(value, Ordering::Relaxed);
        // Release: the fields are there when the state says so.
        let before = slot
            .state
            .atomic()
            .swap(word(position, REQUEST), Ordering::AcqRel);
        if before == word(position, ASLEEP) {
            slot.state.wake();
        }
        self.next += 1;
        Ok(Submitted::At(position))
    }
}

/// The completion of access `position`, `None` while it is not there. Only for the newest access and
/// the one [`Submitted::Full`] names: the slots of others may be in use again.
pub(crate) fn completion(slots: &impl Slots, position: u64) -> Result<Option<u32>, Corrupt> {
    let slot = slots.slot(position);
    // Acquire: the completion is there when the state says so.
    let state = slot.state.atomic().load(Ordering::Acquire);
    // Asleep: the server has gone round the ring and waits for the next access in this slot.
    if state == word(position, DONE) || state == word(position + SLOTS as u64, ASLEEP) {
        Ok(Some(slot.completion.load(Ordering::Relaxed)))
    } else if state == word(position, REQUEST) || state == word(position, WAITED) {
        Ok(None)
    } else {
        Err(Corrupt("the state of a waiting access is none it can have"))
    }
}

/// Sleeps until access `position` may be complete; may return early.
pub(crate) fn wait_for_completion(slots: &impl Slots, position: u64, timeout: Duration) {
    let state = &slots.slot(position).state;
    let waited = word(position, WAITED);
    let before = state.atomic().compare_exchange(
        word(position, REQUEST),
        waited,
        Ordering::AcqRel,
        Ordering::Relaxed,
    );
    if before.is_ok() || before == Err(waited) {
        state.wait(waited, timeout);
    }
}

/// Wakes this process's own thread from [`wait_for_completion`] or [`Server::wait`] at `position`.
pub(crate) fn rouse(slots: &impl Slots, position: u64) {
    slots.slot(position).state.wake();
}

/// State of the answering side.
#[derive(Debug, Default)]
pub(crate) struct Server {
    head: u64,
}

impl Server {
    /// Number of the access to be answered next.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// The next access, if it is there. It must be completed before the next call.
    pub(crate) fn take(&self, slots: &impl Slots) -> Result<Option<Access>, Corrupt> {
        let slot = slots.slot(self.head);
        // Acquire: the fields are there when the state says so.
        let state = slot.state.atomic().load(Ordering::Acquire);
        if state == free(self.head) || state == word(self.head, ASLEEP) {
            return Ok(None);
        }
        if state != word(self.head, REQUEST) && state != word(self.head, WAITED) {
            return Err(Corrupt("the state of the next access is none it can have"));
        }
        let op = slot.op.load(Ordering::Relaxed);
        let address = slot.address.load(Ordering::Relaxed);
        let byte_enable = slot.byte_enable.load(Ordering::Relaxed);
        let value = slot.value.load(Ordering::Relaxed);
        if address % 4 != 0 {
            return Err(Corrupt("an address is not a multiple of 4"));
        }
        if byte_enable > 0xf {
            return Err(Corrupt("byte enables are above 0xf"));
        }
        let byte_enable = byte_enable as u8;
        match op {
            OP_READ => Ok(Some(Access::Read { address })),
            OP_WRITE => Ok(Some(Access::Write {
                address,
                byte_enable,
                value,
            })),
            OP_POST => Ok(Some(Access::Post {
                address,
                byte_enable,
                value,
            })),
            _ => Err(Corrupt("an access is neither read nor write nor post")),
        }
    }

    /// Completes the access that [`take`](Self::take) returned, and wakes the requester if it sleeps.
    pub(crate) fn complete(&mut self, slots: &impl Slots, completion: u32) -> Result<(), Corrupt> {
        let slot = slots.slot(self.head);
        slot.completion.store(completion, Ordering::Relaxed);
        // Release: the completion is there when the state says so, and we are done with the fields.
        let before = slot
            .state
            .atomic()
            .swap(word(self.head, DONE), Ordering::AcqRel);
        let waited = word(self.head, WAITED);
        if before == waited {
            slot.state.wake();
        } else if before != word(self.head, REQUEST) {
            return Err(Corrupt("an access changed while it was handled"));
        }
        self.head += 1;
        Ok(())
    }

    /// Sleeps until the next access may be there; may return early.
    pub(crate) fn wait(&self, slots: &impl Slots, timeout: Duration) {
        let state = &slots.slot(self.head).state;
        let asleep = word(self.head, ASLEEP);
        let before = state.atomic().compare_exchange(
            free(self.head),
            asleep,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if before.is_ok() || before == Err(asleep) {
            state.wait(asleep, timeout);
        }
    }
}

#[cfg(test)]
#[cfg(loom)]
#[path = "ring_loom.rs"]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
#[path = "ring_tests.rs"]
mod tests;
