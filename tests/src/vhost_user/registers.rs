//! The registers of the device that a front end shows its driver.

use crate::pci::{Function, Msix, VirtioWindows, Window};
use crate::virtio_net::features::{NO_VECTOR, common};

/// Offsets of the structures in BAR 0.
pub(super) const DEVICE: u64 = 0x1000;
pub(super) const NOTIFY: u64 = 0x2000;
const NOTIFY_MULTIPLIER: u32 = 4;

/// The function that the driver of a front end finds.
pub(super) fn function(queues: u16) -> Function {
    let window = |offset| Window {
        bar: 0,
        offset,
        len: 0x1000,
    };
    Function {
        vendor: 0x1af4,
        device: 0x1041,
        revision: 1,
        class: 0x02_00_00,
        subsystem: (0x1af4, 1),
        interrupt_pin: 0,
        bars: [None; 6],
        capabilities: Vec::new(),
        virtio: VirtioWindows {
            common: window(0),
            notify: window(NOTIFY as u32),
            notify_multiplier: NOTIFY_MULTIPLIER,
            device: window(DEVICE as u32),
            ..VirtioWindows::default()
        },
        msix: Msix {
            vectors: queues + 1,
            ..Msix::default()
        },
    }
}

/// The queue that a write to the notification area means.
pub(super) fn notified(offset: u64) -> u16 {
    (offset / u64::from(NOTIFY_MULTIPLIER)) as u16
}

/// A queue as the driver set it up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue {
    pub(super) size: u16,
    pub(super) vector: u16,
    pub(super) enabled: bool,
    /// Descriptors, available ring, used ring.
    pub(super) addresses: [u64; 3],
}

impl Queue {
    pub(super) const NEW: Self = Self {
        size: 1024,
        vector: NO_VECTOR,
        enabled: false,
        addresses: [0; 3],
    };
}

/// What a write means to the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    Nothing,
    Status(u8),
    ResetQueue(u16),
}

/// The common configuration (virtio 1.3 §4.1.4.3).
#[derive(Debug)]
pub(super) struct Registers {
    pub(super) offered: u64,
    pub(super) accepted: u64,
    pub(super) status: u8,
    pub(super) queues: Vec<Queue>,
    device_select: u32,
    driver_select: u32,
    queue_select: u16,
}

impl Registers {
    pub(super) fn new(offered: u64, queues: u16) -> Self {
        Self {
            offered,
            accepted: 0,
            status: 0,
            queues: vec![Queue::NEW; usize::from(queues)],
            device_select: 0,
            driver_select: 0,
            queue_select: 0,
        }
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let none = Queue {
            size: 0,
            ..Queue::NEW
        };
        let queue = self.queues.get(usize::from(self.queue_select));
        let queue = queue.unwrap_or(&none);
        let value = match offset {
            common::DEVICE_FEATURE if self.device_select < 2 => {
                self.offered >> (32 * self.device_select)
            }
            common::DEVICE_STATUS => u64::from(self.status),
            common::QUEUE_SIZE => u64::from(queue.size),
            common::QUEUE_VECTOR => u64::from(queue.vector),
            common::QUEUE_ENABLE => u64::from(queue.enabled),
            common::QUEUE_NOTIFY_OFF => u64::from(self.queue_select),
            _ => 0,
        };
        let bytes = value.to_le_bytes();
        data.copy_from_slice(&bytes[..data.len()]);
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Write {
        let mut bytes = [0; 8];
        bytes[..data.len()].copy_from_slice(data);
        let value = u64::from_le_bytes(bytes);
        match offset {
            common::DEVICE_FEATURE_SELECT => self.device_select = value as u32,
            common::DRIVER_FEATURE_SELECT => self.driver_select = value as u32,
            common::DRIVER_FEATURE if self.driver_select < 2 => {
                let shift = 32 * self.driver_select;
                self.accepted = self.accepted & !(0xffff_ffff << shift) | value << shift;
            }
            common::DEVICE_STATUS => return Write::Status(value as u8),
            common::QUEUE_SELECT => self.queue_select = value as u16,
            common::QUEUE_RESET => return Write::ResetQueue(self.queue_select),
            _ => self.write_queue(offset, value),
        }
        Write::Nothing
    }

    fn write_queue(&mut self, offset: u64, value: u64) {
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        match offset {
            common::QUEUE_SIZE => queue.size = value as u16,
            common::QUEUE_VECTOR => queue.vector = value as u16,
            common::QUEUE_ENABLE => queue.enabled = value == 1,
            common::QUEUE_DESCRIPTORS..common::QUEUE_RESET => {
                let at = offset - common::QUEUE_DESCRIPTORS;
                // In halves.
                if let Some(address) = queue.addresses.get_mut((at / 8) as usize) {
                    let shift = 8 * (at % 8);
                    *address = *address & !(0xffff_ffff << shift) | value << shift;
                }
            }
            _ => {}
        }
    }
}
