//! `struct virtio_net_hdr_v1` (virtio 1.3 §5.1.6) and [`FrameMeta`].

use super::features;
use super::hash::Hash;
use crate::frame::FrameMeta;

/// Bytes of the header; with VERSION_1 it always has `num_buffers`.
pub const HEADER_BYTES: usize = 12;
/// The same with a hash (`struct virtio_net_hdr_v1_hash`).
pub const HASH_HEADER_BYTES: usize = 20;

/// Bytes of the header with these features.
pub fn bytes_of(features: u64) -> usize {
    if features & features::HASH_REPORT != 0 {
        HASH_HEADER_BYTES
    } else {
        HEADER_BYTES
    }
}

/// The facts in a header of a driver. `num_buffers` means nothing on transmit. DATA_VALID and
/// unknown flags are dropped: a driver may not set them (§5.1.6.2.1).
pub fn parse(bytes: &[u8; HEADER_BYTES]) -> FrameMeta {
    let [flags, gso_type, hl, hh, gl, gh, sl, sh, ol, oh, _, _] = *bytes;
    FrameMeta {
        flags: flags & FrameMeta::NEEDS_CSUM,
        gso_type,
        hdr_len: u16::from_le_bytes([hl, hh]),
        gso_size: u16::from_le_bytes([gl, gh]),
        csum_start: u16::from_le_bytes([sl, sh]),
        csum_offset: u16::from_le_bytes([ol, oh]),
    }
}

/// The same with what was hashed.
pub fn emit_with_hash(meta: &FrameMeta, buffers: u16, hash: Hash) -> [u8; HASH_HEADER_BYTES] {
    let mut bytes = [0; HASH_HEADER_BYTES];
    let parts = [
        &emit(meta, buffers)[..],
        &hash.value.to_le_bytes(),
        &hash.report.to_le_bytes(),
    ];
    for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *from;
    }
    bytes
}

/// The header of a received frame in `buffers` buffers.
pub fn emit(meta: &FrameMeta, buffers: u16) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    let (low, high) = words(meta, buffers);
    let parts = low.to_le_bytes().into_iter().chain(high.to_le_bytes());
    bytes
        .iter_mut()
        .zip(parts)
        .for_each(|(to, from)| *to = from);
    bytes
}

/// The same as two words, little endian one after the other.
#[inline]
pub fn words(meta: &FrameMeta, buffers: u16) -> (u64, u32) {
    let mut meta = *meta;
    if !meta.needs_csum() {
        (meta.csum_start, meta.csum_offset) = (0, 0);
    }
    if !meta.is_gso() {
        (meta.gso_type, meta.gso_size, meta.hdr_len) = (FrameMeta::GSO_NONE, 0, 0);
    }
    let low = u64::from(meta.flags)
        | u64::from(meta.gso_type) << 8
        | u64::from(meta.hdr_len) << 16
        | u64::from(meta.gso_size) << 32
        | u64::from(meta.csum_start) << 48;
    (low, u32::from(meta.csum_offset) | u32::from(buffers) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_survive_the_header() {
        let meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            gso_type: FrameMeta::GSO_TCPV6,
            hdr_len: 74,
            gso_size: 1440,
            csum_start: 54,
            csum_offset: 16,
        };
        let bytes = emit(&meta, 0x1234);
        assert_eq!(bytes[10..], [0x34, 0x12]);
        assert_eq!(parse(&bytes), meta);
    }

    #[test]
    fn a_hash_stands_behind_the_header() {
        let hash = Hash {
            value: 0x0403_0201,
            report: 9,
        };
        let bytes = emit_with_hash(&FrameMeta::default(), 2, hash);
        assert_eq!(bytes[..12], emit(&FrameMeta::default(), 2));
        assert_eq!(bytes[12..], [1, 2, 3, 4, 9, 0, 0, 0]);
    }

    #[test]
    fn a_finished_frame_has_an_empty_header() {
        let meta = FrameMeta {
            hdr_len: 54,
            gso_size: 1,
            csum_start: 7,
            ..FrameMeta::default()
        };
        assert_eq!(emit(&meta, 1), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn flags_that_a_driver_may_not_set_are_dropped() {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = 0xff;
        assert_eq!(parse(&bytes).flags, FrameMeta::NEEDS_CSUM);
    }
}
