//! A driver's session: what was negotiated, and the commands of its control queue.

use super::Mac;
use super::config::ConfigOverride;
use super::control::{self, Settings, Source};
use super::features;
use super::header;
use super::queue::{Figures, NetQueue, drop_reason};
use super::receive::Pool;
use super::saved;
use crate::frame::FrameMeta;
use crate::offload::Receiver;
use crate::virtio::chain::Parts;
use crate::virtio::ring::{RingError, Taken};
use crate::virtio::signals::Signals;
use dot_iommu::DotView;
use m2m_fabric::proto::VirtioNetSpec;
use smartep::state::{Section, State};

/// Control commands in one turn.
const CONTROL_BUDGET: usize = 16;

/// A driver's session, from DRIVER_OK to reset.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) features: u64,
    pub(super) settings: Settings,
    pub(super) receiver: Receiver,
    pub(super) mergeable: bool,
    /// Bytes of the header in front of a frame.
    pub(super) header: usize,
    /// Index of the control queue.
    pub(super) control: u16,
    /// Transmit queues are served when they have a ring, whatever the number of pairs.
    pub(super) sends_from_all: bool,
}

impl Session {
    pub(super) fn new(spec: &VirtioNetSpec, features: u64) -> Self {
        let several = features & (features::MQ | features::RSS) != 0;
        let mut session = Self {
            features,
            settings: Settings::new(spec.mac, features, spec.queue_pairs),
            receiver: Receiver::plain(spec.mtu),
            mergeable: features & features::MRG_RXBUF != 0,
            header: header::bytes_of(features),
            // With one pair the third queue is the control queue (virtio 1.3 §5.1.2).
            control: if several { 2 * spec.queue_pairs } else { 2 },
            sends_from_all: false,
        };
        session.take_offloads();
        session
    }

    /// The driver takes what it said last.
    pub(super) fn take_offloads(&mut self) {
        let takes = |bits: u64| self.settings.offloads & bits == bits;
        self.receiver = Receiver {
            csum: takes(features::GUEST_CSUM),
            tso4: takes(features::GUEST_TSO4),
            tso6: takes(features::GUEST_TSO6),
            ecn: takes(features::GUEST_ECN),
            uso: takes(features::GUEST_USO4 | features::GUEST_USO6),
            mtu: self.receiver.mtu,
        };
    }
}

/// Figures of the queues in front of the control queue.
pub(super) struct Others<'a> {
    pub(super) queues: &'a [NetQueue],
    pub(super) signals: &'a Signals,
    pub(super) control: u16,
}

impl Source for Others<'_> {
    fn figures(&self, queue: u16) -> Option<Figures> {
        let found = self.queues.get(usize::from(queue))?;
        Some(found.figures(self.signals.kicks(queue)))
    }

    fn control(&self) -> u16 {
        self.control
    }
}

/// What commands set takes effect.
pub(super) fn apply_settings(
    session: &mut Session,
    queues: &mut [NetQueue],
    config: &ConfigOverride,
    own: Mac,
) {
    session.take_offloads();
    let mac = session.settings.filter.mac;
    config.set_mac((mac != own).then_some(mac));
    if std::mem::take(&mut session.settings.announced) {
        config.set_announce(false);
    }
    for queue in queues {
        let wish = session.settings.coalescing.of(queue.index);
        queue.moderation.set_wish(queue.index % 2 == 1, wish);
    }
}

/// Memory that commands need for a moment.
pub(super) struct Scratch<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) command: &'a mut Vec<u8>,
    pub(super) result: &'a mut Vec<u8>,
}

/// Answers control commands; how many.
///
/// # Errors
/// [`RingError`] when the queue cannot go on.
pub(super) fn commands(
    queue: &mut NetQueue,
    view: &DotView<'_>,
    source: &dyn Source,
    session: &mut Session,
    notes: Option<&State>,
    scratch: &mut Scratch<'_>,
) -> Result<usize, RingError> {
    let Some((mut ring, mut counters)) = queue.parts(view) else {
        return Ok(0);
    };
    let Scratch {
        pool,
        command,
        result,
    } = scratch;
    let mut parts = Parts::reuse(std::mem::take(&mut pool.parts));
    let mut done = 0;
    while done < CONTROL_BUDGET {
        parts.clear();
        let Some(Taken { head, chain }) = ring.pop(&mut parts)? else {
            break;
        };
        done += 1;
        let written = match chain {
            Ok(walked) if walked.writable != 0 => {
                let readable = parts.slices().get(..walked.readable_slices);
                command.clear();
                for slice in readable.unwrap_or_default() {
                    let room = control::MAX_COMMAND - command.len();
                    let start = command.len();
                    command.resize(start + slice.len().min(room), 0);
                    slice.copy_to(command.get_mut(start..).unwrap_or_default());
                }
                let mut answer = session.settings.execute(command, source, result);
                if walked.writable <= result.len() as u64 {
                    result.clear();
                    answer = control::ERR;
                }
                // Before the driver hears of it.
                if let Some(notes) = notes {
                    if !notes.save(Section::DataPath, &saved::to_bytes(&session.settings)) {
                        notes.set_broken();
                    }
                }
                let at = walked.readable as usize;
                parts.write(at, &[answer]);
                let written = 1 + parts.write(at + 1, result);
                counters.moved(command.len(), &FrameMeta::default());
                written as u32
            }
            Ok(_) => {
                counters.dropped(drop_reason::NO_ANSWER_ROOM);
                0
            }
            Err(bad) => {
                counters.dropped(bad.name());
                0
            }
        };
        ring.push_used(head, written)?;
        ring.publish()?;
    }
    pool.parts = parts.retire();
    Ok(done)
}
