//! Responder: checks an incoming request and does it.

use super::access::RemoteAccess;
use super::memory::{Cursor, Fault, Part};
use super::psn;
use super::qp::{Qp, Taken};
use super::tables::Shared;
use super::{Context, Notice};
use crate::rdma::packet::{
    Action, MAX_CARRIED, MAX_PAYLOAD, MAX_SEGMENTS, Payload, Request, Tail, Verdict,
};
use crate::rdma::verbs::{
    Done, Front, MemKey, Next, Peer, QpNum, QpState, ReceiveFrom, ReceiveQueue, ReceiveRequest,
    Rights, Service, SrqNum, Status,
};
use dot_iommu::Access;
use smartep::fault;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Old values of atomics that are kept for requests that come again.
const ATOMICS: usize = 128;
/// Answers that wait for room at most; more requests are not taken then.
const ANSWERS: usize = 256;

/// What the message that is coming in is.
#[derive(Debug, Default)]
pub(super) enum Message {
    /// There is none.
    #[default]
    None,
    /// A SEND.
    Send {
        /// Where it goes.
        taken: Taken,
        /// Bytes that came.
        len: u32,
    },
    /// An RDMA WRITE or READ.
    Access {
        read: bool,
        /// Where the next packet's bytes are.
        next: u64,
        key: MemKey,
        /// Bytes that have not come.
        left: u32,
        total: u32,
    },
}

/// A queue pair's responder.
#[derive(Debug, Default)]
pub(super) struct Responder {
    /// PSN expected next.
    pub(super) expected: u32,
    pub(super) message: Message,
    /// A receive that was taken for a message that did not come to its end.
    pub(super) held: Option<Taken>,
    /// The requester was told to send again from the PSN expected.
    told: bool,
    /// Answers that were not sent, in order.
    pub(super) answers: VecDeque<(u32, Verdict)>,
    /// Old values of the last atomics, by PSN.
    pub(super) atomics: VecDeque<(u32, u64)>,
    /// PSN behind the packet that is being done.
    pub(super) ending: u32,
    /// Receives that were completed; 16 bits count.
    pub(super) completed: u16,
    /// A former process may have done a part of the next packet.
    pub(super) resumed: bool,
}

impl Responder {
    pub(super) fn start(&mut self, first: u32) {
        self.expected = first;
    }

    /// No more requests are taken. Answers the receives that were taken.
    pub(super) fn stop(&mut self) -> impl Iterator<Item = Taken> + use<> {
        let message = match std::mem::take(&mut self.message) {
            Message::Send { taken, .. } => Some(taken),
            _ => None,
        };
        message.into_iter().chain(self.held.take())
    }

    /// Keeps a receive for the next message.
    pub(super) fn hold(&mut self, taken: Taken) {
        self.held = Some(taken);
    }

    fn push(&mut self, at: u32, verdict: Verdict) {
        match self.answers.back_mut() {
            // Answers are for all up to their PSN.
            Some((last, Verdict::Done)) if verdict == Verdict::Done => *last = at,
            _ => self.answers.push_back((at, verdict)),
        }
    }
}

/// Why a request is not done.
#[derive(Debug)]
pub(super) enum Failure {
    /// The requester has to come again; nothing happened.
    Again(Verdict),
    /// The queue pair fails; the receive, if one was taken, completes so.
    Fatal(Verdict, Option<(Taken, Status)>),
}

impl From<Verdict> for Failure {
    fn from(verdict: Verdict) -> Self {
        Self::Fatal(verdict, None)
    }
}

/// Bytes of a payload; `None` when it breaks the limits.
#[inline]
pub(super) fn measure(payload: &Payload) -> Option<u32> {
    match payload {
        Payload::Inline(bytes) => (bytes.len() <= MAX_CARRIED).then_some(bytes.len() as u32),
        Payload::Segments(segments) => {
            let len = segments.iter().map(|one| u64::from(one.len)).sum::<u64>();
            let fits = segments.len() <= MAX_SEGMENTS && len <= u64::from(MAX_PAYLOAD);
            fits.then_some(len as u32)
        }
    }
}

