//! A queue pair: what it is, and how it fails.

use super::requester::Requester;
use super::responder::Responder;
use super::run::LISTS;
use super::tables::Shared;
use super::timers::Timer;
use super::{Context, Notice, QpSetup};
use crate::rdma::kept::{Finished, QpPlace};
use crate::rdma::verbs::{
    Completion, CqNum, Done, Front, Next, Path, Pd, QpNum, QpState, ReceiveFrom, ReceiveQueue,
    ReceiveRequest, Rights, SendQueue, Service, SrqNum, Status,
};
use std::time::Duration;

/// Entries of one work queue that are flushed in one turn.
const FLUSH: usize = 256;

/// Until the next look at the receive queue of a queue pair in error, at first and at most: drivers
/// post receives without a doorbell. Those that wait for the end of one post it at once.
const LOOK: (Duration, Duration) = (Duration::from_micros(200), Duration::from_secs(1));

/// What [`super::Engine::modify_qp`] sets.
#[derive(Debug, Clone)]
pub(super) struct Attributes {
    pub(super) remote_rights: Rights,
    pub(super) qkey: u32,
    pub(super) dest_qp: QpNum,
    pub(super) path: Option<Path>,
    /// log₂ of the path MTU in bytes.
    pub(super) mtu_shift: u32,
    pub(super) min_rnr_timer: u8,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) max_reads: u32,
    pub(super) max_dest_reads: u32,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            remote_rights: Rights::NONE,
            qkey: 0,
            dest_qp: QpNum(0),
            path: None,
            mtu_shift: 12,
            min_rnr_timer: 0,
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            max_reads: 0,
            max_dest_reads: 0,
        }
    }
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp<F: Front> {
    pub(super) num: QpNum,
    pub(super) service: Service,
    pub(super) pd: Pd,
    tag: u32,
    pub(super) send_cq: CqNum,
    pub(super) receive_cq: CqNum,
    pub(super) send: Option<F::Send>,
    pub(super) receive: Option<F::Receive>,
    pub(super) receive_from: ReceiveFrom,
    pub(super) registers_all: bool,
    pub(super) state: QpState,
    pub(super) attributes: Attributes,
    /// In state [`QpState::Sqd`]: requests are still under way.
    pub(super) draining: bool,
    /// Whether the first packet came while it was ready to receive only.
    pub(super) established: bool,
    /// Whether it is in the list of those that have something to do.
    pub(super) ready: bool,
    /// Whether the send queue may have entries.
    pub(super) rung: bool,
    /// In state [`QpState::Error`]: whether the receive queue may have entries.
    pub(super) receive_rung: bool,
    /// Nobody answers any more, and the first request that is flushed says so.
    pub(super) lost: bool,
    /// Until the next look at the receive queue in that state.
    look: Duration,
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    /// For [`super::timers::Kind::Answer`].
    pub(super) answer_timer: Timer,
    /// For [`super::timers::Kind::Pause`].
    pub(super) pause_timer: Timer,
    /// What of the send queue is done with.
    pub(super) sends_done: Finished,
    /// Where it is known to who takes the place of this process.
    pub(super) place: Option<QpPlace>,
}

/// A receive that was taken from its queue.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) request: ReceiveRequest,
    pub(super) srq: Option<SrqNum>,
}

impl<F: Front> Qp<F> {
    pub(super) fn new(setup: QpSetup<F>) -> Self {
        Self {
            num: setup.num,
            service: setup.service,
            pd: setup.pd,
            tag: setup.tag,
            send_cq: setup.send_cq,
            receive_cq: setup.receive_cq,
            send: setup.send,
            receive: setup.receive,
            receive_from: setup.receive_from,
            registers_all: setup.registers_all,
            state: QpState::Reset,
            attributes: Attributes::default(),
            draining: false,
            established: false,
            ready: false,
            rung: false,
            receive_rung: false,
            lost: false,
            look: LOOK.0,
            requester: Requester::default(),
            responder: Responder::default(),
            answer_timer: Timer::default(),
            pause_timer: Timer::default(),
            sends_done: Finished::default(),
            place: None,
        }
    }

    /// Whether packets are taken.
    #[inline]
    pub(super) fn receives(&self) -> bool {
        use QpState::{Rtr, Rts, Sqd, Sqe};
        matches!(self.state, Rtr | Rts | Sqd | Sqe)
    }

    /// A successful completion of a send, to be adapted.
    #[inline]
    pub(super) fn completion(&self, cookie: u32, done: Done, status: Status) -> Completion {
        Completion {
            qp: self.num,
            tag: self.tag,
            srq: None,
            cookie,
            done,
            status,
            len: 0,
            solicited: false,
            source: None,
        }
    }

    /// Completes a send with an error; `then` is done afterwards.
    pub(super) fn complete_send(
        &mut self,
        (cookie, then): (u32, Finished),
        done: Done,
        status: Status,
        sh: &mut Shared<F>,
        cx: &Context<'_>,
    ) {
        let completion = self.completion(cookie, done, status);
        self.completing_send(then, sh);
        // Nothing is left to do when this queue is in error too.
        let _ = sh.complete(self.send_cq, &completion, cx);
        self.completed_send(then);
    }

