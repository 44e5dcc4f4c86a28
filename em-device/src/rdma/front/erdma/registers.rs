//! BAR0 as the driver reads and writes it: registers, and pages of doorbells.
//!
//! It belongs to the thread that serves the VMM and never waits for the data path.

use super::bytes::{bits, u32_at, u64_at};
use crate::rdma::front::doorbells::Doorbells;
use std::sync::Arc;

/// Bytes of BAR0.
pub const BAR_BYTES: u64 = 0x8_0000;

/// Number in [`Doorbells`] of the queue of asynchronous events; those of completions are below, and that of commands
/// is 0.
pub(super) const AEQ: u32 = 32;
/// Number in [`Doorbells`] of the command queue's completion queue: no queue of the driver's has it.
pub(super) const COMMAND_CQ: u32 = 0;

/// Offsets of registers.
mod at {
    pub(super) const VERSION: u64 = 0x00;
    pub(super) const PROTOCOL: u64 = 0x0c;
    pub(super) const CONTROL: u64 = 0x10;
    pub(super) const STATUS: u64 = 0x14;
    pub(super) const MAC_LOW: u64 = 0x18;
    pub(super) const MAC_HIGH: u64 = 0x1c;
    pub(super) const COMMANDS: usize = 0x20;
    pub(super) const COMPLETIONS: usize = 0x28;
    pub(super) const DEPTH: usize = 0x30;
    pub(super) const EVENT_DEPTH: usize = 0x34;
    pub(super) const EVENTS: usize = 0x38;
    pub(super) const AEQ: usize = 0x40;
    pub(super) const AEQ_DEPTH: usize = 0x48;
    pub(super) const AEQ_DOORBELL: u64 = 0x50;
    pub(super) const COMPLETION_RECORD: usize = 0x68;
    pub(super) const WORDS_END: u64 = 0x80;
    pub(super) const EQ_DOORBELLS: std::ops::Range<u64> = 0x100..0x200;
    pub(super) const COMMAND_DOORBELL: u64 = 0x200;
    pub(super) const COMPLETION_DOORBELL: u64 = 0x300;
}

/// Where doorbells of queues are: 4-KiB pages from the BAR's beginning.
pub(super) mod page {
    use std::ops::Range;

    /// Of send queues.
    pub(crate) const SENDS: Range<u64> = 0x01..0x61;
    /// Of receive queues.
    pub(crate) const RECEIVES: Range<u64> = 0x61..0x79;
    /// Of completion queues.
    pub(crate) const COMPLETIONS: Range<u64> = 0x79..0x80;
}

/// What [`at::VERSION`] reads as.
const VERSION: u32 = 1;
/// Value of [`at::PROTOCOL`]: RoCEv2.
const ROCE_V2: u32 = 1;
/// Bits of [`at::CONTROL`] and of [`at::STATUS`].
const RESET: u32 = 1;
const INIT: u32 = 2;
/// In the doorbell of an event queue.
const ARM: u32 = 1 << 31;

/// What a write means for others than the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    None,
    /// The data path has doorbells to take.
    Kick,
    /// There are commands up to this block.
    Commands(u16),
    /// The driver begins, with these queues.
    Init(Setup),
    /// Forget the driver's objects, touch none of its memory.
    Reset,
}

/// The queues that the registers tell of: bus addresses, and entries or blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Setup {
    /// The ring of commands.
    pub commands: u64,
    /// Blocks of it, and entries of the ring of their completions.
    pub depth: u32,
    /// The ring of completions.
    pub completions: u64,
    /// The doorbell record of the completions.
    pub completion_record: u64,
    /// The queue of events of commands.
    pub events: u64,
    /// Its entries.
    pub event_depth: u32,
    /// The queue of asynchronous events.
    pub asynchronous: u64,
    /// Its entries.
    pub asynchronous_depth: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Registers {
    /// As the driver wrote them.
    words: [u8; at::WORDS_END as usize],
    status: u32,
    mac: [u8; 6],
    doorbells: Arc<Doorbells>,
}

impl Registers {
    /// Registers as after power-on, of a device with this MAC address.
    pub fn new(mac: [u8; 6], doorbells: Arc<Doorbells>) -> Self {
        Self {
            words: [0; at::WORDS_END as usize],
            status: 0,
            mac,
            doorbells,
        }
    }

    /// As after power-on.
    pub fn reset(&mut self) {
        self.words.fill(0);
        self.status = 0;
    }

