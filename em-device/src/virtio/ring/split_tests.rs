use super::*;
use crate::testing::{BASE, BYTES, Driver, Memory, WRITE};

const LINUX: RingFeatures = RingFeatures {
    packed: false,
    event_idx: true,
    indirect: true,
    in_order: false,
};

const SIZE: u16 = 8;

fn driver() -> (Driver, SplitRing) {
    let memory = Memory::new();
    let driver = Driver::new(&memory, 0, SIZE);
    let ring = SplitRing::new(driver.setup, LINUX);
    (driver, ring)
}

/// Takes the next head.
fn pop(r: &mut Attached<'_, '_>) -> Result<Option<u16>, RingError> {
    let taken = r.pop(&mut Parts::default())?;
    Ok(taken.map(|taken| taken.head.id))
}

/// Gives a head back.
fn push(r: &mut Attached<'_, '_>, id: u16, written: u32) {
    r.push_used(Head { id, slots: 1 }, written).unwrap();
}

fn on<T>(driver: &Driver, ring: &mut SplitRing, act: impl FnOnce(&mut Attached<'_, '_>) -> T) -> T {
    let reader = driver.memory.table.reader();
    let view = reader.pin();
    act(&mut ring.attach(&view))
}

#[test]
fn heads_come_in_order_and_go_back_together() {
    let (mut driver, mut ring) = driver();
    for head in [3, 0, 5] {
        driver.offer(head);
    }
    on(&driver, &mut ring, |r| {
        for head in [3, 0, 5] {
            assert_eq!(pop(r), Ok(Some(head)));
            push(r, head, 7);
        }
        assert_eq!(pop(r), Ok(None));
    });
    assert_eq!(driver.used_index(), 0, "not before publish");
    on(&driver, &mut ring, |r| {
        push(r, 3, 7);
        r.publish().unwrap();
    });
    assert_eq!(driver.take_used(), [(3, 7)]);
}

#[test]
fn a_head_put_back_comes_again() {
    let (mut driver, mut ring) = driver();
    driver.offer(2);
    driver.offer(4);
    on(&driver, &mut ring, |r| {
        assert_eq!(pop(r), Ok(Some(2)));
        assert_eq!(pop(r), Ok(Some(4)));
        r.unpop(2);
        assert_eq!(pop(r), Ok(Some(2)));
    });
}

#[test]
fn positions_wrap_at_65536() {
    let (mut driver, mut ring) = driver();
    for n in 0..70_000u32 {
        let head = (n % u32::from(SIZE)) as u16;
        driver.offer(head);
        on(&driver, &mut ring, |r| {
            assert_eq!(pop(r), Ok(Some(head)));
            push(r, head, n);
            r.publish().unwrap();
        });
        assert_eq!(driver.take_used(), [(u32::from(head), n)]);
    }
}

#[test]
fn an_index_that_jumps_or_goes_back_is_fatal() {
    for (done, to) in [(0, 9), (0, 1000), (1, 0)] {
        let (mut driver, mut ring) = driver();
        for head in 0..done {
            driver.offer(head);
            on(&driver, &mut ring, pop).unwrap();
        }
        driver.set_avail(to);
        let error = on(&driver, &mut ring, pop).unwrap_err();
        assert_eq!(
            error,
            RingError::IndexJump {
                from: done,
                to,
                size: SIZE
            }
        );
        assert!(error.is_fatal());
    }
    let (mut driver, mut ring) = driver();
    driver.set_avail(SIZE);
    assert!(on(&driver, &mut ring, pop).is_ok(), "a full ring is none");
}

#[test]
fn a_head_beyond_the_table_is_fatal() {
    let (mut driver, mut ring) = driver();
    driver.offer(SIZE);
    let error = on(&driver, &mut ring, pop).unwrap_err();
    assert_eq!(
        error,
        RingError::BadHead {
            head: SIZE,
            size: SIZE
        }
    );
}

