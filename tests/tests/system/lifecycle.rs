//! Functions that start, stop, reset, lose their VMM, their peer, their memory or their OM.

use crate::fixture::{Pair, exchange, flow, receive_until, works};
use crate::recovery::kill;
use distdpu_tests::client::Client;
use distdpu_tests::dpu::Net;
use distdpu_tests::memory::{GuestMemory, Range, Shape};
use distdpu_tests::pci;
use distdpu_tests::ring::Ring;
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::features::{ACCESS_PLATFORM, LINUX, PACKED, PLAIN};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use distdpu_tests::wire::{self, command};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Runs `act` on A while B sends to A without pause; B must get rid of its frames to the end.
fn under_traffic(pair: &mut Pair, act: impl FnOnce(&mut VirtioNet)) {
    let stop = AtomicBool::new(false);
    let Pair { a, b, .. } = pair;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut seed = 0;
            while !stop.load(Ordering::Relaxed) {
                let packet = flow(1, 0).frame(60 + (seed % 1400) as usize, seed);
                if b.try_queue(0, &packet).unwrap() {
                    b.kick_transmit(0).unwrap();
                    seed += 1;
                } else {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            seed
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(a)));
        stop.store(true, Ordering::Relaxed);
        let sent = sender.join().unwrap();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
        assert!(sent > 0);
    });
}

/// What is still on its way is thrown away; then frames pass both ways.
fn settles(pair: &mut Pair) {
    let Pair { a, b, .. } = pair;
    let marker = flow(1, 0).frame(333, 0xfeed);
    b.send(&marker).unwrap();
    receive_until(a, &marker);
    works(a, b);
}

#[test]
fn reset_and_probe_a_hundred_times_under_traffic() {
    let mut pair = Pair::started(Setup::default());
    under_traffic(&mut pair, |a| {
        for round in 0..100u32 {
            let setup = match round % 3 {
                0 => Setup::default(),
                1 => Setup {
                    features: PLAIN,
                    queue_size: 16,
                    receive_buffers: 16,
                    ..Setup::default()
                },
                _ => Setup {
                    interrupts: false,
                    ..Setup::default()
                },
            };
            a.start(setup).unwrap();
            a.receive().unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
        a.start(Setup::default()).unwrap();
    });
    settles(&mut pair);
}

#[test]
fn after_a_reset_the_device_uses_nothing_of_the_driver() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    let used = pair.a.receive_rings[0].used;
    let index = pair.a.memory.load_u16(used + 2).unwrap();
    pair.a.set_status(0).unwrap();
    assert_eq!(pair.a.status().unwrap(), 0);
    for n in 0..50 {
        pair.b.send(&flow(1, 0).frame(500, n)).unwrap();
    }
    std::thread::sleep(QUIET);
    assert_eq!(pair.a.memory.load_u16(used + 2).unwrap(), index);
    pair.a.start(Setup::default()).unwrap();
    settles(&mut pair);
}

#[test]
fn a_vmm_that_goes_away_leaves_the_function_for_the_next() {
    let mut pair = Pair::started(Setup::default());
    for round in 0..5 {
        pair.works();
        // Frames are on their way while the VMM dies without a word.
        for n in 0..20 {
            pair.b.send(&flow(1, 0).frame(900, n)).unwrap();
        }
        let socket = pair.dpu.socket(0);
        let Pair { a, b, dpu } = pair;
        drop(a);
        let guest = Guest {
            shape: if round % 2 == 0 {
                Shape::Split
            } else {
                Shape::Whole
            },
            ..Guest::default()
        };
        let a = wait_for("the function to accept a VMM again", SOON, || {
            VirtioNet::open(&socket, guest).ok()
        });
        pair = Pair {
            a: a.unwrap(),
            b,
            dpu,
        };
        assert_eq!(
            pair.a.status().unwrap(),
            0,
            "a new VMM finds the power-on state"
        );
        pair.a.start(Setup::default()).unwrap();
        settles(&mut pair);
    }
}

#[test]
fn a_second_vmm_is_turned_away_at_once() {
    let mut pair = Pair::started(Setup::default());
    for _ in 0..10 {
        let refused = Client::connect(&pair.dpu.socket(0)).unwrap_err();
        assert!(refused.is_closed(), "closed, not left waiting: {refused}");
    }
    pair.works();
}

