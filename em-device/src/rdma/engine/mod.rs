//! The transport engine: requester and responder of all queue pairs of one function.
//!
//! It belongs to the data path's thread. A front end puts queues in and takes [`Notice`]s out; the
//! endpoint brings it packets and gives it turns. It knows nothing of a driver's formats (its queues
//! are the front end's types) and nothing of how packets travel ([`super::packet::Fabric`]).

mod access;
mod admit;
mod answers;
mod counters;
mod datagram;
mod keep;
mod memory;
mod modify;
mod payload;
mod psn;
mod qp;
mod requester;
mod responder;
mod run;
mod tables;
mod timers;

#[cfg(test)]
mod tests;

pub use counters::Counters;
pub use keep::region_from_bytes;
pub use tables::{REGION_CLASS, REGION_PART};

use super::packet::Fabric;
use super::verbs::{CqNum, Front, Pd, Peer, QpNum, QpState, ReceiveFrom, Regions, Service, SrqNum};
use dot_iommu::DotView;
use qp::Qp;
use std::collections::VecDeque;
use std::time::Instant;
use tables::{Cq, Shared, Slab, Srq};
use thiserror::Error;

/// What the engine needs from around it, for one call.
pub struct Context<'a> {
    /// The guest's memory.
    pub memory: &'a DotView<'a>,
    /// The way to others.
    pub fabric: &'a mut dyn Fabric,
    /// The time of this round.
    pub now: Instant,
}

/// News for the driver, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// A completion queue got an entry and its driver asked for an event.
    Completion(CqNum),
    /// A completion queue overran or could not be written; it is in error.
    CqError(CqNum),
    /// A queue pair went to error because of its work queue.
    QpFatal(QpNum),
    /// An incoming request was malformed.
    InvalidRequest(QpNum),
    /// An incoming request was not allowed.
    AccessError(QpNum),
    /// The first packet came while the queue pair was ready to receive only.
    CommunicationEstablished(QpNum),
    /// The send queue is drained.
    SendQueueDrained(QpNum),
    /// A queue pair in error took its last receive from a shared queue.
    LastReceive(QpNum),
    /// A shared receive queue fell below its limit.
    SrqLimit(SrqNum),
    /// A shared receive queue cannot be read.
    SrqError(SrqNum),
}

/// Why the engine refuses a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// No such object.
    #[error("there is no such object")]
    Unknown,
    /// The number is taken or out of range.
    #[error("the number cannot be used")]
    Number,
    /// Others still use it.
    #[error("the object is in use")]
    InUse,
    /// Not from this state.
    #[error("the queue pair cannot go from {0:?} to {1:?}")]
    Transition(QpState, QpState),
    /// An attribute is missing or out of range.
    #[error("the attribute {0} is missing or out of range")]
    Attribute(&'static str),
}

/// A queue pair to be made.
#[derive(Debug)]
pub struct QpSetup<F: Front> {
    /// Its number.
    pub num: QpNum,
    /// Its service.
    pub service: Service,
    /// Its protection domain.
    pub pd: Pd,
    /// Goes into its completions.
    pub tag: u32,
    /// Where sends complete.
    pub send_cq: CqNum,
    /// Where receives complete.
    pub receive_cq: CqNum,
    /// Its send queue, if it has one.
    pub send: Option<F::Send>,
    /// Its receive queue, with [`ReceiveFrom::Own`].
    pub receive: Option<F::Receive>,
    /// Where receives come from.
    pub receive_from: ReceiveFrom,
    /// Whether it may register memory of all protection domains: a driver's own queue.
    pub registers_all: bool,
}

/// What a queue pair is at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpStatus {
    /// State.
    pub state: QpState,
    /// PSN of the next request.
    pub send_psn: u32,
    /// PSN expected next.
    pub receive_psn: u32,
    /// Whether the send queue is draining.
    pub draining: bool,
}

/// The completion queues of an engine.
#[derive(Debug)]
pub struct CqsMut<'e, F: Front>(&'e mut Slab<Cq<F::Completion>>);

