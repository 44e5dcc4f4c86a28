use super::*;
use crate::testing::{BASE, BYTES, Driver, INDIRECT, Memory};
use crate::virtio::ring::MAX_TOGETHER;
use smartep::state::State;
use std::sync::Arc;

const LINUX: RingFeatures = RingFeatures {
    packed: true,
    event_idx: true,
    indirect: true,
    in_order: false,
};
/// No power of two.
const SIZE: u16 = 7;
const DATA: u64 = BASE + 0x10_0000;

struct Bench {
    driver: Driver,
    ring: PackedRing,
    note: QueueNote,
    features: RingFeatures,
}

impl Bench {
    fn new(size: u16, features: RingFeatures) -> Self {
        let memory = Memory::new();
        let driver = Driver::fresh(&memory, 0, size, features);
        let note = QueueNote::new(Arc::new(State::create().unwrap().0), 3);
        let ring = PackedRing::new(driver.setup, features, Some(note.clone()));
        Self {
            driver,
            ring,
            note,
            features,
        }
    }

    fn on<T>(&mut self, act: impl FnOnce(&mut Attached<'_, '_>) -> T) -> T {
        let reader = self.driver.memory.table.reader();
        let view = reader.pin();
        act(&mut self.ring.attach(&view))
    }

    /// The process dies and another takes its place.
    fn replace(&mut self) {
        let note = Some(self.note.clone());
        self.ring = PackedRing::resumed(self.driver.setup, self.features, note);
    }

    /// Offers a buffer of `slots` descriptors.
    fn offer(&mut self, id: u16, slots: u16) {
        let buffer = |n: u16| (DATA + u64::from(n) * 64, 10, WRITE);
        let buffers: Vec<_> = (0..slots).map(buffer).collect();
        self.driver.chain(id, &buffers);
    }
}

fn pop(r: &mut Attached<'_, '_>) -> Result<Option<Head>, RingError> {
    let taken = r.pop(&mut Parts::default())?;
    Ok(taken.map(|taken| taken.head))
}

fn heads(r: &mut Attached<'_, '_>) -> Vec<(u16, u16)> {
    let next = || pop(r).unwrap().map(|head| (head.id, head.slots));
    std::iter::from_fn(next).collect()
}

#[test]
fn buffers_come_in_order_and_go_back_when_published() {
    let mut b = Bench::new(SIZE, LINUX);
    for (id, slots) in [(40, 2), (0xffff, 1), (3, 3)] {
        b.offer(id, slots);
    }
    b.on(|r| {
        for (id, slots) in [(40, 2), (0xffff, 1), (3, 3)] {
            let mut parts = Parts::default();
            let taken = r.pop(&mut parts).unwrap().unwrap();
            assert_eq!(taken.head, Head { id, slots });
            assert_eq!(taken.chain.unwrap().writable, 10 * u64::from(slots));
            assert_eq!(parts.slices().len(), usize::from(slots));
            r.push_used(taken.head, u32::from(slots)).unwrap();
        }
        assert_eq!(pop(r), Ok(None));
    });
    assert_eq!(b.driver.take_used(), [], "not before they are published");
    let mut b = Bench::new(SIZE, LINUX);
    b.offer(40, 2);
    b.offer(7, 1);
    b.on(|r| {
        for _ in 0..2 {
            let head = pop(r).unwrap().unwrap();
            r.push_used(head, 5).unwrap();
        }
        r.publish().unwrap();
    });
    assert_eq!(b.driver.take_used(), [(40, 5), (7, 5)]);
}

#[test]
fn every_size_works_for_many_laps_with_chains_of_every_length() {
    for size in [1u16, 2, 3, 7, 8, 255, 256, 257] {
        let mut b = Bench::new(size, LINUX);
        let mut id = 0u16;
        for round in 0..400u16 {
            let slots = round % size.min(9) + 1;
            let count = if slots > size { 0 } else { size / slots };
            let mut want = Vec::new();
            for _ in 0..count {
                id = id.wrapping_add(1);
                b.offer(id, slots);
                want.push((u32::from(id), u32::from(round)));
            }
            b.on(|r| {
                for _ in 0..count {
                    let head = pop(r).unwrap().unwrap();
                    assert_eq!(head.slots, slots, "size {size}");
                    r.push_used(head, u32::from(round)).unwrap();
                }
                assert_eq!(pop(r), Ok(None), "size {size} round {round}");
                if round % 2 == 0 {
                    r.publish().unwrap();
                } else {
                    r.publish_together().unwrap();
                }
            });
            assert_eq!(b.driver.take_used(), want, "size {size} round {round}");
        }
    }
}

