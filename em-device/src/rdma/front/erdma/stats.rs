//! What the function counts.

use super::command::{Command, Fault, Response};
use super::device::Device;
use crate::rdma::front::stats::engine_rows;
use dot_iommu::DotView;
use m2m_fabric::proto::QueueStats;
use vm_memory::{Bytes, GuestAddress};

/// What the driver looks for at the beginning.
const MAGIC: u16 = 0x5566;
/// Bytes in front of the counters, and of all of it.
const HEAD: usize = 16;
const LEN: usize = HEAD + 11 * 8;

impl Device {
    /// Counters by kind of work: what this function asked of others, and what others asked of it.
    pub fn stats(&self) -> Vec<QueueStats> {
        engine_rows(self.engine.counters(), self.running(), self.lost_events)
    }

    /// GET_STATS: requests, packets and bytes sent, three reasons to drop; packets and bytes received, the same reasons.
    pub(super) fn get_stats(
        &self,
        command: &Command,
        memory: &DotView<'_>,
    ) -> Result<Response, Fault> {
        let c = self.engine.counters();
        let requests = c.sends + c.writes + c.reads + c.atomics;
        let sent = c.send_bytes + c.write_bytes + c.served_read_bytes;
        let served = c.received + c.served_writes + c.served_reads + c.served_atomics;
        let received = c.received_bytes + c.served_write_bytes + c.read_bytes;
        let counters = [
            requests,
            c.packets_sent,
            sent,
            0,
            0,
            0,
            served,
            received,
            0,
            0,
            0,
        ];
        let mut bytes = Vec::with_capacity(LEN);
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&[1, LEN as u8]);
        bytes.extend_from_slice(&command.word(12).to_le_bytes());
        bytes.resize(HEAD, 0);
        bytes.extend(counters.iter().flat_map(|counter| counter.to_le_bytes()));
        bytes.truncate(command.word(24) as usize);
        memory
            .write_slice(&bytes, GuestAddress(command.long(16)))
            .map_err(|_| Fault::Memory("buffer of statistics"))?;
        Ok([0; 2])
    }
}
