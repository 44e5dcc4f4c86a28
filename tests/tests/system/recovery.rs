//! EMs that are killed while guests use them: what a guest sees of it is nothing.

use crate::fixture::{Pair, exchange, flow, receive_until, works};
use distdpu_tests::client::Client;
use distdpu_tests::dpu::{Dpu, Net};
use distdpu_tests::memory::GuestMemory;
use distdpu_tests::packet::Random;
use distdpu_tests::pci;
use distdpu_tests::recovery::{Tally, successor, while_talking};
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// How often EMs are killed: `usual`, or what `DISTDPU_KILLS` says.
pub(crate) fn kills(usual: usize) -> usize {
    let wanted = std::env::var("DISTDPU_KILLS").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// One that lives shorter than 100 ms is not replaced at once, and links go meanwhile.
pub(crate) const LIVES: Duration = Duration::from_millis(120);

/// Kills an EM and waits for the next.
pub(crate) fn replace(dpu: &Dpu, em: usize) -> u32 {
    let old = dpu.em_pid(em).unwrap();
    std::thread::sleep(LIVES);
    kill(old, Signal::KILL);
    successor(dpu, em, old).unwrap()
}

/// Open descriptors and resident KiB of a process.
pub(crate) fn footprint(pid: u32) -> (usize, u64) {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let rss = line.and_then(|line| line.split_whitespace().nth(1));
    (fds, rss.unwrap().parse().unwrap())
}

/// What a guest saw: sent, received, of those doubled.
fn seen(tally: &Tally) -> [u64; 3] {
    [&tally.sent, &tally.received, &tally.doubled].map(|n| n.load(Ordering::Relaxed))
}

#[test]
fn ems_that_are_killed_under_traffic_are_replaced_and_the_guests_do_not_notice() {
    let mut pair = Pair::started(Setup::default());
    let om = pair.dpu.om_pid();
    let Pair { a, b, dpu } = &mut pair;
    let talk = while_talking([a, b], |tallies| {
        let mut random = Random(7);
        let mut pids = [dpu.em_pid(0)?, dpu.em_pid(1)?];
        let mut before = None;
        for round in 0..kills(200) {
            tallies[0].hears()?;
            tallies[1].hears()?;
            if round == 10 {
                before = Some(footprint(om));
            }
            let em = random.below(2) as usize;
            // An EM that lives shorter is not replaced at once.
            std::thread::sleep(Duration::from_micros(100_000 + random.below(40_000)));
            kill(pids[em], Signal::KILL);
            pids[em] = successor(dpu, em, pids[em])?;
        }
        tallies[0].hears()?;
        tallies[1].hears()?;
        println!("sent, received, doubled: {:?}", tallies.map(seen));
        Ok(before.map(|before| (before, footprint(om))))
    });
    if let Some(((fds, rss), (fds_now, rss_now))) = talk.unwrap() {
        assert!(fds_now <= fds + 2, "{fds} descriptors became {fds_now}");
        assert!(rss_now < rss + 4096, "{rss} KiB became {rss_now}");
    }
    let links = pair.dpu.ctl(&["functions"]).unwrap();
    assert!(
        pair.a.link_up().unwrap() && pair.b.link_up().unwrap(),
        "{links}"
    );
}

#[test]
fn what_a_driver_set_survives_its_em() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    let own = [2, 0, 0, 0, 0, 0x77];
    assert_eq!(pair.a.control((0, 0), &[0]).unwrap(), 0, "promiscuous off");
    assert_eq!(pair.a.control((1, 1), &own).unwrap(), 0, "another address");
    let before = pair.a.status().unwrap();
    let vendor = pci::read32(pair.a.vmm.as_mut(), 0).unwrap();
    replace(&pair.dpu, 0);
    assert_eq!(pair.a.status().unwrap(), before);
    assert_eq!(pci::read32(pair.a.vmm.as_mut(), 0).unwrap(), vendor);
    // What is not for it does not come, what is for its new address does.
    let mut wanted = flow(1, 0);
    wanted.to = own;
    let mut unwanted = flow(1, 0);
    unwanted.to = [2, 0, 0, 0, 0, 0x55];
    pair.b.send(&unwanted.frame(500, 1)).unwrap();
    assert!(pair.a.receive_within(QUIET).is_err());
    exchange(&mut pair.b, &mut pair.a, &wanted.frame(700, 2));
    exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(900, 3));
}

