//! A guest with mlx5's driver and one with erdma's.

use super::{Side, gid};
use distdpu_tests::dpu::{Dpu, RdmaFace, rdma_mac};
use distdpu_tests::erdma;
use distdpu_tests::mlx5::{Send, Service};
use distdpu_tests::virtio_net::Guest;

/// Both, connected: mlx5 is guest 0.
fn pair() -> (Dpu, crate::rdma::Side, Side) {
    let dpu = Dpu::start_faces(&[RdmaFace::Mlx5, RdmaFace::Erdma], false).unwrap();
    let mut one = crate::rdma::Side::new(&dpu, 0, Service::Rc, Guest::default());
    one.driver.set_gid(0, gid(0)).unwrap();
    let mut other = Side::new(&dpu, 1, true, Guest::default());
    let number = other.qp.number;
    one.driver
        .connect_roce(&one.qp, (rdma_mac(1), gid(1)), number)
        .unwrap();
    other.connect(0, one.qp.number);
    (dpu, one, other)
}

#[test]
fn data_moves_from_mlx5_to_erdma() {
    let (_dpu, mut one, mut other) = pair();
    let data = one.fill(0x71);
    let (local, remote) = (one.buffer, other.buffer);
    for (from, to, len) in crate::rdma::transfer::CASES {
        let segment = [(local.key, local.address + from, len)];
        let send = Send::Write(remote.address + to, remote.key, None);
        one.qp.post_send(send, &segment, true).unwrap();
        one.driver.ring(&mut one.qp).unwrap();
        assert_eq!(one.sends.wait().unwrap().opcode, 0);
        assert!(other.bytes(to, len as usize) == data[from as usize..][..len as usize]);
    }
    other.receive(0, 5000);
    let segment = [(local.key, local.address, 4999)];
    one.qp
        .post_send(Send::Send(Some(0x0102_0304)), &segment, true)
        .unwrap();
    one.qp
        .post_send(Send::Read(remote.address + 1, remote.key), &segment, true)
        .unwrap();
    one.driver.ring(&mut one.qp).unwrap();
    let done = other.receives.success().unwrap();
    let got = (done.opcode, done.len, done.immediate);
    assert_eq!(got, (12, 4999, 0x0102_0304));
    for _ in 0..2 {
        assert_eq!(one.sends.wait().unwrap().opcode, 0);
    }
    assert!(one.bytes(0, 4999) == other.bytes(1, 4999));
}

#[test]
fn data_moves_from_erdma_to_mlx5() {
    let (_dpu, mut one, mut other) = pair();
    let data = other.fill(0x72);
    let remote = one.buffer;
    for (from, to, len) in crate::rdma::transfer::CASES {
        let part = other.part(from, len);
        other.send(
            erdma::Send::Write(remote.address + to, remote.key, None),
            &[part],
        );
        other.sends.success().unwrap();
        assert!(one.bytes(to, len as usize) == data[from as usize..][..len as usize]);
    }
    one.qp
        .post_receive(remote.key, remote.address, 5000)
        .unwrap();
    let part = other.part(0, 4999);
    other.send(erdma::Send::Send(Some(0x0102_0304)), &[part]);
    let part = other.part(6 << 20, 100_000);
    other.send(erdma::Send::Read(remote.address + 1, remote.key), &[part]);
    let old = other.part(0, 8);
    other.send(
        erdma::Send::FetchAdd(remote.address + 8, remote.key, 1),
        &[old],
    );
    let done = one.receives.wait().unwrap();
    assert_eq!(
        (done.opcode, done.len, done.immediate),
        (3, 4999, 0x0102_0304)
    );
    for _ in 0..3 {
        other.sends.success().unwrap();
    }
    assert!(one.bytes(16, 90_000) == other.bytes((6 << 20) + 15, 90_000));
}

#[test]
fn a_fault_reaches_the_other_s_driver() {
    let (_dpu, mut one, mut other) = pair();
    let (local, remote) = (one.buffer, other.buffer);
    let segment = [(local.key, local.address, 8)];
    let bad = Send::Write(remote.address, remote.key ^ 1, None);
    one.qp.post_send(bad, &segment, true).unwrap();
    one.driver.ring(&mut one.qp).unwrap();
    let done = one.sends.wait().unwrap();
    assert_eq!((done.opcode, done.syndrome), (0xd, 0x13));
    assert_eq!(
        other.driver.qp_state(&other.qp).unwrap(),
        erdma::state::ERROR
    );
    assert_eq!(other.driver.async_event().unwrap().number, other.qp.number);
}
