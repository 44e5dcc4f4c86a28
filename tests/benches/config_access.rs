//! What a trapped access costs: config space read from the shadow, config space written over M2M, and as
//! the comparison a register in the EM itself, all on one socket, interleaved in one run.

use distdpu_tests::client::{Client, Vmm};
use distdpu_tests::dpu::{Dpu, Net};
use distdpu_tests::pci::Function;
use distdpu_tests::wire::CONFIG_REGION;
use std::fs::OpenOptions;
use std::io::Write;
use std::time::{Duration, Instant};

/// Interleaved rounds.
const ROUNDS: usize = 40;
/// Accesses of one kind in a round.
const ACCESSES: u32 = 250;

type Access = fn(&mut Client, &Function);

struct Kind {
    metric: &'static str,
    what: &'static str,
    /// Index of the kind that it is compared with.
    peer: usize,
    access: Access,
    /// Nanoseconds of one access, by round.
    samples: Vec<f64>,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("config_access: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let dpu = Dpu::start(&[Net::default(), Net::default()])?;
    let mut client = Client::connect(&dpu.socket(0))?;
    client.posted = false;
    let function = Function::probe(&mut client)?;
    let mut kinds = [
        Kind {
            metric: "em_register_read",
            what: "read of a register in the EM",
            peer: 0,
            access: |client, function| {
                let common = function.virtio.common;
                let mut data = [0; 4];
                must(client.read(common.bar.into(), u64::from(common.offset) + 4, &mut data));
            },
            samples: Vec::new(),
        },
        Kind {
            metric: "em_register_write",
            what: "write of a register in the EM",
            peer: 1,
            access: |client, function| {
                let common = function.virtio.common;
                must(client.write(common.bar.into(), u64::from(common.offset), &[0; 4]));
            },
            samples: Vec::new(),
        },
        Kind {
            metric: "config_read_shadow",
            what: "config read, from the shadow",
            peer: 0,
            access: |client, _| {
                let mut data = [0; 4];
                must(client.read(CONFIG_REGION, 0, &mut data));
            },
            samples: Vec::new(),
        },
        Kind {
            metric: "device_read_shadow",
            what: "device configuration read, from the shadow",
            peer: 0,
            access: |client, function| {
                let device = function.virtio.device;
                let mut data = [0; 4];
                must(client.read(device.bar.into(), device.offset.into(), &mut data));
            },
            samples: Vec::new(),
        },
        Kind {
            metric: "config_write_m2m",
            what: "config write, answered by the OM",
            peer: 1,
            access: |client, _| must(client.write(CONFIG_REGION, 0x3c, &[0x0b])),
            samples: Vec::new(),
        },
    ];
    for kind in &kinds {
        for _ in 0..ACCESSES {
            (kind.access)(&mut client, &function);
        }
    }
    for _ in 0..ROUNDS {
        for kind in &mut kinds {
            let begin = Instant::now();
            for _ in 0..ACCESSES {
                (kind.access)(&mut client, &function);
            }
            kind.samples
                .push(begin.elapsed().as_nanos() as f64 / f64::from(ACCESSES));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    report(&kinds)
}

fn must(result: distdpu_tests::Result<()>) {
    if let Err(error) = result {
        eprintln!("config_access: {error}");
        std::process::exit(1);
    }
}

fn report(kinds: &[Kind]) -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{:44} {:>9} {:>9} {:>9} {:>7}",
        "one access, in µs", "median", "p10", "p90", "ratio"
    );
    let mut json = match std::env::var_os("DISTDPU_BENCH_JSON") {
        Some(path) => Some(OpenOptions::new().create(true).append(true).open(path)?),
        None => None,
    };
    for kind in kinds {
        let peer = &kinds[kind.peer];
        // Rounds are compared with their neighbours, so that a load that comes and goes cancels out.
        let ratios = kind
            .samples
            .iter()
            .zip(&peer.samples)
            .map(|(a, b)| a / b)
            .collect();
        let ratio = quantile(ratios, 0.5);
        let at = |q| quantile(kind.samples.clone(), q) / 1000.0;
        println!(
            "{:44} {:9.2} {:9.2} {:9.2} {:>6.2}x",
            kind.what,
            at(0.5),
            at(0.1),
            at(0.9),
            ratio
        );
        if let Some(file) = &mut json {
            let line = serde_json::json!({
                "metric": kind.metric,
                "value": at(0.5),
                "unit": "us",
                "compared_with": peer.metric,
                "ratio": ratio,
                "samples": kind.samples.len(),
            });
            writeln!(file, "{line}")?;
        }
    }
    println!("bar: a config write over M2M costs at most 2.5x one answered in the EM");
    Ok(())
}

fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * q).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}
