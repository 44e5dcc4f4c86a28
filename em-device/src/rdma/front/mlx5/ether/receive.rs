//! From the wires to the receive queues.

use super::deliver::{Bytes, Delivered, Item, vouched};
use super::filter::EtherFilter;
use super::headers::{HEADER_BYTES, Layout};
use super::rss::{Hash, Rss};
use super::rx::EtherRx;
use super::{Complete, EtherContext, EtherCounters};
use crate::flow::{L2Header, MacTable};
use crate::frame::{Frame, FrameMeta};
use crate::net::links::{self, Blocked, Link, Links};
use crate::net::queue::drop_reason;
use crate::net::receive::PATIENCE;
use crate::offload::{Needs, Receiver, Segmenter, finished_checksum};
use crate::port::{Rx, RxSink};
use crate::rdma::verbs::Regions;
use dot_iommu::DotView;
use std::collections::BTreeMap;
use std::time::Instant;

/// Frames that one wire may bring in one turn.
const BUDGET: usize = 64;

/// All that receives: queues, and which frames go to which.
#[derive(Debug)]
pub struct EtherReceive {
    /// Queues by number.
    pub rqs: BTreeMap<u32, EtherRx>,
    /// Which queue a frame goes to. Without it there is no way in.
    pub rss: Option<Rss>,
    /// Which frames are wanted.
    pub filter: EtherFilter,
    receiver: Receiver,
    segmenter: Segmenter,
    /// Whether a wire was left with a frame that waits for a receive entry.
    waits: bool,
}

impl EtherReceive {
    /// Without queues; IP packets of up to `mtu` bytes.
    pub fn new(filter: EtherFilter, mtu: u16) -> Self {
        Self {
            rqs: BTreeMap::new(),
            rss: None,
            filter,
            // The driver cannot be told to finish a frame itself.
            receiver: Receiver::plain(mtu),
            segmenter: Segmenter::new(),
            waits: false,
        }
    }

    /// Changes the largest IP packet.
    pub fn set_mtu(&mut self, mtu: u16) {
        self.receiver = Receiver::plain(mtu);
    }

    /// Whether a frame that waits has room now, so that a turn would take it.
    pub fn can_go_on(&mut self, links: &Links, view: &DotView<'_>) -> bool {
        let mut blocked = links.iter().filter_map(|link| link.blocked);
        self.waits
            && blocked.any(|blocked| {
                let rq = self.rqs.get_mut(&u32::from(blocked.queue));
                rq.is_none_or(|rq| !rq.is_open() || rq.has_room(view))
            })
    }

    /// Whether the last turn left a frame that waits for a receive entry. Nobody tells when there is
    /// one.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Takes what the wires show, within limits. Answers how many frames.
    pub fn turn(&mut self, cx: &mut EtherContext<'_>) -> usize {
        let split = cx.links.split();
        let mut done = 0;
        self.waits = false;
        for link in split.wires {
            let slot = link.learning_slot();
            let mut sink = Sink {
                receive: self,
                view: cx.view,
                regions: cx.regions,
                complete: cx.complete,
                counters: cx.counters,
                link_up: cx.link_up,
                blocked: &mut link.blocked,
                segments_done: &mut link.segments_done,
                recorders: split.recorders,
                table: split.table,
                slot,
                now: split.now,
            };
            done += link.port.receive(BUDGET, &mut sink);
        }
        done
    }
}

/// Takes the frames of one wire for one turn.
struct Sink<'s, 'c> {
    receive: &'s mut EtherReceive,
    view: &'s DotView<'s>,
    regions: &'s Regions,
    complete: &'s mut Complete<'c>,
    counters: &'s mut EtherCounters,
    link_up: bool,
    blocked: &'s mut Option<Blocked>,
    segments_done: &'s mut usize,
    recorders: &'s mut [Link],
    table: &'s mut MacTable,
    slot: Option<usize>,
    now: Instant,
}

