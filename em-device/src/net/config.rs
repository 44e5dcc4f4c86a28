//! What the data path adds to the device configuration, which is the control side's.

use super::Mac;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the data path changes in the device configuration, for the register side.
#[derive(Debug, Default)]
pub struct ConfigOverride {
    /// The MAC address that the driver set; 0 when it set none.
    mac: AtomicU64,
    announce: AtomicBool,
}

impl ConfigOverride {
    /// The address, if the driver set one.
    pub fn mac(&self) -> Option<Mac> {
        let bits = self.mac.load(Ordering::Acquire);
        let [0x01, _, mac @ ..] = bits.to_be_bytes() else {
            return None;
        };
        Some(mac)
    }

    /// Whether the driver is asked to announce itself (virtio 1.3 §5.1.6.5.5).
    pub fn announce(&self) -> bool {
        self.announce.load(Ordering::Acquire)
    }

    pub(crate) fn set_mac(&self, mac: Option<Mac>) {
        let bits = mac.map_or(0, |[a, b, c, d, e, f]| {
            u64::from_be_bytes([1, 0, a, b, c, d, e, f])
        });
        self.mac.store(bits, Ordering::Release);
    }

    pub(crate) fn set_announce(&self, on: bool) {
        self.announce.store(on, Ordering::Release);
    }
}
