//! What of a queue pair outlives the process, and how it is taken up again.
//!
//! A change by the driver leaves an *image* of the queue pair ([`Engine::image`]), which the front end keeps with
//! its other records. What the data path changes afterwards is in the queue pair's place
//! ([`crate::rdma::kept::QpPlace`]), which names the image that it goes on from.
//!
//! The successor sends again from the oldest request that was not completed. That is what any requester does
//! after a time without an answer, and the responder knows by the PSN what it has done. As responder it goes on
//! at the PSN expected, and says so at once.

use super::qp::{Attributes, Qp, Taken};
use super::responder::Message;
use super::tables::Shared;
use super::{Context, Engine, Refused};
use crate::rdma::kept::{Detail, Finished, Kept, Standing};
use crate::rdma::packet::Verdict;
use crate::rdma::verbs::{
    CompletionQueue, Front, MemKey, Next, Path, Peer, QpNum, QpState, ReceiveFrom, ReceiveQueue,
    ReceiveRequest, Region, Rights, SendQueue, Service, SrqNum, Status, Translation,
};
use crate::virtio::saved::Fields;
use std::sync::Arc;

/// States by their codes.
const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];

fn code(state: QpState) -> u8 {
    (0u8..)
        .zip(STATES)
        .find(|(_, one)| *one == state)
        .map_or(0, |(code, _)| code)
}

fn state(code: u8) -> Option<QpState> {
    STATES.get(usize::from(code)).copied()
}

impl<F: Front> Engine<F> {
    /// Queues that are made from here on have places there, and changes of regions are kept.
    pub fn keep_in(&mut self, kept: Arc<Kept>) {
        self.shared.kept = Some(kept);
    }

    /// What was made of a region otherwise than by a command outlives the process.
    #[cfg(test)]
    pub(crate) fn keep_region(&self, index: u32) {
        self.shared.keep_region(index);
    }

    /// A queue pair as bytes, for [`Self::restore_qp`]. Numbers are little endian; the layout is part of
    /// [`crate::rdma::kept::VERSION`].
    pub fn image(&self, num: QpNum) -> Option<Vec<u8>> {
        let qp = self.qps.get(num.0)?;
        let a = &qp.attributes;
        let path = a.path.unwrap_or(Path {
            peer: Peer(0),
            generation: 0,
        });
        let standing = qp.standing();
        let mut bytes = vec![
            standing.state,
            qp.established.into(),
            a.remote_rights.bits(),
            a.path.is_some().into(),
            a.mtu_shift as u8,
            a.min_rnr_timer,
            a.timeout,
            a.retry_count,
            a.rnr_retry,
        ];
        for word in [
            a.qkey,
            a.dest_qp.0,
            path.peer.0,
            a.max_reads,
            a.max_dest_reads,
            standing.sent.psn,
            standing.received.psn,
        ] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(path.generation.to_le_bytes());
        bytes.extend(standing.sent.position.to_le_bytes());
        bytes.extend(standing.received.position.to_le_bytes());
        Some(bytes)
    }

    /// The image with number `owner` is kept: from here on the queue pair's place goes on from it.
    pub fn image_kept(&mut self, num: QpNum, owner: u32) {
        let Some(qp) = self.qps.get_mut(num.0) else {
            return;
        };
        let standing = qp.standing();
        if let Some(place) = &mut qp.place {
            place.begin(owner, &standing);
        }
    }

