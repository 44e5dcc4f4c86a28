//! Frames for tests, and a judge of frames whose arithmetic is its own: it shares no code with the device.

/// Bytes of the header in front of a frame (virtio 1.3 §5.1.6, with num_buffers).
pub const NET_HEADER: usize = 12;
/// Header flag: the checksum is to be completed.
pub const NEEDS_CSUM: u8 = 1;
/// Header flag: the checksum was verified.
pub const DATA_VALID: u8 = 2;
/// gso_type: TCP over IPv4.
pub const GSO_TCP4: u8 = 1;
/// gso_type: TCP over IPv6.
pub const GSO_TCP6: u8 = 4;

/// The header in front of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetHeader {
    /// [`NEEDS_CSUM`], [`DATA_VALID`].
    pub flags: u8,
    /// 0, [`GSO_TCP4`] or [`GSO_TCP6`].
    pub gso_type: u8,
    /// Bytes of Ethernet, IP and TCP header.
    pub hdr_len: u16,
    /// Payload bytes of a segment.
    pub gso_size: u16,
    /// Where the checksum's coverage begins.
    pub csum_start: u16,
    /// Where the checksum lies, from `csum_start`.
    pub csum_offset: u16,
    /// Receive buffers that the frame takes.
    pub num_buffers: u16,
}

impl NetHeader {
    /// As it lies in memory.
    pub fn to_bytes(self) -> [u8; NET_HEADER] {
        let mut bytes = [0; NET_HEADER];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type;
        for (at, word) in [
            (2, self.hdr_len),
            (4, self.gso_size),
            (6, self.csum_start),
            (8, self.csum_offset),
            (10, self.num_buffers),
        ] {
            bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From memory; `None` when there are fewer than 12 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
        Some(Self {
            flags: *bytes.first()?,
            gso_type: *bytes.get(1)?,
            hdr_len: half(2)?,
            gso_size: half(4)?,
            csum_start: half(6)?,
            csum_offset: half(8)?,
            num_buffers: half(10)?,
        })
    }
}

/// A frame with its header.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Packet {
    /// The header.
    pub header: NetHeader,
    /// From the destination MAC to the last payload byte.
    pub frame: Vec<u8>,
}

/// Transport protocol of a [`Flow`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// Addresses of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Destination MAC.
    pub to: [u8; 6],
    /// Source MAC.
    pub from: [u8; 6],
    /// IPv6 in place of IPv4.
    pub v6: bool,
    /// 802.1Q tag.
    pub vlan: Option<u16>,
    /// Transport.
    pub transport: Transport,
    /// Source and destination port.
    pub ports: (u16, u16),
}

impl Flow {
    /// UDP over IPv4.
    pub fn new(from: [u8; 6], to: [u8; 6]) -> Self {
        Self {
            to,
            from,
            v6: false,
            vlan: None,
            transport: Transport::Udp,
            ports: (40000, 50000),
        }
    }

    /// The same with TCP.
    pub fn tcp(self) -> Self {
        Self {
            transport: Transport::Tcp,
            ..self
        }
    }

    /// The same with IPv6.
    pub fn v6(self) -> Self {
        Self { v6: true, ..self }
    }

    /// The same with another source port.
    pub fn port(self, port: u16) -> Self {
        Self {
            ports: (port, self.ports.1),
            ..self
        }
    }

    /// Bytes of all headers.
    pub fn headers(&self) -> usize {
        self.transport_offset()
            + match self.transport {
                Transport::Tcp => 20,
                Transport::Udp => 8,
            }
    }

    fn network_offset(&self) -> usize {
        14 + if self.vlan.is_some() { 4 } else { 0 }
    }

    fn transport_offset(&self) -> usize {
        self.network_offset() + if self.v6 { 40 } else { 20 }
    }

    fn checksum_offset(&self) -> u16 {
        match self.transport {
            Transport::Tcp => 16,
            Transport::Udp => 6,
        }
    }

    /// A finished frame of `len` bytes (at least the headers), payload by `seed`.
    pub fn frame(&self, len: usize, seed: u64) -> Packet {
        let payload = payload(len.saturating_sub(self.headers()), seed);
        self.finished(seed as u32, &payload)
    }

    /// A frame with this payload and right checksums; `sequence` goes into TCP.
    pub fn finished(&self, sequence: u32, payload: &[u8]) -> Packet {
        let mut frame = self.build(sequence, payload, false);
        let at = self.transport_offset();
        let sum = !ones_sum(&frame[at..], self.pseudo_sum(frame.len() - at));
        let sum = if sum == 0 && self.transport == Transport::Udp {
            0xffff
        } else {
            sum
        };
        let field = at + usize::from(self.checksum_offset());
        frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        Packet {
            header: NetHeader {
                num_buffers: 0,
                ..NetHeader::default()
            },
            frame,
        }
    }

