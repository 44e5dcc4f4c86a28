//! Tests of the ring's state machine.

use super::*;
use crate::registers::shm::{self, Ring};
use proptest::prelude::*;
use std::collections::VecDeque;

const WRITE: Access = Access::Write {
    address: 4,
    byte_enable: 3,
    value: 5,
};

fn ring() -> Ring {
    shm::create().unwrap().0.requests
}

fn set(ring: &Ring, position: u64, state: u32) {
    ring.slot(position)
        .state
        .atomic()
        .store(state, Ordering::Release);
}

#[test]
fn access_and_completion_pass_through_a_slot() {
    let ring = ring();
    let (mut requester, mut server) = (Requester::default(), Server::default());
    for lap in 0..3 * SLOTS as u64 {
        assert_eq!(requester.submit(&ring, WRITE), Ok(Submitted::At(lap)));
        assert_eq!(completion(&ring, lap), Ok(None));
        assert_eq!(server.take(&ring), Ok(Some(WRITE)));
        server.complete(&ring, lap as u32).unwrap();
        assert_eq!(completion(&ring, lap), Ok(Some(lap as u32)));
        assert_eq!(server.take(&ring), Ok(None));
    }
}

#[test]
fn full_ring_names_the_access_it_waits_for() {
    let ring = ring();
    let (mut requester, mut server) = (Requester::default(), Server::default());
    for _ in 0..SLOTS {
        requester.submit(&ring, WRITE).unwrap();
    }
    assert_eq!(requester.submit(&ring, WRITE), Ok(Submitted::Full(0)));
    server.take(&ring).unwrap();
    server.complete(&ring, 9).unwrap();
    assert_eq!(completion(&ring, 0), Ok(Some(9)));
    assert_eq!(
        requester.submit(&ring, WRITE),
        Ok(Submitted::At(SLOTS as u64))
    );
}

#[test]
fn completion_is_seen_though_the_server_sleeps_in_its_slot_again() {
    let ring = ring();
    let (mut requester, mut server) = (Requester::default(), Server::default());
    for _ in 0..SLOTS {
        requester.submit(&ring, WRITE).unwrap();
    }
    for n in 0..SLOTS {
        server.take(&ring).unwrap();
        server.complete(&ring, n as u32).unwrap();
    }
    server.wait(&ring, Duration::from_millis(1));
    assert_eq!(completion(&ring, 0), Ok(Some(0)));
    assert_eq!(
        requester.submit(&ring, WRITE),
        Ok(Submitted::At(SLOTS as u64))
    );
}

#[test]
fn position_wraps_in_the_state_word_without_harm() {
    let ring = ring();
    let start = (1 << 29) - 2;
    let mut requester = Requester { next: start };
    let mut server = Server { head: start };
    for position in start..start + 2 * SLOTS as u64 {
        if position < start + SLOTS as u64 {
            set(&ring, position, free(position));
        }
        assert_eq!(requester.submit(&ring, WRITE), Ok(Submitted::At(position)));
        assert_eq!(server.take(&ring), Ok(Some(WRITE)));
        server.complete(&ring, 0).unwrap();
    }
}

#[test]
fn invalid_access_in_shared_memory_is_refused() {
    let spoil: [fn(&Slot); 3] = [
        |slot| slot.op.store(9, Ordering::Relaxed),
        |slot| slot.address.store(6, Ordering::Relaxed),
        |slot| slot.byte_enable.store(0x100, Ordering::Relaxed),
    ];
    for spoil in spoil {
        let ring = ring();
        Requester::default().submit(&ring, WRITE).unwrap();
        spoil(ring.slot(0));
        assert!(Server::default().take(&ring).is_err());
    }
}

#[test]
fn access_that_changes_while_it_is_handled_is_noticed() {
    let ring = ring();
    let mut server = Server::default();
    Requester::default().submit(&ring, WRITE).unwrap();
    server.take(&ring).unwrap();
    set(&ring, 0, word(7, REQUEST));
    assert!(server.complete(&ring, 0).is_err());
}

proptest! {
    /// Whatever a hostile peer writes, each side goes on, waits or reports it; nothing else.
    #[test]
    fn hostile_words_never_do_harm(words in prop::collection::vec(any::<u32>(), 1..64)) {
        let ring = ring();
        let (mut requester, mut server) = (Requester::default(), Server::default());
        for state in words {
            set(&ring, server.head(), state);
            match server.take(&ring) {
                Ok(Some(_)) => drop(server.complete(&ring, 0)),
                Ok(None) => server.wait(&ring, Duration::from_micros(1)),
                Err(Corrupt(_)) => {}
            }
            set(&ring, requester.next, state);
            if let Ok(Submitted::At(position)) = requester.submit(&ring, WRITE) {
                set(&ring, position, state.rotate_left(7));
                let _ = completion(&ring, position);
                wait_for_completion(&ring, position, Duration::from_micros(1));
            }
        }
    }

    /// Any interleaving of the two sides' steps keeps order and gives every access its own
    /// completion.
    #[test]
    fn accesses_keep_their_order(steps in prop::collection::vec(0u8..4, 1..2000)) {
        let ring = ring();
        let (mut requester, mut server) = (Requester::default(), Server::default());
        let mut outstanding = VecDeque::new();
        let mut value = 0;
        for step in steps {
            match step {
                0 | 1 => {
                    let access = Access::Post { address: 0, byte_enable: 0xf, value };
                    match requester.submit(&ring, access).unwrap() {
                        Submitted::At(_) => {
                            outstanding.push_back(access);
                            value += 1;
                        }
                        Submitted::Full(_) => prop_assert_eq!(outstanding.len(), SLOTS),
                    }
                }
                2 => {
                    let access = server.take(&ring).unwrap();
                    prop_assert_eq!(access, outstanding.pop_front());
                    if access.is_some() {
                        server.complete(&ring, 0).unwrap();
                    }
                }
                _ => if outstanding.is_empty() {
                    server.wait(&ring, Duration::from_nanos(1));
                },
            }
        }
    }
}
