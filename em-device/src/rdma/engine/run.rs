//! The engine at work: rounds, packets, timers.

use super::requester::{Fate, Turn};
use super::timers::Kind;
use super::{Context, Engine};
use crate::rdma::packet::{Body, NotSent, Packet, Request, Verdict};
use crate::rdma::verbs::{Front, Path, Peer, QpNum, QpState, Service, Status};
use std::time::{Duration, Instant};

/// Answers of unreliable services that wait for room at most; the rest is lost.
const BACKLOG: usize = 4096;
/// How soon those that wait for room or a route try again by themselves.
const BLOCKED: Duration = Duration::from_millis(1);
/// Bytes of page lists that one turn makes: much more would keep other functions waiting.
pub(super) const LISTS: usize = 64 << 20;

impl<F: Front> Engine<F> {
    /// Something may have been posted to a send queue.
    #[inline]
    pub fn ring(&mut self, num: QpNum) {
        if let Some(qp) = self.qps.get_mut(num.0) {
            qp.rung = true;
            if matches!(qp.state, QpState::Rts | QpState::Sqe | QpState::Error) {
                self.mark(num);
            }
        }
    }

    /// Something may have been posted to a queue pair's own receive queue: one in error flushes it.
    pub fn ring_receive(&mut self, num: QpNum) {
        if let Some(qp) = self.qps.get_mut(num.0) {
            if qp.state == QpState::Error {
                qp.receive_rung = true;
                self.mark(num);
            }
        }
    }

    /// Looks with `posted` whether something was posted to a send queue whose doorbell was not seen.
    #[inline]
    pub fn look(&mut self, num: QpNum, posted: impl FnOnce(&F::Send) -> bool) -> bool {
        let qp = self.qps.get(num.0).filter(|qp| !qp.rung);
        let new = qp.and_then(|qp| qp.send.as_ref()).is_some_and(posted);
        if new {
            self.ring(num);
        }
        new
    }

    /// Puts a queue pair in the list of those that have something to do.
    #[inline]
    pub(super) fn mark(&mut self, num: QpNum) {
        if let Some(qp) = self.qps.get_mut(num.0) {
            if !qp.ready {
                qp.ready = true;
                self.ready.push_back(num);
            }
            self.blocked = false;
        }
    }

