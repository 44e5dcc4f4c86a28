//! The transport engine: requester and responder of all queue pairs of one function.
//!
//! It belongs to the data path's thread. A front end puts queues in and takes [`Notice`]s out; the
//! endpoint brings it packets and gives it turns. It knows nothing of a driver's formats (its queues
//! are the front end's types) and nothing of how packets travel ([`super::packet::Fabric`]).

use super::packet::{Fabric, Packet};
use super::verbs::{
    CqNum, Front, Pd, Peer, QpChange, QpNum, QpState, ReceiveFrom, Regions, Service, SrqNum,
};
use dot_iommu::DotView;
use std::time::{Duration, Instant};
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

/// See the module.
#[derive(Debug)]
pub struct Engine<F: Front> {
    own: Peer,
    regions: Regions,
    front: std::marker::PhantomData<F>,
}

impl<F: Front> Engine<F> {
    /// An engine without queue pairs, for function `own`.
    pub fn new(own: Peer) -> Self {
        Self {
            own,
            regions: Regions::default(),
            front: std::marker::PhantomData,
        }
    }

    /// The memory regions.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// The memory regions.
    pub fn regions_mut(&mut self) -> &mut Regions {
        &mut self.regions
    }

    /// Adds a completion queue; numbers are below 2²⁴.
    pub fn add_cq(&mut self, num: CqNum, cq: F::Completion) -> Result<(), Refused> {
        let _ = (num, cq);
        Err(Refused::Number)
    }

    /// A completion queue.
    pub fn cq_mut(&mut self, num: CqNum) -> Option<&mut F::Completion> {
        let _ = num;
        None
    }

    /// Removes a completion queue that no queue pair uses.
    pub fn remove_cq(&mut self, num: CqNum) -> Result<F::Completion, Refused> {
        let _ = num;
        Err(Refused::Unknown)
    }

    /// Adds a shared receive queue. `limit`: see [`Self::set_srq_limit`].
    pub fn add_srq(&mut self, num: SrqNum, pd: Pd, queue: F::Receive) -> Result<(), Refused> {
        let _ = (num, pd, queue);
        Err(Refused::Number)
    }

    /// A shared receive queue.
    pub fn srq_mut(&mut self, num: SrqNum) -> Option<&mut F::Receive> {
        let _ = num;
        None
    }

    /// Removes a shared receive queue that no queue pair uses.
    pub fn remove_srq(&mut self, num: SrqNum) -> Result<F::Receive, Refused> {
        let _ = num;
        Err(Refused::Unknown)
    }

    /// Adds a queue pair in state Reset.
    pub fn add_qp(&mut self, setup: QpSetup<F>) -> Result<(), Refused> {
        let _ = setup;
        Err(Refused::Number)
    }

    /// Changes state and attributes (IBTA 1.5 §11.2.5.2); `to` may be the present state.
    pub fn modify_qp(
        &mut self,
        num: QpNum,
        to: QpState,
        change: &QpChange,
        cx: &mut Context<'_>,
    ) -> Result<(), Refused> {
        let _ = (num, to, change, cx);
        Err(Refused::Unknown)
    }

    /// What a queue pair is at present.
    pub fn qp(&self, num: QpNum) -> Option<QpStatus> {
        let _ = num;
        None
    }

    /// A queue pair's send queue, for the front end's own purposes.
    pub fn send_queue_mut(&mut self, num: QpNum) -> Option<&mut F::Send> {
        let _ = num;
        None
    }

    /// A queue pair's own receive queue, for the front end's own purposes.
    pub fn receive_queue_mut(&mut self, num: QpNum) -> Option<&mut F::Receive> {
        let _ = num;
        None
    }

    /// Removes a queue pair, whatever its state.
    pub fn remove_qp(&mut self, num: QpNum) -> Result<(), Refused> {
        let _ = num;
        Err(Refused::Unknown)
    }

    /// Something may have been posted to a send queue.
    pub fn ring(&mut self, num: QpNum) {
        let _ = num;
    }

    /// One round: sends what was posted, timers. Answers whether anything was done.
    pub fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        let _ = cx;
        false
    }

    /// A packet came in. Acknowledgements may wait for the end of the next turn.
    pub fn receive(&mut self, from: Peer, packet: Packet, cx: &mut Context<'_>) {
        let _ = (from, packet, cx);
    }

    /// The longest time without a turn.
    pub fn patience(&self, now: Instant) -> Option<Duration> {
        let _ = now;
        None
    }

    /// Whether requests are under way: peers may be using this function's memory.
    pub fn has_outstanding(&self) -> bool {
        false
    }

    /// There is no way to `peer` any more, or only by later answers of the OM than `generation`: its
    /// queue pairs go to error.
    pub fn revoke(&mut self, peer: Peer, generation: u64, cx: &mut Context<'_>) {
        let _ = (peer, generation, cx);
    }

    /// The next news.
    pub fn take_notice(&mut self) -> Option<Notice> {
        None
    }

    /// Forgets everything; nothing of the guest's memory is touched after this.
    pub fn clear(&mut self) {
        *self = Self::new(self.own);
    }
}