    /// Makes a queue pair, which is in state Reset, what a former process left: an image with its number, and what
    /// was done since. Without an image it stays as it is.
    ///
    /// # Errors
    /// There is no such queue pair, or the image makes no sense.
    pub fn restore_qp(
        &mut self,
        num: QpNum,
        image: Option<(u32, &[u8])>,
        kept: &Kept,
        cx: &mut Context<'_>,
    ) -> Result<(), Refused> {
        let bad = Refused::Attribute("image");
        let qp = self.qps.get_mut(num.0).ok_or(Refused::Unknown)?;
        qp.place = kept.qp(num.0);
        let Some((owner, image)) = image else {
            return Ok(());
        };
        let (attributes, established, imaged) = parse(image).ok_or(bad)?;
        let cqs = &self.shared.cqs;
        let has = |cq: u32, index| cqs.get(cq).is_some_and(|cq| cq.queue.has(index));
        let left = qp.place.as_ref().and_then(|place| {
            let (sends, receives) = (qp.send_cq.0, qp.receive_cq.0);
            place.standing(owner, |n| has(sends, n), |n| has(receives, n))
        });
        let standing = left.unwrap_or(imaged);
        let to = state(standing.state).ok_or(bad)?;
        qp.attributes = attributes;
        qp.established = established;
        qp.state = to;
        qp.go_on(&standing, &mut self.shared, cx);
        if let Some(place) = &mut qp.place {
            place.go_on(owner, &standing);
        }
        let uncertain = standing.atomic == Some(standing.received.psn);
        if uncertain && qp.receives() && qp.service == Service::Rc {
            // Nobody knows whether memory was changed.
            qp.fatal(&mut self.shared, cx);
        }
        if qp.state != QpState::Reset {
            qp.rung = true;
            qp.receive_rung = qp.state == QpState::Error;
            self.mark(num);
        }
        Ok(())
    }

    /// All queue pairs are restored: shared receive queues go on behind what those have taken.
    pub fn restored(&mut self, cx: &mut Context<'_>) {
        let mut taken: Vec<(SrqNum, u32)> = Vec::new();
        for qp in (0..self.qps.end()).filter_map(|num| self.qps.get(num)) {
            let held = qp.responder.held.as_ref();
            let message = match &qp.responder.message {
                Message::Send { taken, .. } => Some(taken),
                _ => None,
            };
            for one in held.into_iter().chain(message) {
                taken.extend(one.srq.map(|srq| (srq, one.request.cookie)));
            }
        }
        while let Some(at) = taken.iter().position(|(srq, cookie)| {
            let srq = self.shared.srqs.get(srq.0);
            srq.is_some_and(|srq| srq.queue.next_cookie() == *cookie)
        }) {
            let (num, _) = taken.swap_remove(at);
            let _ = self.shared.shared_receive(num, cx);
            if let Some(srq) = self.shared.srqs.get(num.0) {
                srq.keep();
            }
        }
        // A process that died while a queue pair went to error may not have flushed the receive in hand.
        for num in 0..self.qps.end() {
            let qp = self.qps.get_mut(num);
            let Some(qp) = qp.filter(|qp| qp.state == QpState::Error) else {
                continue;
            };
            for taken in qp.responder.stop() {
                qp.complete_receive(&taken, Status::Flushed, &mut self.shared, cx);
            }
        }
    }

    /// A shared receive queue goes on where a former process left it.
    pub fn restore_srq(&mut self, num: SrqNum, kept: &Kept) {
        if let (Some(srq), Some(place)) = (self.shared.srqs.get_mut(num.0), kept.srq(num.0)) {
            let (position, limit) = (place.load(0), place.load(1));
            if position != 0 {
                srq.queue.seek(position as u32);
                srq.limit = limit as u32;
            }
            srq.place = Some(place);
        }
    }
}

fn parse(image: &[u8]) -> Option<(Attributes, bool, Standing)> {
    let mut fields = Fields(image);
    let [state, established, rights, has_path, mtu_shift] = fields.bytes()?;
    let [min_rnr_timer, timeout, retry_count, rnr_retry] = fields.bytes()?;
    let mut word = || fields.word();
    let (qkey, dest_qp, peer) = (word()?, word()?, word()?);
    let (max_reads, max_dest_reads) = (word()?, word()?);
    let (sent, received) = (word()?, word()?);
    let generation = fields.long()?;
    let (sent_position, received_position) = (fields.half()?, fields.half()?);
    if !(8..=12).contains(&mtu_shift) || !fields.0.is_empty() {
        return None;
    }
    let peer = Peer(peer);
    let attributes = Attributes {
        remote_rights: Rights::from_bits(rights),
        qkey,
        dest_qp: QpNum(dest_qp),
        path: (has_path != 0).then_some(Path { peer, generation }),
        mtu_shift: mtu_shift.into(),
        min_rnr_timer,
        timeout,
        retry_count,
        rnr_retry,
        max_reads,
        max_dest_reads,
    };
    let standing = Standing {
        state,
        sent: Finished {
            position: sent_position,
            psn: sent,
        },
        received: Finished {
            position: received_position,
            psn: received,
        },
        detail: Detail::None,
        atomic: None,
        atomics: Vec::new(),
    };
    Some((attributes, established != 0, standing))
}

