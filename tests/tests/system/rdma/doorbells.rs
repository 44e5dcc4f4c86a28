//! Doorbells that are stores to memory, of which the EM is not told.

use super::Pair;
use distdpu_tests::mlx5::{QpPlan, Send, Service};
use distdpu_tests::time::{SOON, wait_for};
use std::time::Duration;

#[test]
fn a_doorbell_is_seen_while_the_em_is_busy_and_after_it_slept() {
    let mut pair = Pair::mapped(true, Service::Rc);
    let data = pair.a.fill(0x55);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    for n in 0..60u64 {
        if n % 20 == 19 {
            // Longer than the longest time between two looks.
            std::thread::sleep(Duration::from_millis(20));
        }
        let send = Send::Write(remote.address + n * 64, remote.key, None);
        let segment = [(local.key, local.address + n, 64)];
        pair.a.qp.post_send(send, &segment, true).unwrap();
        pair.a.driver.ring(&mut pair.a.qp).unwrap();
        assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
        assert!(pair.b.bytes(n * 64, 64) == data[n as usize..][..64], "{n}");
    }
}

#[test]
fn queues_whose_doorbells_are_overwritten_are_served_all_the_same() {
    const QUEUES: u64 = 200;
    let mut pair = Pair::mapped(true, Service::Rc);
    pair.a.fill(0x66);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let cq = pair.a.driver.create_cq(10).unwrap();
    let (lid_a, lid_b) = (pair.a.driver.lid, pair.b.driver.lid);
    let mut all = Vec::new();
    for _ in 0..QUEUES {
        let plan = |pd| QpPlan {
            service: Service::Rc,
            pd,
            log_send: 4,
            log_receive: 2,
        };
        let (a, b) = (&mut pair.a, &mut pair.b);
        let qp = a.driver.create_qp(plan(a.pd), &cq, &cq).unwrap();
        let other = b.driver.create_qp(plan(b.pd), &b.sends, &b.receives);
        let other = other.unwrap();
        a.driver
            .connect(&qp, Service::Rc, lid_b, other.number)
            .unwrap();
        b.driver
            .connect(&other, Service::Rc, lid_a, qp.number)
            .unwrap();
        all.push(qp);
    }
    let mut cq = cq;
    for round in 0..3u64 {
        for (n, qp) in (0u64..).zip(&mut all) {
            let at = (round * QUEUES + n) * 8;
            let send = Send::Write(remote.address + at, remote.key, None);
            let segment = [(local.key, local.address + at, 8)];
            qp.post_send(send, &segment, true).unwrap();
            pair.a.driver.ring(qp).unwrap();
        }
        let mut done: Vec<u32> = all.iter().map(|_| cq.wait().unwrap().qpn).collect();
        done.sort_unstable();
        let mut expected: Vec<u32> = all.iter().map(|qp| qp.number).collect();
        expected.sort_unstable();
        assert_eq!(done, expected, "round {round}");
    }
    let len = (3 * QUEUES * 8) as usize;
    assert!(pair.b.bytes(0, len) == pair.a.bytes(0, len));
}

#[test]
fn each_of_two_armed_queues_brings_its_event_and_there_is_an_interrupt() {
    let mut pair = Pair::mapped(true, Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    for round in 0..20 {
        let a = &mut pair.a;
        // The second doorbell is in the place of the first.
        a.driver.arm(&mut a.sends, false).unwrap();
        a.driver.arm(&mut a.receives, false).unwrap();
        a.qp.post_receive(local.key, local.address, 64).unwrap();
        a.qp.post_send(
            Send::Write(remote.address, remote.key, None),
            &[(local.key, local.address, 8)],
            true,
        )
        .unwrap();
        a.driver.ring(&mut a.qp).unwrap();
        let b = &mut pair.b;
        b.qp.post_send(Send::Send(None), &[(remote.key, remote.address, 64)], false)
            .unwrap();
        b.driver.ring(&mut b.qp).unwrap();
        pair.a.sends.wait().unwrap();
        pair.a.receives.wait().unwrap();
        // A new queue may bring one more: it counts as armed before it is known to be.
        let mut missing = vec![pair.a.sends.number, pair.a.receives.number];
        wait_for("an event of each", SOON, || {
            while let Some((kind, cq)) = pair.a.driver.event().unwrap() {
                assert_eq!(kind, 0, "round {round}");
                missing.retain(|n| *n != cq);
            }
            missing.is_empty().then_some(())
        })
        .unwrap();
        wait_for("an interrupt", SOON, || {
            pair.a.driver.interrupted(1).then_some(())
        })
        .unwrap();
        pair.a.driver.arm_eq().unwrap();
    }
}

#[test]
fn pages_are_as_new_for_the_next_driver() {
    let mut pair = Pair::mapped(true, Service::Rc);
    pair.a.driver.vmm.reset().unwrap();
    let local = pair.a.buffer;
    // Nothing is there to be rung, and what is rung means nothing to the next.
    let send = Send::Write(local.address, local.key, None);
    pair.a.qp.post_send(send, &[], true).unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    pair.a.driver.switch_on().unwrap();
    pair.a.driver.start().unwrap();
    assert_eq!(pair.a.sends.poll().unwrap(), None);
    assert_eq!(pair.a.driver.event().unwrap(), None);
}
