//! Feature bits of a network device (virtio 1.3 §5.1.3) and what they need of each other (§5.1.3.1).

use crate::virtio::feature;

/// The driver leaves checksums to the device.
pub const CSUM: u64 = 1 << 0;
/// The driver takes frames with unfinished checksums.
pub const GUEST_CSUM: u64 = 1 << 1;
/// The driver sets which offloads it takes on the control queue.
pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// The device says its MTU.
pub const MTU: u64 = 1 << 3;
/// The device has a MAC address.
pub const MAC: u64 = 1 << 5;
/// The driver takes large TCP segments over IPv4.
pub const GUEST_TSO4: u64 = 1 << 7;
/// The driver takes large TCP segments over IPv6.
pub const GUEST_TSO6: u64 = 1 << 8;
/// The driver takes large TCP segments with CWR.
pub const GUEST_ECN: u64 = 1 << 9;
/// The device segments TCP over IPv4.
pub const HOST_TSO4: u64 = 1 << 11;
/// The device segments TCP over IPv6.
pub const HOST_TSO6: u64 = 1 << 12;
/// The device segments TCP with CWR.
pub const HOST_ECN: u64 = 1 << 13;
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
/// The driver can announce itself when it is asked to.
pub const GUEST_ANNOUNCE: u64 = 1 << 21;
/// Several queue pairs.
pub const MQ: u64 = 1 << 22;
/// MAC address on the control queue.
pub const CTRL_MAC_ADDR: u64 = 1 << 23;
/// Statistics on the control queue.
pub const DEVICE_STATS: u64 = 1 << 50;
/// Interrupts of single queues are coalesced by the control queue.
pub const VQ_NOTF_COAL: u64 = 1 << 52;
/// Interrupts are coalesced by the control queue.
pub const NOTF_COAL: u64 = 1 << 53;
/// The driver takes large UDP segments over IPv4.
pub const GUEST_USO4: u64 = 1 << 54;
/// The driver takes large UDP segments over IPv6.
pub const GUEST_USO6: u64 = 1 << 55;
/// The device segments UDP.
pub const HOST_USO: u64 = 1 << 56;
/// The device says the hash of a frame.
pub const HASH_REPORT: u64 = 1 << 57;
/// The driver says which queue a hash leads to.
pub const RSS: u64 = 1 << 60;
/// The device says speed and duplex.
pub const SPEED_DUPLEX: u64 = 1 << 63;

const ALWAYS: u64 = feature::OFFERED
    | CSUM
    | GUEST_CSUM
    | MTU
    | MAC
    | GUEST_TSO4
    | GUEST_TSO6
    | HOST_TSO4
    | HOST_TSO6
    | GUEST_ECN
    | HOST_ECN
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO
    | MRG_RXBUF
    | STATUS
    | CTRL_VQ
    | CTRL_GUEST_OFFLOADS
    | CTRL_RX
    | CTRL_VLAN
    | CTRL_MAC_ADDR
    | GUEST_ANNOUNCE
    | DEVICE_STATS
    | NOTF_COAL
    | VQ_NOTF_COAL
    | RSS
    | HASH_REPORT
    | SPEED_DUPLEX;

/// Offloads that a driver can take and leave while it runs (§5.1.6.5.4): the bits of their features.
pub const GUEST_OFFLOADS: u64 =
    GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO4 | GUEST_USO6;

/// (bit, what it needs).
const NEEDS: [(u64, u64); 18] = [
    (GUEST_TSO4, GUEST_CSUM),
    (GUEST_TSO6, GUEST_CSUM),
    (HOST_TSO4, CSUM),
    (HOST_TSO6, CSUM),
    (CTRL_RX, CTRL_VQ),
    (CTRL_VLAN, CTRL_VQ),
    (MQ, CTRL_VQ),
    (CTRL_MAC_ADDR, CTRL_VQ),
    (GUEST_USO4, GUEST_CSUM),
    (GUEST_USO6, GUEST_CSUM),
    (HOST_USO, CSUM),
    (CTRL_GUEST_OFFLOADS, CTRL_VQ),
    (GUEST_ANNOUNCE, CTRL_VQ),
    (RSS, CTRL_VQ),
    (HASH_REPORT, CTRL_VQ),
    (NOTF_COAL, CTRL_VQ),
    (VQ_NOTF_COAL, CTRL_VQ),
    (DEVICE_STATS, CTRL_VQ),
];

/// (bit, of these it needs one).
const NEEDS_ONE: [(u64, u64); 2] = [
    (GUEST_ECN, GUEST_TSO4 | GUEST_TSO6),
    (HOST_ECN, HOST_TSO4 | HOST_TSO6),
];

/// What every function offers. MQ is offered with one pair too: a driver may take it and set 1 pair.
pub const OFFERED: u64 = ALWAYS | MQ;

/// Whether every bit has what it needs.
pub fn acceptable(features: u64) -> bool {
    let has = |bit: u64| features & bit != 0;
    NEEDS
        .iter()
        .all(|(bit, needs)| !has(*bit) || features & needs == *needs)
        && NEEDS_ONE
            .iter()
            .all(|(bit, needs)| !has(*bit) || has(*needs))
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
            (GUEST_ECN, false),
            (GUEST_ECN | GUEST_TSO6 | GUEST_CSUM, true),
            (HOST_ECN | CSUM, false),
            (HOST_ECN | HOST_TSO4 | CSUM, true),
            (GUEST_USO4, false),
            (GUEST_USO6 | GUEST_CSUM, true),
            (HOST_USO, false),
            (HOST_USO | CSUM, true),
            (CTRL_GUEST_OFFLOADS, false),
            (GUEST_ANNOUNCE, false),
            (RSS, false),
            (RSS | CTRL_VQ, true),
            (HASH_REPORT, false),
            (NOTF_COAL, false),
            (VQ_NOTF_COAL, false),
            (DEVICE_STATS, false),
        ];
        for (features, want) in cases {
            assert_eq!(acceptable(features), want, "{features:#x}");
        }
    }
}
