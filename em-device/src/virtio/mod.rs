//! What every virtio device has: the PCI transport and virtqueues. Nothing here knows Ethernet.
//!
//! * [`common`]: the common configuration registers as a state machine;
//! * [`signals`]: what the register side and the data path share without locks: interrupt vectors,
//!   ISR, DEVICE_NEEDS_RESET, counts of notifications;
//! * [`ring`]: one virtqueue on guest memory, split or packed;
//! * [`area`]: a range of guest memory that is accessed often, translated once per burst;
//! * [`chain`]: the walk through one descriptor chain;
//! * [`layout`]: which register a BAR access means.

pub mod area;
pub mod chain;
pub mod common;
pub mod layout;
pub mod pci_access;
pub mod ring;
pub mod saved;
pub mod signals;

/// Feature bits of the transport and of rings (virtio 1.3 §6).
pub mod feature {
    /// Indirect descriptors (§2.7.5.3).
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notification suppression by index (§2.7.7, §2.7.10).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// A driver of virtio 1.0 or later.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device reaches the driver's memory by the platform's rules: through an IOMMU where there is one (§6.1). The
    /// VMM maps what that lets through, so a device that knows nothing but these maps keeps the rules.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// The packed layout of virtqueues (§2.8).
    pub const RING_PACKED: u64 = 1 << 34;
    /// Buffers are used in the order in which they were made available (§2.9).
    pub const IN_ORDER: u64 = 1 << 35;
    /// Notifications say how far the driver is (§4.1.5.2).
    pub const NOTIFICATION_DATA: u64 = 1 << 38;
    /// One queue can be reset alone (§2.6.1).
    pub const RING_RESET: u64 = 1 << 40;

    /// What this transport and its rings can do.
    pub const OFFERED: u64 = INDIRECT_DESC
        | EVENT_IDX
        | VERSION_1
        | ACCESS_PLATFORM
        | RING_PACKED
        | IN_ORDER
        | NOTIFICATION_DATA
        | RING_RESET;
}

/// Device status bits (virtio 1.3 §2.1).
pub mod status {
    /// The guest noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest has a driver.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// The features are agreed on.
    pub const FEATURES_OK: u8 = 8;
    /// The device cannot go on without a reset.
    pub const DEVICE_NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub const FAILED: u8 = 128;
}

/// The MSI-X vector that stands for none (virtio 1.3 §4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;
