//! A lookup after its memory left the caches: what a data path meets that moves a frame between two lookups.

use std::hint::black_box;
use std::time::Instant;

use crate::report::Samples;

/// Lookups in one sample.
const LOOKUPS: usize = 128;
/// Bytes read between lookups where the size of the second-level cache is not known.
const FALLBACK: usize = 4 << 20;
const LINE: usize = 64;

/// Memory whose reading pushes everything else out of the first and second level of the data cache.
pub(crate) struct Eviction {
    memory: Vec<u64>,
}

impl Eviction {
    /// Twice the second-level cache.
    pub(crate) fn new() -> Self {
        let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size");
        let bytes = size.ok().and_then(|text| {
            let kib: usize = text.trim().strip_suffix('K')?.parse().ok()?;
            kib.checked_mul(2 << 10)
        });
        let bytes = bytes.filter(|b| *b > 0).unwrap_or(FALLBACK);
        Eviction {
            memory: vec![1; bytes / size_of::<u64>()],
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.len() * size_of::<u64>()
    }

    fn run(&self) {
        let lines = self.memory.iter().step_by(LINE / size_of::<u64>());
        black_box(lines.sum::<u64>());
    }

    /// Median nanoseconds of one lookup with the caches emptied before it, without what taking the time costs.
    pub(crate) fn measure(&self, addresses: &[u64], mut lookup: impl FnMut(u64) -> u64) -> f64 {
        let step = (addresses.len() / LOOKUPS).max(1);
        let (with, without): (Vec<f64>, Vec<f64>) = {
            let timed = |addr: u64, lookup: &mut dyn FnMut(u64) -> u64| {
                self.run();
                // The clock's own memory is back in the cache when it counts.
                black_box(Instant::now());
                let start = Instant::now();
                black_box(lookup(black_box(addr)));
                start.elapsed().as_secs_f64() * 1e9
            };
            addresses
                .iter()
                .step_by(step)
                .map(|&addr| (timed(addr, &mut lookup), timed(addr, &mut |addr| addr)))
                .unzip()
        };
        (Samples(with).median() - Samples(without).median()).max(0.0)
    }
}
