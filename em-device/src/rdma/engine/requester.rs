//! Requester: from the send queue to packets.

use super::payload::{Gather, action};
use super::psn;
use super::qp::Qp;
use super::tables::Shared;
use super::{Context, Notice};
use crate::rdma::engine::run::LISTS;
use crate::rdma::kept::Finished;
use crate::rdma::packet::{Body, MAX_INLINE, NotSent, Payload, Request};
use crate::rdma::verbs::{
    Data, Done, Front, Next, Operation, QpState, RegionChange, SendQueue, Service, Status,
    WorkRequest,
};
use smallvec::SmallVec;
use smartep::fault;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes of a message at most (the port's maximum message size).
pub(super) const MAX_MESSAGE: u64 = 1 << 30;
/// Requests of a queue pair that are under way at most.
const MAX_FLIGHT: usize = 128;
/// Bytes that wait for an answer, beyond which no packet is begun.
const WINDOW: u32 = 8 << 20;
/// Requests taken from a queue in one turn.
const TURN: usize = 32;
/// Gathered bytes up to which copying them into the packet is faster than saying where they are.
const COPIED: u32 = 64;
/// How long an unreliable service's request waits for word that its bytes were copied, and how often
/// it is asked whether word will come at all.
pub(super) const UNRELIABLE_WAIT: Duration = Duration::from_millis(500);
pub(super) const UNRELIABLE_LOOK: Duration = Duration::from_millis(1);

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Under way, or not begun.
    Pending,
    /// Successful, when those before it are.
    Done,
    /// Failed, when those before it are successful.
    Failed(Status),
}

/// A request that was taken from the queue and is not completed.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: WorkRequest,
    /// First PSN.
    pub(super) psn: u32,
    /// PSNs; 0 of a request that sends nothing.
    pub(super) psns: u32,
    /// Bytes.
    pub(super) len: u32,
    pub(super) fate: Fate,
    /// Position in the send queue behind it.
    pub(super) position: u16,
}

impl Flight {
    /// The PSN after its last.
    pub(super) fn end(&self) -> u32 {
        psn::add(self.psn, self.psns)
    }

    /// What is done when it is.
    #[inline]
    pub(super) fn finished(&self) -> Finished {
        Finished {
            position: self.position,
            psn: self.end(),
        }
    }

    pub(super) fn done(&self) -> Done {
        done_of(&self.request.operation)
    }

    /// Whether it counts as RDMA READ or atomic under way.
    pub(super) fn is_read(&self) -> bool {
        matches!(self.request.operation, Operation::Read { .. }) || self.is_atomic()
    }

    pub(super) fn is_atomic(&self) -> bool {
        let operation = &self.request.operation;
        matches!(
            operation,
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }
}

/// What a request's completion says of it.
pub(super) fn done_of(operation: &Operation) -> Done {
    match operation {
        Operation::Send { .. } => Done::Send,
        Operation::Write { .. } => Done::Write,
        Operation::Read { .. } => Done::Read,
        Operation::CompareSwap { .. } => Done::CompareSwap,
        Operation::FetchAdd { .. } => Done::FetchAdd,
        Operation::Register(_) => Done::Register,
        Operation::Nop => Done::Nop,
    }
}

/// A queue pair's requester.
#[derive(Debug, Default)]
pub(super) struct Requester {
    /// In the order of the queue. What is before [`Self::cursor`] was sent.
    pub(super) flight: VecDeque<Flight>,
    /// Index of the first that was not wholly sent.
    pub(super) cursor: usize,
    /// Bytes of it that were sent.
    pub(super) offset: u32,
    /// PSN of the next message.
    pub(super) next_psn: u32,
    /// Oldest PSN without answer.
    pub(super) unacknowledged: u32,
    /// PSN after the last that was ever sent.
    pub(super) sent: u32,
    /// RDMA READs and atomics under way.
    pub(super) reads: u32,
    /// Retries since there was progress.
    pub(super) retries: u8,
    /// As [`Self::retries`], for want of a receive.
    pub(super) rnr_retries: u8,
    /// Where the wire was when a timer found that the responder had not taken what was sent to it.
    pub(super) untaken: Option<u64>,
    /// Since when the responder does not know this memory, and how long the next pause is.
    pub(super) unknown: Option<(Instant, Duration)>,
    /// Since when an unreliable service has had no answer.
    pub(super) silent: Option<Instant>,
    /// A former process sent more than this one, so that answers may be ahead.
    pub(super) resumed: bool,
}

impl Requester {
    pub(super) fn start(&mut self, first: u32) {
        self.next_psn = first;
        self.unacknowledged = first;
        self.sent = first;
    }

