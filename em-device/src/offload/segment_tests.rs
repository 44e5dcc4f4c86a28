use super::*;
use crate::frame::FrameMeta;
use crate::offload::checksum::plain_checksum;
use proptest::prelude::*;
use vm_memory::VolatileSlice;

/// A TCP frame to be segmented.
#[derive(Debug, Clone)]
struct Sample {
    vlan: bool,
    ipv6: bool,
    /// Words of IPv4 options, or groups of 8 bytes of an IPv6 hop-by-hop header.
    ip_extra: u8,
    tcp_options: u8,
    flags: u8,
    seq: u32,
    id: u16,
    payload: Vec<u8>,
    gso_size: u16,
}

impl Sample {
    fn build(&self) -> (Vec<u8>, FrameMeta) {
        let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if self.vlan {
            f.extend([0x81, 0x00, 0x20, 0x07]);
        }
        let tcp_len = 20 + usize::from(self.tcp_options) * 4;
        if self.ipv6 {
            f.extend([0x86, 0xdd]);
            let extra = usize::from(self.ip_extra) * 8;
            let len = (extra + tcp_len + self.payload.len()) as u16;
            f.extend([0x60, 0, 0, 0]);
            f.extend(len.to_be_bytes());
            f.extend([if extra > 0 { 0 } else { 6 }, 64]);
            f.extend((0..32).map(|i| i * 7 + 1));
            if extra > 0 {
                f.extend([6, self.ip_extra - 1]);
                f.resize(f.len() + extra - 2, 0);
            }
        } else {
            f.extend([0x08, 0x00]);
            let ihl = 5 + self.ip_extra;
            let len = (usize::from(ihl) * 4 + tcp_len + self.payload.len()) as u16;
            f.extend([0x40 | ihl, 0]);
            f.extend(len.to_be_bytes());
            f.extend(self.id.to_be_bytes());
            f.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            f.resize(f.len() + usize::from(self.ip_extra) * 4, 1);
        }
        let csum_start = f.len() as u16;
        f.extend([0x12, 0x34, 0x56, 0x78]);
        f.extend(self.seq.to_be_bytes());
        f.extend([0, 0, 0, 9, ((tcp_len / 4) as u8) << 4, self.flags, 1, 0]);
        f.extend([0xde, 0xad, 0, 0]); // the checksum is whatever the driver left there
        f.resize(f.len() + tcp_len - 20, 1);
        let meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            gso_type: if self.ipv6 { 4 } else { 1 },
            hdr_len: f.len() as u16,
            gso_size: self.gso_size,
            csum_start,
            csum_offset: 16,
        };
        f.extend(&self.payload);
        (f, meta)
    }
}

fn segments(bytes: &[u8], meta: FrameMeta) -> Result<Vec<Vec<u8>>, SegmentError> {
    let mut bytes = bytes.to_vec();
    let cut = bytes.len() / 3;
    let (head, tail) = bytes.split_at_mut(cut);
    let parts = [VolatileSlice::from(head), VolatileSlice::from(tail)];
    let mut all = Vec::new();
    let count = Segmenter::new().segment(&Frame::new(meta, &parts), &mut |s| {
        all.push(s.to_vec());
        true
    })?;
    assert_eq!(count, all.len());
    Ok(all)
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(bytes.try_into().unwrap())
}

/// Checks one segment by the RFCs alone and returns (sequence number, TCP flags, IPv4 id, payload).
fn verify(s: &[u8]) -> (u32, u8, Option<u16>, Vec<u8>) {
    let mut l3 = 14;
    let mut ethertype = be16(&s[12..14]);
    if ethertype == 0x8100 {
        ethertype = be16(&s[16..18]);
        l3 = 18;
    }
    let ip = &s[l3..];
    let (tcp, mut pseudo, id) = if ethertype == 0x86dd {
        assert_eq!(usize::from(be16(&ip[4..6])), ip.len() - 40);
        let mut at = 40;
        if ip[6] == 0 {
            assert_eq!(ip[40], 6);
            at += 8 + usize::from(ip[41]) * 8;
        }
        (&ip[at..], ip[8..40].to_vec(), None)
    } else {
        assert_eq!(ethertype, 0x0800);
        assert_eq!(usize::from(be16(&ip[2..4])), ip.len());
        let header = usize::from(ip[0] & 15) * 4;
        assert_eq!(plain_checksum(&ip[..header]), 0, "IP header checksum");
        (&ip[header..], ip[12..20].to_vec(), Some(be16(&ip[4..6])))
    };
    pseudo.extend((tcp.len() as u32).to_be_bytes());
    pseudo.extend([0, 0, 0, 6]);
    pseudo.extend(tcp);
    assert_eq!(plain_checksum(&pseudo), 0, "TCP checksum");
    let data = usize::from(tcp[12] >> 4) * 4;
    let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
    (seq, tcp[13], id, tcp[data..].to_vec())
}

