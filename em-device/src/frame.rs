//! Ethernet frames and the offload facts that travel with them.
//!
//! A [`Frame`] borrows memory that a guest or a peer may change at any time: it is a list of
//! [`VolatileSlice`]s. Whoever decides by the bytes of a frame copies them out once and looks at the
//! copy.

use thiserror::Error;
use vm_memory::VolatileSlice;

/// Longest frame in bytes: 64 KiB of IP packet, an Ethernet header and a VLAN tag.
pub const MAX_FRAME: usize = 65536 + 14 + 4;

/// Shortest thing that is an Ethernet frame: its header.
pub const MIN_FRAME: usize = 14;

/// Smallest payload in bytes of a segment that a frame may ask for. Bounds the number of segments
/// that one frame becomes; IPv4's smallest MTU (68 bytes) leaves 28 bytes, rounded up for
/// Linux's smallest MSS of 48 bytes less 16 bytes of options.
pub const MIN_GSO_SIZE: u16 = 32;

/// Offload facts of a frame in host byte order: the fields of `virtio_net_hdr_v1`
/// (virtio 1.3 §5.1.6) without `num_buffers`. All zeroes: a finished frame with nothing to say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FrameMeta {
    /// [`FrameMeta::NEEDS_CSUM`], [`FrameMeta::DATA_VALID`].
    pub flags: u8,
    /// [`FrameMeta::GSO_NONE`] and so on, perhaps with [`FrameMeta::GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of headers before the payload; a hint, 0 when the frame is not segmented.
    pub hdr_len: u16,
    /// Bytes of payload of each segment.
    pub gso_size: u16,
    /// Where the checksummed bytes start, from the start of the frame.
    pub csum_start: u16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: u16,
}

/// What is wrong with the offload facts of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MetaError {
    /// The checksum would lie outside the frame.
    #[error("the checksum at {start}+{offset} is outside the frame of {len} bytes")]
    ChecksumOutside {
        /// `csum_start`.
        start: u16,
        /// `csum_offset`.
        offset: u16,
        /// Bytes of the frame.
        len: usize,
    },
    /// The checksummed bytes would include the Ethernet header.
    #[error("the checksum starts at {0}, inside the Ethernet header")]
    ChecksumInEthernet(u16),
    /// Segmentation of a kind that is not offered.
    #[error("the segmentation type {0:#x} is not known")]
    UnknownGso(u8),
    /// Segmentation into (nearly) nothing.
    #[error("the segment size {0} is less than {MIN_GSO_SIZE}")]
    SmallGso(u16),
    /// Segments have checksums of their own, so segmentation needs the checksum fields.
    #[error("the frame is to be segmented but does not need a checksum")]
    GsoWithoutChecksum,
    /// The checksum is not that of the transport.
    #[error(
        "the frame is to be segmented but its checksum at offset {0} is not that of its transport"
    )]
    GsoChecksumOffset(u16),
    /// Headers longer than the frame.
    #[error("headers of {hdr_len} bytes do not fit in the frame of {len} bytes")]
    HeadersOutside {
        /// `hdr_len`.
        hdr_len: u16,
        /// Bytes of the frame.
        len: usize,
    },
}

impl FrameMeta {
    /// The checksum at `csum_start + csum_offset` is unfinished: it holds the pseudo-header's sum.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was found good.
    pub const DATA_VALID: u8 = 2;
    /// No segmentation.
    pub const GSO_NONE: u8 = 0;
    /// TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// UDP over IPv4 or IPv6, each segment a datagram of its own.
    pub const GSO_UDP: u8 = 5;
    /// Flag in `gso_type`: the TCP header has CWR set, which only the first segment keeps.
    pub const GSO_ECN: u8 = 0x80;

    /// Whether somebody must finish the checksum.
    pub fn needs_csum(&self) -> bool {
        self.flags & Self::NEEDS_CSUM != 0
    }

