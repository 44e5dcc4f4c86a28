//! EMs that are killed under RDMA: neither driver notices.

use super::{Pair, Side};
use crate::recovery::{footprint, kill, kills, replace};
use distdpu_tests::dpu::{Dpu, Rdma};
use distdpu_tests::mlx5::{Mlx5, QpPlan, Send, Service, opcode};
use distdpu_tests::packet::Random;
use distdpu_tests::recovery::{Stop, successor};
use distdpu_tests::virtio_net::Guest;
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Each request has its own part of both buffers.
const SLOT: u64 = 1 << 20;
const SLOTS: u64 = 8;

/// Bytes that say which request they are of.
pub(super) fn pattern(number: u64, len: u32) -> Vec<u8> {
    let mut random = Random(number | 1 << 40);
    let words = (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    words.take(len as usize).collect()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Write,
    Read,
    Send,
}

/// One request, as it was posted.
struct Posted {
    kind: Kind,
    counter: u16,
    slot: u64,
    data: Vec<u8>,
    signaled: bool,
}

/// Requests from `a` to `b`, checked one by one.
pub(super) struct Traffic {
    random: Random,
    number: u64,
    receives: u16,
    /// What came back of a request at last.
    done: u64,
}

impl Traffic {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            number: 0,
            receives: 0,
            done: 0,
        }
    }

    fn post(&mut self, a: &mut Side, b: &mut Side, slot: u64, last: bool) -> Posted {
        self.number += 1;
        let kind = [Kind::Write, Kind::Read, Kind::Send][self.random.below(3) as usize];
        let len = match self.random.below(16) {
            0 => self.random.below(SLOT),
            1..5 => self.random.below(64),
            _ => self.random.below(9000),
        } as u32;
        let data = pattern(self.number, len);
        let at = slot * SLOT;
        let (local, remote) = (a.buffer, b.buffer);
        let (source, sink) = if kind == Kind::Read {
            (&*b, &*a)
        } else {
            (&*a, &*b)
        };
        let write = |side: &Side, bytes: &[u8]| {
            let to = side.buffer.address + at;
            side.driver.memory.write(to, bytes).unwrap();
        };
        write(source, &data);
        write(sink, &vec![0x5a; len as usize]);
        let send = match kind {
            Kind::Write => Send::Write(remote.address + at, remote.key, None),
            Kind::Read => Send::Read(remote.address + at, remote.key),
            Kind::Send => {
                b.qp.post_receive(remote.key, remote.address + at, len.max(1))
                    .unwrap();
                Send::Send(Some(self.number as u32))
            }
        };
        let signaled = last || self.random.below(2) == 0;
        let segment = [(local.key, local.address + at, len)];
        let counter = a.qp.post_send(send, &segment, signaled).unwrap();
        Posted {
            kind,
            counter,
            slot,
            data,
            signaled,
        }
    }

    /// A few requests at once, and everything that there is to see of them.
    pub(super) fn round(&mut self, a: &mut Side, b: &mut Side) {
        let count = 1 + self.random.below(SLOTS);
        let posted: Vec<Posted> = (0..count)
            .map(|slot| self.post(a, b, slot, slot + 1 == count))
            .collect();
        a.driver.ring(&mut a.qp).unwrap();
        for one in posted.iter().filter(|one| one.signaled) {
            let cqe = a.sends.wait().unwrap();
            assert_eq!((cqe.opcode, cqe.counter), (0, one.counter), "{cqe:?}");
        }
        let first = self.number + 1 - count;
        for (number, one) in (first..).zip(&posted) {
            if one.kind == Kind::Send {
                let cqe = b.receives.wait().unwrap();
                let seen = (cqe.opcode, cqe.counter, cqe.len, cqe.immediate);
                let expected = (3, self.receives, one.data.len() as u32, number as u32);
                assert_eq!(seen, expected, "{cqe:?}");
                self.receives = self.receives.wrapping_add(1);
            }
            let sink = if one.kind == Kind::Read { &*a } else { &*b };
            let got = sink.bytes(one.slot * SLOT, one.data.len());
            assert!(got == one.data, "request {number}, {:?}", one.kind);
        }
        assert_eq!(a.sends.poll().unwrap(), None, "a completion twice");
        assert_eq!(b.receives.poll().unwrap(), None, "a delivery twice");
        self.done = self.number;
    }
}

/// Requests without pause while `act` runs.
pub(super) fn while_busy<R: std::marker::Send>(
    pair: &mut Pair,
    seed: u64,
    act: impl FnOnce(&mut Dpu) -> R + std::marker::Send,
) -> R {
    let stop = AtomicBool::new(false);
    let Pair { a, b, dpu } = pair;
    std::thread::scope(|scope| {
        let stop = &stop;
        let actor = scope.spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(dpu)));
            stop.store(true, Ordering::Relaxed);
            result.unwrap()
        });
        let mut traffic = Traffic::new(seed);
        while !stop.load(Ordering::Relaxed) {
            traffic.round(a, b);
        }
        println!("{} requests", traffic.done);
        actor.join().unwrap()
    })
}