impl<F: Front> Qp<F> {
    /// Everything that the place says.
    fn standing(&self) -> Standing {
        Standing {
            state: code(self.state),
            sent: self.sends_done,
            received: self.receives_done(),
            detail: self.detail(),
            atomic: None,
            atomics: self.responder.atomics.iter().copied().collect(),
        }
    }

    /// Its present state outlives the process.
    pub(super) fn keep_state(&self) {
        self.keep_state_as(self.state);
    }

    /// It is going to be in this state.
    pub(super) fn keep_state_as(&self, state: QpState) {
        if let Some(place) = &self.place {
            place.set_state(code(state));
        }
    }

    /// A send is going to be completed, after which `done` is done.
    #[inline]
    pub(super) fn completing_send(&self, done: Finished, sh: &Shared<F>) {
        if let Some(place) = &self.place {
            let index = sh.cqs.get(self.send_cq.0).map_or(0, |cq| cq.queue.index());
            place.sending(done, index);
        }
    }

    /// A send was completed, or is done without word.
    #[inline]
    pub(super) fn completed_send(&mut self, done: Finished) {
        self.sends_done = done;
        if let Some(place) = &self.place {
            place.sent(done);
        }
    }

    /// What of the receive queue is done with.
    #[inline]
    pub(super) fn receives_done(&self) -> Finished {
        let psn = self.responder.expected;
        let Some(receive) = &self.receive else {
            let position = self.responder.completed;
            return Finished { position, psn };
        };
        let in_use = u16::from(self.responder.held.is_some())
            + u16::from(matches!(self.responder.message, Message::Send { .. }));
        let position = (receive.position() as u16).wrapping_sub(in_use);
        Finished { position, psn }
    }

    /// A receive is going to be completed; it was taken out of the responder.
    #[inline]
    pub(super) fn completing_receive(&mut self, psn: u32, sh: &Shared<F>) {
        self.responder.completed = self.responder.completed.wrapping_add(1);
        if let Some(place) = &self.place {
            let cq = sh.cqs.get(self.receive_cq.0);
            let index = cq.map_or(0, |cq| cq.queue.index());
            let done = Finished {
                psn,
                ..self.receives_done()
            };
            place.receiving(done, index);
        }
    }

    /// What the responder has done outlives the process.
    #[inline]
    pub(super) fn keep_received(&mut self) {
        if self.place.is_some() {
            let (done, detail) = (self.receives_done(), self.detail());
            if let Some(place) = &mut self.place {
                place.received(done, detail);
            }
        }
    }

    fn detail(&self) -> Detail {
        let name = |taken: &Taken| taken.srq.map(|_| taken.request.cookie as u16);
        match (&self.responder.message, &self.responder.held) {
            (Message::Send { taken, len }, _) => Detail::Send {
                len: *len,
                receive: name(taken),
            },
            (
                Message::Access {
                    read,
                    next,
                    key,
                    left,
                    total,
                },
                _,
            ) => Detail::Access {
                read: *read,
                next: *next,
                key: key.0,
                left: *left,
                total: *total,
            },
            (Message::None, Some(taken)) if taken.srq.is_some() => Detail::Send {
                len: 0,
                receive: name(taken),
            },
            (Message::None, _) => Detail::None,
        }
    }

