//! Commands: how they arrive ([`mailbox`]) and, by group, what they do.

pub mod mailbox;

mod caps;
mod cq;
mod eq;
mod ether;
mod flow;
mod hca;
mod mkey;
pub(crate) mod opcode;
mod pd_uar;
mod port;
mod qp;
mod srq;
mod vport;

use super::bits::Field;
pub(super) use super::fields;
use crate::rdma::engine::Refused;
pub(super) use cq::CqObject;
pub use mailbox::{finish_command, read_command};
pub(super) use mkey::MkeyObject;
pub(super) use pd_uar::PdObject;
pub(super) use qp::QpObject;
pub(super) use srq::SrqObject;
use thiserror::Error;

/// A command as the driver gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Entry of the queue, 0 to 31.
    pub slot: u8,
    /// What to do.
    pub opcode: u16,
    /// Variant.
    pub op_mod: u16,
    /// User context; 0 is the kernel.
    pub uid: u16,
    /// All of the input, from the header on: at least 16 bytes.
    pub input: Vec<u8>,
    /// Bytes that the driver takes at most.
    pub out_len: u32,
    /// What tells an entry from the next one in the same slot.
    pub token: u8,
    /// Bus address of the entry.
    pub(super) entry: u64,
    /// Bus address of the output's first mailbox.
    pub(super) out_mailbox: u64,
}

impl Command {
    /// A command whose output goes nowhere: one that a former process executed.
    pub(super) fn again(slot: u8, opcode: u16, op_mod: u16, uid: u16, input: Vec<u8>) -> Self {
        Self {
            slot,
            opcode,
            op_mod,
            uid,
            input,
            out_len: 0,
            token: 0,
            entry: 0,
            out_mailbox: 0,
        }
    }

    /// The number of the object that most commands are about.
    pub(super) fn index(&self) -> u32 {
        fields::header::INDEX.get(&self.input)
    }

    /// A context that begins at a byte of the input, zeroes where the input ends.
    pub(super) fn context<const N: usize>(&self, at: usize) -> [u8; N] {
        super::bits::array(&self.input, at)
    }

    /// A field of the input.
    pub(super) fn get(&self, field: Field) -> u32 {
        field.get(&self.input)
    }
}

/// Why a command failed (`MLX5_CMD_STAT_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[repr(u8)]
pub enum Status {
    /// There is no such command, or not on this function.
    #[error("bad operation")]
    BadOperation = 0x2,
    /// A parameter is out of range or not supported.
    #[error("bad parameter")]
    BadParameter = 0x3,
    /// Not before INIT_HCA.
    #[error("bad system state")]
    BadSystemState = 0x4,
    /// There is no such object.
    #[error("bad resource")]
    BadResource = 0x5,
    /// Others use the object.
    #[error("resource busy")]
    Busy = 0x6,
    /// A limit is reached.
    #[error("limits exceeded")]
    LimitExceeded = 0x8,
    /// The object cannot do this in its state.
    #[error("bad resource state")]
    BadResourceState = 0x9,
    /// An index is out of range.
    #[error("bad index")]
    BadIndex = 0xa,
    /// No more objects of the kind.
    #[error("no resources")]
    NoResources = 0xf,
    /// The queue pair cannot do this in its state.
    #[error("bad QP state")]
    BadQpState = 0x10,
    /// More entries wait in a completion queue than its new size has room for.
    #[error("more outstanding completions than the new size")]
    OutstandingEntries = 0x40,
    /// The input is too short.
    #[error("bad input length")]
    BadInputLength = 0x50,
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Unknown => Self::BadResource,
            Refused::Number => Self::NoResources,
            Refused::InUse => Self::Busy,
            Refused::Transition(..) => Self::BadQpState,
            Refused::Attribute(_) => Self::BadParameter,
        }
    }
}

/// A command's output under construction: 16 bytes at first, and a status that says success.
#[derive(Debug)]
pub(super) struct Output(Vec<u8>);

impl Output {
    pub(super) fn new() -> Self {
        Self(vec![0; 16])
    }

    /// All bytes, at least `len` of them.
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() < len {
            self.0.resize(len, 0);
        }
        &mut self.0
    }

    /// Stores bytes at a place.
    pub(super) fn put(&mut self, at: usize, value: &[u8]) {
        super::bits::put(self.bytes(at + value.len()), at, value);
    }

    /// The number of the object that a command made.
    pub(super) fn set_index(&mut self, index: u32) {
        fields::header::INDEX.set(&mut self.0, index);
    }

    /// What [`Self::set_index`] stored.
    pub(super) fn index(&self) -> u32 {
        fields::header::INDEX.get(&self.0)
    }

    /// Stores a field.
    pub(super) fn set(&mut self, field: Field, value: u32) {
        field.set(&mut self.0, value);
    }

    /// All bytes so far.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The output of a command that failed. The syndrome names command and status, for reports.
pub(super) fn failure(opcode: u16, status: Status) -> Vec<u8> {
    let mut output = Output::new();
    output.set(fields::header::STATUS, status as u32);
    let syndrome = u32::from(opcode) << 8 | status as u32;
    output.set(fields::header::SYNDROME, syndrome);
    output.into_bytes()
}
