//! CREATE_CQ, DESTROY_CQ, QUERY_CQ, MODIFY_CQ.

use super::super::Device;
use super::super::bits::get64;
use super::super::buffer::QueueBuffer;
use super::super::cq::{BadResize, Cq, CqSetup};
use super::super::fields::cqc;
use super::super::pages::{Allowance, Charge, queue_pages};
use super::{Command, Output, Status};
use crate::rdma::engine::Context;
use crate::rdma::verbs::CqNum;

/// log₂ of the entries of a queue at most.
pub(super) const MAX_LOG_SIZE: u32 = 22;
/// `op_mod` of MODIFY_CQ: a new buffer.
const RESIZE: u16 = 1;
/// `modify_field_select`: those that a driver may change: moderation's period, count and mode, which
/// are kept and do nothing.
const MODERATION: u32 = 1 << 0 | 1 << 1 | 1 << 4;

/// What is known of a completion queue beside its entries.
#[derive(Debug)]
pub(crate) struct CqObject {
    context: [u8; cqc::LEN],
    charge: Charge,
}

impl CqObject {
    /// The event queue for its events.
    pub(crate) fn eqn(&self) -> u32 {
        cqc::C_EQN.get(&self.context) & 0xff
    }
}

fn cqe_bytes(context: &[u8]) -> Result<u16, Status> {
    match cqc::CQE_SZ.get(context) {
        0 => Ok(64),
        1 => Ok(128),
        _ => Err(Status::BadParameter),
    }
}

/// The buffer that a context describes.
fn buffer(
    input: &[u8],
    context: &[u8],
    cqe_bytes: u16,
    allowance: &Allowance,
) -> Result<(QueueBuffer, Charge), Status> {
    let log_size = cqc::LOG_CQ_SIZE.get(context);
    if log_size > MAX_LOG_SIZE {
        return Err(Status::BadParameter);
    }
    let bytes = u64::from(cqe_bytes) << log_size;
    let (list, charge) = queue_pages(
        input,
        cqc::LOG_PAGE_SIZE.get(context),
        cqc::PAGE_OFFSET.get(context),
        bytes,
        allowance,
    )?;
    let buffer = QueueBuffer::new(list.pages, list.shift, list.offset, bytes);
    Ok((buffer.map_err(|_| Status::BadParameter)?, charge))
}

impl Device {
    pub(in super::super) fn create_cq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let context = command.context::<{ cqc::LEN }>(cqc::AT);
        let num = self.objects.cqs.next_number()?;
        let eqn = cqc::C_EQN.get(&context) & 0xff;
        if !self.replaying() {
            self.objects.eqs.get(eqn)?;
        }
        let cqe_bytes = cqe_bytes(&context)?;
        let (buffer, charge) =
            buffer(&command.input, &context, cqe_bytes, &self.objects.allowance)?;
        let cq = Cq::new(CqSetup {
            num,
            buffer,
            log_size: cqc::LOG_CQ_SIZE.get(&context) as u8,
            cqe_bytes,
            doorbell: get64(&context, cqc::DBR_ADDR),
            eqn: eqn as u8,
            overrun_ignore: cqc::OI.is_set(&context),
            polled: self.spec.mapped_doorbells,
        })
        .map_err(|_| Status::BadParameter)?;
        self.engine.add_cq(CqNum(num), cq)?;
        self.objects.cqs.add(CqObject { context, charge })?;
        out.set_index(num);
        Ok(())
    }

    pub(in super::super) fn destroy_cq(&mut self, command: &Command) -> Result<(), Status> {
        let num = command.index();
        self.objects.cqs.get(num)?;
        if self.ether.uses_cq(num) {
            return Err(Status::Busy);
        }
        self.engine.remove_cq(CqNum(num))?;
        self.objects.cqs.remove(num, false).map(|_| ())
    }

    pub(in super::super) fn query_cq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let cq = self.objects.cqs.get(command.index())?;
        out.put(cqc::AT, &cq.context);
        Ok(())
    }

    pub(in super::super) fn modify_cq(
        &mut self,
        command: &Command,
        cx: &mut Context<'_>,
    ) -> Result<(), Status> {
        let num = command.index();
        let object = self.objects.cqs.get_mut(num)?;
        let new = command.context::<{ cqc::LEN }>(cqc::AT);
        if command.op_mod == RESIZE {
            let cqe_bytes = cqe_bytes(&object.context)?;
            let (buffer, charge) =
                buffer(&command.input, &new, cqe_bytes, &self.objects.allowance)?;
            let log_size = cqc::LOG_CQ_SIZE.get(&new) as u8;
            let replaying = self.kept.is_replaying();
            let cq = self.engine.cq_mut(CqNum(num)).ok_or(Status::BadResource)?;
            match replaying {
                true => cq.restore_buffer(buffer, log_size).map_err(BadResize::from),
                false => cq.resize(buffer, log_size, cx.memory).map(|_| ()),
            }
            .map_err(|error| match error {
                BadResize::Buffer(_) => Status::BadParameter,
                BadResize::Outstanding(_) => Status::OutstandingEntries,
            })?;
            for field in [cqc::LOG_CQ_SIZE, cqc::LOG_PAGE_SIZE, cqc::PAGE_OFFSET] {
                field.copy(&new, &mut object.context);
            }
            object.charge = charge;
            return Ok(());
        }
        if command.get(cqc::FIELD_SELECT) & !MODERATION != 0 {
            return Err(Status::BadParameter);
        }
        for field in [cqc::CQ_PERIOD, cqc::CQ_MAX_COUNT] {
            field.copy(&new, &mut object.context);
        }
        Ok(())
    }
}
