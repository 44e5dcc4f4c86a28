//! Frames through the shared-memory wire against plain copies of the same sizes.
//!
//! Two threads, one at each end, move frames of one size from a buffer of the sender through the wire into a
//! buffer of the receiver, which is two copies a frame. The baseline is one thread that copies the same
//! frames twice through memory of the size of the ring. Both are measured in turn, several times.
//! Prints a table, and appends a JSON object a line to the file that `DISTDPU_BENCH_JSON` names.

use em_device::frame::{Frame, FrameMeta};
use em_device::port::shm::ShmPort;
use em_device::port::{Port, Rx, TxError};
use m2m_fabric::proto::{SHM_LINK_BYTES, SHM_RING_BYTES};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::error::Error;
use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

const SIZES: [usize; 3] = [64, 1500, 65000];
const ROUNDS: usize = 9;
/// Frames between two flushes, and in a receive batch.
const BATCH: usize = 64;
/// Bytes (and frames, for the short ones) of one sample.
const SAMPLE_BYTES: usize = 1 << 30;
const SAMPLE_FRAMES: usize = 4_000_000;

fn pair() -> Fallible<(ShmPort, ShmPort)> {
    let memory = memfd_create("wire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, SHM_LINK_BYTES)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let (wake0, wake1) = (eventfd(0, flags)?, eventfd(0, flags)?);
    Ok((
        ShmPort::attach(
            "a",
            0,
            memory.try_clone()?,
            wake0.try_clone()?,
            wake1.try_clone()?,
        )?,
        ShmPort::attach("b", 1, memory, wake1, wake0)?,
    ))
}

/// Sends `frames` frames of `size` bytes through the wire.
fn wire(ends: &mut (ShmPort, ShmPort), size: usize, frames: usize) -> Fallible<Duration> {
    let (sender, receiver) = (&mut ends.0, &mut ends.1);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || -> Fallible<()> {
            let mut bytes = vec![1u8; size];
            let parts = [VolatileSlice::from(&mut bytes[..])];
            let frame = Frame::new(FrameMeta::default(), &parts);
            let mut sent = 0;
            while sent < frames {
                for _ in 0..BATCH.min(frames - sent) {
                    match sender.transmit(&frame) {
                        Ok(()) => sent += 1,
                        Err(TxError::Full) => {
                            sender.flush();
                            std::thread::yield_now();
                            break;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                sender.flush();
            }
            Ok(())
        });
        let mut copy = vec![0u8; size];
        let mut received = 0;
        while received < frames && !(sending.is_finished() && receiver.down_reason().is_some()) {
            let count = receiver.receive(BATCH, &mut |frame: &Frame<'_>| {
                frame.copy_out(0, &mut copy);
                Rx::Taken
            });
            received += count;
            if count == 0 {
                std::thread::yield_now();
            }
        }
        black_box(&copy);
        sending.join().map_err(|_| "the sender panicked")?
    })?;
    Ok(start.elapsed())
}

/// Copies the same frames in and out of memory as large as the ring, on this thread.
fn copies(memory: &mut [u8], size: usize, frames: usize) -> Duration {
    let source = vec![1u8; size];
    let mut target = vec![0u8; size];
    let mut at = 0;
    let start = Instant::now();
    for _ in 0..frames {
        if at + size > memory.len() {
            at = 0;
        }
        let Some(slot) = memory.get_mut(at..at + size) else {
            break;
        };
        slot.copy_from_slice(black_box(&source));
        target.copy_from_slice(black_box(slot));
        black_box(&mut target);
        at += size.next_multiple_of(16) + 16;
    }
    start.elapsed()
}

/// Median, lowest and highest.
fn spread(mut rates: Vec<f64>) -> (f64, f64, f64) {
    rates.sort_by(f64::total_cmp);
    let at = |i: usize| rates.get(i).copied().unwrap_or(f64::NAN);
    (
        at(rates.len() / 2),
        at(0),
        at(rates.len().saturating_sub(1)),
    )
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
    println!(
        "{:>6}  {:>12}  {:>16}  {:>8}  {:>14}  {:>6}",
        "bytes", "frames/s", "spread", "GB/s", "copies GB/s", "ratio"
    );
    let mut memory = vec![1u8; SHM_RING_BYTES as usize];
    for size in SIZES {
        let frames = SAMPLE_FRAMES.min(SAMPLE_BYTES / size);
        let mut ends = pair()?;
        // Pages are there and clocks are up.
        wire(&mut ends, size, frames / 4)?;
        copies(&mut memory, size, frames / 4);
        let (mut by_wire, mut by_copies) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            by_wire.push(frames as f64 / wire(&mut ends, size, frames)?.as_secs_f64());
            by_copies.push(frames as f64 / copies(&mut memory, size, frames).as_secs_f64());
        }
        let (rate, low, high) = spread(by_wire);
        let (baseline, _, _) = spread(by_copies);
        let gigabytes = |rate: f64| rate * size as f64 / 1e9;
        let ratio = rate / baseline;
        println!(
            "{size:>6}  {rate:>12.0}  {:>16}  {:>8.2}  {:>14.2}  {ratio:>6.2}",
            format!("{:.2}..{:.2} M", low / 1e6, high / 1e6),
            gigabytes(rate),
            gigabytes(baseline),
        );
        if let Some(json) = &mut json {
            for (metric, unit, value) in [
                ("frames", "frames/s", rate),
                ("throughput", "GB/s", gigabytes(rate)),
            ] {
                writeln!(
                    json,
                    "{{\"metric\":\"shm_wire_{metric}_{size}\",\"value\":{value:.3},\"unit\":\"{unit}\",\
                     \"compared_with\":\"two memcpy of {size} bytes on one thread\",\"ratio\":{ratio:.4},\"samples\":{ROUNDS}}}"
                )?;
            }
        }
    }
    Ok(())
}
