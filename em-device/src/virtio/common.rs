//! The common configuration registers (virtio 1.3 §4.1.4.3) as a state machine.
//!
//! [`CommonConfig`] keeps what the driver wrote and says what is to be done ([`Action`]); it does
//! nothing itself.

use super::saved::SavedRegisters;
use super::signals::Signals;
use super::{NO_VECTOR, feature, status};
use std::sync::Arc;

/// Bytes of the structure, with `queue_notif_config_data` and `queue_reset`.
pub const COMMON_BYTES: usize = 0x40;

/// Offsets of the registers.
mod at {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const CONFIG_VECTOR: u64 = 0x10;
    pub(super) const DEVICE_STATUS: u64 = 0x14;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_VECTOR: u64 = 0x1a;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DRIVER: u64 = 0x28;
    pub(super) const QUEUE_DEVICE: u64 = 0x30;
    pub(super) const QUEUE_END: u64 = 0x38;
    pub(super) const QUEUE_RESET: u64 = 0x3a;
}

/// What the device offers, fixed for its life.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    /// Feature bits.
    pub features: u64,
    /// Queues.
    pub queues: u16,
    /// Largest size of a queue, a power of two up to 32768.
    pub queue_size: u16,
    /// MSI-X vectors.
    pub vectors: u16,
    /// Whether a subset of the offered features can work; what the bits need of each other.
    pub acceptable: fn(u64) -> bool,
}

/// A queue as the driver set it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSetup {
    /// Entries, at most 32768; a power of two in the split layout.
    pub size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Guest address of the descriptor table or ring, 16-byte aligned when enabled.
    pub desc: u64,
    /// Guest address of the available ring, 2-byte aligned when enabled, or of the driver's events, 4-byte aligned.
    pub avail: u64,
    /// Guest address of the used ring or of the device's events, 4-byte aligned when enabled.
    pub used: u64,
}

impl QueueSetup {
    fn new(size: u16) -> Self {
        Self {
            size,
            enabled: false,
            desc: 0,
            avail: 0,
            used: 0,
        }
    }

    /// Alignment as in virtio 1.3 §2.7 and §2.8. A ring at address 0 is one that was not set.
    fn can_be_enabled(&self, packed: bool) -> bool {
        self.desc % 16 == 0
            && self.avail % if packed { 4 } else { 2 } == 0
            && self.used % 4 == 0
            && self.avail != 0
            && self.used != 0
    }
}

/// What a write asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing more than what was kept.
    None,
    /// Stop all and call [`CommonConfig::reset`] when the data path is quiet.
    Reset,
    /// The driver is ready: start the queues.
    Start,
    /// Stop this queue and call [`CommonConfig::reset_queue`] when the data path has let go of it.
    ResetQueue(u16),
    /// Start this queue, which was reset.
    StartQueue(u16),
}

/// Whether a queue may have so many entries.
fn is_size(size: u16, max: u16, features: u64) -> bool {
    let any = features & feature::RING_PACKED != 0;
    size != 0 && size <= max && (any || size.is_power_of_two())
}

/// The registers of one device.
#[derive(Debug)]
pub struct CommonConfig {
    offer: Offer,
    signals: Arc<Signals>,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueSetup>,
}

impl CommonConfig {
    /// As after power-on.
    pub fn new(offer: Offer, signals: Arc<Signals>) -> Self {
        Self {
            offer,
            signals,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            status: 0,
            queue_select: 0,
            queues: vec![QueueSetup::new(offer.queue_size); usize::from(offer.queues)],
        }
    }

    /// Back to the state after power-on; the data path must have let go of the queues.
    pub fn reset(&mut self) {
        self.signals.reset();
        *self = Self::new(self.offer, self.signals.clone());
    }

