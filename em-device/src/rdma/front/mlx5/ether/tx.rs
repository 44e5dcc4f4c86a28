//! Ethernet send queues: from entries to the wires.

use super::super::buffer::{BadBuffer, NotMapped, QueueBuffer};
use super::super::cqe::{Cqe, opcode};
use super::super::send_ring::{Head, Posted, SendRing};
use super::super::wqe::{MAX_WQE, opcode as wqe};
use super::EtherContext;
use super::memory::Slices;
use super::tx_entry::{Entry, LSO, Plan, SEND, Start};
use super::udp::Datagrams;
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use crate::net::links::Forwarded;
use crate::net::queue::drop_reason;
use crate::rdma::kept::{Detail, Finished, QpPlace, Standing};
use crate::rdma::verbs::Pushed;
use smallvec::SmallVec;
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;
use zerocopy::byteorder::big_endian::{U16, U32};

/// How long a frame waits for room on its wire before it is dropped.
const PATIENCE: Duration = Duration::from_millis(100);
/// Entries that one turn takes.
const BUDGET: usize = 64;
/// Bytes after which sent frames are made visible although the turn goes on.
const FLUSH_BYTES: usize = 128 << 10;
/// Syndrome of an entry of a queue in error.
const FLUSHED: u32 = 0x05;
/// Syndrome of an entry that the queue cannot do.
const QP_OPERATION: u32 = 0x02;
/// Syndrome of an entry whose memory it may not read.
const LOCAL_PROTECTION: u32 = 0x04;

/// An Ethernet send queue to be made.
#[derive(Debug)]
pub struct TxSetup {
    /// Its number.
    pub sqn: u32,
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its size in basic blocks of 64 bytes, 0 to 15.
    pub log_size: u8,
    /// Bus address of its doorbell record of 8 bytes; word 1 is the send counter.
    pub doorbell: u64,
    /// Number of the completion queue.
    pub cqn: u32,
}

/// An Ethernet send queue: of frames, or the one with which the driver wakes itself (ICOSQ).
#[derive(Debug)]
pub struct EtherTx {
    sqn: u32,
    cqn: u32,
    ring: SendRing,
    /// Since when its frames find no room.
    blocked: Option<Instant>,
    /// Datagrams of the entry at the head that were sent already.
    datagrams_done: usize,
    failed: bool,
    /// Its completion queue is in error too: nobody is told anything any more.
    silent: bool,
    /// Room for a long entry.
    space: Vec<u8>,
    /// Where it is known to who takes the place of this process.
    place: Option<QpPlace>,
}

/// A place is a queue's from its first entry on.
const OWNER: u32 = 1;
/// State of a queue in error, in its place.
const FAILED: u8 = 1;

/// What became of an entry.
enum Outcome {
    /// It is done with, whatever became of its frame; bytes that went out.
    Done(usize),
    /// Its wire has no room.
    Wait,
    /// It makes no sense, by this syndrome.
    Bad(u32),
}

impl EtherTx {
    /// An empty queue.
    pub fn new(setup: TxSetup) -> Result<Self, BadBuffer> {
        Ok(Self {
            sqn: setup.sqn,
            cqn: setup.cqn,
            ring: SendRing::new(setup.buffer, setup.log_size, setup.doorbell)?,
            blocked: None,
            datagrams_done: 0,
            failed: false,
            silent: false,
            space: vec![0; MAX_WQE],
            place: None,
        })
    }

    /// What becomes of it outlives this process from here on.
    pub fn keep_in(&mut self, place: QpPlace) {
        self.place = Some(place);
        self.begin_place();
    }

    fn begin_place(&mut self) {
        let standing = Standing {
            state: if self.failed { FAILED } else { 0 },
            sent: Finished {
                position: self.ring.position(),
                psn: 0,
            },
            received: Finished::default(),
            detail: Detail::None,
            atomic: None,
            atomics: Vec::new(),
        };
        if let Some(place) = &mut self.place {
            place.begin(OWNER, &standing);
        }
    }

    /// Goes on where a former process was; `last` is the newest entry of the completion queue. Answers whether it
    /// is in error.
    pub fn restore(
        &mut self,
        place: QpPlace,
        last: Option<Cqe>,
        view: &dot_iommu::DotView<'_>,
    ) -> bool {
        let known = place.standing(OWNER, |_| false, |_| false);
        if let Some(standing) = &known {
            self.ring.seek(standing.sent.position);
            self.failed = standing.state == FAILED;
        }
        // An entry may have been completed last and not counted.
        let completed = last.is_some_and(|cqe| {
            let sends = [opcode::REQUESTER, opcode::REQUESTER_ERROR];
            cqe.sop_drop_qpn.get() & 0xff_ffff == self.sqn
                && sends.contains(&(cqe.op_own >> 4))
                && cqe.wqe_counter.get() == self.ring.position()
        });
        if let (true, Head::Entry(posted)) = (completed, self.ring.head(view)) {
            self.ring.advance(&posted);
        }
        match known {
            // The place is this queue's already, and says so at any time.
            Some(_) => {
                self.place = Some(place);
                self.keep();
            }
            None => self.keep_in(place),
        }
        self.failed
    }

