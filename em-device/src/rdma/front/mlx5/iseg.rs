//! The initialization segment: the first 8 KiB of BAR0 (`mlx5_ifc`: initial_seg).

use crate::virtio::saved::Fields;
use std::time::{Duration, Instant};

/// Bytes of the segment that are not zero somewhere; the rest of BAR0's first page pair reads as 0.
pub(crate) const LEN: u64 = 0x2000;
/// Offset of the command doorbell.
pub(crate) const CMD_DOORBELL: u64 = 0x18;

/// fw_rev_minor, fw_rev_major.
const FW_REV: u64 = 0x0;
/// cmd_interface_rev, fw_rev_subminor.
const CMDIF_REV: u64 = 0x4;
/// cmdq_phy_addr, upper half.
const CMDQ_HIGH: u64 = 0x10;
/// cmdq_phy_addr (20 bits), nic_interface (2 + 1 bits), log_cmdq_size, log_cmdq_stride.
const CMDQ_LOW: u64 = 0x14;
/// health_buffer.fw_ver; all ones would say that the device is gone.
const HEALTH_FW_VER: u64 = 0x230;
/// Free running counter, upper and lower half.
const CLOCK: [u64; 2] = [0x1000, 0x1004];
/// health_counter.
const HEALTH_COUNTER: u64 = 0x1010;

/// Revision of the command interface that drivers know.
const COMMAND_INTERFACE: u32 = 5;
/// Firmware version: 16.99.1 says to a driver's reports that this is nobody's firmware.
const FIRMWARE: (u32, u32, u32) = (16, 99, 1);
/// log₂ of command queue entries (5: the most that drivers take), and of an entry's bytes.
const LOG_ENTRIES: u32 = 5;
const LOG_STRIDE: u32 = 6;
/// The health counter's step; drivers look every two seconds or less often.
const HEALTH_STEP: Duration = Duration::from_millis(100);

/// Bytes of a saved segment.
pub(crate) const SAVED: usize = 20;

/// Nanoseconds of the host's clock, the same in all processes.
fn host_time() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(now.tv_nsec as u64)
}

/// NIC interface state (nic_interface).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nic {
    /// The driver works with it.
    Full,
    /// Not in use.
    Disabled,
}

/// What a write asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// The driver lets go of the device.
    Disable,
    /// The driver wants it as new.
    Reset,
}

/// The segment's registers.
#[derive(Debug)]
pub(crate) struct Segment {
    started: Instant,
    high: u32,
    low: u32,
    nic: Nic,
}

impl Segment {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            started: now,
            high: 0,
            low: 0,
            nic: Nic::Full,
        }
    }

    /// Bus address of the command queue, when the driver gave one and uses the device.
    pub(crate) fn command_queue(&self) -> Option<u64> {
        let address = u64::from(self.high) << 32 | u64::from(self.low);
        (self.nic == Nic::Full && address != 0).then_some(address)
    }

    /// As bytes, little endian: when its time began by the clock of the host, what the driver wrote, whether it is
    /// disabled. Part of the layout of the function's state.
    pub(crate) fn to_bytes(&self) -> [u8; SAVED] {
        let began = host_time().saturating_sub(self.started.elapsed().as_nanos() as u64);
        let nic = u32::from(self.nic == Nic::Disabled);
        let mut bytes = [0; SAVED];
        let words = [self.high, self.low, nic].into_iter();
        let all = began
            .to_le_bytes()
            .into_iter()
            .chain(words.flat_map(u32::to_le_bytes));
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        bytes
    }

    /// From bytes; `None` when they are not of this layout.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let began = fields.long()?;
        let (high, low, nic) = (fields.word()?, fields.word()?, fields.word()?);
        let age = Duration::from_nanos(host_time().saturating_sub(began));
        let now = Instant::now();
        let nic = match nic {
            0 => Nic::Full,
            _ => Nic::Disabled,
        };
        fields.0.is_empty().then_some(Self {
            started: now.checked_sub(age).unwrap_or(now),
            high,
            low,
            nic,
        })
    }

    /// Forgets what the driver wrote.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.started);
    }

    /// The dword at an offset.
    pub(crate) fn read(&self, offset: u64, now: Instant) -> u32 {
        let (major, minor, subminor) = FIRMWARE;
        let nic = match self.nic {
            Nic::Full => 0,
            Nic::Disabled => 1,
        };
        let passed = now.saturating_duration_since(self.started);
        // 1 ns is one tick, as device_frequency_khz says.
        let clock = passed.as_nanos() as u64;
        match offset {
            FW_REV => minor << 16 | major,
            CMDIF_REV => COMMAND_INTERFACE << 16 | subminor,
            CMDQ_HIGH => self.high,
            CMDQ_LOW => self.low | nic << 8 | LOG_ENTRIES << 4 | LOG_STRIDE,
            HEALTH_FW_VER => major << 24 | minor << 16 | subminor,
            HEALTH_COUNTER => (passed.as_millis() / HEALTH_STEP.as_millis()) as u32 + 1,
            _ if offset == CLOCK[0] => (clock >> 32) as u32,
            _ if offset == CLOCK[1] => clock as u32,
            // Among them `initializing`, the health buffer's syndromes and the timeouts: all well,
            // and the driver's defaults.
            _ => 0,
        }
    }

    /// Stores a dword.
    pub(crate) fn write(&mut self, offset: u64, value: u32) -> Change {
        match offset {
            CMDQ_HIGH => self.high = value,
            CMDQ_LOW => {
                self.low = value & 0xffff_f000;
                match value >> 8 & 7 {
                    0 => self.nic = Nic::Full,
                    // Both report `disabled`: it is what a driver waits for after a reset.
                    1 => {
                        self.nic = Nic::Disabled;
                        return Change::Disable;
                    }
                    7 => {
                        self.nic = Nic::Disabled;
                        return Change::Reset;
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        Change::None
    }
}
