//! Requester: which requests can be sent at all, and how many packets they are.

use super::psn;
use super::qp::Qp;
use super::requester::{Fate, Flight, MAX_MESSAGE};
use crate::rdma::packet::MAX_INLINE;
use crate::rdma::verbs::{Data, Front, MAX_SGE, Operation, Service, Status, WorkRequest};

impl<F: Front> Qp<F> {
    /// Checks what needs no look at memory.
    #[inline]
    pub(super) fn admit(&self, request: WorkRequest) -> Flight {
        let (len, known_bytes) = match &request.data {
            Data::Gather(sges) => {
                let len = sges.iter().map(|sge| u64::from(sge.len)).sum::<u64>();
                (len, sges.len() <= MAX_SGE)
            }
            Data::Inline(bytes) => (bytes.len() as u64, bytes.len() <= MAX_INLINE),
            Data::Mixed(mixed) => {
                let len = mixed.sges.iter().map(|sge| u64::from(sge.len)).sum::<u64>();
                let known = mixed.sges.len() <= MAX_SGE && mixed.inline.len() <= MAX_INLINE;
                (len + mixed.inline.len() as u64, known)
            }
        };
        let gathers = matches!(request.data, Data::Gather(_));
        let reliable = self.service == Service::Rc;
        let datagram = self.service == Service::Ud;
        let mut psns = psn::count(len.min(MAX_MESSAGE) as u32, self.attributes.mtu_shift);
        let possible = match &request.operation {
            Operation::Send { invalidate, .. } => {
                datagram == request.datagram.is_some() && (invalidate.is_none() || reliable)
            }
            Operation::Write { .. } => !datagram,
            Operation::Read { .. } => reliable && gathers && self.attributes.max_reads != 0,
            Operation::CompareSwap { addr, .. } | Operation::FetchAdd { addr, .. } => {
                reliable && gathers && self.attributes.max_reads != 0 && addr % 8 == 0
            }
            Operation::Register(_) | Operation::Nop => {
                psns = 0;
                true
            }
        };
        let most = match &request.operation {
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => 8,
            _ if datagram => 1 << self.attributes.mtu_shift,
            _ => MAX_MESSAGE,
        };
        let fate = if !possible || !known_bytes {
            Fate::Failed(Status::LocalQpOperation)
        } else if psns != 0 && len > most {
            Fate::Failed(Status::LocalLength)
        } else {
            Fate::Pending
        };
        if fate != Fate::Pending {
            psns = 0;
        }
        Flight {
            request,
            psn: self.requester.next_psn,
            psns,
            len: len.min(MAX_MESSAGE) as u32,
            fate,
            position: 0,
        }
    }
}
