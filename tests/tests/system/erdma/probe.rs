//! What the driver's probe asks for, in its order.

use super::{Side, gid};
use distdpu_tests::dpu::{Dpu, RdmaFace, rdma_mac};
use distdpu_tests::erdma::{Erdma, Request, command, regs};
use distdpu_tests::pci;
use distdpu_tests::virtio_net::Guest;

fn one() -> (Dpu, Erdma) {
    let dpu = Dpu::start_faces(&[RdmaFace::Erdma], false).unwrap();
    let driver = Erdma::open(&dpu.erdma_socket(0), Guest::default()).unwrap();
    (dpu, driver)
}

#[test]
fn the_driver_finds_what_it_expects() {
    let (_dpu, mut driver) = one();
    assert!(driver.pci.msix.vectors >= 2, "no vector for completions");
    assert_eq!(driver.pci.msix.table_bar, 2);
    // Linux would ask for more memory BARs than the driver accepts, were there a ROM.
    pci::write32(driver.vmm.as_mut(), 0x30, 0xffff_f800).unwrap();
    assert_eq!(pci::read32(driver.vmm.as_mut(), 0x30).unwrap(), 0);
    driver.start().unwrap();
    assert_eq!(driver.mac, rdma_mac(0));
    let caps = driver.capabilities;
    assert!(caps.max_qp() >= 1024, "{caps:x?}");
    let log = |at: u32| 1u64 << (caps.first >> at & 0xff);
    assert!(log(40) >= 1 << 16 && log(16) >= 8192, "{caps:x?}");
    // Twice as many regions as queue pairs, and no key of theirs is the one of all memory.
    assert!(caps.dma_key() >> 8 >= 2 * caps.max_qp(), "{caps:x?}");
    assert_eq!(driver.unexpected_async_events().unwrap(), []);
}

#[test]
fn a_probe_that_is_put_off_may_be_repeated() {
    let (_dpu, mut driver) = one();
    for _ in 0..3 {
        driver.start().unwrap();
        for vector in 1..=2 {
            let request = Request::new(command::DESTROY_EQ).bytes(16, &[vector, vector, 0, 1]);
            driver.command(&request).unwrap();
        }
        driver.reset().unwrap();
        assert_eq!(driver.read32(regs::STATUS).unwrap() & 2, 0);
        driver.memory.free_all();
    }
    driver.start().unwrap();
}

#[test]
fn a_function_reset_ends_everything_too() {
    let (_dpu, mut driver) = one();
    for _ in 0..2 {
        driver.start().unwrap();
        let pci = driver.pci.clone();
        pci.function_level_reset(driver.vmm.as_mut()).unwrap();
        driver.switch_on().unwrap();
        assert_eq!(driver.read32(regs::STATUS).unwrap() & 2, 0);
    }
    driver.vmm.reset().unwrap();
    driver.switch_on().unwrap();
    driver.start().unwrap();
}

#[test]
fn many_commands_may_be_outstanding() {
    let (_dpu, mut driver) = one();
    driver.start().unwrap();
    for round in 0..5 {
        let posted: Vec<u16> = (0..100)
            .map(|n| {
                let request = Request::new(command::SET_GID)
                    .word(8, n % 4)
                    .bytes(12, &gid(n as usize));
                driver.post(&request).unwrap()
            })
            .collect();
        driver.ring_commands().unwrap();
        for index in posted {
            let reply = driver.reply(index).unwrap();
            assert_eq!(reply.syndrome, 0, "round {round}, block {index}");
        }
    }
}

#[test]
fn a_command_that_is_none_fails_and_the_next_works() {
    let (_dpu, mut driver) = one();
    driver.start().unwrap();
    for unknown in [(0, 7), (0, 200), (1, 77), (2, 0), (3, 3)] {
        let reply = driver.execute(&Request::new(unknown)).unwrap();
        assert_ne!(reply.syndrome, 0, "{unknown:?}");
        driver.statistics().unwrap();
    }
}

#[test]
fn objects_come_and_go_and_numbers_are_used_again() {
    let dpu = Dpu::start_faces(&[RdmaFace::Erdma], false).unwrap();
    let mut side = Side::new(&dpu, 0, true, Guest::default());
    for user in [false, true] {
        for _ in 0..50 {
            let plan = distdpu_tests::erdma::QpPlan {
                number: Some(77),
                log_send: 4,
                log_receive: 4,
                ..super::plan(side.pd, user)
            };
            let qp = side
                .driver
                .create_qp(plan, &side.sends, &side.receives)
                .unwrap();
            // The number is taken.
            assert!(
                side.driver
                    .create_qp(plan, &side.sends, &side.receives)
                    .is_err()
            );
            side.driver.destroy_qp(&qp).unwrap();
            assert!(side.driver.qp_state(&qp).is_err());
        }
    }
    let key = side.buffer.key;
    side.driver.deregister(key).unwrap();
    assert!(side.driver.deregister(key).is_err());
    side.driver.destroy_qp(&side.qp).unwrap();
    side.driver.destroy_cq(&side.sends).unwrap();
    assert!(side.driver.destroy_cq(&side.sends).is_err());
}
