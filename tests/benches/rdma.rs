//! RDMA between two EMs without a VM: bandwidth against `memcpy`, message rate, latency, and whether cost
//! stays flat with the number of queue pairs and memory regions.

mod figures;

use distdpu_tests::dpu::{Dpu, Rdma};
use distdpu_tests::mlx5::{Buffer, Cq, Mlx5, Qp, QpPlan, Send, Service, opcode};
use distdpu_tests::virtio_net::Guest;
use figures::{Metric, Outcome, check, gigabytes, report};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Rounds of each measurement.
const ROUNDS: usize = 7;
/// Requests of one queue pair between two doorbells; the last one is signaled.
const BATCH: u64 = 32;

const BARS: &str = "bars: WRITE of 1 MiB at least 0.8x memcpy, of 64 KiB 0.6x; 3 M/s of 8 bytes per EM core with 16 queue \
    pairs; 2 us; the rate within 20 % from 1 to 1024 queue pairs and 10000 regions; 1 GiB in 100 ms";

fn main() {
    if let Err(error) = run() {
        eprintln!("rdma: {error}");
        std::process::exit(1);
    }
}

fn run() -> Outcome<()> {
    // Words of the command line pick measurements.
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&String> = words.iter().filter(|w| !w.starts_with('-')).collect();
    let mut metrics = Vec::new();
    for (name, measure) in MEASUREMENTS {
        if words.is_empty() || words.iter().any(|word| *word == name) {
            measure(&mut metrics)?;
        }
    }
    report(&metrics, BARS)
}

type Measure = fn(&mut Vec<Metric>) -> Outcome<()>;

const MEASUREMENTS: [(&str, Measure); 6] = [
    ("bandwidth", bandwidth),
    ("latency", latency),
    ("idle", idle),
    ("rate-qp", rate_by_queue_pairs),
    ("rate-mr", rate_by_regions),
    ("registration", registration),
];

/// One guest's driver.
struct Side {
    driver: Mlx5,
    pd: u32,
    cq: Cq,
    buffer: Buffer,
}

struct Pair {
    a: Side,
    b: Side,
    dpu: Dpu,
}

impl Pair {
    fn new(memory: u64, buffer: u64) -> Outcome<Self> {
        Self::on(Rdma::new(2), memory, buffer)
    }

    fn on(plan: Rdma, memory: u64, buffer: u64) -> Outcome<Self> {
        let dpu = Dpu::start_rdma(plan)?;
        let side = |index| -> Outcome<Side> {
            let guest = Guest {
                memory,
                ..Guest::default()
            };
            let mut driver = Mlx5::open(&dpu.rdma_socket(index), guest)?;
            driver.start()?;
            let pd = driver.allocate(opcode::ALLOC_PD)?;
            let cq = driver.create_cq(14)?;
            let buffer = driver.register(pd, buffer)?;
            Ok(Side {
                driver,
                pd,
                cq,
                buffer,
            })
        };
        let (a, b) = (side(0)?, side(1)?);
        Ok(Self { a, b, dpu })
    }

    /// Connected queue pairs; the sending ends.
    fn connect(&mut self, count: usize, log_send: u8) -> Outcome<Vec<Qp>> {
        let (lid_a, lid_b) = (self.a.driver.lid, self.b.driver.lid);
        (0..count)
            .map(|_| {
                let plan = |pd| QpPlan {
                    service: Service::Rc,
                    pd,
                    log_send,
                    log_receive: 2,
                };
                let a = self
                    .a
                    .driver
                    .create_qp(plan(self.a.pd), &self.a.cq, &self.a.cq)?;
                let b = self
                    .b
                    .driver
                    .create_qp(plan(self.b.pd), &self.b.cq, &self.b.cq)?;
                self.a.driver.connect(&a, Service::Rc, lid_b, b.number)?;
                self.b.driver.connect(&b, Service::Rc, lid_a, a.number)?;
                Ok(a)
            })
            .collect()
    }

