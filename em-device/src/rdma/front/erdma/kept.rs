//! What of the device outlives the process: records of commands, and where queues are.
//!
//! A record is a command, which the successor gives to the same code again; of a queue pair's changes only what it is
//! afterwards is kept. The page tables that commands name are the driver's memory and stay as long as their objects.

use super::command::{Command, Fault, Response, opcode};
use super::device::Device;
use super::registers::{AEQ, COMMAND_CQ, Setup};
use crate::rdma::engine::{Context, REGION_CLASS, REGION_PART, region_from_bytes};
use crate::rdma::kept::{Change, Kept, KeptError, Key, Outcome, Record};
use crate::rdma::verbs::{CqNum, QpNum, QpState, ReceiveQueue, SendQueue};
use smartep::fault;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kinds of objects.
mod class {
    pub(super) const REGION: u8 = super::REGION_CLASS;
    pub(super) const EQ: u8 = 3;
    pub(super) const CQ: u8 = 4;
    pub(super) const QP: u8 = 5;
    pub(super) const GID: u8 = 20;
    pub(super) const ADDRESS: u8 = 24;
    pub(super) const MTU: u8 = 25;
}

/// Part of a queue pair's records: what it is.
const IMAGE: u64 = 1;
/// Part of the record that a command made.
const COMMAND: u64 = 0;

/// What a command does to the records.
#[derive(Debug, Clone, Copy)]
enum Step {
    Nothing,
    /// The command is kept.
    Put(u8, u64),
    /// What a queue pair is now is kept.
    Image(u32),
    /// An object is gone.
    Remove(u8, u64),
}

fn step(command: &Command) -> Step {
    let number = u64::from(command.number());
    let [_, eqn, ..] = command.word(16).to_le_bytes();
    let address = u64::from(command.word(12));
    let gid = u64::from(command.word(8) & 0xffff);
    match command.code {
        opcode::CREATE_EQ => Step::Put(class::EQ, eqn.into()),
        opcode::DESTROY_EQ => Step::Remove(class::EQ, eqn.into()),
        opcode::CREATE_CQ => Step::Put(class::CQ, number),
        opcode::DESTROY_CQ => Step::Remove(class::CQ, number),
        opcode::CREATE_QP => Step::Put(class::QP, number),
        opcode::MODIFY_QP => Step::Image(command.number()),
        opcode::DESTROY_QP => Step::Remove(class::QP, number),
        opcode::REG_MR => Step::Put(class::REGION, number),
        opcode::DEREG_MR => Step::Remove(class::REGION, number),
        opcode::SET_GID if command.word(8) >> 31 == 0 => Step::Put(class::GID, gid),
        opcode::SET_GID => Step::Remove(class::GID, gid),
        opcode::CREATE_AH => Step::Put(class::ADDRESS, address),
        opcode::DESTROY_AH => Step::Remove(class::ADDRESS, address),
        opcode::CONF_MTU => Step::Put(class::MTU, 0),
        _ => Step::Nothing,
    }
}

/// The records of a device, if it has any.
#[derive(Debug, Default)]
pub(super) struct KeptDevice {
    kept: Option<Arc<Kept>>,
    /// A command that a former process executed and did not complete.
    owed: Option<Outcome>,
}

