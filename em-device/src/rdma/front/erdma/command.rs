//! The command queue: a ring of commands, a ring of their completions, and what a command can be.

use super::bytes::{u32_at, u64_at};
use super::cq::{COMMANDS, Cqe, header};
use super::registers::{COMMAND_CQ, Setup};
use super::tables::MAX_CQS;
use super::{cq, eq};
use crate::rdma::engine::Refused;
use crate::rdma::front::buffer::{BadBuffer, NotMapped, QueueBuffer};
use crate::rdma::kept::{Kept, QueuePlace};
use crate::rdma::verbs::Denied;
use dot_iommu::DotView;
use smartep::irq::Irqs;
use thiserror::Error;

/// Bytes of a block; queues are counted in these.
pub(super) const BLOCK: u64 = 32;
/// Bytes of a command at most.
const MAX_LEN: usize = 128;
/// log₂ of the blocks of a queue at most.
const MAX_DEPTH: u32 = 1 << 15;

/// Commands by submodule and opcode.
pub(super) mod opcode {
    pub(crate) const QUERY_DEVICE: (u8, u8) = (0, 0);
    pub(crate) const CREATE_QP: (u8, u8) = (0, 1);
    pub(crate) const DESTROY_QP: (u8, u8) = (0, 2);
    pub(crate) const MODIFY_QP: (u8, u8) = (0, 3);
    pub(crate) const CREATE_CQ: (u8, u8) = (0, 4);
    pub(crate) const DESTROY_CQ: (u8, u8) = (0, 5);
    pub(crate) const REFLUSH: (u8, u8) = (0, 6);
    pub(crate) const REG_MR: (u8, u8) = (0, 8);
    pub(crate) const DEREG_MR: (u8, u8) = (0, 9);
    pub(crate) const SET_GID: (u8, u8) = (0, 14);
    pub(crate) const CREATE_AH: (u8, u8) = (0, 15);
    pub(crate) const DESTROY_AH: (u8, u8) = (0, 16);
    pub(crate) const QUERY_QP: (u8, u8) = (0, 17);
    pub(crate) const CREATE_EQ: (u8, u8) = (1, 0);
    pub(crate) const DESTROY_EQ: (u8, u8) = (1, 1);
    pub(crate) const QUERY_FW_INFO: (u8, u8) = (1, 2);
    pub(crate) const CONF_MTU: (u8, u8) = (1, 3);
    pub(crate) const GET_STATS: (u8, u8) = (1, 4);
    pub(crate) const CONF_DEVICE: (u8, u8) = (1, 5);
    pub(crate) const ALLOC_DB: (u8, u8) = (1, 8);
    pub(crate) const FREE_DB: (u8, u8) = (1, 9);
}

