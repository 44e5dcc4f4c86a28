//! The command queue: slots of 128 bytes in, completions of 32 bytes out.

use super::{Erdma, regs, ring_owner};
use crate::time::{SOON, wait_for};
use crate::{Error, Result};

/// Commands by submodule and opcode.
pub mod command {
    #![allow(missing_docs)] // the names are the driver's
    pub const QUERY_DEVICE: (u8, u8) = (0, 0);
    pub const CREATE_QP: (u8, u8) = (0, 1);
    pub const DESTROY_QP: (u8, u8) = (0, 2);
    pub const MODIFY_QP: (u8, u8) = (0, 3);
    pub const CREATE_CQ: (u8, u8) = (0, 4);
    pub const DESTROY_CQ: (u8, u8) = (0, 5);
    pub const REFLUSH: (u8, u8) = (0, 6);
    pub const REG_MR: (u8, u8) = (0, 8);
    pub const DEREG_MR: (u8, u8) = (0, 9);
    pub const SET_GID: (u8, u8) = (0, 14);
    pub const CREATE_AH: (u8, u8) = (0, 15);
    pub const DESTROY_AH: (u8, u8) = (0, 16);
    pub const QUERY_QP: (u8, u8) = (0, 17);
    pub const CREATE_EQ: (u8, u8) = (1, 0);
    pub const DESTROY_EQ: (u8, u8) = (1, 1);
    pub const QUERY_FW_INFO: (u8, u8) = (1, 2);
    pub const CONF_MTU: (u8, u8) = (1, 3);
    pub const GET_STATS: (u8, u8) = (1, 4);
    pub const CONF_DEVICE: (u8, u8) = (1, 5);
    pub const ALLOC_DB: (u8, u8) = (1, 8);
    pub const FREE_DB: (u8, u8) = (1, 9);
}

/// Bytes of a slot, and the blocks that it takes.
const SLOT: usize = 128;
const BLOCKS: u16 = 4;
/// Blocks of the queue, and entries of its completion queue.
pub(super) const DEPTH: u16 = 512;
/// Entries of its event queue.
pub(super) const EQ_DEPTH: u16 = 128;

/// What goes into a slot, by offsets from its start; the header is filled in when it is posted.
#[derive(Debug, Clone)]
pub struct Request {
    command: (u8, u8),
    bytes: [u8; SLOT],
}

impl Request {
    /// All zero.
    pub fn new(command: (u8, u8)) -> Self {
        Self {
            command,
            bytes: [0; SLOT],
        }
    }

    /// With these bytes at an offset.
    #[must_use]
    pub fn bytes(mut self, at: usize, data: &[u8]) -> Self {
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self
    }

    /// With a byte at an offset.
    #[must_use]
    pub fn byte(self, at: usize, value: u8) -> Self {
        self.bytes(at, &[value])
    }

    /// With a little-endian word at an offset.
    #[must_use]
    pub fn word(self, at: usize, value: u32) -> Self {
        self.bytes(at, &value.to_le_bytes())
    }

    /// With a little-endian long word at an offset.
    #[must_use]
    pub fn long(self, at: usize, value: u64) -> Self {
        self.bytes(at, &value.to_le_bytes())
    }
}

/// What a completion of the command queue says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// 0 for success.
    pub syndrome: u8,
    /// First block of the command.
    pub index: u16,
    /// The two words of response.
    pub words: [u64; 2],
}

/// Where the command queue is and how far it got. Indices are free-running.
#[derive(Debug, Default)]
pub(super) struct Commands {
    pub(super) sq: u64,
    pub(super) cq: u64,
    pub(super) eq: u64,
    /// Doorbell records: SQ, CQ, EQ, AEQ.
    pub(super) records: u64,
    pub(super) produced: u16,
    pub(super) completed: u32,
    pub(super) events: u32,
    pub(super) armed: bool,
    pub(super) arms: u8,
    pub(super) waiting: Vec<Reply>,
}

impl Erdma {
    /// Executes a command; answers the words of its response.
    ///
    /// # Errors
    /// [`Error::Device`] with the syndrome when it failed; the device did not answer.
    pub fn command(&mut self, request: &Request) -> Result<[u64; 2]> {
        match self.execute(request)? {
            Reply {
                syndrome: 0, words, ..
            } => Ok(words),
            Reply { syndrome, .. } => Err(Error::Device(format!(
                "command {:?} failed with syndrome {syndrome}",
                request.command
            ))),
        }
    }

