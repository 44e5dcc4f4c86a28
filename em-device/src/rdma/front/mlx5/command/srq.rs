//! Shared receive queues in their three forms: SRQ, XRC SRQ, receive memory pool. They share one
//! range of numbers, because a queue pair names any of them in the same field.

use super::super::Device;
use super::super::bits::{array, get64};
use super::super::buffer::QueueBuffer;
use super::super::fields::{rmpc, srqc, wq};
use super::super::pages::{Charge, queue_pages};
use super::super::rq::{Receive, RqSetup, SrqSetup};
use super::{Command, Output, Status, opcode as op};
use crate::rdma::verbs::{Pd, SrqNum};

/// log₂ of the bytes of an entry: drivers use 16 to 1024.
const LOG_STRIDE: std::ops::RangeInclusive<u32> = 4..=12;
/// log₂ of the entries at most.
pub(super) const MAX_LOG_SIZE: u32 = 15;
/// wq_type of a ring; other kinds than this and the linked list (0) are not offered.
const CYCLIC: u32 = 1;

/// The form in which a queue was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Srq,
    Xrc,
    Rmp,
}

impl Form {
    fn of(opcode: u16) -> Self {
        match opcode {
            op::CREATE_RMP | op::DESTROY_RMP | op::QUERY_RMP | op::MODIFY_RMP => Self::Rmp,
            op::CREATE_XRC_SRQ | op::DESTROY_XRC_SRQ | op::QUERY_XRC_SRQ | op::ARM_XRC_SRQ => {
                Self::Xrc
            }
            _ => Self::Srq,
        }
    }
}

/// What is known of a shared receive queue beside its entries.
#[derive(Debug)]
pub(crate) struct SrqObject {
    form: Form,
    context: Vec<u8>,
    pd: u32,
    /// Entries below which the driver wants an event, as it said last; 0 is none.
    limit: u16,
    _charge: Charge,
}

/// What the forms' contexts have in common.
struct Shape {
    log_size: u32,
    log_stride: u32,
    log_page_size: u32,
    page_offset: u32,
    pd: u32,
    doorbell: u64,
    limit: u16,
    cyclic: bool,
    signature: bool,
}

impl Shape {
    fn of_srq(context: &[u8]) -> Self {
        Self {
            log_size: srqc::LOG_SRQ_SIZE.get(context),
            log_stride: srqc::LOG_RQ_STRIDE.get(context) + 4,
            log_page_size: srqc::LOG_PAGE_SIZE.get(context),
            page_offset: srqc::PAGE_OFFSET.get(context),
            pd: srqc::PD.get(context),
            doorbell: get64(context, srqc::DBR_ADDR),
            limit: srqc::LWM.get(context) as u16,
            cyclic: srqc::BASIC_CYCLIC_RCV_WQE.is_set(context),
            signature: srqc::WQ_SIGNATURE.is_set(context),
        }
    }

    fn of_rmp(context: &[u8]) -> Result<Self, Status> {
        let queue = array::<{ wq::LEN }>(context, rmpc::WQ);
        let kind = wq::WQ_TYPE.get(&queue);
        if kind > CYCLIC {
            return Err(Status::BadParameter);
        }
        Ok(Self {
            log_size: wq::LOG_WQ_SZ.get(&queue),
            log_stride: wq::LOG_WQ_STRIDE.get(&queue),
            log_page_size: wq::LOG_WQ_PG_SZ.get(&queue),
            page_offset: wq::PAGE_OFFSET.get(&queue),
            pd: wq::PD.get(&queue),
            doorbell: get64(&queue, wq::DBR_ADDR),
            limit: wq::LWM.get(&queue) as u16,
            cyclic: kind == CYCLIC || rmpc::BASIC_CYCLIC_RCV_WQE.is_set(context),
            signature: wq::WQ_SIGNATURE.is_set(&queue),
        })
    }
}

