//! A process that is killed at any of its stores leaves a state that a successor can go on with: each change is there as
//! a whole or not at all.

use super::word::kill;
use super::*;

/// Everything that a successor looks at.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    agreed: Option<Capabilities>,
    pending: Option<Pending>,
    maps: Vec<(u32, MapRecord)>,
    registers: Option<Vec<u8>>,
    data_path: Option<Vec<u8>>,
}

fn seen(fd: &OwnedFd) -> Seen {
    let state = State::open(fd).unwrap();
    Seen {
        agreed: state.agreed(),
        pending: state.pending(),
        maps: state.maps(),
        registers: state.load(Section::Registers),
        data_path: state.load(Section::DataPath),
    }
}

/// Kills a process at each store of `act`; `judge` gets what was there before, what a successor sees, and what is there
/// after all of it.
fn at_each_store(prepare: fn(&State), act: fn(&State), judge: fn(&Seen, &Seen, &Seen)) {
    let (state, fd) = State::create().unwrap();
    prepare(&state);
    let before = seen(&fd);
    act(&state);
    let after = seen(&fd);
    for stores in 0.. {
        let (state, fd) = State::create().unwrap();
        prepare(&state);
        let ended = kill::after(stores, || act(&state));
        judge(&before, &seen(&fd), &after);
        if ended {
            assert!(stores > 0, "there was a store to be killed at");
            return;
        }
    }
}

/// Before or after, and nothing between.
fn whole(before: &Seen, now: &Seen, after: &Seen) {
    assert!(
        now == before || now == after,
        "{now:?} of {before:?} and {after:?}"
    );
}

fn capabilities() -> Capabilities {
    Capabilities {
        max_fds: 7,
        max_data_xfer: 4711,
        ..Capabilities::default()
    }
}

fn map(n: u64) -> MapRecord {
    MapRecord {
        address: n << 30,
        size: n << 20,
        offset: n << 12,
        perm: Perm::RW,
        file: Some(n as u32),
    }
}

/// A client that has used everything before.
fn used(state: &State) {
    state.set_agreed(&capabilities());
    for slot in 0..3 {
        state.set_map(slot, &map(u64::from(slot) + 1));
    }
    state.remove_map(1);
    state.save(Section::Registers, &[1; 40]);
    state.save(Section::DataPath, &[2; 24]);
    state.begin(7, 9);
    // As if the kernel had said so.
    state.memory.pretend_sent(16);
    state.end();
}

fn nothing(_: &State) {}

#[test]
fn what_was_agreed_on_is_there_as_a_whole() {
    at_each_store(nothing, |state| state.set_agreed(&capabilities()), whole);
}

#[test]
fn a_map_is_there_as_a_whole_in_a_new_slot_and_in_one_that_was_used() {
    at_each_store(nothing, |state| assert!(state.set_map(2, &map(9))), whole);
    at_each_store(used, |state| assert!(state.set_map(1, &map(9))), whole);
    at_each_store(used, |state| assert!(state.set_map(3, &map(9))), whole);
}

#[test]
fn a_map_goes_as_a_whole() {
    at_each_store(used, |state| state.remove_map(2), whole);
}

#[test]
fn a_section_is_replaced_as_a_whole_whatever_the_lengths() {
    at_each_store(
        nothing,
        |state| assert!(state.save(Section::Registers, &[5; 9])),
        whole,
    );
    at_each_store(
        used,
        |state| assert!(state.save(Section::Registers, &[5; 9])),
        whole,
    );
    at_each_store(
        used,
        |state| assert!(state.save(Section::DataPath, &[5; 80])),
        whole,
    );
    at_each_store(used, |state| state.drop_section(Section::DataPath), whole);
}

#[test]
fn a_request_does_not_look_replied_to_by_the_reply_of_the_one_before() {
    at_each_store(
        used,
        |state| state.begin(8, 9),
        |before, now, after| {
            whole(before, now, after);
            assert!(
                now.pending.is_none_or(|pending| !pending.replied),
                "{now:?}"
            );
        },
    );
}

#[test]
fn a_request_that_was_replied_to_is_done_with_at_once() {
    fn replied(state: &State) {
        used(state);
        state.begin(8, 9);
        state.memory.pretend_sent(16);
    }
    at_each_store(replied, State::end, whole);
}

/// While the memory is cleared it has no client; the next one finds nothing of the last.
#[test]
fn a_client_finds_nothing_of_the_one_before() {
    fn next(state: &State) {
        state.clear();
        state.set_agreed(&Capabilities::default());
    }
    at_each_store(used, next, |before, now, after| {
        if now.agreed.is_some() {
            whole(before, now, after);
        }
        assert!(after.maps.is_empty() && after.registers.is_none());
    });
}
