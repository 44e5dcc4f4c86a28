//! Where the IP and transport headers of a frame are.

/// Bytes of a frame's start that are looked at: Ethernet, two tags, IP with options or extension
/// headers, TCP with options.
pub(super) const HEADER_BYTES: usize = 256;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// A transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transport {
    /// [`TCP`] or [`UDP`].
    pub(super) protocol: u8,
    /// Where it begins.
    pub(super) at: usize,
    /// Bytes of it, with TCP's options.
    pub(super) len: usize,
}

impl Transport {
    /// Where its checksum is, from its beginning.
    pub(super) fn checksum(&self) -> usize {
        match self.protocol {
            TCP => 16,
            _ => 6,
        }
    }
}

/// The layout of an IP frame. All offsets are from the start of the frame and within the bytes that
/// were looked at, but for `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Whether the packet is IPv6.
    pub(super) ipv6: bool,
    /// Of the IP header.
    pub(super) ip: usize,
    /// Bytes of the fixed IP header and IPv4's options.
    pub(super) ip_len: usize,
    /// End of the packet by its header; `None` when its length is 0 (longer than the field can say).
    pub(super) end: Option<usize>,
    /// TCP or UDP, when all of the packet is here and addressed by its IP header.
    pub(super) transport: Option<Transport>,
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Layout {
    /// Finds the headers in the first bytes of a frame. `None`: it is no IP.
    pub(super) fn parse(start: &[u8]) -> Option<Self> {
        let mut at = 12;
        let mut kind = half(start, at)?;
        for _ in 0..2 {
            if TAGS.contains(&kind) {
                at += 4;
                kind = half(start, at)?;
            }
        }
        let ip = at + 2;
        match (kind, start.get(ip)? >> 4) {
            (IPV4, 4) => Self::ipv4(start, ip),
            (IPV6, 6) => Self::ipv6(start, ip),
            _ => None,
        }
    }

    fn ipv4(start: &[u8], ip: usize) -> Option<Self> {
        let ip_len = usize::from(start.get(ip)? & 15) * 4;
        if ip_len < 20 || start.len() < ip + ip_len {
            return None;
        }
        let total = usize::from(half(start, ip + 2)?);
        // More fragments, or not the first one (RFC 791 §3.1).
        let whole = half(start, ip + 6)? & 0x3fff == 0;
        let protocol = *start.get(ip + 9)?;
        Some(Self {
            ipv6: false,
            ip,
            ip_len,
            end: (total != 0).then_some(ip + total),
            transport: transport(start, protocol, ip + ip_len).filter(|_| whole),
        })
    }

    fn ipv6(start: &[u8], ip: usize) -> Option<Self> {
        let payload = usize::from(half(start, ip + 4)?);
        let mut layout = Self {
            ipv6: true,
            ip,
            ip_len: 40,
            end: (payload != 0).then_some(ip + 40 + payload),
            transport: None,
        };
        if start.len() < ip + 40 {
            return None;
        }
        let mut next = *start.get(ip + 6)?;
        let mut at = ip + 40;
        // Each header has at least 8 bytes, so `start` bounds the loop.
        while let Some(header) = start.get(at..at + 8) {
            match next {
                // The address in the IP header is not the last one (RFC 8200 §8.1).
                ROUTING if header[3] != 0 => return Some(layout),
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {}
                FRAGMENT => return Some(layout),
                _ => break,
            }
            next = header[0];
            at += 8 + usize::from(header[1]) * 8;
        }
        layout.transport = transport(start, next, at);
        Some(layout)
    }

    /// The addresses, source first.
    pub(super) fn addresses<'s>(&self, start: &'s [u8]) -> Option<&'s [u8]> {
        match self.ipv6 {
            true => start.get(self.ip + 8..self.ip + 40),
            false => start.get(self.ip + 12..self.ip + 20),
        }
    }

    /// The packet's end in a frame of `len` bytes.
    pub(super) fn end_in(&self, len: usize) -> usize {
        self.end.map_or(len, |end| end.min(len))
    }
}

fn transport(start: &[u8], protocol: u8, at: usize) -> Option<Transport> {
    let len = match protocol {
        TCP => usize::from(start.get(at + 12)? >> 4) * 4,
        UDP => 8,
        _ => return None,
    };
    let least = if protocol == TCP { 20 } else { 8 };
    (len >= least && at + len <= start.len()).then_some(Transport { protocol, at, len })
}

#[cfg(test)]
mod tests {
    use super::super::test_frames::{tcp4, tcp6, udp4};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_are_found_behind_tags_and_extension_headers() {
        let frame = tcp4(b"hello");
        let expected = Layout {
            ipv6: false,
            ip: 14,
            ip_len: 20,
            end: Some(59),
            transport: Some(Transport {
                protocol: TCP,
                at: 34,
                len: 20,
            }),
        };
        assert_eq!(Layout::parse(&frame), Some(expected));
        let mut tagged = frame.clone();
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        let found = Layout::parse(&tagged).unwrap();
        assert_eq!((found.ip, found.end), (18, Some(63)));
        let mut extended = tcp6(b"hello");
        extended[20] = HOP_BY_HOP;
        extended.splice(54..54, [DESTINATION_OPTIONS, 0, 0, 0, 0, 0, 0, 0]);
        extended.splice(62..62, [TCP, 1, 0, 0, 0, 0, 0, 0]);
        extended.splice(70..70, [0; 8]);
        let found = Layout::parse(&extended).unwrap();
        assert_eq!(found.transport.unwrap().at, 78);
    }

    #[test]
    fn fragments_and_source_routes_have_no_transport() {
        let mut fragment = udp4(b"hello");
        fragment[20] = 0x20;
        assert_eq!(Layout::parse(&fragment).unwrap().transport, None);
        let mut routed = tcp6(b"hello");
        routed[20] = ROUTING;
        routed.splice(54..54, [TCP, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(Layout::parse(&routed).unwrap().transport, None);
    }

    proptest! {
        #[test]
        fn nonsense_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..120), kind in 0..3) {
            let types: [[u8; 3]; 3] = [[8, 0, 0x45], [0x86, 0xdd, 0x60], [0x81, 0, 0]];
            if let Some(space) = bytes.get_mut(12..15) {
                space.copy_from_slice(&types[kind as usize]);
            }
            if let Some(layout) = Layout::parse(&bytes) {
                prop_assert!(layout.ip + layout.ip_len <= bytes.len());
                prop_assert!(layout.addresses(&bytes).is_some());
                if let Some(transport) = layout.transport {
                    prop_assert!(transport.at + transport.len <= bytes.len());
                }
            }
        }
    }
}
