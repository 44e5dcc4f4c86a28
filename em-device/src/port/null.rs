//! A port that leads nowhere.

use super::{Port, RxSink, TxError};
use crate::frame::Frame;
use m2m_fabric::proto::LinkStats;

/// Counts what is sent and drops it. Nothing ever comes in.
#[derive(Debug)]
pub struct NullPort {
    stats: LinkStats,
}

impl NullPort {
    /// A new one.
    pub fn new() -> Self {
        Self {
            stats: LinkStats {
                name: "null".into(),
                ..LinkStats::default()
            },
        }
    }
}

impl Default for NullPort {
    fn default() -> Self {
        Self::new()
    }
}

impl Port for NullPort {
    fn name(&self) -> &str {
        &self.stats.name
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.stats.tx_packets += 1;
        self.stats.tx_bytes += frame.len() as u64;
        Ok(())
    }

    fn flush(&mut self) {}

    fn receive(&mut self, _budget: usize, _sink: &mut dyn RxSink) -> usize {
        0
    }

    fn stats(&self) -> LinkStats {
        self.stats.clone()
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameMeta;
    use crate::port::Rx;
    use vm_memory::VolatileSlice;

    #[test]
    fn counts_what_is_sent_and_gives_nothing_back() {
        let mut port = NullPort::new();
        let mut bytes = [0u8; 60];
        let parts = [VolatileSlice::from(&mut bytes[..])];
        port.transmit(&Frame::new(FrameMeta::default(), &parts))
            .unwrap();
        port.flush();
        assert_eq!((port.stats().tx_packets, port.stats().tx_bytes), (1, 60));
        assert_eq!(port.receive(9, &mut |_: &Frame<'_>| Rx::Taken), 0);
        assert!(!port.arm());
    }
}
