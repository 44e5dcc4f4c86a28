//! Around a port that takes finished frames only, or not all unfinished ones: completes checksums and cuts large frames into
//! segments before they go out.

use super::{Port, RxSink, TxError};
use crate::frame::{Frame, FrameMeta};
use crate::offload::{Segmenter, complete_checksum};
use m2m_fabric::proto::LinkStats;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use vm_memory::VolatileSlice;

/// A port that takes every frame for one that takes finished frames.
pub struct FinishPort {
    inner: Box<dyn Port>,
    segmenter: Segmenter,
    /// Finished frames that found no room yet: the rest of one large frame, in order.
    waiting: VecDeque<Vec<u8>>,
    /// Memory of frames that went out.
    spare: Vec<Vec<u8>>,
}

impl FinishPort {
    /// `port` itself if it takes unfinished frames, else this around it.
    pub fn around(port: Box<dyn Port>) -> Box<dyn Port> {
        if port.accepts_offloads() && port.accepts_udp_segments() {
            return port;
        }
        Box::new(Self {
            inner: port,
            segmenter: Segmenter::new(),
            waiting: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    /// Sends what waits, as far as there is room. Answers how many frames went out.
    fn push(&mut self) -> usize {
        let mut sent = 0;
        while let Some(mut bytes) = self.waiting.pop_front() {
            match send(self.inner.as_mut(), &mut bytes) {
                Err(TxError::Full) => {
                    self.waiting.push_front(bytes);
                    break;
                }
                // What the port refuses is in its own counters.
                _ => sent += 1,
            }
            self.spare.push(bytes);
        }
        sent
    }

    fn copy(&mut self, bytes: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        bytes(&mut copy);
        copy
    }

    fn finish_checksum(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        let mut bytes = self.copy(|copy| frame.append_to(copy));
        let finished = complete_checksum(&mut bytes, &frame.meta).map_err(|_| TxError::Malformed);
        let sent = finished.and_then(|()| send(self.inner.as_mut(), &mut bytes));
        self.spare.push(bytes);
        sent
    }

    fn segment(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        let mut segmenter = std::mem::take(&mut self.segmenter);
        let done = segmenter.segment(frame, &mut |segment| {
            let copy = self.copy(|copy| copy.extend_from_slice(segment));
            self.waiting.push_back(copy);
            true
        });
        self.segmenter = segmenter;
        if let Err(error) = done {
            log::trace!("frame dropped: {error}");
            self.waiting.clear();
            return Err(TxError::Malformed);
        }
        self.push();
        Ok(())
    }
}

/// Sends a finished frame.
fn send(port: &mut dyn Port, bytes: &mut [u8]) -> Result<(), TxError> {
    let parts = [VolatileSlice::from(bytes)];
    port.transmit(&Frame::new(FrameMeta::default(), &parts))
}

impl Port for FinishPort {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.push();
        if !self.waiting.is_empty() {
            return Err(TxError::Full);
        }
        let accepted = match frame.meta.gso() {
            FrameMeta::GSO_UDP => self.inner.accepts_udp_segments(),
            _ => self.inner.accepts_offloads(),
        };
        if accepted {
            self.inner.transmit(frame)
        } else if frame.meta.is_gso() {
            self.segment(frame)
        } else if frame.meta.needs_csum() {
            self.finish_checksum(frame)
        } else {
            self.inner.transmit(frame)
        }
    }

    fn flush(&mut self) {
        self.push();
        self.inner.flush();
    }

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        // Every round comes here, so what waits goes out also when nothing follows it.
        let sent = self.push();
        if sent > 0 {
            self.inner.flush();
        }
        sent + self.inner.receive(budget, sink)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn carrier(&self) -> bool {
        self.inner.carrier()
    }

    fn down_reason(&self) -> Option<String> {
        self.inner.down_reason()
    }

    fn stats(&self) -> LinkStats {
        self.inner.stats()
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::Rx;
    use std::sync::{Arc, Mutex};

    /// Takes finished frames, as long as there is room.
    pub(super) struct Strict {
        pub(super) got: Arc<Mutex<Vec<Vec<u8>>>>,
        pub(super) room: Arc<Mutex<usize>>,
    }

    impl Port for Strict {
        fn name(&self) -> &str {
            "strict"
        }

        fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
            assert_eq!(frame.meta, FrameMeta::default(), "an unfinished frame");
            let mut room = self.room.lock().unwrap();
            *room = room.checked_sub(1).ok_or(TxError::Full)?;
            self.got.lock().unwrap().push(frame.to_vec());
            Ok(())
        }

        fn flush(&mut self) {}

        fn receive(&mut self, _budget: usize, _sink: &mut dyn RxSink) -> usize {
            0
        }

        fn stats(&self) -> LinkStats {
            LinkStats::default()
        }

        fn accepts_offloads(&self) -> bool {
            false
        }
    }

    struct Bench {
        port: Box<dyn Port>,
        got: Arc<Mutex<Vec<Vec<u8>>>>,
        room: Arc<Mutex<usize>>,
    }

    impl Bench {
        fn new(room: usize) -> Self {
            let (got, room) = (Arc::default(), Arc::new(Mutex::new(room)));
            let strict = Strict {
                got: Arc::clone(&got),
                room: room.clone(),
            };
            let port = FinishPort::around(Box::new(strict));
            Self { port, got, room }
        }

        fn send(&mut self, meta: FrameMeta, bytes: &[u8]) -> Result<(), TxError> {
            let mut copy = bytes.to_vec();
            let parts = [VolatileSlice::from(&mut copy[..])];
            self.port.transmit(&Frame::new(meta, &parts))
        }

        fn take(&self) -> Vec<Vec<u8>> {
            std::mem::take(&mut self.got.lock().unwrap())
        }
    }

    const UNFINISHED: FrameMeta = FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        gso_type: 0,
        hdr_len: 54,
        gso_size: 0,
        csum_start: 34,
        csum_offset: 16,
    };

    /// A TCP frame with the sum of the pseudo-header in its checksum field.
    fn tcp(payload: usize) -> Vec<u8> {
        let mut f = [&[2; 12][..], &[8, 0, 0x45, 0]].concat();
        f.extend((40 + payload as u16).to_be_bytes());
        f.extend([0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        f.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0]);
        let sum: u32 = 0x0a00 + 1 + 0x0a00 + 2 + 6 + 20 + payload as u32;
        f.extend((sum as u16).to_be_bytes());
        f.extend([0, 0]);
        f.extend((0..payload).map(|n| n as u8));
        f
    }

    fn tcp_is_right(frame: &[u8]) -> bool {
        let mut sum = crate::offload::Checksum::new();
        sum.add(&frame[26..34]);
        sum.add_u16(6);
        sum.add_u16(frame.len() as u16 - 34);
        sum.add(&frame[34..]);
        sum.finish() == 0
    }

    #[test]
    fn a_port_that_takes_offloads_is_left_alone() {
        let port = FinishPort::around(Box::new(crate::port::null::NullPort::new()));
        assert_eq!(port.name(), crate::port::null::NullPort::new().name());
        assert!(port.accepts_offloads() && Bench::new(0).port.accepts_offloads());
    }

    #[test]
    fn checksums_are_finished_and_finished_frames_pass() {
        let mut bench = Bench::new(9);
        bench.send(FrameMeta::default(), &[7; 60]).unwrap();
        bench.send(UNFINISHED, &tcp(101)).unwrap();
        let got = bench.take();
        assert_eq!(got[0], [7; 60]);
        assert!(tcp_is_right(&got[1]) && !tcp_is_right(&tcp(101)));
        assert_eq!(got[1][54..], tcp(101)[54..]);
    }

    #[test]
    fn a_large_frame_becomes_segments_that_wait_for_room_and_come_once() {
        let large = FrameMeta {
            gso_type: FrameMeta::GSO_TCPV4,
            gso_size: 1000,
            ..UNFINISHED
        };
        let mut bench = Bench::new(2);
        let frame = tcp(3500);
        bench.send(large, &frame).unwrap();
        assert_eq!(bench.take().len(), 2);
        assert_eq!(bench.send(UNFINISHED, &tcp(5)), Err(TxError::Full));
        *bench.room.lock().unwrap() = 1;
        assert_eq!(bench.port.receive(9, &mut |_: &Frame<'_>| Rx::Taken), 1);
        *bench.room.lock().unwrap() = 9;
        bench.send(UNFINISHED, &tcp(5)).unwrap();
        let rest = bench.take();
        assert_eq!(
            rest.iter().map(Vec::len).collect::<Vec<_>>(),
            [1054, 554, 59]
        );
        assert!(rest.iter().all(|f| tcp_is_right(f)));
        assert_eq!(rest[0][54..], frame[2054..3054]);
        assert_eq!(rest[1][54..], frame[3054..]);
    }

    #[test]
    fn what_is_no_tcp_frame_as_it_says_is_refused() {
        let large = FrameMeta {
            gso_type: FrameMeta::GSO_TCPV6,
            gso_size: 1000,
            ..UNFINISHED
        };
        let mut bench = Bench::new(9);
        assert_eq!(bench.send(large, &tcp(3500)), Err(TxError::Malformed));
        assert!(bench.take().is_empty());
        bench.send(UNFINISHED, &tcp(5)).unwrap();
    }
}