fn sample() -> impl Strategy<Value = Sample> {
    (
        any::<(bool, bool, u8, u32, u16)>(),
        (0u8..8, 0u8..=10),
        prop::collection::vec(any::<u8>(), 0..20_000),
        32u16..9000,
    )
        .prop_map(
            |((vlan, ipv6, flags, seq, id), (ip_extra, tcp_options), payload, gso_size)| Sample {
                vlan,
                ipv6,
                ip_extra,
                tcp_options,
                flags,
                seq,
                id,
                payload,
                gso_size,
            },
        )
}

proptest! {
    #[test]
    fn segments_carry_the_whole_payload_in_good_packets(sample in sample()) {
        let (bytes, meta) = sample.build();
        prop_assert_eq!(meta.check(bytes.len()), Ok(()));
        let all = segments(&bytes, meta).unwrap();
        let size = usize::from(sample.gso_size);
        prop_assert_eq!(all.len(), sample.payload.len().div_ceil(size).max(1));
        let mut joined: Vec<u8> = Vec::new();
        for (i, segment) in all.iter().enumerate() {
            let (seq, flags, id, payload) = verify(segment);
            prop_assert_eq!(seq, sample.seq.wrapping_add(joined.len() as u32));
            if !sample.ipv6 {
                prop_assert_eq!(id, Some(sample.id.wrapping_add(i as u16)));
            }
            let last = i + 1 == all.len();
            prop_assert!(last || payload.len() == size);
            let mut expected = sample.flags;
            if !last {
                expected &= !0x09;
            }
            if i > 0 {
                expected &= !0x80;
            }
            prop_assert_eq!(flags, expected);
            joined.extend(payload);
        }
        prop_assert_eq!(joined, sample.payload);
    }

    #[test]
    fn damaged_headers_never_panic_and_never_grow(
        sample in sample(),
        damage in prop::collection::vec((0usize..120, any::<u8>()), 1..6),
        cut in 0usize..200,
        csum_start in prop::option::of(any::<u16>()),
    ) {
        let (mut bytes, mut meta) = sample.build();
        bytes.truncate(bytes.len().saturating_sub(cut));
        for (at, value) in damage {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        if let Some(start) = csum_start {
            meta.csum_start = start;
        }
        if let Ok(all) = segments(&bytes, meta) {
            let size = usize::from(meta.gso_size);
            prop_assert!(all.iter().all(|s| s.len() <= bytes.len().min(MAX_HEADERS + size)));
            prop_assert!(all.len() <= bytes.len().div_ceil(size));
        }
    }
}

fn plain(payload: usize) -> Sample {
    Sample {
        vlan: false,
        ipv6: false,
        ip_extra: 0,
        tcp_options: 0,
        flags: 0x10,
        seq: 1,
        id: 1,
        payload: vec![7; payload],
        gso_size: 1460,
    }
}

#[test]
fn a_sink_that_stops_gets_no_more() {
    let (mut bytes, meta) = plain(10_000).build();
    let parts = [VolatileSlice::from(&mut bytes[..])];
    let mut seen = 0;
    let taken = Segmenter::new().segment(&Frame::new(meta, &parts), &mut |_| {
        seen += 1;
        seen <= 3
    });
    assert_eq!((taken, seen), (Ok(3), 4));
}

#[test]
fn bytes_behind_the_ip_packet_are_left_out() {
    let (mut bytes, meta) = plain(3000).build();
    bytes.extend([0xaa; 11]);
    let all = segments(&bytes, meta).unwrap();
    let payload: usize = all.iter().map(|s| verify(s).3.len()).sum();
    assert_eq!(payload, 3000);
}

#[test]
fn an_ip_length_of_zero_means_the_whole_frame() {
    let (mut bytes, meta) = plain(3000).build();
    bytes[16..18].fill(0);
    let all = segments(&bytes, meta).unwrap();
    assert_eq!(all.iter().map(|s| verify(s).3.len()).sum::<usize>(), 3000);
}

#[test]
fn what_is_no_tcp_packet_of_the_said_kind_is_refused() {
    let refused = |change: fn(&mut Vec<u8>, &mut FrameMeta)| {
        let (mut bytes, mut meta) = plain(3000).build();
        change(&mut bytes, &mut meta);
        segments(&bytes, meta).unwrap_err()
    };
    assert_eq!(
        refused(|_, m| m.gso_type = 4),
        SegmentError::OtherProtocol(0x800)
    );
    assert_eq!(refused(|b, _| b[14] = 0x65), SegmentError::BadIpHeader);
    assert_eq!(refused(|b, _| b[14] = 0x44), SegmentError::BadIpHeader);
    assert_eq!(refused(|b, _| b[20] = 0x20), SegmentError::Fragment);
    assert_eq!(refused(|b, _| b[23] = 17), SegmentError::OtherTransport(17));
    assert_eq!(refused(|b, _| b[46] = 0x40), SegmentError::ShortTcp(16));
    assert_eq!(refused(|b, _| b.truncate(53)), SegmentError::Truncated);
    assert_eq!(refused(|b, _| b.truncate(13)), SegmentError::Truncated);
    assert_eq!(refused(|_, m| m.gso_size = 0), SegmentError::NoSize);
    assert_eq!(
        refused(|_, m| m.csum_start = 38),
        SegmentError::TransportElsewhere {
            found: 34,
            said: 38
        }
    );
}

/// A UDP frame to be segmented, over either version and behind extension headers.
fn udp(ipv6: bool, extra: u8, payload: &[u8], gso_size: u16) -> (Vec<u8>, FrameMeta) {
    let sample = Sample {
        vlan: extra % 2 == 1,
        ipv6,
        ip_extra: extra,
        tcp_options: 0,
        flags: 0,
        seq: 0,
        id: 0xfffe,
        payload: Vec::new(),
        gso_size,
    };
    let (mut f, meta) = sample.build();
    let at = usize::from(meta.csum_start);
    f.truncate(at);
    let ip = if extra % 2 == 1 { 18 } else { 14 };
    // Where the protocol is said.
    let next = match (ipv6, extra) {
        (false, _) => ip + 9,
        (true, 0) => ip + 6,
        (true, _) => ip + 40,
    };
    f[next] = 17;
    let len = (8 + payload.len()) as u16;
    let (field, from) = if ipv6 {
        (ip + 4, ip + 40)
    } else {
        (ip + 2, ip)
    };
    let whole = (at - from) as u16 + len;
    f[field..field + 2].copy_from_slice(&whole.to_be_bytes());
    f.extend([0x12, 0x34, 0x56, 0x78]);
    f.extend(len.to_be_bytes());
    f.extend([0xde, 0xad]);
    let meta = FrameMeta {
        gso_type: FrameMeta::GSO_UDP,
        csum_offset: 6,
        hdr_len: f.len() as u16,
        ..meta
    };
    f.extend(payload);
    (f, meta)
}

#[test]
fn udp_becomes_datagrams_with_their_own_lengths_and_checksums() {
    let payload: Vec<u8> = (0..5000u32).map(|n| ((n * 31) >> 3) as u8).collect();
    for (ipv6, extra) in [(false, 0), (false, 1), (true, 0), (true, 1), (true, 2)] {
        let (bytes, meta) = udp(ipv6, extra, &payload, 1200);
        let all = segments(&bytes, meta).unwrap();
        assert_eq!(all.len(), 5);
        let (at, ip) = (
            usize::from(meta.csum_start),
            14 + 4 * usize::from(extra % 2),
        );
        let mut joined: Vec<u8> = Vec::new();
        for (n, s) in all.iter().enumerate() {
            let datagram = &s[at..];
            assert_eq!(usize::from(be16(&datagram[4..6])), datagram.len());
            let addresses = if ipv6 {
                ip + 8..ip + 40
            } else {
                ip + 12..ip + 20
            };
            let mut pseudo = s[addresses].to_vec();
            pseudo.extend((datagram.len() as u32).to_be_bytes());
            pseudo.extend([0, 0, 0, 17]);
            pseudo.extend(datagram);
            assert_eq!(plain_checksum(&pseudo), 0, "datagram {n}");
            if ipv6 {
                assert_eq!(usize::from(be16(&s[ip + 4..ip + 6])), s.len() - ip - 40);
            } else {
                assert_eq!(usize::from(be16(&s[ip + 2..ip + 4])), s.len() - ip);
                assert_eq!(plain_checksum(&s[ip..at]), 0, "IP header {n}");
                assert_eq!(be16(&s[ip + 4..ip + 6]), 0xfffeu16.wrapping_add(n as u16));
            }
            joined.extend(&datagram[8..]);
        }
        assert_eq!(joined, payload);
        // What is TCP's is not taken for UDP.
        let tcp = FrameMeta {
            gso_type: if ipv6 { 4 } else { 1 },
            csum_offset: 16,
            ..meta
        };
        assert!(matches!(
            segments(&bytes, tcp),
            Err(SegmentError::OtherTransport(17))
        ));
    }
}
