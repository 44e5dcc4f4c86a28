//! Cost of one translation: DOT, `GuestMemoryMmap`, and a 4-level page walk behind an IOTLB.
//!
//! Each is measured in turn in every round, as independent lookups (throughput), as a chain in
//! which an address depends on the previous result (latency), and one by one after reading twice the
//! second-level cache before every lookup (evicted). Addresses are sequential (256-byte
//! steps), random over all guest memory, or random in 32 hot pages. A cold IOTLB is flushed before
//! every lookup; a warm one keeps what earlier lookups of the same pattern left. No guest memory is
//! touched. Ratios are peer ÷ DOT: above 1, DOT is faster.
//!
//! A flushed IOTLB alone leaves the page tables in the first-level cache when addresses are sequential
//! or hot. Evicted, they are as cold as the IOTLB; so are the DOT's own entries, and what taking the time
//! costs is measured the same way and subtracted.

mod evict;
mod page_walk;
mod report;

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Instant;

use dot_iommu::{Access, Backing, DotReader, DotTable, DotView, HostMapping, Perm};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions,
};

use evict::Eviction;
use page_walk::{Iotlb, PageTable};
use report::{JsonLines, Samples};

const TOTAL: u64 = 16 << 30;
const BASE: u64 = 1 << 30;
/// Bytes of each access.
const LEN: usize = 64;
const ADDRESSES: usize = 4096;
const ROUNDS: usize = 9;
/// Name of the scheme that finds ranges as windows.
const WINDOW: &str = "dot, window";
const PATTERNS: [&str; 3] = ["sequential", "random", "hot"];
/// Passes over the addresses in one sample.
const PASSES: usize = 12;

/// How lookups follow each other.
#[derive(Clone, Copy)]
enum Kind<'e> {
    Independent,
    Chained,
    Evicted(&'e Eviction),
}

/// Names of the kinds.
const KINDS: [&str; 3] = ["independent", "chained", "evicted"];

/// Nanoseconds a lookup over `addresses`.
type Scheme<'a> = Box<dyn FnMut(&[u64], Kind<'_>) -> f64 + 'a>;

fn scheme<'a>(mut lookup: impl FnMut(u64) -> u64 + 'a) -> Scheme<'a> {
    Box::new(move |addresses, kind| {
        if let Kind::Evicted(eviction) = kind {
            return eviction.measure(addresses, &mut lookup);
        }
        // Zero, but the compiler cannot know: the address depends on the result before.
        let mask = black_box(0u64);
        let mut result = 0u64;
        let start = Instant::now();
        for _ in 0..PASSES {
            if matches!(kind, Kind::Chained) {
                for &addr in addresses {
                    result = lookup(addr + (result & mask));
                }
            } else {
                for &addr in addresses {
                    result = result.wrapping_add(lookup(addr));
                }
            }
        }
        black_box(result);
        start.elapsed().as_secs_f64() * 1e9 / (PASSES * addresses.len()) as f64
    })
}

struct World {
    table: DotTable,
    /// The same ranges without memory, as a VMM announces those of other devices.
    announced: DotTable,
    mmap: GuestMemoryMmap<()>,
    pages: PageTable,
    ranges: Vec<(u64, u64)>,
}

impl World {
    fn new(count: u64) -> Result<World, Box<dyn Error>> {
        let memfd = HostMapping::memfd(TOTAL)?;
        let mapping = HostMapping::new(memfd.as_fd(), 0, TOTAL, Perm::RW)?;
        let size = TOTAL / count;
        let ranges: Vec<_> = (0..count).map(|i| (BASE + i * 2 * size, size)).collect();
        let (table, announced) = (DotTable::new(), DotTable::new());
        let mut pages = PageTable::new();
        let mut regions = Vec::new();
        for (i, &(start, len)) in ranges.iter().enumerate() {
            let offset = i as u64 * size;
            table.map(
                start,
                len,
                Perm::RW,
                Backing::Mapped {
                    mapping: mapping.clone(),
                    offset,
                },
            )?;
            announced.map(start, len, Perm::RW, Backing::Message)?;
            pages.map(
                start,
                len,
                mapping.as_volatile_slice().ptr_guard().as_ptr() as u64 + offset,
            );
            let file = FileOffset::new(File::from(memfd.try_clone()?), offset);
            regions.push((GuestAddress(start), len as usize, Some(file)));
        }
        let mmap = GuestMemoryMmap::from_ranges_with_files(regions)?;
        Ok(World {
            table,
            announced,
            mmap,
            pages,
            ranges,
        })
    }

