//! Counters. All count up from the start of the EM and wrap at 2⁶⁴.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything an EM counts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmStats {
    /// By function.
    pub functions: Vec<FunctionStats>,
    /// By wire.
    pub links: Vec<LinkStats>,
    /// Times the data path slept and was woken.
    pub wakeups: u64,
    /// Bursts of work the data path did.
    pub bursts: u64,
}

/// Counters of one function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionStats {
    /// Function id.
    pub function: u32,
    /// One entry per virtqueue (or other work queue), in queue order.
    pub queues: Vec<QueueStats>,
    /// Negotiated feature bits, 0 while no driver is there.
    pub features: u64,
    /// Mapped guest memory: ranges and bytes.
    pub dma_ranges: u64,
    /// Bytes of guest memory mapped.
    pub dma_bytes: u64,
}

/// Counters of one queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// For example `rx0`, `tx0`, `ctrl`.
    pub name: String,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Frames (or commands) moved.
    pub packets: u64,
    /// Bytes of those frames, without the virtio header.
    pub bytes: u64,
    /// Notifications by the driver.
    pub kicks: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Frames dropped, by reason.
    pub drops: BTreeMap<String, u64>,
}

/// Counters of one wire end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkStats {
    /// Link id.
    pub link: u32,
    /// Kind and peer, for people.
    pub name: String,
    /// Frames sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Frames received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Frames dropped, by reason.
    pub drops: BTreeMap<String, u64>,
}