    /// Its position outlives the process.
    #[inline]
    fn keep(&self) {
        if let Some(place) = &self.place {
            place.sent(Finished {
                position: self.ring.position(),
                psn: 0,
            });
        }
    }

    /// Its number.
    pub fn sqn(&self) -> u32 {
        self.sqn
    }

    /// Whether it is in error: what is posted is flushed until the driver resets it.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// To error, because the driver wants it so.
    pub fn enter_error(&mut self) {
        self.failed = true;
        self.blocked = None;
        if let Some(place) = &self.place {
            place.set_state(FAILED);
        }
    }

    /// Whether a turn would find work: for queues whose doorbells are not seen. Not while its wire is
    /// full, which wakes the data path by itself.
    pub fn is_posted(&self, view: &dot_iommu::DotView<'_>) -> bool {
        !self.silent && self.blocked.is_none() && self.ring.is_posted(view)
    }

    /// Whether its first frame waits for room on a wire.
    pub fn is_blocked(&self) -> bool {
        self.blocked.is_some()
    }

    /// Until when its first frame waits for room on a wire.
    pub fn gives_up_at(&self) -> Option<Instant> {
        self.blocked?.checked_add(PATIENCE)
    }

    /// Whether there may be more after a turn that took `done` entries, without a doorbell.
    pub fn goes_on(&self, done: usize) -> bool {
        !self.silent && (done >= BUDGET || self.is_blocked())
    }

    /// Back to the beginning, as the driver's own queue is after a reset.
    pub fn reset(&mut self) {
        self.ring.reset();
        self.blocked = None;
        self.datagrams_done = 0;
        self.failed = false;
        self.silent = false;
        self.begin_place();
    }

    /// Sends what is posted, within limits. Answers how many entries were taken; what was sent is
    /// visible after [`crate::net::links::Links::flush`].
    pub fn turn(&mut self, cx: &mut EtherContext<'_>) -> usize {
        let (mut done, mut unseen) = (0, 0);
        while done < BUDGET && !self.failed {
            let posted = match self.ring.head(cx.view) {
                Head::Entry(posted) => posted,
                Head::Empty => break,
                // The memory may come back; the driver notices otherwise.
                Head::Unreadable => break,
                Head::Bad(counter) => {
                    self.fail(counter, QP_OPERATION, cx);
                    self.keep();
                    break;
                }
            };
            match self.entry(&posted, cx) {
                Outcome::Done(bytes) => unseen += bytes,
                Outcome::Wait => {
                    self.blocked.get_or_insert_with(Instant::now);
                    break;
                }
                Outcome::Bad(syndrome) => {
                    self.ring.advance(&posted);
                    self.fail(posted.counter, syndrome, cx);
                    self.keep();
                    break;
                }
            }
            self.datagrams_done = 0;
            self.ring.advance(&posted);
            self.keep();
            done += 1;
            if unseen >= FLUSH_BYTES {
                unseen = 0;
                cx.links.flush();
            }
        }
        if self.failed {
            done += self.flush(cx);
        }
        done
    }

    /// Completes what is posted to a queue in error, within limits.
    fn flush(&mut self, cx: &mut EtherContext<'_>) -> usize {
        let mut done = 0;
        while done < BUDGET && !self.silent {
            let counter = match self.ring.head(cx.view) {
                Head::Entry(posted) => {
                    self.ring.advance(&posted);
                    posted.counter
                }
                Head::Bad(counter) => counter,
                Head::Empty | Head::Unreadable => break,
            };
            self.fail(counter, FLUSHED, cx);
            self.keep();
            done += 1;
        }
        done
    }

    fn entry(&mut self, posted: &Posted, cx: &mut EtherContext<'_>) -> Outcome {
        let mut space = std::mem::take(&mut self.space);
        let outcome = match self.ring.whole(posted, &mut space, cx.view) {
            Ok(wqe) => match Entry::parse(wqe) {
                Some(entry) => self.parsed(posted, &entry, cx),
                None => Outcome::Bad(QP_OPERATION),
            },
            Err(NotMapped) => Outcome::Bad(LOCAL_PROTECTION),
        };
        self.space = space;
        outcome
    }