#[test]
fn objects_and_connections_survive_their_em() {
    for mapped in [false, true] {
        let mut pair = Pair::mapped(mapped, Service::Rc);
        let mut traffic = Traffic::new(5);
        for round in 0..6 {
            traffic.round(&mut pair.a, &mut pair.b);
            replace(&pair.dpu, round % 2);
            traffic.round(&mut pair.a, &mut pair.b);
            // What is made anew gets numbers of its own, and the connection survives a change of its objects.
            let side = if round % 2 == 0 {
                &mut pair.a
            } else {
                &mut pair.b
            };
            let pd = side.driver.allocate(opcode::ALLOC_PD).unwrap();
            assert_ne!(pd, side.pd);
            let key = side.driver.register(pd, 4096).unwrap().key;
            assert_ne!(key, side.buffer.key);
            assert_eq!(side.driver.qp_state(&side.qp).unwrap(), 3);
        }
    }
}

#[test]
fn what_was_destroyed_stays_so_and_numbers_come_back() {
    let dpu = Dpu::start_rdma(Rdma::new(2)).unwrap();
    let mut driver = Mlx5::open(&dpu.rdma_socket(0), Guest::default()).unwrap();
    driver.start().unwrap();
    let pds: Vec<u32> = (0..5)
        .map(|_| driver.allocate(opcode::ALLOC_PD).unwrap())
        .collect();
    for pd in [pds[1], pds[3]] {
        driver.destroy(opcode::DEALLOC_PD, pd).unwrap();
    }
    replace(&dpu, 0);
    assert!(driver.destroy(opcode::DEALLOC_PD, pds[1]).is_err());
    let mut again = [0; 2].map(|_| driver.allocate(opcode::ALLOC_PD).unwrap());
    again.sort_unstable();
    assert_eq!(again, [pds[1], pds[3]]);
    // A driver that begins anew finds nothing of before.
    driver.command(opcode::TEARDOWN_HCA, 0, &[], 16).unwrap();
    replace(&dpu, 0);
    assert!(driver.allocate(opcode::ALLOC_PD).is_err());
    driver.start().unwrap();
    replace(&dpu, 0);
    assert_eq!(driver.allocate(opcode::ALLOC_PD).unwrap(), pds[0]);
}

#[test]
fn ems_that_are_killed_under_traffic_are_replaced_and_every_request_is_done_once() {
    for mapped in [false, true] {
        let mut pair = Pair::mapped(mapped, Service::Rc);
        let om = pair.dpu.om_pid();
        let kills = kills(200) / 2;
        let footprints = while_busy(&mut pair, 11, move |dpu| {
            let mut random = Random(3 + u64::from(mapped));
            let mut pids = [0, 1].map(|em| dpu.em_pid(em).unwrap());
            let mut before = None;
            for round in 0..kills {
                // An EM that lives shorter is not replaced at once, nor has it taken over everything.
                std::thread::sleep(Duration::from_micros(105_000 + random.below(20_000)));
                if round == 10 {
                    // Both have everything by then.
                    std::thread::sleep(Duration::from_millis(200));
                    before = Some([om, pids[0], pids[1]].map(footprint));
                }
                let em = random.below(2) as usize;
                kill(pids[em], Signal::KILL);
                pids[em] = successor(dpu, em, pids[em]).unwrap();
            }
            std::thread::sleep(Duration::from_millis(200));
            before.map(|before| (before, [om, pids[0], pids[1]].map(footprint)))
        });
        if let Some((before, now)) = footprints {
            for ((fds, _), (fds_now, _)) in before.into_iter().zip(now) {
                assert!(fds_now <= fds + 2, "{fds} descriptors became {fds_now}");
            }
            // Of an EM the guest's memory counts as far as it was used.
            let ([(_, rss), ..], [(_, rss_now), ..]) = (before, now);
            assert!(rss_now < rss + 4096, "{rss} KiB became {rss_now}");
        }
    }
}

