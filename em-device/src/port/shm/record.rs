//! The header of a record in the ring: 16 bytes, then the frame, then padding to 16 bytes.

use crate::frame::FrameMeta;

/// Records start at multiples of this.
pub(super) const ALIGN: usize = 16;

/// Length of a frame and its offload facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the frame.
    pub(super) len: u32,
    /// Its offload facts, not checked.
    pub(super) meta: FrameMeta,
}

impl Header {
    /// As the two words in the ring. Both ends are on one host, so the byte order is its own.
    pub(super) fn to_words(self) -> [u64; 2] {
        let Self { len, meta } = self;
        let first = u64::from(len)
            | u64::from(meta.flags) << 32
            | u64::from(meta.gso_type) << 40
            | u64::from(meta.hdr_len) << 48;
        let second = u64::from(meta.gso_size)
            | u64::from(meta.csum_start) << 16
            | u64::from(meta.csum_offset) << 32;
        [first, second]
    }

    /// From the two words in the ring; any are possible.
    #[inline]
    pub(super) fn from_words([first, second]: [u64; 2]) -> Self {
        Self {
            len: first as u32,
            meta: FrameMeta {
                flags: (first >> 32) as u8,
                gso_type: (first >> 40) as u8,
                hdr_len: (first >> 48) as u16,
                gso_size: second as u16,
                csum_start: (second >> 16) as u16,
                csum_offset: (second >> 32) as u16,
            },
        }
    }
}

/// Bytes of a record with a frame of `len` bytes.
pub(super) fn record_len(len: usize) -> usize {
    ALIGN + len.next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_survives_the_ring(len: u32, bytes: (u8, u8), halves: (u16, u16, u16, u16)) {
            let header = Header {
                len,
                meta: FrameMeta {
                    flags: bytes.0,
                    gso_type: bytes.1,
                    hdr_len: halves.0,
                    gso_size: halves.1,
                    csum_start: halves.2,
                    csum_offset: halves.3,
                },
            };
            prop_assert_eq!(Header::from_words(header.to_words()), header);
        }
    }

    #[test]
    fn a_record_is_its_header_and_whole_lines_of_16_bytes() {
        assert_eq!(record_len(1), 32);
        assert_eq!(record_len(16), 32);
        assert_eq!(record_len(17), 48);
    }
}