    /// CPU time of both EMs.
    fn cpu(&self) -> Outcome<Duration> {
        let mut total = 0;
        for em in 0..2 {
            let pid = self.dpu.em_pid(em)?;
            for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
                let run = text.split(' ').next().and_then(|n| n.parse::<u64>().ok());
                total += run.ok_or("schedstat makes no sense")?;
            }
        }
        Ok(Duration::from_nanos(total))
    }
}

fn bandwidth(metrics: &mut Vec<Metric>) -> Outcome<()> {
    let size = 64u64 << 20;
    let mut pair = Pair::new(160 << 20, size)?;
    let mut qps = pair.connect(1, 7)?;
    let mut from = vec![1u8; size as usize];
    let mut to = vec![2u8; size as usize];
    for len in [65_536u64, 1 << 20] {
        let (mut copies, mut writes) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let total = 512u64 << 20;
            let begin = Instant::now();
            for n in 0..total / len {
                let at = (n * len % size) as usize;
                to[at..at + len as usize].copy_from_slice(&from[at..at + len as usize]);
                std::hint::black_box(&mut to);
            }
            from[round] ^= 1;
            let copy = gigabytes(total, begin);
            let begin = Instant::now();
            let qp = &mut qps[0];
            let mut posted = 0;
            let mut done = 0;
            while done < total / len {
                while posted < total / len && posted - done < 64 {
                    let at = posted * len % size;
                    let (local, remote) = (pair.a.buffer, pair.b.buffer);
                    let write = Send::Write(remote.address + at, remote.key, None);
                    qp.post_send(write, &[(local.key, local.address + at, len as u32)], true)?;
                    posted += 1;
                }
                pair.a.driver.ring(qp)?;
                check(pair.a.cq.wait()?)?;
                done += 1;
                while let Some(cqe) = pair.a.cq.poll()? {
                    check(cqe)?;
                    done += 1;
                }
            }
            // The first round warms up.
            if round > 0 {
                copies.push(copy);
                writes.push(gigabytes(total, begin));
            }
        }
        let ratios = writes.iter().zip(&copies).map(|(w, c)| w / c).collect();
        let kib = len >> 10;
        metrics.push(Metric {
            name: format!("memcpy_{kib}k"),
            what: format!("memcpy of {kib} KiB, one thread"),
            unit: "GB/s",
            values: copies,
            against: None,
        });
        metrics.push(Metric {
            name: format!("write_{kib}k"),
            what: format!("RDMA WRITE of {kib} KiB, guest memory to guest memory"),
            unit: "GB/s",
            values: writes,
            against: Some((format!("memcpy_{kib}k"), ratios)),
        });
    }
    Ok(())
}

/// How doorbells reach the EM.
struct Way {
    name: &'static str,
    what: &'static str,
    mapped_doorbells: bool,
    poll_us: u64,
    /// Between two requests.
    pause: Duration,
    requests: usize,
}

const BUSY: Way = Way {
    name: "trapped_sleeping",
    what: "trapped, sleeping",
    mapped_doorbells: false,
    poll_us: 0,
    pause: Duration::ZERO,
    requests: 2000,
};
const WAYS: [Way; 5] = [
    BUSY,
    Way {
        name: "trapped_polling",
        what: "trapped, polling",
        poll_us: 10_000,
        ..BUSY
    },
    Way {
        name: "mapped_polling",
        what: "mapped, polling",
        mapped_doorbells: true,
        poll_us: 10_000,
        ..BUSY
    },
    Way {
        name: "trapped_idle",
        what: "trapped, after 30 ms without work",
        poll_us: 50,
        pause: Duration::from_millis(30),
        requests: 200,
        ..BUSY
    },
    Way {
        name: "mapped_idle",
        what: "mapped, after 30 ms without work",
        mapped_doorbells: true,
        poll_us: 50,
        pause: Duration::from_millis(30),
        requests: 200,
    },
];

