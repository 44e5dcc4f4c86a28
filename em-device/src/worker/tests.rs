//! Drivers, wires and tasks around a worker that sleeps whenever it can.

use super::*;
use crate::frame::Frame;
use crate::net::Mac;
use crate::net::features::{HASH_REPORT, OFFERED};
use crate::net::links::Link;
use crate::port::shm::test_support::pair;
use crate::port::{Port, RxSink, TxError};
use crate::testing::{BASE, Driver, LAYOUT, Memory, WRITE, signals};
use crate::virtio::feature::RING_PACKED;
use crate::virtio::ring::RingFeatures;
use m2m_fabric::proto::{LinkStats, VirtioNetSpec};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Where the driver's buffers lie.
const DATA: u64 = BASE + 0x10_0000;
const FRAME: u32 = 100;
/// Longer than anything takes that is not lost.
const LOST: Duration = Duration::from_secs(20);

/// A guest: a driver's rings for one queue pair, and the way to its device.
struct Guest {
    handle: Handle,
    memory: Memory,
    rx: Driver,
    tx: Driver,
    notified: u64,
}

impl Guest {
    /// Function `id` behind that wire.
    fn new(handle: &Handle, id: u32, port: Box<dyn Port>) -> Self {
        let memory = Memory::new();
        // Guests of both kinds of rings.
        let layout = if id % 2 == 0 { RING_PACKED } else { 0 };
        let features = OFFERED & !HASH_REPORT & !layout;
        let rings = (0..3).map(|n| Driver::fresh(&memory, n, 16, RingFeatures::of(features)));
        let rings: Vec<_> = rings.collect();
        let setups: Vec<_> = rings.iter().map(|ring| ring.setup).collect();
        let spec = VirtioNetSpec {
            mac: mac(id),
            mtu: 1500,
            queue_pairs: 1,
            queue_size: 16,
            layout: LAYOUT,
            face: m2m_fabric::proto::Face::VfioUser,
        };
        let (reader, report) = (memory.table.reader(), Arc::new(|_| {}));
        let mut device = NetDevice::new(id, spec, signals(3), reader, Arc::default(), report);
        device.set_bus_master(true);
        device.set_link_up(true);
        let mut links = Links::default();
        assert!(links.add(Link::new(id, port, None), false));
        device.start(features, &setups, &mut links);
        handle
            .run(move |state| state.functions.insert(id, Function { device, links }))
            .unwrap();
        let [rx, tx, _] = rings.try_into().unwrap();
        Self {
            handle: handle.clone(),
            memory,
            rx,
            tx,
            notified: 0,
        }
    }

    /// Notifies the device if it asked for that, as drivers do.
    fn notify(&mut self, asked: bool) {
        if asked {
            self.notified += 1;
            self.handle.kick();
        }
    }

    fn offer_buffer(&mut self) {
        let before = self.rx.mark();
        self.rx.chain(0, &[(DATA, 2048, WRITE)]);
        fence(Ordering::SeqCst);
        self.notify(self.rx.wants_kick_at(before));
    }

    fn send(&mut self) {
        let frame = [&[0; 12], &[0xff; 6][..], &[2, 9, 9, 9, 9, 9], &[0x88; 88]].concat();
        let (at, before) = (DATA + 0x1000, self.tx.mark());
        self.memory.write(at, &frame);
        self.tx.chain(0, &[(at, 12 + FRAME, 0)]);
        fence(Ordering::SeqCst);
        self.notify(self.tx.wants_kick_at(before));
    }
}

fn mac(id: u32) -> Mac {
    [2, 0, 0, 0, 0, id as u8]
}

fn await_used(ring: &mut Driver, what: &str) {
    let begin = Instant::now();
    while ring.take_used().is_empty() {
        assert!(begin.elapsed() < LOST, "{what} was lost");
        std::thread::yield_now();
    }
}

