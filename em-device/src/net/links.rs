//! The wires of one function: which frame goes out by which.

use super::Mac;
use super::queue::drop_reason;
use crate::flow::l2::MAX_LINKS;
use crate::flow::{L2Header, LinkSet, MacTable};
use crate::frame::Frame;
use crate::port::finish::FinishPort;
use crate::port::{Port, TxError};
use m2m_fabric::proto::LinkStats;
use std::time::Instant;

/// Why the frame that a wire shows cannot be delivered now.
#[derive(Debug, Clone, Copy)]
pub struct Blocked {
    /// The receive queue without room.
    pub queue: u16,
    /// Since when.
    pub since: Instant,
}

/// One wire.
pub struct Link {
    /// Id in the DPU.
    pub id: u32,
    /// The wire's end.
    pub port: Box<dyn Port>,
    /// The function at the other end, if there is only one.
    pub peer: Option<Mac>,
    /// Set while the next frame waits for receive buffers.
    pub blocked: Option<Blocked>,
    /// Segments of the next frame that were delivered already.
    pub segments_done: usize,
    /// Index in the table of addresses.
    slot: usize,
    /// Whether something was sent since the last flush.
    dirty: bool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("id", &self.id)
            .field("port", &self.port.name())
            .finish_non_exhaustive()
    }
}

impl Link {
    /// A wire at rest.
    pub fn new(id: u32, port: Box<dyn Port>, peer: Option<Mac>) -> Self {
        Self {
            id,
            port: FinishPort::around(port),
            peer,
            blocked: None,
            segments_done: 0,
            slot: MAX_LINKS,
            dirty: false,
        }
    }

    /// Index under which addresses at the other end are to be learned, where they are not known.
    pub fn learning_slot(&self) -> Option<usize> {
        self.peer.is_none().then_some(self.slot)
    }

    /// Counters.
    pub fn stats(&self) -> LinkStats {
        let mut stats = self.port.stats();
        stats.link = self.id;
        stats
    }

    fn send(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.dirty = true;
        self.port.transmit(frame)
    }
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwarded {
    /// Some wire has it.
    Sent,
    /// Nobody has it, for this reason.
    Dropped(&'static str),
    /// Its wire has no room now.
    Full,
}

/// All wires of one function.
#[derive(Debug)]
pub struct Links {
    wires: Vec<Link>,
    recorders: Vec<Link>,
    table: MacTable,
    now: Instant,
}

impl Default for Links {
    fn default() -> Self {
        Self {
            wires: Vec::new(),
            recorders: Vec::new(),
            table: MacTable::default(),
            now: Instant::now(),
        }
    }
}

/// The parts of [`Links`], to be used at the same time.
#[derive(Debug)]
pub struct Split<'a> {
    /// Wires that carry frames.
    pub wires: &'a mut [Link],
    /// Wires that only record them.
    pub recorders: &'a mut [Link],
    /// Who is behind which wire.
    pub table: &'a mut MacTable,
    /// The time of this round.
    pub now: Instant,
}

impl Links {
    /// The time for the coming round; addresses are forgotten by it.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// The time of this round.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Link> {
        self.wires.iter().chain(&self.recorders)
    }

    /// All of them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.wires.iter_mut().chain(&mut self.recorders)
    }

    /// The parts.
    pub fn split(&mut self) -> Split<'_> {
        Split {
            wires: &mut self.wires,
            recorders: &mut self.recorders,
            table: &mut self.table,
            now: self.now,
        }
    }

    /// Adds a wire; one of the same id is replaced. `recorder`: it only gets copies. `false` when
    /// there are too many.
    pub fn add(&mut self, mut link: Link, recorder: bool) -> bool {
        self.remove(link.id);
        if recorder {
            self.recorders.push(link);
            return true;
        }
        let free = (0..MAX_LINKS).find(|slot| self.wires.iter().all(|l| l.slot != *slot));
        let Some(slot) = free.filter(|slot| self.table.add_link(*slot)) else {
            return false;
        };
        link.slot = slot;
        if let Some(peer) = link.peer {
            self.table.set_static(peer, slot);
        }
        self.wires.push(link);
        true
    }

    /// Removes a wire. Answers whether it was there.
    pub fn remove(&mut self, id: u32) -> bool {
        let before = self.iter().count();
        for link in self.wires.iter().filter(|link| link.id == id) {
            self.table.remove_link(link.slot);
        }
        self.wires.retain(|link| link.id != id);
        self.recorders.retain(|link| link.id != id);
        self.iter().count() != before
    }

    /// Nothing of a former driver waits any more.
    pub fn forget_blocked(&mut self) {
        for link in &mut self.wires {
            link.blocked = None;
            link.segments_done = 0;
        }
    }

    /// The frames that wait for this receive queue do not wait any more.
    pub fn forget_blocked_by(&mut self, queue: u16) {
        for link in &mut self.wires {
            if link.blocked.is_some_and(|blocked| blocked.queue == queue) {
                link.blocked = None;
                link.segments_done = 0;
            }
        }
    }

    /// Sends a frame of the function. `last_try`: drop it where there is no room.
    pub fn forward(&mut self, frame: &Frame<'_>, last_try: bool) -> Forwarded {
        let mut start = [0; L2Header::COPY];
        let known = frame.copy_out(0, &mut start);
        let to = L2Header::parse(start.get(..known).unwrap_or_default())
            .map_or(LinkSet::EMPTY, |h| {
                self.table.lookup(h.destination, h.vlan, self.now)
            });
        let only = to.len() == 1;
        let mut outcome = Forwarded::Dropped(drop_reason::NO_PORT);
        for link in &mut self.wires {
            if !to.contains(link.slot) {
                continue;
            }
            match link.send(frame) {
                Ok(()) => outcome = Forwarded::Sent,
                // A frame for many does not wait for the slowest.
                Err(TxError::Full) if only && !last_try => return Forwarded::Full,
                Err(error) => {
                    if outcome != Forwarded::Sent {
                        outcome = Forwarded::Dropped(reason(error));
                    }
                }
            }
        }
        if outcome == Forwarded::Sent {
            record(&mut self.recorders, frame);
        }
        outcome
    }

    /// Makes what was sent visible.
    pub fn flush(&mut self) {
        for link in self.iter_mut().filter(|link| link.dirty) {
            link.port.flush();
            link.dirty = false;
        }
    }
}

/// Gives recording wires a copy.
pub fn record(recorders: &mut [Link], frame: &Frame<'_>) {
    for link in recorders {
        // What a recorder cannot take is in its own counters.
        let _ = link.send(frame);
    }
}

fn reason(error: TxError) -> &'static str {
    match error {
        TxError::Full => drop_reason::PORT_FULL,
        TxError::TooLong => drop_reason::PORT_REFUSED,
        TxError::Down => drop_reason::LINK_DOWN,
        TxError::Malformed => drop_reason::BAD_OFFLOAD,
    }
}