impl<F: Front> CqsMut<'_, F> {
    /// A completion queue.
    pub fn get(&self, num: CqNum) -> Option<&F::Completion> {
        self.0.get(num.0).map(|cq| &cq.queue)
    }

    /// A completion queue.
    pub fn get_mut(&mut self, num: CqNum) -> Option<&mut F::Completion> {
        self.0.get_mut(num.0).map(|cq| &mut cq.queue)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Engine<F: Front> {
    shared: Shared<F>,
    qps: Slab<Box<Qp<F>>>,
    /// Queue pairs that have something to do; each is there once.
    ready: VecDeque<QpNum>,
    timers: timers::Timers,
    /// Whether all of [`Self::ready`] wait for room in the fabric or for a route.
    blocked: bool,
}

impl<F: Front> Engine<F> {
    /// An engine without queue pairs, for function `own`.
    pub fn new(own: Peer) -> Self {
        Self {
            shared: Shared::new(own),
            qps: Slab::default(),
            ready: VecDeque::new(),
            timers: timers::Timers::default(),
            blocked: false,
        }
    }

    /// The memory regions.
    pub fn regions(&self) -> &Regions {
        &self.shared.regions
    }

    /// The memory regions.
    pub fn regions_mut(&mut self) -> &mut Regions {
        &mut self.shared.regions
    }

    /// The memory regions and the completion queues, to be used at the same time.
    pub fn regions_and_cqs(&mut self) -> (&Regions, CqsMut<'_, F>) {
        (&self.shared.regions, CqsMut(&mut self.shared.cqs))
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Adds a completion queue; numbers are below 2¹⁷, and dense ones save memory.
    pub fn add_cq(&mut self, num: CqNum, cq: F::Completion) -> Result<(), Refused> {
        let added = self.shared.cqs.insert(num.0, Cq::new(cq));
        added.map_err(|_| Refused::Number)
    }

    /// A completion queue.
    pub fn cq_mut(&mut self, num: CqNum) -> Option<&mut F::Completion> {
        self.shared.cqs.get_mut(num.0).map(|cq| &mut cq.queue)
    }

    /// Removes a completion queue that no queue pair uses.
    pub fn remove_cq(&mut self, num: CqNum) -> Result<F::Completion, Refused> {
        let cq = self.shared.cqs.get(num.0).ok_or(Refused::Unknown)?;
        if cq.users != 0 {
            return Err(Refused::InUse);
        }
        let removed = self.shared.cqs.remove(num.0).map(|cq| cq.queue);
        removed.ok_or(Refused::Unknown)
    }

    /// Adds a shared receive queue without a limit, see [`Self::set_srq_limit`]; numbers are below
    /// 2¹⁷. Its receives name regions of `pd`.
    pub fn add_srq(&mut self, num: SrqNum, pd: Pd, queue: F::Receive) -> Result<(), Refused> {
        let mut srq = Srq::new(queue, pd);
        srq.place = self.shared.kept.as_ref().and_then(|kept| kept.srq(num.0));
        let added = self.shared.srqs.insert(num.0, srq);
        added.map_err(|_| Refused::Number)
    }

    /// Asks for one [`Notice::SrqLimit`] when fewer than `limit` receives are left after one was
    /// taken; 0 asks for none.
    pub fn set_srq_limit(&mut self, num: SrqNum, limit: u32) -> Result<(), Refused> {
        let srq = self.shared.srqs.get_mut(num.0).ok_or(Refused::Unknown)?;
        srq.limit = limit;
        srq.keep();
        Ok(())
    }

    /// A shared receive queue.
    pub fn srq_mut(&mut self, num: SrqNum) -> Option<&mut F::Receive> {
        self.shared.srqs.get_mut(num.0).map(|srq| &mut srq.queue)
    }

    /// Removes a shared receive queue that no queue pair uses.
    pub fn remove_srq(&mut self, num: SrqNum) -> Result<F::Receive, Refused> {
        let srq = self.shared.srqs.get(num.0).ok_or(Refused::Unknown)?;
        if srq.users != 0 {
            return Err(Refused::InUse);
        }
        let removed = self.shared.srqs.remove(num.0).map(|srq| srq.queue);
        removed.ok_or(Refused::Unknown)
    }

    /// Adds a queue pair in state Reset; numbers are below 2¹⁷, and dense ones save memory.
    pub fn add_qp(&mut self, setup: QpSetup<F>) -> Result<(), Refused> {
        let (num, cqs, from) = (
            setup.num,
            [setup.send_cq, setup.receive_cq],
            setup.receive_from,
        );
        let known = |cq: &CqNum| self.shared.cqs.get(cq.0).is_some();
        let srq = match from {
            ReceiveFrom::Shared(srq) => Some(srq),
            _ => None,
        };
        if !cqs.iter().all(known) || srq.is_some_and(|srq| self.shared.srqs.get(srq.0).is_none()) {
            return Err(Refused::Unknown);
        }
        let mut qp = Box::new(Qp::new(setup));
        qp.place = self.shared.kept.as_ref().and_then(|kept| kept.qp(num.0));
        if let Some(place) = &qp.place {
            place.forget();
        }
        let added = self.qps.insert(num.0, qp);
        added.map_err(|_| Refused::Number)?;
        self.count_uses(cqs, srq, |users| users + 1);
        Ok(())
    }

    fn count_uses(&mut self, cqs: [CqNum; 2], srq: Option<SrqNum>, change: fn(u32) -> u32) {
        for cq in cqs {
            if let Some(cq) = self.shared.cqs.get_mut(cq.0) {
                cq.users = change(cq.users);
            }
        }
        if let Some(srq) = srq.and_then(|srq| self.shared.srqs.get_mut(srq.0)) {
            srq.users = change(srq.users);
        }
    }

    /// What a queue pair is at present.
    pub fn qp(&self, num: QpNum) -> Option<QpStatus> {
        let qp = self.qps.get(num.0)?;
        Some(QpStatus {
            state: qp.state,
            send_psn: qp.requester.next_psn,
            receive_psn: qp.responder.expected,
            draining: qp.draining,
        })
    }

    /// A queue pair's send queue, for the front end's own purposes.
    pub fn send_queue_mut(&mut self, num: QpNum) -> Option<&mut F::Send> {
        self.qps.get_mut(num.0)?.send.as_mut()
    }

    /// A queue pair's own receive queue, for the front end's own purposes.
    pub fn receive_queue_mut(&mut self, num: QpNum) -> Option<&mut F::Receive> {
        self.qps.get_mut(num.0)?.receive.as_mut()
    }

    /// Removes a queue pair, whatever its state.
    pub fn remove_qp(&mut self, num: QpNum) -> Result<(), Refused> {
        // Its place counts for nothing without the record that the command removes; until then a successor needs it.
        let qp = self.qps.remove(num.0).ok_or(Refused::Unknown)?;
        let qps = &self.qps;
        for timer in [&qp.answer_timer, &qp.pause_timer] {
            self.timers.forget(timer, |num, kind| {
                let qp = qps.get(num.0)?;
                match kind {
                    timers::Kind::Answer => qp.answer_timer.armed(),
                    timers::Kind::Pause => qp.pause_timer.armed(),
                }
            });
        }
        let srq = match qp.receive_from {
            ReceiveFrom::Shared(srq) => Some(srq),
            _ => None,
        };
        self.count_uses([qp.send_cq, qp.receive_cq], srq, |users| {
            users.saturating_sub(1)
        });
        // Its entry in the list may be taken for a later one's of the same number.
        self.ready.retain(|ready| *ready != num);
        Ok(())
    }

    /// Whether requests are under way.
    #[cfg(test)]
    fn has_outstanding(&self) -> bool {
        let mut qps = (0..self.qps.end()).filter_map(|num| self.qps.get(num));
        qps.any(|qp| !qp.requester.flight.is_empty())
    }

    /// The next news.
    pub fn take_notice(&mut self) -> Option<Notice> {
        self.shared.take_notice()
    }

    /// Forgets everything; nothing of the guest's memory is touched after this.
    pub fn clear(&mut self) {
        let kept = self.shared.kept.take();
        *self = Self::new(self.shared.own);
        self.shared.kept = kept;
    }
}
