//! Each fault ends the request, and the queue pair, as the specification says.

use super::Pair;
use distdpu_tests::mlx5::{Mlx5, Send, Service, opcode};
use distdpu_tests::time::{SOON, wait_for};

const ERROR_SEND: u8 = 0xd;
const ERROR_RECEIVE: u8 = 0xe;
const FLUSHED: u8 = 5;

/// Posts one request with one more behind it; answers the syndromes of both.
fn fail(pair: &mut Pair, send: Send<'_>, segment: (u32, u64, u32)) -> [u8; 2] {
    pair.a.qp.post_send(send, &[segment], false).unwrap();
    pair.a.qp.post_send(send, &[segment], false).unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    [(); 2].map(|()| {
        let done = pair.a.sends.wait().unwrap();
        assert_eq!(done.opcode, ERROR_SEND, "{done:?}");
        done.syndrome
    })
}

#[test]
fn a_bad_remote_key_or_range_is_a_remote_access_error() {
    for (offset, key) in [(0, 1), ((8 << 20) - 4, 0), (1 << 40, 0)] {
        let mut pair = Pair::new(Service::Rc);
        let (local, remote) = (pair.a.buffer, pair.b.buffer);
        let write = Send::Write(remote.address + offset, remote.key ^ key, None);
        let syndromes = fail(&mut pair, write, (local.key, local.address, 8));
        assert_eq!(syndromes, [0x13, FLUSHED], "offset {offset:#x} key ^ {key}");
        assert_eq!(pair.a.driver.qp_state(&pair.a.qp).unwrap(), 6);
        assert_eq!(pair.b.driver.qp_state(&pair.b.qp).unwrap(), 6);
    }
}

#[test]
fn a_bad_local_key_is_a_local_protection_error() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let write = Send::Write(remote.address, remote.key, None);
    let syndromes = fail(&mut pair, write, (local.key ^ 1, local.address, 8));
    assert_eq!(syndromes, [4, FLUSHED]);
    assert_eq!(
        pair.b.driver.qp_state(&pair.b.qp).unwrap(),
        3,
        "the peer is fine"
    );
}

#[test]
fn a_key_of_another_domain_is_refused() {
    let mut pair = Pair::new(Service::Rc);
    let other = pair.b.driver.allocate(opcode::ALLOC_PD).unwrap();
    let foreign = pair.b.driver.register(other, 4096).unwrap();
    let local = pair.a.buffer;
    let write = Send::Write(foreign.address, foreign.key, None);
    let syndromes = fail(&mut pair, write, (local.key, local.address, 8));
    assert_eq!(syndromes, [0x13, FLUSHED]);
}

#[test]
fn a_key_without_the_right_is_refused() {
    let mut pair = Pair::new(Service::Rc);
    let at = pair.b.buffer.address;
    // local write and remote read, but no remote write
    let key = pair
        .b
        .driver
        .register_at(pair.b.pd, at, 4096, 0b0111)
        .unwrap();
    let local = pair.a.buffer;
    let segment = [(local.key, local.address, 8)];
    pair.a
        .qp
        .post_send(Send::Read(at, key), &segment, true)
        .unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
    let syndromes = fail(&mut pair, Send::Write(at, key, None), segment[0]);
    assert_eq!(syndromes, [0x13, FLUSHED]);
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    pair.b
        .qp
        .post_receive(remote.key, remote.address, 100)
        .unwrap();
    let syndromes = fail(&mut pair, Send::Send(None), (local.key, local.address, 101));
    assert_eq!(syndromes, [0x12, FLUSHED]);
    let done = pair.b.receives.wait().unwrap();
    assert_eq!((done.opcode, done.syndrome), (ERROR_RECEIVE, 1));
}

#[test]
fn a_send_waits_for_a_receive() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let data = pair.a.fill(0x77);
    let segment = [(local.key, local.address, 5000)];
    pair.a
        .qp
        .post_send(Send::Send(None), &segment, true)
        .unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(pair.a.sends.poll().unwrap(), None);
    pair.b
        .qp
        .post_receive(remote.key, remote.address, 8192)
        .unwrap();
    assert_eq!(pair.b.receives.wait().unwrap().len, 5000);
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
    assert!(pair.b.bytes(0, 5000) == data[..5000]);
}

