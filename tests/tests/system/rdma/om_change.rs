//! OMs that are killed under RDMA: what they knew, the next one knows.

use super::kept::{Traffic, while_busy};
use super::{Pair, Side};
use crate::recovery::{LIVES, kill, replace};
use distdpu_tests::dpu::{Dpu, Rdma, rdma_mac};
use distdpu_tests::mlx5::{Qp, QpPlan, Service, opcode};
use distdpu_tests::recovery::successor;
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::virtio_net::Guest;
use rustix::process::Signal;

/// State of a queue pair in error.
const ERROR: u8 = 6;

/// GID of the guest at `rdmaN` (IPv4-mapped).
fn gid(index: usize) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 0, 0, index as u8 + 1]);
    gid
}

/// What the OM says of `rdmaN`.
fn known(dpu: &Dpu, index: usize) -> Option<(usize, u64)> {
    let answer = dpu.ctl(&["functions"]).ok()?;
    let name = format!("rdma{index}");
    let all = answer["functions"].as_array()?;
    let view = &all.iter().find(|f| f["name"] == name.as_str())?["rdma"];
    let gids = view["gids"].as_array()?.len();
    Some((gids, view["shared_files"].as_u64()?))
}

/// Waits until the OM knows a GID and a file of either guest.
fn wait_known(dpu: &Dpu) {
    wait_for("what the guests have", SOON, || {
        let all = [known(dpu, 0)?, known(dpu, 1)?];
        all.iter().all(|one| *one == (1, 1)).then_some(())
    })
    .unwrap();
}

/// Kills the OM, and waits until the next one knows what that one knew.
fn change_om(dpu: &mut Dpu) {
    dpu.kill_om().unwrap();
    dpu.start_another_om().unwrap();
    wait_known(dpu);
}

/// Two guests on Ethernet ports whose first queue pairs are connected.
fn roce() -> Pair {
    let plan = Rdma {
        ethernet: true,
        ..Rdma::new(2)
    };
    let dpu = Dpu::start_rdma(plan).unwrap();
    let [mut a, mut b] = [0, 1].map(|n| Side::new(&dpu, n, Service::Rc, Guest::default()));
    a.driver.set_gid(0, gid(0)).unwrap();
    b.driver.set_gid(0, gid(1)).unwrap();
    let mut pair = Pair { a, b, dpu };
    connect(&mut pair);
    pair
}

/// The destination that names guest N by its GID alone: at the MAC address is nobody.
fn to(index: usize) -> ([u8; 6], [u8; 16]) {
    ([2, 0, 0, 0, 9, 9], gid(index))
}

fn connect(pair: &mut Pair) {
    let Pair { a, b, .. } = pair;
    a.driver.connect_roce(&a.qp, to(1), b.qp.number).unwrap();
    b.driver.connect_roce(&b.qp, to(0), a.qp.number).unwrap();
}

/// Gives both guests new queue pairs, connected now; answers the former ones.
fn renew(pair: &mut Pair) -> [Qp; 2] {
    let former = [&mut pair.a, &mut pair.b].map(|side| {
        let plan = QpPlan {
            service: Service::Rc,
            pd: side.pd,
            log_send: 7,
            log_receive: 6,
        };
        let new = side.driver.create_qp(plan, &side.sends, &side.receives);
        std::mem::replace(&mut side.qp, new.unwrap())
    });
    connect(pair);
    former
}

#[test]
fn gids_memory_and_connections_are_known_to_the_next_om() {
    let mut pair = roce();
    let mut first = Traffic::new(21);
    first.round(&mut pair.a, &mut pair.b);
    pair.dpu.kill_om().unwrap();
    // Another GID, set while nobody hears of it.
    pair.a.driver.set_gid(0, [0; 16]).unwrap();
    pair.a.driver.set_gid(3, gid(0)).unwrap();
    first.round(&mut pair.a, &mut pair.b);
    pair.dpu.start_another_om().unwrap();
    wait_known(&pair.dpu);
    first.round(&mut pair.a, &mut pair.b);
    // A connection that is made after the change.
    let old = renew(&mut pair);
    let mut second = Traffic::new(22);
    second.round(&mut pair.a, &mut pair.b);
    for em in [0, 1] {
        replace(&pair.dpu, em);
        second.round(&mut pair.a, &mut pair.b);
    }
    wait_known(&pair.dpu);
    // And one of before, after the EMs were killed.
    let new = [&mut pair.a, &mut pair.b]
        .into_iter()
        .zip(old)
        .map(|(side, old)| std::mem::replace(&mut side.qp, old))
        .collect::<Vec<_>>();
    first.round(&mut pair.a, &mut pair.b);
    renew(&mut pair);
    Traffic::new(23).round(&mut pair.a, &mut pair.b);
    drop(new);
}

#[test]
fn a_connection_of_before_ends_when_the_next_om_says_so() {
    let mut pair = roce();
    change_om(&mut pair.dpu);
    Traffic::new(31).round(&mut pair.a, &mut pair.b);
    pair.dpu.ctl(&["link", "set", "rdma0", "down"]).unwrap();
    for side in [&mut pair.a, &mut pair.b] {
        wait_for("an error", SOON, || {
            (side.driver.qp_state(&side.qp).unwrap() == ERROR).then_some(())
        })
        .unwrap();
    }
    // The next OM has it from the configuration again.
    change_om(&mut pair.dpu);
    for side in [&mut pair.a, &mut pair.b] {
        side.driver.change_qp(opcode::TO_RST_QP, &side.qp).unwrap();
        side.qp.forget().unwrap();
    }
    connect(&mut pair);
    Traffic::new(32).round(&mut pair.a, &mut pair.b);
}

#[test]
fn a_gid_that_its_guest_took_back_without_an_om_is_nobodys() {
    let mut pair = roce();
    pair.dpu.kill_om().unwrap();
    pair.b.driver.set_gid(0, [0; 16]).unwrap();
    pair.dpu.start_another_om().unwrap();
    wait_for("what the guests have", SOON, || {
        (known(&pair.dpu, 0)? == (1, 1) && known(&pair.dpu, 1)? == (0, 1)).then_some(())
    })
    .unwrap();
    let Pair { a, b, .. } = &mut pair;
    a.driver.change_qp(opcode::TO_RST_QP, &a.qp).unwrap();
    a.qp.forget().unwrap();
    assert!(a.driver.connect_roce(&a.qp, to(1), b.qp.number).is_err());
    // By its MAC address it is there as ever.
    a.driver.change_qp(opcode::TO_RST_QP, &a.qp).unwrap();
    let at = (rdma_mac(1), [0xfd; 16]);
    a.driver.connect_roce(&a.qp, at, b.qp.number).unwrap();
}

#[test]
fn traffic_goes_on_while_oms_and_ems_are_killed_in_turn() {
    let mut pair = Pair::new(Service::Rc);
    while_busy(&mut pair, 41, |dpu| {
        let mut pids = [0, 1].map(|em| dpu.em_pid(em).unwrap());
        for round in 0..6 {
            change_om(dpu);
            assert_eq!([0, 1].map(|em| dpu.em_pid(em).unwrap()), pids);
            let em = round % 2;
            std::thread::sleep(LIVES);
            kill(pids[em], Signal::KILL);
            pids[em] = successor(dpu, em, pids[em]).unwrap();
            wait_known(dpu);
            std::thread::sleep(LIVES);
        }
    });
}