    /// A frame whose checksum the device has to complete.
    pub fn partial(&self, sequence: u32, payload: &[u8]) -> Packet {
        let mut frame = self.build(sequence, payload, false);
        let at = self.transport_offset();
        let sum = self.pseudo_sum(frame.len() - at);
        let field = at + usize::from(self.checksum_offset());
        frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        Packet {
            header: NetHeader {
                flags: NEEDS_CSUM,
                csum_start: at as u16,
                csum_offset: self.checksum_offset(),
                ..NetHeader::default()
            },
            frame,
        }
    }

    /// A TCP frame that the device may have to cut into segments of `segment` payload bytes.
    pub fn large(&self, sequence: u32, payload: &[u8], segment: u16) -> Packet {
        let mut packet = self.partial(sequence, payload);
        packet.header.gso_type = if self.v6 { GSO_TCP6 } else { GSO_TCP4 };
        packet.header.gso_size = segment;
        packet.header.hdr_len = self.headers() as u16;
        packet
    }

    fn build(&self, sequence: u32, payload: &[u8], _push: bool) -> Vec<u8> {
        let mut frame = Vec::with_capacity(self.headers() + payload.len());
        frame.extend_from_slice(&self.to);
        frame.extend_from_slice(&self.from);
        if let Some(tag) = self.vlan {
            frame.extend_from_slice(&[0x81, 0]);
            frame.extend_from_slice(&tag.to_be_bytes());
        }
        let transport = self.headers() - self.transport_offset() + payload.len();
        let protocol = match self.transport {
            Transport::Tcp => 6,
            Transport::Udp => 17,
        };
        if self.v6 {
            frame.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend_from_slice(&(transport as u16).to_be_bytes());
            frame.extend_from_slice(&[protocol, 64]);
            let (source, destination) = self.v6_addresses();
            frame.extend_from_slice(&source);
            frame.extend_from_slice(&destination);
        } else {
            frame.extend_from_slice(&[8, 0]);
            let mut ip = vec![0x45, 0];
            ip.extend_from_slice(&((20 + transport) as u16).to_be_bytes());
            ip.extend_from_slice(&[0x12, 0x34, 0x40, 0, 64, protocol, 0, 0]);
            ip.extend_from_slice(&[10, 0, 0, self.from[5], 10, 0, 0, self.to[5]]);
            let sum = !ones_sum(&ip, 0);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            frame.extend_from_slice(&ip);
        }
        frame.extend_from_slice(&self.ports.0.to_be_bytes());
        frame.extend_from_slice(&self.ports.1.to_be_bytes());
        match self.transport {
            Transport::Tcp => {
                frame.extend_from_slice(&sequence.to_be_bytes());
                frame.extend_from_slice(&[0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0]);
            }
            Transport::Udp => {
                frame.extend_from_slice(&(transport as u16).to_be_bytes());
                frame.extend_from_slice(&[0, 0]);
            }
        }
        frame.extend_from_slice(payload);
        frame
    }

    fn v6_addresses(&self) -> ([u8; 16], [u8; 16]) {
        let address = |mac: &[u8; 6]| {
            let mut bytes = [0; 16];
            (bytes[0], bytes[1], bytes[15]) = (0xfd, 0, mac[5]);
            bytes
        };
        (address(&self.from), address(&self.to))
    }

    /// Folded, not inverted.
    fn pseudo_sum(&self, len: usize) -> u16 {
        let protocol = match self.transport {
            Transport::Tcp => 6,
            Transport::Udp => 17,
        };
        let mut bytes = Vec::new();
        if self.v6 {
            let (source, destination) = self.v6_addresses();
            bytes.extend_from_slice(&source);
            bytes.extend_from_slice(&destination);
            bytes.extend_from_slice(&(len as u32).to_be_bytes());
            bytes.extend_from_slice(&[0, 0, 0, protocol]);
        } else {
            bytes.extend_from_slice(&[10, 0, 0, self.from[5], 10, 0, 0, self.to[5], 0, protocol]);
            bytes.extend_from_slice(&(len as u16).to_be_bytes());
        }
        ones_sum(&bytes, 0)
    }
}

