//! The command queue's entries and the mailboxes that continue them (`mlx5_ifc`: cmd_queue_entry,
//! mailbox).
//!
//! The first 16 bytes of input and of output are in the entry; the rest is in chains of mailboxes of
//! 512 bytes of data each.

use super::super::bits::{Field, array, get64, put};
use super::{Command, fields};
use dot_iommu::DotView;
use std::sync::atomic::{Ordering, fence};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

/// Bytes of an entry.
const ENTRY: usize = 64;
/// Entries of a queue.
pub const SLOTS: u8 = 32;
/// Bytes in the entry itself.
const IN_LINE: usize = 16;
/// Data bytes of a mailbox.
const BLOCK: usize = 512;
/// Where a mailbox says where the next is.
const NEXT: usize = 560;
/// Bytes of an input or output at least: the header.
const MIN_LEN: u32 = 8;
/// Bytes of a command's input or output at most: a page list of 2 Mi pages.
pub const MAX_LEN: u32 = 16 << 20;

const TYPE: Field = Field::new(0, 0, 8);
const INPUT_LENGTH: Field = Field::new(4, 0, 32);
const INPUT_MAILBOX: usize = 8;
const INPUT_INLINE: usize = 16;
const OUTPUT_INLINE: usize = 32;
const OUTPUT_MAILBOX: usize = 48;
const OUTPUT_LENGTH: Field = Field::new(56, 0, 32);
const TOKEN: usize = 60;
const OWNERSHIP: usize = 63;

/// Type of an entry that commands come in.
const PCIE_COMMAND: u32 = 7;
/// The device owns the entry.
const OWNER: u8 = 1;

/// How an entry was delivered (`MLX5_CMD_DELIVERY_STAT_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Delivery {
    /// Well.
    Ok = 0,
    /// The output's mailbox is not aligned.
    OutputAlignment = 4,
    /// The input's mailbox is not aligned.
    InputAlignment = 5,
    /// A mailbox cannot be read.
    Internal = 6,
    /// The input is too short or too long.
    InputLength = 7,
    /// The output is too short or too long.
    OutputLength = 8,
    /// The entry is not one of a command.
    Descriptor = 0x10,
}

/// Why there is no command in an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoCommand {
    /// The queue is not mapped, or there is no such entry.
    #[error("command queue entry {0} cannot be read")]
    Unreadable(u8),
    /// The driver still owns the entry.
    #[error("command queue entry {0} is the driver's")]
    NotOwned(u8),
    /// The entry makes no sense; [`refuse`] tells the driver.
    #[error("command queue entry at {entry:#x} is refused: {delivery:?}")]
    Refused {
        /// Bus address of the entry.
        entry: u64,
        /// Why.
        delivery: Delivery,
    },
}

/// Copies the command of entry `slot` of the queue at bus address `queue`.
pub fn read_command(queue: u64, slot: u8, memory: &DotView<'_>) -> Result<Command, NoCommand> {
    let unreadable = NoCommand::Unreadable(slot);
    if slot >= SLOTS {
        return Err(unreadable);
    }
    let entry = queue.wrapping_add(u64::from(slot) * ENTRY as u64);
    let mut bytes = [0u8; ENTRY];
    memory
        .read_slice(&mut bytes, GuestAddress(entry))
        .map_err(|_| unreadable)?;
    if bytes[OWNERSHIP] & OWNER == 0 {
        return Err(NoCommand::NotOwned(slot));
    }
    let refuse = |delivery| NoCommand::Refused { entry, delivery };
    if TYPE.get(&bytes) != PCIE_COMMAND {
        return Err(refuse(Delivery::Descriptor));
    }
    let in_len = INPUT_LENGTH.get(&bytes);
    let out_len = OUTPUT_LENGTH.get(&bytes);
    if !(MIN_LEN..=MAX_LEN).contains(&in_len) {
        return Err(refuse(Delivery::InputLength));
    }
    if !(MIN_LEN..=MAX_LEN).contains(&out_len) {
        return Err(refuse(Delivery::OutputLength));
    }
    let mut input = array::<IN_LINE>(&bytes, INPUT_INLINE).to_vec();
    let mut at = get64(&bytes, INPUT_MAILBOX);
    // What is shorter than the entry has room for ends in zeroes.
    let mut left = (in_len as usize).saturating_sub(IN_LINE);
    while left > 0 {
        if at % BLOCK as u64 != 0 {
            return Err(refuse(Delivery::InputAlignment));
        }
        let part = left.min(BLOCK);
        let (block, next) = read_block(at, part, memory).ok_or(refuse(Delivery::Internal))?;
        input.extend_from_slice(block.get(..part).unwrap_or_default());
        at = next;
        left -= part;
    }
    let output = get64(&bytes, OUTPUT_MAILBOX);
    if output % BLOCK as u64 != 0 && out_len as usize > IN_LINE {
        return Err(refuse(Delivery::OutputAlignment));
    }
    Ok(Command {
        slot,
        opcode: fields::header::OPCODE.get(&input) as u16,
        op_mod: fields::header::OP_MOD.get(&input) as u16,
        uid: fields::header::UID.get(&input) as u16,
        input,
        out_len,
        token: bytes[TOKEN],
        entry,
        out_mailbox: output,
    })
}