    fn parsed(&mut self, posted: &Posted, entry: &Entry<'_>, cx: &mut EtherContext<'_>) -> Outcome {
        let outcome = match entry.opcode {
            wqe::NOP => Outcome::Done(0),
            SEND | LSO => self.send(entry, cx),
            _ => Outcome::Bad(QP_OPERATION),
        };
        if let (Outcome::Done(_), true) = (&outcome, entry.signaled) {
            let cqe = self.cqe(posted.counter, entry.opcode);
            if (cx.complete)(self.cqn, cqe.to_bytes()) == Pushed::Overrun {
                (self.failed, self.silent) = (true, true);
            }
        }
        outcome
    }

    fn send(&mut self, entry: &Entry<'_>, cx: &mut EtherContext<'_>) -> Outcome {
        let mut inline = SmallVec::<[u8; 96]>::from_slice(entry.inline);
        let mut slices = Slices::new();
        if !inline.is_empty() {
            slices.push(VolatileSlice::from(&mut inline[..]));
        }
        if entry.gather(&mut slices, cx.regions, cx.view).is_none() {
            return Outcome::Bad(LOCAL_PROTECTION);
        }
        let frame = Frame::new(FrameMeta::default(), &slices);
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
            return drop(cx, drop_reason::SHORT_FRAME);
        }
        if !cx.link_up {
            return drop(cx, drop_reason::LINK_DOWN);
        }
        if entry.ask.nothing() {
            return self.forward(&frame, cx);
        }
        let mut start = Start::new();
        let copied = frame.copy_out(0, start.space());
        match start.prepare(copied, frame.len(), &entry.ask) {
            None => drop(cx, drop_reason::BAD_OFFLOAD),
            Some(Plan::One(meta)) => {
                let mut parts = Slices::new();
                parts.push(VolatileSlice::from(start.bytes_mut()));
                parts.extend(frame.pieces(copied, usize::MAX));
                self.forward(&Frame::new(meta, &parts), cx)
            }
            Some(Plan::Datagrams { layout, udp, size }) => {
                let bytes = start.bytes_mut();
                // A tag makes the frame longer than what is in memory.
                let tag = bytes.len() - copied;
                let len = frame.len() + tag;
                match Datagrams::new(bytes, layout, udp, len, size) {
                    Some(datagrams) => self.datagrams(&frame, tag, datagrams, cx),
                    None => drop(cx, drop_reason::BAD_OFFLOAD),
                }
            }
        }
    }

    fn datagrams(
        &mut self,
        frame: &Frame<'_>,
        tag: usize,
        mut datagrams: Datagrams<'_>,
        cx: &mut EtherContext<'_>,
    ) -> Outcome {
        let mut bytes = 0;
        while self.datagrams_done < datagrams.count() {
            let Some(datagram) = datagrams.prepare(self.datagrams_done) else {
                return drop(cx, drop_reason::BAD_OFFLOAD);
            };
            let mut parts = Slices::new();
            parts.push(VolatileSlice::from(datagrams.headers()));
            parts.extend(frame.pieces(datagram.offset - tag, datagram.len));
            match self.forward(&Frame::new(datagram.meta, &parts), cx) {
                Outcome::Done(sent) => bytes += sent,
                other => return other,
            }
            self.datagrams_done += 1;
        }
        Outcome::Done(bytes)
    }

    fn forward(&mut self, frame: &Frame<'_>, cx: &mut EtherContext<'_>) -> Outcome {
        if frame.len() > MAX_FRAME {
            return drop(cx, drop_reason::ABOVE_MTU);
        }
        let last_try = self
            .blocked
            .is_some_and(|since| since.elapsed() >= PATIENCE);
        match cx.links.forward(frame, last_try) {
            Forwarded::Sent => {
                self.blocked = None;
                let mut destination = [0; 6];
                frame.copy_out(0, &mut destination);
                cx.counters.transmitted.add(&destination, frame.len());
                Outcome::Done(frame.len())
            }
            // A wire that stays full is not waited for at each frame anew.
            Forwarded::Dropped(reason) => drop(cx, reason),
            Forwarded::Full => Outcome::Wait,
        }
    }

    fn fail(&mut self, counter: u16, syndrome: u32, cx: &mut EtherContext<'_>) {
        self.enter_error();
        let cqe = Cqe {
            timestamp_l: U32::new(syndrome),
            op_own: opcode::REQUESTER_ERROR << 4,
            ..self.cqe(counter, wqe::NOP)
        };
        // The queue is in error whether the driver can be told or not.
        self.silent |= (cx.complete)(self.cqn, cqe.to_bytes()) == Pushed::Overrun;
    }

    fn cqe(&self, counter: u16, opcode: u8) -> Cqe {
        Cqe {
            sop_drop_qpn: U32::new(u32::from(opcode) << 24 | self.sqn & 0xff_ffff),
            wqe_counter: U16::new(counter),
            ..Cqe::default()
        }
    }
}

/// The frame is dropped; its entry is done.
fn drop(cx: &mut EtherContext<'_>, reason: &'static str) -> Outcome {
    cx.counters.dropped(reason);
    Outcome::Done(0)
}