/// With two EMs three threads poll; with one EM for both functions, two.
fn latency(metrics: &mut Vec<Metric>) -> Outcome<()> {
    for (together, ems) in [(false, "two EMs"), (true, "one EM")] {
        for way in &WAYS {
            let plan = Rdma {
                functions: 2,
                together,
                mapped_doorbells: way.mapped_doorbells,
                poll_us: Some(way.poll_us),
                ..Rdma::new(2)
            };
            let mut pair = Pair::on(plan, 48 << 20, 1 << 20)?;
            let mut qps = pair.connect(1, 7)?;
            metrics.push(Metric {
                name: format!(
                    "write_8_latency_{}{}",
                    way.name,
                    if together { "_one_em" } else { "" }
                ),
                what: format!(
                    "RDMA WRITE of 8 bytes, doorbell to completion, {ems}, {}",
                    way.what
                ),
                unit: "us",
                values: latencies(&mut pair, &mut qps[0], way)?,
                against: None,
            });
        }
    }
    Ok(())
}

fn latencies(pair: &mut Pair, qp: &mut Qp, way: &Way) -> Outcome<Vec<f64>> {
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let write = Send::Write(remote.address, remote.key, None);
    let mut values = Vec::new();
    for _ in 0..way.requests {
        std::thread::sleep(way.pause);
        qp.post_send(write, &[(local.key, local.address, 8)], true)?;
        let begin = Instant::now();
        pair.a.driver.ring(qp)?;
        check(pair.a.cq.wait()?)?;
        values.push(begin.elapsed().as_nanos() as f64 / 1000.0);
    }
    Ok(values)
}

/// With a driver and nothing to do.
fn idle(metrics: &mut Vec<Metric>) -> Outcome<()> {
    const TIME: Duration = Duration::from_secs(1);
    for (name, mapped_doorbells) in [("trapped", false), ("mapped", true)] {
        let plan = Rdma {
            mapped_doorbells,
            ..Rdma::new(2)
        };
        let mut pair = Pair::on(plan, 48 << 20, 1 << 20)?;
        let _qps = pair.connect(16, 7)?;
        std::thread::sleep(TIME);
        let mut values = Vec::new();
        for _ in 0..ROUNDS {
            let before = pair.cpu()?;
            std::thread::sleep(TIME);
            let spent = pair.cpu()?.saturating_sub(before);
            values.push(spent.as_secs_f64() / 2.0 / TIME.as_secs_f64() * 100.0);
        }
        metrics.push(Metric {
            name: format!("idle_{name}"),
            what: format!("CPU time of an idle EM, doorbells {name}, 16 queue pairs"),
            unit: "%",
            values,
            against: None,
        });
    }
    Ok(())
}

/// Writes 8 bytes `count` times on the queue pairs in turn. Millions a second, by the clock and by the EMs'
/// CPU time (both together as one core).
fn rate(pair: &mut Pair, qps: &mut [Qp], buffers: &[Buffer], count: u64) -> Outcome<[f64; 2]> {
    let (begin, cpu) = (Instant::now(), pair.cpu()?);
    let batches = count / BATCH;
    let (mut posted, mut done) = (0u64, 0u64);
    // Batches under way by queue pair: a queue has room for four, all together for the completions.
    let mut busy: HashMap<u32, u64> = HashMap::new();
    while done < batches {
        while posted < batches && posted - done < 192 {
            let turn = posted as usize % qps.len();
            let qp = &mut qps[turn];
            let under_way = busy.entry(qp.number).or_default();
            if *under_way == 3 {
                break;
            }
            *under_way += 1;
            for n in 0..BATCH {
                let local = buffers[(posted * BATCH + n) as usize % buffers.len()];
                let remote = pair.b.buffer;
                let from = (local.key, local.address, 8);
                qp.post_write((remote.address + n * 8, remote.key), from, n + 1 == BATCH)?;
            }
            pair.a.driver.ring(qp)?;
            posted += 1;
        }
        let mut next = Some(pair.a.cq.wait()?);
        while let Some(cqe) = next {
            check(cqe)?;
            done += 1;
            if let Some(under_way) = busy.get_mut(&cqe.qpn) {
                *under_way -= 1;
            }
            next = pair.a.cq.poll()?;
        }
    }
    let messages = (batches * BATCH) as f64 / 1e6;
    let spent = pair.cpu()?.saturating_sub(cpu).as_secs_f64();
    Ok([
        messages / begin.elapsed().as_secs_f64(),
        messages / spent * 2.0,
    ])
}

