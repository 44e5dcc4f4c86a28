//! Fault injection: a port around another one that loses, repeats, swaps and damages frames, the
//! same way every time for the same seed and the same frames.

use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, FrameMeta};
use m2m_fabric::proto::LinkStats;
use std::os::fd::BorrowedFd;
use vm_memory::VolatileSlice;

/// How often what happens to a frame: chances in a million, for each direction by itself. Their
/// sum should not be above a million; the first ones win.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// It is lost.
    pub drop: u32,
    /// It comes twice.
    pub duplicate: u32,
    /// It comes after the next one.
    pub reorder: u32,
    /// One bit of it is flipped.
    pub corrupt: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Pass,
    Drop,
    Duplicate,
    Delay,
    Corrupt { bit: u64 },
}

/// Faults of one direction.
#[derive(Debug)]
struct Dice {
    faults: Faults,
    state: u64,
    /// The frame that waits for the next one to pass.
    delayed: Option<(FrameMeta, Vec<u8>)>,
    dropped: u64,
    duplicated: u64,
    reordered: u64,
    corrupted: u64,
}

impl Dice {
    fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            state: seed,
            delayed: None,
            dropped: 0,
            duplicated: 0,
            reordered: 0,
            corrupted: 0,
        }
    }

    /// The next of a fixed sequence (a Weyl sequence, mixed).
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x ^ (x >> 32)
    }

    fn roll(&mut self) -> Fate {
        let Faults {
            drop,
            duplicate,
            reorder,
            corrupt,
        } = self.faults;
        let mut left = (self.next() % 1_000_000) as u32;
        let bit = self.next();
        for (chance, fate) in [
            (drop, Fate::Drop),
            (duplicate, Fate::Duplicate),
            (reorder, Fate::Delay),
            (corrupt, Fate::Corrupt { bit }),
        ] {
            if left < chance {
                return fate;
            }
            left -= chance;
        }
        Fate::Pass
    }

    /// Decides about a frame and gives what becomes of it to `emit`, which returns false when there
    /// was no room. Returns false when the frame itself found no room; then nothing happened to it.
    fn pass(&mut self, frame: &Frame<'_>, emit: &mut dyn FnMut(&Frame<'_>) -> bool) -> bool {
        let before = self.state;
        let fate = match self.roll() {
            // Only one can wait.
            Fate::Delay if self.delayed.is_some() => Fate::Pass,
            fate => fate,
        };
        let passed = match fate {
            Fate::Drop => {
                self.dropped += 1;
                return true;
            }
            Fate::Delay => {
                self.reordered += 1;
                self.delayed = Some((frame.meta, frame.to_vec()));
                return true;
            }
            Fate::Pass => emit(frame),
            Fate::Duplicate => {
                let passed = emit(frame);
                // No room for the second one is no fault of the first.
                self.duplicated += u64::from(passed && emit(frame));
                passed
            }
            Fate::Corrupt { bit } => {
                let mut bytes = frame.to_vec();
                let at = (bit / 8) as usize % bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << (bit % 8);
                }
                let parts = [VolatileSlice::from(&mut bytes[..])];
                let passed = emit(&Frame::new(frame.meta, &parts));
                self.corrupted += u64::from(passed);
                passed
            }
        };
        if !passed {
            self.state = before;
            return false;
        }
        self.release(emit);
        true
    }

    /// Gives the delayed frame, if there is one, to `emit`; keeps it when there is no room.
    fn release(&mut self, emit: &mut dyn FnMut(&Frame<'_>) -> bool) -> bool {
        let Some((meta, mut bytes)) = self.delayed.take() else {
            return false;
        };
        let passed = {
            let parts = [VolatileSlice::from(&mut bytes[..])];
            emit(&Frame::new(meta, &parts))
        };
        if !passed {
            self.delayed = Some((meta, bytes));
        }
        passed
    }
}

