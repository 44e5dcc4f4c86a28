//! Rings and chains that are none: loops, jumps, addresses and tables out of this world.

use super::{Case, Seen, case, offer, run};
use crate::fixture::flow;
use distdpu_tests::ring::{INDIRECT, NEXT, WRITE};
use distdpu_tests::virtio_net::VirtioNet;
use distdpu_tests::virtio_net::features::{self, LINUX};

#[test]
fn malformed_transmit_chains() {
    use Seen::{NeedsReset, Returned};
    let cases = [
        case("a descriptor that names itself as next", Returned, |a| {
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor(0, (at, 64), NEXT, 0)
                .unwrap();
            offer(a);
        }),
        case("a loop of three", Returned, |a| {
            let at = a.memory.end() - 8192;
            for n in 0..3 {
                a.transmit_rings[0]
                    .write_descriptor(n, (at, 64), NEXT, (n + 1) % 3)
                    .unwrap();
            }
            offer(a);
        }),
        case("a next beyond the table", Returned, |a| {
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
    use Seen::Returned;
    fn table(a: &mut VirtioNet, len: u32) -> u64 {
        let table = a.transmit_rings[0].table_of(0);
        a.transmit_rings[0]
            .write_descriptor(0, (table, len), INDIRECT, 0)
            .unwrap();
        table
    }
    let mut cases = vec![
        case("an indirect table of no bytes", Returned, |a| {
            table(a, 0);
            offer(a);
        }),
        case("an indirect table of 17 bytes", Returned, |a| {
            let t = table(a, 17);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), 0, 0)
                .unwrap();
            offer(a);
        }),
        case(
            "an indirect table of 65536 entries, all in a chain",
            Returned,
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
        case("an indirect table in an indirect table", Returned, |a| {
            let t = table(a, 32);
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (t, 32), INDIRECT, 0)
                .unwrap();
            offer(a);
        }),
        case("a next beyond the indirect table", Returned, |a| {
            let t = table(a, 32);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), NEXT, 9)
                .unwrap();
            offer(a);
        }),
        case("a loop in an indirect table", Returned, |a| {
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
        case("INDIRECT and NEXT together", Returned, |a| {
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
        case("an indirect table outside the memory", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (0x70_0000_0000, 32), INDIRECT, 0)
                .unwrap();
            offer(a);
        }),
        case("an indirect table whose address wraps", Returned, |a| {
            a.transmit_rings[0]
                .write_descriptor(0, (u64::MAX - 15, 64), INDIRECT, 0)
                .unwrap();
            offer(a);
        }),
    ];
    cases.push(Case {
        features: LINUX & !features::INDIRECT,
        ..case("an indirect table that was not negotiated", Returned, |a| {
            let t = table(a, 16);
            let at = a.memory.end() - 8192;
            a.transmit_rings[0]
                .write_descriptor_at(t, 0, (at, 100), 0, 0)
                .unwrap();
            offer(a);
        })
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
