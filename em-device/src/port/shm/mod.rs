//! The shared-memory wire between two EMs on one host.
//!
//! A wire is a memfd with two directions; side 0 sends on the first and receives from the second, side
//! 1 the other way round. A direction is a ring of records with one producer and one consumer, whose
//! positions are counts of bytes that only grow. Neither side needs an atomic read-modify-write or
//! a system call while both are busy: the producer publishes its index once a flush, the consumer
//! once a batch, and each looks at the other's index only when its old copy of it says "empty" or
//! "full". A side that sleeps says so first, and is woken by an eventfd.
//!
//! The peer is another process and may do anything to the memory. Every index and length is read once
//! and checked; a ring that makes no sense takes the port down for good, with a reason. After that the OM makes
//! a fresh wire.
//!
//! A process that takes the place of one that was killed attaches to the same wire and goes on at the positions
//! that are published; the peer does not notice. Whatever wake-up the former owed the peer, attaching makes up for.

mod consumer;
mod producer;
mod record;
mod ring_mem;
mod wake;

#[cfg(test)]
mod model;
#[cfg(test)]
mod stress_tests;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod test_support;
#[cfg(test)]
mod tests;

use self::consumer::Consumer;
use self::producer::{Producer, Pushed};
use self::record::Header;
use self::ring_mem::RingMem;
use self::wake::Bell;
use super::counters::Counters;
use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, MAX_FRAME, MIN_FRAME};
use m2m_fabric::proto::{LinkStats, SHM_LINK_BYTES};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use thiserror::Error;
use vm_memory::VolatileSlice;

/// What orders the two ends; the model has its own.
mod sync {
    pub(super) use std::sync::atomic::{Ordering, fence};
}

/// Why a wire could not be attached.
#[derive(Debug, Error)]
pub enum AttachError {
    /// There are only two sides.
    #[error("side {0} of a wire does not exist, only 0 and 1 do")]
    Side(u8),
    /// Made by something with other constants.
    #[error("the memory of the wire has {0} bytes, not {SHM_LINK_BYTES}")]
    Size(i64),
    /// Not a memfd.
    #[error("the memory of the wire is not a memfd: {0}")]
    NotMemfd(#[source] Errno),
    /// The peer could take the memory away.
    #[error("the memory of the wire is not sealed against shrinking")]
    NotSealed,
    /// The kernel refused.
    #[error("cannot map the memory of the wire: {0}")]
    Map(#[source] Errno),
    /// A former process, or the peer, left what cannot be gone on with.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// Never happens on Linux.
    #[error("the memory of the wire was mapped at address zero")]
    MapAtZero,
}

/// What the peer did to the ring that no peer in order does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Corrupt {
    /// An index of the consumer's.
    #[error(
        "the peer says it consumed up to {head}, but {last} was the last and {published} is published"
    )]
    Head {
        /// Bytes ever consumed, as it says.
        head: u64,
        /// As it said before.
        last: u64,
        /// Bytes ever published.
        published: u64,
    },
    /// An index of the producer's.
    #[error("the peer says it produced up to {tail}, which cannot follow {head}")]
    Tail {
        /// Bytes ever published, as it says.
        tail: u64,
        /// Bytes ever consumed.
        head: u64,
    },
    /// A record that is none.
    #[error("a record of {len} bytes where {waiting} are waiting")]
    Record {
        /// Bytes, as it says.
        len: usize,
        /// Bytes that are published.
        waiting: usize,
    },
}

/// One end of a shared-memory wire.
///
/// The carrier is there while both ends are attached and neither found the ring corrupt.
#[derive(Debug)]
pub struct ShmPort {
    name: String,
    producer: Producer,
    consumer: Consumer,
    own: Bell,
    peer: Bell,
    counters: Counters,
    armed: bool,
    /// The sink wanted no more of what is waiting.
    held: bool,
    down: Option<String>,
}

impl ShmPort {
    /// Attaches to one side of a wire.
    ///
    /// `memory` is the memfd, `wake` the eventfd that wakes this end, `wake_peer` the one that
    /// wakes the other. `name` is for people.
    ///
    /// # Errors
    /// The memory is not that of a wire; see [`AttachError`].
    pub fn attach(
        name: impl Into<String>,
        side: u8,
        memory: OwnedFd,
        wake: OwnedFd,
        wake_peer: OwnedFd,
    ) -> Result<Self, AttachError> {
        let [first, second] = RingMem::map_pair(memory.as_fd())?;
        let (sends, receives) = match side {
            0 => (first, second),
            1 => (second, first),
            other => return Err(AttachError::Side(other)),
        };
        let port = Self {
            name: name.into(),
            producer: Producer::new(sends)?,
            consumer: Consumer::new(receives)?,
            own: Bell::new(wake),
            peer: Bell::new(wake_peer),
            counters: Counters::default(),
            armed: false,
            held: false,
            down: None,
        };
        // A peer that came first sleeps and does not know that it has a carrier now.
        port.peer.ring();
        Ok(port)
    }