#[test]
fn a_function_level_reset_brings_the_power_on_state() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    let a = &mut pair.a;
    a.pci.clone().function_level_reset(a.vmm.as_mut()).unwrap();
    assert_eq!(a.status().unwrap(), 0);
    let command = pci::read16(a.vmm.as_mut(), 4).unwrap();
    assert_eq!(
        command & 0x0406,
        0,
        "decoding and bus mastering are off: {command:#x}"
    );
    assert_eq!(
        pci::read32(a.vmm.as_mut(), 0x10).unwrap() & !15,
        0,
        "BAR 0 has no address"
    );
    let pcie = a.pci.capability(0x10).unwrap();
    let control = pci::read16(a.vmm.as_mut(), pcie + 8).unwrap();
    assert_eq!(control & 1 << 15, 0, "the bit reads 0 (PCIe 6.0 §7.5.3.4)");
    a.forget();
    a.switch_on().unwrap();
    a.start(Setup::default()).unwrap();
    settles(&mut pair);
}

#[test]
fn resets_of_every_kind_under_traffic() {
    let mut pair = Pair::started(Setup::default());
    under_traffic(&mut pair, |a| {
        for round in 0..30 {
            match round % 3 {
                0 => a.vmm.reset().unwrap(),
                1 => a.pci.clone().function_level_reset(a.vmm.as_mut()).unwrap(),
                _ => a.reset().unwrap(),
            }
            a.forget();
            a.switch_on().unwrap();
            a.start(Setup::default()).unwrap();
            a.receive().unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
    });
    settles(&mut pair);
}

#[test]
fn without_bus_mastering_there_is_no_dma() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    let Pair { a, b, .. } = &mut pair;
    a.pci.clone().set_bus_master(a.vmm.as_mut(), false).unwrap();
    let before = a.receive_rings[0].used_index().unwrap();
    let sent = flow(1, 0).frame(700, 3);
    b.send(&sent).unwrap();
    let waiting = flow(0, 1).frame(800, 4);
    a.send(&waiting).unwrap();
    std::thread::sleep(QUIET);
    assert_eq!(a.receive_rings[0].used_index().unwrap(), before);
    assert!(b.receive_within(QUIET).unwrap_err().is_timeout());
    // The kick came while the device was not allowed to look: it looks now.
    a.pci.clone().set_bus_master(a.vmm.as_mut(), true).unwrap();
    receive_until(b, &waiting);
    a.start(Setup::default()).unwrap();
    settles(&mut pair);
}

#[test]
fn the_link_follows_a_peers_em_that_does_not_live_and_the_driver_is_told() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    pair.a.interrupted(0);
    let em1 = |pair: &Pair| pair.dpu.ctl(&["status"]).unwrap()["ems"][1].clone();
    wait_for("the link to go down", Duration::from_secs(30), || {
        // As soon as one is there, it is killed.
        if let Ok(pid) = pair.dpu.em_pid(1) {
            let pid = Pid::from_raw(pid as i32)?;
            let _ = kill_process(pid, Signal::KILL);
        }
        (!pair.a.link_up().unwrap()).then_some(())
    })
    .unwrap();
    pair.a.wait_config_change().unwrap();
    assert_eq!(em1(&pair)["reason"], "was ended by signal 9");
    wait_for("the link to come up", SOON, || {
        pair.a.link_up().unwrap().then_some(())
    })
    .unwrap();
    // Its guest is still there.
    settles(&mut pair);
}

#[test]
fn the_administrator_can_take_the_link_down_and_up() {
    let mut pair = Pair::started(Setup::default());
    for _ in 0..3 {
        pair.a.interrupted(0);
        pair.dpu.ctl(&["link", "set", "net0", "down"]).unwrap();
        pair.a.wait_config_change().unwrap();
        assert!(!pair.a.link_up().unwrap());
        pair.dpu.ctl(&["link", "set", "net0", "up"]).unwrap();
        pair.a.wait_config_change().unwrap();
        assert!(pair.a.link_up().unwrap());
    }
    settles(&mut pair);
}

#[test]
fn unmap_under_traffic_is_acknowledged_when_nothing_more_can_be_written() {
    let mut pair = Pair::started(Setup::default());
    under_traffic(&mut pair, |a| {
        for round in 0..20 {
            a.receive().unwrap();
            let ranges: Vec<_> = a.memory.ranges().copied().collect();
            for range in &ranges {
                a.vmm.unmap(range.address, range.len).unwrap();
            }
            // From here on the memory is the guest's alone.
            let ring = &a.receive_rings[0];
            let filler = vec![0x77; 6 + 8 * usize::from(ring.size)];
            a.memory.write(ring.used, &filler).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            let now = a.memory.bytes(ring.used, filler.len()).unwrap();
            assert!(
                now == filler,
                "round {round}: the used ring was written after the unmap"
            );
            for range in &ranges {
                a.vmm.map(&a.memory, range).unwrap();
            }
            a.start(Setup::default()).unwrap();
        }
    });
    settles(&mut pair);
}