/// Ones' complement sum of big-endian 16-bit words (RFC 1071), folded, not inverted.
pub fn ones_sum(bytes: &[u8], start: u16) -> u16 {
    let mut sum = u64::from(start);
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// `len` bytes that depend on `seed` and their place.
pub fn payload(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A reproducible source of numbers (xorshift64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// What the judge reads in a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// TCP sequence number, 0 with UDP.
    pub sequence: u32,
    /// Transport payload.
    pub payload: Vec<u8>,
    /// Whether the IPv4 header checksum is right (always with IPv6).
    pub network_sum: bool,
    /// Whether the transport checksum is right.
    pub transport_sum: bool,
    /// TCP flags.
    pub tcp_flags: u8,
}

/// Reads an IPv4 or IPv6 frame with TCP or UDP; the reason when it is none or its lengths disagree.
pub fn judge(frame: &[u8]) -> Result<Seen, String> {
    let half = |at: usize| -> Result<u16, String> {
        match (frame.get(at), frame.get(at + 1)) {
            (Some(a), Some(b)) => Ok(u16::from_be_bytes([*a, *b])),
            _ => Err(format!(
                "the frame of {} bytes ends before {at}",
                frame.len()
            )),
        }
    };
    let mut network = 14;
    let mut kind = half(12)?;
    if kind == 0x8100 {
        kind = half(16)?;
        network = 18;
    }
    let (transport, end, protocol, pseudo, network_sum);
    match kind {
        0x0800 => {
            let header = usize::from(*frame.get(network).ok_or("no IP header")? & 15) * 4;
            transport = network + header;
            end = network + usize::from(half(network + 2)?);
            let ip = frame.get(network..transport).ok_or("short IP header")?;
            network_sum = ones_sum(ip, 0) == 0xffff;
            protocol = ip[9];
            pseudo = [&ip[12..20], &[0, protocol]].concat();
        }
        0x86dd => {
            transport = network + 40;
            let ip = frame.get(network..transport).ok_or("short IPv6 header")?;
            end = transport + usize::from(half(network + 4)?);
            network_sum = true;
            protocol = ip[6];
            pseudo = [&ip[8..40], &[0, 0, 0, protocol]].concat();
        }
        other => return Err(format!("ethertype {other:#06x}")),
    }
    let segment = frame
        .get(transport..end)
        .ok_or_else(|| format!("IP says {end} bytes, the frame has {}", frame.len()))?;
    let sum = ones_sum(&pseudo, 0);
    let sum = ones_sum(&(segment.len() as u32).to_be_bytes(), sum);
    let transport_sum = ones_sum(segment, sum) == 0xffff;
    let (header, sequence, tcp_flags) = match protocol {
        6 => {
            let offset = segment.get(12).ok_or("short TCP header")? >> 4;
            let number = segment.get(4..8).ok_or("short TCP header")?;
            let number = u32::from_be_bytes([number[0], number[1], number[2], number[3]]);
            (usize::from(offset) * 4, number, segment[13])
        }
        17 => {
            if usize::from(half(transport + 4)?) != segment.len() {
                return Err("UDP and IP disagree on the length".into());
            }
            (8, 0, 0)
        }
        other => return Err(format!("IP protocol {other}")),
    };
    Ok(Seen {
        sequence,
        payload: segment
            .get(header..)
            .ok_or("short transport header")?
            .to_vec(),
        network_sum,
        transport_sum,
        tcp_flags,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const B: [u8; 6] = [2, 0, 0, 0, 0, 2];

    #[test]
    fn finished_frames_are_judged_right() {
        let udp = Flow::new(A, B);
        let tagged = Flow {
            vlan: Some(7),
            ..udp
        };
        for flow in [udp, udp.tcp(), udp.v6(), udp.tcp().v6(), tagged] {
            for len in [flow.headers(), 99, 1514, 9014] {
                let packet = flow.frame(len, 5);
                let seen = judge(&packet.frame).unwrap();
                assert!(seen.network_sum && seen.transport_sum, "{flow:?} {len}");
                assert_eq!(packet.frame.len(), len);
            }
        }
    }

    #[test]
    fn a_checksum_that_was_not_completed_is_judged_wrong() {
        let packet = Flow::new(A, B).tcp().partial(1, &payload(100, 1));
        assert!(!judge(&packet.frame).unwrap().transport_sum);
    }

    #[test]
    fn a_known_udp_checksum() {
        // 10.0.0.1:40000 > 10.0.0.2:50000, payload "hi": worked out by hand.
        let packet = Flow::new(A, B).finished(0, b"hi");
        let words = [0x0a00, 1, 0x0a00, 2, 17, 10, 40000, 50000, 10, 0x6869u32];
        let mut sum: u32 = words.iter().sum();
        sum = (sum & 0xffff) + (sum >> 16);
        assert_eq!(packet.frame[40..42], (!(sum as u16)).to_be_bytes());
    }
}
