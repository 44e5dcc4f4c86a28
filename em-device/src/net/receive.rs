//! From a wire to a receive queue.

use super::control::Settings;
use super::hash::{HASH_START, Hash};
use super::header::{self, HASH_HEADER_BYTES};
use super::lanes::Lanes;
use super::links::{self, Blocked, Link};
use super::queue::{Counters, drop_reason};
use super::steer::{self, STEER_BYTES};
use crate::flow::{L2Header, MacTable};
use crate::frame::{Frame, FrameMeta};
use crate::offload::{Needs, Receiver, Segmenter, finished_checksum};
use crate::port::{Rx, RxSink};
use crate::virtio::chain::{Parts, Spare};
use crate::virtio::ring::{Attached, Head, MAX_TOGETHER, RingError, Taken};
use dot_iommu::Access;
use std::time::{Duration, Instant};

/// How long a frame waits for receive buffers before it is dropped.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// How far ahead buffers are fetched: as long as one takes to come from another processor's cache.
const AHEAD: u16 = 4;
/// Buffers that one frame is merged into at most.
const MAX_MERGED: usize = MAX_TOGETHER;

/// What lives from burst to burst so that no frame allocates.
#[derive(Debug, Default)]
pub struct Pool {
    /// Buffers of a frame.
    pub parts: Spare,
    /// Heads of a frame with the room behind each.
    pub heads: Vec<(Head, u64)>,
    /// Segments of a frame.
    pub segmenter: Segmenter,
    /// Guest addresses and lengths of what was written to buffers, if somebody wants to know.
    pub written: Option<Vec<(u64, u64)>>,
}

/// Notes who is behind the wire.
#[derive(Debug)]
pub struct Learner<'s> {
    /// Addresses of the function's wires.
    pub table: &'s mut MacTable,
    /// The wire; `None` when it is known who is there.
    pub slot: Option<usize>,
    /// The time of this round.
    pub now: Instant,
}

impl Learner<'_> {
    #[inline]
    fn learn(&mut self, start: &[u8]) {
        let Some(slot) = self.slot else {
            return;
        };
        if let Some(header) = L2Header::parse(start) {
            self.table.learn(header.source, header.vlan, slot, self.now);
        }
    }
}

/// Takes the frames of one wire for one burst.
pub struct Sink<'s, 'v> {
    /// The receive queues.
    pub(super) lanes: Lanes<'s, 'v>,
    /// The driver's settings.
    pub settings: &'s Settings,
    /// What the driver takes.
    pub receiver: Receiver,
    /// Whether the driver takes a frame in several buffers.
    pub mergeable: bool,
    /// Bytes of the header in front of a frame.
    pub header: usize,
    /// Whether the link is up.
    pub link_up: bool,
    /// Buffers of a frame.
    pub parts: Parts<'v>,
    /// Heads of a frame.
    pub heads: &'s mut Vec<(Head, u64)>,
    /// For drivers without large segments.
    pub segmenter: &'s mut Segmenter,
    /// State of the wire.
    pub blocked: &'s mut Option<Blocked>,
    /// State of the wire.
    pub segments_done: &'s mut usize,
    /// Who is behind the wire.
    pub learner: Learner<'s>,
    /// Wires that only record.
    pub recorders: &'s mut [Link],
    /// The queue that cannot go on, and why.
    pub error: Option<(u16, RingError)>,
}

/// Bytes to deliver.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    Frame(&'a Frame<'a>),
    Slice(&'a [u8]),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Frame(frame) => frame.len(),
            Self::Slice(slice) => slice.len(),
        }
    }

    fn copy(&self, to: &Parts<'_>, at: usize) -> usize {
        match self {
            Self::Frame(frame) => frame.copy_into(0, to.slices(), at),
            Self::Slice(slice) => to.write(at, slice),
        }
    }
}

/// What became of a frame or segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivered {
    Yes,
    Dropped(&'static str),
    NoRoom,
}

impl RxSink for Sink<'_, '_> {
    fn frame(&mut self, frame: &Frame<'_>) -> Rx {
        if self.settings.hasher.is_some() {
            return self.hashed(frame);
        }
        let mut start = [0; STEER_BYTES];
        // With one pair nothing is steered.
        let looked_at = match self.settings.pairs {
            0 | 1 => L2Header::COPY,
            _ => STEER_BYTES,
        };
        let known = frame.copy_out(0, start.get_mut(..looked_at).unwrap_or_default());
        self.accept(
            frame,
            start.get(..known).unwrap_or_default(),
            Hash::default(),
        )
    }

