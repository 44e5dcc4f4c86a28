//! Both ends at once, on two threads.

use super::ring_mem::{RING, RingMem};
use super::test_support::{ends, pair, readable, wire};
use super::*;
use crate::frame::FrameMeta;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

/// A wake-up that takes longer was lost.
const DEADLINE_MS: u64 = 20_000;

/// A pseudo-random sequence (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Length and contents of frame number `n`: its number, then a byte that depends on it.
fn expected(n: u64, mix: &Mix) -> (usize, u8) {
    let mut random = Random(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let long = random.below(1000) < mix.long_of_1000;
    let len = if long {
        1000 + random.below(MAX_FRAME as u64 - 999)
    } else {
        14 + random.below(60)
    };
    (len as usize, random.next() as u8)
}

struct Mix {
    frames: u64,
    long_of_1000: u64,
    /// Most frames between two flushes, and most frames of a receive batch.
    burst: u64,
    /// The sink says "later" now and then.
    later: bool,
}

fn produce(port: &mut ShmPort, mix: &Mix) {
    let mut random = Random(11);
    let mut buf = vec![0u8; MAX_FRAME];
    let mut n = 0;
    while n < mix.frames {
        let burst = 1 + random.below(mix.burst);
        let mut full = false;
        for _ in 0..burst.min(mix.frames - n) {
            let (len, byte) = expected(n, mix);
            buf[..len].fill(byte);
            buf[..8].copy_from_slice(&n.to_le_bytes());
            let (head, tail) = buf[..len].split_at_mut(len / 3);
            let parts = [VolatileSlice::from(head), VolatileSlice::from(tail)];
            match port.transmit(&Frame::new(FrameMeta::default(), &parts)) {
                Ok(()) => n += 1,
                Err(TxError::Full) => {
                    full = true;
                    break;
                }
                Err(error) => panic!("{error}: {:?}", port.down_reason()),
            }
        }
        port.flush();
        if full && !port.arm() {
            let woken = readable(port.wake_fd().unwrap(), DEADLINE_MS);
            assert!(woken, "lost wake-up of the producer at frame {n}");
        }
        if full {
            port.disarm();
        }
    }
}

fn consume(port: &mut ShmPort, mix: &Mix) -> u64 {
    let mut random = Random(5);
    let mut n = 0;
    let mut sleeps = 0;
    let mut copy = Vec::with_capacity(MAX_FRAME);
    while n < mix.frames {
        let budget = 1 + random.below(mix.burst) as usize;
        let mut held = false;
        let count = port.receive(budget, &mut |frame: &Frame<'_>| {
            if mix.later && random.below(50) == 0 {
                held = true;
                return Rx::Later;
            }
            copy.clear();
            frame.append_to(&mut copy);
            let (len, byte) = expected(n, mix);
            assert_eq!(copy.len(), len, "frame {n}");
            assert_eq!(copy[..8], n.to_le_bytes(), "frame {n}");
            assert!(copy[8..].iter().all(|b| *b == byte), "frame {n}");
            n += 1;
            Rx::Taken
        });
        if count == 0 && !held {
            if !port.arm() {
                let woken = readable(port.wake_fd().unwrap(), DEADLINE_MS);
                assert!(woken, "lost wake-up of the consumer at frame {n}");
                sleeps += 1;
            }
            port.disarm();
        }
    }
    sleeps
}

/// One end sends on a thread of its own, the other receives. Returns how often the receiver slept.
fn run(mix: &Mix) -> u64 {
    let (mut a, mut b) = pair();
    std::thread::scope(|scope| {
        let producer = scope.spawn(|| {
            produce(&mut a, mix);
            a
        });
        let sleeps = consume(&mut b, mix);
        drop(producer.join().unwrap());
        sleeps
    })
}

#[test]
fn millions_of_short_frames_arrive_in_order_and_nobody_oversleeps() {
    run(&Mix {
        frames: 3_000_000,
        long_of_1000: 0,
        burst: 64,
        later: false,
    });
}

#[test]
fn single_frames_wake_a_consumer_that_sleeps_each_time() {
    let sleeps = run(&Mix {
        frames: 200_000,
        long_of_1000: 0,
        burst: 1,
        later: false,
    });
    assert!(sleeps > 0, "the test is void if nobody ever slept");
}

