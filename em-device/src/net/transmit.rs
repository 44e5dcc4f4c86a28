//! From a transmit queue to the wires.

use super::features;
use super::header;
use super::links::{Forwarded, Links};
use super::queue::{NetQueue, drop_reason};
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use crate::offload::{Needs, Receiver};
use crate::virtio::chain::{BadChain, Parts, Spare, Walked};
use crate::virtio::ring::RingError;
use dot_iommu::{Access, DotView};
use std::time::{Duration, Instant};

/// How long a frame waits for room on its wire before it is dropped.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// Bytes after which used buffers and sent frames are made visible although the burst goes on.
const FLUSH_BYTES: usize = 128 << 10;

/// How far ahead buffers are fetched: as long as one takes to come from another processor's cache.
const AHEAD: u16 = 4;

/// What a frame of this driver may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Negotiated features.
    pub features: u64,
    /// Bytes of the header in front of a frame.
    pub header: usize,
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
    let (mut blocked, discards) = (queue.blocked, queue.discards);
    let Some((mut ring, mut counters)) = queue.parts(view) else {
        return Ok(0);
    };
    let mut parts = Parts::reuse(std::mem::take(pool));
    let (mut done, mut unseen) = (0, 0);
    let mut result = Ok(());
    while done < budget {
        parts.clear();
        ring.prefetch(AHEAD, Access::Read);
        let taken = match ring.pop(&mut parts) {
            Ok(Some(taken)) => taken,
            Ok(None) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        };
        let mut meta = FrameMeta::default();
        let last_try = blocked.is_some_and(|since| since.elapsed() >= PATIENCE);
        let forwarded = match discards {
            true => (Forwarded::Dropped(drop_reason::NOT_RUNNING), 0),
            false => frame(taken.chain, &mut parts, links, limits, last_try, &mut meta),
        };
        match forwarded {
            (Forwarded::Full, _) => {
                ring.unpop(taken.head.slots);
                blocked.get_or_insert_with(Instant::now);
                break;
            }
            (Forwarded::Sent, bytes) => {
                counters.moved(bytes, &meta);
                unseen += bytes;
                blocked = None;
            }
            // A wire that stays full is not waited for at each frame anew.
            (Forwarded::Dropped(reason), _) => {
                counters.dropped(reason);
                if discards {
                    blocked = None;
                }
            }
        }
        done += 1;
        if let Err(error) = ring.push_used(taken.head, 0) {
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

#[inline]
fn frame(
    chain: Result<Walked, BadChain>,
    parts: &mut Parts<'_>,
    links: &mut Links,
    limits: &Limits,
    last_try: bool,
    meta: &mut FrameMeta,
) -> (Forwarded, usize) {
    let drop = |reason| (Forwarded::Dropped(reason), 0);
    match chain {
        Ok(walked) if walked.writable != 0 => return drop(drop_reason::WRONG_DIRECTION),
        Ok(_) => {}
        Err(bad) => return drop(bad.name()),
    }
    // Read once: the driver may change it at any time.
    let mut bytes = [0; 32];
    let Some(first) = parts.take_header(limits.header, &mut bytes) else {
        return drop(drop_reason::SHORT_HEADER);
    };
    let Some(header) = bytes.first_chunk() else {
        return drop(drop_reason::SHORT_HEADER);
    };
    *meta = header::parse(header);
    let frame = Frame::new(*meta, parts.slices().get(first..).unwrap_or_default());
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
    let mut needed = match meta.gso() {
        FrameMeta::GSO_NONE if meta.needs_csum() => features::CSUM,
        FrameMeta::GSO_NONE => 0,
        FrameMeta::GSO_TCPV4 => features::HOST_TSO4,
        FrameMeta::GSO_TCPV6 => features::HOST_TSO6,
        FrameMeta::GSO_UDP => features::HOST_USO,
        _ => return Err(drop_reason::BAD_OFFLOAD),
    };
    if meta.gso_type & FrameMeta::GSO_ECN != 0 {
        needed |= features::HOST_ECN;
    }
    if limits.features & needed != needed || meta.check(len).is_err() {
        return Err(drop_reason::BAD_OFFLOAD);
    }
    let wire = Receiver {
        csum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        uso: true,
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