    fn done(&mut self) {
        if let Some(error) = self.lanes.publish() {
            self.error.get_or_insert(error);
        }
    }
}

impl Sink<'_, '_> {
    /// A frame whose hash the driver wants or steers by.
    #[inline(never)]
    fn hashed(&mut self, frame: &Frame<'_>) -> Rx {
        let mut start = [0; HASH_START];
        let known = frame.copy_out(0, &mut start);
        let start = start.get(..known).unwrap_or_default();
        let hasher = self.settings.hasher.as_ref();
        let hash = hasher.map(|hasher| hasher.hash(start)).unwrap_or_default();
        self.accept(frame, start, hash)
    }

    /// A frame that begins with `start`.
    #[inline]
    fn accept(&mut self, frame: &Frame<'_>, start: &[u8], hash: Hash) -> Rx {
        self.learner.learn(start);
        let pair = match (&self.settings.indirection, self.settings.pairs) {
            (Some(indirection), _) => indirection.pair(hash),
            (None, 0 | 1) => 0,
            (None, pairs) => (steer::flow_hash(start) % u32::from(pairs)) as u16,
        };
        let queue = 2 * pair;
        if !self.link_up {
            return self.drop(queue, drop_reason::LINK_DOWN);
        }
        if !self.settings.filter.wants(start) {
            return self.drop(queue, drop_reason::FILTERED);
        }
        let meta = self.receiver.meta(&frame.meta);
        let delivered = match self.receiver.needs(&frame.meta, frame.len()) {
            Needs::PassThrough => self.deliver(queue, Bytes::Frame(frame), (&meta, hash), None),
            Needs::CompleteChecksum => match finished_checksum(frame) {
                Ok(sum) => {
                    let at =
                        usize::from(frame.meta.csum_start) + usize::from(frame.meta.csum_offset);
                    let patch = Some((at, sum.to_be_bytes()));
                    let meta = FrameMeta::default();
                    self.deliver(queue, Bytes::Frame(frame), (&meta, hash), patch)
                }
                Err(_) => Ok(Delivered::Dropped(drop_reason::BAD_OFFLOAD)),
            },
            Needs::Segment => self.segments(queue, frame, hash),
            Needs::Drop(_) => Ok(Delivered::Dropped(drop_reason::ABOVE_MTU)),
        };
        match delivered {
            Ok(Delivered::Yes) => {
                *self.blocked = None;
                *self.segments_done = 0;
                links::record(self.recorders, frame);
                Rx::Taken
            }
            Ok(Delivered::Dropped(reason)) => self.drop(queue, reason),
            Ok(Delivered::NoRoom) => self.wait(queue),
            Err(error) => {
                self.error.get_or_insert((queue, error));
                self.wait(queue)
            }
        }
    }

    fn drop(&mut self, queue: u16, reason: &'static str) -> Rx {
        *self.segments_done = 0;
        self.lanes.count_drop(queue, reason);
        Rx::Taken
    }

    /// The frame waits for the driver, but not for ever.
    fn wait(&mut self, queue: u16) -> Rx {
        let since = self
            .blocked
            .map_or_else(Instant::now, |blocked| blocked.since);
        // Kept when the frame is dropped: the next one does not wait as long again.
        *self.blocked = Some(Blocked { queue, since });
        if since.elapsed() >= PATIENCE {
            return self.drop(queue, drop_reason::NO_BUFFER);
        }
        Rx::Later
    }

    fn segments(
        &mut self,
        queue: u16,
        frame: &Frame<'_>,
        hash: Hash,
    ) -> Result<Delivered, RingError> {
        let mut segmenter = std::mem::take(self.segmenter);
        let skip = *self.segments_done;
        let (mut number, mut result) = (0, Ok(Delivered::Yes));
        let done = segmenter.segment(frame, &mut |segment| {
            number += 1;
            if number <= skip {
                return true;
            }
            let meta = FrameMeta::default();
            result = self.deliver(queue, Bytes::Slice(segment), (&meta, hash), None);
            if result == Ok(Delivered::Yes) {
                *self.segments_done = number;
            }
            result == Ok(Delivered::Yes)
        });
        *self.segmenter = segmenter;
        match done {
            Ok(_) => result,
            Err(error) => {
                log::trace!("frame dropped: {error}");
                Ok(Delivered::Dropped(drop_reason::BAD_OFFLOAD))
            }
        }
    }

