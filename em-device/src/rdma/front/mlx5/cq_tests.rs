//! Tests of completion queues.

use super::cq::{BadResize, Cq, CqSetup};
use super::test_queue::Place;
use crate::rdma::kept::Kept;
use crate::rdma::verbs::{Completion, CompletionQueue, Done, Pushed, QpNum, Status};
use crate::testing::{BASE, BYTES, Memory};
use dot_iommu::DotView;

const SOLICITED_ONLY: u32 = 1 << 24;

fn setup(place: &Place, log_size: u8, cqe_bytes: u16) -> CqSetup {
    CqSetup {
        num: 9,
        buffer: place.buffer(),
        log_size,
        cqe_bytes,
        doorbell: place.doorbell(),
        eqn: 3,
        overrun_ignore: false,
        polled: false,
    }
}

fn completion(cookie: u32) -> Completion {
    Completion {
        qp: QpNum(5),
        tag: 7,
        srq: None,
        cookie,
        done: Done::Write,
        status: Status::Success,
        len: 0,
        solicited: false,
        source: None,
    }
}

/// A driver's view: entries that are its own, by their counters.
struct Driver<'p> {
    place: &'p Place,
    log_size: u8,
    stride: u64,
    index: u32,
}

impl Driver<'_> {
    fn prepare(place: &Place, log_size: u8, stride: u64) -> Driver<'_> {
        for n in 0..1u64 << log_size {
            place.put(n * stride + stride - 4, &[0, 0, 0, 0xf1]);
        }
        Driver {
            place,
            log_size,
            stride,
            index: 0,
        }
    }

    /// Opcode and cookie of the next entry, when it is the driver's.
    fn poll(&mut self) -> Option<(u8, u16)> {
        let slot = u64::from(self.index) % (1 << self.log_size);
        let bytes = self.place.get(slot * self.stride + self.stride - 64, 64);
        let owner = (self.index >> self.log_size & 1) as u8;
        if bytes[63] >> 4 == 0xf || bytes[63] & 1 != owner {
            return None;
        }
        self.index += 1;
        Some((bytes[63] >> 4, u16::from_be_bytes([bytes[60], bytes[61]])))
    }

    fn consume(&self) {
        self.place.record(0, self.index & 0xff_ffff);
    }
}

fn with_queue(log_size: u8, cqe_bytes: u16, test: impl FnOnce(&Place, &mut Cq, &DotView<'_>)) {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, u64::from(cqe_bytes) << log_size);
    let mut cq = Cq::new(setup(&place, log_size, cqe_bytes)).unwrap();
    let reader = memory.table.reader();
    let view = reader.pin();
    test(&place, &mut cq, &view);
}

#[test]
fn impossible_queues_are_refused() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 4);
    assert!(Cq::new(setup(&place, 4, 64)).is_ok());
    assert!(Cq::new(setup(&place, 5, 64)).is_err());
    assert!(Cq::new(setup(&place, 4, 128)).is_err());
    assert!(Cq::new(setup(&place, 0, 32)).is_err());
    assert!(Cq::new(setup(&place, 24, 64)).is_err());
    assert!(Cq::new(setup(&place, 255, 64)).is_err());
    let mut odd = setup(&place, 4, 64);
    odd.doorbell += 4;
    assert!(Cq::new(odd).is_err());
}

#[test]
fn entries_become_the_drivers_by_their_owner_bit_round_after_round() {
    for stride in [64, 128] {
        with_queue(3, stride, |place, cq, view| {
            let mut driver = Driver::prepare(place, 3, u64::from(stride));
            for n in 0..100u32 {
                assert_eq!(driver.poll(), None);
                assert_eq!(cq.push(&completion(n), view), Pushed::Stored);
                if n % 5 == 0 {
                    assert_eq!(cq.push(&completion(1000 + n), view), Pushed::Stored);
                }
                assert_eq!(driver.poll(), Some((0, n as u16)));
                if n % 5 == 0 {
                    assert_eq!(driver.poll(), Some((0, 1000 + n as u16)));
                }
                driver.consume();
            }
            assert_eq!((cq.producer(), cq.num(), cq.eqn()), (120, 9, 3));
        });
    }
}

