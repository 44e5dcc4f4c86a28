//! The vhost-user face: a function as virtqueues, opposite one that is a PCIe function.

mod hostile;

use crate::fixture::{exchange, flow, receive_until, works};
use crate::recovery::replace;
use distdpu_tests::dpu::{Dpu, Face, Net};
use distdpu_tests::memory::Shape;
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::vhost_user::{FrontEnd, Slots};
use distdpu_tests::virtio_net::features::{
    EVENT_IDX, IN_ORDER, INDIRECT, LINUX, MRG_RXBUF, PACKED, RING_RESET,
};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

/// A guest behind a vhost-user front end, and one behind vfio-user.
struct Mixed {
    a: VirtioNet,
    front: FrontEnd,
    b: VirtioNet,
    dpu: Dpu,
}

impl Mixed {
    fn new(slots: Slots, guest: Guest) -> Self {
        Self::with(Net::default(), slots, guest)
    }

    fn with(net: Net, slots: Slots, guest: Guest) -> Self {
        let vhost = Net {
            face: Face::VhostUser,
            ..net.clone()
        };
        let dpu = Dpu::start(&[vhost, net]).unwrap();
        let front = FrontEnd::connect(&dpu.socket(0), slots).unwrap();
        let a = front.driver(guest).unwrap();
        let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
        Self { a, front, b, dpu }
    }

    fn started() -> Self {
        let mut mixed = Self::new(Slots::Table, Guest::default());
        mixed.start(Setup::default());
        mixed
    }

    fn start(&mut self, a: Setup) {
        self.a.start(a).unwrap();
        self.b.start(Setup::default()).unwrap();
    }

    fn works(&mut self) {
        works(&mut self.a, &mut self.b);
    }
}

/// Waits until `dpuctl` says this of the function with the front end.
fn state(dpu: &Dpu, wanted: &str) {
    wait_for(wanted, SOON, || {
        let all = dpu.ctl(&["functions"]).ok()?;
        (all["functions"][0]["state"] == wanted).then_some(())
    })
    .unwrap();
}

/// What can be negotiated about rings, with each layout.
fn kinds() -> impl Iterator<Item = u64> {
    [LINUX, PACKED].into_iter().flat_map(|layout| {
        [
            layout,
            layout | IN_ORDER,
            layout & !EVENT_IDX,
            layout & !INDIRECT,
            layout & !MRG_RXBUF,
        ]
    })
}

fn split_memory() -> Guest {
    Guest {
        shape: Shape::Split,
        ..Guest::default()
    }
}

#[test]
fn frames_pass_to_the_other_face_with_every_kind_of_ring() {
    let mut mixed = Mixed::new(Slots::Table, split_memory());
    for features in kinds() {
        mixed.start(Setup {
            features,
            ..Setup::default()
        });
        mixed.works();
        for n in 0..600 {
            let packet = flow(0, 1).frame(60 + n % 900, n as u64);
            exchange(&mut mixed.a, &mut mixed.b, &packet);
        }
        let small = |n| flow(1, 0).frame(100, n);
        let burst: Vec<_> = (0..20).map(small).collect();
        mixed.b.send_burst(0, &burst).unwrap();
        for packet in &burst {
            assert_eq!(mixed.a.receive().unwrap().frame, packet.frame);
        }
    }
}

#[test]
fn two_front_ends_reach_each_other_also_by_large_segments() {
    let net = Net {
        face: Face::VhostUser,
        ..Net::default()
    };
    let dpu = Dpu::start(&[net.clone(), net]).unwrap();
    let [mut a, mut b] = [0, 1].map(|n| {
        let front = FrontEnd::connect(&dpu.socket(n), Slots::Single).unwrap();
        let mut driver = front.driver(Guest::default()).unwrap();
        driver.start(Setup::default()).unwrap();
        driver
    });
    works(&mut a, &mut b);
    let large = flow(0, 1).tcp().large(1000, &[7; 40_000], 1448);
    a.send(&large).unwrap();
    let got = b.receive().unwrap();
    assert_eq!(got.frame.len(), large.frame.len());
    assert_eq!(got.header.gso_size, 1448);
}

#[test]
fn pairs_that_are_enabled_are_used_and_no_others() {
    let net = Net {
        pairs: 4,
        ..Net::default()
    };
    let mut mixed = Mixed::with(net, Slots::Table, Guest::default());
    for features in [LINUX, PACKED] {
        mixed.front.use_pairs(4).unwrap();
        let setup = Setup {
            features,
            pairs: 4,
            ..Setup::default()
        };
        mixed.start(setup);
        assert_eq!(mixed.a.max_pairs().unwrap(), 4);
        for enabled in [4, 2, 1, 3, 4] {
            mixed.front.use_pairs(enabled).unwrap();
            let mut seen = BTreeSet::new();
            for port in 0..64 {
                let packet = flow(1, 0).port(1000 + port).frame(200, 1);
                mixed.b.send(&packet).unwrap();
                let (pair, got) = mixed.a.receive_within(SOON).unwrap();
                assert_eq!(got.frame, packet.frame);
                seen.insert(pair as u16);
            }
            assert_eq!(seen, (0..enabled).collect());
            for pair in 0..enabled {
                let packet = flow(0, 1).port(2000 + pair).frame(300, 2);
                mixed.a.send_on(pair.into(), &packet).unwrap();
                assert_eq!(mixed.b.receive().unwrap().frame, packet.frame);
            }
        }
    }
}

