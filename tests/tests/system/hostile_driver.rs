//! Drivers that break the specification: named cases, one table. After each the driver sees what the case
//! says, the peer never noticed, and a reset brings the function back.

use crate::fixture::{Pair, flow, receive_until};
use distdpu_tests::packet::{NetHeader, Packet, payload};
use distdpu_tests::ring::{INDIRECT, NEXT, WRITE};
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::features::{self, LINUX, common, status};
use distdpu_tests::virtio_net::{Setup, VirtioNet};
use distdpu_tests::wire;

/// What the driver sees.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Seen {
    /// The chain comes back in the used ring.
    Returned,
    /// The chain comes back, or the device asks for a reset: the ring itself is broken.
    ReturnedOrNeedsReset,
    /// The device asks for a reset.
    NeedsReset,
    /// Nothing that can be told from outside.
    Nothing,
}

type Act = fn(&mut VirtioNet);

struct Case {
    name: &'static str,
    act: Act,
    seen: Seen,
    features: u64,
}

fn case(name: &'static str, seen: Seen, act: Act) -> Case {
    Case {
        name,
        act,
        seen,
        features: LINUX,
    }
}

/// Offers head 0 of the transmit queue, which the case has written, and kicks.
fn offer(a: &mut VirtioNet) {
    a.transmit_rings[0].offer(0).unwrap();
    a.notify(1).unwrap();
}

fn run(cases: &[Case], queue: impl Fn(&mut VirtioNet) -> u16) {
    let mut pair = Pair::new();
    pair.b.start(Setup::default()).unwrap();
    for case in cases {
        let setup = Setup {
            features: case.features,
            ..Setup::default()
        };
        pair.a
            .start(setup)
            .unwrap_or_else(|e| panic!("start before `{}`: {e}", case.name));
        let before = queue(&mut pair.a);
        (case.act)(&mut pair.a);
        if case.seen != Seen::Nothing {
            let wanted = format!("{:?} after `{}`", case.seen, case.name);
            wait_for(&wanted, SOON, || {
                let returned = queue(&mut pair.a) != before;
                let asks = pair.a.status().unwrap() & status::NEEDS_RESET != 0;
                match case.seen {
                    Seen::Returned => returned,
                    Seen::NeedsReset => asks,
                    _ => returned || asks,
                }
                .then_some(())
            })
            .unwrap();
        }
        the_peer_lives(&mut pair.b, case.name);
        pair.a
            .start(Setup::default())
            .unwrap_or_else(|e| panic!("start after `{}`: {e}", case.name));
        let marker = flow(1, 0).frame(333, 0xfeed);
        pair.b
            .send(&marker)
            .unwrap_or_else(|e| panic!("peer after `{}`: {e}", case.name));
        receive_until(&mut pair.a, &marker);
        let marker = flow(0, 1).frame(334, 0xfeed);
        pair.a
            .send(&marker)
            .unwrap_or_else(|e| panic!("after `{}`: {e}", case.name));
        receive_until(&mut pair.b, &marker);
    }
}

fn the_peer_lives(b: &mut VirtioNet, name: &str) {
    let status = b.status().unwrap();
    assert_eq!(status & status::NEEDS_RESET, 0, "the peer after `{name}`");
    assert!(b.link_up().unwrap(), "the peer's link after `{name}`");
    while let Ok((_, packet)) = b.receive_within(std::time::Duration::from_millis(1)) {
        // Whatever leaves the hostile guest must be a frame that fits the wire.
        assert!(
            packet.frame.len() >= 14 && packet.frame.len() <= 65550,
            "`{name}`"
        );
    }
}

