//! CREATE_QP, DESTROY_QP, QUERY_QP. Changes of state are in [`modify`].

mod modify;

use super::super::Device;
use super::super::bits::get64;
use super::super::buffer::QueueBuffer;
use super::super::fields::qpc;
use super::super::pages::{Charge, queue_pages};
use super::super::rq::{Receive, RqSetup};
use super::super::sq::{Sq, SqSetup};
use super::{Command, Output, Status};
use crate::rdma::engine::QpSetup;
use crate::rdma::verbs::{CqNum, Pd, QpNum, QpState, ReceiveFrom, Service, SrqNum};

/// log₂ of the entries of a queue at most: doorbell records count in 16 bits.
pub(super) const MAX_LOG_SIZE: u32 = 15;
/// log₂ of a send queue's basic block.
const LOG_WQEBB: u32 = 6;
/// A number that no protection domain has.
const NO_PD: u32 = 0;
/// Queue pairs below have their numbers by their kind.
const SPECIAL: u32 = 2;

/// What a queue pair is for (`st`, `MLX5_QP_ST_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rc,
    Uc,
    Ud,
    /// Subnet management, QP 0.
    Smi,
    /// General services, QP 1.
    Gsi,
    /// Only registers memory: connected to nothing.
    Umr,
}

impl Kind {
    fn of(context: &[u8]) -> Result<Self, Status> {
        Ok(match qpc::ST.get(context) {
            0x0 => Self::Rc,
            0x1 => Self::Uc,
            0x2 => Self::Ud,
            0x7 => Self::Smi,
            0x8 => Self::Gsi,
            0xc => Self::Umr,
            _ => return Err(Status::BadParameter),
        })
    }

    fn service(self) -> Service {
        match self {
            Self::Rc | Self::Umr => Service::Rc,
            Self::Uc => Service::Uc,
            Self::Ud | Self::Smi | Self::Gsi => Service::Ud,
        }
    }

    /// Whether it has a peer that somebody must resolve.
    fn connects(self) -> bool {
        matches!(self, Self::Rc | Self::Uc)
    }

    /// The number that goes with it.
    fn special_number(self) -> Option<u32> {
        match self {
            Self::Smi => Some(0),
            Self::Gsi => Some(1),
            _ => None,
        }
    }
}

/// What is known of a queue pair beside its queues.
#[derive(Debug)]
pub(crate) struct QpObject {
    kind: Kind,
    context: [u8; qpc::LEN],
    pd: u32,
    _charge: Charge,
}

impl QpObject {
    /// Its context as commands left it.
    pub(crate) fn context(&self) -> &[u8; qpc::LEN] {
        &self.context
    }

    /// The same, to be changed.
    pub(crate) fn context_mut(&mut self) -> &mut [u8; qpc::LEN] {
        &mut self.context
    }
}

/// What a context says about the receive side.
fn receive_from(context: &[u8]) -> Result<ReceiveFrom, Status> {
    match qpc::RQ_TYPE.get(context) {
        0 => Ok(ReceiveFrom::Own),
        1 => Ok(ReceiveFrom::Shared(SrqNum(
            qpc::SRQN_RMPN_XRQN.get(context),
        ))),
        3 => Ok(ReceiveFrom::Nothing),
        _ => Err(Status::BadParameter),
    }
}

impl Device {
    pub(in super::super) fn create_qp(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let context = command.context::<{ qpc::LEN }>(qpc::AT);
        let kind = Kind::of(&context)?;
        // The driver's own queue for registrations is in no domain.
        let pd = match kind {
            Kind::Umr => NO_PD,
            _ => qpc::PD.get(&context),
        };
        if kind != Kind::Umr {
            self.objects.pds.get(pd)?;
        }
        let num = match kind.special_number() {
            Some(num) => num,
            None => self.objects.qps.next_number()?,
        };
        let from = receive_from(&context)?;
        if let ReceiveFrom::Shared(srq) = from {
            self.objects.srqs.get(srq.0)?;
        }
        let (send, receive, charge) = self.queues(command, &context, (num, kind, from))?;
        let (send_cq, receive_cq) = self.completion_queues(&context, send.is_some(), from)?;
        let object = QpObject {
            kind,
            context,
            pd,
            _charge: charge,
        };
        let has_special = self.objects.qps.get(num).is_ok();
        if has_special {
            return Err(Status::NoResources);
        }
        self.engine.add_qp(QpSetup {
            num: QpNum(num),
            service: kind.service(),
            pd: Pd(pd),
            tag: qpc::USER_INDEX.get(&context),
            send_cq,
            receive_cq,
            send,
            receive,
            receive_from: from,
            registers_all: kind == Kind::Umr,
        })?;
        match kind.special_number() {
            Some(num) => self.objects.qps.add_special(num, object)?,
            None => self.objects.qps.add(object)?,
        };
        if let Ok(pd) = self.objects.pds.get_mut(pd) {
            pd.users += 1;
        }
        out.set_index(num);
        Ok(())
    }

