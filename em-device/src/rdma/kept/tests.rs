use super::*;
use crate::testing::kill;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The memory as another process would find it now.
fn successor(kept: &Kept) -> Arc<Kept> {
    Kept::open(kept.fd().try_clone_to_owned().unwrap()).unwrap()
}

fn key(class: u8, number: u64, part: u64) -> Key {
    Key {
        class,
        number,
        part,
    }
}

fn left(kept: &Kept) -> Vec<(Key, Vec<u8>)> {
    let records = successor(kept).store().records();
    records.into_iter().map(|r| (r.key, r.bytes)).collect()
}

#[test]
fn records_are_found_in_the_order_of_their_changes() {
    let kept = Kept::create().unwrap();
    let (a, b) = (key(1, 7, 0), key(2, 1 << 40, 0));
    for (key, text) in [(a, "first"), (b, "second, longer"), (a, "first again")] {
        let (head, tail) = text.as_bytes().split_at(3);
        assert!(kept.store().put(key, &[head, tail]));
    }
    let expected = [(b, &b"second, longer"[..]), (a, b"first again")];
    let expected: Vec<_> = expected.map(|(key, text)| (key, text.to_vec())).into();
    assert_eq!(left(&kept), expected);
}

#[test]
fn a_change_counts_when_it_is_committed_and_not_before() {
    let kept = Kept::create().unwrap();
    kept.store().put(key(1, 1, 0), &[b"old"]);
    let change = kept.store().prepare(key(1, 1, 0), &[&[9; 1000]]).unwrap();
    assert_eq!(left(&kept), [(key(1, 1, 0), b"old".to_vec())]);
    kept.store().commit(change);
    assert_eq!(left(&kept), [(key(1, 1, 0), vec![9; 1000])]);
    let removal = kept.store().prepare_removal(1, 1).unwrap();
    assert_eq!(left(&kept).len(), 1);
    kept.store().commit(removal);
    assert!(left(&kept).is_empty());
    assert!(kept.store().prepare_removal(1, 1).is_none());
}

#[test]
fn parts_go_with_their_object() {
    let kept = Kept::create().unwrap();
    for (number, part) in [(1, 0), (1, 1), (1, 2), (2, 0)] {
        kept.store().put(key(5, number, part), &[&[part as u8]]);
    }
    // Parts without their object are those of a removal that was not finished.
    kept.store().put(key(6, 1, 3), &[b"alone"]);
    kept.store().remove(5, 1);
    assert_eq!(left(&kept), [(key(5, 2, 0), vec![0])]);
    assert!(successor(&kept).store().len() == 1);
}

#[test]
fn a_note_says_whether_its_command_was_executed() {
    let kept = Kept::create().unwrap();
    let command = Outcome {
        slot: 3,
        token: 77,
        hash: 0xdead_beef,
        silent: false,
        output: None,
        event: None,
    };
    assert_eq!(kept.note().load(), None);
    let change = kept.store().prepare(key(1, 1, 0), &[b"new"]).unwrap();
    let output: Vec<u8> = (0..16).collect();
    kept.note().begin(&command, Some(&change), &output);
    assert_eq!(successor(&kept).note().load(), Some(command));
    kept.store().commit(change);
    kept.note().tells(5, 99);
    let done = Outcome {
        output: Some(output.try_into().unwrap()),
        event: Some((5, 99)),
        ..command
    };
    let next = successor(&kept);
    assert_eq!(next.note().load(), Some(done));
    // Of a removal too, and its entry is not used again while the note counts.
    let removal = next.store().prepare_removal(1, 1).unwrap();
    next.note().begin(&command, Some(&removal), &[0; 16]);
    next.store().commit(removal);
    let third = successor(&next);
    third.store().put(key(1, 2, 0), &[b"other"]);
    assert_eq!(third.note().load().unwrap().output, Some([0; 16]));
    third.note().clear();
    assert_eq!(third.note().load(), None);
}

