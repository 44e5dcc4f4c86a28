//! What an engine counts.

/// What happened since the engine was made. All only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// SENDs completed.
    pub sends: u64,
    /// Bytes of them.
    pub send_bytes: u64,
    /// RDMA WRITEs completed.
    pub writes: u64,
    /// Bytes of them.
    pub write_bytes: u64,
    /// RDMA READs completed.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Atomics completed.
    pub atomics: u64,
    /// Requests completed with an error, without those flushed.
    pub failed: u64,
    /// Messages received by SEND.
    pub received: u64,
    /// Bytes of them.
    pub received_bytes: u64,
    /// RDMA WRITEs of peers done.
    pub served_writes: u64,
    /// Bytes of them.
    pub served_write_bytes: u64,
    /// RDMA READs of peers done.
    pub served_reads: u64,
    /// Bytes of them.
    pub served_read_bytes: u64,
    /// Atomics of peers done.
    pub served_atomics: u64,
    /// Request packets sent.
    pub packets_sent: u64,
    /// Of which had been sent before.
    pub retransmissions: u64,
    /// Times without an answer in time.
    pub timeouts: u64,
    /// Answers that a peer has no receive posted.
    pub receiver_not_ready: u64,
    /// Answers that a packet is missing.
    pub sequence_errors: u64,
    /// Requests of peers refused: malformed, not allowed, not possible.
    pub refused: u64,
    /// Packets of unreliable services that went nowhere.
    pub dropped: u64,
}
