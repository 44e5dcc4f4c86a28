//! BAR0 as the driver reads and writes it: initialization segment and doorbell pages.
//!
//! It belongs to the thread that serves the VMM and never waits for the data path.

use super::doorbells::Doorbells;
use super::iseg::{self, Change, Segment};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a doorbell page (UAR); page k is at k times this in BAR0.
pub(crate) const UAR_BYTES: u64 = 4096;
/// The first page that is given out: those below are the initialization segment and the MSI-X table.
pub(crate) const FIRST_UAR: u32 = 8;
/// Bytes of BAR0.
pub const BAR_BYTES: u64 = 16 << 20;

/// Places in a doorbell page (`mlx5_ifc`: uar_page layout of the reference manual).
mod page {
    /// Second dword of a CQ's doorbell: its number. The first, the arm word, is read from memory.
    pub(super) const CQ_NUMBER: u64 = 0x24;
    /// EQ number and consumer index, and arm.
    pub(super) const EQ_ARM: u64 = 0x40;
    /// EQ number and consumer index.
    pub(super) const EQ_INDEX: u64 = 0x48;
    /// Send doorbells: a buffer each 256 bytes, of which the first 8 are the doorbell. Drivers use two
    /// of each queue in turn.
    pub(super) const SENDS: std::ops::Range<u64> = 0x800..0x1000;
    pub(super) const SEND_STRIDE: u64 = 0x100;
    /// Second dword of a send's control segment: the queue's number and the entry's size.
    pub(super) const SEND_NUMBER: u64 = 4;
}

/// What a write means for others than the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    None,
    /// The data path has doorbells to take.
    Kick,
    /// The command queue's entries of these bits are to be executed.
    Command(u32),
    /// The driver lets go of the device: forget its objects, touch none of its memory.
    Disable,
    /// As [`Self::Disable`]; the driver will begin anew.
    Reset,
}

/// See the module.
#[derive(Debug)]
pub struct Registers {
    segment: Segment,
    doorbells: Arc<Doorbells>,
}

impl Registers {
    /// Registers as after power-on.
    pub fn new(doorbells: Arc<Doorbells>, now: Instant) -> Self {
        Self {
            segment: Segment::new(now),
            doorbells,
        }
    }

    /// Bus address of the command queue, when the driver gave one and uses the device.
    pub fn command_queue(&self) -> Option<u64> {
        self.segment.command_queue()
    }

    /// As after power-on.
    pub fn reset(&mut self) {
        self.segment.reset();
    }

    /// Whether a write there changes what [`Self::save`] answers.
    pub fn is_saved(offset: u64) -> bool {
        offset < iseg::LEN && offset != iseg::CMD_DOORBELL
    }

    /// What another process needs to go on.
    pub fn save(&self) -> Vec<u8> {
        self.segment.to_bytes().to_vec()
    }

    /// Takes over what was saved. `false`: it makes no sense.
    pub fn restore(&mut self, saved: &[u8]) -> bool {
        let segment = Segment::from_bytes(saved);
        let known = segment.is_some();
        if let Some(segment) = segment {
            self.segment = segment;
        }
        known
    }

    /// Reads any bytes of BAR0. Doorbell pages, the places of the MSI-X table and everything beyond
    /// read as 0.
    pub fn read(&self, offset: u64, data: &mut [u8], now: Instant) {
        data.fill(0);
        for (at, byte) in (offset..iseg::LEN).zip(data) {
            let dword = self.segment.read(at & !3, now).to_be_bytes();
            if let Some(value) = dword.get((at & 3) as usize) {
                *byte = *value;
            }
        }
    }

    /// Writes bytes of BAR0: whole dwords, as drivers do. Others are ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Action {
        let mut action = Action::None;
        if offset % 4 != 0 {
            return action;
        }
        for (at, dword) in (offset..BAR_BYTES).step_by(4).zip(data.chunks(4)) {
            let Ok(dword) = <[u8; 4]>::try_from(dword) else {
                break;
            };
            let new = self.write_dword(at, u32::from_be_bytes(dword));
            action = combine(action, new);
        }
        action
    }

    fn write_dword(&mut self, offset: u64, value: u32) -> Action {
        if offset == iseg::CMD_DOORBELL {
            return match self.command_queue() {
                Some(_) => Action::Command(value),
                None => Action::None,
            };
        }
        if offset < iseg::LEN {
            return match self.segment.write(offset, value) {
                Change::None => Action::None,
                Change::Disable => Action::Disable,
                Change::Reset => Action::Reset,
            };
        }
        if offset < u64::from(FIRST_UAR) * UAR_BYTES {
            return Action::None;
        }
        match ring(&self.doorbells, offset % UAR_BYTES, value) {
            true => Action::Kick,
            false => Action::None,
        }
    }
}

/// A dword is written at an offset in a doorbell page. Answers whether that is a doorbell.
pub(super) fn ring(doorbells: &Doorbells, offset: u64, value: u32) -> bool {
    match offset {
        page::CQ_NUMBER => doorbells.ring_cq(value & 0xff_ffff),
        page::EQ_ARM | page::EQ_INDEX => {
            let arm = offset == page::EQ_ARM;
            doorbells.update_eq(value >> 24, value, arm);
        }
        _ if page::SENDS.contains(&offset) && offset % page::SEND_STRIDE == page::SEND_NUMBER => {
            doorbells.ring_send(value >> 8);
        }
        _ => return false,
    }
    true
}