    /// Goes on from there.
    fn go_on(&mut self, standing: &Standing, sh: &mut Shared<F>, cx: &mut Context<'_>) {
        let Standing { sent, received, .. } = *standing;
        self.sends_done = sent;
        if let Some(send) = &mut self.send {
            send.seek(sent.position);
        }
        self.requester.start(sent.psn);
        self.requester.resumed = true;
        self.responder.start(received.psn);
        self.responder.completed = received.position;
        self.responder.resumed = true;
        self.responder.atomics = standing.atomics.iter().copied().collect();
        if let Some(receive) = &mut self.receive {
            receive.seek(received.position.into());
        }
        match standing.detail {
            Detail::None => {}
            Detail::Send { len, receive } => {
                let taken = self.taken_again(receive, sh, cx);
                match len {
                    0 => self.responder.held = taken,
                    _ => {
                        self.responder.message =
                            taken.map_or(Message::None, |taken| Message::Send { taken, len });
                    }
                }
            }
            Detail::Access {
                read,
                next,
                key,
                left,
                total,
            } => {
                self.responder.message = Message::Access {
                    read,
                    next,
                    key: MemKey(key),
                    left,
                    total,
                };
            }
        }
        if self.service == Service::Rc && self.receives() {
            // The answers that waited are lost; this one is for all of them.
            let done = super::psn::before(received.psn);
            self.responder.answers.push_back((done, Verdict::Done));
        }
    }

    /// The receive that a message was taken for.
    fn taken_again(
        &mut self,
        receive: Option<u16>,
        sh: &mut Shared<F>,
        cx: &Context<'_>,
    ) -> Option<Taken> {
        match (self.receive_from, &mut self.receive, receive) {
            (ReceiveFrom::Own, Some(queue), _) => match queue.next(cx.memory) {
                Next::Entry(request) => Some(Taken { request, srq: None }),
                _ => None,
            },
            (ReceiveFrom::Shared(num), _, Some(cookie)) => {
                let srq = sh.srqs.get_mut(num.0)?;
                let request = srq.queue.again(cookie.into(), cx.memory);
                let request = request.unwrap_or(ReceiveRequest {
                    cookie: cookie.into(),
                    sges: Default::default(),
                });
                Some(Taken {
                    request,
                    srq: Some(num),
                })
            }
            _ => None,
        }
    }
}

/// A region as bytes: what a work request made of it. Little endian; the layout is part of
/// [`crate::rdma::kept::VERSION`].
pub(super) fn region_to_bytes(region: &Region) -> [Vec<u8>; 2] {
    let (kind, shift, offset, pages) = match &region.translation {
        Translation::Identity => (0, 0, 0, &[][..]),
        Translation::Pages {
            shift,
            pages,
            offset,
        } => (1, *shift, *offset, &**pages),
    };
    let mut head = vec![region.rights.bits(), region.valid.into(), kind, shift];
    for word in [region.key.0, region.pd.0] {
        head.extend(word.to_le_bytes());
    }
    head.extend([0; 4]);
    for long in [region.start, region.len, offset, region.capacity as u64] {
        head.extend(long.to_le_bytes());
    }
    let pages = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    [head, pages]
}

/// The region of these bytes; `None` when they are not of this layout.
pub fn region_from_bytes(bytes: &[u8]) -> Option<Region> {
    let mut fields = Fields(bytes);
    let [rights, valid, kind, shift] = fields.bytes()?;
    let (key, pd, _) = (fields.word()?, fields.word()?, fields.word()?);
    let (start, len) = (fields.long()?, fields.long()?);
    let (offset, capacity) = (fields.long()?, fields.long()?);
    let pages = fields.0.chunks_exact(8);
    let pages = pages.filter_map(|page| Some(u64::from_le_bytes(page.try_into().ok()?)));
    let translation = match kind {
        0 => Translation::Identity,
        _ if (12..=31).contains(&shift) => Translation::Pages {
            shift,
            pages: pages.collect(),
            offset,
        },
        _ => return None,
    };
    Some(Region {
        key: MemKey(key),
        pd: crate::rdma::verbs::Pd(pd),
        rights: Rights::from_bits(rights),
        start,
        len,
        translation,
        capacity: usize::try_from(capacity).ok()?,
        valid: valid != 0,
    })
}
