//! Frame headers that lie about checksums and segments.

use super::{Seen, case, run};
use crate::fixture::{Pair, flow, receive_until};
use distdpu_tests::packet::{NetHeader, Packet, Random, payload};
use distdpu_tests::virtio_net::features;
use distdpu_tests::virtio_net::{Setup, VirtioNet};

#[test]
fn malformed_offload_requests() {
    fn send(a: &mut VirtioNet, header: NetHeader, frame: Vec<u8>) {
        a.send(&Packet { header, frame }).unwrap();
    }
    fn tcp() -> Packet {
        flow(0, 1).tcp().large(1000, &payload(5000, 1), 1448)
    }
    use Seen::Returned;
    let cases = [
        case("a checksum that starts behind the frame", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            (header.gso_type, header.csum_start) = (0, 60_000);
            send(a, header, frame);
        }),
        case("a checksum field behind the frame", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            (header.gso_type, header.csum_offset) = (0, 0xffff);
            send(a, header, frame);
        }),
        case("a checksum field over the frame's end", Returned, |a| {
            let header = NetHeader {
                flags: 1,
                csum_start: 99,
                csum_offset: 0,
                ..NetHeader::default()
            };
            send(a, header, flow(0, 1).frame(100, 1).frame);
        }),
        case("segments of no bytes", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            header.gso_size = 0;
            send(a, header, frame);
        }),
        case("segments of one byte out of 60000", Returned, |a| {
            let mut packet = flow(0, 1).tcp().large(1000, &payload(60000, 1), 1);
            packet.header.gso_size = 1;
            a.send(&packet).unwrap();
        }),
        case("a header length beyond the frame", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            header.hdr_len = 0xffff;
            send(a, header, frame);
        }),
        case("segmentation without a checksum", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            header.flags = 0;
            send(a, header, frame);
        }),
        case("an unknown kind of segmentation", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            header.gso_type = 0x7f;
            send(a, header, frame);
        }),
        case("UDP fragmentation, which was not offered", Returned, |a| {
            let Packet { mut header, frame } = tcp();
            header.gso_type = 3;
            send(a, header, frame);
        }),
        case("TCP segmentation of a UDP frame", Returned, |a| {
            let Packet { header, .. } = tcp();
            send(a, header, flow(0, 1).frame(5000, 1).frame);
        }),
        case(
            "TCP over IPv6 segmentation of an IPv4 frame",
            Returned,
            |a| {
                let Packet { mut header, frame } = tcp();
                header.gso_type = 4;
                send(a, header, frame);
            },
        ),
        case(
            "a TCP header that claims 60 bytes in a frame of 60",
            Returned,
            |a| {
                let Packet { header, mut frame } = tcp();
                frame.truncate(60);
                frame[46] = 0xf0;
                send(a, header, frame);
            },
        ),
        case("an IP header that claims 60 bytes", Returned, |a| {
            let Packet { header, mut frame } = tcp();
            frame[14] = 0x4f;
            send(a, header, frame);
        }),
    ];
    run(&cases, |a| a.transmit_rings[0].used_index().unwrap());
}

#[test]
fn malformed_offload_requests_towards_a_plain_receiver() {
    // The same lies, when the device itself has to do the work.
    let mut pair = Pair::new();
    let plain = Setup {
        features: features::PLAIN,
        ..Setup::default()
    };
    pair.start(Setup::default(), plain);
    let mut random = Random(0x0ff1_0ad5);
    for _ in 0..2000 {
        let len = 1 + random.below(3000) as usize;
        let base = if random.below(2) == 0 {
            flow(0, 1).tcp()
        } else {
            flow(0, 1).v6().tcp()
        };
        let mut packet = base.large(1000, &payload(len, 1), 536);
        let h = &mut packet.header;
        let lie = random.next();
        match random.below(8) {
            0 => h.gso_size = lie as u16,
            1 => h.csum_start = lie as u16 & 0x7f,
            2 => h.csum_offset = lie as u16 & 0x7f,
            3 => h.hdr_len = lie as u16,
            4 => h.gso_type = lie as u8,
            5 => h.flags = lie as u8,
            6 => packet.frame[(lie >> 32) as usize % 60] ^= lie as u8,
            _ => packet.frame.truncate(14 + (lie as usize % len)),
        }
        pair.a.send(&packet).unwrap();
        while pair.b.try_receive(0).unwrap().is_some() {}
    }
    pair.a.drain(0).unwrap();
    let marker = flow(0, 1).frame(333, 0xfeed);
    pair.a.send(&marker).unwrap();
    receive_until(&mut pair.b, &marker);
    pair.works();
}
