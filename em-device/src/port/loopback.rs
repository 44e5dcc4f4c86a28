//! A port whose frames come back.

use super::counters::Counters;
use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use m2m_fabric::proto::LinkStats;
use std::collections::VecDeque;
use vm_memory::VolatileSlice;

/// Gives every frame that is sent back to the receiver, in order, after the flush.
#[derive(Debug)]
pub struct LoopbackPort {
    name: String,
    frames: VecDeque<(FrameMeta, Vec<u8>)>,
    /// Frames at the front of the queue that were flushed.
    visible: usize,
    limit: usize,
    held: bool,
    /// Buffers of frames that were taken, to be used again.
    spare: Vec<Vec<u8>>,
    counters: Counters,
}

/// Most buffers kept for reuse.
const SPARE: usize = 64;

impl LoopbackPort {
    /// Frames a [`LoopbackPort::default`] keeps.
    pub const DEFAULT_LIMIT: usize = 1024;

    /// One that keeps at most `limit` frames.
    pub fn new(limit: usize) -> Self {
        Self {
            name: "loopback".into(),
            frames: VecDeque::new(),
            visible: 0,
            limit,
            held: false,
            spare: Vec::new(),
            counters: Counters::default(),
        }
    }
}

impl Default for LoopbackPort {
    fn default() -> Self {
        Self::new(Self::DEFAULT_LIMIT)
    }
}

impl Port for LoopbackPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
            self.counters.dropped("bad_length");
            return Err(TxError::TooLong);
        }
        if self.frames.len() >= self.limit {
            return Err(TxError::Full);
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        frame.append_to(&mut bytes);
        self.frames.push_back((frame.meta, bytes));
        self.counters.sent(frame.len());
        Ok(())
    }

    fn flush(&mut self) {
        self.visible = self.frames.len();
    }

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        self.held = false;
        let mut count = 0;
        while count < budget && self.visible > 0 {
            let Some((meta, bytes)) = self.frames.front_mut() else {
                break;
            };
            let len = bytes.len();
            let taken = sink.frame(&Frame::new(*meta, &[VolatileSlice::from(&mut bytes[..])]));
            if taken == Rx::Later {
                self.held = true;
                break;
            }
            self.counters.received(len);
            count += 1;
            self.visible -= 1;
            if let Some((_, mut bytes)) = self.frames.pop_front() {
                if self.spare.len() < SPARE {
                    bytes.clear();
                    self.spare.push(bytes);
                }
            }
        }
        count
    }

    fn arm(&mut self) -> bool {
        // Nobody else sends here, so nothing can come while the owner sleeps.
        self.flush();
        self.visible > 0 && !self.held
    }

    fn stats(&self) -> LinkStats {
        self.counters.stats(&self.name)
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::shm::test_support::{send, take};

    #[test]
    fn frames_come_back_in_order_with_their_offload_facts() {
        let mut port = LoopbackPort::default();
        let meta = FrameMeta {
            flags: FrameMeta::DATA_VALID,
            ..FrameMeta::default()
        };
        send(&mut port, meta, &[1; 60]).unwrap();
        send(&mut port, FrameMeta::default(), &[2; 61]).unwrap();
        assert!(take(&mut port, 9).is_empty(), "not before the flush");
        port.flush();
        assert!(port.arm());
        assert_eq!(take(&mut port, 1), [(meta, vec![1; 60])]);
        assert_eq!(take(&mut port, 9), [(FrameMeta::default(), vec![2; 61])]);
        assert!(!port.arm());
        assert_eq!(port.stats().rx_bytes, 121);
    }

    #[test]
    fn a_full_port_refuses_until_frames_are_taken() {
        let mut port = LoopbackPort::new(2);
        for _ in 0..2 {
            send(&mut port, FrameMeta::default(), &[0; 60]).unwrap();
        }
        let refused = send(&mut port, FrameMeta::default(), &[0; 60]);
        assert_eq!(refused, Err(TxError::Full));
        port.flush();
        assert_eq!(take(&mut port, 1).len(), 1);
        assert_eq!(send(&mut port, FrameMeta::default(), &[0; 60]), Ok(()));
    }

    #[test]
    fn a_frame_left_for_later_is_not_lost() {
        let mut port = LoopbackPort::default();
        send(&mut port, FrameMeta::default(), &[5; 60]).unwrap();
        port.flush();
        assert_eq!(port.receive(9, &mut |_: &Frame<'_>| Rx::Later), 0);
        assert!(!port.arm());
        assert_eq!(take(&mut port, 9).len(), 1);
    }
}