    /// Guest address of the `n`th byte of guest memory.
    fn address(&self, n: u64) -> u64 {
        let size = TOTAL / self.ranges.len() as u64;
        self.ranges
            .get((n / size) as usize)
            .map_or(BASE, |(start, _)| start + n % size)
    }

    fn addresses(&self, pattern: &str) -> Vec<u64> {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut random = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let hot: Vec<u64> = (0..32).map(|_| random(TOTAL / 4096) * 4096).collect();
        (0..ADDRESSES as u64)
            .map(|i| match pattern {
                "sequential" => self.address(i * 256 % TOTAL),
                "hot" => {
                    let page = hot[random(hot.len() as u64) as usize];
                    self.address(page + random(4096 / 64) * 64)
                }
                _ => self.address(random(TOTAL / 64) * 64),
            })
            .collect()
    }

    /// `window`: a view that has the ranges as windows.
    fn schemes<'a>(
        &'a self,
        view: &'a DotView<'a>,
        window: &'a DotView<'a>,
    ) -> Vec<(&'static str, Scheme<'a>)> {
        let (mmap, pages) = (&self.mmap, &self.pages);
        let walk_cold = |mut tlb: Iotlb<4>| {
            scheme(move |addr| {
                tlb.flush();
                tlb.translate(pages, addr).unwrap_or(0)
            })
        };
        let walk_warm =
            |mut tlb: Iotlb<4>| scheme(move |addr| tlb.translate(pages, addr).unwrap_or(0));
        let walk_warm_direct =
            |mut tlb: Iotlb<1>| scheme(move |addr| tlb.translate(pages, addr).unwrap_or(0));
        vec![
            (
                "dot",
                scheme(|addr| {
                    view.translate(addr, LEN as u64, Access::Write)
                        .map_or(0, |s| s.as_ptr() as u64)
                }),
            ),
            (
                WINDOW,
                scheme(|addr| {
                    window
                        .translate(addr, LEN as u64, Access::Write)
                        .map_or(0, |s| s.as_ptr() as u64)
                }),
            ),
            ("dot get_slices", scheme(|addr| first_slice(view, addr))),
            (
                "mmap get_slice",
                scheme(|addr| {
                    mmap.get_slice(GuestAddress(addr), LEN)
                        .map_or(0, |s| s.ptr_guard().as_ptr() as u64)
                }),
            ),
            ("mmap get_slices", scheme(|addr| first_slice(mmap, addr))),
            ("walk, 64 4-way cold", walk_cold(Iotlb::new(64))),
            ("walk, 1024 4-way cold", walk_cold(Iotlb::new(1024))),
            ("walk, 64 direct warm", walk_warm_direct(Iotlb::new(64))),
            ("walk, 64 4-way warm", walk_warm(Iotlb::new(64))),
            ("walk, 1024 direct warm", walk_warm_direct(Iotlb::new(1024))),
            ("walk, 1024 4-way warm", walk_warm(Iotlb::new(1024))),
        ]
    }
}

/// The path that `virtio-queue` takes, on either memory.
#[inline]
fn first_slice(memory: &impl GuestMemory, addr: u64) -> u64 {
    memory
        .get_slices(GuestAddress(addr), LEN, Permissions::Write)
        .ok()
        .and_then(|mut slices| slices.next())
        .and_then(|slice| slice.ok())
        .map_or(0, |slice| slice.ptr_guard().as_ptr() as u64)
}

/// Worst cases, to hold against the project's bars.
#[derive(Default)]
struct Bars {
    /// DOT's median at 64 ranges, by kind of measurement.
    at_64: Vec<(String, f64)>,
    /// Cold walk ÷ DOT.
    gain_over_cold: Vec<(String, f64)>,
    /// Cold walk ÷ window, random addresses.
    window_gain: Vec<(String, f64)>,
}

