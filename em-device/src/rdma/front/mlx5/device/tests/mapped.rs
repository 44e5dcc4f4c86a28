//! Doorbells in pages that the VMM maps.

use super::super::super::command::opcode as op;
use super::super::super::fields::qpc;
use super::driver::*;
use crate::rdma::verbs::CqNum;
use m2m_fabric::proto::RdmaLinkLayer;

const IB: RdmaLinkLayer = RdmaLinkLayer::Infiniband;

/// A queue pair that is ready to send.
struct Queue {
    qpn: u32,
    sends: u64,
    record: u64,
    posted: u32,
}

impl Queue {
    fn new(driver: &mut Driver, pd: u32, cq: u32) -> Self {
        let input = driver.qp_input(0, pd, cq);
        let record = driver.page() - 4096;
        let qpn = driver.create(op::CREATE_QP, &input);
        driver.ok(op::RST2INIT_QP, &qp_change(qpn, 0, &[]), 16);
        let rtr = [(qpc::MTU.at(qpc::AT), 5)];
        driver.ok(op::INIT2RTR_QP, &qp_change(qpn, 0, &rtr), 16);
        driver.ok(op::RTR2RTS_QP, &qp_change(qpn, 0, &[]), 16);
        // The receives come before the sends.
        let sends = record - 4096 + 64;
        Self {
            qpn,
            sends,
            record,
            posted: 0,
        }
    }

    /// Posts an entry that does nothing and completes; answers its doorbell.
    fn post(&mut self, driver: &Driver) -> [u8; 8] {
        let mut entry = [0; 16];
        entry[..4].copy_from_slice(&(self.posted << 8).to_be_bytes());
        entry[4..8].copy_from_slice(&(self.qpn << 8 | 1).to_be_bytes());
        entry[11] = 2 << 2;
        let at = self.sends + u64::from(self.posted % 16) * 64;
        driver.memory.write(at, &entry);
        self.posted += 1;
        let record = self.record + 4;
        driver.memory.write(record, &self.posted.to_be_bytes());
        *entry.first_chunk().unwrap()
    }
}

fn completions(driver: &mut Driver, cq: u32) -> u32 {
    driver.device.engine().cq_mut(CqNum(cq)).unwrap().producer()
}

#[test]
fn a_queue_is_served_that_rang_or_whose_doorbell_was_overwritten() {
    let (mut driver, pages) = Driver::mapped(IB);
    let uar = u64::from(driver.create(op::ALLOC_UAR, &[])) * 4096;
    let (pd, _) = driver.basics();
    let (eqn, _) = driver.create_eq(4, 0, 1);
    let input = driver.cq_input(eqn, 6);
    let cq = driver.create(op::CREATE_CQ, &input);
    let mut queues: Vec<_> = (0..50).map(|_| Queue::new(&mut driver, pd, cq)).collect();
    while driver.turn() {}
    for expected in [50u32, 100] {
        for queue in &mut queues {
            let doorbell = queue.post(&driver);
            pages.store(uar + 0x800, doorbell);
        }
        let lately = expected > 50;
        assert_eq!(driver.device.is_rung(), lately, "looked at before sleep");
        let worked = (0..8).any(|_| driver.turn());
        assert!(worked, "each page is looked at now and then");
        let at_once = completions(&mut driver, cq);
        assert!((expected - 49..expected).contains(&at_once), "{at_once}");
        assert!(!driver.device.is_rung());
        // Some in each round.
        for _ in 0..100 {
            driver.turn();
        }
        assert_eq!(completions(&mut driver, cq), expected);
        let record = cq_record(&input);
        driver.memory.write(record, &expected.to_be_bytes());
    }
    // Many after a sleep.
    queues.iter_mut().for_each(|queue| {
        queue.post(&driver);
    });
    driver.device.woke();
    assert!(driver.turn());
    assert_eq!(completions(&mut driver, cq), 150);
}

/// Where the record of a queue made with this input is.
fn cq_record(input: &[u8]) -> u64 {
    use super::super::super::bits::get64;
    use super::super::super::fields::cqc;
    get64(input, cqc::AT + cqc::DBR_ADDR)
}

#[test]
fn a_queue_without_news_is_no_work_and_glances_find_what_rings_next() {
    let (mut driver, pages) = Driver::mapped(IB);
    let now = std::time::Instant::now();
    assert_eq!(driver.device.patience(now), None, "no doorbells yet");
    let uar = driver.create(op::ALLOC_UAR, &[]);
    let (pd, cq) = driver.basics();
    let mut queue = Queue::new(&mut driver, pd, cq);
    while driver.turn() {}
    for round in 1..3 {
        assert!(driver.device.patience(now).is_some() && driver.device.watch().is_none());
        driver.device.woke();
        assert!(!driver.turn());
        assert_eq!(driver.device.patience(now), None);
        let watch = driver.device.watch().unwrap();
        assert!(!watch.on.glance());
        let doorbell = queue.post(&driver);
        pages.store(u64::from(uar) * 4096 + 0x900, doorbell);
        assert!(watch.on.glance() && watch.on.glance(), "it stays");
        driver.device.woke();
        assert!(driver.turn());
        assert!(!watch.on.glance());
        assert_eq!(completions(&mut driver, cq), round);
    }
    driver.ok(op::DEALLOC_UAR, &about(uar), 16);
    pages.store(u64::from(uar) * 4096 + 0x900, [1; 8]);
    driver.device.woke();
    driver.turn();
    assert!(driver.device.watch().is_none(), "no page, nothing to see");
    driver.device.reset();
    assert_eq!(driver.device.patience(now), None);
}
