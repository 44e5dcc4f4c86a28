//! RDMA WRITE into the memory of a device of the other VM, through a DOT window, against the same into guest RAM; and
//! whether the number of windows matters. No VM: drivers stand where guests would.
//!
//! What the same costs over messages to the VMM is not measured, because the function does not use them for
//! transfers. What a page walk costs in place of the window's lookup is what `dot-lookup` measures.

mod figures;

use distdpu_tests::device_memory::DeviceMemory;
use distdpu_tests::dpu::{Dpu, Rdma};
use distdpu_tests::mlx5::{Buffer, Cq, Mlx5, Qp, QpPlan, Service, opcode};
use distdpu_tests::virtio_net::Guest;
use figures::{Metric, Outcome, check, gigabytes, report};
use std::time::Instant;

/// Rounds of each measurement.
const ROUNDS: usize = 7;
/// Bytes of a device's memory, of the buffer in guest RAM, and of the requester's buffer.
const BYTES: u64 = 64 << 20;
const WINDOWS: usize = 64;
const BAR: u64 = 0x40_0000_0000;
/// Distance of the BARs: they are no neighbours.
const APART: u64 = 1 << 30;
const PAGE: u64 = 4096;

const BARS: &str = "bars: into a window at least 0.95x into RAM from 64 KiB on; 64 windows at most 10 % slower than one";

fn main() {
    if let Err(error) = run() {
        eprintln!("gpudirect: {error}");
        std::process::exit(1);
    }
}

struct Side {
    driver: Mlx5,
    pd: u32,
    cq: Cq,
    buffer: Buffer,
}

impl Side {
    fn new(dpu: &Dpu, index: usize) -> Outcome<Self> {
        let guest = Guest {
            memory: BYTES + (96 << 20),
            ..Guest::default()
        };
        let mut driver = Mlx5::open(&dpu.rdma_socket(index), guest)?;
        driver.start()?;
        let pd = driver.allocate(opcode::ALLOC_PD)?;
        let cq = driver.create_cq(10)?;
        let buffer = driver.register(pd, BYTES)?;
        Ok(Side {
            driver,
            pd,
            cq,
            buffer,
        })
    }

    fn queue_pair(&mut self) -> Outcome<Qp> {
        let plan = QpPlan {
            service: Service::Rc,
            pd: self.pd,
            log_send: 7,
            log_receive: 2,
        };
        Ok(self.driver.create_qp(plan, &self.cq, &self.cq)?)
    }
}

/// Where a request writes.
struct Target {
    key: u32,
    address: u64,
}

struct Rig {
    a: Side,
    b: Side,
    qp: Qp,
    /// Regions over the device memories of B.
    windows: Vec<Buffer>,
    _devices: Vec<DeviceMemory>,
    _dpu: Dpu,
}

impl Rig {
    fn new() -> Outcome<Self> {
        let plan = Rdma {
            memory: WINDOWS,
            memory_mib: BYTES >> 20,
            ..Rdma::new(2)
        };
        let dpu = Dpu::start_rdma(plan)?;
        let (mut a, mut b) = (Side::new(&dpu, 0)?, Side::new(&dpu, 1)?);
        let (lid_a, lid_b) = (a.driver.lid, b.driver.lid);
        let (qp, peer) = (a.queue_pair()?, b.queue_pair()?);
        a.driver.connect(&qp, Service::Rc, lid_b, peer.number)?;
        b.driver.connect(&peer, Service::Rc, lid_a, qp.number)?;
        Ok(Self {
            a,
            b,
            qp,
            windows: Vec::new(),
            _devices: Vec::new(),
            _dpu: dpu,
        })
    }

    /// Places more devices' BARs until there are `count` windows.
    fn open_windows(&mut self, count: usize) -> Outcome<()> {
        for index in self.windows.len()..count {
            let address = BAR + index as u64 * APART;
            let device = DeviceMemory::open(&self._dpu.memory_socket(1, index), address)?;
            let key = self
                .b
                .driver
                .register_at(self.b.pd, address, BYTES, 0b1111)?;
            self.windows.push(Buffer {
                address,
                len: BYTES,
                key,
            });
            // Its pages are there from the start, as those of guest RAM are.
            for at in (0..BYTES).step_by(PAGE as usize) {
                device.write(at, &[1])?;
            }
            self._devices.push(device);
        }
        Ok(())
    }