    /// The queues in the buffer that a context describes: the receive queue, then the send queue.
    fn queues(
        &self,
        command: &Command,
        context: &[u8],
        (num, kind, from): (u32, Kind, ReceiveFrom),
    ) -> Result<(Option<Sq>, Option<Receive>, Charge), Status> {
        let log_rq_size = qpc::LOG_RQ_SIZE.get(context);
        let log_stride = qpc::LOG_RQ_STRIDE.get(context) + 4;
        let log_sq_size = qpc::LOG_SQ_SIZE.get(context);
        let has_sq = !qpc::NO_SQ.is_set(context);
        let rq_bytes = match from {
            ReceiveFrom::Own => 1u64 << (log_rq_size + log_stride),
            _ => 0,
        };
        let sq_bytes = match has_sq {
            true => 1u64 << (log_sq_size + LOG_WQEBB),
            false => 0,
        };
        let (list, charge) = queue_pages(
            &command.input,
            qpc::LOG_PAGE_SIZE.get(context),
            qpc::PAGE_OFFSET.get(context),
            rq_bytes + sq_bytes,
            &self.objects.allowance,
        )?;
        let doorbell = get64(context, qpc::DBR_ADDR);
        // Either queue's part begins in some page of the list.
        let part = |at: u64, bytes: u64| {
            let offset = list.offset + at;
            let first = (offset >> list.shift) as usize;
            let pages = match list.pages.get(first..) {
                Some(pages) if first > 0 => pages.into(),
                _ => list.pages.clone(),
            };
            let within = offset & ((1 << list.shift) - 1);
            QueueBuffer::new(pages, list.shift, within, bytes).map_err(|_| Status::BadParameter)
        };
        let send = match has_sq {
            true => Some(Sq::new(SqSetup {
                qpn: num,
                buffer: part(rq_bytes, sq_bytes)?,
                log_wqebbs: log_sq_size as u8,
                doorbell,
                service: kind.service(),
                umr: kind == Kind::Umr,
            })),
            false => None,
        };
        let send = send.transpose().map_err(|_| Status::BadParameter)?;
        let receive = match from {
            ReceiveFrom::Own => Some(Receive::cyclic(RqSetup {
                buffer: part(0, rq_bytes)?,
                log_size: log_rq_size as u8,
                log_stride: log_stride as u8,
                doorbell,
                signature: qpc::WQ_SIGNATURE.is_set(context),
            })),
            _ => None,
        };
        let receive = receive.transpose().map_err(|_| Status::BadParameter)?;
        Ok((send, receive, charge))
    }

    /// Where sends and receives complete. A side that the queue pair has not may name none.
    fn completion_queues(
        &self,
        context: &[u8],
        sends: bool,
        from: ReceiveFrom,
    ) -> Result<(CqNum, CqNum), Status> {
        let known = |field: super::super::bits::Field| {
            let num = field.get(context);
            self.objects.cqs.get(num).map(|_| CqNum(num))
        };
        match (known(qpc::CQN_SND), known(qpc::CQN_RCV)) {
            (Ok(send), Ok(receive)) => Ok((send, receive)),
            (Ok(send), Err(_)) if from == ReceiveFrom::Nothing => Ok((send, send)),
            (Err(_), Ok(receive)) if !sends => Ok((receive, receive)),
            _ => Err(Status::BadResource),
        }
    }

    pub(in super::super) fn destroy_qp(&mut self, command: &Command) -> Result<(), Status> {
        let num = command.index();
        let pd = self.objects.qps.get(num)?.pd;
        self.engine.remove_qp(QpNum(num))?;
        self.objects.qps.remove(num, num < SPECIAL)?;
        self.release_pd(pd);
        Ok(())
    }

    pub(in super::super) fn query_qp(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let num = command.index();
        let mut context = self.objects.qps.get(num)?.context;
        let status = self.engine.qp(QpNum(num)).ok_or(Status::BadResource)?;
        // mlx5_qp_state; 7 is a queue pair that is draining.
        let state = match status.state {
            QpState::Reset => 0,
            QpState::Init => 1,
            QpState::Rtr => 2,
            QpState::Rts => 3,
            QpState::Sqe => 4,
            QpState::Sqd if status.draining => 7,
            QpState::Sqd => 5,
            QpState::Error => 6,
        };
        qpc::STATE.set(&mut context, state);
        qpc::NEXT_SEND_PSN.set(&mut context, status.send_psn);
        qpc::NEXT_RCV_PSN.set(&mut context, status.receive_psn);
        out.put(qpc::AT, &context);
        Ok(())
    }
}
