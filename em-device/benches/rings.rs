//! Frames of 64 bytes through the network device's queues, by kind of ring, against split rings in the same run.
//!
//! One thread is driver and device in turn: it offers a batch, lets the device do a round, and looks that all of it came
//! back. The wire costs nothing. Prints a table, and appends a JSON object a line to the file that
//! `DISTDPU_BENCH_JSON` names. `DISTDPU_RINGS` names the kinds to measure, separated by commas.

use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
use em_device::frame::{Frame, FrameMeta};
use em_device::net::device::NetDevice;
use em_device::net::links::{Link, Links};
use em_device::port::{Port, RxSink, TxError};
use em_device::virtio::common::QueueSetup;
use em_device::virtio::signals::Signals;
use m2m_fabric::proto::{LinkStats, VirtioNetSpec, VirtioPciLayout, Window};
use smartep::irq::Irqs;
use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Features of a driver as Linux has them: VERSION_1, EVENT_IDX, INDIRECT, MRG_RXBUF.
const LINUX: u64 = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 15;
const PACKED: u64 = 1 << 34;
const IN_ORDER: u64 = 1 << 35;
const KINDS: [(&str, u64); 4] = [
    ("split", LINUX),
    ("split-in-order", LINUX | IN_ORDER),
    ("packed", LINUX | PACKED),
    ("packed-in-order", LINUX | PACKED | IN_ORDER),
];
const SIZE: u16 = 256;
const BATCH: u16 = 64;
const FRAME: u32 = 64;
const HEADER: u32 = 12;
const BASE: u64 = 1 << 20;
const BYTES: u64 = 4 << 20;
const RINGS: u64 = 0x4000;
const DATA: u64 = BASE + 0x10_0000;
const ROUNDS: usize = 9;
const BATCHES: u32 = 30_000;

/// A wire that takes everything and always has frames.
struct Endless {
    bytes: Vec<u8>,
    feeds: bool,
}

impl Port for Endless {
    fn name(&self) -> &str {
        "endless"
    }

    fn transmit(&mut self, _frame: &Frame<'_>) -> Result<(), TxError> {
        Ok(())
    }

    fn flush(&mut self) {}

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        if !self.feeds {
            return 0;
        }
        let parts = [VolatileSlice::from(&mut self.bytes[..])];
        let frame = Frame::new(FrameMeta::default(), &parts);
        for _ in 0..budget {
            sink.frame(&frame);
        }
        budget
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

fn setup(queue: u64) -> QueueSetup {
    let at = BASE + queue * RINGS;
    QueueSetup {
        size: SIZE,
        enabled: true,
        desc: at,
        avail: at + 0x1000,
        used: at + 0x2000,
    }
}

/// A driver of one queue with one buffer in each descriptor, 0 receives, 1 sends.
struct Driver {
    mapping: Arc<HostMapping>,
    queue: u64,
    packed: bool,
    offered: u16,
    /// Whole rings of descriptors that are available, for each lap.
    laps: [Vec<u8>; 2],
}

impl Driver {
    fn new(mapping: Arc<HostMapping>, queue: u64, packed: bool) -> Self {
        let write = if queue == 0 { 2u16 } else { 0 };
        let laps = [1u16 << 7, 1 << 15].map(|available| {
            let mut ring = Vec::new();
            for n in 0..SIZE {
                let at = DATA + queue * 0x10_0000 + 2048 * u64::from(n);
                ring.extend(at.to_le_bytes());
                ring.extend((HEADER + FRAME).to_le_bytes());
                let halves = if packed {
                    [n, available | write]
                } else {
                    [write, 0]
                };
                halves
                    .iter()
                    .for_each(|half| ring.extend(half.to_le_bytes()));
            }
            ring
        });
        let this = Self {
            mapping,
            queue,
            packed,
            offered: 0,
            laps,
        };
        let [first, _] = &this.laps;
        if !packed {
            this.write(setup(queue).desc, first);
            let heads: Vec<u8> = (0..SIZE).flat_map(u16::to_le_bytes).collect();
            this.write(setup(queue).avail + 4, &heads);
        }
        this
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        let span = self
            .mapping
            .span(addr - BASE, bytes.len() as u64, Access::Write);
        if let Some(span) = span {
            let _ = span.copy_from(bytes);
        }
    }

    fn word(&self, addr: u64) -> u16 {
        let mut bytes = [0; 2];
        if let Some(span) = self.mapping.span(addr - BASE, 2, Access::Read) {
            let _ = span.copy_to(&mut bytes);
        }
        u16::from_le_bytes(bytes)
    }