/// Waits until the worker sleeps.
fn await_sleep(handle: &Handle) {
    let begin = Instant::now();
    while !handle.worker_is_away() {
        assert!(begin.elapsed() < LOST, "the worker does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Frames go to and fro between two guests, always only one on its way, so that everybody sleeps again and
/// again and one lost wake-up is the end.
fn volley(mut guests: [Guest; 2], frames: u64) -> u64 {
    let over = AtomicBool::new(false);
    let handles = [&guests[0], &guests[1]].map(|guest| guest.handle.clone());
    std::thread::scope(|scope| {
        for handle in handles {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    handle.run(|state| state.stats()).unwrap();
                    std::thread::sleep(Duration::from_micros(150));
                }
            });
        }
        let [first, second] = &mut guests;
        // Before anybody sends: a frame waits for a buffer for as long as the device is patient only, and on a
        // busy machine a thread may begin later than that.
        first.offer_buffer();
        second.offer_buffer();
        let players = [(second, 0), (first, 1)].map(|(guest, begins)| {
            scope.spawn(move || {
                for number in 0..frames {
                    if number > 0 {
                        guest.offer_buffer();
                    }
                    if begins == 1 || number > 0 {
                        guest.send();
                        await_used(&mut guest.tx, "a notification of the transmit queue");
                    }
                    // Now and then everybody has time to fall asleep.
                    if number % 16 == begins {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    await_used(&mut guest.rx, "a frame");
                }
                guest.send();
            })
        });
        let lost = players.map(|player| player.join().is_err());
        over.store(true, Ordering::Relaxed);
        assert_eq!(lost, [false; 2], "which player lost");
    });
    guests.iter().map(|guest| guest.notified).sum()
}

#[test]
fn no_wake_up_is_lost_between_two_guests_of_one_worker() {
    let handle = Handle::start(Duration::from_micros(5)).unwrap();
    let (a, b) = pair();
    let guests = [(0, a), (1, b)].map(|(id, port)| Guest::new(&handle, id, Box::new(port)));
    assert!(volley(guests, 5_000) > 0);
}

#[test]
fn no_wake_up_is_lost_between_the_guests_of_two_workers() {
    let (a, b) = pair();
    let guests = [(0, a), (1, b)].map(|(id, port)| {
        let handle = Handle::start(Duration::from_micros(5)).unwrap();
        Guest::new(&handle, id, Box::new(port))
    });
    assert!(volley(guests, 5_000) > 0);
}

#[test]
fn who_notifies_a_sleeping_worker_does_the_work() {
    let handle = Handle::start(Duration::ZERO).unwrap();
    let (near, mut far) = pair();
    let mut guest = Guest::new(&handle, 0, Box::new(near));
    for number in 1..=50 {
        await_sleep(&handle);
        guest.send();
        assert_eq!(guest.tx.take_used(), [(0, 0)], "frame {number}");
        let mut frames = 0;
        far.receive(8, &mut |_: &Frame<'_>| {
            frames += 1;
            crate::port::Rx::Taken
        });
        assert_eq!(frames, 1, "frame {number} is on the wire");
    }
    assert_eq!(guest.notified, 50, "the queue asks for each");
}

/// A wire that never has room.
struct Full;

impl Port for Full {
    fn name(&self) -> &str {
        "full"
    }
    fn transmit(&mut self, _: &Frame<'_>) -> Result<(), TxError> {
        Err(TxError::Full)
    }
    fn flush(&mut self) {}
    fn receive(&mut self, _: usize, _: &mut dyn RxSink) -> usize {
        0
    }
    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
    fn accepts_offloads(&self) -> bool {
        true
    }
}

#[test]
fn a_frame_that_waits_wakes_the_worker_which_gives_it_up_in_time() {
    let handle = Handle::start(Duration::ZERO).unwrap();
    let mut guest = Guest::new(&handle, 0, Box::new(Full));
    await_sleep(&handle);
    guest.send();
    assert!(guest.tx.take_used().is_empty(), "the frame waits");
    await_used(&mut guest.tx, "the frame that found no room");
}

#[test]
fn a_task_runs_on_the_worker_and_its_result_comes_back() {
    let handle = Handle::start(Duration::from_micros(50)).unwrap();
    for sleep_first in [false, true] {
        if sleep_first {
            await_sleep(&handle);
        }
        let name = handle.run(|_| std::thread::current().name().map(String::from));
        assert_eq!(name.flatten().as_deref(), Some("data-path"));
    }
}

#[test]
fn ten_thousand_tasks_from_two_threads_all_run() {
    let handle = Handle::start(Duration::from_micros(5)).unwrap();
    let total = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let total = total.clone();
                    handle
                        .run(move |_| total.fetch_add(1, Ordering::Relaxed))
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 10_000);
}

#[test]
fn a_worker_that_sleeps_is_at_rest_and_one_that_does_not_come_round_is_not() {
    let handle = Handle::start(Duration::from_micros(50)).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while handle.progress().1 {
        assert!(Instant::now() < end, "it never sleeps");
        std::thread::yield_now();
    }
    let (entered, inside) = mpsc::channel();
    let (leave, wait) = mpsc::channel::<()>();
    let stuck = handle.clone();
    let task = std::thread::spawn(move || {
        stuck.run(move |_| {
            entered.send(()).unwrap();
            let _ = wait.recv();
        })
    });
    inside.recv().unwrap();
    let (before, awake) = handle.progress();
    assert!(awake);
    assert_eq!(handle.progress(), (before, true));
    drop(leave);
    task.join().unwrap();
    while handle.progress().1 {
        assert!(Instant::now() < end, "it never sleeps again");
        std::thread::yield_now();
    }
    assert!(handle.progress().0 > before);
}
