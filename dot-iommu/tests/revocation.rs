//! Readers and the writer at the same time: what `unmap` waits for, and what it does not.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests count as no tests for clippy.toml

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dot_iommu::{Access, Backing, DotTable, HostMapping, MAX_RANGES, Perm};

const PAGE: u64 = 0x1000;

fn mapped(mapping: &Arc<HostMapping>, offset: u64) -> Backing {
    Backing::Mapped {
        mapping: mapping.clone(),
        offset,
    }
}

#[test]
fn unmap_returns_only_after_pinned_readers_left() {
    let table = Arc::new(DotTable::new());
    let mapping = HostMapping::anonymous(PAGE).unwrap();
    let alive = Arc::downgrade(&mapping);
    table
        .map(0, PAGE, Perm::RW, Backing::Mapped { mapping, offset: 0 })
        .unwrap();
    let reader = table.reader();
    let view = reader.pin();
    // A state between the pinned one and the one without the range must not hide the pinned one.
    table.map(PAGE, PAGE, Perm::RW, Backing::Message).unwrap();

    let returned = AtomicBool::new(false);
    thread::scope(|scope| {
        let unmap = scope.spawn(|| {
            let unmapped = table.unmap(0, PAGE).unwrap();
            returned.store(true, Ordering::SeqCst);
            unmapped
        });
        // New pins see the range gone, which proves that the unmap has begun to wait.
        while table.reader().pin().lookup(0).is_some() {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(30));
        assert!(
            !returned.load(Ordering::SeqCst),
            "unmap returned under a pinned view"
        );
        assert!(alive.upgrade().is_some());
        let span = view.translate(0, 8, Access::Write).unwrap();
        span.copy_from(b"in use!!").unwrap();
        drop(view);
        assert_eq!(unmap.join().unwrap().ranges, 1);
    });
    assert!(
        alive.upgrade().is_none(),
        "the mapping outlived its last range"
    );
}

#[test]
fn reader_that_is_not_pinned_does_not_delay_unmap() {
    let table = DotTable::new();
    table.map(0, PAGE, Perm::RW, Backing::Message).unwrap();
    let reader = table.reader();
    drop(reader.pin());
    // Would never return if the idle handle counted.
    table.unmap(0, PAGE).unwrap();
    assert!(reader.pin().lookup(0).is_none());
}