impl Device {
    pub(in super::super) fn create_srq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let form = Form::of(command.opcode);
        let (context, shape) = match form {
            Form::Rmp => {
                let context = command.context::<{ rmpc::LEN }>(rmpc::AT).to_vec();
                let shape = Shape::of_rmp(&context)?;
                (context, shape)
            }
            Form::Srq | Form::Xrc => {
                let context = command.context::<{ srqc::LEN }>(srqc::AT).to_vec();
                let shape = Shape::of_srq(&context);
                (context, shape)
            }
        };
        if shape.log_size > MAX_LOG_SIZE || !LOG_STRIDE.contains(&shape.log_stride) {
            return Err(Status::BadParameter);
        }
        let num = self.objects.srqs.next_number()?;
        self.objects.pds.get(shape.pd)?;
        let bytes = 1u64 << (shape.log_size + shape.log_stride);
        let (list, charge) = queue_pages(
            &command.input,
            shape.log_page_size,
            shape.page_offset,
            bytes,
            &self.objects.allowance,
        )?;
        let buffer = QueueBuffer::new(list.pages, list.shift, list.offset, bytes)
            .map_err(|_| Status::BadParameter)?;
        let (log_size, log_stride) = (shape.log_size as u8, shape.log_stride as u8);
        let queue = match shape.cyclic {
            true => Receive::cyclic(RqSetup {
                buffer,
                log_size,
                log_stride,
                doorbell: shape.doorbell,
                signature: shape.signature,
            }),
            false => Receive::linked(SrqSetup {
                buffer,
                log_size,
                log_stride,
                doorbell: shape.doorbell,
            }),
        }
        .map_err(|_| Status::BadParameter)?;
        self.engine.add_srq(SrqNum(num), Pd(shape.pd), queue)?;
        self.engine.set_srq_limit(SrqNum(num), shape.limit.into())?;
        self.objects.srqs.add(SrqObject {
            form,
            context,
            pd: shape.pd,
            limit: shape.limit,
            _charge: charge,
        })?;
        self.objects.pds.get_mut(shape.pd)?.users += 1;
        out.set_index(num);
        Ok(())
    }

    /// A queue of the command's form.
    fn srq(&mut self, command: &Command) -> Result<&mut SrqObject, Status> {
        let object = self.objects.srqs.get_mut(command.index())?;
        match object.form == Form::of(command.opcode) {
            true => Ok(object),
            false => Err(Status::BadResource),
        }
    }

    pub(in super::super) fn destroy_srq(&mut self, command: &Command) -> Result<(), Status> {
        let pd = self.srq(command)?.pd;
        let num = command.index();
        self.engine.remove_srq(SrqNum(num))?;
        self.objects.srqs.remove(num, false)?;
        self.release_pd(pd);
        Ok(())
    }

    pub(in super::super) fn query_srq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let object = self.srq(command)?;
        let limit = u32::from(object.limit);
        match object.form {
            Form::Rmp => {
                let queue = object.context.get_mut(rmpc::WQ..).unwrap_or_default();
                wq::LWM.set(queue, limit);
                out.put(rmpc::AT, &object.context);
            }
            Form::Srq | Form::Xrc => {
                srqc::LWM.set(&mut object.context, limit);
                out.put(srqc::AT, &object.context);
            }
        }
        Ok(())
    }

    /// ARM_RQ, ARM_XRC_SRQ, and MODIFY_RMP, by which a pool is armed.
    pub(in super::super) fn arm_srq(&mut self, command: &Command) -> Result<(), Status> {
        let object = self.srq(command)?;
        let limit = match object.form {
            Form::Rmp if command.get(rmpc::BITMASK_LWM) == 0 => return Ok(()),
            Form::Rmp => {
                let queue = command.context::<{ wq::LEN }>(rmpc::AT + rmpc::WQ);
                wq::LWM.get(&queue)
            }
            Form::Srq | Form::Xrc => command.get(srqc::ARM_LWM),
        };
        object.limit = limit as u16;
        self.engine
            .set_srq_limit(SrqNum(command.index()), limit)
            .map_err(Status::from)
    }
}