    /// Takes records that are no frames but bytes of the peer's, at most `budget`. Their room is given back by
    /// [`Self::release`] only: the peer can tell by that when its records are done with.
    pub fn receive_bytes(
        &mut self,
        budget: usize,
        take: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> usize {
        let counters = &mut self.counters;
        let batch = match &self.down {
            None => self.consumer.batch(budget, &mut |_, [bytes]| {
                counters.received(bytes.len());
                take(*bytes);
                true
            }),
            Some(_) => Ok(0),
        };
        batch.unwrap_or_else(|reason| {
            self.go_down(reason);
            0
        })
    }

    fn receive_held(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        if self.down.is_some() {
            return 0;
        }
        let Self {
            consumer,
            counters,
            held,
            ..
        } = self;
        *held = false;
        let batch = consumer.batch(budget, &mut |words, parts| {
            let frame = Frame::new(Header::from_words(words).meta, parts);
            let [bytes] = parts;
            if bytes.len() < MIN_FRAME {
                counters.dropped("bad_length");
                return true;
            }
            if frame.meta.check(bytes.len()).is_err() {
                counters.dropped("bad_offloads");
                return true;
            }
            match sink.frame(&frame) {
                Rx::Taken => {
                    counters.received(bytes.len());
                    true
                }
                Rx::Later => {
                    *held = true;
                    false
                }
            }
        });
        match batch {
            Ok(count) => count,
            Err(reason) => {
                self.go_down(reason);
                0
            }
        }
    }

    /// Gives back the room of all that was taken.
    pub fn release(&mut self) {
        if self.consumer.publish() {
            self.peer.ring();
        }
    }

    /// How much was sent, for [`Self::is_done`].
    pub fn sent(&self) -> u64 {
        self.producer.sent()
    }

    /// Whether the peer is done with all records up to `sent`; also when it can do nothing any more.
    pub fn is_done(&mut self, sent: u64) -> bool {
        if !self.carrier() {
            return true;
        }
        self.producer.is_consumed(sent).unwrap_or_else(|reason| {
            self.go_down(reason);
            true
        })
    }

    /// Sends bytes that are no frame, for the peer's [`Self::receive_bytes`].
    ///
    /// # Errors
    /// As [`Port::transmit`].
    pub fn transmit_bytes(&mut self, bytes: &[u8]) -> Result<(), TxError> {
        self.transmit_record(bytes.len(), |producer| producer.push_bytes(bytes))
    }

    #[inline]
    fn transmit_record(
        &mut self,
        len: usize,
        push: impl FnOnce(&mut Producer) -> Result<Pushed, Corrupt>,
    ) -> Result<(), TxError> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            self.counters.dropped("bad_length");
            return Err(TxError::TooLong);
        }
        // What is for a peer that is not there yet would be old when it comes.
        if !self.carrier() {
            self.counters.dropped("no_carrier");
            return Err(TxError::Down);
        }
        match push(&mut self.producer) {
            Ok(Pushed::Done) => {
                self.counters.sent(len);
                Ok(())
            }
            Ok(Pushed::Full) => Err(TxError::Full),
            Err(reason) => {
                self.go_down(reason);
                self.counters.dropped("no_carrier");
                Err(TxError::Down)
            }
        }
    }

    fn go_down(&mut self, reason: Corrupt) {
        log::error!("{} goes down: {reason}", self.name);
        self.down = Some(reason.to_string());
        self.producer.leave();
        self.consumer.disarm();
        self.peer.ring();
    }
}

impl Drop for ShmPort {
    fn drop(&mut self) {
        self.flush();
        self.producer.leave();
        self.peer.ring();
    }
}

impl Port for ShmPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.transmit_record(frame.len(), |producer| producer.push(frame))
    }

    fn flush(&mut self) {
        if self.producer.flush() {
            self.peer.ring();
        }
    }

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        let count = self.receive_held(budget, sink);
        sink.done();
        self.release();
        count
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.own.as_fd())
    }

    fn arm(&mut self) -> bool {
        if self.down.is_some() {
            return false;
        }
        self.flush();
        let waiting = self.producer.room_is_back().and_then(|room| {
            if room {
                return Ok(true);
            }
            self.armed = true;
            if self.held {
                return Ok(false);
            }
            self.consumer.arm()
        });
        waiting.unwrap_or_else(|reason| {
            self.go_down(reason);
            true // the owner is to look at the carrier
        })
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.consumer.disarm();
            self.own.swallow();
        }
    }

    fn carrier(&self) -> bool {
        self.down.is_none() && self.consumer.producer_attached()
    }

    fn down_reason(&self) -> Option<String> {
        self.down.clone()
    }

    fn stats(&self) -> LinkStats {
        self.counters.stats(&self.name)
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}
