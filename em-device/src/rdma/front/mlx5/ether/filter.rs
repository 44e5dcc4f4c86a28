//! Which frames the driver wants: the NIC vport context's lists and modes.

use crate::net::Mac;

/// Addresses of one kind in the context at most.
pub(super) const MAX_ADDRESSES: usize = 4096;

/// The receive filter (`nic_vport_context`: allowed lists, `promisc_uc`, `promisc_mc`,
/// `promisc_all`). Broadcast is always let in.
#[derive(Debug, Clone, Default)]
pub struct EtherFilter {
    /// Everything.
    pub promisc_all: bool,
    /// All unicast.
    pub promisc_uc: bool,
    /// All multicast.
    pub promisc_mc: bool,
    mac: Mac,
    unicast: Vec<Mac>,
    multicast: Vec<Mac>,
}

impl EtherFilter {
    /// Lets in what is for `mac`.
    pub fn new(mac: Mac) -> Self {
        Self {
            mac,
            ..Self::default()
        }
    }

    /// The function's permanent address is now this.
    pub fn set_mac(&mut self, mac: Mac) {
        self.mac = mac;
    }

    /// Replaces the unicast list; only the first 4096 count.
    pub fn set_unicast(&mut self, list: impl IntoIterator<Item = Mac>) {
        self.unicast = sorted(list);
    }

    /// Replaces the multicast list; only the first 4096 count.
    pub fn set_multicast(&mut self, list: impl IntoIterator<Item = Mac>) {
        self.multicast = sorted(list);
    }

    /// Whether a frame that begins with these bytes is wanted.
    pub fn wants(&self, start: &[u8]) -> bool {
        let Some(to) = start.first_chunk::<6>() else {
            return false;
        };
        if self.promisc_all || *to == self.mac || *to == [0xff; 6] {
            return true;
        }
        match to[0] & 1 {
            0 => self.promisc_uc || self.unicast.binary_search(to).is_ok(),
            _ => self.promisc_mc || self.multicast.binary_search(to).is_ok(),
        }
    }
}

fn sorted(list: impl IntoIterator<Item = Mac>) -> Vec<Mac> {
    let mut list: Vec<Mac> = list.into_iter().take(MAX_ADDRESSES).collect();
    list.sort_unstable();
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];
    const OTHER: Mac = [2, 0, 0, 0, 0, 2];
    const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 1];

    #[test]
    fn lists_and_modes_let_frames_in() {
        let mut filter = EtherFilter::new(MAC);
        assert!(filter.wants(&MAC) && filter.wants(&[0xff; 6]));
        assert!(!filter.wants(&OTHER) && !filter.wants(&GROUP) && !filter.wants(&MAC[..5]));
        filter.set_unicast([[2, 0, 0, 0, 0, 9], OTHER]);
        filter.set_multicast([GROUP]);
        assert!(filter.wants(&OTHER) && filter.wants(&GROUP));
        filter.set_unicast([]);
        filter.set_multicast([]);
        assert!(!filter.wants(&OTHER) && !filter.wants(&GROUP));
        filter.promisc_mc = true;
        assert!(!filter.wants(&OTHER) && filter.wants(&GROUP));
        filter.promisc_mc = false;
        filter.promisc_uc = true;
        assert!(filter.wants(&OTHER) && !filter.wants(&GROUP));
        filter.promisc_uc = false;
        filter.promisc_all = true;
        assert!(filter.wants(&OTHER) && filter.wants(&GROUP));
        filter.promisc_all = false;
        filter.set_mac(OTHER);
        assert!(filter.wants(&OTHER) && !filter.wants(&MAC));
    }
}