impl<F: Front> Qp<F> {
    /// A request of a connected service came in.
    pub(super) fn requested(
        &mut self,
        from: (Peer, QpNum),
        at: u32,
        request: &Request,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) {
        let known = self.attributes.path.map(|path| path.peer) == Some(from.0);
        if !known || self.attributes.dest_qp != from.1 || !self.receives() {
            return;
        }
        let reliable = self.service == Service::Rc;
        let distance = psn::since(at, self.responder.expected);
        let Some(len) = measure(&request.payload) else {
            if distance == 0 && reliable {
                self.refuse(at, Failure::from(Verdict::InvalidRequest), sh, cx);
            }
            return;
        };
        let end = psn::add(at, psn::count(len, request.mtu_shift.into()));
        if !reliable {
            self.requested_unreliably(end, distance, request, len, sh, cx);
            return;
        }
        if self.responder.answers.len() >= ANSWERS {
            return;
        }
        if distance > 0 {
            if !self.responder.told {
                self.responder.told = true;
                let expected = self.responder.expected;
                self.responder.push(expected, Verdict::Sequence);
            }
            return;
        }
        if distance < 0 {
            self.repeat(at, request);
            return;
        }
        self.responder.told = false;
        self.establish(sh);
        self.responder.ending = end;
        let performed = self.perform(from.0, request, len, sh, cx);
        match performed {
            Ok(verdict) => {
                self.responder.resumed = false;
                fault::point("performed");
                self.responder.expected = end;
                if let Verdict::Atomic(value) = verdict {
                    if let Some(place) = &self.place {
                        place.atomic_done(at, value);
                    }
                    if self.responder.atomics.len() >= ATOMICS {
                        self.responder.atomics.pop_front();
                    }
                    self.responder.atomics.push_back((at, value));
                }
                self.keep_received();
                self.responder.push(psn::before(end), verdict);
            }
            Err(failure) => self.refuse(at, failure, sh, cx),
        }
    }

    /// A request that was done comes again. RDMA READs too are not done again: their data is where
    /// it belongs, and the requester may be using that memory for something else by now.
    fn repeat(&mut self, at: u32, request: &Request) {
        let r = &mut self.responder;
        let atomic = matches!(
            request.action,
            Action::CompareSwap { .. } | Action::FetchAdd { .. }
        );
        if !atomic {
            let done = psn::before(r.expected);
            r.push(done, Verdict::Done);
        } else if let Some((_, value)) = r.atomics.iter().find(|(psn, _)| *psn == at) {
            let value = *value;
            r.push(at, Verdict::Atomic(value));
        }
    }

    /// A part of an unreliable connection's message. Word goes back when its bytes are not needed
    /// any more, whatever became of it.
    fn requested_unreliably(
        &mut self,
        end: u32,
        distance: i32,
        request: &Request,
        len: u32,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) {
        if distance < 0 {
            // Of a connection before this one.
            return;
        }
        let Some(peer) = self.attributes.path.map(|path| path.peer) else {
            return;
        };
        self.establish(sh);
        if distance > 0 || request.first {
            // The rest of the message before is lost.
            self.drop_message();
        }
        self.responder.expected = end;
        self.responder.ending = end;
        if request.acknowledge {
            self.responder.push(psn::before(end), Verdict::Done);
        }
        let partial = !request.first && matches!(self.responder.message, Message::None);
        let possible = matches!(request.action, Action::Send | Action::Write { .. });
        if partial || !possible {
            sh.counters.dropped += 1;
            return;
        }
        let performed = self.perform(peer, request, len, sh, cx);
        self.keep_received();
        match performed {
            Ok(_) => {}
            Err(Failure::Fatal(_, Some((taken, status)))) => {
                self.complete_receive(&taken, status, sh, cx);
                self.enter_error(sh, cx);
            }
            Err(_) => {
                sh.counters.dropped += 1;
                self.drop_message();
            }
        }
    }

    fn drop_message(&mut self) {
        if let Message::Send { taken, .. } = std::mem::take(&mut self.responder.message) {
            self.responder.held = Some(taken);
        }
    }

    /// The first packet tells a queue pair that is ready to receive only that its peer is there.
    fn establish(&mut self, sh: &mut Shared<F>) {
        if self.state == QpState::Rtr && !self.established {
            self.established = true;
            sh.notices.push(Notice::CommunicationEstablished(self.num));
        }
    }