/// Kills either EM `count` times.
pub(super) fn kill_in_turn(dpu: &Dpu, count: usize, seed: u64) {
    let mut random = Random(seed);
    let mut pids = [0, 1].map(|em| dpu.em_pid(em).unwrap());
    for _ in 0..count {
        // An EM that lives shorter is not replaced at once.
        std::thread::sleep(Duration::from_micros(105_000 + random.below(20_000)));
        let em = random.below(2) as usize;
        kill(pids[em], Signal::KILL);
        pids[em] = successor(dpu, em, pids[em]).unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
}

#[test]
fn receives_of_a_shared_queue_are_used_once_each_by_whichever_queue_pair() {
    const SIZE: u64 = 16;
    let dpu = Dpu::start_rdma(Rdma::new(2)).unwrap();
    let [mut a, mut b] = [0, 1].map(|n| Side::new(&dpu, n, Service::Rc, Guest::default()));
    let (lids, (pd_a, pd_b)) = ([a.driver.lid, b.driver.lid], (a.pd, b.pd));
    let mut srq = b.driver.create_srq(pd_b, 4).unwrap();
    let plan = |pd| QpPlan {
        service: Service::Rc,
        pd,
        log_send: 7,
        log_receive: 2,
    };
    let mut qps: Vec<_> = (0..2)
        .map(|_| {
            let own = a
                .driver
                .create_qp(plan(pd_a), &a.sends, &a.receives)
                .unwrap();
            let cqs = [&b.sends, &b.receives];
            let other = b.driver.create_qp_on(plan(pd_b), cqs, &srq).unwrap();
            a.driver
                .connect(&own, Service::Rc, lids[1], other.number)
                .unwrap();
            b.driver
                .connect(&other, Service::Rc, lids[0], own.number)
                .unwrap();
            own
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (dpu, stop) = (&dpu, &stop);
        scope.spawn(move || {
            let _stop = Stop(stop);
            kill_in_turn(dpu, kills(200) / 4, 77);
        });
        let (mut random, mut number) = (Random(9), 0u64);
        while !stop.load(Ordering::Relaxed) {
            let count = 1 + random.below(8);
            let mut sent = std::collections::HashMap::new();
            for n in 0..count {
                number += 1;
                // Long ones come in parts, while the other queue pair takes receives.
                let len = match random.below(6) {
                    0 => 262_144 + random.below(200_000),
                    _ => random.below(5000),
                } as u32;
                let data = pattern(number, len);
                let from = a.buffer.address + n * SLOT / 2;
                a.driver.memory.write(from, &data).unwrap();
                let place = b.buffer.address + (number - 1) % SIZE * SLOT / 2;
                let index = srq.post(b.buffer.key, place, SLOT as u32 / 2).unwrap();
                assert_eq!(u64::from(index), (number - 1) % SIZE);
                let segment = [(a.buffer.key, from, len)];
                let qp = &mut qps[random.below(2) as usize];
                let send = Send::Send(Some(number as u32));
                qp.post_send(send, &segment, true).unwrap();
                sent.insert(number as u32, data);
            }
            qps.iter_mut().for_each(|qp| a.driver.ring(qp).unwrap());
            for _ in 0..count {
                let cqe = b.receives.wait().unwrap();
                assert_eq!(cqe.opcode, 3, "{cqe:?}");
                let data = sent.remove(&cqe.immediate).unwrap();
                let got = b.bytes(u64::from(cqe.counter) * SLOT / 2, data.len());
                assert!(got == data, "{cqe:?}");
                assert_eq!(a.sends.wait().unwrap().opcode, 0);
            }
            assert_eq!(b.receives.poll().unwrap(), None, "a delivery twice");
            assert_eq!(a.sends.poll().unwrap(), None, "a completion twice");
        }
        println!("{number} messages");
    });
}

#[test]
fn an_atomic_is_done_once_or_its_connection_fails() {
    let mut pair = Pair::new(Service::Rc);
    let Pair { a, b, dpu } = &mut pair;
    let dpu = &*dpu;
    let (local, remote) = (a.buffer, b.buffer);
    let lids = [a.driver.lid, b.driver.lid];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let _stop = Stop(stop);
            kill_in_turn(dpu, kills(200) / 4, 78);
        });
        let (mut count, mut failed) = (0u64, 0);
        let value = |side: &Side| u64::from_le_bytes(side.bytes(0, 8).try_into().unwrap());
        while !stop.load(Ordering::Relaxed) {
            let send = Send::FetchAdd(remote.address, remote.key, 1);
            a.qp.post_send(send, &[(local.key, local.address, 8)], true)
                .unwrap();
            a.driver.ring(&mut a.qp).unwrap();
            if a.sends.wait().unwrap().opcode == 0 {
                assert_eq!(value(a), count, "the old value");
                count += 1;
                assert_eq!(value(b), count);
                continue;
            }
            // Nobody knows whether it was done.
            failed += 1;
            assert!([count, count + 1].contains(&value(b)));
            count = value(b);
            a.driver.change_qp(opcode::TO_RST_QP, &a.qp).unwrap();
            a.qp.forget().unwrap();
            a.driver
                .connect(&a.qp, Service::Rc, lids[1], b.qp.number)
                .unwrap();
            b.driver.change_qp(opcode::TO_RST_QP, &b.qp).unwrap();
            b.qp.forget().unwrap();
            b.driver
                .connect(&b.qp, Service::Rc, lids[0], a.qp.number)
                .unwrap();
        }
        println!("{count} atomics, {failed} not known");
        assert!(failed <= kills(200) / 4);
    });
}