impl RxSink for Sink<'_, '_> {
    fn frame(&mut self, frame: &Frame<'_>) -> Rx {
        let mut start = [0; HEADER_BYTES];
        let known = frame.copy_out(0, &mut start);
        let start = start.get(..known).unwrap_or_default();
        if let (Some(slot), Some(header)) = (self.slot, L2Header::parse(start)) {
            self.table.learn(header.source, header.vlan, slot, self.now);
        }
        if !self.link_up {
            return self.drop(drop_reason::LINK_DOWN);
        }
        if !self.receive.filter.wants(start) {
            return self.drop(drop_reason::FILTERED);
        }
        let layout = Layout::parse(start);
        let Some(rss) = &self.receive.rss else {
            return self.drop(drop_reason::NOT_RUNNING);
        };
        let hash = rss.hash(start, layout.as_ref());
        let Some(rqn) = rss.queue(hash) else {
            return self.drop(drop_reason::NOT_RUNNING);
        };
        let mut item = Item {
            bytes: Bytes::Frame(frame),
            start,
            layout,
            patch: None,
            valid: vouched(&frame.meta),
            hash,
        };
        let delivered = match self.receive.receiver.needs(&frame.meta, frame.len()) {
            Needs::PassThrough => self.deliver(rqn, &item),
            Needs::CompleteChecksum => match finished_checksum(frame) {
                Ok(sum) => {
                    let at = patch_at(&frame.meta);
                    item.patch = Some((at, sum.to_be_bytes()));
                    item.valid = is_transports(layout.as_ref(), at);
                    self.patched(rqn, item, at, sum)
                }
                Err(_) => Delivered::Dropped(drop_reason::BAD_OFFLOAD),
            },
            Needs::Segment => self.segments(rqn, frame, hash),
            Needs::Drop(_) => Delivered::Dropped(drop_reason::ABOVE_MTU),
        };
        match delivered {
            Delivered::Yes => {
                *self.blocked = None;
                *self.segments_done = 0;
                links::record(self.recorders, frame);
                Rx::Taken
            }
            Delivered::Dropped(reason) => self.drop(reason),
            Delivered::NoRoom => self.wait(rqn),
        }
    }
}

fn patch_at(meta: &FrameMeta) -> usize {
    usize::from(meta.csum_start) + usize::from(meta.csum_offset)
}

/// Whether a checksum there is the one of the packet's transport.
fn is_transports(layout: Option<&Layout>, at: usize) -> bool {
    layout
        .and_then(|layout| layout.transport)
        .is_some_and(|transport| transport.at + transport.checksum() == at)
}

impl Sink<'_, '_> {
    fn drop(&mut self, reason: &'static str) -> Rx {
        *self.segments_done = 0;
        self.counters.dropped(reason);
        Rx::Taken
    }

    /// The frame waits for the driver, but not for ever.
    fn wait(&mut self, rqn: u32) -> Rx {
        let since = self
            .blocked
            .map_or_else(Instant::now, |blocked| blocked.since);
        // Kept when the frame is dropped: the next one does not wait as long again.
        // Numbers of receive queues have 12 bits.
        let queue = rqn as u16;
        *self.blocked = Some(Blocked { queue, since });
        if since.elapsed() >= PATIENCE {
            self.counters.out_of_buffer += 1;
            return self.drop(drop_reason::NO_BUFFER);
        }
        self.receive.waits = true;
        Rx::Later
    }

    fn deliver(&mut self, rqn: u32, item: &Item<'_>) -> Delivered {
        let Some(rq) = self.receive.rqs.get_mut(&rqn) else {
            return Delivered::Dropped(drop_reason::NOT_RUNNING);
        };
        let delivered = item.deliver(rq, self.regions, self.view, self.complete);
        if delivered == Delivered::Yes {
            self.counters.received.add(item.start, item.bytes.len());
        }
        delivered
    }

    /// A frame whose checksum stands in `item.patch`; where it belongs to nothing that is known, the
    /// sum of all bytes must see it too.
    fn patched(&mut self, rqn: u32, item: Item<'_>, at: usize, sum: u16) -> Delivered {
        if item.valid || item.layout.is_none() {
            return self.deliver(rqn, &item);
        }
        let Bytes::Frame(frame) = item.bytes else {
            return self.deliver(rqn, &item);
        };
        let mut bytes = frame.to_vec();
        if let Some(field) = bytes.get_mut(at..at + 2) {
            field.copy_from_slice(&sum.to_be_bytes());
        }
        let item = Item {
            bytes: Bytes::Slice(&bytes),
            patch: None,
            ..item
        };
        self.deliver(rqn, &item)
    }

    fn segments(&mut self, rqn: u32, frame: &Frame<'_>, hash: Hash) -> Delivered {
        let mut segmenter = std::mem::take(&mut self.receive.segmenter);
        let skip = *self.segments_done;
        let (mut number, mut result) = (0, Delivered::Yes);
        let done = segmenter.segment(frame, &mut |segment| {
            number += 1;
            if number <= skip {
                return true;
            }
            let start = segment.get(..HEADER_BYTES).unwrap_or(segment);
            let item = Item {
                bytes: Bytes::Slice(segment),
                start,
                layout: Layout::parse(start),
                patch: None,
                valid: true,
                hash,
            };
            result = self.deliver(rqn, &item);
            if result == Delivered::Yes {
                *self.segments_done = number;
            }
            result == Delivered::Yes
        });
        self.receive.segmenter = segmenter;
        match done {
            Ok(_) => result,
            Err(error) => {
                log::trace!("frame dropped: {error}");
                Delivered::Dropped(drop_reason::BAD_OFFLOAD)
            }
        }
    }
}
