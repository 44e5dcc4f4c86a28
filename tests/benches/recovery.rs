//! How long two guests hear nothing of each other when an EM is killed under their traffic: the pause between the
//! last frame before and the first after, over many kills.

use distdpu_tests::dpu::{Dpu, Net};
use distdpu_tests::packet::Random;
use distdpu_tests::recovery::{Tally, successor, while_talking};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Kills.
const KILLS: usize = 100;
/// Bars, milliseconds: median and worst.
const BARS: [f64; 2] = [50.0, 500.0];

fn main() {
    if let Err(error) = run() {
        eprintln!("recovery: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let dpu = Dpu::start(&[Net::default(), Net::default()])?;
    let mut a = VirtioNet::open(&dpu.socket(0), Guest::default())?;
    let mut b = VirtioNet::open(&dpu.socket(1), Guest::default())?;
    a.start(Setup::default())?;
    b.start(Setup::default())?;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut quiet, mut pauses) = while_talking([&mut a, &mut b], |tallies| {
        let mut pids = [dpu.em_pid(0)?, dpu.em_pid(1)?];
        let (mut quiet, mut pauses) = (Vec::new(), Vec::new());
        for round in 0..KILLS {
            for tally in tallies {
                tally.hears()?;
                tally.pause_us.store(0, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(150 + random.below(50)));
            quiet.push(longest(tallies));
            let em = round % 2;
            if let Some(pid) = Pid::from_raw(pids[em] as i32) {
                kill_process(pid, Signal::KILL).map_err(std::io::Error::from)?;
            }
            pids[em] = successor(&dpu, em, pids[em])?;
            for tally in tallies {
                tally.hears()?;
            }
            pauses.push(longest(tallies));
        }
        Ok((quiet, pauses))
    })?;
    report("without a kill", "pause_quiet", &mut quiet)?;
    report("with a kill", "pause_kill", &mut pauses)?;
    println!("bars: median {} ms, worst {} ms", BARS[0], BARS[1]);
    Ok(())
}

/// The longest pause of either guest, milliseconds.
fn longest(tallies: [&Tally; 2]) -> f64 {
    let pauses = tallies.map(|tally| tally.pause_us.load(Ordering::Relaxed));
    pauses.into_iter().max().unwrap_or(0) as f64 / 1000.0
}

fn report(what: &str, metric: &str, samples: &mut [f64]) -> Result<(), Box<dyn std::error::Error>> {
    samples.sort_by(f64::total_cmp);
    let at = |q: f64| samples[((samples.len() - 1) as f64 * q) as usize];
    println!(
        "longest pause {what:16} median {:7.1} ms, p90 {:7.1} ms, worst {:7.1} ms ({} times)",
        at(0.5),
        at(0.9),
        at(1.0),
        samples.len()
    );
    if let Some(path) = std::env::var_os("DISTDPU_BENCH_JSON") {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let line = serde_json::json!({
            "metric": metric, "value": at(0.5), "unit": "ms", "worst": at(1.0), "compared_with": null,
            "ratio": null, "samples": samples,
        });
        writeln!(file, "{line}")?;
    }
    Ok(())
}
