//! The command interface: entries and mailboxes.

use super::{COMMAND_DOORBELL, MAILBOXES, Mlx5};
use crate::time::{SOON, wait_for};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Opcodes.
pub mod opcode {
    #![allow(missing_docs)] // the names are the manual's
    pub const QUERY_HCA_CAP: u16 = 0x100;
    pub const INIT_HCA: u16 = 0x102;
    pub const TEARDOWN_HCA: u16 = 0x103;
    pub const ENABLE_HCA: u16 = 0x104;
    pub const DISABLE_HCA: u16 = 0x105;
    pub const QUERY_PAGES: u16 = 0x107;
    pub const SET_HCA_CAP: u16 = 0x109;
    pub const SET_ISSI: u16 = 0x10b;
    pub const CREATE_MKEY: u16 = 0x200;
    pub const DESTROY_MKEY: u16 = 0x202;
    pub const CREATE_EQ: u16 = 0x301;
    pub const CREATE_CQ: u16 = 0x400;
    pub const DESTROY_CQ: u16 = 0x401;
    pub const CREATE_QP: u16 = 0x500;
    pub const DESTROY_QP: u16 = 0x501;
    pub const RST2INIT_QP: u16 = 0x502;
    pub const SET_ROCE_ADDRESS: u16 = 0x761;
    pub const INIT2RTR_QP: u16 = 0x503;
    pub const RTR2RTS_QP: u16 = 0x504;
    pub const TO_ERR_QP: u16 = 0x507;
    pub const TO_RST_QP: u16 = 0x50a;
    pub const QUERY_QP: u16 = 0x50b;
    pub const CREATE_SRQ: u16 = 0x700;
    pub const QUERY_HCA_VPORT_CONTEXT: u16 = 0x762;
    pub const ALLOC_PD: u16 = 0x800;
    pub const DEALLOC_PD: u16 = 0x801;
    pub const ALLOC_UAR: u16 = 0x802;
}

/// Data bytes of a mailbox, and its distance to the next.
const MAILBOX_DATA: usize = 512;
const MAILBOX_STRIDE: u64 = 1024;

impl Mlx5 {
    /// Executes a command: `input` is what follows the 8 bytes of the header. Answers all of the output.
    ///
    /// # Errors
    /// [`Error::Device`] with the status when it failed; the device did not answer.
    pub fn command(
        &mut self,
        opcode: u16,
        op_mod: u16,
        input: &[u8],
        out_len: usize,
    ) -> Result<Vec<u8>> {
        let mut all = opcode.to_be_bytes().to_vec();
        all.extend([0; 4]);
        all.extend(op_mod.to_be_bytes());
        all.extend(input);
        if all.len() < 16 {
            all.resize(16, 0);
        }
        let output = self.execute(&all, out_len)?;
        match output[0] {
            0 => Ok(output),
            status => Err(Error::Device(format!(
                "command {opcode:#x} failed with status {status:#x}, syndrome {:02x?}",
                &output[4..8]
            ))),
        }
    }

    /// Puts these bytes into the command queue and waits for the output, whatever its status.
    ///
    /// # Errors
    /// The device did not answer, or with a delivery status.
    pub fn execute(&mut self, input: &[u8], out_len: usize) -> Result<Vec<u8>> {
        Ok(self.execute_timed(input, out_len)?.0)
    }

    /// The same, with the time from the doorbell to the status.
    pub(super) fn execute_timed(
        &mut self,
        input: &[u8],
        out_len: usize,
    ) -> Result<(Vec<u8>, Duration)> {
        if input.len() as u64 > MAILBOXES / MAILBOX_STRIDE * MAILBOX_DATA as u64 {
            return Err(Error::Harness(
                "the command is too long for the mailboxes".into(),
            ));
        }
        let in_mailbox = self.chain(self.input, &input[16..])?;
        let rest = vec![0; out_len.saturating_sub(16)];
        let out_mailbox = self.chain(self.output, &rest)?;
        let mut entry = [0u8; 64];
        entry[0] = 7;
        entry[4..8].copy_from_slice(&(input.len() as u32).to_be_bytes());
        entry[8..16].copy_from_slice(&in_mailbox.to_be_bytes());
        entry[16..32].copy_from_slice(&input[..16]);
        entry[48..56].copy_from_slice(&out_mailbox.to_be_bytes());
        entry[56..60].copy_from_slice(&(out_len as u32).to_be_bytes());
        self.token = self.token.wrapping_add(1).max(1);
        entry[60] = self.token;
        entry[63] = 1;
        let at = self.commands;
        self.memory.write(at, &entry)?;
        let begin = Instant::now();
        self.write32(COMMAND_DOORBELL, 1)?;
        let memory = self.memory.clone();
        let status = wait_for("a command", SOON, || {
            let status = memory.load_u32(at + 60).ok()?.to_le_bytes()[3];
            (status & 1 == 0).then_some(status)
        })?;
        let time = begin.elapsed();
        if let Some((queue, count)) = self.command_events {
            let owner = queue + count * 64 + 60;
            wait_for("a command's event", SOON, || {
                let last = memory.load_u32(owner).ok()?.to_le_bytes();
                (last[3] & 1 == 0).then_some(())
            })?;
            self.command_events = Some((queue, count + 1));
        }
        if status != 0 {
            return Err(Error::Device(format!("delivery status {:#x}", status >> 1)));
        }
        let mut output = self.memory.bytes(at + 32, 16)?;
        for (block, chunk) in rest.chunks(MAILBOX_DATA).enumerate() {
            let from = self.output + block as u64 * MAILBOX_STRIDE;
            output.extend(self.memory.bytes(from, chunk.len())?);
        }
        Ok((output, time))
    }

    /// Makes a queue for the events of commands. From here on a command is over when its event came, as for any
    /// driver that does not poll; at most 2¹¹ of them.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn expect_command_events(&mut self) -> Result<()> {
        const LOG_SIZE: u8 = 11;
        const COMMANDS: u64 = 1 << 0x0a;
        let at = self.memory.allocate(64 << LOG_SIZE, 4096)?;
        for entry in 0..1u64 << LOG_SIZE {
            self.memory.write(at + entry * 64 + 63, &[1])?;
        }
        self.create_eq(at, LOG_SIZE, 0, COMMANDS)?;
        self.command_events = Some((at, 0));
        Ok(())
    }

    /// How many events of commands came that were not expected.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn unexpected_command_events(&self) -> Result<u64> {
        let (at, mut count) = self.command_events.unwrap_or_default();
        let first = count;
        while self.memory.bytes(at + count * 64 + 63, 1)? == [0] {
            count += 1;
        }
        Ok(count - first)
    }

    /// Writes data into mailboxes one after the other; answers the first's address.
    fn chain(&self, first: u64, data: &[u8]) -> Result<u64> {
        let blocks = data.len().div_ceil(MAILBOX_DATA);
        for (block, chunk) in data.chunks(MAILBOX_DATA).enumerate() {
            let at = first + block as u64 * MAILBOX_STRIDE;
            let next = match block + 1 < blocks {
                true => at + MAILBOX_STRIDE,
                false => 0,
            };
            let mut mailbox = [0u8; 576];
            mailbox[..chunk.len()].copy_from_slice(chunk);
            mailbox[560..568].copy_from_slice(&next.to_be_bytes());
            mailbox[568..572].copy_from_slice(&(block as u32).to_be_bytes());
            self.memory.write(at, &mailbox)?;
        }
        Ok(if blocks == 0 { 0 } else { first })
    }
}