#[test]
fn a_large_entry_leaves_its_first_half_alone() {
    with_queue(1, 128, |place, cq, view| {
        place.put(0, &[0x5a; 64]);
        cq.push(&completion(1), view);
        assert_eq!(place.get(0, 64), [0x5a; 64]);
        assert_eq!(place.get(64 + 32, 4), [0, 0, 0, 7]);
    });
}

#[test]
fn a_full_queue_overruns_and_stays_failed() {
    with_queue(2, 64, |place, cq, view| {
        let mut driver = Driver::prepare(place, 2, 64);
        for n in 0..4 {
            assert_eq!(cq.push(&completion(n), view), Pushed::Stored);
        }
        driver.poll();
        driver.consume();
        assert_eq!(cq.push(&completion(4), view), Pushed::Stored);
        assert!(!cq.failed());
        assert_eq!(cq.push(&completion(5), view), Pushed::Overrun);
        assert_eq!(driver.poll(), Some((0, 1)), "nothing was overwritten");
        driver.consume();
        assert!(cq.failed());
        assert_eq!(cq.push(&completion(6), view), Pushed::Overrun);
    });
}

#[test]
fn a_consumer_index_ahead_of_the_queue_is_an_overrun_too() {
    with_queue(2, 64, |place, cq, view| {
        place.record(0, 17);
        for n in 0..4 {
            assert_eq!(cq.push(&completion(n), view), Pushed::Stored);
        }
        assert_eq!(cq.push(&completion(4), view), Pushed::Overrun);
    });
}

#[test]
fn overruns_may_be_ignored() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 2);
    let mut wanted = setup(&place, 2, 64);
    wanted.overrun_ignore = true;
    let mut cq = Cq::new(wanted).unwrap();
    let reader = memory.table.reader();
    let view = reader.pin();
    for n in 0..10 {
        assert_eq!(cq.push(&completion(n), &view), Pushed::Stored);
    }
}

#[test]
fn memory_that_is_not_mapped_is_an_overrun() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 2);
    let mut cq = Cq::new(setup(&place, 2, 64)).unwrap();
    memory.table.unmap(BASE, BYTES).unwrap();
    let reader = memory.table.reader();
    let view = reader.pin();
    assert_eq!(cq.push(&completion(0), &view), Pushed::Overrun);
    assert!(!cq.arm(&view));
    assert_eq!(cq.poll_arm(&view), (false, false));
}

#[test]
fn an_event_is_due_once_for_each_arming() {
    let failed = |cookie| Completion {
        status: Status::Flushed,
        ..completion(cookie)
    };
    let solicited = |cookie| Completion {
        solicited: true,
        done: Done::Receive,
        ..completion(cookie)
    };
    with_queue(4, 64, |place, cq, view| {
        assert_eq!(cq.push(&completion(0), view), Pushed::Stored, "not armed");
        // Armed after what is there was taken: for the next one.
        place.record(1, 1);
        assert!(!cq.arm(view));
        assert_eq!(cq.push(&completion(1), view), Pushed::Notify);
        assert_eq!(cq.push(&completion(2), view), Pushed::Stored);
        // Armed without having seen all: at once.
        place.record(1, 1 << 28 | 2);
        assert!(cq.arm(view));
        assert_eq!(cq.push(&completion(3), view), Pushed::Stored);
        // Solicited only.
        place.record(1, 2 << 28 | SOLICITED_ONLY | 4);
        assert!(!cq.arm(view));
        assert_eq!(cq.push(&completion(4), view), Pushed::Stored);
        assert_eq!(cq.push(&solicited(5), view), Pushed::Notify);
        // What is unseen is not solicited.
        place.record(1, 3 << 28 | SOLICITED_ONLY | 6);
        assert_eq!(cq.push(&completion(6), view), Pushed::Stored);
        assert!(!cq.arm(view));
        assert_eq!(cq.push(&failed(7), view), Pushed::Notify);
        // An unseen failure counts.
        assert_eq!(cq.push(&failed(8), view), Pushed::Stored);
        place.record(1, SOLICITED_ONLY | 8);
        assert!(cq.arm(view));
        // All is seen: no event for old ones.
        assert_eq!(cq.push(&failed(9), view), Pushed::Stored);
        place.record(1, SOLICITED_ONLY | 10);
        assert!(!cq.arm(view));
    });
}

