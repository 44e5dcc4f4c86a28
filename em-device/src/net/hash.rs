//! Hashes of received frames (virtio 1.3 §5.1.6.4.3), for receive-side scaling and for the driver's use.

use crate::flow::toeplitz::{INPUT_BYTES, Toeplitz};

/// Bytes of a frame's start that are looked at; of a longer chain of headers the IP addresses count alone.
pub const HASH_START: usize = 256;

/// Hash types (§5.1.6.4.3.1): bits of what the driver enables.
pub mod types {
    /// IPv4 addresses.
    pub const IPV4: u32 = 1 << 0;
    /// The same and TCP ports.
    pub const TCPV4: u32 = 1 << 1;
    /// The same and UDP ports.
    pub const UDPV4: u32 = 1 << 2;
    /// IPv6 addresses.
    pub const IPV6: u32 = 1 << 3;
    /// The same and TCP ports.
    pub const TCPV6: u32 = 1 << 4;
    /// The same and UDP ports.
    pub const UDPV6: u32 = 1 << 5;
    /// IPv6 addresses, those in extension headers first.
    pub const IP_EX: u32 = 1 << 6;
    /// The same and TCP ports.
    pub const TCP_EX: u32 = 1 << 7;
    /// The same and UDP ports.
    pub const UDP_EX: u32 = 1 << 8;
    /// All of them.
    pub const ALL: u32 = (1 << 9) - 1;
}

/// `hash_report` of a frame without a hash (§5.1.6.4.3.4).
const REPORT_NONE: u16 = 0;

/// A frame's hash.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hash {
    /// `hash_value`.
    pub value: u32,
    /// `hash_report`: of what it was made; 0: there is none.
    pub report: u16,
}

impl Hash {
    /// Whether the frame has one.
    pub fn is_there(self) -> bool {
        self.report != REPORT_NONE
    }
}

/// A key and what is hashed with it.
#[derive(Debug, Clone)]
pub struct Hasher {
    types: u32,
    key: Toeplitz,
}

impl Hasher {
    /// Hashes these types.
    pub fn new(types: u32, key: Toeplitz) -> Self {
        Self { types, key }
    }

    /// The hash of a frame that begins with `start`.
    pub fn hash(&self, start: &[u8]) -> Hash {
        self.find(start).unwrap_or_default()
    }

    fn find(&self, start: &[u8]) -> Option<Hash> {
        let packet = Packet::parse(start)?;
        let has = |bit: u32| self.types & bit != 0;
        let (tcp, udp) = (packet.protocol == TCP, packet.protocol == UDP);
        let pick = |with_tcp: (u32, u16), with_udp: (u32, u16), addresses: (u32, u16)| {
            // (hash_report, whether ports count)
            match packet.ports {
                Some(_) if tcp && has(with_tcp.0) => Some((with_tcp.1, true)),
                Some(_) if udp && has(with_udp.0) => Some((with_udp.1, true)),
                _ if has(addresses.0) => Some((addresses.1, false)),
                _ => None,
            }
        };
        let extended = if packet.extended {
            pick((types::TCP_EX, 8), (types::UDP_EX, 9), (types::IP_EX, 7))
        } else {
            None
        };
        let (addresses, (report, with_ports)) = match extended {
            Some(picked) => {
                let source = packet.home.unwrap_or(packet.source);
                let destination = packet.routed.unwrap_or(packet.destination);
                ([source, destination], picked)
            }
            None => {
                let picked = if packet.source.len() == 4 {
                    pick((types::TCPV4, 2), (types::UDPV4, 3), (types::IPV4, 1))?
                } else {
                    pick((types::TCPV6, 5), (types::UDPV6, 6), (types::IPV6, 4))?
                };
                ([packet.source, packet.destination], picked)
            }
        };
        let mut input = [0; INPUT_BYTES];
        let mut len = 0;
        let ports = packet.ports.filter(|_| with_ports);
        for part in addresses.into_iter().chain(ports) {
            input.get_mut(len..len + part.len())?.copy_from_slice(part);
            len += part.len();
        }
        let value = self.key.hash(input.get(..len)?);
        Some(Hash { value, report })
    }
}

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
const TCP: u8 = 6;
const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// Option with the home address of a mobile node (RFC 6275 §6.3).
const HOME_ADDRESS: u8 = 201;
/// Routing header with the home address of a mobile node (RFC 6275 §6.4).
const ROUTING_TYPE_2: u8 = 2;