fn rate_by_queue_pairs(metrics: &mut Vec<Metric>) -> Outcome<()> {
    rate_of_queue_pairs(metrics, false)?;
    rate_of_queue_pairs(metrics, true)
}

fn rate_of_queue_pairs(metrics: &mut Vec<Metric>, mapped_doorbells: bool) -> Outcome<()> {
    let plan = Rdma {
        mapped_doorbells,
        ..Rdma::new(2)
    };
    let mut pair = Pair::on(plan, 160 << 20, 1 << 20)?;
    let mut qps = pair.connect(1024, 7)?;
    let buffers = [pair.a.buffer];
    let counts = [1usize, 16, 64, 1024];
    let mut all: Vec<Vec<[f64; 2]>> = vec![Vec::new(); counts.len()];
    for round in 0..=ROUNDS {
        for (values, &count) in all.iter_mut().zip(&counts) {
            let value = rate(&mut pair, &mut qps[..count], &buffers, 400_000)?;
            if round > 0 {
                values.push(value);
            }
        }
    }
    let (what, short) = match mapped_doorbells {
        false => ("queue pairs", "qp"),
        true => ("queue pairs, mapped doorbells", "qp_mapped"),
    };
    flat(metrics, what, short, &counts, &all);
    Ok(())
}

fn rate_by_regions(metrics: &mut Vec<Metric>) -> Outcome<()> {
    let mut pair = Pair::new(160 << 20, 1 << 20)?;
    let mut qps = pair.connect(16, 7)?;
    let mut buffers = vec![pair.a.buffer];
    for _ in 1..10_000 {
        buffers.push(pair.a.driver.register(pair.a.pd, 4096)?);
    }
    let counts = [1usize, 10_000];
    let mut all: Vec<Vec<[f64; 2]>> = vec![Vec::new(); counts.len()];
    for round in 0..=ROUNDS {
        for (values, &count) in all.iter_mut().zip(&counts) {
            let value = rate(&mut pair, &mut qps, &buffers[..count], 400_000)?;
            if round > 0 {
                values.push(value);
            }
        }
    }
    flat(metrics, "memory regions", "mr", &counts, &all);
    Ok(())
}

fn flat(
    metrics: &mut Vec<Metric>,
    what: &str,
    short: &str,
    counts: &[usize],
    all: &[Vec<[f64; 2]>],
) {
    for (count, values) in counts.iter().zip(all) {
        let first = &all[0];
        let ratios = values.iter().zip(first).map(|(v, f)| v[1] / f[1]).collect();
        metrics.push(Metric {
            name: format!("write_8_rate_{count}_{short}"),
            what: format!("RDMA WRITEs of 8 bytes, {count} {what}"),
            unit: "M/s",
            values: values.iter().map(|v| v[0]).collect(),
            against: None,
        });
        metrics.push(Metric {
            name: format!("write_8_per_core_{count}_{short}"),
            what: format!("the same, by the CPU time of an EM, {count} {what}"),
            unit: "M/s",
            values: values.iter().map(|v| v[1]).collect(),
            against: Some((format!("write_8_per_core_{}_{short}", counts[0]), ratios)),
        });
    }
}

fn registration(metrics: &mut Vec<Metric>) -> Outcome<()> {
    let dpu = Dpu::start_rdma(Rdma::new(2))?;
    let guest = Guest {
        memory: 64 << 20,
        ..Guest::default()
    };
    let mut driver = Mlx5::open(&dpu.rdma_socket(0), guest)?;
    driver.start()?;
    let pd = driver.allocate(opcode::ALLOC_PD)?;
    let mut values = Vec::new();
    for _ in 0..ROUNDS {
        values.push(driver.time_registration(pd, 1 << 30)?.as_secs_f64() * 1e3);
    }
    metrics.push(Metric {
        name: "register_1g".into(),
        what: "registration of 1 GiB of 4 KiB pages, doorbell to status".into(),
        unit: "ms",
        values,
        against: None,
    });
    Ok(())
}
