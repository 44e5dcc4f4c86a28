//! Ethernet: send entries with offloads, and frames that come from wires.

use super::Source;
use super::entries::{address, segment};
use crate::frame::FrameMeta;

/// Headers of TCP or UDP over IPv4 or IPv6, with or without a tag; lengths are right for `payload`.
fn headers(source: &mut Source<'_>, payload: usize) -> Vec<u8> {
    let to = 1 + source.below(3) as u8;
    let mut bytes = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, 3];
    if source.one_in(8) {
        bytes[0] = 1;
    }
    if source.one_in(4) {
        bytes.extend([0x81, 0, 0, 7]);
    }
    let (protocol, transport) = match source.below(2) {
        0 => (6, 20),
        _ => (17, 8),
    };
    let len = transport + payload;
    if source.below(2) == 0 {
        bytes.extend([8, 0, 0x45, 0]);
        bytes.extend(((20 + len) as u16).to_be_bytes());
        bytes.extend([0, 1, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 3, 10, 0, 0, to]);
    } else {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend((len as u16).to_be_bytes());
        bytes.extend([protocol, 64]);
        bytes.extend([0xfd; 32]);
    }
    let mut header = vec![0; transport];
    header[1] = 9;
    match protocol {
        6 => header[12] = 0x50,
        _ => header[4..6].copy_from_slice(&(len as u16).to_be_bytes()),
    }
    bytes.extend(header);
    bytes
}

/// What follows the control segment of a send entry.
pub(super) fn segments(source: &mut Source<'_>, keys: &[u32]) -> Vec<u8> {
    let payload = source.below(5000) as usize;
    let headers = headers(source, payload);
    let mss = match source.below(4) {
        0 => source.limit() as u16,
        _ => 1400,
    };
    let mut bytes = vec![0, 0, 0, 0, 0xc0, 0];
    bytes.extend(mss.to_be_bytes());
    bytes.extend([0; 4]);
    let len = match source.below(8) {
        0 => source.limit() as u16,
        1 => 1 << 15 | 7,
        _ => headers.len() as u16,
    };
    bytes.extend(len.to_be_bytes());
    bytes.extend(headers);
    bytes.resize(bytes.len().next_multiple_of(16), 0);
    for _ in 0..source.below(4) {
        let key = match keys {
            [] => source.u32(),
            keys => source.pick(keys),
        };
        let len = source.below(payload as u64 + 1) as u32;
        bytes.extend(segment(len, key, address(source)));
    }
    bytes
}

/// A frame from outside, and what its sender says of it.
pub(super) fn arriving(source: &mut Source<'_>) -> (FrameMeta, Vec<u8>) {
    let payload = source.below(3000) as usize;
    let mut bytes = headers(source, payload);
    bytes.resize(bytes.len() + payload, 0x5a);
    let mut meta = FrameMeta::default();
    if source.below(2) == 0 {
        meta.flags = source.u8() & 3;
        meta.gso_type = source.pick(&[0, 1, 4, 0x81, 3]);
        meta.gso_size = source.pick(&[0, 1, 8, 100, 1448, u16::MAX]);
        meta.csum_start = source.pick(&[0, 14, 34, 38, 54, 2999]);
        meta.csum_offset = source.pick(&[0, 6, 16, u16::MAX]);
        meta.hdr_len = source.pick(&[0, 54, 66, u16::MAX]);
    }
    if source.one_in(4) {
        source.mutate(&mut bytes);
    }
    (meta, bytes)
}
