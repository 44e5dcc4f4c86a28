//! Interleavings and reorderings of the two ends of a ring, by loom, with up to three preemptions. The ends are the
//! same sources as those of a wire, over [`ring_mem`] with loom's atomics and room for two records.
//!
//! A bell is what an eventfd is to [`super::ShmPort`]. It rings by itself at no time, so a lost wake-up is a deadlock,
//! which loom reports.

use super::{Corrupt, record};
use consumer::Consumer;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use producer::{Producer, Pushed};
use ring_mem::{RING, RingMem};

#[allow(dead_code, clippy::duplicate_mod)] // not all of it is in the model; loom's types are other ones
#[path = "consumer.rs"]
mod consumer;
#[allow(dead_code, clippy::duplicate_mod)]
#[path = "producer.rs"]
mod producer;

/// A record takes half of the ring at the most.
const MAX_FRAME: usize = 16;
/// One more than there is room for.
const RECORDS: usize = 3;

mod sync {
    pub(super) use loom::sync::atomic::{Ordering, fence};
}

mod ring_mem {
    //! What is under a ring, on the heap.
    #![allow(unsafe_code)] // bytes that both ends see

    use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU8;
    use vm_memory::VolatileSlice;

    pub(super) const RING: usize = 64;
    pub(super) const ATTACHED: u32 = 1;
    pub(super) const LEFT: u32 = 2;

    pub(super) struct Line<T>(pub(super) T);

    pub(super) struct Indices {
        pub(super) tail: Line<AtomicU64>,
        pub(super) head: Line<AtomicU64>,
        pub(super) consumer_waits: Line<AtomicU32>,
        pub(super) producer_waits: Line<AtomicU32>,
        pub(super) producer_state: Line<AtomicU32>,
    }

    struct Shared {
        indices: Indices,
        headers: Vec<[AtomicU64; 2]>,
        bytes: [AtomicU8; 2 * RING],
    }

    #[derive(Clone)]
    pub(super) struct RingMem(Arc<Shared>);

    impl std::fmt::Debug for RingMem {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("RingMem")
        }
    }

    impl RingMem {
        pub(super) fn new() -> Self {
            Self(Arc::new(Shared {
                indices: Indices {
                    tail: Line(AtomicU64::new(0)),
                    head: Line(AtomicU64::new(0)),
                    consumer_waits: Line(AtomicU32::new(0)),
                    producer_waits: Line(AtomicU32::new(0)),
                    producer_state: Line(AtomicU32::new(0)),
                },
                headers: (0..RING / 16)
                    .map(|_| [AtomicU64::new(0), AtomicU64::new(0)])
                    .collect(),
                bytes: [const { AtomicU8::new(0) }; 2 * RING],
            }))
        }

        pub(super) fn indices(&self) -> &Indices {
            &self.0.indices
        }

        pub(super) fn bytes(&self, index: u64, len: usize) -> Option<VolatileSlice<'_>> {
            let at = (index % RING as u64) as usize;
            let bytes = self.0.bytes.get(at..at + len)?;
            let start = bytes.as_ptr().cast_mut().cast();
            // SAFETY: these bytes live as long as self, and are atomics, which may change behind a reference.
            Some(unsafe { VolatileSlice::new(start, len) })
        }

        fn header(&self, index: u64) -> Option<&[AtomicU64; 2]> {
            self.0.headers.get((index % RING as u64) as usize / 16)
        }

        pub(super) fn load_header(&self, index: u64) -> Option<[u64; 2]> {
            let [a, b] = self.header(index)?;
            Some([a.load(Ordering::Relaxed), b.load(Ordering::Relaxed)])
        }

        pub(super) fn store_header(&self, index: u64, words: [u64; 2]) -> Option<()> {
            let [a, b] = self.header(index)?;
            a.store(words[0], Ordering::Relaxed);
            b.store(words[1], Ordering::Relaxed);
            Some(())
        }
    }
}