#[test]
fn memory_that_goes_and_comes_under_a_running_driver_is_used_again() {
    // Firmware and PAM shadowing under QEMU: all RAM is unmapped and mapped again.
    let mut pair = Pair::started(Setup::default());
    for _ in 0..20 {
        let range = *pair.a.memory.ranges().next().unwrap();
        pair.a.vmm.unmap(range.address, range.len).unwrap();
        pair.a.vmm.map(&pair.a.memory, &range).unwrap();
        pair.works();
    }
}

#[test]
fn a_storm_of_maps_and_messages_leaves_traffic_alone() {
    let mut pair = Pair::started(Setup::default());
    let more = Arc::new(GuestMemory::new(1 << 20, Shape::Whole).unwrap());
    under_traffic(&mut pair, |a| {
        for round in 0..300u64 {
            let range = Range {
                address: 0x20_0000_0000 + round % 3 * (1 << 30),
                len: 1 << 20,
                offset: 0,
                with_fd: round % 4 != 0,
            };
            a.vmm.map(&more, &range).unwrap();
            a.status().unwrap();
            let pci = a.pci.clone();
            pci.set_msix(a.vmm.as_mut(), true, round % 2 == 0).unwrap();
            a.vmm.unmap(range.address, range.len).unwrap();
            a.switch_on().unwrap();
            while a.try_receive(0).unwrap().is_some() {}
        }
        a.receive().unwrap();
    });
    settles(&mut pair);
}

#[test]
fn a_map_over_a_map_is_refused_and_unmap_takes_ranges_that_were_never_mapped() {
    let mut pair = Pair::started(Setup::default());
    let range = *pair.a.memory.ranges().next().unwrap();
    let again = pair.a.vmm.map(&pair.a.memory, &range);
    assert!(again.is_err(), "EEXIST by the specification");
    pair.a
        .vmm
        .unmap(0x9_0000_0000, 0xffff_fff0_0110_0000)
        .unwrap();
    pair.works();
}

#[test]
fn a_session_fragmented_at_every_byte_works() {
    let pair = Pair::new();
    let socket = pair.dpu.socket(0);
    let Pair { a, dpu, b: _b } = pair;
    drop(a);
    let mut client = wait_for("the function to be free", SOON, || {
        Client::connect(&socket).ok()
    })
    .unwrap();
    let mut bytes = Vec::new();
    for id in 0..20u16 {
        let read = wire::region_access(wire::CONFIG_REGION, 0, 4);
        bytes.extend(wire::message(100 + id, command::REGION_READ, 0, &read));
    }
    for byte in &bytes {
        client.send_bytes(std::slice::from_ref(byte), &[]).unwrap();
    }
    for id in 0..20u16 {
        let reply = client.reply_to(100 + id).unwrap();
        assert_eq!(reply.payload[16..], [0xf4, 0x1a, 0x41, 0x10]);
    }
    drop(dpu);
}

#[test]
fn an_om_that_is_away_does_not_stop_the_guest() {
    let mut pair = Pair::started(Setup::default());
    let om = pair.dpu.om_pid();
    kill(om, Signal::STOP);
    let began = Instant::now();
    let vendor = pci::read32(pair.a.vmm.as_mut(), 0).unwrap();
    let written = pci::write16(pair.a.vmm.as_mut(), 0x3c, 0x0b);
    pair.works();
    let took = began.elapsed();
    kill(om, Signal::CONT);
    written.unwrap();
    assert_eq!(vendor, 0x1041_1af4);
    // QEMU gives a connection up after 5 s (x-msg-timeout); this bound is the protocol's, not a speed.
    assert!(took < Duration::from_secs(5), "{took:?}");
    wait_for("the write to be replayed", SOON, || {
        (pci::read16(pair.a.vmm.as_mut(), 0x3c).ok()? & 0xff == 0x0b).then_some(())
    })
    .unwrap();
    pair.works();
    let mut dpu = pair.dpu;
    assert!(dpu.is_running());
    dpu.wait_up().unwrap();
}

#[test]
fn the_om_ends_its_ems_when_it_is_told_to_end() {
    let pair = Pair::started(Setup::default());
    let pids = [pair.dpu.em_pid(0).unwrap(), pair.dpu.em_pid(1).unwrap()];
    kill(pair.dpu.om_pid(), Signal::TERM);
    for pid in pids {
        wait_for("the EM to end", SOON, || {
            (!std::path::Path::new(&format!("/proc/{pid}")).exists()).then_some(())
        })
        .unwrap();
    }
    let socket = pair.dpu.socket(0);
    wait_for("the sockets to be removed", SOON, || {
        (!socket.exists()).then_some(())
    })
    .unwrap();
}

