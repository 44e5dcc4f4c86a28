//! The receive queues of a function in a burst: each is joined with its memory once, by the first frame that goes there,
//! and what the frames filled is made visible together.

use super::queue::{Counters, NetQueue};
use crate::virtio::ring::{Attached, RingError};
use dot_iommu::DotView;
use smallvec::SmallVec;

/// Bytes after which filled buffers are made visible although the burst goes on.
const FLUSH_BYTES: usize = 128 << 10;

/// A receive queue in a burst.
pub(super) struct Lane<'s, 'v> {
    /// Its ring.
    pub(super) ring: Attached<'s, 'v>,
    /// What is counted about it.
    pub(super) counters: Counters<'s>,
    queue: u16,
    /// Bytes that the driver does not see yet.
    unseen: usize,
}

impl Lane<'_, '_> {
    /// A frame of so many bytes went into buffers that were given back.
    #[inline]
    pub(super) fn filled(&mut self, bytes: usize) -> Result<(), RingError> {
        self.unseen += bytes;
        match self.unseen >= FLUSH_BYTES {
            true => self.publish(),
            false => Ok(()),
        }
    }

    /// Makes what was given back visible to the driver.
    pub(super) fn publish(&mut self) -> Result<(), RingError> {
        self.unseen = 0;
        self.ring.publish()
    }
}

#[allow(clippy::large_enum_variant)] // few, made in place, and not to be allocated
enum Slot<'s, 'v> {
    Idle(&'s mut NetQueue),
    Busy(Lane<'s, 'v>),
    /// No driver runs it, and only drops are counted.
    Off(Option<&'s mut NetQueue>),
}

/// See the module.
pub(super) struct Lanes<'s, 'v> {
    view: &'v DotView<'v>,
    /// All queues of the function, until the first frame comes.
    queues: Option<&'s mut [NetQueue]>,
    /// Receive queues by pair.
    slots: SmallVec<[Slot<'s, 'v>; 1]>,
}

impl<'s, 'v> Lanes<'s, 'v> {
    /// Nothing is touched before a frame comes.
    pub(super) fn new(view: &'v DotView<'v>, queues: &'s mut [NetQueue]) -> Self {
        Self {
            view,
            queues: Some(queues),
            slots: SmallVec::new(),
        }
    }

    #[inline]
    fn slot(&mut self, queue: u16) -> Option<&mut Slot<'s, 'v>> {
        if let Some(queues) = self.queues.take() {
            // The last of an odd number is the control queue.
            let receivers = queues.chunks_exact_mut(2);
            self.slots
                .extend(receivers.filter_map(|pair| pair.first_mut().map(Slot::Idle)));
        }
        self.slots.get_mut(usize::from(queue / 2))
    }

    /// A receive queue; `None` when no driver runs it.
    #[inline]
    pub(super) fn open(&mut self, queue: u16) -> Option<&mut Lane<'s, 'v>> {
        let view = self.view;
        let slot = self.slot(queue)?;
        if let Slot::Idle(_) = slot {
            slot.open(view);
        }
        match slot {
            Slot::Busy(lane) => Some(lane),
            Slot::Idle(_) | Slot::Off(_) => None,
        }
    }

    /// Counts a dropped frame.
    pub(super) fn count_drop(&mut self, queue: u16, reason: &'static str) {
        match self.slot(queue) {
            Some(Slot::Busy(lane)) => lane.counters.dropped(reason),
            Some(Slot::Idle(queue) | Slot::Off(Some(queue))) => queue.count_drop(reason),
            Some(Slot::Off(None)) | None => {}
        }
    }

    /// Makes everything visible; the first queue that cannot go on, and why.
    pub(super) fn publish(&mut self) -> Option<(u16, RingError)> {
        let mut error = None;
        for slot in &mut self.slots {
            if let Slot::Busy(lane) = slot {
                if let Err(failed) = lane.publish() {
                    error.get_or_insert((lane.queue, failed));
                }
            }
        }
        error
    }
}

impl<'v> Slot<'_, 'v> {
    #[inline(never)]
    fn open(&mut self, view: &'v DotView<'v>) {
        *self = match std::mem::replace(self, Slot::Off(None)) {
            Slot::Idle(queue) if !queue.is_enabled() => Slot::Off(Some(queue)),
            Slot::Idle(queue) => {
                let index = queue.index;
                match queue.parts(view) {
                    Some((ring, counters)) => Slot::Busy(Lane {
                        ring,
                        counters,
                        queue: index,
                        unseen: 0,
                    }),
                    None => Slot::Off(None),
                }
            }
            other => other,
        };
    }
}