#[derive(Clone)]
struct Bell(Arc<(Mutex<bool>, Condvar)>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn ring(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_one();
    }

    /// Sleeps until it has rung.
    fn wait(&self) {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
    }

    fn swallow(&self) {
        *self.0.0.lock().unwrap() = false;
    }
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Sends records of growing length; sleeps while there is no room.
fn send(producer: &mut Producer, own: &Bell, peer: &Bell) {
    for n in 0..RECORDS {
        while producer.push_bytes(&[n as u8; MAX_FRAME][..=n]).unwrap() == Pushed::Full {
            if producer.flush() {
                peer.ring();
            }
            if !producer.room_is_back().unwrap() {
                own.wait();
                own.swallow();
            }
        }
        if producer.flush() {
            peer.ring();
        }
    }
}

/// Takes what is there; answers how much, and `next` is the record that comes next.
fn take(consumer: &mut Consumer, next: &mut usize) -> usize {
    consumer
        .batch(64, &mut |words, _| {
            let header = record::Header::from_words(words);
            assert_eq!(header.len as usize, *next + 1, "in order, and as sent");
            *next += 1;
            true
        })
        .unwrap()
}

/// Takes all records from `next` on; sleeps while there is none.
fn receive(consumer: &mut Consumer, mut next: usize, own: &Bell, peer: &Bell) {
    while next < RECORDS {
        let count = take(consumer, &mut next);
        if consumer.publish() {
            peer.ring();
        }
        if count == 0 && !consumer.arm().unwrap() {
            own.wait();
            consumer.disarm();
            own.swallow();
        }
    }
}

#[test]
fn every_record_arrives_in_order_and_no_wake_up_is_lost() {
    explore(|| {
        let (ring, [here, there]) = (RingMem::new(), [Bell::new(), Bell::new()]);
        let sender = thread::spawn({
            let (ring, here, there) = (ring.clone(), here.clone(), there.clone());
            move || send(&mut Producer::new(ring).unwrap(), &here, &there)
        });
        receive(&mut Consumer::new(ring).unwrap(), 0, &there, &here);
        sender.join().unwrap();
    });
}

/// Where a consumer is killed.
#[derive(Debug, Clone, Copy)]
enum Killed {
    Asleep,
    WithWhatItTook,
    BeforeItRings,
}

#[test]
fn whoever_takes_the_place_of_a_killed_consumer_gets_all_that_was_not_given_back() {
    for killed in [
        Killed::Asleep,
        Killed::WithWhatItTook,
        Killed::BeforeItRings,
    ] {
        explore(move || {
            let (ring, [here, there]) = (RingMem::new(), [Bell::new(), Bell::new()]);
            let sender = thread::spawn({
                let (ring, here, there) = (ring.clone(), here.clone(), there.clone());
                move || send(&mut Producer::new(ring).unwrap(), &here, &there)
            });
            let (mut former, mut taken) = (Consumer::new(ring.clone()).unwrap(), 0);
            let next = match killed {
                Killed::Asleep => {
                    let _ = former.arm().unwrap();
                    0
                }
                Killed::WithWhatItTook => {
                    take(&mut former, &mut taken);
                    0
                }
                Killed::BeforeItRings => {
                    take(&mut former, &mut taken);
                    let _ = former.publish();
                    taken
                }
            };
            let mut consumer = Consumer::new(ring).unwrap();
            // As attaching does.
            here.ring();
            receive(&mut consumer, next, &there, &here);
            sender.join().unwrap();
        });
    }
}

#[test]
fn a_producer_that_takes_the_place_of_a_killed_one_goes_on_behind_what_was_published() {
    explore(|| {
        let (ring, [here, there]) = (RingMem::new(), [Bell::new(), Bell::new()]);
        let receiver = thread::spawn({
            let (ring, here, there) = (ring.clone(), here.clone(), there.clone());
            move || receive(&mut Consumer::new(ring).unwrap(), 0, &there, &here)
        });
        let mut former = Producer::new(ring.clone()).unwrap();
        // One is published, whose reader was not told, and one is lost.
        assert_eq!(former.push_bytes(&[0]).unwrap(), Pushed::Done);
        let _ = former.flush();
        let _ = former.push_bytes(&[9; MAX_FRAME]).unwrap();
        let mut producer = Producer::new(ring).unwrap();
        there.ring();
        for n in 1..RECORDS {
            while producer.push_bytes(&[n as u8; MAX_FRAME][..=n]).unwrap() == Pushed::Full {
                if producer.flush() {
                    there.ring();
                }
                if !producer.room_is_back().unwrap() {
                    here.wait();
                    here.swallow();
                }
            }
        }
        if producer.flush() {
            there.ring();
        }
        receiver.join().unwrap();
    });
}

const _: () = assert!(RING == 2 * (record::ALIGN + MAX_FRAME));