#[test]
fn malformed_transmit_chains() {
    use Seen::{NeedsReset, Returned, ReturnedOrNeedsReset};
    let cases = [
        case(
            "a descriptor that names itself as next",
            ReturnedOrNeedsReset,
            |a| {
                let at = a.memory.end() - 8192;
                a.transmit_rings[0]
                    .write_descriptor(0, (at, 64), NEXT, 0)
                    .unwrap();
                offer(a);
            },
        ),
        case("a loop of three", ReturnedOrNeedsReset, |a| {
            let at = a.memory.end() - 8192;
            for n in 0..3 {
                a.transmit_rings[0]
                    .write_descriptor(n, (at, 64), NEXT, (n + 1) % 3)
                    .unwrap();
            }
            offer(a);
        }),
        case("a next beyond the table", ReturnedOrNeedsReset, |a| {
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor(0, (at, 64), NEXT, 0x7000)
                .unwrap();
            offer(a);
        }),
        case("a head beyond the table", NeedsReset, |a| {
            a.transmit_rings[0].offer(0x7fff).unwrap();
            a.notify(1).unwrap();
        }),
        case("an address that wraps", Returned, |a| {
            let at = (0xffff_ffff_ffff_ff00, 512);
            a.transmit_rings[0].write_descriptor(0, at, 0, 0).unwrap();
            offer(a);
        }),
        case("an address that is not mapped", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (0x70_0000_0000, 512), 0, 0)
                .unwrap();
            offer(a);
        }),
        case("a buffer that leaves the memory", Returned, |a| {
            let at = (a.memory.end() - 100, 512);
            a.transmit_rings[0].write_descriptor(0, at, 0, 0).unwrap();
            offer(a);
        }),
        case("a buffer of 4 GiB - 1", Returned, |a| {
            let at = (a.memory.first(), u32::MAX);
            a.transmit_rings[0].write_descriptor(0, at, 0, 0).unwrap();
            offer(a);
        }),
        case("an empty buffer", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 0), 0, 0)
                .unwrap();
            offer(a);
        }),
        case("a writable buffer", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 600), WRITE, 0)
                .unwrap();
            offer(a);
        }),
        case("a short header", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 5), 0, 0)
                .unwrap();
            offer(a);
        }),
        case("a header without a frame", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 12), 0, 0)
                .unwrap();
            offer(a);
        }),
        case("a frame of 13 bytes", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 25), 0, 0)
                .unwrap();
            offer(a);
        }),
        case("a frame of 1 MiB", Returned, |a| {
            let at = (a.memory.first() + 4096, 1 << 20);
            a.transmit_rings[0].write_descriptor(0, at, 0, 0).unwrap();
            offer(a);
        }),
        case("flags that do not exist", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (a.memory.end() - 8192, 100), 0xfff0, 0)
                .unwrap();
            offer(a);
        }),
    ];
    run(&cases, |a| a.transmit_rings[0].used_index().unwrap());
}

#[test]
fn malformed_indirect_tables() {
    use Seen::ReturnedOrNeedsReset;
    fn table(a: &mut VirtioNet, len: u32) -> u64 {
        let table = a.transmit_rings[0].table_of(0);
        a.transmit_rings[0]
            .write_descriptor(0, (table, len), INDIRECT, 0)
            .unwrap();
        table
    }
    let mut cases = vec![
        case("an indirect table of no bytes", ReturnedOrNeedsReset, |a| {
            table(a, 0);
            offer(a);
        }),
        case("an indirect table of 17 bytes", ReturnedOrNeedsReset, |a| {
            let t = table(a, 17);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), 0, 0)
                .unwrap();
            offer(a);
        }),
        case(
            "an indirect table of 65536 entries, all in a chain",
            ReturnedOrNeedsReset,
            |a| {
                let t = a.memory.allocate(1 << 20, 16).unwrap();
                let at = a.memory.end() - 8192;
                for n in 0..=u16::MAX {
                    let next = n.wrapping_add(1);
                    a.transmit_rings[0]
                        .write_descriptor_at(t, n, (at, 1), NEXT, next)
                        .unwrap();
                }
                a.transmit_rings[0]
                    .write_descriptor(0, (t, 1 << 20), INDIRECT, 0)
                    .unwrap();
                offer(a);
            },
        ),
        case(
            "an indirect table in an indirect table",
            ReturnedOrNeedsReset,
            |a| {
                let t = table(a, 32);
                a.transmit_rings[0]
                    .write_descriptor_at(t, 0, (t, 32), INDIRECT, 0)
                    .unwrap();
                offer(a);
            },
        ),
        case(
            "a next beyond the indirect table",
            ReturnedOrNeedsReset,
            |a| {
                let t = table(a, 32);
                let at = a.memory.end() - 8192;
                a.transmit_rings[0]
                    .write_descriptor_at(t, 0, (at, 100), NEXT, 9)
                    .unwrap();
                offer(a);
            },
        ),
        case("a loop in an indirect table", ReturnedOrNeedsReset, |a| {
            let t = table(a, 32);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), NEXT, 1)
                .unwrap();
            a.transmit_rings[0]
                .write_descriptor_at(t, 1, (at, 100), NEXT, 0)
                .unwrap();
            offer(a);
        }),
        case("INDIRECT and NEXT together", ReturnedOrNeedsReset, |a| {
            let t = table(a, 32);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor(0, (t, 32), INDIRECT | NEXT, 0)
                .unwrap();
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), 0, 0)
                .unwrap();
            offer(a);
        }),
        case(
            "an indirect table outside the memory",
            ReturnedOrNeedsReset,
            |a| {
                a.transmit_rings[0]
                    .write_descriptor(0, (0x70_0000_0000, 32), INDIRECT, 0)
                    .unwrap();
                offer(a);
            },
        ),
        case(
            "an indirect table whose address wraps",
            ReturnedOrNeedsReset,
            |a| {
                a.transmit_rings[0]
                    .write_descriptor(0, (u64::MAX - 15, 64), INDIRECT, 0)
                    .unwrap();
                offer(a);
            },
        ),
    ];
    cases.push(Case {
        features: LINUX & !features::INDIRECT,
        ..case(
            "an indirect table that was not negotiated",
            ReturnedOrNeedsReset,
            |a| {
                let t = table(a, 16);
                let at = a.memory.end() - 8192;
                a.transmit_rings[0]
                    .write_descriptor_at(t, 0, (at, 100), 0, 0)
                    .unwrap();
                offer(a);
            },
        )
    });
    run(&cases, |a| a.transmit_rings[0].used_index().unwrap());
}

