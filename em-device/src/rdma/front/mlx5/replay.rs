//! Makes the objects again that a former process left, and takes its queues up where they are.

use super::Device;
use super::command::{Command, Output, mailbox, opcode as op};
use super::eq::{Eqe, event};
use super::fields::qpc;
use super::kept::{IMAGE, KeptDevice, PREFIX, class, owner};
use crate::rdma::engine::{Context, REGION_PART, region_from_bytes};
use crate::rdma::kept::{Kept, KeptError, Record};
use crate::rdma::verbs::{CqNum, QpNum, SrqNum};
use crate::virtio::saved::Fields;
use std::collections::HashMap;
use std::sync::Arc;

fn senseless(what: &'static str) -> KeptError {
    KeptError::Record(what)
}

/// The command in a record, and the number that it made.
fn command(bytes: &[u8]) -> Option<(Command, u32)> {
    let (prefix, input) = bytes.split_at_checked(PREFIX)?;
    let mut fields = Fields(prefix);
    let (opcode, op_mod, uid) = (fields.half()?, fields.half()?, fields.half()?);
    let [slot, _] = fields.bytes()?;
    let made = fields.word()?;
    let command = Command::again(slot, opcode, op_mod, uid, input.to_vec());
    Some((command, made))
}

impl Device {
    /// Takes over what a former process left in `kept`; the device is as after power-on. `queue`: where the
    /// command queue is. The driver notices nothing.
    ///
    /// # Errors
    /// A record makes no sense. The device has to be reset then.
    pub fn restore(
        &mut self,
        kept: &Arc<Kept>,
        queue: Option<u64>,
        cx: &mut Context<'_>,
    ) -> Result<(), KeptError> {
        let mut records = kept.store().records();
        if !records.iter().any(|r| r.key.class == class::HCA) {
            // A teardown did not come to its end.
            let stays = |class| class == class::ISSI || class == class::SETUP;
            kept.store().remove_all(|key| !stays(key.class));
            records.retain(|record| stays(record.key.class));
        }
        self.kept = KeptDevice::default();
        self.kept.set_replaying(true);
        let (mut images, mut regions) = (HashMap::new(), Vec::new());
        for record in records {
            match (record.key.class, record.key.part) {
                (class::QP, IMAGE) => {
                    images.insert(record.key.number as u32, record);
                }
                (class::MKEY, REGION_PART) => regions.push(record),
                _ => self.again(&record, cx)?,
            }
        }
        for record in regions {
            let region = region_from_bytes(&record.bytes);
            let region = region.ok_or(senseless("a region"))?;
            let put = self.engine.regions_mut().put_back(region);
            put.map_err(|_| senseless("a region"))?;
        }
        self.kept.set_replaying(false);
        self.settle();
        self.polled_slot = None;
        self.restore_queues(kept, &images, cx)?;
        self.path.follow(&self.ether);
        let (_, cqs) = self.engine.regions_and_cqs();
        let last = |cqn| cqs.get(CqNum(cqn))?.last(cx.memory);
        self.path.restore(&self.ether, kept, last, cx.memory);
        self.keep_in(kept.clone());
        self.restore_command(kept, queue, cx);
        self.woke();
        Ok(())
    }

    /// Executes a command that was executed before.
    fn again(&mut self, record: &Record, cx: &mut Context<'_>) -> Result<(), KeptError> {
        let (command, made) = command(&record.bytes).ok_or(senseless("a command"))?;
        self.force(&command, made);
        let mut output = Output::new();
        let done = self.dispatch(&command, None, cx, &mut output);
        if let Err(status) = done {
            log::error!("command {:#x} cannot be repeated: {status}", command.opcode);
            return Err(senseless("a command"));
        }
        self.look_out(&command, made, true);
        Ok(())
    }

