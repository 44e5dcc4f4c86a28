//! Which frames the driver wants (virtio 1.3 §5.1.6.5.1 to §5.1.6.5.3).

use super::Mac;
use super::features;

/// MAC addresses that the driver may give, of each kind.
pub const MAX_TABLE: usize = 64;
/// VLAN identifiers, 0 to 4095.
const VLANS: usize = 4096;
/// Words of the VLAN filter, a bit per identifier.
pub const VLAN_WORDS: usize = VLANS / 64;
/// EtherTypes of VLAN tags, 802.1Q and 802.1ad.
const TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// The receive filter. A driver without the control queue's modes gets everything.
#[derive(Debug, Clone)]
pub struct Filter {
    /// All unicast and multicast, whatever the tables say.
    pub promiscuous: bool,
    /// All multicast.
    pub all_multicast: bool,
    /// The device's address.
    pub mac: Mac,
    /// `None`: more than [`MAX_TABLE`], so all.
    unicast: Option<Vec<Mac>>,
    multicast: Option<Vec<Mac>>,
    /// Bit per VLAN that is let in, when the driver filters.
    vlans: Option<Box<[u64; VLANS / 64]>>,
}

impl Filter {
    /// As after a reset with these features (virtio 1.3 §5.1.5 step 7 and §5.1.6.5.3).
    pub fn new(mac: Mac, features: u64) -> Self {
        Self {
            // "The device is in promiscuous mode" until a driver that can says otherwise.
            promiscuous: true,
            all_multicast: features & features::CTRL_RX == 0,
            mac,
            unicast: Some(Vec::new()),
            multicast: Some(Vec::new()),
            vlans: (features & features::CTRL_VLAN != 0).then(|| Box::new([0; VLANS / 64])),
        }
    }

    /// Replaces both tables; `None` lets all of that kind in.
    pub fn set_tables(&mut self, unicast: Option<Vec<Mac>>, multicast: Option<Vec<Mac>>) {
        (self.unicast, self.multicast) = (unicast, multicast);
    }

    /// Tables of unicast and multicast addresses; `None` lets all of that kind in.
    pub fn tables(&self) -> (Option<&[Mac]>, Option<&[Mac]>) {
        (self.unicast.as_deref(), self.multicast.as_deref())
    }

    /// The VLANs that are let in, when the driver filters.
    pub fn vlans(&self) -> Option<&[u64; VLAN_WORDS]> {
        self.vlans.as_deref()
    }

    /// Replaces the VLANs that are let in.
    pub fn set_vlans(&mut self, vlans: [u64; VLAN_WORDS]) {
        self.vlans = Some(Box::new(vlans));
    }

    /// Lets a VLAN in or not. `false` when there is no such VLAN or no filter.
    pub fn set_vlan(&mut self, vlan: u16, wanted: bool) -> bool {
        let Some(word) = self
            .vlans
            .as_mut()
            .and_then(|v| v.get_mut(usize::from(vlan) / 64))
        else {
            return false;
        };
        let bit = 1 << (vlan % 64);
        *word = if wanted { *word | bit } else { *word & !bit };
        true
    }

    /// Whether a frame that begins with these bytes is wanted; 18 bytes decide.
    pub fn wants(&self, start: &[u8]) -> bool {
        let Some(destination) = start.first_chunk::<6>() else {
            return false;
        };
        self.wants_destination(destination) && self.wants_vlan(start)
    }

    fn wants_destination(&self, destination: &Mac) -> bool {
        if self.promiscuous || *destination == self.mac || *destination == [0xff; 6] {
            return true;
        }
        if destination[0] & 1 == 1 {
            self.all_multicast || listed(&self.multicast, destination)
        } else {
            listed(&self.unicast, destination)
        }
    }

    fn wants_vlan(&self, start: &[u8]) -> bool {
        let (Some(vlans), Some(&[t0, t1, v0, v1])) = (&self.vlans, start.get(12..16)) else {
            return true;
        };
        if !TAGS.contains(&[t0, t1]) {
            return true;
        }
        let vlan = u16::from_be_bytes([v0, v1]) & 0xfff;
        // VLAN 0 is a priority tag, not a VLAN (802.1Q §9.6).
        vlan == 0
            || vlans
                .get(usize::from(vlan) / 64)
                .is_some_and(|word| word >> (vlan % 64) & 1 == 1)
    }
}

fn listed(table: &Option<Vec<Mac>>, address: &Mac) -> bool {
    table.as_ref().is_none_or(|table| table.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];
    const STRANGER: Mac = [2, 0, 0, 0, 0, 9];
    const GROUP: Mac = [1, 0, 0x5e, 0, 0, 7];

    fn to(destination: Mac) -> Vec<u8> {
        [&destination[..], &[2; 6], &[8, 0, 0, 0, 0, 0]].concat()
    }

    fn tagged(vlan: u16) -> Vec<u8> {
        let tag = vlan.to_be_bytes();
        [&MAC[..], &[2; 6], &[0x81, 0], &tag, &[8, 0]].concat()
    }

    fn filtering() -> Filter {
        let mut filter = Filter::new(MAC, features::CTRL_RX | features::CTRL_VLAN);
        filter.promiscuous = false;
        filter
    }

    #[test]
    fn a_new_filter_lets_everything_in_but_vlans() {
        let filter = Filter::new(MAC, features::CTRL_RX | features::CTRL_VLAN);
        assert!(filter.wants(&to(STRANGER)) && filter.wants(&to(GROUP)));
        assert!(!filter.wants(&tagged(7)));
        assert!(Filter::new(MAC, 0).wants(&tagged(7)));
    }

    #[test]
    fn without_promiscuous_mode_own_and_broadcast_remain() {
        let filter = filtering();
        assert!(filter.wants(&to(MAC)) && filter.wants(&to([0xff; 6])));
        assert!(!filter.wants(&to(STRANGER)) && !filter.wants(&to(GROUP)));
        assert!(!filter.wants(&[0xff; 5]));
    }

    #[test]
    fn tables_and_all_multicast_add_to_it() {
        let mut filter = filtering();
        filter.set_tables(Some(vec![STRANGER]), Some(vec![GROUP]));
        assert!(filter.wants(&to(STRANGER)) && filter.wants(&to(GROUP)));
        filter.set_tables(Some(vec![]), Some(vec![]));
        assert!(!filter.wants(&to(STRANGER)) && !filter.wants(&to(GROUP)));
        filter.all_multicast = true;
        assert!(!filter.wants(&to(STRANGER)) && filter.wants(&to(GROUP)));
    }

    #[test]
    fn vlans_come_and_go() {
        let mut filter = filtering();
        assert!(filter.set_vlan(7, true));
        assert!(filter.wants(&tagged(7)) && filter.wants(&tagged(0xe007)));
        assert!(!filter.wants(&tagged(8)));
        assert!(filter.wants(&tagged(0)), "a priority tag");
        assert!(filter.set_vlan(7, false) && !filter.wants(&tagged(7)));
        assert!(filter.set_vlan(4095, true) && !filter.set_vlan(4096, true));
        assert!(!Filter::new(MAC, 0).set_vlan(7, true));
    }
}