#[test]
fn pinned_view_keeps_its_state() {
    let table = DotTable::new();
    table.map(0, PAGE, Perm::RW, Backing::Message).unwrap();
    let reader = table.reader();
    let view = reader.pin();
    table.map(PAGE, PAGE, Perm::RW, Backing::Message).unwrap();
    assert!(view.lookup(PAGE).is_none());
    let newer = reader.pin();
    assert!(newer.lookup(PAGE).is_some());
    assert!(newer.version() > view.version());
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each mapping is filled with its own number while it is private to the writer, and with garbage
/// once `unmap` has returned: a reader that ever sees garbage used a revoked range.
#[test]
fn readers_never_see_memory_after_its_unmap_returned() {
    const SLOTS: u64 = 8;
    const ROUNDS: u64 = 3000;
    const REVOKED: u8 = 0xee;
    let table = Arc::new(DotTable::new());
    let stop = AtomicBool::new(false);
    let copies = AtomicU64::new(0);
    thread::scope(|scope| {
        // Also when an assertion below fails: the readers must end, or the failure would hang.
        let _stop = StopOnDrop(&stop);
        for worker in 0..3u64 {
            let reader = table.reader();
            let (stop, copies) = (&stop, &copies);
            scope.spawn(move || {
                let mut buffer = [0u8; 64];
                let mut at = worker;
                while !stop.load(Ordering::Relaxed) {
                    let view = reader.pin();
                    for _ in 0..16 {
                        at = (at + 5) % (SLOTS * 4);
                        let addr = at * PAGE / 4;
                        let Ok(span) = view.translate(addr, 64, Access::Read) else {
                            continue;
                        };
                        span.copy_to(&mut buffer).unwrap();
                        let first = buffer[0];
                        assert_ne!(first, REVOKED, "read through a revoked range");
                        assert!(buffer.iter().all(|&byte| byte == first));
                        copies.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let fill = |mapping: &HostMapping, value: u8| {
            mapping
                .as_volatile_slice()
                .copy_from(&[value; PAGE as usize]);
        };
        let mut live: Vec<Option<Arc<HostMapping>>> = vec![None; SLOTS as usize];
        let mut round = 0;
        while round < ROUNDS || (copies.load(Ordering::Relaxed) < 1000 && round < ROUNDS * 1000) {
            let slot = (round * 3) % SLOTS;
            let slot_state = &mut live[slot as usize];
            match slot_state.take() {
                Some(mapping) => {
                    assert_eq!(table.unmap(slot * PAGE, PAGE).unwrap().ranges, 1);
                    assert_eq!(
                        Arc::strong_count(&mapping),
                        1,
                        "a state still holds the mapping"
                    );
                    fill(&mapping, REVOKED);
                }
                None => {
                    let mapping = HostMapping::anonymous(PAGE).unwrap();
                    fill(&mapping, (round % 200) as u8 + 1);
                    table
                        .map(slot * PAGE, PAGE, Perm::R, mapped(&mapping, 0))
                        .unwrap();
                    *slot_state = Some(mapping);
                }
            }
            round += 1;
        }
    });
    assert!(copies.into_inner() >= 1000);
}

#[test]
fn two_writers_never_lose_a_range() {
    let table = DotTable::new();
    thread::scope(|scope| {
        for half in 0..2u64 {
            let table = &table;
            scope.spawn(move || {
                for page in 0..500 {
                    let start = (page * 2 + half) * PAGE;
                    table.map(start, PAGE, Perm::RW, Backing::Message).unwrap();
                    if page % 3 == 0 {
                        assert_eq!(table.unmap(start, PAGE).unwrap().ranges, 1);
                    }
                }
            });
        }
    });
    assert_eq!(table.ranges().len(), 2 * (500 - 167));
}

#[test]
fn table_holds_its_limit_of_pages_and_no_more() {
    let mapping = HostMapping::anonymous(PAGE).unwrap();
    let table = DotTable::new();
    let pages = MAX_RANGES as u64;
    // An order that fills gaps as well as the tail: even pages up, odd pages down.
    let order = (0..pages)
        .step_by(2)
        .chain((0..pages).filter(|page| page % 2 == 1).rev());
    for page in order {
        table
            .map(page * PAGE, PAGE, Perm::RW, mapped(&mapping, 0))
            .unwrap();
    }
    let refused = table
        .map(pages * PAGE, PAGE, Perm::RW, Backing::Message)
        .unwrap_err();
    assert_eq!(refused.errno(), libc::ENOSPC);
    let reader = table.reader();
    {
        let view = reader.pin();
        for page in 0..pages {
            let entry = view.lookup(page * PAGE + 0xabc).unwrap();
            assert_eq!((entry.start(), entry.len()), (page * PAGE, PAGE));
        }
        assert!(view.lookup(pages * PAGE).is_none());
    }
    // Holes everywhere, one call each, then the rest in one.
    for page in (0..pages).step_by(3) {
        assert_eq!(table.unmap(page * PAGE, PAGE).unwrap().ranges, 1);
    }
    {
        let view = reader.pin();
        for page in 0..pages {
            assert_eq!(
                view.lookup(page * PAGE).is_some(),
                page % 3 != 0,
                "page {page}"
            );
        }
    }
    let rest = table.unmap(0, pages * PAGE).unwrap();
    assert_eq!(rest.ranges as u64, pages - pages.div_ceil(3));
    assert_eq!(rest.bytes, rest.ranges as u64 * PAGE);
    assert_eq!(Arc::strong_count(&mapping), 1);
}
