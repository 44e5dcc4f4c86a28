//! The network interface's queues: transport domains, TIS, TIR, RQT, RQ, SQ.

use super::super::Device;
use super::super::bits::{Field, array, get64};
use super::super::buffer::QueueBuffer;
use super::super::fields::{rqc, sqc, tirc, wq};
use super::super::nic::{Dispatch, QueueState, ReceiveQueue, Rqt, SendQueue, Tir, WorkQueue};
use super::super::pages::{Charge, queue_pages};
use super::{Command, Output, Status, opcode as op};

/// Contexts begin here in commands; in replies too, but for a TIS.
const AT: usize = 0x20;
/// Bytes of `tirc`, `rqc`, `sqc`.
const LEN: usize = 0xf0;
/// `tisc`.
const TISC_LEN: usize = 0xa0;
const TISC_REPLY: usize = 0x10;
/// Work queues lie here in `rqc` and `sqc`.
const WQ: usize = 0x30;
/// `wq_type` of a ring.
const CYCLIC: u32 = 1;
const MAX_LOG_SIZE: u32 = 15;
const LOG_STRIDE: std::ops::RangeInclusive<u32> = 4..=12;

/// `rqtc` in commands.
mod rqtc {
    use super::Field;
    pub(super) const MAX_SIZE: Field = Field::new(0x36, 0, 16);
    pub(super) const ACTUAL_SIZE: Field = Field::new(0x3a, 0, 16);
    /// Numbers of receive queues, 4 bytes each.
    pub(super) const LIST: usize = 0x110;
    /// MODIFY_RQT: `bitmask.rqn_list`.
    pub(super) const SELECT: Field = Field::new(0x17, 7, 1);
    /// Entries at most (`log_max_rqt_size`).
    pub(super) const LIMIT: u32 = 256;
}

/// State that MODIFY_RQ and MODIFY_SQ begin from.
const STATE_NOW: Field = Field::new(0x8, 0, 4);
/// MODIFY_RQ: `modify_bitmask`, `vsd`.
const MODIFY_VSD: u64 = 1 << 1;
/// MODIFY_TIR: `bitmask.hash` (which goes with the table), of 64 bits at 0x10.
const MODIFY_HASH: u64 = 1 << 2;

