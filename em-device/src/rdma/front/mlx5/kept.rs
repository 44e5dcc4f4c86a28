//! Which commands leave records, and which: so that another process can make the same objects again.
//!
//! A record is the command's input, with the number of the object that it made: [`super::replay`] gives the input to
//! the same code again. Of a queue pair's changes only what it is afterwards is kept. A destroyed object's records
//! are gone; a change replaces an earlier one of the same kind.

use super::Device;
use super::command::{Command, Output, opcode as op};
use crate::rdma::engine::REGION_CLASS;
use crate::rdma::kept::{Change, Kept, Key, Outcome};
use crate::rdma::verbs::{CqNum, QpNum};
use smartep::fault;
use std::sync::Arc;

/// Kinds of objects.
pub(super) mod class {
    pub(crate) const HCA: u8 = 1;
    /// Memory keys.
    pub(crate) const MKEY: u8 = super::REGION_CLASS;
    pub(crate) const EQ: u8 = 3;
    pub(crate) const CQ: u8 = 4;
    pub(crate) const QP: u8 = 5;
    pub(crate) const SRQ: u8 = 6;
    pub(crate) const PD: u8 = 7;
    pub(crate) const UAR: u8 = 8;
    pub(crate) const XRCD: u8 = 9;
    pub(crate) const DOMAIN: u8 = 10;
    pub(crate) const TIS: u8 = 11;
    pub(crate) const TIR: u8 = 12;
    pub(crate) const RQT: u8 = 13;
    pub(crate) const RQ: u8 = 14;
    pub(crate) const SQ: u8 = 15;
    pub(crate) const COUNTER: u8 = 16;
    pub(crate) const FLOW_TABLE: u8 = 17;
    pub(crate) const FLOW_GROUP: u8 = 18;
    /// Number: the table's in the upper half, the entry's in the lower.
    pub(crate) const FLOW_ENTRY: u8 = 19;
    pub(crate) const GID: u8 = 20;
    /// By what is changed.
    pub(crate) const VPORT: u8 = 21;
    /// What is set before INIT_HCA.
    pub(crate) const SETUP: u8 = 22;
    /// The interface step sequence id, which survives a teardown.
    pub(crate) const ISSI: u8 = 23;
}

/// Part of a queue pair's records: what it is.
pub(super) const IMAGE: u64 = 1;
/// Bytes in front of a command's input in a record: opcode, variant, user context, slot, number.
pub(super) const PREFIX: usize = 16;

/// What a command does to the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    /// The command is kept.
    Put(Key),
    /// What a queue pair is now is kept.
    Image(u32),
    /// An object is gone.
    Remove(u8, u64),
    /// All are.
    RemoveAll,
}

/// The records of a device, if it has any.
#[derive(Debug, Default)]
pub(super) struct KeptDevice {
    kept: Option<Arc<Kept>>,
    replaying: bool,
    /// A command that a former process executed, and whose driver waits for it.
    owed: Option<Outcome>,
}

impl KeptDevice {
    pub(super) fn new(kept: Arc<Kept>) -> Self {
        Self {
            kept: Some(kept),
            ..Self::default()
        }
    }

    pub(super) fn get(&self) -> Option<&Arc<Kept>> {
        self.kept.as_ref()
    }

    pub(super) fn set_replaying(&mut self, on: bool) {
        self.replaying = on;
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.replaying
    }

    pub(super) fn set_owed(&mut self, owed: Option<Outcome>) {
        self.owed = owed;
    }

    /// The output of a command that a former process executed already.
    pub(super) fn owed(&mut self, command: &Command) -> Option<Vec<u8>> {
        if self.owed?.slot != command.slot {
            return None;
        }
        let owed = self.owed.take()?;
        let same = owed.token == command.token && owed.hash == hash(&command.input);
        owed.output.filter(|_| same).map(|output| output.to_vec())
    }

    /// A command that changes nothing was executed.
    pub(super) fn begin(&self, command: &Command, silent: bool) {
        if let Some(kept) = &self.kept {
            kept.note().begin(&outcome(command, silent), None, &[]);
        }
    }

    /// The driver is going to be told.
    pub(super) fn tells(&self, eqn: u32, index: u32) {
        if let Some(kept) = &self.kept {
            kept.note().tells(eqn, index);
        }
        fault::point("telling");
    }

    /// The driver knows.
    pub(super) fn done(&self) {
        fault::point("told");
        if let Some(kept) = &self.kept {
            kept.note().clear();
        }
    }

    /// There are no objects.
    pub(super) fn clear(&mut self) {
        self.owed = None;
        if let Some(kept) = &self.kept {
            kept.clear();
        }
    }
}

