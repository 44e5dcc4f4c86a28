//! Where the headers of a frame that is to be segmented are.

use super::segment::SegmentError;
use crate::frame::FrameMeta;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88a8;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;

/// The layout of a TCP or UDP frame, as found in its bytes. All offsets are from the start of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Headers {
    /// Whether the packet is IPv6.
    pub(super) ipv6: bool,
    /// Of the IP header.
    pub(super) ip: usize,
    /// [`TCP`] or [`UDP`].
    pub(super) protocol: u8,
    /// Of the transport header.
    pub(super) transport: usize,
    /// Of the payload: the end of TCP's options.
    pub(super) payload: usize,
    /// End of the IP packet in the frame.
    pub(super) end: usize,
}

fn byte(bytes: &[u8], at: usize) -> Result<u8, SegmentError> {
    bytes.get(at).copied().ok_or(SegmentError::Truncated)
}

fn half(bytes: &[u8], at: usize) -> Result<u16, SegmentError> {
    Ok(u16::from_be_bytes([byte(bytes, at)?, byte(bytes, at + 1)?]))
}

impl Headers {
    /// Finds the headers in `start`, the first bytes of a frame of `len` bytes in all, and checks that
    /// they are what `meta` says.
    pub(super) fn parse(start: &[u8], len: usize, meta: &FrameMeta) -> Result<Self, SegmentError> {
        let mut at = 12;
        let mut ethertype = half(start, at)?;
        for _ in 0..2 {
            if matches!(ethertype, ETHERTYPE_VLAN | ETHERTYPE_SERVICE_VLAN) {
                at += 4;
                ethertype = half(start, at)?;
            }
        }
        let ip = at + 2;
        let (ipv6, protocol) = match (ethertype, meta.gso()) {
            (ETHERTYPE_IPV4, FrameMeta::GSO_TCPV4) => (false, TCP),
            (ETHERTYPE_IPV6, FrameMeta::GSO_TCPV6) => (true, TCP),
            (ETHERTYPE_IPV4, FrameMeta::GSO_UDP) => (false, UDP),
            (ETHERTYPE_IPV6, FrameMeta::GSO_UDP) => (true, UDP),
            _ => return Err(SegmentError::OtherProtocol(ethertype)),
        };
        let (transport, ip_len) = if ipv6 {
            ipv6_chain(start, ip, protocol)?
        } else {
            ipv4(start, ip, protocol)?
        };
        if transport != usize::from(meta.csum_start) {
            return Err(SegmentError::TransportElsewhere {
                found: transport,
                said: meta.csum_start,
            });
        }
        let transport_len = match protocol {
            TCP => usize::from(byte(start, transport + 12)? >> 4) * 4,
            _ => 8,
        };
        if protocol == TCP && transport_len < 20 {
            return Err(SegmentError::ShortTcp(transport_len));
        }
        let payload = transport + transport_len;
        // A length of zero means "as long as the frame": some drivers leave it to the device.
        let end = if ip_len == 0 { len } else { ip + ip_len };
        if payload > start.len() || payload > end || end > len {
            return Err(SegmentError::Truncated);
        }
        Ok(Self {
            ipv6,
            ip,
            protocol,
            transport,
            payload,
            end,
        })
    }
}

/// Offset of the transport header and bytes of the packet (0: not said).
fn ipv4(start: &[u8], ip: usize, protocol: u8) -> Result<(usize, usize), SegmentError> {
    let first = byte(start, ip)?;
    let header = usize::from(first & 0xf) * 4;
    if first >> 4 != 4 || header < 20 {
        return Err(SegmentError::BadIpHeader);
    }
    // More fragments, or not the first one (RFC 791 §3.1).
    if half(start, ip + 6)? & 0x3fff != 0 {
        return Err(SegmentError::Fragment);
    }
    if byte(start, ip + 9)? != protocol {
        return Err(SegmentError::OtherTransport(byte(start, ip + 9)?));
    }
    Ok((ip + header, usize::from(half(start, ip + 2)?)))
}

/// As [`ipv4`]; skips the extension headers that may stand before the transport (RFC 8200 §4).
fn ipv6_chain(start: &[u8], ip: usize, protocol: u8) -> Result<(usize, usize), SegmentError> {
    if byte(start, ip)? >> 4 != 6 {
        return Err(SegmentError::BadIpHeader);
    }
    let payload = usize::from(half(start, ip + 4)?);
    let ip_len = if payload == 0 { 0 } else { 40 + payload };
    let mut next = byte(start, ip + 6)?;
    let mut at = ip + 40;
    // Each header has at least 8 bytes, so `start` bounds the loop.
    loop {
        match next {
            found if found == protocol => return Ok((at, ip_len)),
            // The checksum covers the final destination, which is the one in the IP header only when
            // no segments are left.
            ROUTING if byte(start, at + 3)? != 0 => {
                return Err(SegmentError::OtherTransport(ROUTING));
            }
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {}
            other => return Err(SegmentError::OtherTransport(other)),
        }
        next = byte(start, at)?;
        at += 8 + usize::from(byte(start, at + 1)?) * 8;
    }
}