    /// Nothing is under way any more.
    pub(super) fn stop(&mut self) {
        self.flight.clear();
        self.cursor = 0;
        self.offset = 0;
        self.reads = 0;
        self.retries = 0;
        self.rnr_retries = 0;
        self.unknown = None;
        self.untaken = None;
        self.silent = None;
        self.sent = self.next_psn;
        self.unacknowledged = self.next_psn;
    }

    /// Whether PSNs wait for an answer.
    pub(super) fn waits(&self) -> bool {
        self.sent != self.unacknowledged
    }
}

/// What became of an attempt to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Something was done; go on.
    Done,
    /// Nothing to be done before an answer comes.
    Wait,
    /// No room; again in the next turn.
    Full,
}

/// Outcome of a turn.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Turn {
    /// Something was done.
    pub(super) did: bool,
    /// There is more to do.
    pub(super) more: bool,
    /// There is more to do as soon as the fabric has room.
    pub(super) blocked: bool,
}

impl<F: Front> Qp<F> {
    /// Sends what can be sent.
    pub(super) fn transmit(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) -> Turn {
        let mut turn = Turn::default();
        let mut budget = TURN;
        // A 1 GiB message must not keep the others waiting.
        let mut packets = 2 * TURN;
        while matches!(self.state, QpState::Rts | QpState::Sqd) && self.pause_timer.due.is_none() {
            if budget == 0 || packets == 0 || sh.spent > LISTS {
                turn.more = true;
                break;
            }
            if self.requester.cursor >= self.requester.flight.len() {
                if !self.rung || self.state != QpState::Rts || self.window_is_full() {
                    break;
                }
                if !self.take(sh, cx) {
                    break;
                }
                budget -= 1;
                turn.did = true;
            }
            match self.step(sh, cx) {
                Step::Done => turn.did = true,
                Step::Wait => break,
                Step::Full => {
                    turn.blocked = true;
                    break;
                }
            }
            packets -= 1;
        }
        self.retire(sh, cx);
        turn
    }

    /// Whether so much waits for an answer that nothing more is begun.
    fn window_is_full(&self) -> bool {
        let r = &self.requester;
        let reached = match r.flight.get(r.cursor) {
            Some(flight) => psn::add(flight.psn, r.offset >> self.attributes.mtu_shift),
            None => r.next_psn,
        };
        let window = (WINDOW >> self.attributes.mtu_shift) as i32;
        r.flight.len() >= MAX_FLIGHT && r.cursor >= r.flight.len()
            || psn::since(reached, r.unacknowledged) >= window
    }

    /// Takes the next request. `false`: there is none.
    #[inline]
    fn take(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) -> bool {
        let next = match &mut self.send {
            Some(queue) => queue.next(cx.memory, &sh.regions),
            None => Next::Empty,
        };
        let position = self.send.as_ref().map_or(0, SendQueue::position);
        let mut flight = match next {
            Next::Entry(request) => {
                sh.charge(&request);
                self.admit(request)
            }
            Next::Bad(cookie) => Flight {
                request: WorkRequest {
                    cookie,
                    operation: Operation::Nop,
                    data: Data::Gather(SmallVec::new()),
                    signaled: true,
                    solicited: false,
                    fence: false,
                    datagram: None,
                },
                psn: self.requester.next_psn,
                psns: 0,
                len: 0,
                fate: Fate::Failed(Status::LocalQpOperation),
                position,
            },
            Next::Empty => {
                self.rung = false;
                return false;
            }
            Next::Unreadable => {
                self.fatal(sh, cx);
                return false;
            }
        };
        flight.position = position;
        self.requester.next_psn = flight.end();
        self.requester.flight.push_back(flight);
        true
    }

