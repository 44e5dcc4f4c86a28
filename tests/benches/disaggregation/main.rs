//! What it costs and saves that OM and EM are processes of their own: the data path against a single process with
//! both, and one OM with N EMs against N complete pairs. Without a VM: drivers stand where guests would.
//!
//! Traffic stays within an EM, between its two functions: pairs of different OMs have no wire in common. What is
//! compared runs side by side, one idle while the other is measured, in turn; every few rounds both are started anew,
//! because where memory lies makes a difference that stays for the life of a process.

#[path = "../figures/mod.rs"]
mod figures;
mod memory;
mod monolith;
mod processes;
mod systems;
mod traffic;

use figures::{Metric, Outcome, report};
use processes::cpu;
use std::time::{Duration, Instant};
use systems::{System, Whole};
use traffic::Kind;

/// How often both sides of a comparison are started anew.
const STARTS: usize = 8;
/// Rounds between two starts, if `DISTDPU_BENCH_ROUNDS` does not say.
const ROUNDS: usize = 50;
/// How long a side is measured in a round.
const SLICE: Duration = Duration::from_millis(40);
/// EMs in one system.
const COUNTS: [usize; 4] = [1, 2, 4, 8];
/// How long idle systems are watched.
const IDLE: Duration = Duration::from_secs(2);

const BARS: &str = "bars: gap of the data path at most 0.4 %; CPU of the OM under load at most 1 %; control plane of eight \
    pairs at least 2.45x that of eight functions under one OM\n\
    PSS counts a page that n processes share as 1/n in each, so text is not counted n times; RSS counts it in each";

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match &words[..] {
        [word, config] if word == monolith::WORD => monolith::run(config),
        _ => run(&words),
    };
    if let Err(error) = done {
        eprintln!("disaggregation: {error}");
        std::process::exit(1);
    }
}

/// Words of the command line pick measurements.
fn run(words: &[String]) -> Outcome<()> {
    if words.iter().any(|word| word == "--test") {
        return Ok(());
    }
    let words: Vec<_> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| *word == name);
    let mut metrics = Vec::new();
    if wanted("split") {
        for kind in Kind::ALL {
            split(&mut metrics, kind)?;
        }
    }
    if wanted("many") {
        for count in COUNTS {
            many(&mut metrics, count)?;
        }
    }
    if wanted("memory") {
        memory::measure(&mut metrics)?;
    }
    report(&metrics, BARS)
}

fn rounds() -> usize {
    let wanted = std::env::var("DISTDPU_BENCH_ROUNDS").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(ROUNDS).max(1)
}

/// What two systems reached, round by round, and what the first one's OMs took of a core, in percent.
#[derive(Default)]
struct Paired {
    first: Vec<f64>,
    second: Vec<f64>,
    om: [Vec<f64>; 2],
}

impl Paired {
    /// Percent that the first one misses of the second.
    fn gaps(&self) -> Vec<f64> {
        let pairs = self.first.iter().zip(&self.second);
        pairs.map(|(a, b)| (1.0 - a / b) * 100.0).collect()
    }

    fn ratios(&self) -> Vec<f64> {
        let pairs = self.first.iter().zip(&self.second);
        pairs.map(|(a, b)| a / b).collect()
    }

    /// Measures one pair of systems.
    fn rounds(&mut self, systems: &mut [System; 2], kind: Kind) -> Outcome<()> {
        for system in &mut *systems {
            system.load(kind, SLICE)?;
        }
        for round in 0..rounds() {
            let mut got = [0.0; 2];
            // Neither is always the first.
            for at in [round % 2, 1 - round % 2] {
                let oms = systems[at].oms();
                let (before, begin) = (cpu(&oms)?, Instant::now());
                got[at] = systems[at].load(kind, SLICE)?;
                let spent = cpu(&oms)?.saturating_sub(before);
                self.om[at].push(percent(spent, begin.elapsed()));
            }
            self.first.push(got[0]);
            self.second.push(got[1]);
        }
        Ok(())
    }

