//! Latency of the fabric's primitives against a plain ping-pong through an eventfd pair and through a
//! unix socket, measured in the same run, interleaved. Prints a table; appends JSON lines to the file
//! that `DISTDPU_BENCH_JSON` names.
//!
//! "hot": one access follows another at once, so both sides spin where there are more than two CPUs. "polling": the
//! same, and both sides spin however many there are. "cold": 2 ms between accesses, so the server sleeps and must be
//! woken.
#![allow(missing_docs, clippy::unwrap_used)]

use m2m_fabric::local::{LocalListener, connect};
use m2m_fabric::proto::{Event, Reply, Request};
use m2m_fabric::{Fabric, FabricError, Handler, poll_with_few_cpus};
use rustix::event::{EventfdFlags, eventfd};
use std::hint::black_box;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: usize = 9;
/// Calls of a round, and how many of them are timed together: looking at the clock is no small part of a hot one.
const HOT: Count = Count {
    groups: 100,
    of: 20,
};
const COLD: Count = Count { groups: 40, of: 1 };
const PAUSE: Duration = Duration::from_millis(2);
const LONG: Duration = Duration::from_secs(10);

/// Answers, and notes the last value that was written.
#[derive(Default)]
struct Echo {
    last: AtomicU32,
}

impl Handler for Echo {
    fn request(&self, _: Request, _: Vec<OwnedFd>) -> Reply {
        Reply::Ok
    }
    fn event(&self, _: Event) {}
    fn register_read(&self, address: u32) -> u32 {
        address
    }
    fn register_write(&self, _: u32, _: u8, value: u32) -> u32 {
        self.last.store(value, Ordering::Release);
        value
    }
    fn down(&self, _: &FabricError) {}
}

/// How many calls are timed.
#[derive(Clone, Copy)]
struct Count {
    groups: usize,
    of: u32,
}

/// Nanoseconds per call, the median of groups of calls: a mean would be that of the scheduler's placement of two
/// threads that have just begun to run. Pauses, one before each group, are not counted.
fn time(count: Count, pause: Option<Duration>, call: &dyn Fn()) -> f64 {
    let group = || {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        let start = Instant::now();
        (0..count.of).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e9 / f64::from(count.of)
    };
    let mut groups: Vec<f64> = (0..count.groups).map(|_| group()).collect();
    groups.sort_by(f64::total_cmp);
    groups.get(groups.len() / 2).copied().unwrap_or(f64::NAN)
}

fn eventfd_ping_pong() -> impl Fn() {
    let [ping, pong] = [(); 2].map(|()| Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
    let (theirs, ours) = (Arc::clone(&ping), Arc::clone(&pong));
    // Ends with the process.
    std::thread::spawn(move || {
        let mut buffer = [0; 8];
        while rustix::io::read(&*theirs, &mut buffer).is_ok() {
            rustix::io::write(&*ours, &1u64.to_ne_bytes()).unwrap();
        }
    });
    move || {
        rustix::io::write(&*ping, &1u64.to_ne_bytes()).unwrap();
        rustix::io::read(&*pong, &mut [0; 8]).unwrap();
    }
}

fn socket_ping_pong() -> impl Fn() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 16];
        while rustix::io::read(&theirs, &mut buffer).is_ok_and(|len| len > 0) {
            rustix::io::write(&theirs, &buffer).unwrap();
        }
    });
    move || {
        rustix::io::write(&ours, &[0; 16]).unwrap();
        rustix::io::read(&ours, &mut [0; 16]).unwrap();
    }
}

/// A name and what to measure.
type Operation<'a> = (&'static str, Box<dyn Fn() + 'a>);

struct Measured {
    metric: String,
    samples: Vec<f64>,
}

impl Measured {
    fn new(name: &str, mode: &str) -> Self {
        Self {
            metric: format!("{name}, {mode}"),
            samples: Vec::new(),
        }
    }

    fn median(&self) -> f64 {
        self.samples
            .get(self.samples.len() / 2)
            .copied()
            .unwrap_or(f64::NAN)
    }
}