fn outcome(command: &Command, silent: bool) -> Outcome {
    Outcome {
        slot: command.slot,
        token: command.token,
        hash: hash(&command.input),
        silent,
        output: None,
        event: None,
    }
}

/// FNV-1a of the beginning: what follows is page lists, and the token tells commands apart anyway.
fn hash(bytes: &[u8]) -> u32 {
    bytes.iter().take(512).fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

fn key(class: u8, number: impl Into<u64>, part: u64) -> Key {
    let number = number.into();
    Key {
        class,
        number,
        part,
    }
}

/// What a command that succeeded does; `made`: the number in its output.
fn step(command: &Command, made: u32) -> Step {
    let index = u64::from(command.index());
    let made = u64::from(made);
    let put = |class, number: u64, part| Step::Put(key(class, number, part));
    // What is changed, as a part that is not 0.
    let selected = |from: usize, to: usize| {
        let mask = command.input.get(from..to).unwrap_or_default();
        1 + u64::from(hash(mask))
    };
    let word = |at: usize| {
        let bytes = command.input.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().map_or(0, u32::from_be_bytes)
    };
    let table = word(0x14) & 0xff_ffff;
    let entry = u64::from(table) << 32 | u64::from(word(0x20));
    match command.opcode {
        op::INIT_HCA => put(class::HCA, 0, 0),
        op::TEARDOWN_HCA | op::DISABLE_HCA => Step::RemoveAll,
        op::SET_HCA_CAP => put(class::SETUP, command.op_mod.into(), 0),
        op::SET_ISSI => put(class::ISSI, 0, 0),
        op::CREATE_EQ => put(class::EQ, made, 0),
        op::DESTROY_EQ => Step::Remove(class::EQ, index & 0xff),
        op::CREATE_CQ => put(class::CQ, made, 0),
        op::MODIFY_CQ => put(class::CQ, index, 1 + u64::from(command.op_mod)),
        op::DESTROY_CQ => Step::Remove(class::CQ, index),
        op::CREATE_QP => put(class::QP, made, 0),
        op::RST2INIT_QP
        | op::INIT2INIT_QP
        | op::INIT2RTR_QP
        | op::RTR2RTS_QP
        | op::RTS2RTS_QP
        | op::SQERR2RTS_QP
        | op::SQD_RTS_QP
        | op::QP_2ERR
        | op::QP_2RST => Step::Image(command.index()),
        op::DESTROY_QP => Step::Remove(class::QP, index),
        op::CREATE_MKEY => put(class::MKEY, made, 0),
        op::DESTROY_MKEY => Step::Remove(class::MKEY, index),
        op::CREATE_SRQ | op::CREATE_XRC_SRQ | op::CREATE_RMP => put(class::SRQ, made, 0),
        op::DESTROY_SRQ | op::DESTROY_XRC_SRQ | op::DESTROY_RMP => Step::Remove(class::SRQ, index),
        op::ALLOC_PD => put(class::PD, made, 0),
        op::DEALLOC_PD => Step::Remove(class::PD, index),
        op::ALLOC_UAR => put(class::UAR, made, 0),
        op::DEALLOC_UAR => Step::Remove(class::UAR, index),
        op::ALLOC_XRCD => put(class::XRCD, made, 0),
        op::DEALLOC_XRCD => Step::Remove(class::XRCD, index),
        op::ALLOC_TRANSPORT_DOMAIN => put(class::DOMAIN, made, 0),
        op::DEALLOC_TRANSPORT_DOMAIN => Step::Remove(class::DOMAIN, index),
        op::CREATE_TIS => put(class::TIS, made, 0),
        op::DESTROY_TIS => Step::Remove(class::TIS, index),
        op::CREATE_TIR => put(class::TIR, made, 0),
        op::MODIFY_TIR => put(class::TIR, index, selected(0x10, 0x18)),
        op::DESTROY_TIR => Step::Remove(class::TIR, index),
        op::CREATE_RQT => put(class::RQT, made, 0),
        op::MODIFY_RQT => put(class::RQT, index, selected(0x10, 0x18)),
        op::DESTROY_RQT => Step::Remove(class::RQT, index),
        op::CREATE_RQ => put(class::RQ, made, 0),
        op::MODIFY_RQ => put(class::RQ, index, selected(0x10, 0x18)),
        op::DESTROY_RQ => Step::Remove(class::RQ, index),
        op::CREATE_SQ => put(class::SQ, made, 0),
        op::MODIFY_SQ => put(class::SQ, index, 1),
        op::DESTROY_SQ => Step::Remove(class::SQ, index),
        op::ALLOC_Q_COUNTER => put(class::COUNTER, made, 0),
        op::DEALLOC_Q_COUNTER => Step::Remove(class::COUNTER, index & 0xff),
        op::CREATE_FLOW_TABLE => put(class::FLOW_TABLE, made, 0),
        op::DESTROY_FLOW_TABLE => Step::Remove(class::FLOW_TABLE, table.into()),
        op::CREATE_FLOW_GROUP => put(class::FLOW_GROUP, made, 0),
        op::DESTROY_FLOW_GROUP => Step::Remove(class::FLOW_GROUP, word(0x18).into()),
        op::SET_FLOW_TABLE_ENTRY => put(class::FLOW_ENTRY, entry, 0),
        op::DELETE_FLOW_TABLE_ENTRY => Step::Remove(class::FLOW_ENTRY, entry),
        op::SET_ROCE_ADDRESS => put(class::GID, u64::from(word(0x8) >> 16), 0),
        op::MODIFY_NIC_VPORT_CONTEXT => {
            // Which fields, and of lists which.
            let list = u64::from(word(0x1f0) >> 24 & 7);
            put(class::VPORT, selected(0xc, 0x10) << 8 | list, 0)
        }
        _ => Step::Nothing,
    }
}

impl Device {
    /// What becomes of this device outlives the process from here on. It has no objects yet.
    pub fn keep_in(&mut self, kept: Arc<Kept>) {
        self.engine.keep_in(kept.clone());
        self.path.keep_in(kept.clone());
        self.kept = KeptDevice::new(kept);
    }

    pub(super) fn replaying(&self) -> bool {
        self.kept.is_replaying()
    }

    /// A command succeeded and its driver does not know yet.
    pub(super) fn keep_command(&mut self, command: &Command, output: &Output) {
        let Some(kept) = self.kept.get().cloned() else {
            return;
        };
        let (made, silent) = (output.index(), self.polled_slot == Some(command.slot));
        self.new_queue(command, made, &kept);
        let step = step(command, made);
        let change = self.prepare(&kept, command, made, step);
        let name = outcome(command, silent);
        kept.note().begin(&name, change.as_ref(), output.as_bytes());
        fault::point("noted");
        let number = change.as_ref().map_or(0, |change| change.number);
        let mut store = kept.store();
        if let Some(change) = change {
            store.commit(change);
        }
        fault::point("kept");
        match step {
            Step::RemoveAll => store.remove_all(|key| key.class != class::ISSI),
            Step::Remove(class::FLOW_TABLE, table) => {
                store.remove_all(|key| key.class == class::FLOW_ENTRY && key.number >> 32 == table);
            }
            Step::Image(qp) => self.engine.image_kept(QpNum(qp), owner(number)),
            _ => {}
        }
    }

    fn prepare(&self, kept: &Kept, command: &Command, made: u32, step: Step) -> Option<Change> {
        let mut store = kept.store();
        let change = match step {
            Step::Nothing => return None,
            Step::Remove(class, number) => return store.prepare_removal(class, number),
            Step::RemoveAll => return store.prepare_removal(class::HCA, 0),
            Step::Put(key) => {
                let mut prefix = [0; PREFIX];
                let halves = [command.opcode, command.op_mod, command.uid];
                let bytes = halves.into_iter().flat_map(u16::to_le_bytes);
                let bytes = bytes.chain([command.slot, 0]).chain(made.to_le_bytes());
                prefix
                    .iter_mut()
                    .zip(bytes)
                    .for_each(|(to, from)| *to = from);
                store.prepare(key, &[&prefix, &command.input])
            }
            Step::Image(num) => {
                let context = self.objects.qps.get(num).map(|qp| *qp.context());
                let image = self.engine.image(QpNum(num));
                match (context, image) {
                    (Ok(context), Some(image)) => {
                        let key = key(class::QP, num, IMAGE);
                        store.prepare(key, &[&context, &image])
                    }
                    _ => return None,
                }
            }
        };
        if change.is_none() {
            kept.set_broken();
        }
        change
    }

    /// A queue that is made begins with a place of its own.
    fn new_queue(&mut self, command: &Command, made: u32, kept: &Kept) {
        match command.opcode {
            op::CREATE_CQ => {
                if let (Some(cq), Some(place)) = (self.engine.cq_mut(CqNum(made)), kept.cq(made)) {
                    cq.keep_in(place);
                }
            }
            op::CREATE_EQ => {
                if let (Ok(eq), Some(place)) = (self.objects.eqs.get_mut(made), kept.eq(made)) {
                    eq.keep_in(place);
                }
            }
            _ => {}
        }
    }
}

/// The number by which a queue pair's place names an image.
pub(super) fn owner(change: u64) -> u32 {
    (change as u32).max(1)
}
