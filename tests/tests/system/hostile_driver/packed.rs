//! Packed rings of any content.

use super::{Case, Seen, case, run};
use distdpu_tests::ring::packed::Place;
use distdpu_tests::ring::{Buffer, INDIRECT, NEXT, WRITE};
use distdpu_tests::virtio_net::VirtioNet;
use distdpu_tests::virtio_net::features::{self, PACKED};

fn start() -> Place {
    Place {
        index: 0,
        wrap: true,
    }
}

/// Makes a descriptor of the transmit queue available at `index` of the first lap.
fn put(a: &VirtioNet, index: u16, buffer: Buffer, flags: u16) {
    let place = Place { index, ..start() };
    let area = a.transmit_rings[0].area();
    area.make_available(place, buffer, 5, flags).unwrap();
}

/// One descriptor and a kick.
fn offer(a: &mut VirtioNet, buffer: Buffer, flags: u16) {
    put(a, 0, buffer, flags);
    a.notify(1).unwrap();
}

/// Somewhere in the memory.
fn good(a: &VirtioNet) -> u64 {
    a.memory.end() - 8192
}

/// A table of 32 bytes at its place, named by the first descriptor.
fn table(a: &mut VirtioNet, len: u32, flags: u16, entry: [u8; 16]) {
    let table = a.transmit_rings[0].table_of(0);
    a.memory.write(table, &[entry, entry].concat()).unwrap();
    offer(a, (table, len), INDIRECT | flags);
}