/// An OM that answers and an EM that asks.
struct Pair {
    handler: Arc<Echo>,
    om: Arc<dyn Fabric>,
    em: Arc<dyn Fabric>,
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m2m.sock");
        let listener = LocalListener::bind(&path).unwrap();
        let handler = Arc::new(Echo::default());
        let (om, em): (Arc<dyn Fabric>, _) = std::thread::scope(|scope| {
            let em = scope.spawn(|| connect(&path, Arc::new(Echo::default())).unwrap());
            let om = listener.accept().unwrap().start(handler.clone()).unwrap();
            (om, em.join().unwrap())
        });
        Self { handler, om, em }
    }
}

fn main() {
    let Pair { om, em, .. } = Pair::new();
    poll_with_few_cpus(true);
    let polling = Pair::new();
    let (polled, number) = (polling.em.registers(), AtomicU32::new(1));
    let registers = em.registers();
    let eventfd = eventfd_ping_pong();
    let socket = socket_ping_pong();
    let calls: [Operation<'_>; 6] = [
        ("eventfd ping-pong", Box::new(&eventfd)),
        ("unix socket ping-pong", Box::new(&socket)),
        (
            "posted write",
            Box::new(|| registers.post(0, 0xf, 1).unwrap()),
        ),
        (
            "non-posted write",
            Box::new(|| {
                black_box(registers.write(0, 0xf, 1, LONG).unwrap());
            }),
        ),
        (
            "read",
            Box::new(|| {
                black_box(registers.read(0, LONG).unwrap());
            }),
        ),
        (
            "message call",
            Box::new(|| {
                black_box(em.call(Request::Stats, &[], LONG).unwrap());
            }),
        ),
    ];
    let polling_calls: [Operation<'_>; 3] = [
        ("eventfd ping-pong", Box::new(&eventfd)),
        (
            "posted write until the peer has it",
            Box::new(|| {
                let value = number.fetch_add(1, Ordering::Relaxed);
                polled.post(0, 0xf, value).unwrap();
                while polling.handler.last.load(Ordering::Acquire) != value {
                    std::hint::spin_loop();
                }
            }),
        ),
        (
            "read",
            Box::new(|| {
                black_box(polled.read(0, LONG).unwrap());
            }),
        ),
    ];
    let modes: [(&str, Count, Option<Duration>, &[Operation<'_>]); 3] = [
        ("hot", HOT, None, &calls),
        ("polling", HOT, None, &polling_calls),
        ("cold", COLD, Some(PAUSE), &calls),
    ];
    let mut measured: Vec<Vec<Measured>> = modes
        .iter()
        .map(|(mode, _, _, calls)| {
            calls
                .iter()
                .map(|(name, _)| Measured::new(name, mode))
                .collect()
        })
        .collect();
    for _ in 0..ROUNDS {
        for (slots, (_, count, pause, calls)) in measured.iter_mut().zip(&modes) {
            for (slot, (_, call)) in slots.iter_mut().zip(*calls) {
                slot.samples.push(time(*count, *pause, call));
                // What was posted must not be work left for the next.
                registers.read(0, LONG).unwrap();
            }
        }
    }
    for slot in measured.iter_mut().flatten() {
        slot.samples.sort_by(f64::total_cmp);
    }
    report(&measured);
    for fabric in [&em, &om, &polling.em, &polling.om] {
        fabric.close();
    }
}

fn report(measured: &[Vec<Measured>]) {
    let mut json = std::env::var_os("DISTDPU_BENCH_JSON").map(|path| {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap()
    });
    println!(
        "{:<30} {:>12} {:>12} {:>12} {:>12}",
        "ns per operation", "median", "min", "max", "of eventfd"
    );
    for mode in measured {
        let Some(base) = mode.first() else { continue };
        for slot in mode {
            let ratio = slot.median() / base.median();
            println!(
                "{:<30} {:>12.0} {:>12.0} {:>12.0} {:>12.3}",
                slot.metric,
                slot.median(),
                slot.samples.first().unwrap(),
                slot.samples.last().unwrap(),
                ratio
            );
            if let Some(file) = &mut json {
                let line = serde_json::json!({
                    "metric": format!("m2m {}", slot.metric),
                    "value": slot.median(),
                    "unit": "ns",
                    "compared_with": base.metric,
                    "ratio": ratio,
                    "samples": slot.samples,
                });
                writeln!(file, "{line}").unwrap();
            }
        }
    }
}
