//! Every kind of ring under traffic: layouts, sizes, IN_ORDER, notifications with data, reset of one queue.

use crate::fixture::{Pair, exchange, flow, works};
use crate::recovery::{kill, kills};
use distdpu_tests::dpu::Net;
use distdpu_tests::recovery::{successor, while_talking};
use distdpu_tests::virtio_net::control::OK;
use distdpu_tests::virtio_net::features::{
    self, EVENT_IDX, IN_ORDER, INDIRECT, LINUX, MRG_RXBUF, NOTIFICATION_DATA, PACKED, RING_RESET,
    common,
};
use distdpu_tests::virtio_net::{Guest, Setup};
use rustix::process::Signal;
use std::time::Duration;

/// What can be negotiated about rings, with each layout.
fn kinds() -> Vec<u64> {
    let mut kinds = Vec::new();
    for layout in [LINUX, PACKED] {
        for extra in [0, IN_ORDER, NOTIFICATION_DATA, IN_ORDER | NOTIFICATION_DATA] {
            kinds.push(layout | extra);
        }
        kinds.push(layout & !EVENT_IDX);
        kinds.push(layout & !INDIRECT);
        kinds.push(layout & !MRG_RXBUF);
    }
    kinds
}

#[test]
fn frames_pass_with_every_kind_of_ring() {
    let mut pair = Pair::new();
    for features in kinds() {
        let a = Setup {
            features,
            ..Setup::default()
        };
        let b = Setup {
            transmit_pieces: 5,
            receive_pieces: if features & MRG_RXBUF == 0 { 3 } else { 1 },
            ..a
        };
        pair.start(a, b);
        assert_eq!(
            pair.a.features & features,
            features,
            "all of it was negotiated"
        );
        pair.works();
        for n in 0..600 {
            let packet = flow(0, 1).frame(60 + n % 900, n as u64);
            exchange(&mut pair.a, &mut pair.b, &packet);
        }
        let small = |n| flow(1, 0).frame(100, n);
        let burst: Vec<_> = (0..20).map(small).collect();
        pair.b.send_burst(0, &burst).unwrap();
        for packet in &burst {
            assert_eq!(
                pair.a.receive().unwrap().frame,
                packet.frame,
                "{features:#x}"
            );
        }
        assert_eq!(pair.a.control((0, 0), &[1]).unwrap(), OK);
    }
}

#[test]
fn frames_are_merged_in_packed_rings_of_any_size() {
    let net = Net {
        queue_size: 256,
        ..Net::default()
    };
    let mut pair = Pair::with(net, Guest::default());
    for (features, queue_size) in [
        (PACKED, 9),
        (PACKED, 100),
        (PACKED | IN_ORDER, 37),
        (LINUX, 16),
    ] {
        let setup = Setup {
            features,
            queue_size,
            receive_buffers: queue_size,
            receive_buffer: 1100,
            indirect: queue_size > 50,
            transmit_pieces: 3,
            ..Setup::default()
        };
        pair.start(setup, setup);
        for n in 0..300 {
            let packet = flow(0, 1).frame(60 + 13 * n, n as u64);
            exchange(&mut pair.a, &mut pair.b, &packet);
        }
        pair.works();
    }
}

#[test]
fn the_largest_queues_work() {
    let net = Net {
        queue_size: 32768,
        ..Net::default()
    };
    let guest = Guest {
        memory: 160 << 20,
        ..Guest::default()
    };
    let mut pair = Pair::with(net, guest);
    for features in [LINUX, PACKED] {
        let setup = Setup {
            features,
            queue_size: 32768,
            ..Setup::default()
        };
        pair.a.start(setup).unwrap();
        pair.b.start(Setup::default()).unwrap();
        assert_eq!(pair.a.transmit_rings[0].size, 32768);
        pair.works();
    }
}

#[test]
fn a_queue_size_that_is_no_power_of_two_is_for_packed_rings_only() {
    let mut pair = Pair::new();
    for (features, size, taken) in [(LINUX, 100u16, 256), (PACKED, 100, 100), (PACKED, 257, 256)] {
        pair.a.negotiate(features).unwrap();
        pair.a
            .write_common(common::QUEUE_SIZE, &size.to_le_bytes())
            .unwrap();
        assert_eq!(pair.a.read_common16(common::QUEUE_SIZE).unwrap(), taken);
    }
}

#[test]
fn one_queue_can_be_reset_while_the_others_work() {
    let mut pair = Pair::new();
    for layout in [LINUX, PACKED] {
        let setup = Setup {
            features: layout | RING_RESET,
            fill: false,
            ..Setup::default()
        };
        pair.a.start(setup).unwrap();
        pair.b.start(Setup::default()).unwrap();
        for _ in 0..10 {
            // Another receive ring: empty, and what comes meanwhile waits or is dropped.
            pair.a.receive_rings[0] = pair.a.reset_queue(0).unwrap();
            pair.a.forget_receive(0);
            exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(200, 1));
            pair.a.fill_receive(0).unwrap();
            exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(200, 2));
        }
        works(&mut pair.a, &mut pair.b);
    }
    // Without the feature the register does nothing.
    pair.a.start(Setup::default()).unwrap();
    pair.a.write_common(common::QUEUE_SELECT, &[0, 0]).unwrap();
    pair.a.write_common(common::QUEUE_RESET, &[1, 0]).unwrap();
    assert_eq!(pair.a.read_common16(common::QUEUE_ENABLE).unwrap(), 1);
    pair.works();
}

#[test]
fn packed_rings_survive_their_ems() {
    for features in [PACKED, PACKED | IN_ORDER | features::RING_RESET] {
        let setup = Setup {
            features,
            queue_size: 61,
            receive_buffers: 61,
            ..Setup::default()
        };
        let mut pair = Pair::started(setup);
        let Pair { a, b, dpu } = &mut pair;
        while_talking([a, b], |tallies| {
            for round in 0..kills(30) {
                tallies[0].hears()?;
                tallies[1].hears()?;
                std::thread::sleep(Duration::from_micros(110_000 + 700 * round as u64));
                let em = round % 2;
                let old = dpu.em_pid(em)?;
                kill(old, Signal::KILL);
                successor(dpu, em, old)?;
            }
            tallies[0].hears()?;
            tallies[1].hears()
        })
        .unwrap();
        assert!(pair.a.link_up().unwrap() && pair.b.link_up().unwrap());
    }
}
