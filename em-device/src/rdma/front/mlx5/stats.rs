//! What the function counts, and how long it may be left alone.

use super::Device;
use crate::rdma::front::stats::{engine_rows, row};
use m2m_fabric::proto::{QueueStats, RdmaLinkLayer};
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
        let mut rows = engine_rows(self.engine.counters(), self.running(), self.lost_events);
        if self.spec.link == RdmaLinkLayer::Ethernet {
            let c = &self.ether.counters;
            let (rx, tx) = (c.received.total(), c.transmitted.total());
            rows.push(row("ethernet-tx", self.running(), tx.packets, tx.octets));
            // A frame that is dropped says by its reason which way it went.
            rows.push(QueueStats {
                drops: c.drops().map(|(name, n)| (name.to_owned(), n)).collect(),
                ..row("ethernet-rx", self.running(), rx.packets, rx.octets)
            });
        }
        rows
    }
}