/// Answers each frame with one, and sleeps in between, after a pause that differs: whoever misses
/// its wake-up is not saved by a next frame, because there is none before it answers.
fn volley(port: &mut ShmPort, rounds: u64, serves: bool, seed: u64) {
    let mut random = Random(seed);
    let mut bytes = [0u8; 60];
    let parts = [VolatileSlice::from(&mut bytes[..])];
    let frame = Frame::new(FrameMeta::default(), &parts);
    for round in 0..rounds {
        if serves || round > 0 {
            port.transmit(&frame).unwrap();
            port.flush();
        }
        while port.receive(1, &mut |_: &Frame<'_>| Rx::Taken) == 0 {
            for _ in 0..random.below(200) {
                std::hint::spin_loop();
            }
            if !port.arm() {
                let woken = readable(port.wake_fd().unwrap(), DEADLINE_MS);
                assert!(woken, "lost wake-up in round {round}");
            }
            port.disarm();
        }
    }
    port.transmit(&frame).unwrap();
    port.flush();
}

#[test]
fn a_volley_never_stops_for_a_lost_wake_up() {
    let (mut a, mut b) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| volley(&mut a, 150_000, true, 3));
        volley(&mut b, 150_000, false, 4);
    });
}

#[test]
fn long_frames_fill_the_ring_and_the_producer_sleeps_and_wakes() {
    run(&Mix {
        frames: 60_000,
        long_of_1000: 800,
        burst: 200,
        later: true,
    });
}

#[test]
fn a_peer_that_scribbles_over_the_memory_harms_nothing_but_the_wire() {
    for seed in 1..=12u64 {
        let memory = wire();
        let (mut a, mut b) = ends(&memory);
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = std::thread::spawn({
            let stop = Arc::clone(&stop);
            let rings = RingMem::map_pair(memory.as_fd()).unwrap();
            move || {
                let mut random = Random(seed);
                while !stop.load(Ordering::Relaxed) {
                    scribble(&rings[random.below(2) as usize], &mut random, seed);
                }
            }
        });
        let until = Instant::now() + Duration::from_millis(150);
        let mut frames = 0;
        while Instant::now() < until && (a.down_reason().is_none() || b.down_reason().is_none()) {
            for port in [&mut a, &mut b] {
                for len in [60, 1500, 65000] {
                    let mut bytes = vec![1; len];
                    let parts = [VolatileSlice::from(&mut bytes[..])];
                    let _ = port.transmit(&Frame::new(FrameMeta::default(), &parts));
                }
                port.flush();
                port.receive(64, &mut |frame: &Frame<'_>| {
                    assert!((MIN_FRAME..=MAX_FRAME).contains(&frame.len()));
                    assert_eq!(frame.meta.check(frame.len()), Ok(()));
                    frames += frame.to_vec().len();
                    Rx::Taken
                });
                port.arm();
                port.disarm();
            }
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        // Scribbling over indices and headers must have been noticed, not believed.
        if seed % 2 == 0 {
            assert!(a.down_reason().is_some() || b.down_reason().is_some());
        }
        for port in [&a, &b] {
            assert!(port.down_reason().is_none() || !port.carrier());
        }
    }
}

/// One hostile write. Seeds differ in what they aim at: odd ones leave the indices alone.
fn scribble(ring: &RingMem, random: &mut Random, seed: u64) {
    let value = match random.below(3) {
        0 => random.next(),
        1 => random.below(2 * RING as u64) & !15,
        _ => random.below(MAX_FRAME as u64 * 2),
    };
    let indices = ring.indices();
    let target = if seed % 2 == 0 {
        random.below(7)
    } else {
        5 + random.below(2)
    };
    match target {
        0 => indices.tail.0.store(value, Ordering::Relaxed),
        1 => indices.head.0.store(value, Ordering::Relaxed),
        2 => indices
            .consumer_waits
            .0
            .store(value as u32, Ordering::Relaxed),
        3 => indices
            .producer_waits
            .0
            .store(value as u32, Ordering::Relaxed),
        4 => indices.producer_state.0.store(1, Ordering::Relaxed),
        5 => {
            let at = (random.below(RING as u64) / if seed % 4 == 1 { 1 } else { 512 }) & !15;
            ring.store_header(at, [value, random.next()]).unwrap();
        }
        _ => ring
            .bytes(random.next(), 64)
            .unwrap()
            .copy_from(&[value as u8; 64]),
    }
}
