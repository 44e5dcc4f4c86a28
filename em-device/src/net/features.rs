//! Feature bits of a network device (virtio 1.3 §5.1.3) and what they need of each other (§5.1.3.1).

use crate::virtio::feature;

/// The driver leaves checksums to the device.
pub const CSUM: u64 = 1 << 0;
/// The driver takes frames with unfinished checksums.
pub const GUEST_CSUM: u64 = 1 << 1;
/// The device says its MTU.
pub const MTU: u64 = 1 << 3;
/// The device has a MAC address.
pub const MAC: u64 = 1 << 5;
/// The driver takes large TCP segments over IPv4.
pub const GUEST_TSO4: u64 = 1 << 7;
/// The driver takes large TCP segments over IPv6.
pub const GUEST_TSO6: u64 = 1 << 8;
/// The device segments TCP over IPv4.
pub const HOST_TSO4: u64 = 1 << 11;
/// The device segments TCP over IPv6.
pub const HOST_TSO6: u64 = 1 << 12;
/// The driver takes a frame in several buffers.
pub const MRG_RXBUF: u64 = 1 << 15;
/// The device says whether its link is up.
pub const STATUS: u64 = 1 << 16;
/// There is a control queue.
pub const CTRL_VQ: u64 = 1 << 17;
/// Receive modes on the control queue.
pub const CTRL_RX: u64 = 1 << 18;
/// VLAN filter on the control queue.
pub const CTRL_VLAN: u64 = 1 << 19;
/// Several queue pairs.
pub const MQ: u64 = 1 << 22;
/// MAC address on the control queue.
pub const CTRL_MAC_ADDR: u64 = 1 << 23;
/// The device says speed and duplex.
pub const SPEED_DUPLEX: u64 = 1 << 63;

const ALWAYS: u64 = feature::VERSION_1
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
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
    | CTRL_MAC_ADDR
    | SPEED_DUPLEX;

/// (bit, what it needs).
const NEEDS: [(u64, u64); 8] = [
    (GUEST_TSO4, GUEST_CSUM),
    (GUEST_TSO6, GUEST_CSUM),
    (HOST_TSO4, CSUM),
    (HOST_TSO6, CSUM),
    (CTRL_RX, CTRL_VQ),
    (CTRL_VLAN, CTRL_VQ),
    (MQ, CTRL_VQ),
    (CTRL_MAC_ADDR, CTRL_VQ),
];

/// What every function offers. MQ is offered with one pair too: a driver may take it and set 1 pair.
pub const OFFERED: u64 = ALWAYS | MQ;

/// Whether every bit has what it needs.
pub fn acceptable(features: u64) -> bool {
    NEEDS
        .iter()
        .all(|(bit, needs)| features & bit == 0 || features & needs == *needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_offered_works_together() {
        assert!(acceptable(OFFERED));
    }

    #[test]
    fn bits_need_their_base() {
        let cases = [
            (0, true),
            (GUEST_TSO4, false),
            (GUEST_TSO4 | GUEST_CSUM, true),
            (GUEST_TSO6 | CSUM, false),
            (HOST_TSO4, false),
            (HOST_TSO6 | CSUM, true),
            (MQ, false),
            (MQ | CTRL_VQ, true),
            (CTRL_RX, false),
            (CTRL_VLAN, false),
            (CTRL_MAC_ADDR, false),
            (CTRL_MAC_ADDR | CTRL_VQ, true),
        ];
        for (features, want) in cases {
            assert_eq!(acceptable(features), want, "{features:#x}");
        }
    }
}