impl Bars {
    fn print(&self) {
        println!();
        for kind in KINDS {
            let of_kind = |bar: &&(String, f64)| bar.0.ends_with(kind);
            let slowest = self
                .at_64
                .iter()
                .filter(of_kind)
                .map(|bar| bar.1)
                .fold(0.0, f64::max);
            if kind == "evicted" {
                println!("     DOT at 64 ranges, evicted: slowest pattern {slowest:.2} ns");
            } else {
                let met = if slowest <= 5.0 { "met" } else { "missed" };
                println!(
                    "bar: DOT at 64 ranges ≤ 5 ns, {kind}: {met} (slowest pattern {slowest:.2} ns)"
                );
            }
            for pattern in PATTERNS {
                let least = self.gain_over_cold.iter().filter(of_kind);
                let least = least
                    .filter(|bar| bar.0.starts_with(pattern))
                    .map(|bar| bar.1);
                let least = least.fold(f64::INFINITY, f64::min);
                let met = if least >= 5.0 { "met" } else { "missed" };
                println!(
                    "bar: ≥ 5 × faster than a walk with a cold IOTLB, {pattern}, {kind}: {met} (least {least:.1} ×)"
                );
            }
        }
        for kind in KINDS {
            let of_kind = self.window_gain.iter().filter(|bar| bar.0 == kind);
            let least = of_kind.map(|bar| bar.1).fold(f64::INFINITY, f64::min);
            let met = if least >= 2.0 { "met" } else { "missed" };
            println!(
                "bar: a window ≥ 2 × faster than a walk with a cold IOTLB, random, {kind}: {met} (least {least:.1} ×)"
            );
        }
        println!(
            "     (independent and chained, sequential and hot addresses keep the walked page tables in the L1 cache: \
             the best case of the walk)"
        );
    }
}

fn compare(
    world: &World,
    reader: &DotReader,
    pattern: &str,
    eviction: &Eviction,
    bars: &mut Bars,
    json: &mut JsonLines,
) -> Result<(), Box<dyn Error>> {
    let ranges = world.ranges.len();
    let addresses = world.addresses(pattern);
    let view = reader.pin();
    let announced = world.announced.reader().with_windows(reader);
    let window = announced.pin();
    let mut schemes = world.schemes(&view, &window);
    let kinds = [Kind::Independent, Kind::Chained, Kind::Evicted(eviction)];
    // By kind, then by scheme.
    let mut samples = [(); 3].map(|()| vec![Samples(Vec::new()); schemes.len()]);
    for round in 0..=ROUNDS {
        for (i, (_, run)) in schemes.iter_mut().enumerate() {
            for (kind, samples) in kinds.into_iter().zip(&mut samples) {
                let nanoseconds = run(&addresses, kind);
                // The first round only warms caches and predictors.
                if round > 0 {
                    samples[i].0.push(nanoseconds);
                }
            }
        }
    }
    println!("\n{ranges} range(s), {pattern}");
    print!("  {:<24}", "ns: median (min–max)");
    for kind in KINDS {
        print!("{kind:>24}{:>8}", "÷ dot");
    }
    println!();
    for (i, (name, _)) in schemes.iter().enumerate() {
        print!("  {name:<24}");
        for (kind, samples) in KINDS.into_iter().zip(&samples) {
            let (own, peer) = (&samples[0], &samples[i]);
            let ratio = peer.median() / own.median();
            print!("{:>24}{ratio:>8.2}", peer.to_string());
            let place = format!("{pattern} {kind}");
            if i == 0 && ranges == 64 {
                bars.at_64.push((place.clone(), own.median()));
            }
            if name.ends_with("cold") && pattern == "random" {
                let window = samples[1].median();
                bars.window_gain
                    .push((kind.to_owned(), peer.median() / window));
            }
            if name.ends_with("cold") {
                bars.gain_over_cold.push((place, ratio));
            }
            if i > 0 {
                let metric = format!("dot_lookup/{ranges}/{pattern}/{kind}");
                json.line(&metric, own, Some((name, peer)))?;
            }
        }
        println!();
    }
    Ok(())
}

fn pin_cost(reader: &DotReader, json: &mut JsonLines) -> Result<(), Box<dyn Error>> {
    let mut samples = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..100_000 {
            black_box(reader.pin());
        }
        samples.push(start.elapsed().as_secs_f64() * 1e9 / 1e5);
    }
    let samples = Samples(samples);
    println!("\npin and unpin: {samples} ns");
    json.line("dot_pin", &samples, None)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo test --benches` runs this file too, to see that it builds and starts.
    if std::env::args().any(|arg| arg == "--test") {
        return Ok(());
    }
    let mut json = JsonLines::open()?;
    let mut bars = Bars::default();
    let eviction = Eviction::new();
    println!(
        "evicted: {} KiB are read before each lookup",
        eviction.bytes() >> 10
    );
    for count in [1, 8, 64, 512] {
        let world = World::new(count)?;
        let reader = world.table.reader();
        for pattern in PATTERNS {
            compare(&world, &reader, pattern, &eviction, &mut bars, &mut json)?;
        }
        if count == 64 {
            pin_cost(&reader, &mut json)?;
        }
    }
    bars.print();
    Ok(())
}