    /// The segmentation type without the ECN flag.
    pub fn gso(&self) -> u8 {
        self.gso_type & !Self::GSO_ECN
    }

    /// Whether somebody must segment the frame.
    pub fn is_gso(&self) -> bool {
        self.gso() != Self::GSO_NONE
    }

    /// Checks facts that a guest or a peer gave for a frame of `frame_len` bytes. What passes is
    /// consistent; it may still lie about what the frame contains.
    ///
    /// # Errors
    /// The first fact that is wrong.
    pub fn check(&self, frame_len: usize) -> Result<(), MetaError> {
        if self.needs_csum() {
            if usize::from(self.csum_start) < MIN_FRAME {
                return Err(MetaError::ChecksumInEthernet(self.csum_start));
            }
            let end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
            if end > frame_len {
                return Err(MetaError::ChecksumOutside {
                    start: self.csum_start,
                    offset: self.csum_offset,
                    len: frame_len,
                });
            }
        }
        let checksum = match self.gso_type {
            Self::GSO_NONE => return Ok(()),
            0x01 | 0x04 | 0x81 | 0x84 => 16,
            Self::GSO_UDP => 6,
            other => return Err(MetaError::UnknownGso(other)),
        };
        if self.gso_size < MIN_GSO_SIZE {
            return Err(MetaError::SmallGso(self.gso_size));
        }
        if !self.needs_csum() {
            return Err(MetaError::GsoWithoutChecksum);
        }
        if self.csum_offset != checksum {
            return Err(MetaError::GsoChecksumOffset(self.csum_offset));
        }
        if usize::from(self.hdr_len) > frame_len {
            return Err(MetaError::HeadersOutside {
                hdr_len: self.hdr_len,
                len: frame_len,
            });
        }
        Ok(())
    }
}

/// An Ethernet frame in memory that others may change: a scatter list and the offload facts.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// Offload facts. Checked by whoever took them from a guest or a peer.
    pub meta: FrameMeta,
    parts: &'a [VolatileSlice<'a>],
    len: usize,
}

impl<'a> Frame<'a> {
    /// A frame that consists of `parts` in order.
    #[inline]
    pub fn new(meta: FrameMeta, parts: &'a [VolatileSlice<'a>]) -> Self {
        let len = parts
            .iter()
            .fold(0usize, |sum, part| sum.saturating_add(part.len()));
        Self { meta, parts, len }
    }

    /// The same bytes with other offload facts.
    pub fn with_meta(self, meta: FrameMeta) -> Self {
        Self { meta, ..self }
    }

    /// Bytes of the frame.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the frame has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The scatter list.
    pub fn parts(&self) -> &'a [VolatileSlice<'a>] {
        self.parts
    }

    /// The memory of the bytes from `offset` on, at most `len` of them, piece by piece. What lies
    /// past the end of the frame is left out.
    pub fn pieces(&self, offset: usize, len: usize) -> Pieces<'a> {
        Pieces {
            parts: self.parts,
            skip: offset,
            left: len,
        }
    }

    /// Copies bytes from `offset` on into `buf`. Returns how many: fewer than `buf.len()` when the
    /// frame ends first.
    #[inline]
    pub fn copy_out(&self, offset: usize, buf: &mut [u8]) -> usize {
        self.pieces(offset, buf.len()).read(buf)
    }

    /// Appends the whole frame to `buf`.
    pub fn append_to(&self, buf: &mut Vec<u8>) {
        let start = buf.len();
        buf.resize(start.saturating_add(self.len), 0);
        if let Some(space) = buf.get_mut(start..) {
            self.copy_out(0, space);
        }
    }

    /// A copy of the whole frame.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.append_to(&mut bytes);
        bytes
    }

    /// Copies the bytes from `offset` on into the scatter list `to`, from its byte `to_offset` on.
    /// Returns how many were copied: until the frame ends or `to` is full.
    #[inline]
    pub fn copy_into(&self, offset: usize, to: &[VolatileSlice<'_>], to_offset: usize) -> usize {
        if let ([from], [target]) = (self.parts, to) {
            if let (Ok(from), Ok(target)) = (from.offset(offset), target.offset(to_offset)) {
                from.copy_to_volatile_slice(target);
                return from.len().min(target.len());
            }
        }
        self.copy_pieces(offset, to, to_offset)
    }

    fn copy_pieces(&self, offset: usize, to: &[VolatileSlice<'_>], to_offset: usize) -> usize {
        let mut done = 0;
        let mut from = self.pieces(offset, usize::MAX);
        let mut piece: Option<VolatileSlice<'a>> = None;
        for target in (Pieces {
            parts: to,
            skip: to_offset,
            left: usize::MAX,
        }) {
            let mut target = target;
            while !target.is_empty() {
                let source = match piece.take().or_else(|| from.next()) {
                    Some(source) => source,
                    None => return done,
                };
                source.copy_to_volatile_slice(target);
                let count = source.len().min(target.len());
                done += count;
                piece = source.offset(count).ok().filter(|rest| !rest.is_empty());
                match target.offset(count) {
                    Ok(rest) => target = rest,
                    Err(_) => return done,
                }
            }
        }
        done
    }
}

/// Pieces of a scatter list, see [`Frame::pieces`]. Never empty ones.
#[derive(Debug, Clone)]
pub struct Pieces<'a> {
    parts: &'a [VolatileSlice<'a>],
    skip: usize,
    left: usize,
}

