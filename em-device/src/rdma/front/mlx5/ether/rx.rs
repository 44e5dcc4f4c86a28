//! Ethernet receive queues.

use super::super::buffer::{BadBuffer, QueueBuffer};
use super::super::cqe::{Cqe, opcode};
use super::super::rq::{Receive, RqSetup};
use crate::rdma::kept::QueuePlace;
use crate::rdma::verbs::{Next, ReceiveQueue, ReceiveRequest};
use dot_iommu::DotView;

/// An Ethernet receive queue to be made: cyclic, of data segments (no striding).
#[derive(Debug)]
pub struct RxSetup {
    /// Its number.
    pub rqn: u32,
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its entries, 0 to 15.
    pub log_size: u8,
    /// log₂ of an entry's bytes, 4 to 10.
    pub log_stride: u8,
    /// Bus address of its doorbell record of 8 bytes; word 0 is the receive counter.
    pub doorbell: u64,
    /// Number of the completion queue.
    pub cqn: u32,
    /// Whether VLAN tags (802.1Q) are taken off and put into completions (`vsd` is 0).
    pub vlan_strip: bool,
}

/// An Ethernet receive queue.
#[derive(Debug)]
pub struct EtherRx {
    rqn: u32,
    pub(super) cqn: u32,
    /// Whether VLAN tags are taken off.
    pub vlan_strip: bool,
    /// Whether frames may go in: state RDY of the queue.
    pub ready: bool,
    queue: Receive,
    /// An entry that was taken and not used: the frame did not fit.
    held: Option<ReceiveRequest>,
    failed: bool,
    /// Where it is known to who takes the place of this process.
    place: Option<QueuePlace>,
}

/// In a place: it is in use; the queue is in error; below them the position.
const IN_USE: u64 = 1 << 63;
const FAILED: u64 = 1 << 62;

impl EtherRx {
    /// A queue without entries, not ready.
    pub fn new(setup: RxSetup) -> Result<Self, BadBuffer> {
        Ok(Self {
            rqn: setup.rqn,
            cqn: setup.cqn,
            vlan_strip: setup.vlan_strip,
            ready: false,
            queue: Receive::cyclic(RqSetup {
                buffer: setup.buffer,
                log_size: setup.log_size,
                log_stride: setup.log_stride,
                doorbell: setup.doorbell,
                signature: false,
            })?,
            held: None,
            failed: false,
            place: None,
        })
    }

    /// What becomes of it outlives this process from here on.
    pub fn keep_in(&mut self, place: QueuePlace) {
        self.place = Some(place);
        self.keep();
    }

    /// Goes on where a former process was; `last` is the newest entry of the completion queue.
    pub fn restore(&mut self, place: QueuePlace, last: Option<Cqe>) {
        let left = place.load(0);
        if left & IN_USE != 0 {
            let position = left as u16;
            // An entry may have been completed last and not counted.
            let completed = last.is_some_and(|cqe| {
                let receives = [opcode::SEND, opcode::RESPONDER_ERROR];
                receives.contains(&(cqe.op_own >> 4)) && cqe.wqe_counter.get() == position
            });
            self.queue
                .seek(position.wrapping_add(completed.into()).into());
            self.failed = left & FAILED != 0;
        }
        self.keep_in(place);
    }

    /// Its position outlives the process.
    #[inline]
    pub(super) fn keep(&self) {
        if let Some(place) = &self.place {
            let held = u16::from(self.held.is_some());
            let position = (self.queue.position() as u16).wrapping_sub(held);
            let failed = if self.failed { FAILED } else { 0 };
            place.store(0, IN_USE | failed | u64::from(position));
        }
    }

    /// Its number.
    pub fn rqn(&self) -> u32 {
        self.rqn
    }

    /// Whether it is in error: the driver resets it.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Whether there is an entry for a frame.
    pub fn has_room(&mut self, view: &DotView<'_>) -> bool {
        self.held.is_some() || self.queue.posted(view) != 0
    }

    /// Back to the beginning, as the driver's own queue is after a reset.
    pub fn reset(&mut self) {
        self.queue.reset();
        self.held = None;
        self.failed = false;
        self.keep();
    }

    /// The next entry. `Err`: the queue is in error now.
    pub(super) fn take(&mut self, view: &DotView<'_>) -> Result<Option<ReceiveRequest>, u32> {
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
        match self.queue.next(view) {
            Next::Entry(entry) => Ok(Some(entry)),
            Next::Empty => Ok(None),
            // The memory may come back.
            Next::Unreadable => Ok(None),
            Next::Bad(cookie) => {
                self.failed = true;
                Err(cookie)
            }
        }
    }

    /// Keeps an entry for the next frame.
    pub(super) fn put_back(&mut self, entry: ReceiveRequest) {
        self.held = Some(entry);
    }

    pub(super) fn fail(&mut self) {
        self.failed = true;
    }

    pub(super) fn is_open(&self) -> bool {
        self.ready && !self.failed
    }
}