/// What a write of several dwords means.
fn combine(old: Action, new: Action) -> Action {
    match (old, new) {
        (Action::Command(a), Action::Command(b)) => Action::Command(a | b),
        (_, Action::Reset | Action::Disable | Action::Command(_)) => new,
        (Action::None, _) => new,
        _ => old,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn registers() -> (Registers, Arc<Doorbells>, Instant) {
        let doorbells = Arc::new(Doorbells::default());
        let now = Instant::now();
        (Registers::new(doorbells.clone(), now), doorbells, now)
    }

    fn dword(registers: &Registers, offset: u64, now: Instant) -> u32 {
        let mut bytes = [0; 4];
        registers.read(offset, &mut bytes, now);
        u32::from_be_bytes(bytes)
    }

    fn sends(doorbells: &Doorbells) -> Vec<u32> {
        let mut taken = Vec::new();
        doorbells.take_sends(|number| taken.push(number));
        taken
    }

    #[test]
    fn the_segment_says_what_a_driver_needs_to_begin() {
        let (registers, _, now) = registers();
        assert_eq!(dword(&registers, 4, now) >> 16, 5);
        assert_eq!(dword(&registers, 0x14, now) & 0xfff, 0x056);
        assert_eq!(dword(&registers, 0x1fc, now), 0);
        assert_ne!(dword(&registers, 0x230, now), u32::MAX);
        assert_eq!(dword(&registers, 0x23c, now), 0);
        let mut wide = [0xff; 8];
        registers.read(0x2000, &mut wide, now);
        assert_eq!(wide, [0; 8]);
    }

    #[test]
    fn nothing_is_beyond_the_end() {
        let (mut registers, doorbells, now) = registers();
        for offset in [BAR_BYTES - 4, BAR_BYTES, u64::MAX - 3] {
            let mut bytes = [0xff; 64];
            registers.read(offset, &mut bytes, now);
            assert_eq!(bytes, [0; 64]);
            assert_eq!(registers.write(offset, &[1; 64]), Action::None);
        }
        assert!(!doorbells.is_rung());
    }

    #[test]
    fn the_health_counter_moves_with_time() {
        let (registers, _, now) = registers();
        let first = dword(&registers, 0x1010, now);
        let later = dword(&registers, 0x1010, now + Duration::from_secs(1));
        assert!(first != 0 && later > first);
    }

    #[test]
    fn the_command_doorbell_works_when_the_queue_is_known() {
        let (mut registers, _, _) = registers();
        assert_eq!(
            registers.write(0x18, &[0x80, 0, 0, 1]),
            Action::None,
            "no queue yet"
        );
        registers.write(0x10, &[0, 0, 0, 1]);
        registers.write(0x14, &[0x12, 0x34, 0x50, 0]);
        assert_eq!(registers.command_queue(), Some(0x1_1234_5000));
        let action = registers.write(0x18, &[0x80, 0, 0, 1]);
        assert_eq!(action, Action::Command(0x8000_0001));
    }

    #[test]
    fn a_driver_that_disables_or_resets_finds_the_device_disabled() {
        let (mut registers, _, now) = registers();
        for (state, action) in [(1u32, Action::Disable), (7, Action::Reset)] {
            registers.write(0x14, &0x5000u32.to_be_bytes());
            assert!(registers.command_queue().is_some());
            let value = 0x5000 | state << 8;
            assert_eq!(registers.write(0x14, &value.to_be_bytes()), action);
            assert_eq!(dword(&registers, 0x14, now) >> 8 & 7, 1);
            assert_eq!(registers.command_queue(), None);
        }
    }

    #[test]
    fn a_send_doorbell_counts_as_one_store_or_two() {
        let (mut registers, doorbells, _) = registers();
        let uar = 9 * 4096;
        let bytes = [0, 0, 1, 0x0a, 0, 0, 0x42, 3];
        assert_eq!(registers.write(uar + 0x800, &bytes), Action::Kick);
        assert_eq!(sends(&doorbells), [0x42]);
        assert_eq!(registers.write(uar + 0xa00, &bytes[..4]), Action::None);
        assert_eq!(registers.write(uar + 0xa04, &bytes[4..]), Action::Kick);
        assert_eq!(sends(&doorbells), [0x42]);
        let mut blue_flame = [0; 64];
        blue_flame[..8].copy_from_slice(&bytes);
        assert_eq!(registers.write(uar + 0x900, &blue_flame), Action::Kick);
        assert_eq!(sends(&doorbells), [0x42]);
    }

    #[test]
    fn cq_and_eq_doorbells_reach_their_queues() {
        let (mut registers, doorbells, _) = registers();
        let uar = 8 * 4096;
        assert_eq!(
            registers.write(uar + 0x20, &[0x10, 0, 0, 7, 0, 0, 0, 5]),
            Action::Kick
        );
        let mut cqs = Vec::new();
        doorbells.take_cqs(|number| cqs.push(number));
        assert_eq!(cqs, [5]);
        registers.write(uar + 0x48, &[2, 0, 0, 9]);
        registers.write(uar + 0x40, &[3, 0, 1, 0]);
        let mut eqs = Vec::new();
        doorbells.take_eqs(|eq, index, arm| eqs.push((eq, index, arm)));
        assert_eq!(eqs, [(2, 9, false), (3, 256, true)]);
    }

    #[test]
    fn writes_elsewhere_and_of_odd_sizes_do_nothing() {
        let (mut registers, doorbells, _) = registers();
        let all = [0xff; 64];
        for offset in [0x2000, 0x3000, 0x7800, BAR_BYTES + 0x800, u64::MAX - 64] {
            assert_eq!(registers.write(offset, &all), Action::None, "{offset:#x}");
        }
        assert_eq!(registers.write(8 * 4096 + 0x801, &all), Action::None);
        assert_eq!(registers.write(8 * 4096 + 0x804, &all[..3]), Action::None);
        assert!(!doorbells.is_rung());
    }
}