fn outcome(command: &Command) -> Outcome {
    let index = command.index();
    // FNV-1a.
    let hash = command.bytes().iter().fold(0x811c_9dc5, |hash: u32, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    Outcome {
        slot: index as u8,
        token: (index >> 8) as u8,
        hash,
        silent: false,
        output: None,
        event: None,
    }
}

impl KeptDevice {
    pub(super) fn get(&self) -> Option<&Arc<Kept>> {
        self.kept.as_ref()
    }

    /// What a command answered that a former process executed.
    pub(super) fn owed(&mut self, command: &Command) -> Option<Response> {
        let owed = self.owed.take()?;
        let output = owed.output?;
        let same = Outcome {
            output: None,
            event: None,
            ..owed
        } == outcome(command);
        let long = |at: usize| {
            let bytes = output.get(at..).and_then(|rest| rest.first_chunk());
            bytes.copied().map_or(0, u64::from_le_bytes)
        };
        same.then(|| [long(0), long(8)])
    }

    /// The driver knows what became of its command.
    pub(super) fn told(&self) {
        fault::point("finished");
        if let Some(kept) = &self.kept {
            kept.note().clear();
        }
    }

    /// There are no objects.
    pub(super) fn clear(&mut self) {
        self.owed = None;
        if let Some(kept) = &self.kept {
            kept.clear();
            forget_places(kept);
        }
    }
}

/// The queues that are there without a command begin at their beginning.
fn forget_places(kept: &Kept) {
    let places = [
        kept.cq(COMMAND_CQ),
        kept.cq(super::command::PLACE),
        kept.eq(0),
        kept.eq(AEQ),
    ];
    for place in places.iter().flatten() {
        place.store(0, 0);
        place.store(1, 0);
    }
}

/// The number by which a queue pair's place names an image.
fn owner(change: u64) -> u32 {
    (change as u32).max(1)
}

fn senseless(what: &'static str) -> KeptError {
    KeptError::Record(what)
}

impl Device {
    /// What becomes of this device outlives the process from here on. It has no objects yet.
    pub fn keep_in(&mut self, kept: Arc<Kept>) {
        forget_places(&kept);
        self.go_on_in(kept);
    }

    fn go_on_in(&mut self, kept: Arc<Kept>) {
        self.engine.keep_in(kept.clone());
        self.kept.kept = Some(kept);
    }

    /// A command was executed and its driver does not know yet.
    pub(super) fn keep_command(&mut self, command: &Command, result: Result<Response, Fault>) {
        let (Some(kept), Ok([first, second])) = (self.kept.get().cloned(), result) else {
            return;
        };
        let step = step(command);
        let change = self.prepare(&kept, command, step);
        let mut output = first.to_le_bytes().to_vec();
        output.extend(second.to_le_bytes());
        kept.note()
            .begin(&outcome(command), change.as_ref(), &output);
        fault::point("noted");
        let number = change.as_ref().map_or(0, |change| change.number);
        if let Some(change) = change {
            kept.store().commit(change);
        }
        fault::point("kept");
        if let Step::Image(qpn) = step {
            self.engine.image_kept(QpNum(qpn), owner(number));
        }
    }

    fn prepare(&self, kept: &Kept, command: &Command, step: Step) -> Option<Change> {
        let key = |class, number, part| Key {
            class,
            number,
            part,
        };
        let mut store = kept.store();
        let change = match step {
            Step::Nothing => return None,
            Step::Remove(class, number) => return store.prepare_removal(class, number),
            Step::Put(class, number) => {
                store.prepare(key(class, number, COMMAND), &[command.bytes()])
            }
            Step::Image(qpn) => {
                let image = self.engine.image(QpNum(qpn));
                let key = key(class::QP, qpn.into(), IMAGE);
                image.and_then(|image| store.prepare(key, &[&image]))
            }
        };
        if change.is_none() {
            kept.set_broken();
        }
        change
    }

    /// Takes over what a former process left in `kept`; the device is as after power-on. `setup`: what the registers
    /// say, if the driver has begun. The driver notices nothing but an interrupt.
    ///
    /// # Errors
    /// A record makes no sense. The device has to be reset then.
    pub fn restore(
        &mut self,
        kept: &Arc<Kept>,
        setup: Option<&Setup>,
        cx: &mut Context<'_>,
    ) -> Result<(), KeptError> {
        let Some(setup) = setup else {
            kept.clear();
            self.keep_in(kept.clone());
            return Ok(());
        };
        self.init(setup);
        let (mut images, mut regions) = (BTreeMap::new(), Vec::new());
        for record in kept.store().records() {
            match (record.key.class, record.key.part) {
                (class::QP, IMAGE) => drop(images.insert(record.key.number as u32, record)),
                (class::REGION, REGION_PART) => regions.push(record),
                _ => self.again(&record, cx)?,
            }
        }
        for record in regions {
            let region = region_from_bytes(&record.bytes).ok_or(senseless("a region"))?;
            let put = self.engine.regions_mut().put_back(region);
            put.map_err(|_| senseless("a region"))?;
        }
        self.restore_queues(kept, &images, cx)?;
        self.go_on_in(kept.clone());
        if let Some(queue) = &mut self.commands {
            queue.restore(kept, cx.memory, &self.irqs);
        }
        self.kept.owed = kept.note().load();
        Ok(())
    }

    /// Executes a command that was executed before.
    fn again(&mut self, record: &Record, cx: &mut Context<'_>) -> Result<(), KeptError> {
        let bytes = record.bytes.first_chunk().ok_or(senseless("a command"))?;
        let command = Command::new(0, *bytes);
        self.dispatch(&command, None, cx)
            .map(|_| ())
            .map_err(|fault| {
                log::error!("command {:?} cannot be repeated: {fault}", command.code);
                senseless("a command")
            })
    }

    /// Completion queues come first: what queue pairs have done depends on what those hold.
    fn restore_queues(
        &mut self,
        kept: &Kept,
        images: &BTreeMap<u32, Record>,
        cx: &mut Context<'_>,
    ) -> Result<(), KeptError> {
        let events = self.events.as_mut().map(|eq| (AEQ, eq));
        let eqs = self.eqs.iter_mut().map(|(number, eq)| (*number, eq));
        for (number, eq) in events.into_iter().chain(eqs) {
            if let Some(place) = kept.eq(number) {
                eq.restore(place, cx.memory, &self.irqs);
            }
        }
        let (cqs, qps) = self.numbers(kept);
        for number in cqs {
            let cq = self.engine.cq_mut(CqNum(number));
            let due = match (cq, kept.cq(number)) {
                (Some(cq), Some(place)) => cq.restore(place, cx.memory),
                _ => false,
            };
            if due {
                self.post_completion(number, cx.memory);
            }
        }
        for number in qps {
            let image = images.get(&number);
            let image = image.map(|record| (owner(record.change), record.bytes.as_slice()));
            let restored = self.engine.restore_qp(QpNum(number), image, kept, cx);
            restored.map_err(|_| senseless("a queue pair"))?;
            self.forget_stale_records(QpNum(number));
        }
        self.engine.restored(cx);
        Ok(())
    }

    /// Numbers of completion queues and of queue pairs.
    fn numbers(&self, kept: &Kept) -> (Vec<u32>, Vec<u32>) {
        let records = kept.store().records();
        let of = |class: u8| {
            let own = records.iter().map(|record| record.key);
            let own = own.filter(|key| key.class == class && key.part == COMMAND);
            own.map(|key| key.number as u32).collect()
        };
        (of(class::CQ), of(class::QP))
    }

    /// After a reset the doorbell records hold what was there before, until the first doorbell.
    fn forget_stale_records(&mut self, num: QpNum) {
        let state = self.engine.qp(num).map(|qp| qp.state);
        if matches!(state, Some(QpState::Reset | QpState::Init)) {
            if let Some(queue) = self.engine.send_queue_mut(num) {
                queue.reset();
            }
        }
        if state == Some(QpState::Reset) {
            if let Some(queue) = self.engine.receive_queue_mut(num) {
                queue.reset();
            }
        }
    }
}
