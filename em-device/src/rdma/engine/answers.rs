//! Requester: what the responder's answers and the timers do to requests under way.

use super::Context;
use super::memory::{Fault, Part};
use super::psn;
use super::qp::Qp;
use super::requester::{Fate, UNRELIABLE_LOOK, UNRELIABLE_WAIT};
use super::tables::Shared;
use super::timers::{Kind, rnr_time};
use crate::rdma::packet::Verdict;
use crate::rdma::verbs::{Data, Front, Peer, QpNum, QpState, Rights, Service, Status};
use dot_iommu::Access;
use std::time::Duration;

/// Pause until a responder may have learnt this function's memory, at first and at most.
const UNKNOWN_PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(5));
/// How long a responder may not know this function's memory.
const UNKNOWN_LIMIT: Duration = Duration::from_secs(2);
/// RNR retries without end.
const RNR_FOREVER: u8 = 7;

impl<F: Front> Qp<F> {
    /// An answer came in.
    pub(super) fn answered(
        &mut self,
        from: (Peer, QpNum),
        at: u32,
        verdict: Verdict,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) {
        if !self.sends() {
            return;
        }
        if self.service == Service::Ud {
            // Answers of several peers have no common order.
            let waiting = |flight: &&mut super::requester::Flight| flight.psn == at;
            if let Some(flight) = self.requester.flight.iter_mut().find(waiting) {
                flight.fate = Fate::Done;
            }
            self.retire(sh, cx);
            return;
        }
        let known = self.attributes.path.map(|path| path.peer) == Some(from.0);
        let r = &self.requester;
        let ahead = r.resumed && psn::since(at, r.sent) >= 0;
        if known && self.attributes.dest_qp == from.1 && ahead {
            // Whatever it says of that: what has been sent again was done before.
            self.acknowledge(r.sent, sh, cx);
            return;
        }
        // About something that was sent, and not before what is known already.
        let current = psn::since(at, r.unacknowledged) >= 0 && psn::since(r.sent, at) > 0;
        if !known || self.attributes.dest_qp != from.1 || !current {
            return;
        }
        match verdict {
            Verdict::Done => {
                self.acknowledge(psn::add(at, 1), sh, cx);
                return;
            }
            Verdict::Atomic(value) if self.store_atomic(at, value, sh, cx) => {
                self.acknowledge(psn::add(at, 1), sh, cx);
                return;
            }
            _ => {}
        }
        if self.service != Service::Rc {
            return;
        }
        self.acknowledge(at, sh, cx);
        if !self.sends() || self.requester.unacknowledged != at {
            return;
        }
        let status = match verdict {
            Verdict::Done => return,
            Verdict::Atomic(_) => {
                self.retire(sh, cx);
                return;
            }
            Verdict::ReceiverNotReady(code) => {
                self.receiver_not_ready(code, sh, cx);
                return;
            }
            Verdict::MemoryUnknown => {
                self.memory_unknown(sh, cx);
                return;
            }
            Verdict::Sequence => {
                sh.counters.sequence_errors += 1;
                self.retry(sh, cx);
                return;
            }
            Verdict::InvalidRequest => Status::RemoteInvalidRequest,
            Verdict::Access => Status::RemoteAccess,
            Verdict::Operation => Status::RemoteOperation,
        };
        self.fail_front(status, sh, cx);
    }

