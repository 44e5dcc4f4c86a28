//! From a transmit queue to the wires.

use super::features;
use super::header::{self, HEADER_BYTES};
use super::links::{Forwarded, Links};
use super::queue::{NetQueue, drop_reason};
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use crate::offload::{Needs, Receiver};
use crate::virtio::chain::{Parts, Spare};
use crate::virtio::ring::{Attached, RingError};
use dot_iommu::DotView;
use std::time::{Duration, Instant};

/// How long a frame waits for room on its wire before it is dropped.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// Bytes after which used buffers and sent frames are made visible although the burst goes on.
const FLUSH_BYTES: usize = 128 << 10;

/// What a frame of this driver may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Negotiated features.
    pub features: u64,
    /// MTU of the function.
    pub mtu: u16,
    /// Whether the link is up.
    pub link_up: bool,
}

/// Sends at most `budget` frames of a queue; answers how many heads were given back.
///
/// # Errors
/// [`RingError`] when the queue cannot go on; what was done before is visible.
pub fn burst(
    queue: &mut NetQueue,
    view: &DotView<'_>,
    links: &mut Links,
    limits: &Limits,
    pool: &mut Spare,
    budget: usize,
) -> Result<usize, RingError> {
    let mut blocked = queue.blocked;
    let Some((mut ring, mut counters)) = queue.parts(view) else {
        return Ok(0);
    };
    let mut parts = Parts::reuse(std::mem::take(pool));
    let (mut done, mut unseen) = (0, 0);
    let mut result = Ok(());
    while done < budget {
        let head = match ring.pop() {
            Ok(Some(head)) => head,
            Ok(None) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        };
        parts.clear();
        let last_try = blocked.is_some_and(|since| since.elapsed() >= PATIENCE);
        match frame(&ring, head, &mut parts, links, limits, last_try) {
            (Forwarded::Full, _) => {
                ring.unpop(1);
                blocked.get_or_insert_with(Instant::now);
                break;
            }
            (Forwarded::Sent, bytes) => {
                counters.moved(bytes);
                unseen += bytes;
                blocked = None;
            }
            // A wire that stays full is not waited for at each frame anew.
            (Forwarded::Dropped(reason), _) => counters.dropped(reason),
        }
        done += 1;
        if let Err(error) = ring.push_used(head, 0) {
            result = Err(error);
            break;
        }
        if unseen >= FLUSH_BYTES {
            unseen = 0;
            links.flush();
            result = ring.publish();
            if result.is_err() {
                break;
            }
        }
    }
    let published = ring.publish();
    *pool = parts.retire();
    queue.blocked = blocked;
    result.and(published).map(|()| done)
}

fn frame<'v>(
    ring: &Attached<'_, 'v>,
    head: u16,
    parts: &mut Parts<'v>,
    links: &mut Links,
    limits: &Limits,
    last_try: bool,
) -> (Forwarded, usize) {
    let drop = |reason| (Forwarded::Dropped(reason), 0);
    match ring.walk(head, parts) {
        Ok(walked) if walked.writable != 0 => return drop(drop_reason::WRONG_DIRECTION),
        Ok(_) => {}
        Err(bad) => return drop(bad.name()),
    }
    // Read once: the driver may change it at any time.
    let mut bytes = [0; HEADER_BYTES];
    let Some(first) = parts.take_front(&mut bytes) else {
        return drop(drop_reason::SHORT_HEADER);
    };
    let meta = header::parse(&bytes);
    let frame = Frame::new(meta, parts.slices().get(first..).unwrap_or_default());
    match check(&frame, limits) {
        Ok(()) => (links.forward(&frame, last_try), frame.len()),
        Err(reason) => drop(reason),
    }
}

fn check(frame: &Frame<'_>, limits: &Limits) -> Result<(), &'static str> {
    let len = frame.len();
    if len < MIN_FRAME {
        return Err(drop_reason::SHORT_FRAME);
    }
    if len > MAX_FRAME {
        return Err(drop_reason::ABOVE_MTU);
    }
    let meta = &frame.meta;
    let needed = match meta.gso() {
        FrameMeta::GSO_NONE if meta.needs_csum() => features::CSUM,
        FrameMeta::GSO_NONE => 0,
        FrameMeta::GSO_TCPV4 => features::HOST_TSO4,
        FrameMeta::GSO_TCPV6 => features::HOST_TSO6,
        _ => return Err(drop_reason::BAD_OFFLOAD),
    };
    if limits.features & needed != needed || meta.check(len).is_err() {
        return Err(drop_reason::BAD_OFFLOAD);
    }
    let wire = Receiver {
        csum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        mtu: limits.mtu,
    };
    if matches!(wire.needs(meta, len), Needs::Drop(_)) {
        return Err(drop_reason::ABOVE_MTU);
    }
    if limits.link_up {
        Ok(())
    } else {
        Err(drop_reason::LINK_DOWN)
    }
}