impl Pieces<'_> {
    /// Copies the next bytes into `buf`. Returns how many: fewer than `buf.len()` at the end.
    #[inline]
    pub fn read(&mut self, buf: &mut [u8]) -> usize {
        let mut done = 0;
        while self.left > 0 && done < buf.len() {
            let (Some((part, others)), Some(rest)) =
                (self.parts.split_first(), buf.get_mut(done..))
            else {
                break;
            };
            if part.len() <= self.skip {
                self.skip -= part.len();
                self.parts = others;
                continue;
            }
            let count = (part.len() - self.skip).min(self.left).min(rest.len());
            let Ok(piece) = part.subslice(self.skip, count) else {
                break;
            };
            done += piece.copy_to(rest);
            self.skip += count;
            self.left -= count;
        }
        done
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = VolatileSlice<'a>;

    fn next(&mut self) -> Option<VolatileSlice<'a>> {
        while self.left > 0 {
            let (part, rest) = self.parts.split_first()?;
            self.parts = rest;
            if part.len() <= self.skip {
                self.skip -= part.len();
                continue;
            }
            let count = (part.len() - self.skip).min(self.left);
            let piece = part.subslice(self.skip, count).ok()?;
            self.skip = 0;
            self.left -= count;
            return Some(piece);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn good_gso() -> FrameMeta {
        FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            gso_type: FrameMeta::GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1460,
            csum_start: 34,
            csum_offset: 16,
        }
    }

    #[test]
    fn a_frame_without_offloads_is_good_at_any_length() {
        assert_eq!(FrameMeta::default().check(0), Ok(()));
        assert_eq!(FrameMeta::default().check(MAX_FRAME), Ok(()));
    }

    #[test]
    fn the_checksum_field_must_lie_in_the_frame() {
        let meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 16,
            ..FrameMeta::default()
        };
        assert_eq!(meta.check(52), Ok(()));
        assert!(matches!(
            meta.check(51),
            Err(MetaError::ChecksumOutside { .. })
        ));
        let far = FrameMeta {
            csum_start: 0xffff,
            csum_offset: 0xffff,
            ..meta
        };
        assert!(far.check(MAX_FRAME).is_err());
        let ethernet = FrameMeta {
            csum_start: 13,
            ..meta
        };
        assert_eq!(ethernet.check(100), Err(MetaError::ChecksumInEthernet(13)));
    }

    #[test]
    fn segmentation_facts_are_checked() {
        assert_eq!(good_gso().check(4000), Ok(()));
        let with = |change: fn(&mut FrameMeta)| {
            let mut meta = good_gso();
            change(&mut meta);
            meta.check(4000)
        };
        assert_eq!(with(|m| m.gso_type |= FrameMeta::GSO_ECN), Ok(()));
        assert_eq!(with(|m| m.gso_type = 3), Err(MetaError::UnknownGso(3)));
        assert_eq!(
            with(|m| m.gso_type = 0x85),
            Err(MetaError::UnknownGso(0x85)),
            "CWR is TCP's"
        );
        assert_eq!(
            with(|m| m.gso_type = FrameMeta::GSO_UDP),
            Err(MetaError::GsoChecksumOffset(16))
        );
        assert_eq!(
            with(|m| (m.gso_type, m.csum_offset) = (FrameMeta::GSO_UDP, 6)),
            Ok(())
        );
        assert_eq!(
            with(|m| m.gso_type = 0x80),
            Err(MetaError::UnknownGso(0x80))
        );
        assert_eq!(with(|m| m.gso_size = 0), Err(MetaError::SmallGso(0)));
        assert_eq!(with(|m| m.gso_size = 31), Err(MetaError::SmallGso(31)));
        assert_eq!(with(|m| m.flags = 0), Err(MetaError::GsoWithoutChecksum));
        assert_eq!(
            with(|m| m.csum_offset = 6),
            Err(MetaError::GsoChecksumOffset(6))
        );
        assert!(matches!(
            with(|m| m.hdr_len = 4001),
            Err(MetaError::HeadersOutside { .. })
        ));
    }

    /// Cuts `bytes` into pieces of the given lengths (the last takes the rest).
    fn scatter<'a>(mut bytes: &'a mut [u8], cuts: &[usize]) -> Vec<VolatileSlice<'a>> {
        let mut parts = Vec::new();
        for cut in cuts {
            let (head, tail) = bytes.split_at_mut((*cut).min(bytes.len()));
            parts.push(VolatileSlice::from(head));
            bytes = tail;
        }
        parts.push(VolatileSlice::from(bytes));
        parts
    }

    proptest! {
        #[test]
        fn copies_between_scatter_lists_keep_the_bytes(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            cuts in prop::collection::vec(0usize..50, 0..8),
            to_cuts in prop::collection::vec(0usize..50, 0..8),
            to_len in 0usize..350,
            offset in 0usize..320,
            to_offset in 0usize..360,
        ) {
            let mut source = bytes.clone();
            let parts = scatter(&mut source, &cuts);
            let frame = Frame::new(FrameMeta::default(), &parts);
            prop_assert_eq!(frame.len(), bytes.len());
            prop_assert_eq!(&frame.to_vec(), &bytes);

            let expected = bytes.get(offset..).unwrap_or_default();
            let mut out = vec![0u8; 100];
            let count = frame.copy_out(offset, &mut out);
            prop_assert_eq!(count, expected.len().min(100));
            prop_assert_eq!(&out[..count], &expected[..count]);

            let mut pieces = frame.pieces(offset, usize::MAX);
            let mut joined = Vec::new();
            loop {
                let mut chunk = [0u8; 7];
                let count = pieces.read(&mut chunk);
                joined.extend_from_slice(&chunk[..count]);
                if count < chunk.len() {
                    break;
                }
            }
            prop_assert_eq!(&joined[..], expected);

            let mut target = vec![0xee; to_len];
            let to = scatter(&mut target, &to_cuts);
            let copied = frame.copy_into(offset, &to, to_offset);
            let room = to_len.saturating_sub(to_offset);
            prop_assert_eq!(copied, expected.len().min(room));
            for (i, byte) in target.iter().enumerate() {
                let wanted = match i.checked_sub(to_offset) {
                    Some(i) if i < copied => expected[i],
                    _ => 0xee,
                };
                prop_assert_eq!(*byte, wanted);
            }
        }
    }
}
