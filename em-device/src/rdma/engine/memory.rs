//! From scatter/gather lists and regions to memory: segments for the peer, spans for the copy.

use crate::rdma::packet::{Fabric, MAX_SEGMENTS, Payload, Segment};
use crate::rdma::verbs::{ABSENT, Denied, Pd, Peer, Region, Regions, Rights, Sge};
use dot_iommu::{Access, DotError, DotView, HostSpan};
use smallvec::SmallVec;

/// Why bytes cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The key does not allow it.
    Denied(Denied),
    /// The region lies where no guest memory is.
    Unmapped,
    /// The peer's file is not known (yet).
    PeerUnknown,
    /// The peer names bytes that its file does not have, or not enough of them.
    PeerRange,
}

impl From<Denied> for Fault {
    fn from(denied: Denied) -> Self {
        Self::Denied(denied)
    }
}

/// Why there is nothing at a bus address that no range of the table contains.
fn missing(bus: u64) -> Fault {
    match bus {
        ABSENT.. => Fault::Denied(Denied::Rights),
        _ => Fault::Unmapped,
    }
}

/// Why a range of the table cannot be used: one that the VMM gave without memory is another device's,
/// which has taken back what it gave.
fn unreachable_bytes(error: DotError) -> Fault {
    match error {
        DotError::MessageOnly { .. } => Fault::Denied(Denied::Rights),
        _ => Fault::Unmapped,
    }
}

/// Calls `visit` with the host memory of `[addr, addr + len)`, in order; the range was checked.
#[inline]
pub(super) fn walk<'m>(
    memory: &'m DotView<'_>,
    region: &Region,
    addr: u64,
    len: u64,
    access: Access,
    mut visit: impl FnMut(HostSpan<'m>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut left = len;
    for (mut bus, mut run) in region.pieces(addr, len, access) {
        left -= run;
        while run > 0 {
            let (span, n) = match memory.translate(bus, run, access) {
                Ok(span) => (span, run),
                Err(_) => {
                    // More than one range of the table.
                    let entry = memory.lookup(bus).ok_or_else(|| missing(bus))?;
                    let n = run.min((entry.last() - bus).saturating_add(1));
                    let span = memory.translate(bus, n, access);
                    (span.map_err(unreachable_bytes)?, n)
                }
            };
            visit(span)?;
            bus = bus.wrapping_add(n);
            run -= n;
        }
    }
    if left == 0 {
        Ok(())
    } else {
        Err(Fault::Unmapped)
    }
}

/// Which bytes of a scatter/gather list, and what for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) regions: &'a Regions,
    pub(super) pd: Pd,
    pub(super) sges: &'a [Sge],
    /// Bytes before the part.
    pub(super) skip: u64,
    /// Bytes of the part.
    pub(super) len: u64,
    pub(super) needed: Rights,
    pub(super) access: Access,
}

impl<'a> Part<'a> {
    /// Calls `visit` with region, address and length for each element's share of the part, until
    /// that answers `false`.
    #[inline]
    fn elements(
        &self,
        mut visit: impl FnMut(&'a Region, u64, u64) -> Result<bool, Fault>,
    ) -> Result<(), Fault> {
        let (mut skip, mut left) = (self.skip, self.len);
        for sge in self.sges {
            if left == 0 {
                break;
            }
            let whole = u64::from(sge.len);
            if skip >= whole {
                skip -= whole;
                continue;
            }
            let region = self
                .regions
                .check(sge.key, self.pd, sge.addr, whole, self.needed)?;
            let n = (whole - skip).min(left);
            if !visit(region, sge.addr.wrapping_add(skip), n)? {
                return Ok(());
            }
            skip = 0;
            left -= n;
        }
        if left == 0 {
            Ok(())
        } else {
            Err(Fault::Denied(Denied::Range))
        }
    }

    /// Calls `visit` with the host memory of the part, in order.
    #[inline]
    pub(super) fn walk<'m>(
        &self,
        memory: &'m DotView<'_>,
        mut visit: impl FnMut(HostSpan<'m>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.elements(|region, addr, len| {
            walk(memory, region, addr, len, self.access, &mut visit).map(|()| true)
        })
    }

    /// Appends the part's bytes, of which there are as many as fit, to `bytes`.
    #[inline]
    pub(super) fn read(
        &self,
        memory: &DotView<'_>,
        bytes: &mut SmallVec<[u8; 64]>,
    ) -> Result<(), Fault> {
        self.walk(memory, |span| {
            let at = bytes.len();
            bytes.resize(at + span.len(), 0);
            let room = bytes.get_mut(at..).unwrap_or_default();
            span.copy_to(room).map_err(|_| Fault::Unmapped).map(|_| ())
        })
    }

    /// Appends where the part lies in shared files; answers the bytes that [`MAX_SEGMENTS`] hold.
    #[inline]
    pub(super) fn locate(
        &self,
        memory: &DotView<'_>,
        segments: &mut SmallVec<[Segment; 2]>,
    ) -> Result<u32, Fault> {
        let mut total = 0;
        self.elements(|region, addr, len| {
            let mut left = len;
            for (mut bus, mut run) in region.pieces(addr, len, self.access) {
                left -= run;
                while run > 0 {
                    let at = memory
                        .locate(bus, run, self.access)
                        .map_err(|_| Fault::Unmapped)?;
                    // The part is at most MAX_PAYLOAD.
                    let n = at.len as u32;
                    let joined = segments.last_mut().filter(|last| {
                        last.file == at.mapping && last.offset + u64::from(last.len) == at.offset
                    });
                    if let Some(last) = joined {
                        last.len += n;
                    } else if segments.len() < MAX_SEGMENTS {
                        segments.push(Segment {
                            file: at.mapping,
                            offset: at.offset,
                            len: n,
                        });
                    } else {
                        return Ok(false);
                    }
                    total += n;
                    bus = bus.wrapping_add(at.len);
                    run -= at.len;
                }
            }
            if left == 0 {
                Ok(true)
            } else {
                Err(Fault::Unmapped)
            }
        })?;
        Ok(total)
    }
}