#[test]
fn maps_that_come_and_go_survive_an_em_at_any_time() {
    let mut pair = Pair::started(Setup::default());
    let memory = pair.a.memory.clone();
    let range = *memory.ranges().next().unwrap();
    for round in 0..6 {
        let high = |n: u64| (1 << 40) + n * (1 << 24);
        for n in 0..50 {
            let mut there = range;
            there.address = high(n);
            there.len = 4096;
            pair.a.vmm.map(&memory, &there).unwrap();
        }
        replace(&pair.dpu, 0);
        let stats = pair.dpu.function_stats(0).unwrap();
        assert!(stats["dma_ranges"].as_u64().unwrap() >= 50, "{stats}");
        pair.a.vmm.unmap(high(0), 25 * (1 << 24)).unwrap();
        if round % 2 == 0 {
            replace(&pair.dpu, 0);
        }
        pair.a.vmm.unmap(high(0), 1 << 32).unwrap();
        works(&mut pair.a, &mut pair.b);
    }
}

/// Every EM of this DPU kills itself when it comes to `point` for the `count`th time.
fn faulty(point: &str, count: u32) -> Pair {
    let fault = format!("{point}:{count}");
    let dpu = Dpu::start_with_env(
        &[Net::default(), Net::default()],
        &[("DISTDPU_FAULT", &fault)],
    );
    let dpu = dpu.unwrap();
    let a = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    Pair { a, b, dpu }
}

fn survives(point: &str, count: u32) {
    let mut pair = faulty(point, count);
    pair.start(Setup::default(), Setup::default());
    for round in 0..40 {
        assert_eq!(pci::read32(pair.a.vmm.as_mut(), 0).unwrap(), 0x1041_1af4);
        pci::write16(pair.a.vmm.as_mut(), 0x3c, round).unwrap();
        assert_eq!(
            pci::read16(pair.a.vmm.as_mut(), 0x3c).unwrap() & 0xff,
            round
        );
        assert_eq!(pair.a.status().unwrap() & 0x44, 4, "running");
        // EMs that live shorter than 100 ms are started after longer and longer pauses.
        std::thread::sleep(Duration::from_millis(80));
        pair.a.start(Setup::default()).unwrap();
    }
    let status = pair.dpu.ctl(&["status"]).unwrap();
    let restarts = status["ems"][0]["restarts"].as_u64().unwrap();
    assert!(restarts > 3, "only {restarts} restarts");
    println!("{point}: {restarts} restarts");
}

#[test]
fn a_request_survives_a_kill_when_it_was_shown() {
    survives("shown", 211);
}

#[test]
fn a_request_survives_a_kill_when_it_was_noted() {
    survives("begun", 211);
}

#[test]
fn a_request_survives_a_kill_before_its_reply() {
    survives("reply", 61);
}

#[test]
fn a_request_survives_a_kill_right_after_its_reply() {
    survives("replied", 61);
}

#[test]
fn a_request_survives_a_kill_when_it_was_executed() {
    survives("executed", 211);
}

#[test]
fn a_request_survives_a_kill_when_it_was_taken() {
    survives("taken", 211);
}

#[test]
fn a_client_that_has_said_nothing_yet_survives() {
    let mut pair = faulty("accepted", 1);
    pair.start(Setup::default(), Setup::default());
    pair.works();
}

#[test]
fn an_om_that_is_killed_is_replaced_and_adopts_the_ems_that_run() {
    let mut pair = Pair::started(Setup::default());
    let Pair { a, b, dpu } = &mut pair;
    let mut pids = [dpu.em_pid(0).unwrap(), dpu.em_pid(1).unwrap()];
    let talk = while_talking([a, b], |tallies| {
        for round in 0..5 {
            dpu.kill_om()?;
            tallies[0].hears()?;
            tallies[1].hears()?;
            dpu.start_another_om()?;
            assert_eq!([dpu.em_pid(0)?, dpu.em_pid(1)?], pids, "the same EMs");
            tallies[0].hears()?;
            tallies[1].hears()?;
            // What the former OM kept is with this one.
            let em = round % 2;
            std::thread::sleep(Duration::from_millis(120));
            kill(pids[em], Signal::KILL);
            pids[em] = successor(dpu, em, pids[em])?;
            tallies[0].hears()?;
            tallies[1].hears()?;
        }
        println!("sent, received, doubled: {:?}", tallies.map(seen));
        Ok(())
    });
    talk.unwrap();
    assert!(pair.a.link_up().unwrap() && pair.b.link_up().unwrap());
    pci::write16(pair.a.vmm.as_mut(), 0x3c, 0x0b).unwrap();
    assert_eq!(pci::read16(pair.a.vmm.as_mut(), 0x3c).unwrap() & 0xff, 0x0b);
    pair.dpu.ctl(&["link", "set", "net0", "down"]).unwrap();
    assert!(!pair.a.link_up().unwrap());
}

