//! Datagrams of the kernel's queue pair 1.

use super::bench::*;

fn gid(bench: &mut Bench, index: u32, bytes: [u8; 16]) {
    let word = |n: usize| u32::from_le_bytes(bytes[n..n + 4].try_into().unwrap());
    let words = [
        (8, index),
        (12, word(0)),
        (16, word(4)),
        (20, word(8)),
        (24, word(12)),
    ];
    bench.command((0, 14), &words).unwrap();
}

fn address(bench: &mut Bench, number: u32, index: u32, to: [u8; 16]) {
    let word = |n: usize| u32::from_le_bytes(to[n..n + 4].try_into().unwrap());
    let words = [
        (8, 5),
        (12, number),
        (20, 64 << 8 | 0x10),
        (24, index << 16),
        (36, word(0)),
        (40, word(4)),
        (44, word(8)),
        (48, word(12)),
    ];
    bench.command((0, 15), &words).unwrap();
}

fn gsi() -> Bench {
    let mut bench = Bench::new();
    bench.create_cq(1).unwrap();
    bench.create_qp(1, false).unwrap();
    for (state, mask) in [(1, 3), (2, 1), (3, 9)] {
        bench.modify(1, state, mask, 0).unwrap();
    }
    for n in 0..3 {
        bench.post_receive(1, n, DATA + 0x1000 * u64::from(n), 296, 0xffff_ff00);
    }
    bench
}

const SIGNALED: u64 = 1 << 22;

fn datagram(qpn: u32, address: u32) -> Vec<u8> {
    let mut body = words(&[0, 256, 0x8001_0000, qpn, address, 0]);
    body.extend(sge(DATA + 0x8000, 256, 0xffff_ff00));
    body
}

#[test]
fn a_datagram_arrives_behind_the_header_of_its_network() {
    let mut bench = gsi();
    let ipv4 = |last| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last];
    let local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
    gid(&mut bench, 0, local);
    gid(&mut bench, 1, ipv4(1));
    address(&mut bench, 3, 1, ipv4(2));
    address(&mut bench, 4, 0, local);
    bench.memory.write(DATA + 0x8000, &[0x77; 256]);
    let next = bench.post(1, 0, 2, SIGNALED | 1 << 56, &datagram(1, 3));
    bench.run();
    bench.post(1, next, 2, SIGNALED | 1 << 56, &datagram(1, 4));
    bench.run();
    let mut received = Vec::new();
    while let Some(entry) = bench.poll(1) {
        match entry[0] >> 8 & 0xff {
            0 => assert_eq!((entry[0], entry[4]), (2 << 16, 256)),
            _ => received.push(entry),
        }
    }
    assert_eq!(received[0], [4 << 16 | 1 << 8, 0, 1, 0, 296, 0, 0, 1]);
    assert_eq!(
        received[1],
        [4 << 16 | 1 << 8, 1, 1, 0, 296, 0, 0, 1 << 31 | 1]
    );
    let bytes = bench.memory.read(DATA, 296);
    assert_eq!(bytes[..20], [0; 20]);
    assert_eq!(bytes[20..24], [0x45, 0x10, 1, 0x34]);
    assert_eq!(bytes[28..30], [64, 17]);
    assert_eq!(bytes[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = bytes[20..40]
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]))
        .sum();
    assert_eq!(
        (sum & 0xffff) + (sum >> 16),
        0xffff,
        "the header's checksum"
    );
    assert_eq!(bytes[40..], [0x77; 256]);
    let bytes = bench.memory.read(DATA + 0x1000, 40);
    assert_eq!(bytes[..4], [0x61, 0, 0, 0]);
    assert_eq!(bytes[6..8], [17, 64]);
    assert_eq!((&bytes[8..24], &bytes[24..40]), (&local[..], &local[..]));
}

#[test]
fn an_unknown_address_or_one_of_others_is_a_bad_request() {
    for number in [9, 4] {
        let mut bench = gsi();
        address(&mut bench, 4, 0, [0; 16]);
        bench.command((0, 15), &[(8, 6), (12, 4)]).unwrap();
        bench.post(1, 0, 2, 1 << 56, &datagram(1, number));
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[0], 2 << 16 | 8);
    }
    let mut bench = gsi();
    bench.post(1, 0, 0, 0, &[0; 24]);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[0], 8, "no WRITE");
    assert_eq!(bench.command((0, 15), &[(8, 5), (12, 1024)]), Err(1));
    assert!(bench.command((0, 15), &[(8, 5), (12, 1023)]).is_ok());
    assert!(bench.command((0, 16), &[(8, 5), (12, 1023)]).is_ok());
}