#[test]
fn buffers_of_a_transmit_ring_that_is_not_enabled_come_back_unsent() {
    let net = Net {
        pairs: 2,
        ..Net::default()
    };
    let mut mixed = Mixed::with(net, Slots::Table, Guest::default());
    for features in [LINUX, PACKED] {
        mixed.front.use_pairs(1).unwrap();
        mixed.start(Setup {
            features,
            pairs: 2,
            ..Setup::default()
        });
        let ignored = flow(0, 1).frame(200, 1);
        for _ in 0..1000 {
            mixed.a.send_on(1, &ignored).unwrap();
        }
        let packet = flow(0, 1).frame(300, 2);
        mixed.a.send_on(0, &packet).unwrap();
        assert_eq!(mixed.b.receive().unwrap().frame, packet.frame);
        mixed.front.use_pairs(2).unwrap();
        mixed.a.send_on(1, &packet).unwrap();
        assert_eq!(mixed.b.receive().unwrap().frame, packet.frame);
    }
}

#[test]
fn a_device_that_is_paused_goes_on_where_it_was() {
    for slots in [Slots::Table, Slots::Single] {
        let mut mixed = Mixed::new(slots, split_memory());
        for features in kinds() {
            mixed.start(Setup {
                features,
                queue_size: 64,
                ..Setup::default()
            });
            for round in 0..30 {
                let positions = mixed.front.pause().unwrap();
                assert_eq!(mixed.front.pause().unwrap(), positions);
                // What was sent meanwhile is there when it goes on.
                let packet = flow(0, 1).frame(100 + round, 7);
                assert!(mixed.a.try_queue(0, &packet).unwrap());
                mixed.a.kick_transmit(0).unwrap();
                assert!(mixed.b.receive_within(QUIET / 50).is_err());
                mixed.front.go_on().unwrap();
                assert_eq!(mixed.b.receive().unwrap().frame, packet.frame);
                for n in 0..5 {
                    exchange(&mut mixed.b, &mut mixed.a, &flow(1, 0).frame(300, n));
                    exchange(&mut mixed.a, &mut mixed.b, &flow(0, 1).frame(300, n));
                }
            }
        }
    }
}

#[test]
fn one_queue_can_be_reset_while_the_others_work() {
    let mut mixed = Mixed::new(Slots::Table, Guest::default());
    for layout in [LINUX, PACKED] {
        let setup = Setup {
            features: layout | RING_RESET,
            ..Setup::default()
        };
        mixed.start(setup);
        for n in 0..10 {
            mixed.a.write_common(0x16, &[0, 0]).unwrap();
            mixed.a.write_common(0x3a, &[1, 0]).unwrap();
            exchange(&mut mixed.a, &mut mixed.b, &flow(0, 1).frame(200, n));
        }
    }
}

#[test]
fn memory_that_no_ring_uses_comes_and_goes_under_traffic() {
    let mut mixed = Mixed::new(Slots::Single, split_memory());
    mixed.start(Setup::default());
    for n in 0..100 {
        // The test's allocations are far from the last quarter.
        mixed.front.replug(3).unwrap();
        exchange(&mut mixed.a, &mut mixed.b, &flow(0, 1).frame(200, n));
        exchange(&mut mixed.b, &mut mixed.a, &flow(1, 0).frame(200, n));
    }
    let stats = mixed.dpu.function_stats(0).unwrap();
    assert_eq!(stats["dma_ranges"], 4);
}

/// Frames that the function with the front end has received.
fn received(dpu: &Dpu) -> Option<u64> {
    let stats = dpu.function_stats(0).ok()?;
    stats["queues"][0]["packets"].as_u64()
}

