use super::*;
use crate::testing::{BASE, BYTES, Driver, Memory};

const SIZE: u16 = 8;

fn driver() -> (Driver, Ring) {
    let memory = Memory::new();
    let driver = Driver::new(&memory, 0, SIZE);
    let ring = Ring::new(driver.setup, true, true);
    (driver, ring)
}

fn on<T>(driver: &Driver, ring: &mut Ring, act: impl FnOnce(&mut Attached<'_, '_>) -> T) -> T {
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
            assert_eq!(r.pop(), Ok(Some(head)));
            r.push_used(head, 7).unwrap();
        }
        assert_eq!(r.pop(), Ok(None));
    });
    assert_eq!(driver.used_index(), 0, "not before publish");
    on(&driver, &mut ring, |r| {
        r.push_used(3, 7).unwrap();
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
        assert_eq!(r.pop(), Ok(Some(2)));
        assert_eq!(r.pop(), Ok(Some(4)));
        r.unpop(2);
        assert_eq!(r.pop(), Ok(Some(2)));
    });
}

#[test]
fn positions_wrap_at_65536() {
    let (mut driver, mut ring) = driver();
    for n in 0..70_000u32 {
        let head = (n % u32::from(SIZE)) as u16;
        driver.offer(head);
        on(&driver, &mut ring, |r| {
            assert_eq!(r.pop(), Ok(Some(head)));
            r.push_used(head, n).unwrap();
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
            on(&driver, &mut ring, |r| r.pop()).unwrap();
        }
        driver.set_avail(to);
        let error = on(&driver, &mut ring, |r| r.pop()).unwrap_err();
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
    assert!(
        on(&driver, &mut ring, |r| r.pop()).is_ok(),
        "a full ring is none"
    );
}

#[test]
fn a_head_beyond_the_table_is_fatal() {
    let (mut driver, mut ring) = driver();
    driver.offer(SIZE);
    let error = on(&driver, &mut ring, |r| r.pop()).unwrap_err();
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
        assert_eq!(r.pop(), Err(RingError::Unmapped));
        assert_eq!(r.enable_notification(), Err(RingError::Unmapped));
    });
    assert!(!RingError::Unmapped.is_fatal());
    driver.memory.map();
    assert_eq!(on(&driver, &mut ring, |r| r.pop()), Ok(Some(1)));
}

#[test]
fn interrupts_follow_the_used_event() {
    let (mut driver, mut ring) = driver();
    let mut give = |driver: &mut Driver, count: u16| {
        for head in 0..count {
            driver.offer(head);
        }
        on(driver, &mut ring, |r| {
            while let Ok(Some(head)) = r.pop() {
                r.push_used(head, 0).unwrap();
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
    let mut ring = Ring::new(driver.setup, false, true);
    for (flag, wanted) in [(0, true), (1, false)] {
        driver.set_avail_flags(flag);
        driver.offer(0);
        let wants = on(&driver, &mut ring, |r| {
            let head = r.pop().unwrap().unwrap();
            r.push_used(head, 0).unwrap();
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
    on(&driver, &mut ring, |r| r.pop()).unwrap();
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
        r.pop().unwrap();
        r.push_used(3, 7).unwrap();
        r.publish().unwrap();
        // Taken, and even written, but not given back when the process died.
        r.pop().unwrap();
        r.push_used(0, 7).unwrap();
    });
    let mut next = Ring::resumed(driver.setup, true, true);
    on(&driver, &mut next, |r| {
        for head in [0, 5, 6] {
            assert_eq!(r.pop(), Ok(Some(head)));
            r.push_used(head, 9).unwrap();
        }
        assert_eq!(r.pop(), Ok(None));
        r.publish().unwrap();
    });
    assert_eq!(driver.take_used(), [(3, 7), (0, 9), (5, 9), (6, 9)]);
}

#[test]
fn a_ring_that_is_taken_up_waits_for_its_memory() {
    let (mut driver, _) = driver();
    driver.offer(2);
    let mut next = Ring::resumed(driver.setup, true, true);
    let nowhere = dot_iommu::DotTable::new().reader();
    let view = nowhere.pin();
    let mut attached = next.attach(&view);
    assert_eq!(attached.pop(), Err(RingError::Unmapped));
    assert_eq!(attached.enable_notification(), Err(RingError::Unmapped));
    on(&driver, &mut next, |r| assert_eq!(r.pop(), Ok(Some(2))));
}