    /// What the second did, what the first did against it, and the gap under that name.
    fn report(
        self,
        metrics: &mut Vec<Metric>,
        kind: Kind,
        (name, what): Named,
        (other, other_what): Named,
        gap: String,
    ) {
        let unit = kind.unit();
        let (gaps, ratios) = (self.gaps(), self.ratios());
        metrics.push(single(other.clone(), other_what, unit, self.second));
        metrics.push(Metric {
            name,
            what,
            unit,
            values: self.first,
            against: Some((other, ratios)),
        });
        metrics.push(single(gap, "  gap by round".into(), "%", gaps));
    }
}

/// Name of a metric, and what it is.
type Named = (String, String);

fn percent(spent: Duration, of: Duration) -> f64 {
    spent.as_secs_f64() / of.as_secs_f64() * 100.0
}

/// OM and EM apart against one process with both.
fn split(metrics: &mut Vec<Metric>, kind: Kind) -> Outcome<()> {
    let mut paired = Paired::default();
    for start in 0..STARTS {
        // Neither is always the first here either.
        let mut systems = match start % 2 {
            0 => [
                System::start(Whole::Split, 1)?,
                System::start(Whole::Monolith, 1)?,
            ],
            _ => {
                let second = System::start(Whole::Monolith, 1)?;
                [System::start(Whole::Split, 1)?, second]
            }
        };
        paired.rounds(&mut systems, kind)?;
    }
    let (name, what) = (kind.name(), kind.what());
    let [om, _] = paired.om.clone();
    paired.report(
        metrics,
        kind,
        (format!("split_{name}"), format!("{what}, OM and EM apart")),
        (
            format!("monolith_{name}"),
            format!("{what}, OM and EM in one process"),
        ),
        format!("split_gap_{name}"),
    );
    metrics.push(single(
        format!("split_om_cpu_{name}"),
        "  CPU of the OM, of a core".into(),
        "%",
        om,
    ));
    Ok(())
}

/// One OM with `count` EMs against as many pairs, all under load at once.
fn many(metrics: &mut Vec<Metric>, count: usize) -> Outcome<()> {
    let mut paired = Paired::default();
    let mut idle: [Vec<f64>; 2] = Default::default();
    let starts = STARTS / 2;
    for _ in 0..starts {
        let mut systems = [
            System::start(Whole::Split, count)?,
            System::start(Whole::Pairs, count)?,
        ];
        paired.rounds(&mut systems, Kind::Write4k)?;
        let all = systems
            .each_ref()
            .map(|system| [system.oms(), system.ems()].concat());
        let before = [cpu(&all[0])?, cpu(&all[1])?];
        std::thread::sleep(IDLE);
        for (at, values) in idle.iter_mut().enumerate() {
            let spent = cpu(&all[at])?.saturating_sub(before[at]);
            values.push(percent(spent, IDLE) / count as f64);
        }
    }
    let [one, pairs] = paired.om.clone();
    paired.report(
        metrics,
        Kind::Write4k,
        (
            format!("one_om_{count}_write_4k"),
            format!("WRITE of 4 KiB on all EMs, one OM with {count}"),
        ),
        (
            format!("pairs_{count}_write_4k"),
            format!("WRITE of 4 KiB on all EMs, {count} complete pairs"),
        ),
        format!("one_om_{count}_gap"),
    );
    let [idle_one, idle_pairs] = idle;
    for (name, what, one, pairs) in [
        (
            "om_cpu_loaded",
            "CPU of all OMs under load, of a core",
            one,
            pairs,
        ),
        (
            "idle_cpu",
            "CPU of all processes, idle with guests, of a core, by EM",
            idle_one,
            idle_pairs,
        ),
    ] {
        metrics.push(single(
            format!("pairs_{count}_{name}"),
            format!("  {what}, {count} pairs"),
            "%",
            pairs,
        ));
        metrics.push(single(
            format!("one_om_{count}_{name}"),
            format!("  {what}, one OM with {count}"),
            "%",
            one,
        ));
    }
    Ok(())
}

fn single(name: String, what: String, unit: &'static str, values: Vec<f64>) -> Metric {
    Metric {
        name,
        what,
        unit,
        values,
        against: None,
    }
}
