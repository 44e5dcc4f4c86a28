//! What the function counts, and how long it may be left alone.

use super::Device;
use m2m_fabric::proto::{QueueStats, RdmaLinkLayer};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

impl Device {
    /// The longest time without a turn.
    pub fn patience(&self, now: Instant) -> Option<Duration> {
        let frames = self.path.deadline(now);
        let frames = frames.map(|at| at.saturating_duration_since(now));
        let all = [self.engine.patience(now), frames, self.look_again()];
        all.into_iter().flatten().min()
    }

    /// Counters by kind of work: what this function asked of others, and what others asked of it.
    pub fn stats(&self) -> Vec<QueueStats> {
        let c = self.engine.counters();
        let row = |name: &str, packets, bytes| QueueStats {
            name: name.into(),
            enabled: self.running(),
            packets,
            bytes,
            ..QueueStats::default()
        };
        let faults = [
            ("failed", c.failed),
            ("retransmitted", c.retransmissions),
            ("timeout", c.timeouts),
            ("receiver_not_ready", c.receiver_not_ready),
            ("sequence", c.sequence_errors),
        ];
        let served = [
            ("refused", c.refused),
            ("dropped", c.dropped),
            ("event", self.lost_events),
        ];
        let drops = |all: &[(&str, u64)]| -> BTreeMap<String, u64> {
            let counted = all.iter().filter(|(_, n)| *n != 0);
            counted.map(|(name, n)| ((*name).to_owned(), *n)).collect()
        };
        let mut rows = vec![
            row("send", c.sends, c.send_bytes),
            row("write", c.writes, c.write_bytes),
            row("read", c.reads, c.read_bytes),
            row("atomic", c.atomics, c.atomics * 8),
            row("receive", c.received, c.received_bytes),
            row("served-write", c.served_writes, c.served_write_bytes),
            row("served-read", c.served_reads, c.served_read_bytes),
            row("served-atomic", c.served_atomics, c.served_atomics * 8),
        ];
        for (name, all) in [("send", &faults[..]), ("receive", &served[..])] {
            for row in rows.iter_mut().filter(|row| row.name == name) {
                row.drops = drops(all);
            }
        }
        if self.spec.link == RdmaLinkLayer::Ethernet {
            let c = &self.ether.counters;
            let (rx, tx) = (c.received.total(), c.transmitted.total());
            rows.push(row("ethernet-tx", tx.packets, tx.octets));
            // A frame that is dropped says by its reason which way it went.
            rows.push(QueueStats {
                drops: c.drops().map(|(name, n)| (name.to_owned(), n)).collect(),
                ..row("ethernet-rx", rx.packets, rx.octets)
            });
        }
        rows
    }
}