    fn refuse(&mut self, at: u32, failure: Failure, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        match failure {
            Failure::Again(verdict) => {
                self.responder.told = true;
                self.responder.push(at, verdict);
                self.keep_received();
            }
            Failure::Fatal(verdict, taken) => {
                self.responder.push(at, verdict);
                if let Some((taken, status)) = taken {
                    self.complete_receive(&taken, status, sh, cx);
                }
                sh.counters.refused += 1;
                match verdict {
                    Verdict::Access => sh.notices.push(Notice::AccessError(self.num)),
                    Verdict::InvalidRequest => sh.notices.push(Notice::InvalidRequest(self.num)),
                    _ => {}
                }
                self.enter_error(sh, cx);
            }
        }
    }

    /// Does a part of a message whose turn it is.
    #[inline]
    fn perform(
        &mut self,
        peer: Peer,
        request: &Request,
        len: u32,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> Result<Verdict, Failure> {
        // Only the last packet may end within an MTU, or PSNs would not tell where bytes belong.
        let whole = len.trailing_zeros() >= u32::from(request.mtu_shift) && len != 0;
        if !request.last && (!whole || request.tail != Tail::Plain) {
            return Err(Verdict::InvalidRequest.into());
        }
        let fits = match &self.responder.message {
            Message::None => request.first,
            Message::Send { .. } => !request.first && request.action == Action::Send,
            Message::Access {
                read,
                next,
                key: expected,
                ..
            } => {
                !request.first
                    && match request.action {
                        Action::Write { addr, key, .. } => {
                            !read && addr == *next && key == *expected
                        }
                        Action::Read { addr, key, .. } => {
                            read & (addr == *next) && key == *expected
                        }
                        _ => false,
                    }
            }
        };
        if !fits {
            return Err(Verdict::InvalidRequest.into());
        }
        match request.action {
            Action::Send => self.sent(peer, request, len, sh, cx),
            Action::Write { addr, key, total } => {
                let access = RemoteAccess {
                    read: false,
                    addr,
                    key,
                    total,
                    len,
                };
                self.accessed(peer, request, access, sh, cx)
            }
            Action::Read { addr, key, total } => {
                let access = RemoteAccess {
                    read: true,
                    addr,
                    key,
                    total,
                    len,
                };
                self.accessed(peer, request, access, sh, cx)
            }
            Action::CompareSwap {
                addr,
                key,
                compare,
                swap,
            } => self.atomic(addr, key, sh, cx, |memory| {
                match memory.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(old) | Err(old) => old,
                }
            }),
            Action::FetchAdd { addr, key, add } => self.atomic(addr, key, sh, cx, |memory| {
                memory.fetch_add(add, Ordering::SeqCst)
            }),
        }
    }

    /// Takes a receive.
    pub(super) fn take_receive(
        &mut self,
        sh: &mut Shared<F>,
        cx: &Context<'_>,
    ) -> Result<Taken, Failure> {
        if let Some(taken) = self.responder.held.take() {
            return Ok(taken);
        }
        let (next, srq) = match (self.receive_from, &mut self.receive) {
            (ReceiveFrom::Own, Some(queue)) => (queue.next(cx.memory), None),
            (ReceiveFrom::Shared(num), _) => (sh.shared_receive(num, cx), Some(num)),
            _ => return Err(Verdict::InvalidRequest.into()),
        };
        match next {
            Next::Entry(request) => {
                let taken = Taken { request, srq };
                Ok(match srq {
                    Some(num) => self.hold_shared(taken, num, sh),
                    None => taken,
                })
            }
            Next::Empty => Err(Failure::Again(Verdict::ReceiverNotReady(
                self.attributes.min_rnr_timer,
            ))),
            Next::Bad(cookie) => {
                let request = crate::rdma::verbs::ReceiveRequest {
                    cookie,
                    sges: Default::default(),
                };
                let failed = (Taken { request, srq }, Status::LocalQpOperation);
                Err(Failure::Fatal(Verdict::Operation, Some(failed)))
            }
            Next::Unreadable => {
                sh.notices.push(Notice::QpFatal(self.num));
                Err(Verdict::Operation.into())
            }
        }
    }