#[test]
fn an_entry_that_an_event_told_of_is_no_reason_for_another() {
    with_queue(4, 64, |place, cq, view| {
        place.record(1, 0);
        assert!(!cq.arm(view));
        assert_eq!(cq.push(&completion(0), view), Pushed::Notify);
        // Armed again before the entry is taken.
        place.record(1, 1 << 28);
        assert!(!cq.arm(view));
        assert_eq!(cq.push(&completion(1), view), Pushed::Notify);
        assert_eq!(cq.push(&completion(2), view), Pushed::Stored);
        // Nobody told of the newest.
        place.record(1, 2 << 28 | 1);
        assert!(cq.arm(view));
        place.record(1, 3 << 28 | 1);
        assert!(!cq.arm(view), "now somebody did");
        assert_eq!(cq.push(&completion(3), view), Pushed::Notify);
        place.record(1, 4 << 28 | SOLICITED_ONLY | 1);
        assert!(!cq.arm(view));
    });
}

#[test]
fn a_queue_whose_doorbells_are_not_seen_is_armed_by_its_record() {
    let memory = Memory::new();
    let place = Place::new(&memory, 0, 64 << 4);
    let mut wanted = setup(&place, 4, 64);
    wanted.polled = true;
    let mut cq = Cq::new(wanted).unwrap();
    let reader = memory.table.reader();
    let view = reader.pin();
    assert_eq!(cq.poll_arm(&view), (false, false));
    assert_eq!(cq.push(&completion(0), &view), Pushed::Notify);
    assert_eq!(cq.push(&completion(1), &view), Pushed::Stored);
    let same = "the same word is no arming";
    assert_eq!(cq.poll_arm(&view), (false, false), "{same}");
    place.record(1, 1 << 28 | 1);
    assert_eq!(cq.poll_arm(&view), (true, true));
    assert_eq!(cq.poll_arm(&view), (false, false), "{same}");
    place.record(1, 2 << 28 | 2);
    assert_eq!(cq.poll_arm(&view), (true, false));
    assert_eq!(cq.push(&completion(2), &view), Pushed::Notify);
}

#[test]
fn a_queue_is_not_resized_below_what_waits_in_it_nor_where_nothing_more_fits() {
    let memory = Memory::new();
    let (old, new) = (
        Place::new(&memory, 0, 64 << 3),
        Place::new(&memory, 1, 64 << 5),
    );
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    let mut driver = Driver::prepare(&old, 3, 64);
    let reader = memory.table.reader();
    let view = reader.pin();
    for n in 0..6 {
        cq.push(&completion(n), &view);
    }
    let waiting = |n| Err(BadResize::Outstanding(n));
    assert_eq!(cq.resize(new.buffer(), 1, &view), waiting(6));
    assert_eq!(cq.resize(new.buffer(), 2, &view), waiting(6));
    cq.push(&completion(6), &view);
    cq.push(&completion(7), &view);
    assert_eq!(cq.resize(new.buffer(), 5, &view), waiting(8), "full");
    // It goes on as it was.
    for n in 0..8 {
        assert_eq!(driver.poll(), Some((0, n)));
    }
    driver.consume();
    assert_eq!(cq.push(&completion(8), &view), Pushed::Stored);
    assert_eq!(driver.poll(), Some((0, 8)));
    // Of what the driver took only the record tells.
    driver.consume();
    assert_eq!(cq.resize(new.buffer(), 1, &view), Ok(Pushed::Stored));
}