    /// Completes a receive with an error.
    pub(super) fn complete_receive(
        &mut self,
        taken: &Taken,
        status: Status,
        sh: &mut Shared<F>,
        cx: &Context<'_>,
    ) {
        let mut completion = self.completion(taken.request.cookie, Done::Receive, status);
        completion.srq = taken.srq;
        self.completing_receive(self.responder.expected, sh);
        // Nothing is left to do when this queue is in error too.
        let _ = sh.complete(self.receive_cq, &completion, cx);
        self.keep_received();
    }

    /// The queue pair's work queue or completion queue is broken.
    pub(super) fn fatal(&mut self, sh: &mut Shared<F>, cx: &Context<'_>) {
        sh.notices.push(Notice::QpFatal(self.num));
        self.enter_error(sh, cx);
    }

    /// To [`QpState::Error`]: flushes what was taken; what is posted follows in [`Self::flush`].
    pub(super) fn enter_error(&mut self, sh: &mut Shared<F>, cx: &Context<'_>) {
        if self.state == QpState::Error {
            return;
        }
        self.state = QpState::Error;
        self.keep_state();
        self.draining = false;
        self.flush_in_flight(sh, cx);
        for taken in self.responder.stop() {
            self.complete_receive(&taken, Status::Flushed, sh, cx);
        }
        if let ReceiveFrom::Shared(_) = self.receive_from {
            sh.notices.push(Notice::LastReceive(self.num));
        }
        self.rung = true;
        self.receive_rung = true;
        self.look = LOOK.0;
    }

    /// To [`QpState::Sqe`]: receives go on.
    pub(super) fn enter_send_error(&mut self, sh: &mut Shared<F>, cx: &Context<'_>) {
        self.state = QpState::Sqe;
        self.keep_state();
        self.draining = false;
        self.flush_in_flight(sh, cx);
        self.rung = true;
    }

    fn flush_in_flight(&mut self, sh: &mut Shared<F>, cx: &Context<'_>) {
        while let Some(flight) = self.requester.flight.pop_front() {
            let of = (flight.request.cookie, flight.finished());
            self.complete_send(of, flight.done(), Status::Flushed, sh, cx);
        }
        self.requester.stop();
        self.answer_timer.due = None;
        self.pause_timer.due = None;
    }

    /// Flushes what is posted in an error state. Answers whether there was any, and whether there
    /// may be more.
    pub(super) fn flush(&mut self, sh: &mut Shared<F>, cx: &Context<'_>) -> (bool, bool) {
        let mut did = false;
        if self.rung {
            self.rung = false;
            for n in 0..FLUSH {
                let next = match &mut self.send {
                    Some(queue) => queue.next(cx.memory, &sh.regions),
                    None => Next::Empty,
                };
                let (cookie, done) = match next {
                    Next::Entry(request) => {
                        sh.charge(&request);
                        let done = super::requester::done_of(&request.operation);
                        (request.cookie, done)
                    }
                    Next::Bad(cookie) => (cookie, Done::Send),
                    Next::Empty | Next::Unreadable => break,
                };
                did = true;
                let then = Finished {
                    position: self.send.as_ref().map_or(0, SendQueue::position),
                    psn: self.requester.next_psn,
                };
                let status = match std::mem::take(&mut self.lost) {
                    true => Status::RetryExceeded,
                    false => Status::Flushed,
                };
                self.complete_send((cookie, then), done, status, sh, cx);
                self.rung = n == FLUSH - 1;
                if sh.spent > LISTS {
                    self.rung = true;
                    break;
                }
            }
            // What is posted from now on is posted to a queue pair in error.
            self.lost = false;
        }
        if self.receive_rung && self.state == QpState::Error {
            self.receive_rung = false;
            let mut found = false;
            for n in 0..FLUSH {
                let request = match self.receive.as_mut().map(|queue| queue.next(cx.memory)) {
                    Some(Next::Entry(request)) => request,
                    Some(Next::Bad(cookie)) => ReceiveRequest {
                        cookie,
                        sges: Default::default(),
                    },
                    _ => break,
                };
                did = true;
                found = true;
                let taken = Taken { request, srq: None };
                self.complete_receive(&taken, Status::Flushed, sh, cx);
                self.receive_rung = n == FLUSH - 1;
            }
            if self.receive.is_some() {
                self.look = match found {
                    true => LOOK.0,
                    false => (self.look * 2).min(LOOK.1),
                };
                self.pause_timer.due = cx.now.checked_add(self.look);
            }
        }
        (did, self.rung || self.receive_rung)
    }

    /// To [`QpState::Reset`]: forgets all work.
    pub(super) fn reset(&mut self) {
        self.state = QpState::Reset;
        self.attributes = Attributes::default();
        self.draining = false;
        self.established = false;
        self.rung = false;
        self.receive_rung = false;
        self.lost = false;
        self.requester = Requester::default();
        self.responder = Responder::default();
        self.answer_timer.due = None;
        self.pause_timer.due = None;
        if let Some(queue) = &mut self.send {
            queue.reset();
        }
        if let Some(queue) = &mut self.receive {
            queue.reset();
        }
        self.sends_done = Finished::default();
    }
}