#[test]
fn available_indices_that_jump() {
    use Seen::{NeedsReset, Nothing};
    let cases = [
        case("the available index 1000 ahead", NeedsReset, |a| {
            a.transmit_rings[0].set_available_index(1000).unwrap();
            a.notify(1).unwrap();
        }),
        case("the available index one back", NeedsReset, |a| {
            a.send(&flow(0, 1).frame(100, 1)).unwrap();
            a.drain(0).unwrap();
            a.transmit_rings[0].set_available_index(0).unwrap();
            a.notify(1).unwrap();
        }),
        case("the receive queue's index 1000 ahead", NeedsReset, |a| {
            a.receive_rings[0].set_available_index(1000).unwrap();
            a.notify(0).unwrap();
        }),
        case(
            "the available index over all of the ring, the same head in each slot",
            Nothing,
            |a| {
                let at = a.memory.end() - 8192;
                a.transmit_rings[0]
                    .write_descriptor(0, (at, 100), 0, 0)
                    .unwrap();
                for _ in 0..a.transmit_rings[0].size {
                    a.transmit_rings[0].offer(0).unwrap();
                }
                a.notify(1).unwrap();
            },
        ),
        case("ten thousand kicks without anything", Nothing, |a| {
            for n in 0..10_000u16 {
                a.notify(n % 3).unwrap();
            }
        }),
    ];
    run(&cases, |a| a.transmit_rings[0].used_index().unwrap());
}

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
    let mut random = distdpu_tests::packet::Random(0x0ff1_0ad5);
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

#[test]
fn malformed_receive_chains() {
    use Seen::{Nothing, ReturnedOrNeedsReset};
    /// A running receive queue whose next buffer is the case's: nothing was filled before.
    fn with(a: &mut VirtioNet, buffer: (u64, u32), flags: u16, next: u16) {
        let setup = Setup {
            fill: false,
            ..Setup::default()
        };
        a.start(setup).unwrap();
        a.receive_rings[0]
            .write_descriptor(0, buffer, flags, next)
            .unwrap();
        a.receive_rings[0].offer(0).unwrap();
        a.notify(0).unwrap();
    }
    let cases: [(&str, Seen, Act); 7] = [
        ("a readable receive buffer", ReturnedOrNeedsReset, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 2048), 0, 0);
        }),
        (
            "a receive buffer smaller than a header",
            ReturnedOrNeedsReset,
            |a| {
                let at = a.memory.end() - 8192;
                with(a, (at, 5), WRITE, 0);
            },
        ),
        ("a receive buffer of no bytes", ReturnedOrNeedsReset, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 0), WRITE, 0);
        }),
        (
            "a receive buffer outside the memory",
            ReturnedOrNeedsReset,
            |a| with(a, (0x70_0000_0000, 2048), WRITE, 0),
        ),
        ("a receive buffer that wraps", ReturnedOrNeedsReset, |a| {
            with(a, (u64::MAX - 100, 2048), WRITE, 0)
        }),
        ("a loop of receive descriptors", ReturnedOrNeedsReset, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 64), WRITE | NEXT, 0);
        }),
        ("no receive buffer at all", Nothing, |a| {
            a.start(Setup {
                fill: false,
                ..Setup::default()
            })
            .unwrap();
        }),
    ];
    let mut pair = Pair::new();
    pair.b.start(Setup::default()).unwrap();
    for (name, seen, act) in cases {
        act(&mut pair.a);
        pair.b.send(&flow(1, 0).frame(500, 1)).unwrap();
        if seen != Nothing {
            wait_for(name, SOON, || {
                let returned = pair.a.receive_rings[0].used_index().unwrap() != 0;
                (returned || pair.a.status().unwrap() & status::NEEDS_RESET != 0).then_some(())
            })
            .unwrap();
        }
        the_peer_lives(&mut pair.b, name);
        pair.a.start(Setup::default()).unwrap();
        let marker = flow(1, 0).frame(333, 0xfeed);
        pair.b.send(&marker).unwrap();
        receive_until(&mut pair.a, &marker);
    }
    pair.works();
}