#[test]
fn a_ring_whose_memory_went_away_works_again_when_it_is_back() {
    let (mut driver, mut ring) = driver();
    driver.offer(1);
    driver.memory.table.unmap(BASE, BYTES).unwrap();
    on(&driver, &mut ring, |r| {
        assert_eq!(pop(r), Err(RingError::Unmapped));
        assert_eq!(r.enable_notification(), Err(RingError::Unmapped));
    });
    assert!(!RingError::Unmapped.is_fatal());
    driver.memory.map();
    assert_eq!(on(&driver, &mut ring, pop), Ok(Some(1)));
}

#[test]
fn interrupts_follow_the_used_event() {
    let (mut driver, mut ring) = driver();
    let mut give = |driver: &mut Driver, count: u16| {
        for head in 0..count {
            driver.offer(head);
        }
        on(driver, &mut ring, |r| {
            while let Ok(Some(head)) = pop(r) {
                push(r, head, 0);
            }
            r.publish().unwrap();
            r.wants_interrupt()
        })
    };
    driver.set_used_event(0);
    assert!(
        give(&mut driver, 1),
        "the event is at 0, the index went from 0 to 1"
    );
    assert!(!give(&mut driver, 1), "the event was passed before");
    driver.set_used_event(4);
    assert!(!give(&mut driver, 2), "from 2 to 4 does not pass 4");
    assert!(give(&mut driver, 3), "from 4 to 7 does");
    assert!(!give(&mut driver, 0), "nothing new, nothing to say");
}

#[test]
fn without_event_indices_the_flag_decides() {
    let memory = Memory::new();
    let mut driver = Driver::new(&memory, 0, SIZE);
    let mut ring = SplitRing::new(
        driver.setup,
        RingFeatures {
            event_idx: false,
            ..LINUX
        },
    );
    for (flag, wanted) in [(0, true), (1, false)] {
        driver.set_avail_flags(flag);
        driver.offer(0);
        let wants = on(&driver, &mut ring, |r| {
            let head = pop(r).unwrap().unwrap();
            push(r, head, 0);
            r.publish().unwrap();
            r.wants_interrupt()
        });
        assert_eq!(wants, wanted, "flags {flag}");
    }
    on(&driver, &mut ring, |r| r.disable_notification()).unwrap();
    assert_eq!(driver.used_flags(), 1);
    on(&driver, &mut ring, |r| r.enable_notification()).unwrap();
    assert_eq!(driver.used_flags(), 0);
}

#[test]
fn asking_for_a_notification_tells_of_buffers_that_are_there() {
    let (mut driver, mut ring) = driver();
    driver.offer(0);
    on(&driver, &mut ring, pop).unwrap();
    assert_eq!(
        on(&driver, &mut ring, |r| r.enable_notification()),
        Ok(false)
    );
    assert_eq!(driver.avail_event(), 1);
    driver.offer(1);
    assert_eq!(
        on(&driver, &mut ring, |r| r.enable_notification()),
        Ok(true)
    );
}

#[test]
fn a_ring_that_is_taken_up_goes_on_behind_what_was_given_back() {
    let (mut driver, mut ring) = driver();
    for head in [3, 0, 5, 6] {
        driver.offer(head);
    }
    on(&driver, &mut ring, |r| {
        pop(r).unwrap();
        push(r, 3, 7);
        r.publish().unwrap();
        // Taken, and even written, but not given back when the process died.
        pop(r).unwrap();
        push(r, 0, 7);
    });
    let mut next = SplitRing::resumed(driver.setup, LINUX);
    on(&driver, &mut next, |r| {
        for head in [0, 5, 6] {
            assert_eq!(pop(r), Ok(Some(head)));
            push(r, head, 9);
        }
        assert_eq!(pop(r), Ok(None));
        r.publish().unwrap();
    });
    assert_eq!(driver.take_used(), [(3, 7), (0, 9), (5, 9), (6, 9)]);
}