/// Why a command fails. The driver only learns that it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Fault {
    /// There is no such command.
    #[error("there is no such command")]
    Opcode,
    /// A field makes no sense.
    #[error("{0} is out of range")]
    Field(&'static str),
    /// No such object, or there is one already.
    #[error("the number of the {0} is not right")]
    Number(&'static str),
    /// Memory that the command names cannot be read or written.
    #[error("the {0} cannot be reached")]
    Memory(&'static str),
    /// Page lists take too much.
    #[error("there is no room for more page lists")]
    Room,
    /// The destination is unknown or not allowed.
    #[error("there is no way to the destination")]
    Path,
    /// A queue cannot be where it is said to be.
    #[error(transparent)]
    Buffer(#[from] BadBuffer),
    /// The engine refuses.
    #[error(transparent)]
    Engine(#[from] Refused),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] Denied),
}

/// A command as it was in the queue; what is read of it is a copy.
#[derive(Debug, Clone)]
pub struct Command {
    /// Index of its first block.
    index: u16,
    /// Submodule and opcode.
    pub(super) code: (u8, u8),
    bytes: [u8; MAX_LEN],
}

impl Command {
    pub(super) fn new(index: u16, bytes: [u8; MAX_LEN]) -> Self {
        let [_, _, opcode, module, ..] = bytes;
        Self {
            index,
            code: (module & 3, opcode),
            bytes,
        }
    }

    /// Index of its first block.
    pub(super) fn index(&self) -> u16 {
        self.index
    }

    /// All of it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The word at `at`.
    pub(super) fn word(&self, at: usize) -> u32 {
        u32_at(&self.bytes, at)
    }

    /// The 64 bits at `at`.
    pub(super) fn long(&self, at: usize) -> u64 {
        u64_at(&self.bytes, at)
    }

    /// The number of 20 bits at 8, which most commands have there.
    pub(super) fn number(&self) -> u32 {
        self.word(8) & 0xf_ffff
    }
}

/// What a command answers beside that it was done.
pub(super) type Response = [u64; 2];

/// The rings of the command queue, and the event queue that tells of completions.
#[derive(Debug)]
pub(super) struct CommandQueue {
    commands: QueueBuffer,
    blocks: u16,
    consumer: u16,
    completions: cq::Cq,
    events: eq::Eq,
    /// Where the index of the next command is known to who takes the place of this process.
    place: Option<QueuePlace>,
}

/// Number of the place, where no completion queue has one, and its word.
pub(super) const PLACE: u32 = MAX_CQS;
const TAKEN: usize = 0;

/// Blocks of a command with this first word.
fn blocks(head: u64) -> u16 {
    (head >> 52 & 7) as u16 + 1
}

fn ring(base: u64, len: u64) -> Result<QueueBuffer, BadBuffer> {
    // One page, which holds all of it.
    let shift = len.max(4096).next_power_of_two().trailing_zeros() as u8;
    QueueBuffer::anywhere([base].into(), shift, 0, len)
}

impl CommandQueue {
    /// The queue that the registers describe.
    pub(super) fn new(setup: &Setup) -> Result<Self, Fault> {
        let depth = setup.depth;
        if !depth.is_power_of_two() || !(4..=MAX_DEPTH).contains(&depth) {
            return Err(Fault::Field("the depth of the command queue"));
        }
        let bytes = u64::from(depth) * BLOCK;
        let completions = cq::Cq::new(
            ring(setup.completions, bytes)?,
            depth.trailing_zeros(),
            setup.completion_record,
            0,
        )?;
        Ok(Self {
            commands: ring(setup.commands, bytes)?,
            blocks: depth as u16,
            consumer: 0,
            completions,
            events: eq::Eq::new(setup.events, setup.event_depth, 0)
                .ok_or(Fault::Field("the event queue of commands"))?,
            place: None,
        })
    }

    /// What becomes of it outlives this process from here on.
    pub(super) fn keep_in(&mut self, kept: &Kept) {
        if let Some(place) = kept.cq(COMMAND_CQ) {
            self.completions.keep_in(place);
        }
        if let Some(place) = kept.eq(0) {
            self.events.keep_in(place);
        }
        self.place = kept.cq(PLACE);
        self.keep_taken();
    }

    /// Goes on where a former process was.
    pub(super) fn restore(&mut self, kept: &Kept, memory: &DotView<'_>, irqs: &Irqs) {
        if let Some(place) = kept.eq(0) {
            self.events.restore(place, memory, irqs);
        }
        let (Some(place), Some(completions)) = (kept.cq(PLACE), kept.cq(COMMAND_CQ)) else {
            return;
        };
        self.consumer = place.load(TAKEN) as u16;
        let mut due = self.completions.restore(completions, memory);
        self.place = Some(place);
        let last = self.completions.last(memory);
        let done = last.map(|entry| u32_at(&entry, 4).swap_bytes());
        if done == Some(self.consumer.into()) {
            // It was completed and not counted.
            let at = u64::from(self.consumer & (self.blocks - 1)) * BLOCK;
            let mut head = [0; 8];
            if self.commands.read(at, &mut head, memory).is_ok() {
                self.consumer = self.consumer.wrapping_add(blocks(u64_at(&head, 0)));
            }
            self.keep_taken();
        }
        due |= self.completions.ever_armed(memory) && self.completions.arm_for_commands(memory);
        if due {
            self.tell(memory, irqs);
        }
    }

    fn keep_taken(&self) {
        if let Some(place) = &self.place {
            place.store(TAKEN, self.consumer.into());
        }
    }

    /// The next command up to the block `producer`.
    pub(super) fn next(&mut self, producer: u16, memory: &DotView<'_>) -> Option<Command> {
        let posted = producer.wrapping_sub(self.consumer);
        let mut bytes = [0; MAX_LEN];
        let index = self.consumer;
        let at = u64::from(index & (self.blocks - 1)) * BLOCK;
        let (head, rest) = bytes.split_at_mut(BLOCK as usize);
        if posted == 0 {
            return None;
        }
        if posted > self.blocks || self.commands.read(at, head, memory).is_err() {
            self.consumer = producer;
            return None;
        }
        let blocks = blocks(u64_at(head, 0));
        let rest = rest.get_mut(..(usize::from(blocks) - 1) * BLOCK as usize);
        let behind = u64::from(index.wrapping_add(1) & (self.blocks - 1)) * BLOCK;
        let read =
            rest.map(|rest| rest.is_empty() || self.commands.read(behind, rest, memory).is_ok());
        if blocks > posted || read != Some(true) {
            self.consumer = producer;
            return None;
        }
        self.consumer = index.wrapping_add(blocks);
        Some(Command::new(index, bytes))
    }

    /// Tells the driver what became of a command.
    pub(super) fn complete(
        &mut self,
        command: &Command,
        result: Result<Response, Fault>,
        memory: &DotView<'_>,
        irqs: &Irqs,
    ) {
        let [first, second] = result.unwrap_or_default();
        let failed = u32::from(result.is_err());
        let cqe: Cqe = [
            header(command.code.1.into(), COMMANDS, failed),
            command.index.into(),
            first as u32,
            (first >> 32) as u32,
            second as u32,
            (second >> 32) as u32,
            0,
            0,
        ];
        match self.completions.store(&cqe, memory) {
            Ok(()) if self.completions.fires(false) => self.tell(memory, irqs),
            Ok(()) => {}
            Err(NotMapped) => log::warn!("a command's completion finds no memory"),
        }
        self.keep_taken();
    }

    /// The driver wants to hear of the next completion.
    pub(super) fn arm(&mut self, memory: &DotView<'_>, irqs: &Irqs) {
        if self.completions.arm_for_commands(memory) {
            self.tell(memory, irqs);
        }
    }

    fn tell(&mut self, memory: &DotView<'_>, irqs: &Irqs) {
        self.events.push(eq::Eqe::COMMAND, memory, irqs);
        self.completions.event_stored();
    }

    /// The event queue's doorbell.
    pub(super) fn update_events(&mut self, consumer: u32, arm: bool, irqs: &Irqs) {
        self.events.update(consumer, arm, irqs);
    }
}