#[test]
fn thousands_of_maps_come_and_go() {
    let guest = Guest {
        shape: Shape::Pages,
        memory: 16 << 20,
        ..Guest::default()
    };
    let mut pair = Pair::with(Net::default(), guest);
    let small = Setup {
        receive_buffers: 16,
        ..Setup::default()
    };
    pair.start(small, Setup::default());
    pair.works();
    let (first, end) = (pair.a.memory.first(), pair.a.memory.end());
    pair.a.reset().unwrap();
    pair.a.vmm.unmap(first, end - first).unwrap();
    let ranges: Vec<_> = pair.a.memory.ranges().copied().collect();
    assert_eq!(ranges.len(), 4096);
    for range in ranges.iter().rev() {
        pair.a.vmm.map(&pair.a.memory, range).unwrap();
    }
    pair.a.start(small).unwrap();
    exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(1514, 1));
    pair.works();
}

/// Pages of the buffers that a ring's descriptors name.
fn pages_of(driver: &VirtioNet, ring: &Ring) -> Vec<Range> {
    let address = |n: u64| driver.memory.bytes(ring.descriptors + 16 * n, 8).unwrap();
    let named = (0..u64::from(ring.size)).map(|n| address(n).try_into().unwrap());
    let named: Vec<_> = named.map(u64::from_le_bytes).collect();
    let holds = |r: &Range| named.iter().any(|at| at.wrapping_sub(r.address) < r.len);
    driver.memory.ranges().copied().filter(holds).collect()
}

/// Frames that were dropped because their buffers were not mapped.
fn unmapped(pair: &Pair, queue: usize) -> u64 {
    let stats = pair.dpu.ctl(&["stats"]).unwrap();
    let drops = &stats["functions"][0]["queues"][queue]["drops"];
    drops["chain-not-mapped"].as_u64().unwrap_or(0)
}

#[test]
fn a_driver_behind_an_iommu_maps_pages_and_may_unmap_them_in_use() {
    let guest = Guest {
        shape: Shape::Pages,
        memory: 16 << 20,
        ..Guest::default()
    };
    let mut pair = Pair::with(Net::default(), guest);
    for (round, layout) in [LINUX, PACKED].into_iter().enumerate() {
        let setup = Setup {
            features: layout | ACCESS_PLATFORM,
            queue_size: 16,
            receive_buffers: 16,
            indirect: false,
            ..Setup::default()
        };
        pair.start(setup, Setup::default());
        assert_ne!(pair.a.features & ACCESS_PLATFORM, 0);
        pair.works();
        // Larger than a page wherever it begins.
        exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(9014, 1));
        exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(9014, 2));
        for n in 0..32 {
            exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(500, n));
        }
        let pages = pages_of(&pair.a, &pair.a.transmit_rings[0]);
        pages.iter().for_each(|page| {
            pair.a.vmm.unmap(page.address, page.len).unwrap();
        });
        for n in 0..3 {
            pair.a.send(&flow(0, 1).frame(500, 100 + n)).unwrap();
            pair.a.drain(0).unwrap();
        }
        assert_eq!(unmapped(&pair, 1), 3 * (round as u64 + 1));
        pages.iter().for_each(|page| {
            pair.a.vmm.map(&pair.a.memory, page).unwrap();
        });
        pair.works();
        // Buffers to receive into.
        let pages = pages_of(&pair.a, &pair.a.receive_rings[0]);
        let before = unmapped(&pair, 0);
        pages.iter().for_each(|page| {
            pair.a.vmm.unmap(page.address, page.len).unwrap();
        });
        pair.b.send(&flow(1, 0).frame(500, 7)).unwrap();
        let counted = wait_for("the buffers to be found missing", SOON, || {
            (unmapped(&pair, 0) > before).then_some(())
        });
        counted.unwrap();
        pages.iter().for_each(|page| {
            pair.a.vmm.map(&pair.a.memory, page).unwrap();
        });
        // They came back empty, which such a driver does not expect.
        pair.a.start(setup).unwrap();
        settles(&mut pair);
    }
}

#[test]
fn memory_without_descriptors_is_reached_by_messages() {
    let guest = Guest {
        shape: Shape::NoFd,
        ..Guest::default()
    };
    let mut pair = Pair::with(Net::default(), guest);
    let range = *pair.a.memory.ranges().next().unwrap();
    assert!(!range.with_fd);
    // Rings there are no must: QEMU gives such memory for BARs and ROMs only. What counts is that the
    // function survives and that memory with descriptors works afterwards.
    let _ = pair.a.start(Setup::default());
    let fd_range = Range {
        with_fd: true,
        ..range
    };
    pair.a.vmm.reset().unwrap();
    pair.a.forget();
    pair.a.vmm.unmap(range.address, range.len).unwrap();
    pair.a.vmm.map(&pair.a.memory, &fd_range).unwrap();
    pair.a.switch_on().unwrap();
    pair.start(Setup::default(), Setup::default());
    pair.works();
}