#[test]
fn what_a_guest_wrote_under_the_second_om_is_known_to_the_third() {
    let mut pair = Pair::started(Setup::default());
    for line in [5, 6, 7] {
        pair.dpu.kill_om().unwrap();
        pair.dpu.start_another_om().unwrap();
        let read = |pair: &mut Pair| pci::read16(pair.a.vmm.as_mut(), 0x3c).unwrap() & 0xff;
        if line > 5 {
            assert_eq!(read(&mut pair), line - 1);
        }
        pci::write16(pair.a.vmm.as_mut(), 0x3c, line).unwrap();
        assert_eq!(read(&mut pair), line);
        pair.works();
    }
}

#[test]
fn what_was_written_without_an_om_comes_to_the_next_by_itself_also_behind_a_reset() {
    let mut pair = Pair::started(Setup::default());
    pair.dpu.kill_om().unwrap();
    pci::write16(pair.a.vmm.as_mut(), 0x3c, 5).unwrap();
    let function = pair.a.pci.clone();
    function.function_level_reset(pair.a.vmm.as_mut()).unwrap();
    pci::write16(pair.a.vmm.as_mut(), 0x3c, 9).unwrap();
    pair.dpu.start_another_om().unwrap();
    let written = wait_for("the interrupt line", SOON, || {
        let line = pci::read16(pair.a.vmm.as_mut(), 0x3c).unwrap();
        (line & 0xff == 9).then_some(())
    });
    written.unwrap();
    let command = pci::read16(pair.a.vmm.as_mut(), 0x04).unwrap();
    assert_eq!(command & 0b110, 0, "it was reset before");
    pair.a.forget();
    pair.a.switch_on().unwrap();
    pair.a.start(Setup::default()).unwrap();
    receive_until_works(&mut pair.a, &mut pair.b);
}

#[test]
fn an_em_that_dies_without_an_om_is_started_by_the_next() {
    let mut pair = Pair::started(Setup::default());
    let old = pair.dpu.em_pid(1).unwrap();
    let same = pair.dpu.em_pid(0).unwrap();
    pair.dpu.kill_om().unwrap();
    kill(old, Signal::KILL);
    pair.dpu.start_another_om().unwrap();
    assert_eq!(pair.dpu.em_pid(0).unwrap(), same);
    // Its guest lost its device with both; another takes the function.
    pair.b = VirtioNet::open(&pair.dpu.socket(1), Guest::default()).unwrap();
    pair.b.start(Setup::default()).unwrap();
    let marker = flow(1, 0).frame(333, 9);
    pair.b.send(&marker).unwrap();
    receive_until(&mut pair.a, &marker);
    works(&mut pair.a, &mut pair.b);
}

#[test]
fn om_and_ems_that_die_at_once_come_back_under_a_service_manager() {
    let dpu = Dpu::start_under_manager(&[Net::default(), Net::default()]).unwrap();
    let a = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    let mut pair = Pair { a, b, dpu };
    pair.start(Setup::default(), Setup::default());
    let Pair { a, b, dpu } = &mut pair;
    while_talking([a, b], |tallies| {
        for _ in 0..5 {
            tallies[0].hears()?;
            tallies[1].hears()?;
            let old = dpu.kill_all()?;
            dpu.start_another_om()?;
            for (em, old) in old.into_iter().enumerate() {
                successor(dpu, em, old)?;
            }
        }
        tallies[0].hears()?;
        tallies[1].hears()
    })
    .unwrap();
    assert!(pair.a.link_up().unwrap() && pair.b.link_up().unwrap());
    let stored = pair.dpu.manager().unwrap().names();
    let of = |name: &str| stored.iter().filter(|stored| *stored == name).count();
    assert_eq!(of("net0/shadow"), 1, "{stored:?}");
    assert!(
        of("net0/100000000") == 1 && of("net0/200000000") == 1,
        "{stored:?}"
    );
}