    /// Executes a command, whatever comes of it.
    ///
    /// # Errors
    /// The device did not answer.
    pub fn execute(&mut self, request: &Request) -> Result<Reply> {
        let index = self.post(request)?;
        self.ring_commands()?;
        self.reply(index)
    }

    /// Puts a command into the queue, without telling the device; answers its first block. At most 128 may be
    /// outstanding.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post(&mut self, request: &Request) -> Result<u16> {
        let first = self.commands.produced;
        let next = first.wrapping_add(BLOCKS);
        let (module, opcode) = request.command;
        let header = u64::from(BLOCKS - 1) << 52
            | u64::from(first) << 32
            | u64::from(module) << 24
            | u64::from(opcode) << 16
            | u64::from(next);
        let at = self.commands.sq + u64::from(first % DEPTH) * 32;
        self.memory.write(at + 8, &request.bytes[8..])?;
        self.memory.write(at, &header.to_le_bytes())?;
        self.commands.produced = next;
        Ok(first)
    }

    /// Tells the device of all commands posted.
    ///
    /// # Errors
    /// The access failed.
    pub fn ring_commands(&mut self) -> Result<()> {
        let value = u64::from(self.commands.produced);
        self.publish(self.commands.records, regs::CMD_SQ_DOORBELL, value)
    }

    /// Waits for the reply to the command that began at this block, as a driver does: polling until completions
    /// are armed, by event and interrupt after.
    ///
    /// # Errors
    /// None came within seconds.
    pub fn reply(&mut self, index: u16) -> Result<Reply> {
        wait_for("the reply to a command", SOON, || {
            if let Err(e) = self.take_replies() {
                return Some(Err(e));
            }
            let place = self.commands.waiting.iter().position(|r| r.index == index);
            place.map(|place| Ok(self.commands.waiting.swap_remove(place)))
        })?
    }

    fn take_replies(&mut self) -> Result<()> {
        if self.commands.armed {
            return self.serve_interrupt();
        }
        self.take_completions()
    }

    fn take_completions(&mut self) -> Result<()> {
        while let Some(reply) = self.command_completion()? {
            self.commands.waiting.push(reply);
        }
        Ok(())
    }

    /// The handler of vector 0, if that was signalled: commands, then asynchronous events.
    pub(super) fn serve_interrupt(&mut self) -> Result<()> {
        if !self.interrupted(0) {
            return Ok(());
        }
        let before = self.commands.events;
        while self.command_event()? {}
        if self.commands.events != before {
            self.take_completions()?;
            self.arm_commands()?;
        }
        let value = 1 << 31 | u64::from(self.commands.events as u16);
        self.publish(self.commands.records + 16, regs::EQ_DOORBELLS, value)?;
        self.take_async_events()
    }

    /// Takes an event of the command queue's event queue.
    fn command_event(&mut self) -> Result<bool> {
        let Commands { eq, events, .. } = self.commands;
        let at = eq + u64::from(events % u32::from(EQ_DEPTH)) * 16;
        let word = self.memory.load_u32(at)?;
        let new = word >> 31 == ring_owner(events, EQ_DEPTH.into());
        self.commands.events += u32::from(new);
        Ok(new)
    }

    fn command_completion(&mut self) -> Result<Option<Reply>> {
        let Commands { cq, completed, .. } = self.commands;
        let at = cq + u64::from(completed % u32::from(DEPTH)) * 32;
        // The owner is in the first byte: acquire it before the rest.
        let header = self.memory.load_u32(at)?.swap_bytes();
        if header >> 31 != ring_owner(completed, DEPTH.into()) {
            return Ok(None);
        }
        let bytes = self.memory.bytes(at, 32)?;
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if header >> 8 & 0xff != 2 {
            return Err(Error::Device(format!("command completion {header:#x}")));
        }
        self.commands.completed += 1;
        let pair = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Ok(Some(Reply {
            syndrome: header as u8,
            index: word(4) as u16,
            words: [pair(8), pair(16)],
        }))
    }

    /// Asks for an event at the next command's completion: from here on commands sleep.
    ///
    /// # Errors
    /// The access failed.
    pub fn arm_commands(&mut self) -> Result<()> {
        self.commands.armed = true;
        self.commands.arms = self.commands.arms.wrapping_add(1);
        let value = u64::from(self.commands.arms) << 56
            | 1 << 31
            | u64::from(self.commands.arms & 3) << 28
            | u64::from(self.commands.completed & 0xff_ffff);
        self.publish(self.commands.records + 8, regs::CMD_CQ_DOORBELL, value)
    }
}