    /// A receive of a shared queue is this queue pair's before it is gone from the queue.
    fn hold_shared(&mut self, taken: Taken, num: SrqNum, sh: &mut Shared<F>) -> Taken {
        if self.place.is_none() {
            return taken;
        }
        self.responder.held = Some(taken);
        self.keep_received();
        if let Some(srq) = sh.srqs.get(num.0) {
            srq.keep();
        }
        let none = ReceiveRequest {
            cookie: 0,
            sges: Default::default(),
        };
        self.responder.held.take().unwrap_or(Taken {
            request: none,
            srq: Some(num),
        })
    }

    fn sent(
        &mut self,
        peer: Peer,
        request: &Request,
        len: u32,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> Result<Verdict, Failure> {
        let (taken, before) = match std::mem::take(&mut self.responder.message) {
            Message::Send { taken, len } => (taken, len),
            _ => (self.take_receive(sh, cx)?, 0),
        };
        let room = taken.request.sges.iter().map(|sge| u64::from(sge.len));
        let end = u64::from(before) + u64::from(len);
        if room.sum::<u64>() < end {
            let failed = Some((taken, Status::LocalLength));
            return Err(Failure::Fatal(Verdict::InvalidRequest, failed));
        }
        let part = Part {
            regions: &sh.regions,
            pd: self.receive_pd(sh),
            sges: &taken.request.sges,
            skip: u64::from(before),
            len: u64::from(len),
            needed: Rights::LOCAL_WRITE,
            access: Access::Write,
        };
        let mut payload = Cursor::new(&request.payload, &*cx.fabric, peer, Access::Read);
        let total = end as u32;
        match part.walk(cx.memory, |span| payload.fill(span)) {
            Ok(()) => {}
            Err(Fault::PeerUnknown) => {
                if before == 0 {
                    self.responder.held = Some(taken);
                } else {
                    self.responder.message = Message::Send { taken, len: before };
                }
                return Err(Failure::Again(Verdict::MemoryUnknown));
            }
            Err(Fault::PeerRange) => {
                let failed = Some((taken, Status::RemoteInvalidRequest));
                return Err(Failure::Fatal(Verdict::InvalidRequest, failed));
            }
            Err(Fault::Denied(_) | Fault::Unmapped) => {
                let failed = Some((taken, Status::LocalProtection));
                return Err(Failure::Fatal(Verdict::Operation, failed));
            }
        }
        if !request.last {
            self.responder.message = Message::Send { taken, len: total };
            return Ok(Verdict::Done);
        }
        let done = match request.tail {
            Tail::Plain => Done::Receive,
            Tail::Immediate(value) => Done::ReceiveImmediate(value),
            Tail::Invalidate(key) => {
                let done = self.responder.resumed && sh.regions.is_invalidated(key, self.pd);
                if !done && sh.regions.invalidate(key, self.pd).is_err() {
                    let failed = Some((taken, Status::LocalAccess));
                    return Err(Failure::Fatal(Verdict::Access, failed));
                }
                sh.keep_region(key.0 >> 8);
                Done::ReceiveInvalidate(key)
            }
        };
        sh.counters.received += 1;
        sh.counters.received_bytes += u64::from(total);
        self.received(&taken, done, total, request.solicited, sh, cx)
    }

    /// Whose regions receives name: a shared queue has a domain of its own.
    pub(super) fn receive_pd(&self, sh: &Shared<F>) -> crate::rdma::verbs::Pd {
        match self.receive_from {
            ReceiveFrom::Shared(num) => sh.srqs.get(num.0).map_or(self.pd, |srq| srq.pd),
            _ => self.pd,
        }
    }

    /// Completes a receive.
    pub(super) fn received(
        &mut self,
        taken: &Taken,
        done: Done,
        len: u32,
        solicited: bool,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> Result<Verdict, Failure> {
        let mut completion = self.completion(taken.request.cookie, done, Status::Success);
        completion.srq = taken.srq;
        completion.len = len;
        completion.solicited = solicited;
        self.completing_receive(self.responder.ending, sh);
        if sh.complete(self.receive_cq, &completion, cx) {
            fault::point("received");
            Ok(Verdict::Done)
        } else {
            sh.notices.push(Notice::QpFatal(self.num));
            Err(Verdict::Operation.into())
        }
    }
}
