use super::*;

/// Key, addresses, ports and hashes of the verification suite that operating systems publish for receive-side scaling.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Source, destination, hash of addresses, hash with ports.
type Vector = ((&'static str, u16), (&'static str, u16), u32, u32);

const V4: [Vector; 5] = [
    (
        ("66.9.149.187", 2794),
        ("161.142.100.80", 1766),
        0x323e_8fc2,
        0x51cc_c178,
    ),
    (
        ("199.92.111.2", 14230),
        ("65.69.140.83", 4739),
        0xd718_262a,
        0xc626_b0ea,
    ),
    (
        ("24.19.198.95", 12898),
        ("12.22.207.184", 38024),
        0xd2d0_a5de,
        0x5c2b_394a,
    ),
    (
        ("38.27.205.30", 48228),
        ("209.142.163.6", 2217),
        0x8298_9176,
        0xafc7_327f,
    ),
    (
        ("153.39.163.191", 44251),
        ("202.188.127.2", 1303),
        0x5d18_09c5,
        0x10e8_28a2,
    ),
];

const V6: [Vector; 3] = [
    (
        ("3ffe:2501:200:1fff::7", 2794),
        ("3ffe:2501:200:3::1", 1766),
        0x2cc1_8cd5,
        0x4020_7d3d,
    ),
    (
        ("3ffe:501:8::260:97ff:fe40:efab", 14230),
        ("ff02::1", 4739),
        0x0f0c_461c,
        0xdde5_1bbf,
    ),
    (
        ("3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251),
        ("fe80::200:f8ff:fe21:67cf", 38024),
        0x4b61_e985,
        0x02d1_feef,
    ),
];

fn address(text: &str) -> Vec<u8> {
    match text.parse().unwrap() {
        std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
        std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// A frame with IPv6 extension headers in between: (kind, its bytes from the second on).
fn frame(vector: &Vector, protocol: u8, extensions: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let ((source, from), (destination, to), ..) = vector;
    let (source, destination) = (address(source), address(destination));
    let mut frame = vec![2; 12];
    if source.len() == 4 {
        frame.extend([8, 0, 0x45, 0, 0, 60, 0, 0, 0, 0, 64, protocol, 0, 0]);
        frame.extend([source, destination].concat());
    } else {
        let kinds = extensions.iter().map(|(kind, _)| *kind);
        let mut kinds = kinds.chain([protocol]);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 60, kinds.next().unwrap(), 64]);
        frame.extend([source, destination].concat());
        for ((_, rest), next) in extensions.iter().zip(kinds) {
            frame.push(next);
            frame.extend(rest);
        }
    }
    frame.extend(from.to_be_bytes());
    frame.extend(to.to_be_bytes());
    frame.extend([0; 16]);
    frame
}

fn hash(types: u32, frame: &[u8]) -> (u32, u16) {
    let hash = Hasher::new(types, Toeplitz::new(&KEY)).hash(frame);
    (hash.value, hash.report)
}

#[test]
fn every_type_without_extensions_gives_the_published_hash_and_its_report() {
    for vector in &V4 {
        let (tcp, udp) = (frame(vector, TCP, &[]), frame(vector, UDP, &[]));
        for types in [types::ALL, types::ALL & !types::IPV4] {
            assert_eq!(hash(types, &tcp), (vector.3, 2));
            assert_eq!(hash(types, &udp), (vector.3, 3));
        }
        assert_eq!(hash(types::IPV4, &tcp), (vector.2, 1));
        assert_eq!(hash(types::IPV4 | types::TCPV4, &udp), (vector.2, 1));
        assert_eq!(
            hash(types::ALL, &frame(vector, 1, &[])),
            (vector.2, 1),
            "ICMP"
        );
        assert_eq!(
            hash(types::ALL & !types::IPV4 & !types::TCPV4, &tcp),
            (0, 0)
        );
    }
    for vector in &V6 {
        let (tcp, udp) = (frame(vector, TCP, &[]), frame(vector, UDP, &[]));
        assert_eq!(hash(types::ALL, &tcp), (vector.3, 5));
        assert_eq!(hash(types::ALL, &udp), (vector.3, 6));
        assert_eq!(hash(types::IPV6 | types::UDPV6, &tcp), (vector.2, 4));
        let extended = types::IP_EX | types::TCP_EX | types::UDP_EX;
        assert_eq!(
            hash(extended, &tcp),
            (0, 0),
            "there are no extension headers"
        );
    }
}

#[test]
fn addresses_in_extension_headers_take_the_place_of_those_in_the_header() {
    // The vector's addresses lie in the extension headers, others in the header.
    for vector in &V6 {
        let mut option = vec![2, 1, 0, HOME_ADDRESS, 16];
        option.extend(address(vector.0.0));
        option.extend([0, 0]);
        assert_eq!(option.len(), 23);
        let mut routing = vec![2, ROUTING_TYPE_2, 1, 0, 0, 0, 0];
        routing.extend(address(vector.1.0));
        let mut other = *vector;
        (other.0.0, other.1.0) = ("fd00::1", "fd00::2");
        let extensions = [
            (HOP_BY_HOP, vec![0; 7]),
            (ROUTING, routing),
            (DESTINATION_OPTIONS, option),
        ];
        let (tcp, udp) = (
            frame(&other, TCP, &extensions),
            frame(&other, UDP, &extensions),
        );
        assert_eq!(hash(types::ALL, &tcp), (vector.3, 8));
        assert_eq!(hash(types::ALL, &udp), (vector.3, 9));
        assert_eq!(hash(types::IP_EX, &udp), (vector.2, 7));
        // Without the EX types: as if there were no extension headers.
        let plain = frame(&other, TCP, &[]);
        let types = types::IPV6 | types::TCPV6;
        assert_eq!(hash(types, &tcp), hash(types, &plain));
        // Extension headers without addresses: those of the header.
        let only = [(HOP_BY_HOP, vec![0; 7])];
        assert_eq!(hash(types::ALL, &frame(vector, TCP, &only)), (vector.3, 8));
    }
}

#[test]
fn fragments_have_no_ports() {
    let mut v4 = frame(&V4[0], TCP, &[]);
    v4[20] = 0x20;
    assert_eq!(hash(types::ALL, &v4), (V4[0].2, 1));
    assert_eq!(hash(types::TCPV4, &v4), (0, 0));
    let fragment = |offset: u8| [(FRAGMENT, vec![0, 0, offset, 0, 0, 0, 7])];
    let first = frame(&V6[0], UDP, &fragment(1));
    assert_eq!(hash(types::ALL, &first), (V6[0].2, 7));
    assert_eq!(hash(types::ALL & !types::IP_EX, &first), (V6[0].2, 4));
    let whole = frame(&V6[0], UDP, &fragment(0));
    assert_eq!(hash(types::ALL, &whole), (V6[0].3, 9));
}

#[test]
fn tags_are_passed_over_and_frames_of_any_length_are_survived() {
    let mut tagged = frame(&V4[1], TCP, &[]);
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    assert_eq!(hash(types::ALL, &tagged), (V4[1].3, 2));
    let mut option = vec![2, HOME_ADDRESS, 16];
    option.extend([7; 20]);
    let all = [
        (ROUTING, vec![2, 2, 1, 0, 0, 0, 0, 1, 2, 3]),
        (DESTINATION_OPTIONS, option),
    ];
    for whole in [tagged, frame(&V6[0], TCP, &all), vec![0xff; 300]] {
        for len in 0..whole.len() {
            hash(types::ALL, &whole[..len]);
        }
    }
}