/// Shortens segments of `total` bytes to `len`.
pub(super) fn truncate(segments: &mut SmallVec<[Segment; 2]>, total: u32, len: u32) {
    let mut excess = total.saturating_sub(len);
    while let Some(last) = segments.last_mut() {
        if last.len > excess {
            last.len -= excess;
            return;
        }
        excess -= last.len;
        segments.pop();
    }
}

/// A packet's payload while it is copied, at the responder.
pub(super) enum Cursor<'a> {
    /// The packet holds it.
    Bytes(&'a [u8]),
    /// It is in, or goes to, the peer's memory.
    Peer {
        fabric: &'a dyn Fabric,
        peer: Peer,
        segments: std::slice::Iter<'a, Segment>,
        current: Option<HostSpan<'a>>,
        access: Access,
    },
}

impl<'a> Cursor<'a> {
    pub(super) fn new(
        payload: &'a Payload,
        fabric: &'a dyn Fabric,
        peer: Peer,
        access: Access,
    ) -> Self {
        match payload {
            Payload::Inline(bytes) => Self::Bytes(bytes),
            Payload::Segments(segments) => Self::Peer {
                fabric,
                peer,
                segments: segments.iter(),
                current: None,
                access,
            },
        }
    }

    /// The peer's next bytes, at most `max`.
    #[inline]
    fn span(&mut self, max: usize) -> Result<HostSpan<'a>, Fault> {
        let Self::Peer {
            fabric,
            peer,
            segments,
            current,
            access,
        } = self
        else {
            return Err(Fault::PeerRange);
        };
        let whole = match current.take() {
            Some(span) => span,
            None => {
                let segment = segments
                    .find(|segment| segment.len != 0)
                    .ok_or(Fault::PeerRange)?;
                let file = fabric.file(*peer, segment.file).ok_or(Fault::PeerUnknown)?;
                file.span(segment.offset, u64::from(segment.len), *access)
                    .ok_or(Fault::PeerRange)?
            }
        };
        if whole.len() <= max {
            return Ok(whole);
        }
        *current = whole.subspan(max, whole.len() - max);
        whole.subspan(0, max).ok_or(Fault::PeerRange)
    }

    /// Fills `to` with the next bytes.
    #[inline]
    pub(super) fn fill(&mut self, to: HostSpan<'_>) -> Result<(), Fault> {
        if let Self::Bytes(bytes) = self {
            let (now, later) = bytes.split_at_checked(to.len()).ok_or(Fault::PeerRange)?;
            *bytes = later;
            return to.copy_from(now).map(|_| ()).map_err(|_| Fault::Unmapped);
        }
        let mut at = 0;
        while let Some(rest) = to.subspan(at, to.len() - at) {
            let from = self.span(rest.len())?;
            at += from.copy_span(rest).map_err(|_| Fault::Unmapped)?;
        }
        Ok(())
    }

    /// Puts `from` where the next bytes go.
    #[inline]
    pub(super) fn drain(&mut self, from: HostSpan<'_>) -> Result<(), Fault> {
        let mut at = 0;
        while let Some(rest) = from.subspan(at, from.len() - at) {
            let to = self.span(rest.len())?;
            at += rest.copy_span(to).map_err(|_| Fault::PeerRange)?;
        }
        Ok(())
    }
}
