//! The wires of one function: which frame goes out by which.

use super::Mac;
use super::queue::drop_reason;
use crate::frame::Frame;
use crate::port::{Port, TxError};
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
            port,
            peer,
            blocked: None,
            segments_done: 0,
            dirty: false,
        }
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
#[derive(Debug, Default)]
pub struct Links {
    wires: Vec<Link>,
    recorders: Vec<Link>,
}

impl Links {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Link> {
        self.wires.iter().chain(&self.recorders)
    }

    /// All of them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.wires.iter_mut().chain(&mut self.recorders)
    }

    /// Wires that carry frames, and those that only record them.
    pub fn split(&mut self) -> (&mut [Link], &mut [Link]) {
        (&mut self.wires, &mut self.recorders)
    }

    /// Adds a wire; one of the same id is replaced. `recorder`: it only gets copies.
    pub fn add(&mut self, link: Link, recorder: bool) {
        self.remove(link.id);
        if recorder {
            self.recorders.push(link);
        } else {
            self.wires.push(link);
        }
    }

    /// Removes a wire. Answers whether it was there.
    pub fn remove(&mut self, id: u32) -> bool {
        let before = self.iter().count();
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

    /// Sends a frame of the function. `last_try`: drop it where there is no room.
    pub fn forward(&mut self, frame: &Frame<'_>, last_try: bool) -> Forwarded {
        let mut destination = [0; 6];
        frame.copy_out(0, &mut destination);
        let unicast = destination[0] & 1 == 0;
        let to = self
            .wires
            .iter()
            .position(|link| unicast && link.peer == Some(destination));
        let mut outcome = Forwarded::Dropped(drop_reason::NO_PORT);
        for (index, link) in self.wires.iter_mut().enumerate() {
            if to.is_some_and(|to| to != index) {
                continue;
            }
            match link.send(frame) {
                Ok(()) => outcome = Forwarded::Sent,
                // A frame for many does not wait for the slowest.
                Err(TxError::Full) if to.is_some() && !last_try => return Forwarded::Full,
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
    }
}