    /// Puts one frame into as many buffers as it takes.
    fn deliver(
        &mut self,
        queue: u16,
        bytes: Bytes<'_>,
        (meta, hash): (&FrameMeta, Hash),
        patch: Option<(usize, [u8; 2])>,
    ) -> Result<Delivered, RingError> {
        let Some(lane) = self.lanes.open(queue) else {
            return Ok(Delivered::Dropped(drop_reason::NOT_RUNNING));
        };
        let need = (self.header + bytes.len()) as u64;
        let gathered = gather(
            &mut lane.ring,
            &mut lane.counters,
            &mut self.parts,
            self.heads,
            (need, self.header as u64),
            self.mergeable,
        );
        match gathered {
            Ok(Delivered::Yes) => {}
            other => {
                lane.publish()?;
                return other;
            }
        }
        let buffers = self.heads.len() as u16;
        if self.header == HASH_HEADER_BYTES {
            let header = header::emit_with_hash(meta, buffers, hash);
            self.parts.write(0, &header);
        } else {
            self.parts.write_words(header::words(meta, buffers));
        }
        bytes.copy(&self.parts, self.header);
        if let Some((at, sum)) = patch {
            self.parts.write(self.header + at, &sum);
        }
        self.parts.wrote(need);
        lane.counters.moved(bytes.len(), meta);
        if let [(head, _)] = self.heads[..] {
            lane.ring.push_used(head, need as u32)?;
            lane.filled(need as usize)?;
            return Ok(Delivered::Yes);
        }
        // The buffers of one frame become visible together, and so without those of others.
        lane.publish()?;
        let mut left = need;
        for (head, room) in self.heads.iter() {
            let written = left.min(*room);
            left -= written;
            lane.ring.push_used(*head, written as u32)?;
        }
        lane.ring.publish_together()?;
        Ok(Delivered::Yes)
    }
}

/// Takes buffers until there is room for `need` bytes. Without room all are put back.
fn gather<'v>(
    ring: &mut Attached<'_, 'v>,
    counters: &mut Counters<'_>,
    parts: &mut Parts<'v>,
    heads: &mut Vec<(Head, u64)>,
    (need, header): (u64, u64),
    mergeable: bool,
) -> Result<Delivered, RingError> {
    parts.clear();
    heads.clear();
    let (mut room, mut bad_heads) = (0, 0);
    // A driver that offers bad buffers without pause does not hold the data path.
    while bad_heads <= ring.size() {
        ring.prefetch(AHEAD, Access::Write);
        let popped = ring.pop(parts);
        let Ok(Some(Taken { head, chain })) = popped else {
            put_back(ring, heads);
            return popped.map(|_| Delivered::NoRoom);
        };
        let bad = match chain {
            Ok(walked) if walked.readable != 0 => Some(drop_reason::WRONG_DIRECTION),
            // The header must fit into the first buffer (virtio 1.3 §5.1.6.3.1).
            Ok(walked) if walked.writable < header => Some(drop_reason::SMALL_BUFFER),
            Ok(walked) => {
                heads.push((head, walked.writable));
                room += walked.writable;
                None
            }
            Err(bad) => Some(bad.name()),
        };
        if let Some(reason) = bad {
            // Heads go back in order, so those taken before it go with it.
            counters.dropped(reason);
            bad_heads += 1;
            for (head, _) in heads.drain(..) {
                ring.push_used(head, 0)?;
            }
            ring.push_used(head, 0)?;
            ring.publish()?;
            parts.clear();
            room = 0;
        } else if room >= need {
            return Ok(Delivered::Yes);
        } else if !mergeable || heads.len() >= MAX_MERGED.min(usize::from(ring.size())) {
            // The buffers may do for another frame.
            put_back(ring, heads);
            return Ok(Delivered::Dropped(drop_reason::SMALL_BUFFER));
        }
    }
    Ok(Delivered::NoRoom)
}

fn put_back(ring: &mut Attached<'_, '_>, heads: &[(Head, u64)]) {
    // A ring has no more than fit.
    ring.unpop(heads.iter().fold(0, |sum, (head, _)| sum + head.slots));
}
