//! What is counted about frames (QUERY_VPORT_COUNTER, QUERY_Q_COUNTER).

use std::collections::BTreeMap;

/// Frames and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Frames.
    pub packets: u64,
    /// Bytes of them, without check sequence.
    pub octets: u64,
}

/// Frames by the kind of their destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// To one.
    pub unicast: Count,
    /// To a group.
    pub multicast: Count,
    /// To all.
    pub broadcast: Count,
}

impl Traffic {
    /// All of them.
    pub(in super::super) fn total(&self) -> Count {
        let all = [self.unicast, self.multicast, self.broadcast];
        Count {
            packets: all.iter().map(|count| count.packets).sum(),
            octets: all.iter().map(|count| count.octets).sum(),
        }
    }

    /// Counts a frame to `destination`.
    pub(super) fn add(&mut self, destination: &[u8], bytes: usize) {
        let count = match destination.first_chunk::<6>() {
            Some([0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) => &mut self.broadcast,
            Some([first, ..]) if first & 1 != 0 => &mut self.multicast,
            _ => &mut self.unicast,
        };
        count.packets += 1;
        count.octets += bytes as u64;
    }
}

/// What is counted about a function's frames.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EtherCounters {
    /// Frames that receive queues got.
    pub received: Traffic,
    /// Frames that wires got; a large one that others segment counts once.
    pub transmitted: Traffic,
    /// Frames that waited for receive entries in vain.
    pub out_of_buffer: u64,
    drops: BTreeMap<&'static str, u64>,
}

impl EtherCounters {
    /// Frames dropped, by reason.
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.drops.iter().map(|(reason, count)| (*reason, *count))
    }

    pub(super) fn dropped(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}
