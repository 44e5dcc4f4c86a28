//! PCI configuration space: a block of bytes with write masks.
//!
//! Source: PCI Local Bus 3.0 §6.1–6.2 (header, BAR sizing, capabilities), PCI Express Base 4.0 §7.5.

mod builder;

pub use builder::{BarKind, BarSpec, Capability, ConfigBuilder, ConfigError};

/// Bytes of a PCI Express function's configuration space.
pub const CONFIG_SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASK_ALL: u16 = 1 << 14;
const DEVCTL_FLR: u16 = 1 << 15;

/// What of configuration space matters to the data side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConfigState {
    /// The function may do DMA (command register bit 2).
    pub bus_master: bool,
    /// Memory BARs decode (command register bit 1).
    pub memory: bool,
    /// INTx is disabled (command register bit 10).
    pub intx_disabled: bool,
    /// MSI-X is enabled.
    pub msix_enabled: bool,
    /// All MSI-X vectors are masked.
    pub msix_masked: bool,
    /// The write asked for a function-level reset; true only in the answer to that write.
    pub flr: bool,
}

impl ConfigState {
    /// One bit per field, in the order of the fields; fits a 4-byte register completion.
    pub fn to_bits(self) -> u32 {
        [
            self.bus_master,
            self.memory,
            self.intx_disabled,
            self.msix_enabled,
            self.msix_masked,
            self.flr,
        ]
        .into_iter()
        .enumerate()
        .fold(0, |bits, (i, set)| bits | u32::from(set) << i)
    }

    /// Reverse of [`Self::to_bits`]; bits without a meaning are ignored.
    pub fn from_bits(bits: u32) -> Self {
        let bit = |i: u32| bits >> i & 1 == 1;
        Self {
            bus_master: bit(0),
            memory: bit(1),
            intx_disabled: bit(2),
            msix_enabled: bit(3),
            msix_masked: bit(4),
            flr: bit(5),
        }
    }
}

/// Configuration space of one function. Made by [`ConfigBuilder`].
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: Vec<u8>,
    /// Values after power-on. Zeros follow, as in the two below.
    initial: Vec<u8>,
    /// Bits that a write changes.
    writable: Vec<u8>,
    /// Bits that a write of one clears.
    clears: Vec<u8>,
    msix: Option<usize>,
    pcie: Option<usize>,
}

impl ConfigSpace {
    /// Reads as a bus would: bytes past the end are ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = usize::try_from(offset).ok().and_then(|o| o.checked_add(i));
            *byte = at
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Writes through the masks; bytes past the end are dropped. Writing ones to a BAR and reading it back
    /// gives its size.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> ConfigState {
        let mut flr = false;
        for (i, &value) in data.iter().enumerate() {
            let Some(at) = usize::try_from(offset).ok().and_then(|o| o.checked_add(i)) else {
                break;
            };
            let Some(byte) = self.bytes.get_mut(at) else {
                break;
            };
            let [mask, clears] =
                [&self.writable, &self.clears].map(|bits| bits.get(at).copied().unwrap_or(0));
            *byte = (*byte & !mask | value & mask) & !(value & clears);
            // Initiate Function Level Reset: the top bit of Device Control, always read as zero.
            flr |= self.pcie.is_some_and(|cap| at == cap + 9)
                && u16::from(value) << 8 & DEVCTL_FLR != 0;
        }
        ConfigState {
            flr,
            ..self.state()
        }
    }

    /// Back to the values after power-on.
    pub fn reset(&mut self) -> ConfigState {
        let initial = self.initial.iter().copied().chain(std::iter::repeat(0));
        let bytes = self.bytes.iter_mut().zip(initial);
        bytes.for_each(|(byte, initial)| *byte = initial);
        self.state()
    }

    /// Takes what may be written from another space of the same function.
    pub fn restore(&mut self, bytes: &[u8]) {
        for ((byte, mask), from) in self.bytes.iter_mut().zip(&self.writable).zip(bytes) {
            *byte = *byte & !mask | from & mask;
        }
    }

    /// What matters to the data side.
    pub fn state(&self) -> ConfigState {
        let command = self.word(COMMAND);
        let msix = self.msix.map_or(0, |cap| self.word(cap + 2));
        ConfigState {
            bus_master: command & COMMAND_BUS_MASTER != 0,
            memory: command & COMMAND_MEMORY != 0,
            intx_disabled: command & COMMAND_INTX_DISABLE != 0,
            msix_enabled: msix & MSIX_ENABLE != 0,
            msix_masked: msix & MSIX_MASK_ALL != 0,
            flr: false,
        }
    }

    /// All bytes, for the shadow.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn word(&self, at: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(at as u64, &mut bytes);
        u16::from_le_bytes(bytes)
    }
}

#[cfg(test)]
mod tests;