    /// Whether a write there changes what [`Self::save`] answers.
    pub fn is_saved(offset: u64) -> bool {
        offset < at::WORDS_END
    }

    /// What another process needs to go on.
    pub fn save(&self) -> Vec<u8> {
        let status = self.status.to_le_bytes();
        self.words.iter().chain(&status).copied().collect()
    }

    /// Takes over what was saved. `false`: it makes no sense.
    pub fn restore(&mut self, saved: &[u8]) -> bool {
        let Some((words, status)) = saved.split_first_chunk() else {
            return false;
        };
        let Ok(status) = status.try_into() else {
            return false;
        };
        self.words = *words;
        self.status = u32::from_le_bytes(status);
        true
    }

    /// The queues, when a driver has begun.
    pub fn begun(&self) -> Option<Setup> {
        (self.status & INIT != 0).then(|| self.setup())
    }

    /// Reads bytes of BAR0. What is no register reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (at, byte) in (offset..at::WORDS_END).zip(data) {
            let word = self.word(at & !3).to_le_bytes();
            if let Some(value) = word.get((at & 3) as usize) {
                *byte = *value;
            }
        }
    }

    fn word(&self, offset: u64) -> u32 {
        let [a, b, c, d, e, f] = self.mac;
        match offset {
            at::VERSION => VERSION,
            at::PROTOCOL => ROCE_V2,
            at::STATUS => self.status,
            at::MAC_LOW => u32::from_be_bytes([c, d, e, f]),
            at::MAC_HIGH => u32::from_be_bytes([0, 0, a, b]),
            _ => 0,
        }
    }

    /// Writes bytes of BAR0: registers in words of 4 or 8 bytes, doorbells in such of 8. Others are ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Action {
        match data.len() {
            8 if offset % 8 == 0 => {}
            4 if offset % 4 == 0 && offset < at::WORDS_END => {}
            _ => return Action::None,
        }
        match offset {
            at::AEQ_DOORBELL => return self.ring_events(AEQ, data),
            at::CONTROL => return self.control(u32_at(data, 0)),
            0..at::WORDS_END => {
                let words = self.words.iter_mut().skip(offset as usize);
                words.zip(data).for_each(|(to, from)| *to = *from);
                return Action::None;
            }
            _ => {}
        }
        let value = u64_at(data, 0);
        let (low, high) = (value as u32, (value >> 32) as u32);
        match offset {
            at::COMMAND_DOORBELL => return Action::Commands(low as u16),
            at::COMPLETION_DOORBELL => {
                self.doorbells.ring_cq(COMMAND_CQ);
                return Action::Kick;
            }
            _ if at::EQ_DOORBELLS.contains(&offset) => {
                let number = (offset - at::EQ_DOORBELLS.start) / 8;
                return self.ring_events(number as u32, data);
            }
            _ => {}
        }
        let (page, bells) = (offset / 4096, &self.doorbells);
        if page::SENDS.contains(&page) {
            bells.ring_send(bits(high, 0..=19));
        } else if page::RECEIVES.contains(&page) {
            bells.ring_receive(bits(high, 0..=19));
        } else if page::COMPLETIONS.contains(&page) && bits(high, 0..=23) != COMMAND_CQ {
            bells.ring_cq(bits(high, 0..=23));
        } else {
            return Action::None;
        }
        Action::Kick
    }

    fn ring_events(&self, number: u32, data: &[u8]) -> Action {
        let word = u32_at(data, 0);
        self.doorbells
            .update_eq(number, bits(word, 0..=23), word & ARM != 0);
        Action::Kick
    }

    fn control(&mut self, value: u32) -> Action {
        if value & RESET != 0 {
            self.words.fill(0);
            self.status = RESET;
            return Action::Reset;
        }
        if value & INIT == 0 {
            return Action::None;
        }
        self.status |= INIT;
        Action::Init(self.setup())
    }

    fn setup(&self) -> Setup {
        let word = |at| u32_at(&self.words, at);
        // The low half comes first in these.
        let long = |at| u64_at(&self.words, at);
        Setup {
            commands: long(at::COMMANDS),
            depth: word(at::DEPTH),
            completions: long(at::COMPLETIONS),
            completion_record: long(at::COMPLETION_RECORD),
            events: long(at::EVENTS),
            event_depth: word(at::EVENT_DEPTH),
            asynchronous: long(at::AEQ),
            asynchronous_depth: word(at::AEQ_DEPTH),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> (Registers, Arc<Doorbells>) {
        let doorbells = Arc::new(Doorbells::default());
        let registers = Registers::new([2, 0x11, 0x22, 0x33, 0x44, 0x55], doorbells.clone());
        (registers, doorbells)
    }

    fn word(registers: &Registers, at: u64) -> u32 {
        let mut bytes = [0; 4];
        registers.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn the_driver_reads_version_protocol_and_mac_address() {
        let (registers, _) = registers();
        assert_ne!(word(&registers, 0), 0);
        assert_eq!(word(&registers, 0xc), 1, "RoCEv2");
        assert_eq!(word(&registers, 0x18), 0x2233_4455);
        assert_eq!(word(&registers, 0x1c), 0x0211);
        assert_eq!(word(&registers, 0x20), 0);
        registers.read(BAR_BYTES - 4, &mut [0; 8]);
    }

    #[test]
    fn initialization_takes_what_was_written_and_a_reset_forgets_it() {
        let (mut registers, _) = registers();
        let words = [
            (0x20, 0x1000),
            (0x24, 1),
            (0x28, 0x2000),
            (0x30, 512),
            (0x34, 128),
            (0x38, 0x3000),
            (0x40, 0x4000),
            (0x44, 2),
            (0x48, 4096),
        ];
        for (at, value) in words {
            let written = registers.write(at, &u32::to_le_bytes(value));
            assert_eq!(written, Action::None);
        }
        registers.write(0x68, &0x9_8765_4320u64.to_le_bytes());
        let setup = Setup {
            commands: 0x1_0000_1000,
            depth: 512,
            completions: 0x2000,
            completion_record: 0x9_8765_4320,
            events: 0x3000,
            event_depth: 128,
            asynchronous: 0x2_0000_4000,
            asynchronous_depth: 4096,
        };
        let init = |r: &mut Registers| r.write(0x10, &[2, 0, 0, 0]);
        assert_eq!(init(&mut registers), Action::Init(setup));
        assert_eq!(word(&registers, 0x14), 2);
        assert_eq!(registers.write(0x10, &[1, 0, 0, 0]), Action::Reset);
        assert_eq!(word(&registers, 0x14), 1);
        assert_eq!(init(&mut registers), Action::Init(Setup::default()));
    }

    #[test]
    fn doorbells_name_their_queue_in_the_value() {
        let (mut registers, bells) = registers();
        let mut ring = |at, value: u64| registers.write(at, &value.to_le_bytes());
        assert_eq!(ring(0x200, 0xf_0010), Action::Commands(0x10));
        assert_eq!(ring(0x5f000, 5 << 32 | 8), Action::Kick);
        assert_eq!(ring(0x1008, 6 << 32), Action::Kick);
        assert_eq!(ring(0x61000, 7 << 32), Action::Kick);
        assert_eq!(ring(0x79000, 0xff00_0008_8000_0000), Action::Kick);
        assert_eq!(ring(0x7f000, 0), Action::None, "the command queue's");
        assert_eq!(ring(0x300, 0), Action::Kick);
        assert_eq!(ring(0x100, 1 << 31 | 3), Action::Kick);
        assert_eq!(ring(0x108, 4), Action::Kick);
        assert_eq!(ring(0x50, 1 << 31 | 5), Action::Kick);
        assert_eq!(ring(0x400, 1), Action::None);
        let mut taken = Vec::new();
        bells.take_sends(|n| taken.push(n));
        bells.take_receives(|n| taken.push(n));
        bells.take_cqs(|n| taken.push(n));
        assert_eq!(taken, [5, 6, 7, 0, 8]);
        let mut events = Vec::new();
        bells.take_eqs(|eq, index, arm| events.push((eq, index, arm)));
        assert_eq!(events, [(0, 3, true), (1, 4, false), (AEQ, 5, true)]);
    }

    #[test]
    fn odd_accesses_do_nothing() {
        let (mut registers, bells) = registers();
        for (at, len) in [
            (0x10, 1),
            (0x12, 4),
            (0x200, 4),
            (0x5f004, 8),
            (0x5f000, 16),
        ] {
            assert_eq!(
                registers.write(at, &vec![0xff; len]),
                Action::None,
                "{at:#x}"
            );
        }
        assert_eq!(registers.write(u64::MAX - 7, &[0xff; 8]), Action::None);
        assert!(!bells.is_rung());
    }
}