    /// Does the next thing for the request at the cursor.
    fn step(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) -> Step {
        let r = &mut self.requester;
        let cursor = r.cursor;
        let Some(flight) = r.flight.get_mut(cursor) else {
            return Step::Wait;
        };
        match flight.fate {
            Fate::Pending => {}
            Fate::Failed(_) => return Step::Wait,
            // An atomic whose answer came, and that stands after the point of a retry.
            Fate::Done => {
                r.reads += u32::from(flight.is_read());
                r.cursor += 1;
                r.offset = 0;
                return Step::Done;
            }
        }
        if r.offset == 0 && flight.request.fence && r.reads != 0 {
            return Step::Wait;
        }
        match &flight.request.operation {
            Operation::Nop => {
                flight.fate = Fate::Done;
                r.cursor += 1;
                return Step::Done;
            }
            Operation::Register(_) => return self.step_register(sh),
            _ => {}
        }
        if r.offset == 0 && flight.is_read() && r.reads >= self.attributes.max_reads {
            return Step::Wait;
        }
        if self.window_is_full() {
            return Step::Wait;
        }
        if self.service == Service::Ud {
            return self.send_datagram(sh, cx);
        }
        self.send_packet(sh, cx)
    }

    /// Changes a region when its turn has come.
    fn step_register(&mut self, sh: &mut Shared<F>) -> Step {
        let r = &mut self.requester;
        let mut before = r.flight.iter().take(r.cursor);
        let under_way = before.any(|flight| flight.fate == Fate::Pending);
        let Some(flight) = r.flight.get_mut(r.cursor) else {
            return Step::Wait;
        };
        let Operation::Register(change) = &mut flight.request.operation else {
            return Step::Wait;
        };
        let region = sh.regions.get(change.key.0 >> 8);
        // Requests under way may have to look at the region again.
        if under_way && region.is_some_and(|region| region.valid) {
            return Step::Wait;
        }
        let own = region.is_some_and(|region| self.registers_all || region.pd == self.pd);
        let index = change.key.0 >> 8;
        flight.fate = register(sh, change, own);
        if flight.fate == Fate::Done {
            sh.keep_region(index);
        }
        // Many that wait for one before them to complete would hold as many lists.
        change.translation = None;
        if flight.fate == Fate::Done {
            r.cursor += 1;
        }
        Step::Done
    }

    /// Sends the next packet of the request at the cursor.
    fn send_packet(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) -> Step {
        let (Some(path), r) = (self.attributes.path, &mut self.requester) else {
            return Step::Wait;
        };
        let Some(flight) = r.flight.get_mut(r.cursor) else {
            return Step::Wait;
        };
        let shift = self.attributes.mtu_shift;
        let reliable = self.service == Service::Rc;
        let copied = if reliable { COPIED } else { MAX_INLINE as u32 };
        let source = Gather {
            pd: self.pd,
            offset: r.offset,
            shift,
            copied,
        };
        let (payload, len) = match source.payload(flight, sh, cx) {
            Ok(payload) => payload,
            Err(status) => {
                flight.fate = Fate::Failed(status);
                return Step::Done;
            }
        };
        let last = r.offset + len >= flight.len;
        let (action, tail) = action(flight, r.offset, last);
        let mut waits = reliable || r.offset != 0 || matches!(payload, Payload::Segments(_));
        let at = psn::add(flight.psn, r.offset >> shift);
        let packet = &mut sh.packet;
        packet.to = self.attributes.dest_qp;
        packet.from = self.num;
        packet.psn = at;
        if let Body::Request(request) = &mut packet.body {
            // One by one: a whole one would be made elsewhere first and copied.
            let Request {
                action: to_action,
                first,
                last: is_last,
                tail: to_tail,
                solicited,
                payload: to_payload,
                datagram,
                acknowledge,
                mtu_shift,
            } = &mut **request;
            *to_action = action;
            *first = r.offset == 0;
            *is_last = last;
            *to_tail = tail;
            *solicited = flight.request.solicited && last;
            *to_payload = payload;
            *datagram = None;
            *acknowledge = waits;
            *mtu_shift = shift as u8;
        }
        match cx.fabric.send(path.peer, packet) {
            Err(NotSent::Full) => return Step::Full,
            Ok(()) => {}
            // As if it were lost on the way: the timer tells, if there is an answer to wait for.
            Err(NotSent::Gone) => waits &= reliable || r.offset != 0,
        }
        if r.offset == 0 && flight.is_read() {
            r.reads += 1;
        }
        let end = psn::add(at, psn::count(len, shift));
        if psn::since(end, r.sent) > 0 {
            r.sent = end;
        } else {
            sh.counters.retransmissions += 1;
        }
        if last {
            if !waits {
                flight.fate = Fate::Done;
            }
            r.cursor += 1;
            r.offset = 0;
        } else {
            r.offset += len;
        }
        sh.counters.packets_sent += 1;
        if self.answer_timer.due.is_none() {
            self.restart_timer(cx.now);
        }
        Step::Done
    }