#[test]
fn registers_written_out_of_turn() {
    use Seen::Nothing;
    fn select(a: &mut VirtioNet, queue: u16) {
        a.write_common(common::QUEUE_SELECT, &queue.to_le_bytes())
            .unwrap();
    }
    let cases = [
        case("every field of queue 65535", Nothing, |a| {
            select(a, 0xffff);
            assert_eq!(
                a.read_common16(common::QUEUE_SIZE).unwrap(),
                0,
                "virtio 1.3 §4.1.4.3.1"
            );
            for offset in (common::QUEUE_SIZE..0x40).step_by(2) {
                a.read_common16(offset).unwrap();
                a.write_common(offset, &[0xff; 2]).unwrap();
            }
        }),
        case("the first queue that does not exist", Nothing, |a| {
            select(a, 3);
            assert_eq!(a.read_common16(common::QUEUE_SIZE).unwrap(), 0);
            a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            a.notify(3).unwrap();
        }),
        case("a vector that does not exist", Nothing, |a| {
            select(a, 0);
            a.write_common(common::QUEUE_VECTOR, &0x7000u16.to_le_bytes())
                .unwrap();
            assert_eq!(
                a.read_common16(common::QUEUE_VECTOR).unwrap(),
                0xffff,
                "virtio 1.3 §4.1.5.1.2.1"
            );
            a.write_common(common::CONFIG_VECTOR, &0x7000u16.to_le_bytes())
                .unwrap();
            assert_eq!(a.read_common16(common::CONFIG_VECTOR).unwrap(), 0xffff);
        }),
        case("queue sizes that are none", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for size in [0u16, 3, 257, 0x8000, 0xffff] {
                select(a, 0);
                a.write_common(common::QUEUE_SIZE, &size.to_le_bytes())
                    .unwrap();
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            a.notify(0).unwrap();
        }),
        case("queues enabled without addresses", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for queue in 0..3 {
                select(a, queue);
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case("rings at the end of the address space", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for queue in 0..3 {
                select(a, queue);
                for offset in [
                    common::QUEUE_DESCRIPTORS,
                    common::QUEUE_AVAILABLE,
                    common::QUEUE_USED,
                ] {
                    a.write_common(offset, &(u64::MAX - 15).to_le_bytes())
                        .unwrap();
                }
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case("rings at odd addresses", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            let at = a.memory.first() + 4096 + 1;
            for queue in 0..3 {
                select(a, queue);
                for offset in [
                    common::QUEUE_DESCRIPTORS,
                    common::QUEUE_AVAILABLE,
                    common::QUEUE_USED,
                ] {
                    a.write_common(offset, &at.to_le_bytes()).unwrap();
                }
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case(
            "ring addresses changed while the queue runs",
            Nothing,
            |a| {
                for queue in 0..3 {
                    select(a, queue);
                    a.write_common(common::QUEUE_DESCRIPTORS, &[0xff; 8])
                        .unwrap();
                    a.write_common(common::QUEUE_USED, &[0x10; 8]).unwrap();
                    a.notify(queue).unwrap();
                }
            },
        ),
        case("DRIVER_OK out of nothing", Nothing, |a| {
            a.reset().unwrap();
            a.set_status(status::DRIVER_OK).unwrap();
            a.notify(0).unwrap();
            a.notify(1).unwrap();
        }),
        case("features changed while running", Nothing, |a| {
            a.accept(u64::MAX).unwrap();
            a.accept(0).unwrap();
        }),
        case(
            "accesses of every size and alignment to every register",
            Nothing,
            |a| {
                for offset in 0..0x48 {
                    // Without the status: the case is about the shapes.
                    for len in [1, 2, 4, 8] {
                        let mut data = vec![0; len];
                        a.read_common(offset, &mut data).unwrap();
                        if !(offset..offset + len as u64).contains(&common::DEVICE_STATUS) {
                            a.write_common(offset, &data).unwrap();
                        }
                    }
                }
            },
        ),
        case(
            "writes to the device configuration and the interrupt status",
            Nothing,
            |a| {
                let v = a.pci.virtio;
                for offset in 0..64 {
                    a.vmm
                        .write(
                            v.device.bar.into(),
                            u64::from(v.device.offset) + offset,
                            &[0xff; 4],
                        )
                        .unwrap();
                    a.vmm
                        .write(v.isr.bar.into(), u64::from(v.isr.offset), &[0xff])
                        .unwrap();
                }
                assert!(a.link_up().unwrap(), "link status is read-only");
            },
        ),
        case("kicks of queues that do not exist", Nothing, |a| {
            let notify = a.pci.virtio.notify;
            for offset in (0..u64::from(notify.len) - 8).step_by(26) {
                for len in [1, 2, 4, 8] {
                    let at = u64::from(notify.offset) + offset;
                    a.vmm
                        .write(notify.bar.into(), at, &vec![0xee; len])
                        .unwrap();
                }
            }
        }),
        case(
            "the rings' memory taken away while the queues run",
            Nothing,
            |a| {
                let range = *a.memory.ranges().next().unwrap();
                a.vmm.unmap(range.address, range.len).unwrap();
                for queue in 0..3 {
                    a.notify(queue).unwrap();
                }
                a.status().unwrap();
                a.vmm.map(&a.memory.clone(), &range).unwrap();
            },
        ),
        case(
            "interrupts taken away and given back while frames arrive",
            Nothing,
            |a| {
                for _ in 0..50 {
                    a.vmm
                        .set_irqs(wire::IRQ_MSIX, wire::IRQ_NONE_TRIGGER, 0, 0, &[])
                        .unwrap();
                    a.vmm
                        .set_irqs(wire::IRQ_MSIX, wire::IRQ_EVENTFD_TRIGGER, 0, 1, &[])
                        .unwrap();
                    a.notify(1).unwrap();
                }
                a.vmm
                    .set_irqs(wire::IRQ_MSIX, wire::IRQ_NONE_TRIGGER, 0, 0, &[])
                    .unwrap();
                a.switch_on().unwrap();
            },
        ),
    ];
    run(&cases, |a| {
        a.transmit_rings
            .first()
            .map_or(0, |r| r.used_index().unwrap_or(0))
    });
}

#[test]
fn a_hostile_guest_does_not_slow_its_peer_to_a_stop() {
    // One side offers broken chains without pause while the other carries a conversation with itself being
    // reset now and then: no worker may hang in either.
    let mut pair = Pair::started(Setup::default());
    let stop = std::sync::atomic::AtomicBool::new(false);
    let Pair { a, b, .. } = &mut pair;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = distdpu_tests::packet::Random(7);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                a.start(Setup::default()).unwrap();
                for _ in 0..20 {
                    let head = random.below(256) as u16;
                    let at = (
                        random.next() >> random.below(40),
                        random.next() as u32 >> random.below(32),
                    );
                    let (flags, next) = (random.below(8) as u16, random.below(300) as u16);
                    a.transmit_rings[0]
                        .write_descriptor(head, at, flags, next)
                        .unwrap();
                    a.transmit_rings[0].offer(head).unwrap();
                    a.receive_rings[0]
                        .write_descriptor(head, at, flags, next)
                        .unwrap();
                    a.receive_rings[0].offer(head).unwrap();
                    a.notify(0).unwrap();
                    a.notify(1).unwrap();
                }
            }
        });
        for n in 0..300 {
            b.send(&flow(1, 0).frame(600, n)).unwrap();
            while b.try_receive(0).unwrap().is_some() {}
            if n % 30 == 0 {
                std::thread::sleep(QUIET / 10);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    pair.a.start(Setup::default()).unwrap();
    let marker = flow(1, 0).frame(333, 0xfeed);
    pair.b.send(&marker).unwrap();
    receive_until(&mut pair.a, &marker);
    while pair.b.receive_within(QUIET).is_ok() {}
    pair.works();
}