#[test]
fn without_a_service_manager_the_guests_of_om_and_ems_that_die_at_once_lose_their_devices_only() {
    let mut pair = Pair::started(Setup::default());
    pair.works();
    pair.dpu.kill_all().unwrap();
    pair.dpu.start_another_om().unwrap();
    assert!(pair.a.status().is_err(), "the connection is gone");
    // Whoever connects next finds a device as powered on.
    let a = VirtioNet::open(&pair.dpu.socket(0), Guest::default()).unwrap();
    let b = VirtioNet::open(&pair.dpu.socket(1), Guest::default()).unwrap();
    (pair.a, pair.b) = (a, b);
    pair.start(Setup::default(), Setup::default());
    pair.works();
}

#[test]
fn an_om_that_is_told_to_end_leaves_nothing_with_the_service_manager() {
    let mut dpu = Dpu::start_under_manager(&[Net::default()]).unwrap();
    let guest = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    wait_for("the connection to be stored", SOON, || {
        let names = dpu.manager()?.names();
        names.contains(&"net0/100000000".to_owned()).then_some(())
    })
    .unwrap();
    kill(dpu.om_pid(), Signal::TERM);
    wait_for("the OM to end", SOON, || (!dpu.is_running()).then_some(())).unwrap();
    wait_for("the store to be empty", SOON, || {
        dpu.manager()?.names().is_empty().then_some(())
    })
    .unwrap();
    drop(guest);
}

#[test]
fn an_em_that_stands_still_for_four_seconds_stays_and_goes_on() {
    let mut pair = Pair::started(Setup::default());
    let Pair { a, b, dpu } = &mut pair;
    while_talking([a, b], |tallies| {
        let pids = [dpu.em_pid(0)?, dpu.em_pid(1)?];
        for pid in pids {
            tallies[0].hears()?;
            kill(pid, Signal::STOP);
            std::thread::sleep(Duration::from_secs(4));
            kill(pid, Signal::CONT);
            tallies[0].hears()?;
            tallies[1].hears()?;
        }
        assert_eq!([dpu.em_pid(0)?, dpu.em_pid(1)?], pids, "the same EMs");
        println!("sent, received, doubled: {:?}", tallies.map(seen));
        assert_eq!(tallies.map(|tally| seen(tally)[2]), [0, 0], "nothing twice");
        Ok(())
    })
    .unwrap();
    assert!(pair.a.link_up().unwrap() && pair.b.link_up().unwrap());
}

#[test]
fn a_driver_that_probes_while_the_om_is_replaced_finds_its_device() {
    let Pair { a, mut b, mut dpu } = Pair::started(Setup::default());
    drop(a);
    // A probe takes some milliseconds. The other guest keeps its EM alive without an OM, and the first its own.
    for delay in [0, 200, 500, 1000, 1500, 2000, 3000, 5000, 8000] {
        let client = Client::connect(&dpu.socket(0)).unwrap();
        let guest = Guest::default();
        let memory = Arc::new(GuestMemory::new(guest.memory, guest.shape).unwrap());
        let mut a = std::thread::scope(|scope| {
            let dpu = &mut dpu;
            let om = scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(delay));
                dpu.kill_om().unwrap();
                dpu.start_another_om().unwrap();
            });
            let mut a = VirtioNet::attach(Box::new(client), memory).unwrap();
            a.start(Setup::default()).unwrap();
            om.join().unwrap();
            a
        });
        receive_until_works(&mut a, &mut b);
    }
}

/// Frames go both ways, whatever came before.
fn receive_until_works(a: &mut VirtioNet, b: &mut VirtioNet) {
    for number in 0..3 {
        let there = flow(0, 1).frame(300, number);
        a.send(&there).unwrap();
        receive_until(b, &there);
        let back = flow(1, 0).frame(400, number);
        b.send(&back).unwrap();
        receive_until(a, &back);
    }
}
