//! The counters of an engine, as people are shown them.

use crate::rdma::engine::Counters;
use m2m_fabric::proto::QueueStats;
use std::collections::BTreeMap;

/// A kind of work.
pub(super) fn row(name: &str, enabled: bool, packets: u64, bytes: u64) -> QueueStats {
    QueueStats {
        name: name.into(),
        enabled,
        packets,
        bytes,
        ..QueueStats::default()
    }
}

/// Counters by kind of work, whoever's driver it is; `lost_events` found no room in the driver's queue.
pub(super) fn engine_rows(c: &Counters, enabled: bool, lost_events: u64) -> Vec<QueueStats> {
    let row = |name, packets, bytes| row(name, enabled, packets, bytes);
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
        ("event", lost_events),
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
    rows
}