fn entry(address: u64, len: u32, flags: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[14..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

fn run_packed(cases: Vec<Case>) {
    let packed = |case: Case| Case {
        features: if case.features & features::RING_PACKED == 0 {
            PACKED
        } else {
            case.features
        },
        ..case
    };
    let cases: Vec<Case> = cases.into_iter().map(packed).collect();
    run(&cases, |a| a.transmit_rings[0].used_index().unwrap());
}

#[test]
fn malformed_packed_chains() {
    use Seen::{NeedsReset, Nothing, Returned};
    run_packed(vec![
        case("an address that wraps", Returned, |a| {
            offer(a, (u64::MAX - 255, 512), 0)
        }),
        case("an address that is not mapped", Returned, |a| {
            offer(a, (0x70_0000_0000, 512), 0)
        }),
        case("a buffer that leaves the memory", Returned, |a| {
            let at = a.memory.end() - 100;
            offer(a, (at, 512), 0);
        }),
        case("a buffer of 4 GiB - 1", Returned, |a| {
            let at = a.memory.first();
            offer(a, (at, u32::MAX), 0);
        }),
        case("an empty buffer", Returned, |a| offer(a, (good(a), 0), 0)),
        case("a writable buffer", Returned, |a| {
            offer(a, (good(a), 600), WRITE)
        }),
        case("a short header", Returned, |a| offer(a, (good(a), 5), 0)),
        case("a header without a frame", Returned, |a| {
            offer(a, (good(a), 12), 0)
        }),
        case("a frame of 13 bytes", Returned, |a| {
            offer(a, (good(a), 25), 0)
        }),
        case("a frame of 1 MiB", Returned, |a| {
            let at = a.memory.first() + 4096;
            offer(a, (at, 1 << 20), 0);
        }),
        case("flags that do not exist", Returned, |a| {
            offer(a, (good(a), 100), 0x7f78)
        }),
        case(
            "a chain with a readable buffer behind a writable one",
            Returned,
            |a| {
                put(a, 1, (good(a), 100), 0);
                offer(a, (good(a), 100), WRITE | NEXT);
            },
        ),
        case(
            "a chain that runs into descriptors that nobody wrote",
            Returned,
            |a| {
                offer(a, (good(a), 100), NEXT);
            },
        ),
        case("a chain all round the ring", NeedsReset, |a| {
            for index in (0..a.transmit_rings[0].size).rev() {
                put(a, index, (good(a), 1), NEXT);
            }
            a.notify(1).unwrap();
        }),
        case(
            "a good chain and then one all round the ring",
            NeedsReset,
            |a| {
                for index in (1..a.transmit_rings[0].size).rev() {
                    put(a, index, (good(a), 1), NEXT);
                }
                offer(a, (good(a), 100), 0);
            },
        ),
        case("every descriptor with the same id", Nothing, |a| {
            for index in (0..a.transmit_rings[0].size).rev() {
                put(a, index, (good(a), 100), 0);
            }
            a.notify(1).unwrap();
        }),
    ]);
}

#[test]
fn malformed_packed_indirect_tables() {
    use Seen::Returned;
    let mut cases = vec![
        case("an indirect table of no bytes", Returned, |a| {
            let one = entry(good(a), 100, 0);
            table(a, 0, 0, one);
        }),
        case("an indirect table of 17 bytes", Returned, |a| {
            let one = entry(good(a), 100, 0);
            table(a, 17, 0, one);
        }),
        case("an indirect table of 65536 entries", Returned, |a| {
            let all = a.memory.allocate(1 << 20, 16).unwrap();
            let one = entry(good(a), 1, 0).repeat(1 << 16);
            a.memory.write(all, &one).unwrap();
            offer(a, (all, 1 << 20), INDIRECT);
        }),
        case("an indirect table in an indirect table", Returned, |a| {
            let one = entry(good(a), 32, INDIRECT);
            table(a, 32, 0, one);
        }),
        case("INDIRECT and NEXT together", Returned, |a| {
            let one = entry(good(a), 100, 0);
            table(a, 32, NEXT, one);
        }),
        case("NEXT in an indirect table", Returned, |a| {
            let one = entry(good(a), 100, NEXT);
            table(a, 32, 0, one);
        }),
        case("an indirect table outside the memory", Returned, |a| {
            offer(a, (0x70_0000_0000, 32), INDIRECT);
        }),
        case("an indirect table whose address wraps", Returned, |a| {
            offer(a, (u64::MAX - 15, 64), INDIRECT);
        }),
    ];
    cases.push(Case {
        features: PACKED & !features::INDIRECT,
        ..case("an indirect table that was not negotiated", Returned, |a| {
            let one = entry(good(a), 100, 0);
            table(a, 16, 0, one);
        })
    });
    run_packed(cases);
}

#[test]
fn wrap_counters_and_events_that_make_no_sense() {
    use Seen::Nothing;
    run_packed(vec![
        case("descriptors of the next lap", Nothing, |a| {
            let area = a.transmit_rings[0].area();
            for index in 0..a.transmit_rings[0].size {
                let place = Place { index, wrap: false };
                area.make_available(place, (good(a), 100), 5, 0).unwrap();
            }
            a.notify(1).unwrap();
        }),
        case("descriptors that the driver used itself", Nothing, |a| {
            let ring = a.transmit_rings[0].descriptors;
            for index in 0..u64::from(a.transmit_rings[0].size) {
                a.memory.store_u16(ring + 16 * index + 14, 0x8080).unwrap();
            }
            a.notify(1).unwrap();
        }),
        case(
            "an event outside the ring, with flags that do not exist",
            Nothing,
            |a| {
                let events = a.transmit_rings[0].available;
                for (place, flags) in [(0x7fff, 2), (0xffff, 3), (256, 2), (0, 0xfffe)] {
                    a.memory.store_u16(events, place).unwrap();
                    a.memory.store_u16(events + 2, flags).unwrap();
                    offer(a, (good(a), 100), 0);
                }
            },
        ),
        case(
            "the ring overwritten while the device works",
            Nothing,
            |a| {
                let ring = a.transmit_rings[0].descriptors;
                for byte in 0..=255u8 {
                    let bytes = vec![byte; 16 * usize::from(a.transmit_rings[0].size)];
                    a.memory.write(ring, &bytes).unwrap();
                    a.notify(1).unwrap();
                }
            },
        ),
        case("the device's own events overwritten", Nothing, |a| {
            let events = a.transmit_rings[0].used;
            for flags in 0..8 {
                a.memory.store_u16(events, 0xabcd).unwrap();
                a.memory.store_u16(events + 2, flags).unwrap();
                a.notify(1).unwrap();
            }
        }),
        case("ten thousand kicks without anything", Nothing, |a| {
            for n in 0..10_000u16 {
                a.notify(n % 3).unwrap();
            }
        }),
    ]);
}