#[test]
fn every_page_that_the_device_writes_is_logged_as_long_as_that_is_wanted() {
    let mut mixed = Mixed::new(Slots::Table, Guest::default());
    for features in kinds() {
        mixed.start(Setup {
            features,
            ..Setup::default()
        });
        let bytes = mixed.a.memory.end() / 4096 / 8;
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let mut log = vec![0; bytes as usize];
        mixed.front.log(Some((file.as_fd(), bytes))).unwrap();
        let pages = mixed.a.memory.end() / 4096;
        let page = |a: &VirtioNet, n| a.memory.bytes(4096 * n, 4096).unwrap();
        let before: Vec<_> = (0..pages).map(|n| page(&mixed.a, n)).collect();
        let packets: Vec<_> = (0..40).map(|n| flow(1, 0).frame(900, n)).collect();
        let already = received(&mixed.dpu).unwrap();
        for packet in &packets {
            mixed.b.send(packet).unwrap();
        }
        mixed.b.drain(0).unwrap();
        wait_for("the frames", SOON, || {
            (received(&mixed.dpu)? >= already + 40).then_some(())
        })
        .unwrap();
        mixed.front.pause().unwrap();
        rustix::io::pread(&file, &mut log[..], 0).unwrap();
        let logged = |n: u64| log[(n / 8) as usize] >> (n % 8) & 1 == 1;
        let mut written = 0;
        for (n, before) in (0..pages).zip(&before) {
            let changed = page(&mixed.a, n) != *before;
            written += u64::from(changed);
            assert!(!changed || logged(n), "page {n} was written and not logged");
        }
        assert!(written > 8, "{written} pages");
        let count = (0..pages).filter(|n| logged(*n)).count() as u64;
        // Buffers as a whole, which are large without merging.
        let most = if features & MRG_RXBUF == 0 { 2000 } else { 100 };
        assert!(count < written + most, "{count} pages for {written}");
        mixed.front.go_on().unwrap();
        for packet in &packets {
            assert_eq!(mixed.a.receive().unwrap().frame, packet.frame);
        }
        // Not any more.
        rustix::io::pwrite(&file, &vec![0; bytes as usize], 0).unwrap();
        exchange(&mut mixed.b, &mut mixed.a, &flow(1, 0).frame(900, 1));
        rustix::io::pread(&file, &mut log[..], 0).unwrap();
        assert!(log.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_driver_that_starts_again_finds_the_device_as_new() {
    let mut mixed = Mixed::started();
    for n in 0..50 {
        let features = if n % 2 == 0 { LINUX } else { PACKED };
        mixed
            .a
            .start(Setup {
                features,
                ..Setup::default()
            })
            .unwrap();
        exchange(&mut mixed.a, &mut mixed.b, &flow(0, 1).frame(400, n));
        exchange(&mut mixed.b, &mut mixed.a, &flow(1, 0).frame(400, n));
    }
}

#[test]
fn front_ends_come_and_go() {
    let mixed = Mixed::started();
    let Mixed {
        a,
        front,
        mut b,
        dpu,
    } = mixed;
    state(&dpu, "running");
    drop((a, front));
    for _ in 0..20 {
        state(&dpu, "waiting");
        let front = FrontEnd::connect(&dpu.socket(0), Slots::Table).unwrap();
        state(&dpu, "connected");
        let mut a = front.driver(Guest::default()).unwrap();
        a.start(Setup::default()).unwrap();
        works(&mut a, &mut b);
        state(&dpu, "running");
    }
    let all = dpu.ctl(&["functions"]).unwrap();
    assert_eq!(all["functions"][0]["face"], "vhost-user");
    assert_eq!(all["functions"][1]["face"], "vfio-user");
}

#[test]
fn a_front_end_goes_on_with_the_next_em_when_one_is_killed() {
    let mut mixed = Mixed::started();
    for n in 0..10 {
        replace(&mixed.dpu, 0);
        // Sent while nobody was there.
        let packet = flow(0, 1).frame(200, n);
        mixed.a.send(&packet).unwrap();
        mixed.front.reconnect(&mixed.dpu.socket(0)).unwrap();
        receive_until(&mut mixed.b, &packet);
        let answer = flow(1, 0).frame(300, n);
        mixed.b.send(&answer).unwrap();
        receive_until(&mut mixed.a, &answer);
    }
}

#[test]
fn an_om_that_is_killed_is_not_missed_and_another_takes_the_function_over() {
    let mut mixed = Mixed::started();
    for _ in 0..3 {
        mixed.dpu.kill_om().unwrap();
        mixed.works();
        mixed.dpu.start_another_om().unwrap();
        mixed.works();
    }
    state(&mixed.dpu, "running");
}

#[test]
fn an_em_connects_to_a_front_end_that_listens_and_does_so_again() {
    let client = Net {
        face: Face::VhostUserClient,
        ..Net::default()
    };
    let dpu = Dpu::start(&[client, Net::default()]).unwrap();
    let listener = UnixListener::bind(dpu.socket(0)).unwrap();
    let front = FrontEnd::accept(&listener, Slots::Table).unwrap();
    let mut a = front.driver(Guest::default()).unwrap();
    let mut b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    a.start(Setup::default()).unwrap();
    b.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
    let old = dpu.em_pid(0).unwrap();
    crate::recovery::kill(old, Signal::KILL);
    front.accept_again(&listener).unwrap();
    let packet = flow(0, 1).frame(200, 3);
    a.send(&packet).unwrap();
    receive_until(&mut b, &packet);
    let all = dpu.ctl(&["functions"]).unwrap();
    assert_eq!(all["functions"][0]["face"], "vhost-user client");
    // The path is the front end's.
    assert!(dpu.socket(0).exists());
}