/// What hashes are made of.
#[derive(Debug)]
struct Packet<'a> {
    source: &'a [u8],
    destination: &'a [u8],
    protocol: u8,
    /// Both ports, where the packet is whole and has them.
    ports: Option<&'a [u8]>,
    /// Whether IPv6 extension headers were there.
    extended: bool,
    home: Option<&'a [u8]>,
    routed: Option<&'a [u8]>,
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl<'a> Packet<'a> {
    fn parse(start: &'a [u8]) -> Option<Self> {
        let mut at = 12;
        let mut kind = half(start, at)?;
        for _ in 0..2 {
            if TAGS.contains(&kind) {
                at += 4;
                kind = half(start, at)?;
            }
        }
        let ip = start.get(at + 2..)?;
        match (kind, *ip.first()? >> 4) {
            (IPV4, 4) => Self::v4(ip),
            (IPV6, 6) => Self::v6(ip),
            _ => None,
        }
    }

    fn v4(ip: &'a [u8]) -> Option<Self> {
        let header = usize::from(ip.first()? & 15) * 4;
        let protocol = *ip.get(9)?;
        // A fragment has no ports, and all of a packet's fragments are to go the same way.
        let whole = half(ip, 6)? & 0x3fff == 0 && header >= 20;
        Some(Self {
            source: ip.get(12..16)?,
            destination: ip.get(16..20)?,
            protocol,
            ports: ip
                .get(header..header + 4)
                .filter(|_| whole && matches!(protocol, TCP | UDP)),
            extended: false,
            home: None,
            routed: None,
        })
    }

    fn v6(ip: &'a [u8]) -> Option<Self> {
        let mut packet = Self {
            source: ip.get(8..24)?,
            destination: ip.get(24..40)?,
            protocol: *ip.get(6)?,
            ports: None,
            extended: false,
            home: None,
            routed: None,
        };
        // A chain that goes on behind what is looked at ends the search.
        let end = packet.extensions(ip);
        if let Some(end) = end.filter(|_| matches!(packet.protocol, TCP | UDP)) {
            packet.ports = ip.get(end..end + 4);
        }
        Some(packet)
    }

    /// Passes over extension headers (RFC 8200 §4); each takes 8 bytes at least, so that `ip` bounds the loop. The
    /// place behind them, unless ports must not count.
    fn extensions(&mut self, ip: &'a [u8]) -> Option<usize> {
        let mut at = 40;
        let mut whole = true;
        while let HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS = self.protocol {
            let kind = self.protocol;
            self.extended = true;
            let len = match kind {
                FRAGMENT => 8,
                _ => 8 + 8 * usize::from(*ip.get(at + 1)?),
            };
            self.protocol = *ip.get(at)?;
            match kind {
                // More fragments, or not the first one.
                FRAGMENT => whole &= half(ip, at + 2)? & 0xfff9 == 0,
                ROUTING if *ip.get(at + 2)? == ROUTING_TYPE_2 && len == 24 => {
                    self.routed = ip.get(at + 8..at + 24);
                }
                DESTINATION_OPTIONS => {
                    self.home = ip.get(at + 2..at + len).and_then(home).or(self.home);
                }
                _ => {}
            }
            at += len;
        }
        whole.then_some(at)
    }
}

/// The home address among options.
fn home(mut options: &[u8]) -> Option<&[u8]> {
    while let Some((kind, rest)) = options.split_first() {
        // Padding of one byte (RFC 8200 §4.2).
        if *kind == 0 {
            options = rest;
            continue;
        }
        let (len, rest) = rest.split_first()?;
        let (value, rest) = rest.split_at_checked(usize::from(*len))?;
        if *kind == HOME_ADDRESS && value.len() == 16 {
            return Some(value);
        }
        options = rest;
    }
    None
}

#[cfg(test)]
#[path = "hash_tests.rs"]
mod tests;
