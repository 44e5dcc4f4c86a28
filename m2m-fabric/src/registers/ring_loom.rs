//! Interleavings and reorderings of a requester and a server, by loom, with up to three preemptions:
//! `RUSTFLAGS="--cfg loom" cargo test -p m2m-fabric --lib --release`.
//!
//! The model's futex neither times out nor wakes for nothing, so a lost wake-up is a deadlock, which
//! loom reports. Rings have two slots, so three accesses reuse one.

use super::*;
use loom::sync::Arc;
use loom::thread;

/// Without a bound this takes hours; three preemptions find any lost wake-up of two threads.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

struct Model([Slot; SLOTS]);

impl Slots for Model {
    fn slot(&self, index: u64) -> &Slot {
        &self.0[(index % SLOTS as u64) as usize]
    }
}

fn ring() -> Arc<Model> {
    Arc::new(Model([(); SLOTS].map(|()| Slot {
        state: StateWord::new(),
        op: AtomicU32::new(0),
        address: AtomicU32::new(0),
        byte_enable: AtomicU32::new(0),
        value: AtomicU32::new(0),
        completion: AtomicU32::new(0),
    })))
}

fn read(n: u32) -> Access {
    Access::Read { address: 4 * n }
}

/// Answers `count` reads with their address + 1, sleeping whenever there is none.
fn serve(ring: &Model, count: u32) {
    let mut server = Server::default();
    for n in 0..count {
        let access = loop {
            match server.take(ring).unwrap() {
                Some(access) => break access,
                None => server.wait(ring, Duration::MAX),
            }
        };
        assert_eq!(access, read(n));
        server.complete(ring, 4 * n + 1).unwrap();
    }
}

fn wait(ring: &Model, position: u64) -> u32 {
    loop {
        match completion(ring, position).unwrap() {
            Some(value) => return value,
            None => wait_for_completion(ring, position, Duration::MAX),
        }
    }
}

#[test]
fn every_read_gets_its_completion_and_no_wakeup_is_lost() {
    explore(|| {
        let ring = ring();
        let server = thread::spawn({
            let ring = ring.clone();
            move || serve(&ring, 3)
        });
        let mut requester = Requester::default();
        for n in 0..3 {
            let submitted = requester.submit(&*ring, read(n)).unwrap();
            assert_eq!(submitted, Submitted::At(n.into()));
            assert_eq!(wait(&ring, n.into()), 4 * n + 1);
        }
        server.join().unwrap();
    });
}

#[test]
fn accesses_nobody_waits_for_fill_the_ring_and_go_on() {
    explore(|| {
        let ring = ring();
        let server = thread::spawn({
            let ring = ring.clone();
            move || serve(&ring, 3)
        });
        let mut requester = Requester::default();
        for n in 0..3 {
            loop {
                match requester.submit(&*ring, read(n)).unwrap() {
                    Submitted::At(_) => break,
                    Submitted::Full(last) => {
                        wait(&ring, last);
                    }
                }
            }
        }
        assert_eq!(wait(&ring, 2), 9);
        server.join().unwrap();
    });
}