/// What an entry says of its command: the token, and whether the device owns it. `None`: it is not mapped.
pub(crate) fn look_at(queue: u64, slot: u8, memory: &DotView<'_>) -> Option<(u8, bool)> {
    let mut bytes = [0u8; ENTRY];
    let entry = queue.wrapping_add(u64::from(slot) * ENTRY as u64);
    memory.read_slice(&mut bytes, GuestAddress(entry)).ok()?;
    Some((bytes[TOKEN], bytes[OWNERSHIP] & OWNER != 0))
}

/// A mailbox's data and the next one's address.
fn read_block(at: u64, len: usize, memory: &DotView<'_>) -> Option<([u8; BLOCK], u64)> {
    let mut block = [0; BLOCK];
    let data = block.get_mut(..len)?;
    memory.read_slice(data, GuestAddress(at)).ok()?;
    Some((block, next_of(at, memory)?))
}

fn next_of(at: u64, memory: &DotView<'_>) -> Option<u64> {
    let next: u64 = memory
        .read_obj(GuestAddress(at.checked_add(NEXT as u64)?))
        .ok()?;
    Some(u64::from_be(next))
}

/// Stores a command's output, as much as the driver has room for, and gives the entry back.
///
/// Room that the output does not fill is zeroed. Mailboxes that are not mapped are reported as a
/// failed delivery; when the entry itself is not, nothing can be said.
pub fn finish_command(command: &Command, output: &[u8], memory: &DotView<'_>) {
    let delivery = match store(command, output, memory) {
        Some(()) => Delivery::Ok,
        None => Delivery::Internal,
    };
    give_back(command.entry, delivery, memory);
}

/// Tells the driver that its entry was refused.
pub fn refuse(why: NoCommand, memory: &DotView<'_>) {
    if let NoCommand::Refused { entry, delivery } = why {
        give_back(entry, delivery, memory);
    }
}

fn store(command: &Command, output: &[u8], memory: &DotView<'_>) -> Option<()> {
    let mut inline = [0; IN_LINE];
    put(&mut inline, 0, output);
    let at = command.entry.checked_add(OUTPUT_INLINE as u64)?;
    memory.write_slice(&inline, GuestAddress(at)).ok()?;

    let mut rest = output.get(IN_LINE..).unwrap_or_default();
    let mut at = command.out_mailbox;
    let mut left = (command.out_len as usize).saturating_sub(IN_LINE);
    while left > 0 {
        let part = left.min(BLOCK);
        let (now, later) = rest.split_at_checked(part).unwrap_or((rest, &[]));
        let mut block = [0; BLOCK];
        put(&mut block, 0, now);
        memory
            .write_slice(block.get(..part)?, GuestAddress(at))
            .ok()?;
        rest = later;
        left -= part;
        if left > 0 {
            at = next_of(at, memory)?;
        }
    }
    Some(())
}

/// The driver polls the ownership byte, so it comes last.
fn give_back(entry: u64, delivery: Delivery, memory: &DotView<'_>) {
    fence(Ordering::Release);
    let at = GuestAddress(entry.wrapping_add(OWNERSHIP as u64));
    // An entry that is not mapped any more has nobody who waits for it.
    let _ = memory.store((delivery as u8) << 1, at, Ordering::Release);
}