#[test]
fn a_ring_that_is_taken_up_waits_for_its_memory() {
    let (mut driver, _) = driver();
    driver.offer(2);
    let mut next = SplitRing::resumed(driver.setup, LINUX);
    let nowhere = dot_iommu::DotTable::new().reader();
    let view = nowhere.pin();
    let mut attached = next.attach(&view);
    assert_eq!(pop(&mut attached), Err(RingError::Unmapped));
    assert_eq!(attached.enable_notification(), Err(RingError::Unmapped));
    on(&driver, &mut next, |r| assert_eq!(pop(r), Ok(Some(2))));
}

#[test]
fn in_order_one_entry_stands_for_a_batch_without_bytes() {
    let memory = Memory::new();
    let features = RingFeatures {
        in_order: true,
        ..LINUX
    };
    let mut driver = Driver::fresh(&memory, 0, SIZE, features);
    let mut ring = SplitRing::new(driver.setup, features);
    for round in 0..5u16 {
        for head in 0..6 {
            driver.chain((6 * round + head) % SIZE, &[(BASE, 8, WRITE)]);
        }
        on(&driver, &mut ring, |r| {
            for written in [0, 0, 0, 9, 0, 0] {
                let head = pop(r).unwrap().unwrap();
                push(r, head, written);
            }
            r.publish().unwrap();
        });
        assert_eq!(driver.used_index(), 6 * (round + 1));
        let entry = |n: u16| {
            let slot = u64::from((6 * round + n) % SIZE);
            driver.memory.read_u16(driver.setup.used + 4 + 8 * slot)
        };
        assert_eq!(entry(0), (6 * round + 2) % SIZE, "the last of three");
        assert_eq!(entry(3), (6 * round + 3) % SIZE);
        assert_eq!(entry(4), (6 * round + 5) % SIZE, "the last of two");
        let used: Vec<u32> = driver.take_used().iter().map(|(_, len)| *len).collect();
        assert_eq!(used, [0, 0, 0, 9, 0, 0]);
    }
}

#[test]
fn the_largest_ring_works_all_the_way_round() {
    let size = 1 << 15;
    let memory = Memory::new();
    let mut driver = Driver::new(&memory, 0, size);
    (driver.setup.avail, driver.setup.used) = (BASE + 0x8_0000, BASE + 0xa_0000);
    let mut ring = SplitRing::new(driver.setup, LINUX);
    for n in 0..70_000u32 {
        let head = n as u16 % size;
        driver.offer(head);
        if n % 1000 != 999 {
            continue;
        }
        on(&driver, &mut ring, |r| {
            while let Ok(Some(head)) = pop(r) {
                push(r, head, 1);
            }
            r.publish().unwrap();
        });
        assert_eq!(driver.take_used().len(), 1000);
    }
    for n in 0..size {
        driver.offer(n);
    }
    on(&driver, &mut ring, |r| {
        let taken = std::iter::from_fn(|| pop(r).unwrap()).count();
        assert_eq!(taken, usize::from(size));
    });
}

/// Every decision about an interrupt for every event, against the definition: is it among the entries?
#[test]
fn events_are_decided_by_the_entries_that_were_used_for_all_of_them() {
    for old in [0u16, 1, 0x7fff, 0x8000, 0xfffe, 0xffff] {
        for count in [0u16, 1, 2, 255, 0x7fff, 0x8000, 0xffff] {
            let new = old.wrapping_add(count);
            for event in 0..=u16::MAX {
                let want = event.wrapping_sub(old) < count;
                let found = passed(Wrapping(event), Wrapping(old), Wrapping(new));
                assert_eq!(found, want, "{event} from {old} to {new}");
            }
        }
    }
}

/// Every index that a driver can write, from positions on both sides of the end.
#[test]
fn an_index_is_taken_for_exactly_as_many_entries_as_there_are_for_all_of_them() {
    for at in [0u16, 3, 0x7fff, 0xfffc, 0xffff] {
        let (mut driver, mut ring) = driver();
        for to in 0..=u16::MAX {
            (ring.next_avail, ring.known_avail) = (Wrapping(at), Wrapping(at));
            driver.set_avail(to);
            let good = to.wrapping_sub(at) <= SIZE;
            let found = on(&driver, &mut ring, |r| r.look());
            assert_eq!(found.is_ok(), good, "from {at} to {to}");
        }
    }
}
