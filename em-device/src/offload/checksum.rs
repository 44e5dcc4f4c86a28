//! The Internet checksum (RFC 1071).

use crate::frame::{Frame, FrameMeta, MetaError};

/// Adds up bytes that come in pieces of any length, also odd ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct Checksum {
    sum: u64,
    odd: bool,
}

impl Checksum {
    /// An empty sum.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues with `bytes`.
    pub fn add(&mut self, bytes: &[u8]) {
        let sum = fold(sum_words(bytes));
        // After an odd number of bytes, the high byte of each word here is a low byte there; the sum
        // can be swapped instead of the words (RFC 1071 §2(B)).
        let sum = if self.odd { sum.swap_bytes() } else { sum };
        self.sum += u64::from(sum);
        self.odd ^= bytes.len() % 2 != 0;
    }

    /// Continues with a 16-bit number, as if its two bytes came in network order. Only at an even
    /// position.
    pub fn add_u16(&mut self, value: u16) {
        self.sum += u64::from(value.to_be());
    }

    /// Continues with a 32-bit number in network order. Only at an even position.
    pub fn add_u32(&mut self, value: u32) {
        let value = value.to_be();
        self.sum += u64::from(value & 0xffff) + u64::from(value >> 16);
    }

    /// The ones' complement sum, as a number.
    pub fn sum(self) -> u16 {
        u16::from_be(fold(self.sum))
    }

    /// The value for the checksum field: the complement of the sum, as a number. Bytes that include
    /// a right checksum give 0.
    pub fn finish(self) -> u16 {
        !self.sum()
    }
}

/// Sum of the 16-bit words of `bytes` in memory order; a last odd byte is padded with zero.
fn sum_words(bytes: &[u8]) -> u64 {
    // Each lane takes 32-bit halves into 64 bits, so that no carry is lost below 2³² steps, and the
    // lanes are independent, which lets the compiler use vector registers.
    let mut lanes = [0u64; 8];
    let mut blocks = bytes.chunks_exact(32);
    for block in &mut blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(4)) {
            if let Ok(word) = <[u8; 4]>::try_from(word) {
                *lane += u64::from(u32::from_ne_bytes(word));
            }
        }
    }
    let mut sum: u64 = lanes.iter().sum();
    let mut words = blocks.remainder().chunks_exact(2);
    for word in &mut words {
        if let Ok(word) = <[u8; 2]>::try_from(word) {
            sum += u64::from(u16::from_ne_bytes(word));
        }
    }
    if let [last] = words.remainder() {
        sum += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    sum
}

/// Adds the carries back until 16 bits are left.
fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// What goes into the field: in UDP, zero means that there is no checksum, and both zeroes of
/// ones' complement are good in all others.
pub(super) fn never_zero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Finishes the checksum of a frame in place, if `meta` says that it needs that. The field must
/// hold the sum of the pseudo-header (virtio 1.3 §5.1.6.2).
///
/// # Errors
/// The field or the start is outside the frame; nothing was changed.
pub fn complete_checksum(frame: &mut [u8], meta: &FrameMeta) -> Result<(), MetaError> {
    if !meta.needs_csum() {
        return Ok(());
    }
    let start = usize::from(meta.csum_start);
    let at = start + usize::from(meta.csum_offset);
    let outside = MetaError::ChecksumOutside {
        start: meta.csum_start,
        offset: meta.csum_offset,
        len: frame.len(),
    };
    let mut sum = Checksum::new();
    sum.add(frame.get(start..).ok_or(outside)?);
    let field = frame.get_mut(at..at + 2).ok_or(outside)?;
    field.copy_from_slice(&never_zero(sum.finish()).to_be_bytes());
    Ok(())
}

/// The number to store (big-endian) at `csum_start + csum_offset` of a frame whose checksum is
/// unfinished. For a sink that copies the frame in pieces and patches the field afterwards.
///
/// # Errors
/// The field or the start is outside the frame.
pub fn finished_checksum(frame: &Frame<'_>) -> Result<u16, MetaError> {
    let meta = &frame.meta;
    let start = usize::from(meta.csum_start);
    if start + usize::from(meta.csum_offset) + 2 > frame.len() {
        return Err(MetaError::ChecksumOutside {
            start: meta.csum_start,
            offset: meta.csum_offset,
            len: frame.len(),
        });
    }
    let mut sum = Checksum::new();
    let mut bytes = frame.pieces(start, usize::MAX);
    let mut chunk = [0u8; 2048];
    loop {
        let count = bytes.read(&mut chunk);
        sum.add(chunk.get(..count).unwrap_or_default());
        if count < chunk.len() {
            return Ok(never_zero(sum.finish()));
        }
    }
}