#[test]
fn the_largest_ring_can_be_full() {
    let size = 1 << 15;
    let mut b = Bench::new(size, LINUX);
    (b.driver.setup.avail, b.driver.setup.used) = (BASE + 0x20_0000, BASE + 0x20_0010);
    b.ring = PackedRing::new(b.driver.setup, LINUX, None);
    for lap in 0..3 {
        for id in 0..size {
            b.offer(id, 1);
        }
        b.on(|r| {
            for _ in 0..size {
                let head = pop(r).unwrap().unwrap();
                r.push_used(head, lap).unwrap();
            }
            assert_eq!(pop(r), Ok(None));
            r.publish().unwrap();
        });
        assert_eq!(b.driver.take_used().len(), usize::from(size));
    }
}

#[test]
fn a_buffer_put_back_comes_again() {
    let mut b = Bench::new(SIZE, LINUX);
    b.offer(2, 3);
    b.offer(4, 2);
    b.on(|r| {
        assert_eq!(heads(r), [(2, 3), (4, 2)]);
        r.unpop(5);
        assert_eq!(heads(r), [(2, 3), (4, 2)]);
        r.unpop(2);
        assert_eq!(heads(r), [(4, 2)]);
    });
}

#[test]
fn chains_that_break_the_rules_end_where_they_end_and_the_next_is_found() {
    type Chain<'a> = &'a [(u64, u32, u16)];
    let cases: [(BadChain, Chain<'_>); 9] = [
        (
            BadChain::NotMapped,
            &[(u64::MAX - 100, 512, 0), (DATA, 4, 0)],
        ),
        (BadChain::NotMapped, &[(BASE + BYTES - 8, 16, 0)]),
        (
            BadChain::Order,
            &[(DATA, 4, WRITE), (DATA, 4, 0), (DATA, 4, 0)],
        ),
        (BadChain::IndirectSize, &[(DATA, 0, INDIRECT)]),
        (
            BadChain::IndirectSize,
            &[(DATA, 17, INDIRECT), (DATA, 4, 0)],
        ),
        (BadChain::IndirectSize, &[(DATA, 65537 * 16, INDIRECT)]),
        (
            BadChain::IndirectNested,
            &[(DATA, 16, INDIRECT), (DATA, 4, 0)],
        ),
        (BadChain::TooLong, &[(DATA, 16 * 1025, INDIRECT)]),
        (BadChain::NotMapped, &[(0x70_0000_0000, 32, INDIRECT)]),
    ];
    for (want, chain) in cases {
        let mut b = Bench::new(SIZE, LINUX);
        b.driver.chain(5, chain);
        // A size that is wrong is said before the place in the chain is looked at, and the other way round.
        let slots = chain.len() as u16;
        b.offer(6, 1);
        b.on(|r| {
            let taken = r.pop(&mut Parts::default()).unwrap().unwrap();
            let found = taken.chain.unwrap_err();
            let nested = slots > 1 && chain[0].2 == INDIRECT;
            assert_eq!(
                found,
                if nested {
                    BadChain::IndirectNested
                } else {
                    want
                },
                "{chain:x?}"
            );
            assert_eq!(taken.head, Head { id: 5, slots }, "{chain:x?}");
            assert_eq!(heads(r), [(6, 1)]);
        });
    }
    let mut b = Bench::new(
        SIZE,
        RingFeatures {
            indirect: false,
            ..LINUX
        },
    );
    b.driver.chain(5, &[(DATA, 16, INDIRECT)]);
    let taken = b.on(|r| r.pop(&mut Parts::default()).unwrap().unwrap());
    assert_eq!(taken.chain, Err(BadChain::IndirectNotNegotiated));
}

#[test]
fn an_indirect_table_takes_one_descriptor_and_may_be_longer_than_the_ring() {
    let mut b = Bench::new(SIZE, LINUX);
    let table = DATA + 0x1000;
    for n in 0..20 {
        let flags = if n < 15 { 0 } else { WRITE };
        b.driver.descriptor_at(table, n, (DATA, 10), flags, 0);
    }
    b.driver.chain(9, &[(table, 320, INDIRECT)]);
    b.on(|r| {
        let mut parts = Parts::default();
        let taken = r.pop(&mut parts).unwrap().unwrap();
        let walked = taken.chain.unwrap();
        assert_eq!((walked.readable, walked.writable), (150, 50));
        assert_eq!((walked.readable_slices, parts.slices().len()), (15, 20));
        assert_eq!(taken.head, Head { id: 9, slots: 1 });
    });
    b.driver.descriptor_at(table, 3, (DATA, 16), INDIRECT, 0);
    b.driver.chain(9, &[(table, 320, INDIRECT)]);
    let taken = b.on(|r| r.pop(&mut Parts::default()).unwrap().unwrap());
    assert_eq!(taken.chain, Err(BadChain::IndirectNested));
}

#[test]
fn a_chain_without_an_end_is_fatal() {
    let mut b = Bench::new(SIZE, LINUX);
    b.driver.break_ring();
    let error = b.on(pop).unwrap_err();
    assert_eq!(error, RingError::EndlessChain { size: SIZE });
    assert!(error.is_fatal());
}

#[test]
fn descriptors_made_available_again_before_they_were_used_are_fatal() {
    let mut b = Bench::new(SIZE, LINUX);
    for id in 0..SIZE {
        b.offer(id, 1);
    }
    b.on(|r| assert_eq!(heads(r).len(), usize::from(SIZE)));
    b.offer(0, 1);
    let error = b.on(pop).unwrap_err();
    assert_eq!(error, RingError::Overrun { size: SIZE });
}

#[test]
fn a_ring_whose_memory_went_away_works_again_when_it_is_back() {
    let mut b = Bench::new(SIZE, LINUX);
    b.offer(1, 2);
    b.driver.memory.table.unmap(BASE, BYTES).unwrap();
    b.on(|r| {
        assert_eq!(pop(r), Err(RingError::Unmapped));
        assert_eq!(r.enable_notification(), Err(RingError::Unmapped));
    });
    b.driver.memory.map();
    assert_eq!(b.on(heads), [(1, 2)]);
}

/// Uses everything that is available; answers whether the driver wants an interrupt.
fn consume(b: &mut Bench) -> bool {
    b.on(|r| {
        while let Some(head) = pop(r).unwrap() {
            r.push_used(head, 0).unwrap();
        }
        r.publish().unwrap();
        r.wants_interrupt()
    })
}

#[test]
fn interrupts_follow_the_event_structure() {
    let mut b = Bench::new(SIZE, LINUX);
    b.driver.set_wish(0, 1);
    b.offer(0, 1);
    assert!(!consume(&mut b), "switched off");
    b.driver.set_wish(0, 0);
    b.offer(0, 1);
    assert!(consume(&mut b), "switched on");
    assert!(!consume(&mut b), "nothing new");
    // At place 2 now.
    b.driver.set_wish(4 | 1 << 15, 2);
    b.offer(0, 2);
    assert!(!consume(&mut b), "2 and 3 were used, not 4");
    b.offer(0, 1);
    assert!(consume(&mut b), "4 was");
    b.offer(0, 1);
    assert!(!consume(&mut b), "it was passed before");
    // At place 6; the event lies in the next lap.
    b.driver.set_wish(1, 2);
    b.offer(0, 2);
    assert!(!consume(&mut b), "6 and 0");
    b.offer(0, 1);
    assert!(consume(&mut b), "1 of the next lap");
    b.driver.set_wish(0x7fff, 2);
    b.offer(0, 1);
    assert!(
        consume(&mut b),
        "a place outside the ring is better told than not"
    );
}

/// Every decision about an interrupt for every event, against the definition: was that place used?
#[test]
fn events_are_decided_by_the_places_that_were_used_for_all_of_them() {
    let memory = Memory::new();
    let reader = memory.table.reader();
    let view = reader.pin();
    for size in [1u16, 2, 5, 8] {
        let driver = Driver::new(&memory, 0, size);
        let mut ring = PackedRing::new(driver.setup, LINUX, None);
        let attached = ring.attach(&view);
        let mut start = Position::START;
        for used in (0..2 * size).flat_map(|_| 1..=size) {
            let places = (0..used).map(|n| start.forward(n, size));
            let places: Vec<Position> = places.collect();
            attached.ring.signalled = start;
            attached.ring.untold_slots = used;
            for event in (0..=u16::MAX).map(Position::from_bits) {
                // Places outside are told, and so is everything once all was used.
                let want = event.index() >= size || used == size || places.contains(&event);
                assert_eq!(
                    attached.passed(event),
                    want,
                    "{start:?} + {used}, {event:?} of {size}"
                );
            }
            if used == size {
                start = start.forward(1, size);
            }
        }
    }
}

#[test]
fn without_event_indices_the_flags_alone_decide() {
    let features = RingFeatures {
        event_idx: false,
        ..LINUX
    };
    let mut b = Bench::new(SIZE, features);
    for (flags, want) in [(0, true), (1, false), (2, true), (3, true)] {
        b.driver.set_wish(5, flags);
        b.offer(0, 1);
        assert_eq!(consume(&mut b), want, "flags {flags}");
    }
    assert_eq!(b.on(|r| r.enable_notification()), Ok(false));
    assert_eq!(b.driver.device_wish(), (0, 0));
    b.on(|r| r.disable_notification()).unwrap();
    assert_eq!(b.driver.device_wish(), (0, 1));
}

#[test]
fn asking_for_a_notification_names_the_place_behind_what_was_seen() {
    let mut b = Bench::new(SIZE, LINUX);
    assert_eq!(b.on(|r| r.enable_notification()), Ok(false));
    assert_eq!(b.driver.device_wish(), (1 << 15, 2));
    b.offer(0, 3);
    assert_eq!(b.on(|r| r.enable_notification()), Ok(true), "one is there");
    // Seen, not enough, and put back: the next one is what counts.
    b.on(|r| {
        assert_eq!(heads(r), [(0, 3)]);
        r.unpop(3);
    });
    assert_eq!(b.on(|r| r.enable_notification()), Ok(false));
    assert_eq!(b.driver.device_wish(), (3 | 1 << 15, 2));
    assert!(b.driver.wants_kick());
    b.offer(1, 4);
    assert_eq!(b.on(|r| r.enable_notification()), Ok(true));
    assert!(consume(&mut b));
    assert_eq!(b.on(|r| r.enable_notification()), Ok(false));
    assert_eq!(b.driver.device_wish(), (0, 2), "the next lap");
    b.on(|r| r.disable_notification()).unwrap();
    assert_eq!(b.driver.device_wish().1, 1);
}

#[test]
fn in_order_one_descriptor_stands_for_a_batch_without_bytes() {
    let features = RingFeatures {
        in_order: true,
        ..LINUX
    };
    let mut b = Bench::new(SIZE, features);
    for round in 0..9 {
        let first = b.driver.place();
        for (id, slots) in [(1, 1), (2, 2), (3, 1), (4, 1)] {
            b.offer(id, slots);
        }
        b.on(|r| {
            for written in [0, 0, 0, 9] {
                let head = pop(r).unwrap().unwrap();
                r.push_used(head, written).unwrap();
            }
            r.publish().unwrap();
        });
        let at = b.driver.setup.desc + 16 * u64::from(first.index());
        assert_eq!(
            b.driver.memory.read_u16(at + 12),
            3,
            "the last id, round {round}"
        );
        assert_eq!(b.driver.take_used(), [(1, 0), (2, 0), (3, 0), (4, 9)]);
    }
}

#[test]
fn a_successor_takes_what_was_not_given_back_wherever_the_first_one_died() {
    for lap in 0..5u16 {
        let mut b = Bench::new(SIZE, LINUX);
        // Different places, also with the wrap counter cleared.
        for _ in 0..3 * lap {
            b.offer(9, 1);
            consume(&mut b);
            b.driver.take_used();
        }
        for (id, slots) in [(1, 2), (2, 1), (3, 2)] {
            b.offer(id, slots);
        }
        b.on(|r| {
            let head = pop(r).unwrap().unwrap();
            r.push_used(head, 4).unwrap();
            r.publish().unwrap();
            // Taken, and not given back.
            pop(r).unwrap();
        });
        b.replace();
        assert_eq!(b.on(heads), [(2, 1), (3, 2)], "lap {lap}");
        // Again, and this one gives back a buffer before it dies.
        b.replace();
        b.on(|r| {
            let head = pop(r).unwrap().unwrap();
            r.push_used(head, 5).unwrap();
            r.publish().unwrap();
        });
        assert_eq!(b.driver.take_used(), [(1, 4), (2, 5)], "lap {lap}");
        b.offer(7, 3);
        b.replace();
        assert_eq!(b.on(heads), [(3, 2), (7, 3)], "lap {lap}");
    }
}

/// Dies behind each store of a use, of one buffer and of several that must be seen together.
#[test]
fn a_successor_ends_a_use_that_was_begun_and_does_none_twice() {
    for together in [1u16, 2, 3] {
        for stores in 0..=together + 1 {
            let mut b = Bench::new(SIZE, LINUX);
            for _ in 0..5 {
                b.offer(9, 1);
                consume(&mut b);
                b.driver.take_used();
            }
            for id in 0..together + 1 {
                b.offer(id, 1);
            }
            let from = b.ring.next_used;
            let used: Vec<Used> = (0..together)
                .map(|id| Used {
                    head: Head { id, slots: 1 },
                    written: 7,
                })
                .collect();
            b.on(|r| {
                let place = r.ring.note.as_ref().unwrap().place().unwrap();
                for (index, used) in used.iter().enumerate() {
                    place.set_entry(index, used.to_bits());
                }
                let step = Step {
                    from,
                    to: from.forward(together, SIZE),
                    logged: if together > 1 { together } else { 0 },
                };
                if stores > 0 {
                    place.set_step(step.to_bits());
                }
                // Those behind the first, then the first.
                for n in (1..together)
                    .chain([0])
                    .take(usize::from(stores.saturating_sub(1)))
                {
                    r.write_used(from.forward(n, SIZE), used[usize::from(n)])
                        .unwrap();
                }
            });
            b.replace();
            let left: Vec<u16> = b.on(heads).iter().map(|(id, _)| *id).collect();
            let seen: Vec<u16> = b
                .driver
                .take_used()
                .iter()
                .map(|(id, _)| *id as u16)
                .collect();
            let whole: Vec<u16> = (0..together + 1).collect();
            assert_eq!(
                [seen.clone(), left].concat(),
                whole,
                "{together}, {stores} stores"
            );
            let possible = [0, usize::from(together)];
            assert!(
                possible.contains(&seen.len()),
                "all of a frame or nothing: {seen:?}"
            );
        }
    }
}

#[test]
fn a_driver_hears_of_a_use_that_the_successor_ended() {
    let mut b = Bench::new(SIZE, LINUX);
    b.offer(0, 1);
    b.offer(1, 1);
    let from = b.ring.next_used;
    let place = b.note.place().unwrap();
    for id in 0..2 {
        let head = Head { id, slots: 1 };
        place.set_entry(id.into(), Used { head, written: 7 }.to_bits());
    }
    let to = from.forward(2, SIZE);
    place.set_step(
        Step {
            from,
            to,
            logged: 2,
        }
        .to_bits(),
    );
    // The driver looked in between, found nothing, and asks for the first.
    b.driver.set_wish(from.bits(), 2);
    b.replace();
    assert!(b.on(heads).is_empty());
    assert!(b.on(|r| r.wants_interrupt()));
    assert!(!b.on(|r| r.wants_interrupt()), "once");
}

#[test]
fn a_driver_that_has_refilled_the_ring_meanwhile_is_not_disturbed() {
    let mut b = Bench::new(3, LINUX);
    for id in 0..3 {
        b.offer(id, 1);
    }
    b.on(|r| {
        for _ in 0..2 {
            let head = pop(r).unwrap().unwrap();
            r.push_used(head, 5).unwrap();
        }
        r.publish_together().unwrap();
    });
    assert_eq!(b.driver.take_used(), [(0, 5), (1, 5)]);
    // The places of the use that is noted last hold buffers again.
    b.offer(10, 1);
    b.offer(11, 1);
    b.replace();
    assert_eq!(b.on(heads), [(2, 1), (10, 1), (11, 1)]);
}

#[test]
fn a_successor_waits_for_the_ring_s_memory() {
    let mut b = Bench::new(SIZE, LINUX);
    b.offer(1, 1);
    b.replace();
    b.driver.memory.table.unmap(BASE, BYTES).unwrap();
    b.on(|r| {
        assert_eq!(pop(r), Err(RingError::Unmapped));
        assert_eq!(r.enable_notification(), Err(RingError::Unmapped));
    });
    b.driver.memory.map();
    assert_eq!(b.on(heads), [(1, 1)]);
}

#[test]
fn steps_and_log_entries_survive_their_bits() {
    assert_eq!(
        Step::from_bits(0),
        Step {
            from: Position::START,
            to: Position::START,
            logged: 0
        }
    );
    for bits in (0..=u16::MAX).step_by(13) {
        let step = Step {
            from: Position::from_bits(bits),
            to: Position::from_bits(!bits),
            logged: MAX_TOGETHER as u16,
        };
        assert_eq!(Step::from_bits(step.to_bits()), step);
        let used = Used {
            head: Head {
                id: bits,
                slots: 1 << 15,
            },
            written: u32::MAX - u32::from(bits),
        };
        assert_eq!(Used::from_bits(used.to_bits()), used);
    }
}
