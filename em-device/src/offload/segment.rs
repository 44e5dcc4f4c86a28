//! Segmentation in software: one large TCP or UDP frame becomes finished frames of `gso_size` payload.

use super::checksum::Checksum;
use super::checksum::never_zero;
use super::headers::{Headers, TCP};
use crate::frame::Frame;
use thiserror::Error;

/// Most bytes of headers that are looked at: Ethernet, two VLAN tags, IP with options or extension
/// headers, TCP with options.
const MAX_HEADERS: usize = 512;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// Why a frame cannot be segmented. The sender's fault: the frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SegmentError {
    /// Ethernet type and segmentation type do not belong together.
    #[error("Ethernet type {0:#06x} is not what the segmentation type says")]
    OtherProtocol(u16),
    /// The IP header is none.
    #[error("the IP header has a wrong version or length")]
    BadIpHeader,
    /// A fragment has no transport header of its own.
    #[error("the packet is an IP fragment")]
    Fragment,
    /// Something else than the transport of the segmentation type follows.
    #[error("IP protocol {0} is not that of the segmentation type or cannot be passed over")]
    OtherTransport(u8),
    /// Headers and offload facts disagree.
    #[error("the transport header starts at {found}, not at {said} as the checksum fields say")]
    TransportElsewhere {
        /// By the headers.
        found: usize,
        /// `csum_start`.
        said: u16,
    },
    /// The TCP header is none.
    #[error("a TCP header of {0} bytes")]
    ShortTcp(usize),
    /// The headers say more than there is.
    #[error("the frame ends before its headers or its IP length say")]
    Truncated,
    /// A segment would be longer than IP allows.
    #[error("a segment would be longer than an IP packet can be")]
    LongSegment,
    /// Division by a segment size of zero.
    #[error("the segment size is zero")]
    NoSize,
}

/// Segments frames; keeps the memory for one segment.
#[derive(Debug, Default)]
pub struct Segmenter {
    buf: Vec<u8>,
}

impl Segmenter {
    /// A new one. Allocates when first used, and again only for longer segments.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the segments of `frame` to `sink`, in order, each a frame with all lengths and
    /// checksums finished. The sink returns false to stop. Returns how many it took.
    ///
    /// # Errors
    /// The frame is not what its offload facts say; the sink saw nothing of it.
    pub fn segment(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<usize, SegmentError> {
        let mut start = [0u8; MAX_HEADERS];
        let count = frame.copy_out(0, &mut start);
        let start = start.get(..count).unwrap_or_default();
        let headers = Headers::parse(start, frame.len(), &frame.meta)?;
        let size = usize::from(frame.meta.gso_size);
        if size == 0 {
            return Err(SegmentError::NoSize);
        }
        let total = headers.end - headers.payload;
        if headers.payload - headers.ip + size.min(total) > usize::from(u16::MAX) {
            return Err(SegmentError::LongSegment);
        }
        let template = Template::new(start, headers).ok_or(SegmentError::Truncated)?;
        self.buf.resize(headers.payload + size.min(total), 0);

        let mut payload = frame.pieces(headers.payload, total);
        let mut done = 0;
        let mut taken = 0;
        loop {
            let count = size.min(total - done);
            let last = done + count == total;
            let segment = self
                .buf
                .get_mut(..headers.payload + count)
                .ok_or(SegmentError::Truncated)?;
            if let Some(space) = segment.get_mut(headers.payload..) {
                payload.read(space);
            }
            template
                .write(segment, done, taken, last)
                .ok_or(SegmentError::Truncated)?;
            if !sink(segment) {
                return Ok(taken);
            }
            taken += 1;
            done += count;
            if last {
                return Ok(taken);
            }
        }
    }
}

/// What the headers of all segments have in common.
struct Template<'a> {
    bytes: &'a [u8],
    headers: Headers,
    seq: u32,
    id: u16,
    flags: u8,
    /// Sum of the pseudo-header without the length.
    pseudo: Checksum,
}

impl<'a> Template<'a> {
    fn new(start: &'a [u8], headers: Headers) -> Option<Self> {
        let bytes = start.get(..headers.payload)?;
        let Headers {
            ipv6,
            ip,
            protocol,
            transport,
            ..
        } = headers;
        let mut pseudo = Checksum::new();
        // Source and destination stand next to each other in both versions.
        pseudo.add(if ipv6 {
            bytes.get(ip + 8..ip + 40)?
        } else {
            bytes.get(ip + 12..ip + 20)?
        });
        pseudo.add_u16(u16::from(protocol));
        let id = bytes.get(ip + 4..ip + 6)?;
        let (seq, flags) = if protocol == TCP {
            let seq = bytes.get(transport + 4..transport + 8)?;
            let seq = u32::from_be_bytes(seq.try_into().ok()?);
            (seq, *bytes.get(transport + 13)?)
        } else {
            (0, 0)
        };
        Some(Self {
            bytes,
            headers,
            seq,
            id: u16::from_be_bytes(id.try_into().ok()?),
            flags,
            pseudo,
        })
    }

    /// Writes the headers of segment number `index`, whose payload starts at `offset` of the whole
    /// payload, in front of the payload that is already in `segment`. `None` cannot happen once
    /// [`Headers::parse`] passed.
    fn write(&self, segment: &mut [u8], offset: usize, index: usize, last: bool) -> Option<()> {
        let Headers {
            ipv6,
            ip,
            protocol,
            transport,
            ..
        } = self.headers;
        segment
            .get_mut(..self.bytes.len())?
            .copy_from_slice(self.bytes);

        let ip_len = (segment.len() - ip) as u16;
        if ipv6 {
            put(segment, ip + 4, &(ip_len - 40).to_be_bytes())?;
        } else {
            put(segment, ip + 2, &ip_len.to_be_bytes())?;
            let id = self.id.wrapping_add(index as u16);
            put(segment, ip + 4, &id.to_be_bytes())?;
            put(segment, ip + 10, &[0, 0])?;
            let mut sum = Checksum::new();
            sum.add(segment.get(ip..transport)?);
            put(segment, ip + 10, &sum.finish().to_be_bytes())?;
        }

        let field = if protocol == TCP {
            let seq = self.seq.wrapping_add(offset as u32);
            put(segment, transport + 4, &seq.to_be_bytes())?;
            let mut flags = self.flags;
            if !last {
                flags &= !(FIN | PSH);
            }
            if index > 0 {
                flags &= !CWR;
            }
            put(segment, transport + 13, &[flags])?;
            transport + 16
        } else {
            let len = (segment.len() - transport) as u16;
            put(segment, transport + 4, &len.to_be_bytes())?;
            transport + 6
        };
        put(segment, field, &[0, 0])?;
        let mut sum = self.pseudo;
        sum.add_u32((segment.len() - transport) as u32);
        sum.add(segment.get(transport..)?);
        let sum = match protocol {
            TCP => sum.finish(),
            // A UDP checksum of zero would mean that there is none.
            _ => never_zero(sum.finish()),
        };
        put(segment, field, &sum.to_be_bytes())
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) -> Option<()> {
    bytes.get_mut(at..at + value.len())?.copy_from_slice(value);
    Some(())
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