    /// What a command makes gets this number.
    fn force(&mut self, command: &Command, made: u32) {
        let (o, e) = (&mut self.objects, &mut self.ether);
        match command.opcode {
            op::CREATE_EQ => o.eqs.force(made),
            op::CREATE_CQ => o.cqs.force(made),
            op::CREATE_QP => o.qps.force(made),
            op::CREATE_SRQ | op::CREATE_XRC_SRQ | op::CREATE_RMP => o.srqs.force(made),
            op::CREATE_MKEY => self.forced_mkey = Some(made),
            op::ALLOC_PD => o.pds.force(made),
            op::ALLOC_UAR => o.uars.force(made),
            op::ALLOC_XRCD => o.xrcds.force(made),
            op::ALLOC_TRANSPORT_DOMAIN => e.domains.force(made),
            op::CREATE_TIS => e.tises.force(made),
            op::CREATE_TIR => e.tirs.force(made),
            op::CREATE_RQT => e.rqts.force(made),
            op::CREATE_RQ => e.rqs.force(made),
            op::CREATE_SQ => e.sqs.force(made),
            op::ALLOC_Q_COUNTER => e.q_counters.force(made),
            op::CREATE_FLOW_TABLE => e.flow_tables.force(made),
            op::CREATE_FLOW_GROUP => e.flow_groups.force(made),
            _ => {}
        }
    }

    fn settle(&mut self) {
        let (o, e) = (&mut self.objects, &mut self.ether);
        o.eqs.settle();
        o.cqs.settle();
        o.qps.settle();
        o.srqs.settle();
        o.pds.settle();
        o.uars.settle();
        o.xrcds.settle();
        e.domains.settle();
        e.tises.settle();
        e.tirs.settle();
        e.rqts.settle();
        e.rqs.settle();
        e.sqs.settle();
        e.q_counters.settle();
        e.flow_tables.settle();
        e.flow_groups.settle();
        self.engine.regions_mut().settle();
    }

    /// Completion queues come first: what queue pairs have done depends on what those hold.
    fn restore_queues(
        &mut self,
        kept: &Kept,
        images: &HashMap<u32, Record>,
        cx: &mut Context<'_>,
    ) -> Result<(), KeptError> {
        let numbers: Vec<u32> = self.objects.eqs.iter().map(|(number, _)| number).collect();
        for number in numbers {
            if let (Ok(eq), Some(place)) = (self.objects.eqs.get_mut(number), kept.eq(number)) {
                eq.restore(place, cx.memory, &self.irqs);
            }
        }
        let numbers: Vec<u32> = self.objects.cqs.iter().map(|(number, _)| number).collect();
        for number in numbers {
            let cq = self.engine.cq_mut(CqNum(number));
            let due = match (cq, kept.cq(number)) {
                (Some(cq), Some(place)) => cq.restore(place, cx.memory),
                _ => false,
            };
            if due {
                self.post_completion(number, cx.memory);
            }
        }
        for (number, _) in self.objects.srqs.iter() {
            self.engine.restore_srq(SrqNum(number), kept);
        }
        let numbers: Vec<u32> = self.objects.qps.iter().map(|(number, _)| number).collect();
        for number in numbers {
            let record = images.get(&number);
            let image = record.map(|record| {
                let bytes = record.bytes.as_slice();
                let (context, image) = bytes.split_at(bytes.len().min(qpc::LEN));
                (owner(record.change), context, image)
            });
            if let (Some((_, context, _)), Ok(qp)) = (image, self.objects.qps.get_mut(number)) {
                super::bits::put(qp.context_mut(), 0, context);
            }
            let image = image.map(|(owner, _, image)| (owner, image));
            let restored = self.engine.restore_qp(QpNum(number), image, kept, cx);
            restored.map_err(|_| senseless("a queue pair"))?;
        }
        self.engine.restored(cx);
        Ok(())
    }

    /// The command that the former process was at: its driver is owed the output, the event, or nothing.
    fn restore_command(&mut self, kept: &Kept, queue: Option<u64>, cx: &mut Context<'_>) {
        let (Some(command), Some(queue)) = (kept.note().load(), queue) else {
            return;
        };
        match mailbox::look_at(queue, command.slot, cx.memory) {
            Some((token, true)) if token == command.token => {
                if command.silent {
                    self.polled_slot = Some(command.slot);
                }
                self.kept.set_owed(Some(command));
                return;
            }
            Some((token, false)) if token == command.token && !command.silent => {
                let told = command.event.is_some_and(|(eqn, index)| {
                    let eq = self.objects.eqs.get(eqn);
                    eq.is_ok_and(|eq| eq.wants(event::CMD) && eq.has(index))
                });
                if let (false, Some(bit)) = (told, 1u32.checked_shl(command.slot.into())) {
                    self.post(&Eqe::commands(bit), cx.memory);
                }
            }
            _ => {}
        }
        kept.note().clear();
    }
}