/// Every EM kills itself when it comes to `point` for the `count`th time.
fn faulty(point: &str, count: u32) -> Dpu {
    let fault = format!("{point}:{count}");
    Dpu::start_rdma_with_env(Rdma::new(2), &[("DISTDPU_FAULT", &fault)]).unwrap()
}

fn restarts(dpu: &Dpu) -> u64 {
    let status = dpu.ctl(&["status"]).unwrap();
    let ems = [&status["ems"][0], &status["ems"][1]];
    ems.into_iter()
        .map(|em| em["restarts"].as_u64().unwrap())
        .sum()
}

/// Requests in a row of which some kill an EM.
fn data_path_survives(point: &str, count: u32) {
    let mut pair = Pair::over(
        faulty(point, count),
        Service::Rc,
        Guest::default(),
        Guest::default(),
    );
    let mut traffic = Traffic::new(u64::from(count));
    for _ in 0..250 {
        traffic.round(&mut pair.a, &mut pair.b);
        // EMs that live shorter than 100 ms are started after longer and longer pauses.
        std::thread::sleep(Duration::from_millis(4));
    }
    let restarts = restarts(&pair.dpu);
    println!("{point}: {restarts} restarts, {} requests", traffic.done);
    assert!(restarts > 3, "only {restarts} restarts");
}

#[test]
fn a_request_survives_a_kill_when_it_was_performed() {
    data_path_survives("performed", 151);
}

#[test]
fn a_request_survives_a_kill_when_its_receive_was_completed() {
    data_path_survives("received", 61);
}

#[test]
fn a_request_survives_a_kill_when_it_was_completed() {
    data_path_survives("completed", 101);
}

/// Commands in a row of which some kill the EM. Each is executed once, and its driver gets one event.
fn commands_survive(point: &str, count: u32) {
    let dpu = faulty(point, count);
    let mut driver = Mlx5::open(&dpu.rdma_socket(0), Guest::default()).unwrap();
    driver.start().unwrap();
    driver.expect_command_events().unwrap();
    let (mut pd, mut buffer) = (0, None);
    for round in 0..40 {
        let before = (pd, buffer);
        pd = driver.allocate(opcode::ALLOC_PD).unwrap();
        let cq = driver.create_cq(6).unwrap();
        let plan = QpPlan {
            service: Service::Rc,
            pd,
            log_send: 4,
            log_receive: 4,
        };
        let qp = driver.create_qp(plan, &cq, &cq).unwrap();
        let lid = driver.lid;
        driver.connect(&qp, Service::Rc, lid, qp.number).unwrap();
        assert_eq!(driver.qp_state(&qp).unwrap(), 3, "{round}");
        let new = driver.register(pd, 64 << 10).unwrap();
        driver.change_qp(opcode::TO_RST_QP, &qp).unwrap();
        driver.destroy(opcode::DESTROY_QP, qp.number).unwrap();
        driver.destroy(opcode::DESTROY_CQ, cq.number).unwrap();
        if let (old_pd, Some(old)) = before {
            let old: distdpu_tests::mlx5::Buffer = old;
            assert!(old.key >> 8 != new.key >> 8 && old_pd != pd, "{round}");
            driver.destroy(opcode::DESTROY_MKEY, old.key >> 8).unwrap();
            driver.destroy(opcode::DEALLOC_PD, old_pd).unwrap();
        }
        buffer = Some(new);
        std::thread::sleep(Duration::from_millis(60));
    }
    let more = driver.unexpected_command_events().unwrap();
    assert_eq!(more, 0, "one event for each command");
    let restarts = restarts(&dpu);
    println!("{point}: {restarts} restarts");
    assert!(restarts > 3, "only {restarts} restarts");
}

#[test]
fn a_command_survives_a_kill_when_it_was_noted() {
    commands_survive("noted", 61);
}

#[test]
fn a_command_survives_a_kill_when_it_counts() {
    commands_survive("kept", 61);
}

#[test]
fn a_command_survives_a_kill_before_its_output() {
    commands_survive("command", 61);
}

#[test]
fn a_command_survives_a_kill_right_after_its_output() {
    commands_survive("finished", 61);
}

#[test]
fn a_command_survives_a_kill_before_its_event() {
    commands_survive("telling", 61);
}

#[test]
fn a_command_survives_a_kill_right_after_its_event() {
    commands_survive("told", 61);
}
