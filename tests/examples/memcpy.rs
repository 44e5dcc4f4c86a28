//! `memcpy BYTES`: bandwidth of one thread that copies one buffer to another of the same size, again and
//! again as `ib_write_bw` does; one number, in MiB/s.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How long copies are counted, after as long a warm-up.
const TIME: Duration = Duration::from_millis(300);
/// Bytes between two looks at the clock.
const BATCH: usize = 16 << 20;

fn main() -> ExitCode {
    let argument = std::env::args().nth(1).and_then(|word| word.parse().ok());
    let Some(bytes) = argument.filter(|bytes| (1..=BATCH).contains(bytes)) else {
        eprintln!("memcpy: give a number of bytes, 1 to {BATCH}");
        return ExitCode::FAILURE;
    };
    let (from, mut to) = (vec![0x5a_u8; bytes], vec![0_u8; bytes]);
    run(&from, &mut to);
    println!("{:.1}", run(&from, &mut to));
    ExitCode::SUCCESS
}

/// MiB/s.
fn run(from: &[u8], to: &mut [u8]) -> f64 {
    let begin = Instant::now();
    let mut copied = 0;
    while begin.elapsed() < TIME {
        for _ in 0..BATCH / from.len() {
            to.copy_from_slice(black_box(from));
            black_box(&mut *to);
            copied += from.len();
        }
    }
    copied as f64 / f64::from(1 << 20) / begin.elapsed().as_secs_f64()
}
