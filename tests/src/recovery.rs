//! Two guests that talk without pause, each checking what it gets, while something happens to their DPU.

use crate::dpu::{Dpu, mac};
use crate::packet::{Flow, Packet, judge, payload};
use crate::time::{SOON, wait_for};
use crate::virtio_net::VirtioNet;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What one guest saw. Read by others while it goes on.
#[derive(Debug, Default)]
pub struct Tally {
    /// Frames given to its device.
    pub sent: AtomicU64,
    /// Frames that came, the same one twice counted twice.
    pub received: AtomicU64,
    /// Frames that came before.
    pub doubled: AtomicU64,
    /// The longest pause between two frames that came, in microseconds, since this was set to 0.
    pub pause_us: AtomicU64,
}

impl Tally {
    /// Waits until some more frames came.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn hears(&self) -> Result<()> {
        let before = self.received.load(Ordering::Relaxed);
        wait_for("frames", SOON, || {
            (self.received.load(Ordering::Relaxed) > before + 100).then_some(())
        })
    }
}

/// One guest of a conversation.
pub struct Talker<'a> {
    /// Its driver.
    pub driver: &'a mut VirtioNet,
    /// What it sends.
    pub to_peer: Flow,
    /// What it gets.
    pub from_peer: Flow,
    /// What it saw.
    pub tally: &'a Tally,
}

impl Talker<'_> {
    /// Sends and checks until `stop`. No frame is waited for: what is lost is lost.
    ///
    /// # Errors
    /// The device gave back a buffer that it did not have, or twice, or a frame came that nobody sent.
    pub fn talk(&mut self, stop: &AtomicBool) -> Result<()> {
        let (mut next, mut newest, mut last) = (0, None, Instant::now());
        while !stop.load(Ordering::Relaxed) {
            let mut idle = true;
            for _ in 0..8 {
                if !self.driver.try_queue(0, &frame(&self.to_peer, next))? {
                    break;
                }
                next += 1;
                idle = false;
            }
            self.driver.kick_transmit(0)?;
            self.tally.sent.store(next, Ordering::Relaxed);
            while let Some(got) = self.driver.try_receive(0)? {
                let number = check(&self.from_peer, &got)?;
                let old = newest.is_some_and(|newest| number <= newest);
                newest = newest.max(Some(number));
                self.tally
                    .doubled
                    .fetch_add(u64::from(old), Ordering::Relaxed);
                self.tally.received.fetch_add(1, Ordering::Relaxed);
                let pause = last.elapsed().as_micros() as u64;
                last = Instant::now();
                self.tally.pause_us.fetch_max(pause, Ordering::Relaxed);
                idle = false;
            }
            let pause = if idle { 200 } else { 20 };
            std::thread::sleep(Duration::from_micros(pause));
        }
        Ok(())
    }
}

/// Lets the guests at `net0` and `net1` talk while `act` runs with what they saw so far.
///
/// # Errors
/// Those of [`Talker::talk`] first, since they are why `act` failed, then those of `act`.
pub fn while_talking<R>(
    [a, b]: [&mut VirtioNet; 2],
    act: impl FnOnce([&Tally; 2]) -> Result<R>,
) -> Result<R> {
    let stop = AtomicBool::new(false);
    let tallies = [Tally::default(), Tally::default()];
    let [to, from] = [Flow::new(mac(0), mac(1)), Flow::new(mac(1), mac(0))];
    let talkers = [(a, to, from, &tallies[0]), (b, from, to, &tallies[1])];
    std::thread::scope(|scope| {
        let threads = talkers.map(|(driver, to_peer, from_peer, tally)| {
            let stop = &stop;
            scope.spawn(move || {
                let mut talker = Talker {
                    driver,
                    to_peer,
                    from_peer,
                    tally,
                };
                talker.talk(stop)
            })
        });
        let done = {
            // Also when it panics: the scope waits for the talkers.
            let _stop = Stop(&stop);
            act([&tallies[0], &tallies[1]])
        };
        for thread in threads {
            let ended = thread.join();
            ended.map_err(|_| Error::Harness("a guest panicked".into()))??;
        }
        done
    })
}

/// Says that something is to stop when it is dropped, also by a panic.
#[derive(Debug)]
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The process that took the place of `old` as EM number `em`, as soon as it is up.
///
/// # Errors
/// [`Error::Timeout`].
pub fn successor(dpu: &Dpu, em: usize, old: u32) -> Result<u32> {
    wait_for("another EM", SOON, || {
        let status = dpu.ctl(&["status"]).ok()?;
        let view = &status["ems"][em];
        let pid = view["pid"].as_u64()? as u32;
        (view["state"] == "up" && pid != old).then_some(pid)
    })
}

/// Frame `number` of a conversation: the number, then bytes that follow from it.
pub fn frame(flow: &Flow, number: u64) -> Packet {
    let len = 20 + (number * 131 % 1400) as usize;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(payload(len, number));
    flow.finished(0, &bytes)
}

/// Which frame of the conversation it is.
fn check(flow: &Flow, got: &Packet) -> Result<u64> {
    let wrong = |what: String| Error::Device(format!("a frame arrived that nobody sent: {what}"));
    let seen = judge(&got.frame).map_err(wrong)?;
    let number = seen.payload.first_chunk().copied().map(u64::from_le_bytes);
    let number = number.ok_or_else(|| wrong("it is too short".into()))?;
    if got.frame != frame(flow, number).frame {
        return Err(wrong(format!("number {number} with other bytes")));
    }
    Ok(number)
}
