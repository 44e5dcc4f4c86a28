//! Frames for tests.

use crate::offload::checksum::plain_checksum;

/// The key of the published verification suite of RSS.
pub(super) const RSS_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

pub(super) const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn ethernet(kind: u16) -> Vec<u8> {
    let mut frame = HERE.to_vec();
    frame.extend(THERE);
    frame.extend(kind.to_be_bytes());
    frame
}

fn ip4(protocol: u8, packet: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(0x0800);
    let total = 20 + packet.len() as u16;
    frame.extend([0x45, 0]);
    frame.extend(total.to_be_bytes());
    frame.extend([
        0x12, 0x34, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    let sum = plain_checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame.extend(packet);
    frame
}

fn ip6(protocol: u8, packet: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(0x86dd);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend((packet.len() as u16).to_be_bytes());
    frame.extend([protocol, 64]);
    frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    frame.extend(packet);
    frame
}

fn tcp(payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x10, 0x00, 0x00, 80, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18];
    packet.extend([0x20, 0, 0, 0, 0, 0]);
    packet.extend(payload);
    packet
}

fn udp(payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x10, 0x00, 0x11, 0x11];
    packet.extend((8 + payload.len() as u16).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(payload);
    packet
}

/// TCP over IPv4, headers of 54 bytes, without a TCP checksum.
pub(super) fn tcp4(payload: &[u8]) -> Vec<u8> {
    ip4(6, &tcp(payload))
}

/// TCP over IPv6, headers of 74 bytes, without a TCP checksum.
pub(super) fn tcp6(payload: &[u8]) -> Vec<u8> {
    ip6(6, &tcp(payload))
}

/// UDP over IPv4, headers of 42 bytes, without a UDP checksum.
pub(super) fn udp4(payload: &[u8]) -> Vec<u8> {
    ip4(17, &udp(payload))
}

/// UDP over IPv6, headers of 62 bytes, without a UDP checksum.
pub(super) fn udp6(payload: &[u8]) -> Vec<u8> {
    ip6(17, &udp(payload))
}

/// The pseudo-header of one of the frames above.
fn pseudo(frame: &[u8]) -> (Vec<u8>, usize) {
    let v6 = frame[12] == 0x86;
    let (addresses, protocol, at) = match v6 {
        true => (&frame[22..54], frame[20], 54),
        false => (&frame[26..34], frame[23], 34),
    };
    let mut bytes = addresses.to_vec();
    bytes.extend([0, protocol]);
    bytes.extend(((frame.len() - at) as u32).to_be_bytes());
    (bytes, at)
}

/// Whether the transport's checksum of such a frame is right.
pub(super) fn is_right(frame: &[u8]) -> bool {
    let (mut bytes, at) = pseudo(frame);
    bytes.extend(&frame[at..]);
    plain_checksum(&bytes) == 0
}

/// The same frame with its transport's checksum.
pub(super) fn finished(mut frame: Vec<u8>) -> Vec<u8> {
    let (mut bytes, at) = pseudo(&frame);
    bytes.extend(&frame[at..]);
    let field = at + if is_udp(&frame) { 6 } else { 16 };
    let sum = plain_checksum(&bytes);
    frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn is_udp(frame: &[u8]) -> bool {
    match frame[12] {
        0x86 => frame[20] == 17,
        _ => frame[23] == 17,
    }
}

/// `len` bytes that differ.
pub(super) fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 256) as u8).collect()
}
