//! Queues that start and stop one by one, while others run.

use super::{NetDevice, WIRING, note_of};
use crate::net::dirty::DirtyLog;
use crate::net::links::Links;
use crate::virtio::common::QueueSetup;
use crate::virtio::ring::{Ring, RingFeatures};
use std::time::Instant;

impl NetDevice {
    /// A queue that was reset alone goes on with an empty ring.
    pub fn start_queue(&mut self, index: u16, setup: QueueSetup) {
        let (Some(session), Some(queue)) = (&self.session, self.queues.get_mut(usize::from(index)))
        else {
            return;
        };
        let note = note_of(self.state.as_ref(), index);
        let ring = Ring::new(setup, RingFeatures::of(session.features), note);
        queue.set_ring(Some(ring));
    }

    /// Lets go of one queue; what others do goes on. Answers where its ring was ([`Ring::position`]), if it had one.
    pub fn stop_queue(&mut self, index: u16, links: &mut Links) -> Option<u32> {
        let mut ring = None;
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            // Whoever looks after the queue next does not know what its driver was not told.
            if queue.is_untold() {
                queue.count_interrupt();
                self.signals.interrupt_queue(index);
            }
            queue.log_ring(self.log.as_ref());
            ring = queue.take_ring();
            if let Some(session) = &mut self.session {
                session.settings.coalescing.forget(index);
                let wish = session.settings.coalescing.of(index);
                queue.moderation.set_wish(index % 2 == 1, wish);
            }
        }
        links.forget_blocked_by(index);
        ring.map(|ring| ring.position())
    }

    /// A driver agreed on features; its queues start with [`Self::start_queue_at`], and there is no control queue: the
    /// face that knows the driver does what that would. All frames are let in.
    pub fn open(&mut self, features: u64, links: &mut Links) {
        self.stop(links);
        self.begin(features, &[], Ring::new);
        if let Some(session) = &mut self.session {
            session.control = 2 * self.spec.queue_pairs;
            session.sends_from_all = true;
        }
        // A front end that lost another EM may be faster than the wires.
        self.unwired = (!self.wired).then(|| Instant::now() + WIRING);
    }

    /// Starts a queue at a position. `false`: its ring has no such position, or nobody called [`Self::open`].
    pub fn start_queue_at(&mut self, index: u16, setup: QueueSetup, position: u32) -> bool {
        let (Some(session), Some(queue)) = (&self.session, self.queues.get_mut(usize::from(index)))
        else {
            return false;
        };
        let ring = Ring::at(setup, RingFeatures::of(session.features), position);
        let started = ring.is_some();
        if started {
            queue.set_ring(ring);
            // Who had the queue before may have owed an interrupt.
            queue.count_interrupt();
            self.signals.interrupt_queue(index);
        }
        started
    }

    /// Received frames are spread over the first `pairs` queue pairs, at least one.
    pub fn use_pairs(&mut self, pairs: u16) {
        if let Some(session) = &mut self.session {
            session.settings.pairs = pairs.clamp(1, self.spec.queue_pairs);
        }
    }

    /// Whether a transmit queue gives its buffers back unsent.
    pub fn discard_from(&mut self, index: u16, discards: bool) {
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            queue.discards = discards;
        }
    }

    /// What the device writes is logged from now on, or not any more.
    pub fn log_to(&mut self, log: Option<DirtyLog>) {
        self.pool.written = log.as_ref().map(|_| Vec::new());
        self.log = log;
    }

    /// Logs what a round wrote: what was put into buffers, and rings as a whole if something happened there.
    pub(super) fn log_writes(&mut self) {
        let (Some(log), Some(written)) = (&self.log, &mut self.pool.written) else {
            return;
        };
        for (addr, len) in written.drain(..) {
            log.mark(addr, len);
        }
        for queue in &mut self.queues {
            queue.log_ring_that_moved(log);
        }
    }
}