#[test]
fn what_is_finishing_counts_when_the_completion_is_there() {
    let kept = Kept::create().unwrap();
    let mut place = kept.qp(65535).unwrap();
    assert!(kept.qp(65536).is_none());
    let at = |position, psn| Finished { position, psn };
    let begun = Standing {
        state: 3,
        sent: at(65535, 0xff_ffff),
        received: at(5, 100),
        detail: Detail::None,
        atomic: None,
        atomics: vec![(7, 70)],
    };
    place.begin(9, &begun);
    let read = |has: bool| {
        let place = kept.qp(65535).unwrap();
        place
            .standing(9, |n| has && n == 4, |n| has && n == 6)
            .unwrap()
    };
    assert!(
        kept.qp(65535)
            .unwrap()
            .standing(8, |_| true, |_| true)
            .is_none()
    );
    assert_eq!(read(true).sent, begun.sent);
    place.sending(at(0, 3), 4);
    place.receiving(at(6, 101), 6);
    assert_eq!(
        (read(false).sent, read(false).received),
        (begun.sent, begun.received)
    );
    assert_eq!(
        (read(true).sent, read(true).received),
        (at(0, 3), at(6, 101))
    );
    place.sent(at(1, 4));
    let part = Detail::Access {
        read: true,
        next: 1 << 50,
        key: 0x1234_5678,
        left: 5,
        total: 6,
    };
    place.received(at(6, 102), part);
    place.set_state(6);
    place.atomic(102);
    let now = read(true);
    assert_eq!(
        (now.sent, now.received, now.detail),
        (at(1, 4), at(6, 102), part)
    );
    assert_eq!(
        (now.state, now.atomic, now.atomics),
        (6, Some(102), vec![(7, 70)])
    );
    // A message that was coming in is over with its completion.
    place.receiving(at(7, 103), 6);
    assert_eq!(
        (read(true).detail, read(false).detail),
        (Detail::None, part)
    );
    (0..20).for_each(|n| place.atomic_done(n, n.into()));
    let last: Vec<_> = (4..20).map(|n| (n, u64::from(n))).collect();
    assert_eq!(read(false).atomics, last);
}

/// The second process dies while it makes the place its own, at any store; the third one finds what the first left.
#[test]
fn a_place_says_what_it_said_while_a_successor_goes_on_with_it() {
    let at = |position, psn| Finished { position, psn };
    let send = Detail::Send {
        len: 5000,
        receive: Some(7),
    };
    for detail in [Detail::None, send] {
        for stores in 0.. {
            let kept = Kept::create().unwrap();
            let mut place = kept.qp(3).unwrap();
            let begun = Standing {
                state: 3,
                sent: at(1, 2),
                received: at(5, 100),
                detail: Detail::None,
                atomic: None,
                atomics: vec![(7, 70)],
            };
            place.begin(9, &begun);
            place.received(at(6, 104), detail);
            place.sending(at(2, 3), 4);
            let find = || {
                let place = kept.qp(3).unwrap();
                place.standing(9, |n| n == 4, |_| false)
            };
            let left = find().unwrap();
            assert_eq!((left.sent, left.detail), (at(2, 3), detail));
            let ended = kill::after(stores, || kept.qp(3).unwrap().go_on(9, &left));
            let found = find().expect("the place is never nobody's");
            assert_eq!(
                (found.state, found.sent, found.received, found.detail),
                (left.state, left.sent, left.received, left.detail),
                "after {stores} stores"
            );
            assert_eq!(found.atomics, left.atomics);
            if ended {
                assert!(stores > 2);
                break;
            }
        }
    }
}

#[test]
fn another_version_and_an_incomplete_memory_are_refused() {
    let kept = Kept::create().unwrap();
    let open = || Kept::open(kept.fd().try_clone_to_owned().unwrap()).map(|_| ());
    kept.set_broken();
    assert!(matches!(open(), Err(KeptError::Broken)));
    kept.clear();
    open().unwrap();
    let version = kept.memory.word(VERSION_AT).unwrap();
    version.store(VERSION + 1, Ordering::Relaxed);
    assert!(matches!(open(), Err(KeptError::Version(_))));
    version.store(VERSION, Ordering::Relaxed);
    kept.store().put(key(1, 1, 0), &[b"x"]);
    let entry = kept.memory.word(memory::ENTRY_WORDS).unwrap();
    entry.store(entry.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    assert!(matches!(open(), Err(KeptError::Record(_))));
    let small = rustix::fs::memfd_create("small", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(matches!(Kept::open(small), Err(KeptError::Size(0))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_successor_finds_what_was_last_written(
        steps in prop::collection::vec((0u8..4, 0u64..6, 0u64..3, 0usize..3000), 1..80),
    ) {
        let mut kept = Kept::create().unwrap();
        let mut model: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
        for (n, (what, number, part, len)) in steps.into_iter().enumerate() {
            let key = key(1, number, part);
            let whole = Key { part: 0, ..key };
            match what {
                0 => {
                    kept.store().remove(1, number);
                    if model.contains_key(&whole) {
                        model.retain(|k, _| k.number != number);
                    }
                }
                1 => {
                    // The process dies with a change that does not count.
                    let _ = kept.store().prepare(key, &[&[1; 99]]);
                    kept = successor(&kept);
                }
                _ if part == 0 || model.contains_key(&whole) => {
                    let bytes = vec![n as u8; len];
                    prop_assert!(kept.store().put(key, &[&bytes]));
                    model.insert(key, bytes);
                }
                _ => {}
            }
        }
        let found: BTreeMap<_, _> = left(&kept).into_iter().collect();
        prop_assert_eq!(found, model);
    }
}
