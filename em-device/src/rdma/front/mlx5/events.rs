//! What the driver is told by events.

use super::Device;
use super::eq::{Eqe, event};
use crate::rdma::engine::Notice;
use crate::rdma::verbs::CqNum;
use dot_iommu::DotView;

impl Device {
    pub(super) fn report(&mut self, notice: Notice, memory: &DotView<'_>) {
        log::trace!("{notice:?}");
        let eqe = match notice {
            Notice::Completion(cq) => return self.post_completion(cq.0, memory),
            Notice::CqError(cq) => Eqe::cq_error(cq.0),
            Notice::QpFatal(qp) => Eqe::queue(event::WQ_CATAS_ERROR, qp.0),
            Notice::InvalidRequest(qp) => Eqe::queue(event::WQ_INVAL_REQ_ERROR, qp.0),
            Notice::AccessError(qp) => Eqe::queue(event::WQ_ACCESS_ERROR, qp.0),
            Notice::CommunicationEstablished(qp) => Eqe::queue(event::COMM_EST, qp.0),
            Notice::SendQueueDrained(qp) => Eqe::queue(event::SQ_DRAINED, qp.0),
            Notice::LastReceive(qp) => Eqe::queue(event::SRQ_LAST_WQE, qp.0),
            Notice::SrqLimit(srq) => Eqe::queue(event::SRQ_RQ_LIMIT, srq.0),
            Notice::SrqError(srq) => Eqe::queue(event::SRQ_CATAS_ERROR, srq.0),
        };
        self.post(&eqe, memory);
    }

    /// A completion queue's event goes to the event queue that it names.
    pub(super) fn post_completion(&mut self, cqn: u32, memory: &DotView<'_>) {
        let Ok(eqn) = self.objects.cqs.get(cqn).map(|cq| cq.eqn()) else {
            return;
        };
        if let Ok(eq) = self.objects.eqs.get_mut(eqn) {
            let stored = eq.push(&Eqe::completion(cqn), memory, &self.irqs);
            self.lost_events += u64::from(!stored);
        }
        if let Some(cq) = self.engine.cq_mut(CqNum(cqn)) {
            cq.event_stored();
        }
    }

    /// Any other event goes to the queues that want its type. Answers whether there was one.
    pub(super) fn post(&mut self, eqe: &Eqe, memory: &DotView<'_>) -> bool {
        let mut posted = false;
        for eq in self.objects.eqs.values_mut() {
            if eq.wants(eqe.kind()) {
                let stored = eq.push(eqe, memory, &self.irqs);
                self.lost_events += u64::from(!stored);
                posted = true;
            }
        }
        posted
    }

    /// A command's entry was given back: tells the driver, if it wants events instead of polling.
    pub fn command_done(&mut self, slot: u8, memory: &DotView<'_>) {
        if self.polled_slot == Some(slot) {
            self.polled_slot = None;
        } else if let Some(bit) = 1u32.checked_shl(slot.into()) {
            let wants = self.objects.eqs.iter().find(|(_, eq)| eq.wants(event::CMD));
            if let Some((eqn, eq)) = wants {
                self.kept.tells(eqn, eq.index());
            }
            self.post(&Eqe::commands(bit), memory);
        }
        self.kept.done();
    }
}
