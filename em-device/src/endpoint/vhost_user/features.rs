//! What the function offers to a front end, which is not what it offers to a driver: control queue and
//! configuration are the front end's own.

use crate::net::features as net;
use crate::virtio::feature;

/// The front end knows requests beyond the first ones (`VHOST_USER_F_PROTOCOL_FEATURES`).
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Memory that the device writes is logged (`VHOST_F_LOG_ALL`).
pub(super) const LOG_ALL: u64 = 1 << 26;

/// What needs a control queue that the device itself serves, or notifications that carry data; and a platform's
/// translation, which a front end would have to be asked for. A front end does not say which offloads its driver chose
/// later.
const NOT_HERE: u64 = net::RSS
    | net::HASH_REPORT
    | net::NOTF_COAL
    | net::VQ_NOTF_COAL
    | net::DEVICE_STATS
    | net::CTRL_GUEST_OFFLOADS
    | feature::NOTIFICATION_DATA
    | feature::ACCESS_PLATFORM;

/// What the front end does by itself when its driver takes it.
const FRONT_END: u64 =
    net::CTRL_VQ | net::CTRL_RX | net::CTRL_VLAN | net::CTRL_MAC_ADDR | net::GUEST_ANNOUNCE;

/// What is offered.
pub(super) const OFFERED: u64 = net::OFFERED & !NOT_HERE | PROTOCOL_FEATURES | LOG_ALL;

/// What the device has to know of acknowledged features; `None` when they do not work together.
pub(super) fn of_device(acknowledged: u64) -> Option<u64> {
    let features = acknowledged & !(FRONT_END | PROTOCOL_FEATURES | LOG_ALL);
    let works = features & feature::VERSION_1 != 0 && net::acceptable(features | net::CTRL_VQ);
    works.then_some(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_offered_works_together_without_a_control_queue() {
        let features = of_device(OFFERED).unwrap();
        assert_eq!(features & (net::CTRL_VQ | net::CTRL_RX), 0);
        assert_ne!(features & net::MQ, 0, "pairs are enabled by the front end");
        assert_eq!(OFFERED & net::CTRL_GUEST_OFFLOADS, 0, "nobody would say");
        let platform = OFFERED & feature::ACCESS_PLATFORM;
        assert_eq!(platform, 0, "nobody would translate");
    }

    #[test]
    fn old_drivers_and_features_without_their_base_are_refused() {
        assert_eq!(of_device(0), None);
        assert_eq!(of_device(net::CSUM | PROTOCOL_FEATURES), None);
        assert_eq!(of_device(feature::VERSION_1 | net::HOST_TSO4), None);
        assert!(of_device(feature::VERSION_1 | net::MQ).is_some());
    }
}