    /// GB/s of `count` writes of `len` bytes, to where `target` says.
    fn write(
        &mut self,
        len: u64,
        count: u64,
        mut target: impl FnMut(u64) -> Target,
    ) -> Outcome<f64> {
        let local = self.a.buffer;
        let begin = Instant::now();
        let (mut posted, mut done) = (0, 0);
        // A doorbell for some requests, as drivers batch them.
        let batch = if len >= 1 << 20 { 1 } else { 16 };
        while done < count {
            while posted < count && posted - done <= 64 - batch {
                for _ in 0..batch.min(count - posted) {
                    let to = target(posted);
                    let from = (
                        local.key,
                        local.address + posted * len % (BYTES - len + 1),
                        len as u32,
                    );
                    self.qp.post_write((to.address, to.key), from, true)?;
                    posted += 1;
                }
                self.a.driver.ring(&mut self.qp)?;
            }
            check(self.a.cq.wait()?)?;
            done += 1;
            while let Some(cqe) = self.a.cq.poll()? {
                check(cqe)?;
                done += 1;
            }
        }
        Ok(gigabytes(count * len, begin))
    }
}

/// Where in a buffer the requests go.
#[derive(Clone, Copy)]
enum Order {
    Sequential,
    Random,
}

fn target(buffer: Buffer, len: u64, order: Order) -> impl FnMut(u64) -> Target {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let places = BYTES / len;
    move |n| {
        let place = match order {
            Order::Sequential => n,
            Order::Random => {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            }
        };
        Target {
            key: buffer.key,
            address: buffer.address + place % places * len,
        }
    }
}

fn run() -> Outcome<()> {
    if std::env::args().any(|arg| arg == "--test") {
        return Ok(());
    }
    let mut rig = Rig::new()?;
    let mut metrics = Vec::new();
    rig.open_windows(1)?;
    for (name, order) in [("sequential", Order::Sequential), ("random", Order::Random)] {
        for len in [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            if matches!(order, Order::Random) && len == BYTES {
                continue;
            }
            ram_and_window(&mut rig, &mut metrics, len, (name, order))?;
        }
    }
    windows(&mut rig, &mut metrics)?;
    report(&metrics, BARS)
}

fn ram_and_window(
    rig: &mut Rig,
    metrics: &mut Vec<Metric>,
    len: u64,
    (name, order): (&str, Order),
) -> Outcome<()> {
    let count = (256 << 20) / len;
    let (ram, window) = (rig.b.buffer, rig.windows[0]);
    let (mut into_ram, mut into_window) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let first = rig.write(len, count, target(ram, len, order))?;
        let second = rig.write(len, count, target(window, len, order))?;
        // The first round warms up.
        if round > 0 {
            into_ram.push(first);
            into_window.push(second);
        }
    }
    let kib = len >> 10;
    let ratios = into_window
        .iter()
        .zip(&into_ram)
        .map(|(w, r)| w / r)
        .collect();
    metrics.push(Metric {
        name: format!("ram_{kib}k_{name}"),
        what: format!("RDMA WRITE of {kib} KiB into guest RAM, {name}"),
        unit: "GB/s",
        values: into_ram,
        against: None,
    });
    metrics.push(Metric {
        name: format!("window_{kib}k_{name}"),
        what: format!("RDMA WRITE of {kib} KiB into a window, {name}"),
        unit: "GB/s",
        values: into_window,
        against: Some((format!("ram_{kib}k_{name}"), ratios)),
    });
    Ok(())
}

/// 4 KiB writes over all windows in turn; the same total of pages in use, so that only their number differs.
fn windows(rig: &mut Rig, metrics: &mut Vec<Metric>) -> Outcome<()> {
    let counts = [1usize, 8, WINDOWS];
    rig.open_windows(WINDOWS)?;
    let mut all = vec![Vec::new(); counts.len()];
    let pages = BYTES / PAGE;
    for round in 0..=ROUNDS {
        for (values, &count) in all.iter_mut().zip(&counts) {
            let windows: Vec<Buffer> = rig.windows[..count].to_vec();
            let to = |n: u64| {
                let window = windows[n as usize % count];
                Target {
                    key: window.key,
                    address: window.address + n / count as u64 % (pages / count as u64) * PAGE,
                }
            };
            let speed = rig.write(PAGE, 65536, to)?;
            if round > 0 {
                // Microseconds an operation.
                values.push(PAGE as f64 / speed / 1e3);
            }
        }
    }
    for (values, count) in all.clone().into_iter().zip(counts) {
        let ratios = values.iter().zip(&all[0]).map(|(v, one)| v / one).collect();
        metrics.push(Metric {
            name: format!("window_4k_of_{count}"),
            what: format!("RDMA WRITE of 4 KiB over {count} windows in turn"),
            unit: "us",
            values,
            against: Some(("window_4k_of_1".into(), ratios)),
        });
    }
    Ok(())
}