    fn offer(&mut self) {
        let (from, lap) = (self.offered % SIZE, self.offered / SIZE % 2);
        self.offered = self.offered.wrapping_add(BATCH);
        if self.packed {
            let bytes = 16 * usize::from(from)..16 * usize::from(from + BATCH);
            let ring = self
                .laps
                .get(usize::from(lap))
                .and_then(|ring| ring.get(bytes));
            self.write(
                setup(self.queue).desc + 16 * u64::from(from),
                ring.unwrap_or_default(),
            );
        } else {
            self.write(setup(self.queue).avail + 2, &self.offered.to_le_bytes());
        }
    }

    /// Whether the device gave all of it back; with IN_ORDER one entry may stand for a batch.
    fn is_done(&self) -> bool {
        if !self.packed {
            return self.word(setup(self.queue).used + 2) == self.offered;
        }
        let first = self.offered.wrapping_sub(BATCH);
        let flags = self.word(setup(self.queue).desc + 16 * u64::from(first % SIZE) + 14);
        let used = if first / SIZE % 2 == 0 { 0x8080 } else { 0 };
        flags & 0x8080 == used
    }
}

/// Frames a second.
fn sample(features: u64, queue: u64) -> Fallible<f64> {
    let mapping = HostMapping::anonymous(BYTES)?;
    let table = Arc::new(DotTable::new());
    let backing = Backing::Mapped {
        mapping: mapping.clone(),
        offset: 0,
    };
    table.map(BASE, BYTES, Perm::RW, backing)?;
    let window = |offset| Window {
        offset,
        len: 0x1000,
    };
    let spec = VirtioNetSpec {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        queue_pairs: 1,
        queue_size: SIZE,
        layout: VirtioPciLayout {
            bar: 0,
            common: window(0),
            isr: window(0x1000),
            device: window(0x2000),
            notify: window(0x3000),
            notify_multiplier: 4,
        },
        face: m2m_fabric::proto::Face::VfioUser,
    };
    let signals = Arc::new(Signals::new(Irqs::new(4), 3));
    let report = Arc::new(|_| ());
    let mut device = NetDevice::new(0, spec, signals, table.reader(), Arc::default(), report);
    device = device.noted_in(Arc::new(smartep::state::State::create()?.0));
    device.set_bus_master(true);
    device.set_link_up(true);
    let mut links = Links::default();
    let mut bytes = vec![0xff; 6];
    bytes.resize(FRAME as usize, 2);
    let feeds = queue == 0;
    let wire = Box::new(Endless {
        bytes: bytes.clone(),
        feeds,
    });
    links.add(Link::new(1, wire, Some([2, 0, 0, 0, 0, 2])), false);
    let setups: Vec<QueueSetup> = (0..2).map(setup).collect();
    device.start(features, &setups, &mut links);
    let mut driver = Driver::new(mapping, queue, features & PACKED != 0);
    for n in 0..u64::from(SIZE) {
        driver.write(
            DATA + queue * 0x10_0000 + 2048 * n + u64::from(HEADER),
            &bytes,
        );
    }
    let start = Instant::now();
    for _ in 0..BATCHES {
        driver.offer();
        device.turn(&mut links);
        if !driver.is_done() {
            return Err("the device did not give a batch back".into());
        }
    }
    let elapsed: Duration = start.elapsed();
    Ok(f64::from(BATCHES) * f64::from(BATCH) / elapsed.as_secs_f64())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Fallible<()> {
    let mut json = std::env::var_os("DISTDPU_BENCH_JSON")
        .map(|path| {
            std::fs::File::options()
                .create(true)
                .append(true)
                .open(path)
        })
        .transpose()?;
    let chosen = std::env::var("DISTDPU_RINGS").unwrap_or_default();
    let wanted = |name: &str| chosen.is_empty() || chosen.split(',').any(|c| c == name);
    let kinds = KINDS.into_iter().filter(|(name, _)| wanted(name));
    let kinds: Vec<_> = kinds.collect();
    println!(
        "{:16}  {:>9}  {:>12}  {:>6}",
        "rings", "direction", "frames/s", "ratio"
    );
    for (queue, direction) in [(1, "transmit"), (0, "receive")] {
        let mut rates = vec![Vec::new(); kinds.len()];
        for _ in 0..ROUNDS {
            for ((_, features), rates) in kinds.iter().zip(&mut rates) {
                rates.push(sample(*features, queue)?);
            }
        }
        let rates: Vec<f64> = rates.into_iter().map(median).collect();
        let split = rates.first().copied().unwrap_or(f64::NAN);
        for ((name, _), rate) in kinds.iter().zip(rates) {
            let ratio = rate / split;
            println!("{name:16}  {direction:>9}  {rate:>12.0}  {ratio:>6.2}");
            if let Some(json) = &mut json {
                writeln!(
                    json,
                    "{{\"metric\":\"{direction}_{name}\",\"value\":{rate:.0},\"unit\":\"frames/s\",\
                     \"compared_with\":\"split rings\",\"ratio\":{ratio:.4},\"samples\":{ROUNDS}}}"
                )?;
            }
        }
    }
    Ok(())
}