    /// A queue as after power-on (virtio 1.3 §2.6.1); the data path must have let go of it. `queue_reset` never reads
    /// as 1: the write is done when this is.
    pub fn reset_queue(&mut self, index: u16) {
        self.signals.set_queue_vector(index, NO_VECTOR);
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            *queue = QueueSetup::new(self.offer.queue_size);
        }
    }

    /// All registers, for another process.
    pub fn save(&self) -> SavedRegisters {
        let queues = (0..).zip(&self.queues);
        SavedRegisters {
            driver_features: self.driver_features,
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            status: self.status,
            generation: self.signals.config_generation(),
            queue_select: self.queue_select,
            config_vector: self.signals.config_vector(),
            queues: queues
                .map(|(index, queue)| (*queue, self.signals.queue_vector(index)))
                .collect(),
        }
    }

    /// Takes registers that another process saved. `false`, and nothing changes, when they are those of another
    /// device.
    pub fn restore(&mut self, saved: &SavedRegisters) -> bool {
        let fits = |(queue, _): &(QueueSetup, u16)| {
            is_size(queue.size, self.offer.queue_size, saved.driver_features)
        };
        let known = saved.driver_features & !self.offer.features == 0;
        if saved.queues.len() != self.queues.len() || !saved.queues.iter().all(fits) || !known {
            return false;
        }
        self.driver_features = saved.driver_features;
        self.device_feature_select = saved.device_feature_select;
        self.driver_feature_select = saved.driver_feature_select;
        self.status = saved.status;
        self.queue_select = saved.queue_select;
        self.signals
            .set_config_vector(self.vector(saved.config_vector));
        self.signals.set_config_generation(saved.generation);
        for (index, (queue, vector)) in (0..).zip(&saved.queues) {
            let vector = self.vector(*vector);
            self.signals.set_queue_vector(index, vector);
            if let Some(place) = self.queues.get_mut(usize::from(index)) {
                *place = *queue;
            }
        }
        true
    }

    /// Whether the driver is ready.
    pub fn is_running(&self) -> bool {
        self.status & status::DRIVER_OK != 0
    }

    /// The device status (virtio 1.3 §2.1).
    pub fn status(&self) -> u8 {
        let needs_reset = if self.signals.needs_reset() {
            status::DEVICE_NEEDS_RESET
        } else {
            0
        };
        self.status | needs_reset
    }

    /// Features the driver accepted; final when FEATURES_OK is set.
    pub fn features(&self) -> u64 {
        self.driver_features
    }

    /// The queues as they are set up.
    pub fn queues(&self) -> &[QueueSetup] {
        &self.queues
    }

    /// Reads registers from `offset` on; what lies behind the structure reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let image = self.image();
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| image.get(offset..));
        let rest = rest.unwrap_or_default();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = rest.get(index).copied().unwrap_or(0);
        }
    }

    fn image(&self) -> [u8; COMMON_BYTES] {
        let mut bytes = Image::default();
        bytes.put(&self.device_feature_select.to_le_bytes());
        bytes.put(&feature_word(self.offer.features, self.device_feature_select).to_le_bytes());
        bytes.put(&self.driver_feature_select.to_le_bytes());
        bytes.put(&feature_word(self.driver_features, self.driver_feature_select).to_le_bytes());
        bytes.put(&self.signals.config_vector().to_le_bytes());
        bytes.put(&self.offer.queues.to_le_bytes());
        bytes.put(&[self.status(), self.signals.config_generation()]);
        bytes.put(&self.queue_select.to_le_bytes());
        match self.queues.get(usize::from(self.queue_select)) {
            Some(queue) => {
                bytes.put(&queue.size.to_le_bytes());
                bytes.put(&self.signals.queue_vector(self.queue_select).to_le_bytes());
                bytes.put(&u16::from(queue.enabled).to_le_bytes());
                bytes.put(&self.queue_select.to_le_bytes()); // queue_notify_off
                bytes.put(&queue.desc.to_le_bytes());
                bytes.put(&queue.avail.to_le_bytes());
                bytes.put(&queue.used.to_le_bytes());
            }
            // A size of 0 says that there is no such queue.
            None => {
                bytes.put(&0u16.to_le_bytes());
                bytes.put(&NO_VECTOR.to_le_bytes());
            }
        }
        bytes.bytes
    }

    /// Writes one register. Accesses of another width than the register's are ignored; 64-bit
    /// registers may be written in halves (virtio 1.3 §4.1.3.1).
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Action {
        match (offset, data) {
            (at::DEVICE_FEATURE_SELECT, &[a, b, c, d]) => {
                self.device_feature_select = u32::from_le_bytes([a, b, c, d]);
            }
            (at::DRIVER_FEATURE_SELECT, &[a, b, c, d]) => {
                self.driver_feature_select = u32::from_le_bytes([a, b, c, d]);
            }
            (at::DRIVER_FEATURE, &[a, b, c, d]) => {
                self.set_driver_feature(u32::from_le_bytes([a, b, c, d]));
            }
            (at::CONFIG_VECTOR, &[a, b]) => {
                let vector = self.vector(u16::from_le_bytes([a, b]));
                self.signals.set_config_vector(vector);
            }
            (at::DEVICE_STATUS, &[value]) => return self.set_status(value),
            (at::QUEUE_SELECT, &[a, b]) => self.queue_select = u16::from_le_bytes([a, b]),
            (at::QUEUE_SIZE, &[a, b]) => {
                let size = u16::from_le_bytes([a, b]);
                let fits = is_size(size, self.offer.queue_size, self.driver_features);
                if let Some(queue) = self.selected().filter(|_| fits) {
                    queue.size = size;
                }
            }
            (at::QUEUE_VECTOR, &[a, b]) => {
                let vector = self.vector(u16::from_le_bytes([a, b]));
                self.signals.set_queue_vector(self.queue_select, vector);
            }
            (at::QUEUE_ENABLE, &[1, 0]) => return self.enable_queue(),
            (at::QUEUE_RESET, &[1, 0]) => {
                let queue = self.queues.get(usize::from(self.queue_select));
                if self.has(feature::RING_RESET) && queue.is_some_and(|queue| queue.enabled) {
                    return Action::ResetQueue(self.queue_select);
                }
            }
            (at::QUEUE_DESC..at::QUEUE_END, _) => self.set_address(offset, data),
            _ => log::trace!(
                "write of {} bytes to common register {offset:#x}",
                data.len()
            ),
        }
        Action::None
    }

    /// A vector that exists, or none (virtio 1.3 §4.1.5.1.2.1).
    fn vector(&self, wanted: u16) -> u16 {
        if wanted < self.offer.vectors {
            wanted
        } else {
            NO_VECTOR
        }
    }

    /// The selected queue if it may still be changed.
    fn selected(&mut self) -> Option<&mut QueueSetup> {
        self.queues
            .get_mut(usize::from(self.queue_select))
            .filter(|queue| !queue.enabled)
    }

    fn has(&self, bit: u64) -> bool {
        self.driver_features & bit != 0
    }

    fn enable_queue(&mut self) -> Action {
        // A queue that was not there at DRIVER_OK comes only after a reset of its own (virtio 1.3 §2.6.1).
        if self.is_running() && !self.has(feature::RING_RESET) {
            return Action::None;
        }
        let (packed, running) = (self.has(feature::RING_PACKED), self.is_running());
        let Some(queue) = self.selected() else {
            return Action::None;
        };
        queue.enabled = queue.can_be_enabled(packed);
        if queue.enabled && running {
            return Action::StartQueue(self.queue_select);
        }
        Action::None
    }

    fn set_driver_feature(&mut self, word: u32) {
        if self.status & status::FEATURES_OK != 0 {
            return;
        }
        let shift = match self.driver_feature_select {
            0 => 0,
            1 => 32,
            _ => return,
        };
        let others = self.driver_features & !(u64::from(u32::MAX) << shift);
        self.driver_features = others | u64::from(word) << shift;
    }

    fn set_address(&mut self, offset: u64, data: &[u8]) {
        let Some(queue) = self.selected() else {
            return;
        };
        let address = match offset & !7 {
            at::QUEUE_DESC => &mut queue.desc,
            at::QUEUE_DRIVER => &mut queue.avail,
            at::QUEUE_DEVICE => &mut queue.used,
            _ => return,
        };
        match (offset & 7, data) {
            (0, &[a, b, c, d, e, f, g, h]) => {
                *address = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            }
            (0, &[a, b, c, d]) => {
                let low = u32::from_le_bytes([a, b, c, d]);
                *address = *address & !u64::from(u32::MAX) | u64::from(low);
            }
            (4, &[a, b, c, d]) => {
                let high = u32::from_le_bytes([a, b, c, d]);
                *address = *address & u64::from(u32::MAX) | u64::from(high) << 32;
            }
            _ => {}
        }
    }

    fn set_status(&mut self, value: u8) -> Action {
        if value == 0 {
            return Action::Reset;
        }
        // The driver sets bits and clears none (virtio 1.3 §2.1.1); NEEDS_RESET is the device's.
        let mut new = value & !status::DEVICE_NEEDS_RESET & !self.status;
        if new & status::FEATURES_OK != 0 && !self.features_work() {
            log::info!("driver features {:#x} are refused", self.driver_features);
            new &= !status::FEATURES_OK;
        }
        if (self.status | new) & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        self.status |= new;
        if new & status::DRIVER_OK != 0 {
            Action::Start
        } else {
            Action::None
        }
    }

    fn features_work(&self) -> bool {
        let features = self.driver_features;
        features & !self.offer.features == 0
            && features & feature::VERSION_1 != 0
            && (self.offer.acceptable)(features)
    }
}

fn feature_word(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Bytes filled from the front.
struct Image {
    bytes: [u8; COMMON_BYTES],
    end: usize,
}

impl Default for Image {
    fn default() -> Self {
        Self {
            bytes: [0; COMMON_BYTES],
            end: 0,
        }
    }
}

impl Image {
    fn put(&mut self, field: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(self.end).zip(field) {
            *to = *from;
        }
        self.end += field.len();
    }
}

#[cfg(test)]
#[path = "common_tests.rs"]
mod tests;
