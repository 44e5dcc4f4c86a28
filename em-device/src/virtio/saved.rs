//! Registers of a device as bytes, for a process that takes the place of this one.
//!
//! Numbers are little endian. The layout is part of [`smartep::state::VERSION`]:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | driver features |
//! | 8..12, 12..16 | selectors of device and driver features |
//! | 16 | device status, as the driver wrote it |
//! | 17 | generation of the device configuration |
//! | 18..20 | selected queue |
//! | 20..22 | vector of configuration changes |
//! | 22..24 | number of queues |
//! | then for each queue: 0..8, 8..16, 16..24 | descriptor table, available ring, used ring |
//! | 24..26, 26..28, 28..30 | size, vector, 1 when enabled |

use super::common::QueueSetup;

/// What [`super::common::CommonConfig`] holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedRegisters {
    /// Features the driver accepted.
    pub driver_features: u64,
    /// `device_feature_select`.
    pub device_feature_select: u32,
    /// `driver_feature_select`.
    pub driver_feature_select: u32,
    /// `device_status` without DEVICE_NEEDS_RESET.
    pub status: u8,
    /// `config_generation`.
    pub generation: u8,
    /// `queue_select`.
    pub queue_select: u16,
    /// `config_msix_vector`.
    pub config_vector: u16,
    /// The queues with their vectors.
    pub queues: Vec<(QueueSetup, u16)>,
}

impl SavedRegisters {
    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24 + 30 * self.queues.len());
        bytes.extend(self.driver_features.to_le_bytes());
        bytes.extend(self.device_feature_select.to_le_bytes());
        bytes.extend(self.driver_feature_select.to_le_bytes());
        bytes.extend([self.status, self.generation]);
        bytes.extend(self.queue_select.to_le_bytes());
        bytes.extend(self.config_vector.to_le_bytes());
        bytes.extend((self.queues.len() as u16).to_le_bytes());
        for (queue, vector) in &self.queues {
            for address in [queue.desc, queue.avail, queue.used] {
                bytes.extend(address.to_le_bytes());
            }
            for half in [queue.size, *vector, u16::from(queue.enabled)] {
                bytes.extend(half.to_le_bytes());
            }
        }
        bytes
    }

    /// From bytes; `None` when they are not of this layout.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let mut saved = Self {
            driver_features: fields.long()?,
            device_feature_select: fields.word()?,
            driver_feature_select: fields.word()?,
            status: fields.byte()?,
            generation: fields.byte()?,
            queue_select: fields.half()?,
            config_vector: fields.half()?,
            queues: Vec::new(),
        };
        for _ in 0..fields.half()? {
            let (desc, avail, used) = (fields.long()?, fields.long()?, fields.long()?);
            let (size, vector, enabled) = (fields.half()?, fields.half()?, fields.half()? != 0);
            let setup = QueueSetup {
                size,
                enabled,
                desc,
                avail,
                used,
            };
            saved.queues.push((setup, vector));
        }
        fields.0.is_empty().then_some(saved)
    }
}

/// Reads numbers one after the other.
#[derive(Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next bytes.
    pub fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take()
    }

    /// The next byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    /// The next 2 bytes.
    pub fn half(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    /// The next 4 bytes.
    pub fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// The next 8 bytes.
    pub fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_survive_their_bytes_and_part_of_them_is_nothing() {
        let queue = |n: u64| {
            let setup = QueueSetup {
                size: 256,
                enabled: n % 2 == 0,
                desc: n << 32 | 0x1000,
                avail: n << 32 | 0x2000,
                used: n << 32 | 0x3000,
            };
            (setup, n as u16)
        };
        let saved = SavedRegisters {
            driver_features: 0x1_3000_ffff_0001,
            device_feature_select: 1,
            driver_feature_select: 0xffff_ffff,
            status: 15,
            generation: 9,
            queue_select: 65,
            config_vector: 0xffff,
            queues: (0..65).map(queue).collect(),
        };
        let bytes = saved.to_bytes();
        assert!(bytes.len() < smartep::state::SECTION_BYTES);
        assert_eq!(SavedRegisters::from_bytes(&bytes), Some(saved));
        for len in 0..bytes.len() {
            assert_eq!(SavedRegisters::from_bytes(&bytes[..len]), None);
        }
        assert_eq!(
            SavedRegisters::from_bytes(&[&bytes[..], &[0]].concat()),
            None
        );
    }
}
