//! What every port counts.

use m2m_fabric::proto::LinkStats;

/// Counters of a port.
#[derive(Debug, Clone, Default)]
pub(super) struct Counters {
    tx_packets: u64,
    tx_bytes: u64,
    rx_packets: u64,
    rx_bytes: u64,
    /// By reason; few, so a list is faster than a map.
    drops: Vec<(&'static str, u64)>,
}

impl Counters {
    pub(super) fn sent(&mut self, bytes: usize) {
        self.tx_packets += 1;
        self.tx_bytes += bytes as u64;
    }

    pub(super) fn received(&mut self, bytes: usize) {
        self.rx_packets += 1;
        self.rx_bytes += bytes as u64;
    }

    pub(super) fn dropped(&mut self, reason: &'static str) {
        match self.drops.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => self.drops.push((reason, 1)),
        }
    }

    pub(super) fn stats(&self, name: &str) -> LinkStats {
        LinkStats {
            link: 0,
            name: name.to_owned(),
            tx_packets: self.tx_packets,
            tx_bytes: self.tx_bytes,
            rx_packets: self.rx_packets,
            rx_bytes: self.rx_bytes,
            drops: self
                .drops
                .iter()
                .map(|(reason, count)| ((*reason).to_owned(), *count))
                .collect(),
        }
    }
}