/// A port with faults.
#[derive(Debug)]
pub struct FaultPort<P> {
    inner: P,
    sending: Dice,
    receiving: Dice,
    /// Whether something was sent since the last flush.
    sent: bool,
    held: bool,
}

impl<P: Port> FaultPort<P> {
    /// Puts `faults` between `inner` and its user, the same ones for the same `seed`.
    pub fn new(inner: P, faults: Faults, seed: u64) -> Self {
        Self {
            inner,
            sending: Dice::new(faults, seed),
            receiving: Dice::new(faults, !seed),
            sent: false,
            held: false,
        }
    }
}

/// Decides about frames that come in.
struct Gambler<'a> {
    dice: &'a mut Dice,
    sink: &'a mut dyn RxSink,
}

impl RxSink for Gambler<'_> {
    fn frame(&mut self, frame: &Frame<'_>) -> Rx {
        let Self { dice, sink } = self;
        match dice.pass(frame, &mut |frame| sink.frame(frame) == Rx::Taken) {
            true => Rx::Taken,
            false => Rx::Later,
        }
    }

    fn done(&mut self) {
        self.sink.done();
    }
}

impl<P: Port> Port for FaultPort<P> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.sent = true;
        let inner = &mut self.inner;
        let mut error = None;
        let passed = self.sending.pass(frame, &mut |frame| {
            let result = inner.transmit(frame);
            error = result.err();
            result.is_ok()
        });
        match (passed, error) {
            (false, Some(error)) => Err(error),
            _ => Ok(()),
        }
    }

    fn flush(&mut self) {
        // A delayed frame that nothing follows goes out at a flush that has nothing else to do.
        if !self.sent {
            let inner = &mut self.inner;
            self.sending
                .release(&mut |frame| inner.transmit(frame).is_ok());
        }
        self.sent = false;
        self.inner.flush();
    }

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        let dice = &mut self.receiving;
        self.held = false;
        let count = self.inner.receive(budget, &mut Gambler { dice, sink });
        if count > 0 || budget == 0 {
            return count;
        }
        // Nothing came that a delayed frame could follow.
        let held = &mut self.held;
        usize::from(dice.release(&mut |frame| {
            let taken = sink.frame(frame) == Rx::Taken;
            *held = !taken;
            taken
        }))
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn arm(&mut self) -> bool {
        self.flush();
        (self.receiving.delayed.is_some() && !self.held) || self.inner.arm()
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
        let mut stats = self.inner.stats();
        for (dice, way) in [(&self.sending, "tx"), (&self.receiving, "rx")] {
            for (what, count) in [
                ("dropped", dice.dropped),
                ("duplicated", dice.duplicated),
                ("reordered", dice.reordered),
                ("corrupted", dice.corrupted),
            ] {
                if count > 0 {
                    stats.drops.insert(format!("fault_{way}_{what}"), count);
                }
            }
        }
        stats
    }

    fn accepts_offloads(&self) -> bool {
        self.inner.accepts_offloads()
    }

    fn accepts_udp_segments(&self) -> bool {
        self.inner.accepts_udp_segments()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::loopback::LoopbackPort;
    use crate::port::null::NullPort;
    use crate::port::shm::test_support::{pair, send, take};

    const NONE: Faults = Faults {
        drop: 0,
        duplicate: 0,
        reorder: 0,
        corrupt: 0,
    };
    const PLAIN: FrameMeta = FrameMeta {
        flags: 0,
        gso_type: 0,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
    };

    /// What arrives when `count` numbered frames go through a port with these faults on sending.
    fn through(faults: Faults, seed: u64, count: u8) -> Vec<Vec<u8>> {
        let (a, mut b) = pair();
        let mut a = FaultPort::new(a, faults, seed);
        for n in 0..count {
            send(&mut a, PLAIN, &[n; 60]).unwrap();
        }
        a.flush();
        a.flush();
        take(&mut b, 999)
            .into_iter()
            .map(|(_, bytes)| bytes)
            .collect()
    }

    fn firsts(frames: &[Vec<u8>]) -> Vec<u8> {
        frames.iter().map(|bytes| bytes[0]).collect()
    }

    #[test]
    fn without_faults_everything_passes() {
        let all: Vec<u8> = (0..50).collect();
        assert_eq!(firsts(&through(NONE, 1, 50)), all);
    }

    #[test]
    fn each_fault_does_what_it_says() {
        let certain = 1_000_000;
        let drop = Faults {
            drop: certain,
            ..NONE
        };
        assert!(through(drop, 1, 9).is_empty());
        let duplicate = Faults {
            duplicate: certain,
            ..NONE
        };
        assert_eq!(firsts(&through(duplicate, 1, 3)), [0, 0, 1, 1, 2, 2]);
        let reorder = Faults {
            reorder: certain,
            ..NONE
        };
        assert_eq!(firsts(&through(reorder, 1, 5)), [1, 0, 3, 2, 4]);
        let corrupt = Faults {
            corrupt: certain,
            ..NONE
        };
        for (n, bytes) in through(corrupt, 1, 9).iter().enumerate() {
            let flipped: u32 = bytes.iter().map(|b| (b ^ n as u8).count_ones()).sum();
            assert_eq!(flipped, 1);
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_faults_and_about_the_asked_rate() {
        let faults = Faults {
            drop: 200_000,
            duplicate: 100_000,
            reorder: 50_000,
            corrupt: 10_000,
        };
        let first = through(faults, 7, 250);
        assert_eq!(first, through(faults, 7, 250));
        assert_ne!(first, through(faults, 8, 250));
        let mut port = FaultPort::new(
            NullPort::new(),
            Faults {
                drop: 200_000,
                ..NONE
            },
            3,
        );
        for _ in 0..10_000 {
            send(&mut port, PLAIN, &[0; 60]).unwrap();
        }
        let dropped = port.stats().drops["fault_tx_dropped"];
        assert!((1800..2200).contains(&dropped), "{dropped}");
    }

    #[test]
    fn a_refused_frame_meets_the_same_fate_when_sent_again() {
        let faults = Faults {
            duplicate: 500_000,
            ..NONE
        };
        let mut port = FaultPort::new(LoopbackPort::new(1), faults, 5);
        let mut arrived = Vec::new();
        for n in 0..20u8 {
            while send(&mut port, PLAIN, &[n; 60]) == Err(TxError::Full) {
                port.flush();
                // Frames of the receiving side may be doubled too: only their order counts.
                arrived.extend(take(&mut port, 9).iter().map(|(_, b)| b[0]));
            }
        }
        port.flush();
        arrived.extend(take(&mut port, 9).iter().map(|(_, b)| b[0]));
        arrived.dedup();
        let all: Vec<u8> = (0..20).collect();
        assert_eq!(arrived, all);
    }

    #[test]
    fn faults_on_receiving_lose_no_frame_that_waits_for_room() {
        let (mut a, b) = pair();
        let faults = Faults {
            reorder: 400_000,
            ..NONE
        };
        let mut b = FaultPort::new(b, faults, 9);
        for n in 0..100u8 {
            send(&mut a, PLAIN, &[n; 60]).unwrap();
        }
        a.flush();
        let mut arrived = Vec::new();
        let mut turn = 0;
        for _ in 0..500 {
            b.receive(3, &mut |frame: &Frame<'_>| {
                turn += 1;
                if turn % 3 == 0 {
                    return Rx::Later;
                }
                arrived.push(frame.to_vec()[0]);
                Rx::Taken
            });
        }
        let sorted = arrived.is_sorted();
        arrived.sort_unstable();
        let all: Vec<u8> = (0..100).collect();
        assert_eq!(arrived, all);
        assert!(!sorted);
        assert!(!b.arm());
    }
}