/// The checksum computed word by word, for tests to compare with.
#[cfg(test)]
pub(crate) fn plain_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(pair[0]) * 256 + u32::from(low);
        if sum > 0xffff {
            sum -= 0xffff;
        }
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vm_memory::VolatileSlice;

    fn checksum(bytes: &[u8]) -> u16 {
        let mut sum = Checksum::new();
        sum.add(bytes);
        sum.finish()
    }

    #[test]
    fn the_example_of_rfc_1071_gives_its_sum() {
        let mut sum = Checksum::new();
        sum.add(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.sum(), 0xddf2);
    }

    #[test]
    fn no_carry_is_lost_in_the_longest_frame_of_ones() {
        let bytes = vec![0xff; crate::frame::MAX_FRAME];
        assert_eq!(checksum(&bytes), 0);
        assert_eq!(fold(u64::MAX), 0xffff);
    }

    #[test]
    fn a_checksum_of_zero_is_stored_as_ones() {
        let mut frame = vec![0u8; 40];
        frame[20..22].copy_from_slice(&[0xff, 0xff]);
        let meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            csum_start: 20,
            csum_offset: 6,
            ..FrameMeta::default()
        };
        complete_checksum(&mut frame, &meta).unwrap();
        assert_eq!(frame[26..28], [0xff, 0xff]);
    }

    #[test]
    fn a_field_outside_the_frame_is_an_error() {
        let meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            csum_start: 0xffff,
            csum_offset: 0xffff,
            ..FrameMeta::default()
        };
        assert!(complete_checksum(&mut [0; 64], &meta).is_err());
        let near = FrameMeta {
            csum_start: 34,
            csum_offset: 29,
            ..meta
        };
        assert!(complete_checksum(&mut [0; 64], &near).is_err());
        assert!(finished_checksum(&Frame::new(near, &[])).is_err());
    }

    proptest! {
        #[test]
        fn pieces_of_any_length_give_the_plain_checksum(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(0usize..700, 0..10),
        ) {
            let mut sum = Checksum::new();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                sum.add(head);
                rest = tail;
            }
            sum.add(rest);
            // Both zeroes are the same number.
            prop_assert_eq!(never_zero(sum.finish()), never_zero(plain_checksum(&bytes)));
        }

        #[test]
        fn numbers_sum_like_their_bytes(a: u16, b: u32) {
            let mut numbers = Checksum::new();
            numbers.add_u16(a);
            numbers.add_u32(b);
            let bytes = [a.to_be_bytes().to_vec(), b.to_be_bytes().to_vec()].concat();
            prop_assert_eq!(never_zero(numbers.finish()), never_zero(plain_checksum(&bytes)));
        }

        #[test]
        fn completing_in_place_and_by_pieces_agree_and_verify(
            mut bytes in prop::collection::vec(any::<u8>(), 60..4000),
            start in 14u16..40,
            offset in (0u16..9).prop_map(|half| half * 2),
            cut in 0usize..60,
        ) {
            let meta = FrameMeta {
                flags: FrameMeta::NEEDS_CSUM,
                csum_start: start,
                csum_offset: offset,
                ..FrameMeta::default()
            };
            // The field holds the sum of a pseudo-header, here of two made-up words.
            let at = usize::from(start + offset);
            let pseudo = [0x12, 0x34, 0xab, 0xcd];
            let seed = !plain_checksum(&pseudo);
            bytes[at..at + 2].copy_from_slice(&seed.to_be_bytes());

            let mut source = bytes.clone();
            let (head, tail) = source.split_at_mut(cut);
            let parts = [VolatileSlice::from(head), VolatileSlice::from(tail)];
            let value = finished_checksum(&Frame::new(meta, &parts)).unwrap();
            complete_checksum(&mut bytes, &meta).unwrap();
            prop_assert_eq!(&bytes[at..at + 2], &value.to_be_bytes()[..]);
            let covered = [&pseudo[..], &bytes[usize::from(start)..]].concat();
            prop_assert_eq!(plain_checksum(&covered) % 0xffff, 0);
        }
    }
}