    /// Measures anew how long an answer takes.
    pub(super) fn restart_timer(&mut self, now: Instant) {
        let time = match self.service {
            Service::Rc => super::timers::ack_timeout(self.attributes.timeout),
            Service::Uc => Some(UNRELIABLE_LOOK),
            Service::Ud => Some(UNRELIABLE_WAIT),
        };
        self.requester.silent = Some(now);
        self.answer_timer.due = time
            .filter(|_| self.requester.waits())
            .and_then(|time| now.checked_add(time));
    }

    /// Completes what is done, in order.
    pub(super) fn retire(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        loop {
            let r = &mut self.requester;
            let Some(flight) = r.flight.front() else {
                break;
            };
            let done = match flight.fate {
                Fate::Done => true,
                Fate::Failed(status) => {
                    self.fail_front(status, sh, cx);
                    return;
                }
                Fate::Pending => {
                    flight.psns != 0 && psn::since(r.unacknowledged, flight.end()) >= 0
                }
            };
            // What is done by an earlier attempt may stand after the cursor.
            if !done || r.cursor == 0 {
                break;
            }
            // What is needed of it is looked at in its place: it is large.
            let Some(flight) = r.flight.front() else {
                break;
            };
            r.cursor -= 1;
            if flight.is_read() {
                r.reads = r.reads.saturating_sub(1);
            }
            // Of a request that nobody acknowledges.
            if psn::since(flight.end(), r.unacknowledged) > 0 {
                r.unacknowledged = flight.end();
            }
            if let Operation::Read {
                invalidate: Some(key),
                ..
            } = flight.request.operation
            {
                if sh.regions.withdraw(key, self.pd).is_err() {
                    self.fail_front(Status::Bind, sh, cx);
                    return;
                }
                sh.keep_region(key.0 >> 8);
            }
            count(flight, sh);
            log::trace!("QP {:#x} done: {:?}", self.num.0, flight.request.operation);
            let (cookie, len, done) = (flight.request.cookie, flight.len, flight.done());
            let (signaled, then) = (flight.request.signaled, flight.finished());
            r.flight.pop_front();
            if signaled {
                let mut completion = self.completion(cookie, done, Status::Success);
                completion.len = len;
                self.completing_send(then, sh);
                if !sh.complete(self.send_cq, &completion, cx) {
                    self.fatal(sh, cx);
                    return;
                }
                fault::point("completed");
            }
            self.completed_send(then);
        }
        if !self.requester.waits() {
            self.answer_timer.due = None;
        }
        if self.draining && self.requester.flight.is_empty() {
            self.draining = false;
            sh.notices.push(Notice::SendQueueDrained(self.num));
        }
    }

    /// The oldest request failed.
    pub(super) fn fail_front(&mut self, status: Status, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        if F::REPORTS_FAILURES && self.service == Service::Rc {
            sh.notices.push(Notice::QpFatal(self.num));
        }
        if let Some(flight) = self.requester.flight.pop_front() {
            log::debug!(
                "QP {:#x} failed: {status:?} {:?}",
                self.num.0,
                flight.request
            );
            sh.counters.failed += 1;
            // First, so that nothing behind it is sent if this process dies here.
            self.keep_state_as(match self.service {
                Service::Rc => QpState::Error,
                Service::Uc | Service::Ud => QpState::Sqe,
            });
            let of = (flight.request.cookie, flight.finished());
            self.complete_send(of, flight.done(), status, sh, cx);
        }
        match self.service {
            Service::Rc => self.enter_error(sh, cx),
            Service::Uc | Service::Ud => self.enter_send_error(sh, cx),
        }
    }
}

fn register<F: Front>(sh: &mut Shared<F>, change: &RegionChange, own: bool) -> Fate {
    if own && sh.regions.change(change).is_ok() {
        Fate::Done
    } else {
        Fate::Failed(Status::Bind)
    }
}

fn count<F: Front>(flight: &Flight, sh: &mut Shared<F>) {
    let len = u64::from(flight.len);
    let counters = &mut sh.counters;
    let (messages, bytes) = match flight.request.operation {
        Operation::Send { .. } => (&mut counters.sends, &mut counters.send_bytes),
        Operation::Write { .. } => (&mut counters.writes, &mut counters.write_bytes),
        Operation::Read { .. } => (&mut counters.reads, &mut counters.read_bytes),
        Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
            counters.atomics += 1;
            return;
        }
        Operation::Register(_) | Operation::Nop => return,
    };
    *messages += 1;
    *bytes += len;
}