    /// One round: sends what was posted, timers. Answers whether anything was done.
    pub fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        let mut did = self.send_backlog(cx);
        self.shared.spent = 0;
        while let Some((at, num, kind)) = self.timers.expired(cx.now) {
            let Some(qp) = self.qps.get_mut(num.0) else {
                continue;
            };
            let timer = match kind {
                Kind::Answer => &mut qp.answer_timer,
                Kind::Pause => &mut qp.pause_timer,
            };
            if timer.fired(at, cx.now) {
                did = true;
                qp.timed_out(kind, &mut self.shared, cx);
                self.mark(num);
            }
            self.arm(num);
        }
        let mut blocked = true;
        for _ in 0..self.ready.len() {
            if self.shared.spent > LISTS {
                // The others have their turn first next time.
                blocked = false;
                break;
            }
            let Some(num) = self.ready.pop_front() else {
                break;
            };
            let Some(qp) = self.qps.get_mut(num.0) else {
                continue;
            };
            qp.ready = false;
            let mut turn = Turn::default();
            let full = send_answers(qp, cx, &mut turn.did);
            match qp.state {
                QpState::Rts | QpState::Sqd => {
                    let sent = qp.transmit(&mut self.shared, cx);
                    turn.did |= sent.did;
                    turn.more = sent.more;
                    turn.blocked = sent.blocked;
                }
                _ => {}
            }
            if matches!(qp.state, QpState::Sqe | QpState::Error) {
                let (flushed, more) = qp.flush(&mut self.shared, cx);
                turn.did |= flushed;
                turn.more |= more;
            }
            did |= turn.did;
            if turn.more || turn.blocked || full {
                qp.ready = true;
                self.ready.push_back(num);
                blocked &= !turn.more;
            }
            self.arm(num);
        }
        self.blocked = blocked;
        did
    }

    /// Sees to it that a queue pair's timers are noticed.
    #[inline]
    fn arm(&mut self, num: QpNum) {
        if let Some(qp) = self.qps.get_mut(num.0) {
            self.timers.arm(num, Kind::Answer, &mut qp.answer_timer);
            self.timers.arm(num, Kind::Pause, &mut qp.pause_timer);
        }
    }

    /// A packet came in. Acknowledgements may wait for the end of the next turn. Gives a request's box back,
    /// which the next one can use.
    pub fn receive(
        &mut self,
        from: Peer,
        packet: Packet,
        cx: &mut Context<'_>,
    ) -> Option<Box<Request>> {
        let source = (from, packet.from);
        let psn = super::psn::add(packet.psn, 0);
        let qp = self.qps.get_mut(packet.to.0);
        match packet.body {
            Body::Answer(verdict) => {
                let qp = qp?;
                qp.answered(source, psn, verdict, &mut self.shared, cx);
                let waiting = qp.requester.cursor < qp.requester.flight.len() || qp.rung;
                if waiting {
                    self.mark(packet.to);
                }
                self.arm(packet.to);
                None
            }
            Body::Request(request) if request.datagram.is_some() => {
                match qp {
                    Some(qp) => {
                        qp.datagram(source, &request, &mut self.shared, cx);
                        if qp.state == QpState::Error {
                            self.mark(packet.to);
                        }
                    }
                    None => self.shared.counters.dropped += 1,
                }
                if request.acknowledge {
                    let answer = Packet {
                        to: packet.from,
                        from: packet.to,
                        psn,
                        body: Body::Answer(Verdict::Done),
                    };
                    self.answer_datagram(from, answer, cx);
                }
                Some(request)
            }
            Body::Request(request) => {
                if let Some(qp) = qp.filter(|qp| qp.service != Service::Ud) {
                    qp.requested(source, psn, &request, &mut self.shared, cx);
                    if !qp.responder.answers.is_empty() || qp.state == QpState::Error {
                        self.mark(packet.to);
                    }
                }
                Some(request)
            }
        }
    }

    fn answer_datagram(&mut self, to: Peer, answer: Packet, cx: &mut Context<'_>) {
        let backlog = &mut self.shared.backlog;
        let full = !backlog.is_empty() || cx.fabric.send(to, &answer) == Err(NotSent::Full);
        if full && backlog.len() < BACKLOG {
            backlog.push_back((to, answer));
        }
    }

    fn send_backlog(&mut self, cx: &mut Context<'_>) -> bool {
        let mut did = false;
        while let Some((to, answer)) = self.shared.backlog.front() {
            if cx.fabric.send(*to, answer) == Err(NotSent::Full) {
                break;
            }
            self.shared.backlog.pop_front();
            did = true;
        }
        did
    }

    /// The longest time without a turn.
    pub fn patience(&self, now: Instant) -> Option<Duration> {
        if !self.ready.is_empty() && !self.blocked {
            return Some(Duration::ZERO);
        }
        let waits = !self.ready.is_empty() || !self.shared.backlog.is_empty();
        let timer = self.timers.next();
        let timer = timer.map(|at| at.saturating_duration_since(now));
        match (waits.then_some(BLOCKED), timer) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// The answers of the OM that queue pairs rely on.
    pub fn paths(&self) -> impl Iterator<Item = Path> {
        let qps = (0..self.qps.end()).filter_map(|num| self.qps.get(num));
        qps.filter_map(|qp| qp.attributes.path)
    }

    /// There is no way to `peer` any more, or only by later answers of the OM than `generation`: its
    /// queue pairs go to error.
    pub fn revoke(&mut self, peer: Peer, generation: u64, cx: &mut Context<'_>) {
        for num in 0..self.qps.end() {
            let Some(qp) = self.qps.get_mut(num) else {
                continue;
            };
            let revoked = qp
                .attributes
                .path
                .is_some_and(|path| path.peer == peer && path.generation <= generation);
            if !revoked || !qp.receives() {
                continue;
            }
            if qp.service == Service::Rc && matches!(qp.state, QpState::Rts | QpState::Sqd) {
                match qp.requester.flight.front().map(|flight| flight.fate) {
                    Some(Fate::Failed(status)) => qp.fail_front(status, &mut self.shared, cx),
                    Some(_) => qp.fail_front(Status::RetryExceeded, &mut self.shared, cx),
                    // What is posted and not begun yet finds nobody either.
                    None => qp.lost = qp.state == QpState::Rts,
                }
            }
            if qp.state != QpState::Error {
                qp.fatal(&mut self.shared, cx);
            }
            self.mark(QpNum(num));
        }
    }
}

/// Sends the answers that wait. `true`: there was no room.
#[inline]
fn send_answers<F: Front>(qp: &mut super::qp::Qp<F>, cx: &mut Context<'_>, did: &mut bool) -> bool {
    let Some(path) = qp.attributes.path else {
        return false;
    };
    while let Some((psn, verdict)) = qp.responder.answers.front() {
        let answer = Packet {
            to: qp.attributes.dest_qp,
            from: qp.num,
            psn: *psn,
            body: Body::Answer(*verdict),
        };
        if cx.fabric.send(path.peer, &answer) == Err(NotSent::Full) {
            return true;
        }
        *did = true;
        qp.responder.answers.pop_front();
    }
    false
}
