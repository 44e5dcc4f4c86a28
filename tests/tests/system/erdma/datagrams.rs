//! Queue pair 1, which the connection manager's messages take.

use super::{Side, gid, local_gid};
use distdpu_tests::dpu::{Dpu, RdmaFace, rdma_mac};
use distdpu_tests::erdma::{Path, QpPlan, Send};
use distdpu_tests::virtio_net::Guest;

const QKEY: u32 = 0x8001_0000;

/// Two guests with a queue pair 1 each.
fn pair() -> (Dpu, [Side; 2]) {
    let dpu = Dpu::start_faces(&[RdmaFace::Erdma; 2], false).unwrap();
    let sides = [0, 1].map(|index| {
        let mut side = Side::new(&dpu, index, false, Guest::default());
        let plan = QpPlan {
            datagrams: true,
            number: Some(1),
            ..super::plan(side.pd, false)
        };
        side.qp = side
            .driver
            .create_qp(plan, &side.sends, &side.receives)
            .unwrap();
        side.driver.start_datagrams(&side.qp).unwrap();
        side
    });
    (dpu, sides)
}

/// A path to a guest by its IPv4 or its link-local GID.
fn to(index: usize, is_v6: bool) -> Path {
    let (gid, own_index) = match is_v6 {
        true => (local_gid(index), 0),
        false => (gid(index), 1),
    };
    Path {
        mac: rdma_mac(index),
        gid,
        own_index,
    }
}

#[test]
fn a_datagram_comes_with_the_header_of_its_address_family() {
    let (_dpu, [mut a, mut b]) = pair();
    let data = a.fill(0x66);
    for (n, is_v6) in [false, true, false].into_iter().enumerate() {
        let ahn = n as u32 + 1;
        a.driver.create_ah(a.pd, ahn, to(1, is_v6)).unwrap();
        b.receive(0, 40 + 256);
        let part = a.part(3, 256);
        a.send(Send::Datagram(ahn, 1, QKEY), &[part]);
        assert_eq!(a.sends.success().unwrap().opcode, 2);
        let done = b.receives.success().unwrap();
        assert_eq!((done.opcode, done.len), (4, 296), "{done:?}");
        assert_eq!(done.source & 0xf_ffff, 1, "source queue pair");
        assert_eq!(done.source >> 31 == 1, is_v6);
        let got = b.bytes(0, 296);
        assert!(got[40..] == data[3..][..256]);
        if is_v6 {
            assert_eq!(got[0] >> 4, 6);
            assert_eq!(got[8..24], local_gid(0));
            assert_eq!(got[24..40], local_gid(1));
        } else {
            assert_eq!(got[20], 0x45);
            assert_eq!(got[32..36], [10, 0, 0, 1]);
            assert_eq!(got[36..40], [10, 0, 0, 2]);
        }
        let request = distdpu_tests::erdma::Request::new(distdpu_tests::erdma::command::DESTROY_AH);
        a.driver
            .command(&request.word(8, a.pd).word(12, ahn))
            .unwrap();
    }
}

#[test]
fn a_datagram_to_nobody_is_lost_and_its_sender_lives() {
    let (_dpu, [mut a, mut b]) = pair();
    a.driver.create_ah(a.pd, 1, to(7, false)).unwrap();
    a.driver.create_ah(a.pd, 2, to(1, false)).unwrap();
    let part = a.part(0, 100);
    // Nobody there, no receive, no such queue pair; then one that arrives.
    for (ahn, qpn) in [(1, 1), (2, 1), (2, 99)] {
        a.send(Send::Datagram(ahn, qpn, QKEY), &[part]);
        a.sends.success().unwrap();
    }
    b.receive(0, 4096);
    // Its doorbell has been read when a later request has an answer.
    b.driver.create_ah(b.pd, 1, to(0, false)).unwrap();
    let part = a.part(0, 55);
    a.send(Send::Datagram(2, 1, QKEY), &[part]);
    a.sends.success().unwrap();
    assert_eq!(b.receives.success().unwrap().len, 95);
}

#[test]
fn many_datagrams_arrive_in_order() {
    let (_dpu, [mut a, mut b]) = pair();
    a.driver.create_ah(a.pd, 1, to(1, false)).unwrap();
    for round in 0..40u32 {
        for n in 0..16 {
            b.receive(n * 512, 512);
        }
        for n in 0..16 {
            let part = a.part(0, 100 + n);
            a.send(Send::Datagram(1, 1, QKEY), &[part]);
        }
        for n in 0..16u32 {
            a.sends.success().unwrap();
            let done = b.receives.success().unwrap();
            assert_eq!((done.len, u32::from(done.index)), (140 + n, round * 16 + n));
        }
    }
}