#[test]
fn an_error_by_command_flushes_what_is_posted() {
    let mut pair = Pair::new(Service::Rc);
    let remote = pair.b.buffer;
    for n in 0..5 {
        pair.b
            .qp
            .post_receive(remote.key, remote.address + n * 100, 100)
            .unwrap();
    }
    pair.b
        .driver
        .change_qp(opcode::TO_ERR_QP, &pair.b.qp)
        .unwrap();
    for n in 0..5 {
        let done = pair.b.receives.wait().unwrap();
        assert_eq!(
            (done.opcode, done.syndrome, done.counter),
            (ERROR_RECEIVE, FLUSHED, n)
        );
    }
    // So is what comes later, although no doorbell tells of it.
    pair.b
        .qp
        .post_receive(remote.key, remote.address, 100)
        .unwrap();
    let done = pair.b.receives.wait().unwrap();
    assert_eq!((done.syndrome, done.counter), (FLUSHED, 5));
}

#[test]
fn a_peer_that_is_gone_is_a_retry_error() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    pair.b
        .driver
        .change_qp(opcode::TO_RST_QP, &pair.b.qp)
        .unwrap();
    let write = Send::Write(remote.address, remote.key, None);
    let syndromes = fail(&mut pair, write, (local.key, local.address, 8));
    assert_eq!(syndromes, [0x15, FLUSHED]);
}

#[test]
fn a_queue_pair_works_again_after_a_reset() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let bad = Send::Write(remote.address, remote.key ^ 1, None);
    fail(&mut pair, bad, (local.key, local.address, 8));
    let (lid_a, lid_b) = (pair.a.driver.lid, pair.b.driver.lid);
    let (a, b) = (pair.a.qp.number, pair.b.qp.number);
    for (side, lid, peer) in [(&mut pair.a, lid_b, b), (&mut pair.b, lid_a, a)] {
        side.driver.change_qp(opcode::TO_RST_QP, &side.qp).unwrap();
        side.qp.forget().unwrap();
        side.driver
            .connect(&side.qp, Service::Rc, lid, peer)
            .unwrap();
    }
    let good = Send::Write(remote.address, remote.key, None);
    let segment = [(local.key, local.address, 8)];
    pair.a.qp.post_send(good, &segment, true).unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
}

#[test]
fn a_destination_that_is_not_there_is_refused_at_connection_time() {
    let mut pair = Pair::new(Service::Rc);
    let side = &mut pair.a;
    side.driver.change_qp(opcode::TO_RST_QP, &side.qp).unwrap();
    side.driver.to_init(&side.qp, Service::Rc).unwrap();
    assert!(side.driver.to_rtr(&side.qp, Service::Rc, 0x99, 5).is_err());
}

/// State of the port: 1 down, 4 active (`port_state` of the HCA vport context).
fn port_state(driver: &mut Mlx5) -> u8 {
    let input = [0, 0, 0, 0, 1, 0, 0, 0];
    let context = driver.command(opcode::QUERY_HCA_VPORT_CONTEXT, 0, &input, 0x110);
    context.unwrap()[0x10 + 0x23] >> 4
}

#[test]
fn the_administrator_s_word_reaches_the_port_and_its_driver() {
    const PORT_CHANGE: u8 = 9;
    let (down, active) = (1, 4);
    let mut pair = Pair::new(Service::Rc);
    let driver = &mut pair.a.driver;
    let events = driver.memory.allocate(4096, 4096).unwrap();
    driver.memory.write(events, &[1; 4096]).unwrap();
    driver.create_eq(events, 2, 0, 1 << PORT_CHANGE).unwrap();
    assert_eq!(port_state(driver), active);
    for (n, word, state) in [(0, "down", down), (1, "up", active)] {
        pair.dpu.ctl(&["link", "set", "rdma0", word]).unwrap();
        let memory = driver.memory.clone();
        let event = wait_for("an event of the port", SOON, || {
            let entry = memory.bytes(events + n * 64, 64).unwrap();
            (entry[63] & 1 == 0).then_some(entry)
        });
        let event = event.unwrap();
        // Type, what happened, and which port.
        assert_eq!(
            (event[1], event[3], event[40] >> 4),
            (PORT_CHANGE, state, 1)
        );
        assert_eq!(port_state(driver), state);
    }
    // The paths ended with it; new ones work.
    let (lid_a, lid_b) = (pair.a.driver.lid, pair.b.driver.lid);
    let (a, b) = (pair.a.qp.number, pair.b.qp.number);
    for (side, lid, peer) in [(&mut pair.a, lid_b, b), (&mut pair.b, lid_a, a)] {
        assert_eq!(side.driver.qp_state(&side.qp).unwrap(), 6);
        side.driver.change_qp(opcode::TO_RST_QP, &side.qp).unwrap();
        side.qp.forget().unwrap();
        side.driver
            .connect(&side.qp, Service::Rc, lid, peer)
            .unwrap();
    }
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let write = Send::Write(remote.address, remote.key, None);
    let segment = [(local.key, local.address, 8)];
    pair.a.qp.post_send(write, &segment, true).unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
}