impl Device {
    /// `None` when the command is of another group.
    pub(in super::super) fn execute_ether(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Option<Result<(), Status>> {
        let index = command.index();
        let ether = &mut self.ether;
        ether.changed();
        let context = || command.context::<LEN>(AT).to_vec();
        Some(match command.opcode {
            op::ALLOC_TRANSPORT_DOMAIN => ether.domains.add(()).map(|n| out.set_index(n)),
            op::DEALLOC_TRANSPORT_DOMAIN => ether.domains.remove(index, false),
            op::CREATE_TIS => {
                let tis = command.context::<TISC_LEN>(AT).to_vec();
                ether.tises.add(tis).map(|n| out.set_index(n))
            }
            op::MODIFY_TIS => ether.tises.get(index).map(|_| ()),
            op::DESTROY_TIS => ether.tises.remove(index, false).map(|_| ()),
            op::QUERY_TIS => ether.tises.get(index).map(|c| out.put(TISC_REPLY, c)),
            op::CREATE_TIR => self.check_tir(context()).and_then(|tir| {
                let number = self.ether.tirs.add(tir)?;
                out.set_index(number);
                Ok(())
            }),
            op::MODIFY_TIR => self.modify_tir(command),
            op::DESTROY_TIR => ether.tirs.remove(index, false).map(|_| ()),
            op::QUERY_TIR => ether.tirs.get(index).map(|tir| out.put(AT, &tir.context)),
            op::CREATE_RQT => self.rqt_of(command, rqtc::LIMIT).and_then(|rqt| {
                let number = self.ether.rqts.add(rqt)?;
                out.set_index(number);
                Ok(())
            }),
            op::MODIFY_RQT => self.modify_rqt(command),
            op::DESTROY_RQT => ether.rqts.remove(index, false).map(|_| ()),
            op::QUERY_RQT => self.query_rqt(index, out),
            op::CREATE_RQ => self.create_rq(command, context(), out),
            op::MODIFY_RQ => self.modify_rq(command, context()),
            op::DESTROY_RQ => ether.rqs.remove(index, false).map(|_| ()),
            op::QUERY_RQ => ether.rqs.get_mut(index).map(|rq| {
                rqc::STATE.set(&mut rq.context, rq.state.code());
                out.put(AT, &rq.context);
            }),
            op::CREATE_SQ => self.create_sq(command, context(), out),
            op::MODIFY_SQ => self.modify_sq(command, context()),
            op::DESTROY_SQ => ether.sqs.remove(index, false).map(|_| ()),
            op::QUERY_SQ => ether.sqs.get_mut(index).map(|sq| {
                sqc::STATE.set(&mut sq.context, sq.state.code());
                out.put(AT, &sq.context);
            }),
            _ => return None,
        })
    }

    /// The ring that a queue's context describes.
    fn work_queue(&self, command: &Command, context: &[u8]) -> Result<(WorkQueue, Charge), Status> {
        let queue = array::<{ wq::LEN }>(context, WQ);
        let log_size = wq::LOG_WQ_SZ.get(&queue);
        let log_stride = wq::LOG_WQ_STRIDE.get(&queue);
        if wq::WQ_TYPE.get(&queue) != CYCLIC
            || log_size > MAX_LOG_SIZE
            || !LOG_STRIDE.contains(&log_stride)
        {
            return Err(Status::BadParameter);
        }
        let bytes = 1u64 << (log_size + log_stride);
        let (list, charge) = queue_pages(
            &command.input,
            wq::LOG_WQ_PG_SZ.get(&queue),
            wq::PAGE_OFFSET.get(&queue),
            bytes,
            &self.objects.allowance,
        )?;
        let buffer = QueueBuffer::new(list.pages, list.shift, list.offset, bytes)
            .map_err(|_| Status::BadParameter)?;
        let doorbell = get64(&queue, wq::DBR_ADDR);
        if doorbell % 8 != 0 {
            return Err(Status::BadParameter);
        }
        let queue = WorkQueue {
            buffer,
            log_size: log_size as u8,
            log_stride: log_stride as u8,
            doorbell,
            pd: wq::PD.get(&queue),
        };
        Ok((queue, charge))
    }

    fn create_rq(
        &mut self,
        command: &Command,
        context: Vec<u8>,
        out: &mut Output,
    ) -> Result<(), Status> {
        let cqn = rqc::CQN.get(&context);
        self.objects.cqs.get(cqn)?;
        if rqc::MEM_RQ_TYPE.is_set(&context) || rqc::HAIRPIN.is_set(&context) {
            return Err(Status::BadParameter);
        }
        let (queue, charge) = self.work_queue(command, &context)?;
        let number = self.ether.rqs.add(ReceiveQueue {
            queue,
            cqn,
            user_index: rqc::USER_INDEX.get(&context),
            state: QueueState::of(rqc::STATE.get(&context))?,
            strip_vlan: !rqc::VSD.is_set(&context),
            counter_set: rqc::COUNTER_SET_ID.get(&context) as u8,
            context,
            _charge: charge,
        })?;
        out.set_index(number);
        Ok(())
    }

    fn modify_rq(&mut self, command: &Command, context: Vec<u8>) -> Result<(), Status> {
        let replaying = self.replaying();
        let rq = self.ether.rqs.get_mut(command.index())?;
        let state = QueueState::of(rqc::STATE.get(&context))?;
        if command.get(STATE_NOW) != rq.state.code() && !replaying {
            return Err(Status::BadResourceState);
        }
        rq.state = state;
        if get64(&command.input, 0x10) & MODIFY_VSD != 0 {
            rq.strip_vlan = !rqc::VSD.is_set(&context);
            rqc::VSD.copy(&context, &mut rq.context);
        }
        Ok(())
    }

    fn create_sq(
        &mut self,
        command: &Command,
        context: Vec<u8>,
        out: &mut Output,
    ) -> Result<(), Status> {
        let cqn = sqc::CQN.get(&context);
        self.objects.cqs.get(cqn)?;
        let tisn = sqc::TIS_LST_SZ
            .is_set(&context)
            .then(|| sqc::TIS_NUM_0.get(&context));
        if let Some(tisn) = tisn.filter(|_| !self.replaying()) {
            self.ether.tises.get(tisn)?;
        }
        if sqc::HAIRPIN.is_set(&context) {
            return Err(Status::BadParameter);
        }
        let (queue, charge) = self.work_queue(command, &context)?;
        let number = self.ether.sqs.add(SendQueue {
            queue,
            cqn,
            user_index: sqc::USER_INDEX.get(&context),
            state: QueueState::of(sqc::STATE.get(&context))?,
            tisn,
            context,
            _charge: charge,
        })?;
        out.set_index(number);
        Ok(())
    }

    fn modify_sq(&mut self, command: &Command, context: Vec<u8>) -> Result<(), Status> {
        let replaying = self.replaying();
        let sq = self.ether.sqs.get_mut(command.index())?;
        let state = QueueState::of(sqc::STATE.get(&context))?;
        if command.get(STATE_NOW) != sq.state.code() && !replaying {
            return Err(Status::BadResourceState);
        }
        sq.state = state;
        Ok(())
    }

    /// A TIR whose targets exist.
    fn check_tir(&self, context: Vec<u8>) -> Result<Tir, Status> {
        let dispatch = match tirc::DISP_TYPE.get(&context) {
            0 => Dispatch::Direct(tirc::INLINE_RQN.get(&context)),
            1 => Dispatch::Indirect(tirc::INDIRECT_TABLE.get(&context)),
            _ => return Err(Status::BadParameter),
        };
        match dispatch {
            _ if self.replaying() => {}
            Dispatch::Direct(rqn) => self.ether.rqs.get(rqn).map(|_| ())?,
            Dispatch::Indirect(rqtn) => self.ether.rqts.get(rqtn).map(|_| ())?,
        }
        Ok(Tir {
            dispatch,
            hash_fn: tirc::RX_HASH_FN.get(&context) as u8,
            symmetric: tirc::RX_HASH_SYMMETRIC.is_set(&context),
            key: array(&context, tirc::TOEPLITZ_KEY),
            fields: tirc::FIELD_SELECTOR_OUTER.get(&context),
            context,
        })
    }

    /// Only the hash may change, with the table that it chooses from; loopback and LRO are accepted
    /// and mean nothing.
    fn modify_tir(&mut self, command: &Command) -> Result<(), Status> {
        let mut context = self.ether.tirs.get(command.index())?.context.clone();
        if get64(&command.input, 0x10) & MODIFY_HASH == 0 {
            return Ok(());
        }
        let new = command.context::<LEN>(AT);
        for field in [
            tirc::RX_HASH_FN,
            tirc::RX_HASH_SYMMETRIC,
            tirc::FIELD_SELECTOR_OUTER,
        ] {
            field.copy(&new, &mut context);
        }
        let key = array::<40>(&new, tirc::TOEPLITZ_KEY);
        super::super::bits::put(&mut context, tirc::TOEPLITZ_KEY, &key);
        let tir = self.check_tir(context)?;
        *self.ether.tirs.get_mut(command.index())? = tir;
        Ok(())
    }

    /// The table of a command, whose queues exist.
    fn rqt_of(&self, command: &Command, limit: u32) -> Result<Rqt, Status> {
        let size = command.get(rqtc::ACTUAL_SIZE);
        let max = command.get(rqtc::MAX_SIZE).max(size);
        if size == 0 || max > limit || !size.is_power_of_two() {
            return Err(Status::BadParameter);
        }
        if command.input.len() < rqtc::LIST + 4 * size as usize {
            return Err(Status::BadInputLength);
        }
        let number = |n| Field::new(rqtc::LIST + 4 * n as usize + 1, 0, 24).get(&command.input);
        let rqs: Vec<u32> = (0..size).map(number).collect();
        let known = |rqn: &u32| self.replaying() || self.ether.rqs.get(*rqn).is_ok();
        match rqs.iter().all(known) {
            true => Ok(Rqt { rqs, max }),
            false => Err(Status::BadResource),
        }
    }

    fn modify_rqt(&mut self, command: &Command) -> Result<(), Status> {
        let max = self.ether.rqts.get(command.index())?.max;
        if command.get(rqtc::SELECT) == 0 {
            return Ok(());
        }
        let new = self.rqt_of(command, max)?;
        self.ether.rqts.get_mut(command.index())?.rqs = new.rqs;
        Ok(())
    }

    fn query_rqt(&self, number: u32, out: &mut Output) -> Result<(), Status> {
        let rqt = self.ether.rqts.get(number)?;
        out.bytes(rqtc::LIST);
        out.set(rqtc::MAX_SIZE, rqt.max);
        out.set(rqtc::ACTUAL_SIZE, rqt.rqs.len() as u32);
        for (n, rqn) in rqt.rqs.iter().enumerate() {
            out.put(rqtc::LIST + 4 * n, &rqn.to_be_bytes());
        }
        Ok(())
    }
}
