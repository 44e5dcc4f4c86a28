//! Drivers that break the specification: named cases, one table. After each the driver sees what the case
//! says, the peer never noticed, and a reset brings the function back.

mod offload;
mod packed;
mod receive;
mod registers;
mod transmit;

use crate::fixture::{Pair, flow, receive_until};
use distdpu_tests::packet::Random;
use distdpu_tests::ring::NEXT;
use distdpu_tests::ring::packed::Place;
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::features::{LINUX, PACKED, status};
use distdpu_tests::virtio_net::{Setup, VirtioNet};
use std::sync::atomic::{AtomicBool, Ordering};

/// What the driver sees.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Seen {
    /// The chain comes back in the used ring.
    Returned,
    /// The device asks for a reset: the ring itself is broken.
    NeedsReset,
    /// Nothing that can be told from outside.
    Nothing,
}

type Act = fn(&mut VirtioNet);

struct Case {
    name: &'static str,
    act: Act,
    seen: Seen,
    features: u64,
}

fn case(name: &'static str, seen: Seen, act: Act) -> Case {
    Case {
        name,
        act,
        seen,
        features: LINUX,
    }
}

/// Offers head 0 of the transmit queue, which the case has written, and kicks.
fn offer(a: &mut VirtioNet) {
    a.transmit_rings[0].offer(0).unwrap();
    a.notify(1).unwrap();
}

fn run(cases: &[Case], queue: impl Fn(&mut VirtioNet) -> u16) {
    let mut pair = Pair::new();
    pair.b.start(Setup::default()).unwrap();
    for case in cases {
        let setup = Setup {
            features: case.features,
            ..Setup::default()
        };
        pair.a
            .start(setup)
            .unwrap_or_else(|e| panic!("start before `{}`: {e}", case.name));
        let before = queue(&mut pair.a);
        (case.act)(&mut pair.a);
        if case.seen != Seen::Nothing {
            let wanted = format!("{:?} after `{}`", case.seen, case.name);
            wait_for(&wanted, SOON, || {
                let returned = queue(&mut pair.a) != before;
                let asks = pair.a.status().unwrap() & status::NEEDS_RESET != 0;
                let met = if case.seen == Seen::Returned {
                    returned
                } else {
                    asks
                };
                met.then_some(())
            })
            .unwrap();
        }
        the_peer_lives(&mut pair.b, case.name);
        pair.a
            .start(Setup::default())
            .unwrap_or_else(|e| panic!("start after `{}`: {e}", case.name));
        let marker = flow(1, 0).frame(333, 0xfeed);
        pair.b
            .send(&marker)
            .unwrap_or_else(|e| panic!("peer after `{}`: {e}", case.name));
        receive_until(&mut pair.a, &marker);
        let marker = flow(0, 1).frame(334, 0xfeed);
        pair.a
            .send(&marker)
            .unwrap_or_else(|e| panic!("after `{}`: {e}", case.name));
        receive_until(&mut pair.b, &marker);
    }
}

fn the_peer_lives(b: &mut VirtioNet, name: &str) {
    let status = b.status().unwrap();
    assert_eq!(status & status::NEEDS_RESET, 0, "the peer after `{name}`");
    assert!(b.link_up().unwrap(), "the peer's link after `{name}`");
    while let Ok((_, packet)) = b.receive_within(std::time::Duration::from_millis(1)) {
        // Whatever leaves the hostile guest must be a frame that fits the wire.
        assert!(
            packet.frame.len() >= 14 && packet.frame.len() <= 65550,
            "`{name}`"
        );
    }
}

#[test]
fn a_broken_queue_is_told_and_counted_and_the_others_go_on() {
    let mut pair = Pair::new();
    for features in [LINUX, PACKED] {
        let setup = Setup {
            features,
            ..Setup::default()
        };
        pair.start(setup, setup);
        let Pair { a, b, dpu } = &mut pair;
        let ring = &mut a.transmit_rings[0];
        let reason = if ring.packed.is_some() {
            for index in (0..ring.size).rev() {
                let place = Place { index, wrap: true };
                let area = ring.area();
                area.make_available(place, (0, 1), 0, NEXT).unwrap();
            }
            "ring-endless-chain"
        } else {
            ring.set_available_index(1000).unwrap();
            "ring-index-jump"
        };
        a.notify(1).unwrap();
        a.wait_config_change().unwrap();
        assert_ne!(a.status().unwrap() & status::NEEDS_RESET, 0);
        let stats = dpu.function_stats(0).unwrap();
        assert!(stats.to_string().contains(reason), "{stats}");
        // What arrives and what is asked does not notice.
        let packet = flow(1, 0).frame(300, 1);
        b.send(&packet).unwrap();
        assert_eq!(a.receive().unwrap().frame, packet.frame);
        assert_eq!(a.set_pairs(1).unwrap(), 0);
        pair.start(setup, setup);
        pair.works();
    }
}

#[test]
fn a_hostile_guest_does_not_slow_its_peer_to_a_stop() {
    // One side offers broken chains without pause while the other carries a conversation with itself being
    // reset now and then: no worker may hang in either.
    let mut pair = Pair::started(Setup::default());
    let stop = AtomicBool::new(false);
    let Pair { a, b, .. } = &mut pair;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            while !stop.load(Ordering::Relaxed) {
                a.start(Setup::default()).unwrap();
                for _ in 0..20 {
                    let head = random.below(256) as u16;
                    let at = (
                        random.next() >> random.below(40),
                        random.next() as u32 >> random.below(32),
                    );
                    let (flags, next) = (random.below(8) as u16, random.below(300) as u16);
                    a.transmit_rings[0]
                        .write_descriptor(head, at, flags, next)
                        .unwrap();
                    a.transmit_rings[0].offer(head).unwrap();
                    a.receive_rings[0]
                        .write_descriptor(head, at, flags, next)
                        .unwrap();
                    a.receive_rings[0].offer(head).unwrap();
                    a.notify(0).unwrap();
                    a.notify(1).unwrap();
                }
            }
        });
        for n in 0..300 {
            b.send(&flow(1, 0).frame(600, n)).unwrap();
            while b.try_receive(0).unwrap().is_some() {}
            if n % 30 == 0 {
                std::thread::sleep(QUIET / 10);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    pair.a.start(Setup::default()).unwrap();
    let marker = flow(1, 0).frame(333, 0xfeed);
    pair.b.send(&marker).unwrap();
    receive_until(&mut pair.a, &marker);
    while pair.b.receive_within(QUIET).is_ok() {}
    pair.works();
}
