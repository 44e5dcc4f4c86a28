//! What queue pairs share: regions, completion queues, shared receive queues, news.

use super::{Context, Counters, Notice};
use crate::rdma::kept::{Kept, Key, QueuePlace};
use crate::rdma::packet::{Action, Body, Packet, Payload, Request, Tail};
use crate::rdma::verbs::{
    Completion, CompletionQueue, CqNum, Front, Next, Operation, Pd, Peer, Pushed, QpNum,
    ReceiveQueue, ReceiveRequest, Regions, SrqNum, Translation, WorkRequest,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Names of records of regions: the class of memory keys, and the part that a work request made.
pub const REGION_CLASS: u8 = 2;
/// See [`REGION_CLASS`].
pub const REGION_PART: u64 = 1;

/// Objects by number.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Option<T>>,
}

/// Numbers of objects are below.
pub(super) const MAX_NUMBER: u32 = 1 << 17;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Puts an object at a number that is free; gives it back otherwise.
    pub(super) fn insert(&mut self, num: u32, object: T) -> Result<(), T> {
        if num >= MAX_NUMBER || self.get(num).is_some() {
            return Err(object);
        }
        let index = num as usize;
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || None);
        }
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(object);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn get(&self, num: u32) -> Option<&T> {
        self.slots.get(num as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, num: u32) -> Option<&mut T> {
        self.slots.get_mut(num as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, num: u32) -> Option<T> {
        self.slots.get_mut(num as usize)?.take()
    }

    /// Numbers are below this.
    pub(super) fn end(&self) -> u32 {
        self.slots.len() as u32
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq<C> {
    pub(super) queue: C,
    /// Uses by queue pairs.
    pub(super) users: u32,
    /// Whether [`Notice::Completion`] waits already.
    announced: bool,
    failed: bool,
}

impl<C> Cq<C> {
    pub(super) fn new(queue: C) -> Self {
        Self {
            queue,
            users: 0,
            announced: false,
            failed: false,
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq<R> {
    pub(super) queue: R,
    pub(super) pd: Pd,
    /// Uses by queue pairs.
    pub(super) users: u32,
    /// Below how many receives there is an event; 0 is none.
    pub(super) limit: u32,
    failed: bool,
    /// Where position and limit outlive the process.
    pub(super) place: Option<QueuePlace>,
}

impl<R> Srq<R> {
    pub(super) fn new(queue: R, pd: Pd) -> Self {
        Self {
            queue,
            pd,
            users: 0,
            limit: 0,
            failed: false,
            place: None,
        }
    }
}

/// Says that a place is in use, beside a position.
const IN_USE: u64 = 1 << 63;

impl<R: ReceiveQueue> Srq<R> {
    /// Position and limit outlive the process.
    #[inline]
    pub(super) fn keep(&self) {
        if let Some(place) = &self.place {
            place.store(1, self.limit.into());
            place.store(0, IN_USE | u64::from(self.queue.position()));
        }
    }
}

/// News that wait. There is at most one completion notice of each queue; of the rest, which come
/// with changes of state, so many at most that a driver which never looks cannot fill the memory.
#[derive(Debug, Default)]
pub(super) struct Notices {
    queue: VecDeque<Notice>,
}

impl Notices {
    const MOST: usize = 2 * MAX_NUMBER as usize;
    const SEARCHED: usize = 64;

    pub(super) fn push(&mut self, notice: Notice) {
        let known = self.queue.len() <= Self::SEARCHED && self.queue.contains(&notice);
        if !known && self.queue.len() < Self::MOST {
            self.queue.push_back(notice);
        }
    }
}

/// Everything that is not one queue pair's own.
#[derive(Debug)]
pub(super) struct Shared<F: Front> {
    pub(super) own: Peer,
    pub(super) regions: Regions,
    pub(super) cqs: Slab<Cq<F::Completion>>,
    pub(super) srqs: Slab<Srq<F::Receive>>,
    pub(super) notices: Notices,
    pub(super) counters: Counters,
    /// What this turn had to do so far, in bytes of page lists.
    pub(super) spent: usize,
    /// Filled in anew for each request, so that none is allocated.
    pub(super) packet: Packet,
    /// Answers of unreliable services that found no room.
    pub(super) backlog: VecDeque<(Peer, Packet)>,
    /// What outlives the process.
    pub(super) kept: Option<Arc<Kept>>,
}

impl<F: Front> Shared<F> {
    pub(super) fn new(own: Peer) -> Self {
        let request = Request {
            action: Action::Send,
            first: true,
            last: true,
            tail: Tail::Plain,
            solicited: false,
            payload: Payload::Inline(Default::default()),
            datagram: None,
            acknowledge: true,
            mtu_shift: 12,
        };
        Self {
            own,
            regions: Regions::default(),
            cqs: Slab::default(),
            srqs: Slab::default(),
            notices: Notices::default(),
            counters: Counters::default(),
            spent: 0,
            packet: Packet {
                to: QpNum(0),
                from: QpNum(0),
                psn: 0,
                body: Body::Request(Box::new(request)),
            },
            backlog: VecDeque::new(),
            kept: None,
        }
    }

    /// Stores a completion. `false`: the queue is in error.
    #[inline]
    pub(super) fn complete(
        &mut self,
        num: CqNum,
        completion: &Completion,
        cx: &Context<'_>,
    ) -> bool {
        let Some(cq) = self.cqs.get_mut(num.0).filter(|cq| !cq.failed) else {
            return false;
        };
        match cq.queue.push(completion, cx.memory) {
            Pushed::Stored => true,
            Pushed::Notify => {
                if !cq.announced {
                    cq.announced = true;
                    self.notices.queue.push_back(Notice::Completion(num));
                }
                true
            }
            Pushed::Overrun => {
                cq.failed = true;
                self.notices.push(Notice::CqError(num));
                false
            }
        }
    }

    /// A request was taken from a queue, which may have been much work.
    #[inline]
    pub(super) fn charge(&mut self, request: &WorkRequest) {
        if let Operation::Register(change) = &request.operation {
            if let Some(Translation::Pages { pages, .. }) = &change.translation {
                self.spent = self.spent.saturating_add(size_of_val::<[u64]>(pages));
            }
        }
    }

    /// The next news.
    pub(super) fn take_notice(&mut self) -> Option<Notice> {
        let notice = self.notices.queue.pop_front()?;
        if let Notice::Completion(num) = notice {
            if let Some(cq) = self.cqs.get_mut(num.0) {
                cq.announced = false;
            }
        }
        Some(notice)
    }

    /// A region was changed otherwise than by a command: that outlives the process before anybody is told.
    pub(super) fn keep_region(&self, index: u32) {
        let (Some(kept), Some(region)) = (&self.kept, self.regions.get(index)) else {
            return;
        };
        let [head, pages] = super::keep::region_to_bytes(region);
        let key = Key {
            class: REGION_CLASS,
            number: index.into(),
            part: REGION_PART,
        };
        if !kept.store().put(key, &[&head, &pages]) {
            kept.set_broken();
        }
    }

    /// Takes a receive from a shared queue. [`Srq::keep`] follows when somebody holds it.
    #[inline]
    pub(super) fn shared_receive(&mut self, num: SrqNum, cx: &Context<'_>) -> Next<ReceiveRequest> {
        let Some(srq) = self.srqs.get_mut(num.0).filter(|srq| !srq.failed) else {
            return Next::Unreadable;
        };
        let next = srq.queue.next(cx.memory);
        match next {
            Next::Unreadable => {
                srq.failed = true;
                self.notices.push(Notice::SrqError(num));
            }
            Next::Entry(_) if srq.limit != 0 && srq.queue.posted(cx.memory) < srq.limit => {
                srq.limit = 0;
                self.notices.push(Notice::SrqLimit(num));
            }
            _ => {}
        }
        next
    }
}
