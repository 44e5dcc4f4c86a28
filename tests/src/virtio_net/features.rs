//! Feature bits (virtio 1.3 §5.1.3 and §6) and the two feature sets most tests use.

#![allow(missing_docs)]

pub const CSUM: u64 = 1 << 0;
pub const GUEST_CSUM: u64 = 1 << 1;
pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
pub const MTU: u64 = 1 << 3;
pub const MAC: u64 = 1 << 5;
pub const GUEST_TSO4: u64 = 1 << 7;
pub const GUEST_TSO6: u64 = 1 << 8;
pub const GUEST_ECN: u64 = 1 << 9;
pub const HOST_TSO4: u64 = 1 << 11;
pub const HOST_TSO6: u64 = 1 << 12;
pub const HOST_ECN: u64 = 1 << 13;
pub const MRG_RXBUF: u64 = 1 << 15;
pub const STATUS: u64 = 1 << 16;
pub const CTRL_VQ: u64 = 1 << 17;
pub const CTRL_RX: u64 = 1 << 18;
pub const CTRL_VLAN: u64 = 1 << 19;
pub const GUEST_ANNOUNCE: u64 = 1 << 21;
pub const MQ: u64 = 1 << 22;
pub const CTRL_MAC_ADDR: u64 = 1 << 23;
pub const INDIRECT: u64 = 1 << 28;
pub const EVENT_IDX: u64 = 1 << 29;
pub const VERSION_1: u64 = 1 << 32;
pub const ACCESS_PLATFORM: u64 = 1 << 33;
pub const RING_PACKED: u64 = 1 << 34;
pub const IN_ORDER: u64 = 1 << 35;
pub const NOTIFICATION_DATA: u64 = 1 << 38;
pub const RING_RESET: u64 = 1 << 40;
pub const DEVICE_STATS: u64 = 1 << 50;
pub const VQ_NOTF_COAL: u64 = 1 << 52;
pub const NOTF_COAL: u64 = 1 << 53;
pub const GUEST_USO4: u64 = 1 << 54;
pub const GUEST_USO6: u64 = 1 << 55;
pub const HOST_USO: u64 = 1 << 56;
pub const HASH_REPORT: u64 = 1 << 57;
pub const RSS: u64 = 1 << 60;
pub const SPEED_DUPLEX: u64 = 1 << 63;

/// What a firmware driver takes: no offload, no control queue.
pub const PLAIN: u64 = VERSION_1 | MAC | STATUS;

/// What most tests take: what Linux took for years.
pub const LINUX: u64 = VERSION_1
    | CSUM
    | GUEST_CSUM
    | MTU
    | MAC
    | GUEST_TSO4
    | GUEST_TSO6
    | HOST_TSO4
    | HOST_TSO6
    | MRG_RXBUF
    | STATUS
    | CTRL_VQ
    | CTRL_RX
    | CTRL_VLAN
    | MQ
    | CTRL_MAC_ADDR
    | INDIRECT
    | EVENT_IDX
    | SPEED_DUPLEX;

/// The same with packed rings.
pub const PACKED: u64 = LINUX | RING_PACKED;

/// What the function has to offer at least.
pub const OFFERED: u64 = LINUX
    | ACCESS_PLATFORM
    | RING_PACKED
    | IN_ORDER
    | NOTIFICATION_DATA
    | RING_RESET
    | CTRL_GUEST_OFFLOADS
    | GUEST_ECN
    | HOST_ECN
    | GUEST_ANNOUNCE
    | DEVICE_STATS
    | VQ_NOTF_COAL
    | NOTF_COAL
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO
    | HASH_REPORT
    | RSS;

/// Device status bits (virtio 1.3 §2.1).
pub mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 64;
    pub const FAILED: u8 = 128;
}

/// Offsets in the common configuration (virtio 1.3 §4.1.4.3).
pub mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const CONFIG_VECTOR: u64 = 0x10;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const DEVICE_STATUS: u64 = 0x14;
    pub const CONFIG_GENERATION: u64 = 0x15;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_VECTOR: u64 = 0x1a;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub const QUEUE_DESCRIPTORS: u64 = 0x20;
    pub const QUEUE_AVAILABLE: u64 = 0x28;
    pub const QUEUE_USED: u64 = 0x30;
    pub const QUEUE_RESET: u64 = 0x3a;
}

/// MSI-X vector that stands for none.
pub const NO_VECTOR: u16 = 0xffff;
