//! Requester: what a packet asks for, and what it carries.

use super::Context;
use super::memory::{self, Fault, Part};
use super::requester::Flight;
use super::tables::Shared;
use crate::rdma::packet::{Action, MAX_CARRIED, MAX_PAYLOAD, Payload, Tail};
use crate::rdma::verbs::{Data, Front, Mixed, Operation, Pd, Rights, Status};
use dot_iommu::Access;
use smallvec::SmallVec;

/// What the packet at `offset` of a message asks for.
#[inline]
pub(super) fn action(flight: &Flight, offset: u32, last: bool) -> (Action, Tail) {
    let at = u64::from(offset);
    let total = flight.len;
    match flight.request.operation {
        Operation::Send {
            immediate,
            invalidate,
        } => {
            let tail = match (immediate, invalidate) {
                (Some(value), _) if last => Tail::Immediate(value),
                (None, Some(key)) if last => Tail::Invalidate(key),
                _ => Tail::Plain,
            };
            (Action::Send, tail)
        }
        Operation::Write {
            addr,
            key,
            immediate,
        } => {
            let addr = addr.wrapping_add(at);
            let tail = match immediate {
                Some(value) if last => Tail::Immediate(value),
                _ => Tail::Plain,
            };
            (Action::Write { addr, key, total }, tail)
        }
        Operation::Read { addr, key, .. } => {
            let addr = addr.wrapping_add(at);
            (Action::Read { addr, key, total }, Tail::Plain)
        }
        Operation::CompareSwap {
            addr,
            key,
            compare,
            swap,
        } => {
            let action = Action::CompareSwap {
                addr,
                key,
                compare,
                swap,
            };
            (action, Tail::Plain)
        }
        Operation::FetchAdd { addr, key, add } => {
            (Action::FetchAdd { addr, key, add }, Tail::Plain)
        }
        // These send nothing.
        Operation::Register(_) | Operation::Nop => (Action::Send, Tail::Plain),
    }
}

/// Where a packet's payload comes from.
pub(super) struct Gather {
    pub(super) pd: Pd,
    /// Bytes of the message before the packet.
    pub(super) offset: u32,
    /// log₂ of the MTU.
    pub(super) shift: u32,
    /// Up to how many bytes are copied.
    pub(super) copied: u32,
}

impl Gather {
    /// The payload of the next packet, and its bytes.
    #[inline]
    pub(super) fn payload<F: Front>(
        &self,
        flight: &Flight,
        sh: &Shared<F>,
        cx: &Context<'_>,
    ) -> Result<(Payload, u32), Status> {
        let left = flight.len.saturating_sub(self.offset);
        let (sges, skip) = match &flight.request.data {
            Data::Inline(bytes) => {
                let bytes = bytes.get(self.offset as usize..).unwrap_or_default();
                return Ok((Payload::Inline(SmallVec::from_slice(bytes)), left));
            }
            Data::Gather(sges) => (sges, self.offset),
            Data::Mixed(mixed) => match self.offset.checked_sub(mixed.inline.len() as u32) {
                None => return self.mixed(mixed, left, sh, cx),
                Some(behind) => (&mixed.sges, behind),
            },
        };
        let stores = flight.is_read();
        let mut len = left.min(MAX_PAYLOAD);
        let part = Part {
            regions: &sh.regions,
            pd: self.pd,
            sges,
            skip: u64::from(skip),
            len: u64::from(len),
            needed: Rights::LOCAL_WRITE.when(stores),
            access: if stores { Access::Write } else { Access::Read },
        };
        let status = |_: Fault| Status::LocalProtection;
        if flight.is_atomic() {
            // The old value comes in the answer; that it can be stored is known before.
            part.walk(cx.memory, |_| Ok(())).map_err(status)?;
            return Ok((Payload::Inline(SmallVec::new()), left));
        }
        if !stores && left <= self.copied {
            let mut bytes = SmallVec::new();
            part.read(cx.memory, &mut bytes).map_err(status)?;
            return Ok((Payload::Inline(bytes), left));
        }
        let mut segments = SmallVec::new();
        let found = part.locate(cx.memory, &mut segments).map_err(status)?;
        if found < left {
            // Only a message's last packet ends within an MTU.
            len = found >> self.shift << self.shift;
            if len == 0 {
                return Err(Status::LocalProtection);
            }
            memory::truncate(&mut segments, found, len);
        }
        Ok((Payload::Segments(segments), len))
    }

    /// A packet that begins with bytes of the entry: carried, to the end of an MTU or of the message.
    #[inline(never)]
    fn mixed<F: Front>(
        &self,
        mixed: &Mixed,
        left: u32,
        sh: &Shared<F>,
        cx: &Context<'_>,
    ) -> Result<(Payload, u32), Status> {
        let len = left.min((MAX_CARRIED >> self.shift << self.shift) as u32);
        let inline = mixed.inline.get(self.offset as usize..).unwrap_or_default();
        let inline = inline.get(..len as usize).unwrap_or(inline);
        let mut bytes = SmallVec::from_slice(inline);
        let part = Part {
            regions: &sh.regions,
            pd: self.pd,
            sges: &mixed.sges,
            skip: 0,
            len: u64::from(len) - inline.len() as u64,
            needed: Rights::NONE,
            access: Access::Read,
        };
        part.read(cx.memory, &mut bytes)
            .map_err(|_| Status::LocalProtection)?;
        Ok((Payload::Inline(bytes), len))
    }
}