    fn sends(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// All before `until` is done.
    fn acknowledge(&mut self, mut until: u32, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        let shift = self.attributes.mtu_shift;
        let r = &mut self.requester;
        let mut lost = false;
        for flight in &r.flight {
            if psn::since(flight.end(), until) > 0 {
                break;
            }
            if flight.is_atomic() && flight.psns != 0 && flight.fate == Fate::Pending {
                // Done, but its answer is lost: ask again.
                until = flight.psn;
                lost = true;
                break;
            }
        }
        if psn::since(until, r.unacknowledged) > 0 {
            r.unacknowledged = until;
            r.retries = 0;
            r.rnr_retries = 0;
            r.unknown = None;
            r.untaken = None;
            // After going back, the answer may be to the first attempt.
            while let Some(flight) = r.flight.get(r.cursor) {
                if flight.psns == 0 && flight.fate == Fate::Done {
                    r.cursor += 1;
                    continue;
                }
                if flight.psns == 0 || psn::since(until, flight.psn) <= 0 {
                    break;
                }
                if psn::since(until, flight.end()) < 0 {
                    let done = (psn::since(until, flight.psn) as u32) << shift;
                    if r.offset == 0 && flight.is_read() {
                        r.reads += 1;
                    }
                    r.offset = r.offset.max(done);
                    break;
                }
                if r.offset == 0 && flight.is_read() {
                    r.reads += 1;
                }
                r.cursor += 1;
                r.offset = 0;
            }
            self.restart_timer(cx.now);
            self.retire(sh, cx);
        }
        if lost && self.sends() {
            self.go_back();
        }
    }

    /// Stores an atomic's old value. `false`: that failed, or is not wanted.
    fn store_atomic(
        &mut self,
        at: u32,
        value: u64,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> bool {
        let (pd, regions) = (self.pd, &sh.regions);
        let found = self
            .requester
            .flight
            .iter_mut()
            .find(|flight| flight.psn == at && flight.psns != 0);
        let Some(flight) = found.filter(|flight| flight.is_atomic()) else {
            return false;
        };
        let Data::Gather(sges) = &flight.request.data else {
            return false;
        };
        let part = Part {
            regions,
            pd,
            sges,
            skip: 0,
            len: 8,
            needed: Rights::LOCAL_WRITE,
            access: Access::Write,
        };
        let bytes = value.to_ne_bytes();
        let mut rest = bytes.as_slice();
        let stored = part.walk(cx.memory, |span| {
            let (now, later) = rest.split_at_checked(span.len()).ok_or(Fault::Unmapped)?;
            rest = later;
            span.copy_from(now).map_err(|_| Fault::Unmapped).map(|_| ())
        });
        flight.fate = match stored {
            Ok(()) => Fate::Done,
            Err(_) => Fate::Failed(Status::LocalProtection),
        };
        stored.is_ok()
    }

    fn receiver_not_ready(&mut self, code: u8, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        sh.counters.receiver_not_ready += 1;
        let r = &mut self.requester;
        if self.attributes.rnr_retry != RNR_FOREVER {
            if r.rnr_retries >= self.attributes.rnr_retry {
                self.fail_front(Status::RnrRetryExceeded, sh, cx);
                return;
            }
            r.rnr_retries += 1;
        }
        self.pause(rnr_time(code), cx);
    }

    fn memory_unknown(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        let (since, pause) = self.requester.unknown.unwrap_or((cx.now, UNKNOWN_PAUSE.0));
        if cx.now.saturating_duration_since(since) > UNKNOWN_LIMIT {
            self.fail_front(Status::RetryExceeded, sh, cx);
            return;
        }
        self.requester.unknown = Some((since, (pause * 2).min(UNKNOWN_PAUSE.1)));
        self.pause(pause, cx);
    }

    /// Sends again from the oldest without answer, after a time.
    fn pause(&mut self, time: Duration, cx: &Context<'_>) {
        self.go_back();
        self.answer_timer.due = None;
        self.pause_timer.due = cx.now.checked_add(time);
    }

    /// Sends again from the oldest without answer, if that may still be.
    fn retry(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        if self.requester.retries >= self.attributes.retry_count {
            self.fail_front(Status::RetryExceeded, sh, cx);
            return;
        }
        self.requester.retries += 1;
        self.go_back();
        self.restart_timer(cx.now);
    }

    /// The next packet is the oldest without answer.
    fn go_back(&mut self) {
        let r = &mut self.requester;
        let at = r.unacknowledged;
        r.reads = 0;
        r.cursor = 0;
        r.offset = 0;
        for flight in &r.flight {
            if flight.psns != 0 && psn::since(flight.end(), at) > 0 {
                let done = psn::since(at, flight.psn).max(0) as u32;
                r.offset = done << self.attributes.mtu_shift;
                r.reads += u32::from(r.offset != 0 && flight.is_read());
                return;
            }
            r.reads += u32::from(flight.is_read());
            r.cursor += 1;
        }
    }

    /// Whether the peer's thread has not come to what was sent to it, as on a host that is busy with
    /// other things: nothing is lost then, and to send again would not help. A peer that never comes
    /// back is the OM's to notice, which then takes the path away.
    fn peer_is_held_up(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(path) = self.attributes.path else {
            return false;
        };
        let untaken = &mut self.requester.untaken;
        let until = untaken
            .take()
            .unwrap_or_else(|| cx.fabric.position(path.peer));
        // The same place as before: others' requests to this peer must not count.
        *untaken = (!cx.fabric.is_taken(path.peer, until)).then_some(until);
        untaken.is_some()
    }

    /// Whether no answer of an unreliable connection will come: the peer handled all that was sent, and
    /// its queue pair did not want it.
    fn is_lost(&self, cx: &mut Context<'_>) -> bool {
        let since = self.requester.silent.unwrap_or(cx.now);
        let peer = self.attributes.path.map(|path| path.peer);
        cx.now.saturating_duration_since(since) >= UNRELIABLE_WAIT
            || peer.is_none_or(|peer| cx.fabric.is_handled(peer))
    }

    /// A timer is due.
    pub(super) fn timed_out(&mut self, kind: Kind, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        match kind {
            Kind::Pause => {
                self.pause_timer.due = None;
                self.receive_rung |= self.state == QpState::Error;
            }
            Kind::Answer => {
                self.answer_timer.due = None;
                if !self.sends() || !self.requester.waits() {
                    return;
                }
                if self.service == Service::Rc && self.peer_is_held_up(cx) {
                    self.restart_timer(cx.now);
                    return;
                }
                if self.service == Service::Rc {
                    sh.counters.timeouts += 1;
                    self.retry(sh, cx);
                    return;
                }
                if self.service == Service::Uc && !self.is_lost(cx) {
                    self.answer_timer.due = cx.now.checked_add(UNRELIABLE_LOOK);
                    return;
                }
                // Nobody takes these bytes any more.
                let r = &mut self.requester;
                for flight in r.flight.iter_mut().take(r.cursor) {
                    if flight.fate == Fate::Pending {
                        flight.fate = Fate::Done;
                    }
                }
                r.unacknowledged = r.sent;
                self.retire(sh, cx);
            }
        }
    }
}