#[test]
fn a_resized_queue_goes_on_behind_the_entry_that_says_so() {
    let memory = Memory::new();
    let (old, new) = (
        Place::new(&memory, 0, 64 << 3),
        Place::new(&memory, 1, 64 << 5),
    );
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    let mut before = Driver::prepare(&old, 3, 64);
    let mut after = Driver::prepare(&new, 5, 64);
    let reader = memory.table.reader();
    let view = reader.pin();
    for n in 0..6 {
        cq.push(&completion(n), &view);
        assert_eq!(before.poll(), Some((0, n as u16)));
    }
    before.consume();
    cq.push(&completion(6), &view);
    assert!(cq.resize(old.buffer(), 4, &view).is_err(), "too short");
    assert_eq!(cq.resize(new.buffer(), 5, &view), Ok(Pushed::Stored));
    cq.push(&completion(7), &view);
    assert_eq!(before.poll(), Some((0, 6)));
    assert_eq!(before.poll(), Some((5, 0)));
    assert_eq!(before.poll(), None);
    after.index = before.index;
    // The record stays the old one.
    before.consume();
    assert_eq!(after.poll(), Some((0, 7)));
    for n in 8..40 {
        assert_eq!(cq.push(&completion(n), &view), Pushed::Stored);
        assert_eq!(after.poll(), Some((0, n as u16)));
        old.record(0, after.index);
    }
}

/// A driver could mark every entry as stored; that a successor believes it of one at the most bounds its work and what
/// the queue can lose.
#[test]
fn a_successor_counts_one_entry_at_the_most_whatever_the_memory_says() {
    let kept = Kept::create().unwrap();
    with_queue(3, 64, |place, cq, view| {
        Driver::prepare(place, 3, 64);
        cq.keep_in(kept.cq(9).unwrap());
        cq.push(&completion(0), view);
        cq.push(&completion(1), view);
        for slot in 0..8u64 {
            place.put(slot * 64 + 60, &[0, 0, 0, 0]);
        }
        let mut next = Cq::new(setup(place, 3, 64)).unwrap();
        next.restore(kept.cq(9).unwrap(), view);
        assert_eq!(next.push(&completion(2), view), Pushed::Stored);
        // One was believed, so this is the fourth.
        let last = place.get(3 * 64 + 60, 4);
        assert_eq!(last[..2], 2u16.to_be_bytes());
    });
}

#[test]
fn a_resize_that_was_begun_is_not_refused_to_the_next_process() {
    let kept = Kept::create().unwrap();
    let memory = Memory::new();
    let (old, new) = (
        Place::new(&memory, 0, 64 << 3),
        Place::new(&memory, 1, 64 << 2),
    );
    let reader = memory.table.reader();
    let view = reader.pin();
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    cq.keep_in(kept.cq(9).unwrap());
    Driver::prepare(&old, 3, 64);
    // Exactly what the new buffer holds.
    for n in 0..4 {
        cq.push(&completion(n), &view);
    }
    assert_eq!(cq.resize(new.buffer(), 2, &view), Ok(Pushed::Stored));
    drop(cq);
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    cq.restore(kept.cq(9).unwrap(), &view);
    assert_eq!(cq.resize(new.buffer(), 2, &view), Ok(Pushed::Stored));
}

#[test]
fn a_resize_in_whose_middle_a_process_died_is_told_once() {
    let kept = Kept::create().unwrap();
    let memory = Memory::new();
    let (old, new) = (
        Place::new(&memory, 0, 64 << 3),
        Place::new(&memory, 1, 64 << 4),
    );
    let mut before = Driver::prepare(&old, 3, 64);
    let mut after = Driver::prepare(&new, 4, 64);
    let reader = memory.table.reader();
    let view = reader.pin();
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    cq.keep_in(kept.cq(9).unwrap());
    cq.push(&completion(0), &view);
    assert_eq!(cq.resize(new.buffer(), 4, &view), Ok(Pushed::Stored));
    drop(cq);
    // The command was not noted as done, so the buffer is the old one still, and the command comes again.
    let mut cq = Cq::new(setup(&old, 3, 64)).unwrap();
    cq.restore(kept.cq(9).unwrap(), &view);
    assert_eq!(cq.resize(new.buffer(), 4, &view), Ok(Pushed::Stored));
    cq.push(&completion(1), &view);
    assert_eq!(before.poll(), Some((0, 0)));
    assert_eq!(before.poll(), Some((5, 0)));
    assert_eq!(before.poll(), None, "told once");
    after.index = before.index;
    assert_eq!(after.poll(), Some((0, 1)));
}
