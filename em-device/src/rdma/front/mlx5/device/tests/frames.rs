//! Frames through queues that commands made: out by a send queue, in by a receive queue.

use super::super::super::bits::{Field, get64};
use super::super::super::command::opcode as op;
use super::super::super::fields::{cqc, rqc, sqc, tirc, wq};
use super::driver::*;
use super::ethernet::{AT, WQ, driver, modify, ring};
use crate::net::links::Link;
use crate::port::Port;
use crate::port::loopback::LoopbackPort;
use crate::rdma::kept::Finished;
use std::time::{Duration, Instant};

/// Where frames and receive buffers are.
const FRAME: u64 = PAGES + 0x10_0000;
const BUFFERS: u64 = PAGES + 0x11_0000;
/// What [`LoopbackPort`] gives back is for the sender: its own address.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A ring as its driver sees it: number, memory, doorbell record, entries.
struct Queue {
    number: u32,
    memory: u64,
    record: u64,
    count: u16,
}

struct Bench {
    driver: Driver,
    key: u32,
    cq: Queue,
    eq: u64,
    rq: Queue,
    sq: Queue,
}

fn last_page(input: &[u8]) -> u64 {
    get64(input, input.len() - 8)
}

fn new_rq(driver: &mut Driver, cqn: u32) -> Queue {
    let input = ring(driver, 4, &[(rqc::CQN.at(AT), cqn)]);
    new_queue(driver, &input, op::CREATE_RQ, op::MODIFY_RQ, rqc::STATE)
}

fn new_sq(driver: &mut Driver, cqn: u32) -> Queue {
    let input = ring(driver, 6, &[(sqc::CQN.at(AT), cqn)]);
    new_queue(driver, &input, op::CREATE_SQ, op::MODIFY_SQ, sqc::STATE)
}

/// A queue that is ready.
fn new_queue(driver: &mut Driver, input: &[u8], create: u16, change: u16, state: Field) -> Queue {
    let number = driver.create(create, input);
    driver.ok(change, &modify(number, 0, state, 1), 16);
    Queue {
        number,
        memory: last_page(input),
        record: get64(input, WQ + wq::DBR_ADDR),
        count: 0,
    }
}

impl Bench {
    /// One queue of each kind; all frames go to the receive queue.
    fn new() -> Self {
        Self::with(Box::new(LoopbackPort::default()))
    }

    fn with(port: Box<dyn Port>) -> Self {
        let mut driver = driver();
        assert!(driver.links.add(Link::new(1, port, None), false));
        let (eqn, eq) = driver.create_eq(4, 0, 1);
        let pd = driver.create(op::ALLOC_PD, &[]);
        let key = driver.create(op::CREATE_MKEY, &physical_key(pd)) << 8 | 0x42;
        let input = driver.cq_input(eqn, 4);
        let cq = Queue {
            number: driver.create(op::CREATE_CQ, &input),
            memory: last_page(&input),
            record: get64(&input, cqc::AT + cqc::DBR_ADDR),
            count: 0,
        };
        let rq = new_rq(&mut driver, cq.number);
        let sq = new_sq(&mut driver, cq.number);
        driver.create(
            op::CREATE_TIR,
            &input_with(&[(tirc::INLINE_RQN.at(AT), rq.number)]),
        );
        Self {
            driver,
            key,
            cq,
            eq,
            rq,
            sq,
        }
    }

    fn segment(&self, addr: u64, len: u32) -> Vec<u8> {
        let words = [len, self.key].map(u32::to_be_bytes).concat();
        [words, addr.to_be_bytes().to_vec()].concat()
    }

    fn buffer(index: u16) -> u64 {
        BUFFERS + u64::from(index) * 2048
    }

    /// Posts a receive entry.
    fn receive(&mut self) {
        let index = self.rq.count % 16;
        let at = self.rq.memory + u64::from(index) * 16;
        let entry = self.segment(Self::buffer(index), 2048);
        self.driver.memory.write(at, &entry);
        self.rq.count += 1;
        let count = u32::from(self.rq.count).to_be_bytes();
        self.driver.memory.write(self.rq.record, &count);
    }

    /// Posts a frame with this byte as its payload and rings.
    fn send(&mut self, byte: u8) {
        let mut frame = [MAC, [2, 0, 0, 0, 0, 9]].concat();
        frame.extend([0x88, 0xb5]);
        frame.extend([byte; 50]);
        let index = self.sq.count;
        let addr = FRAME + u64::from(index) * 64;
        self.driver.memory.write(addr, &frame);
        let ctrl = [
            u32::from(index) << 8 | 0xa,
            self.sq.number << 8 | 3,
            8, // a completion
            0,
        ];
        let mut entry = ctrl.map(u32::to_be_bytes).concat();
        entry.extend([0; 16]);
        entry.extend(self.segment(addr, frame.len() as u32));
        let at = self.sq.memory + u64::from(index % 16) * 64;
        self.driver.memory.write(at, &entry);
        self.sq.count += 1;
        let count = u32::from(self.sq.count).to_be_bytes();
        self.driver.memory.write(self.sq.record + 4, &count);
        let bell = [u32::from(index) << 8 | 0xa, self.sq.number << 8 | 3];
        let bell = bell.map(u32::to_be_bytes).concat();
        self.driver.registers.write(9 * 4096 + 0x800, &bell);
    }

    fn turns(&mut self) {
        while self.driver.turn() {}
    }

    /// The next completion: its opcode, and of which entry.
    fn completion(&mut self) -> Option<(u8, u16)> {
        let at = self.cq.memory + u64::from(self.cq.count % 16) * 64;
        let cqe = self.driver.memory.read(at, 64);
        let owner = (self.cq.count >> 4) as u8 & 1;
        let valid = cqe[63] >> 4 != 0xf && cqe[63] & 1 == owner && cqe != [0; 64];
        valid.then(|| {
            self.cq.count += 1;
            let count = u32::from(self.cq.count).to_be_bytes();
            self.driver.memory.write(self.cq.record, &count);
            (cqe[63] >> 4, u16::from_be_bytes([cqe[60], cqe[61]]))
        })
    }

    fn payload(&self, index: u16) -> u8 {
        self.driver.memory.read(Self::buffer(index) + 20, 1)[0]
    }
}

const SENT: u8 = 0;
const RECEIVED: u8 = 2;

#[test]
fn a_frame_goes_out_by_a_send_queue_and_comes_in_by_a_receive_queue() {
    let mut bench = Bench::new();
    for n in 0..40 {
        bench.receive();
        bench.send(n as u8);
        bench.turns();
        assert_eq!(bench.completion(), Some((SENT, n)));
        assert_eq!(bench.completion(), Some((RECEIVED, n)));
        assert_eq!(bench.payload(n % 16), n as u8);
    }
    assert_eq!(bench.completion(), None);
    let counters = &bench.driver.device.ether().counters;
    assert_eq!(counters.transmitted.unicast.packets, 40);
    assert_eq!(counters.received.unicast.octets, 40 * 64);
}

#[test]
fn a_successors_queues_go_on_where_they_are() {
    let mut bench = Bench::new();
    for n in 0..90 {
        if n % 5 == 1 {
            bench.driver.succeed();
        }
        bench.receive();
        bench.send(n as u8);
        if n % 5 < 3 {
            // What was posted, rung for and not looked at.
            bench.driver.succeed();
        }
        bench.turns();
        assert_eq!(bench.completion(), Some((SENT, n)), "{n}");
        assert_eq!(bench.completion(), Some((RECEIVED, n)), "{n}");
        assert_eq!(bench.payload(n % 16), n as u8);
    }
    bench.driver.succeed();
    bench.turns();
    assert_eq!(bench.completion(), None);
}

#[test]
fn an_entry_that_was_completed_and_not_counted_is_not_completed_again() {
    let mut bench = Bench::new();
    for n in 0..3 {
        bench.receive();
        bench.send(n);
    }
    bench.turns();
    // As if the process had died between the completion and its place: the send's, and the receive's.
    let (sqn, rqn) = (bench.sq.number, bench.rq.number);
    let expected = [
        (SENT, 0),
        (RECEIVED, 0),
        (SENT, 1),
        (RECEIVED, 1),
        (SENT, 2),
        (RECEIVED, 2),
    ];
    let mut seen: Vec<_> = std::iter::from_fn(|| bench.completion()).collect();
    seen.sort_by_key(|(kind, n)| (*n, *kind));
    assert_eq!(seen, expected);
    let kept = bench.driver.kept();
    let last = bench.driver.memory.read(bench.cq.memory + 5 * 64, 64);
    match last[63] >> 4 {
        SENT => kept.qp(sqn).unwrap().sent(Finished {
            position: 2,
            psn: 0,
        }),
        _ => {
            let place = kept.rq(rqn).unwrap();
            place.store(0, place.load(0) - 1);
        }
    }
    bench.driver.succeed();
    bench.turns();
    assert_eq!(bench.completion(), None);
    bench.receive();
    bench.send(9);
    bench.turns();
    assert_eq!(bench.completion(), Some((SENT, 3)));
    assert_eq!(bench.completion(), Some((RECEIVED, 3)));
    assert_eq!(bench.payload(3), 9);
}

#[test]
fn a_successor_tells_what_a_queue_was_armed_for() {
    let mut bench = Bench::new();
    let arm = |bench: &mut Bench, sequence: u32| {
        let word = sequence << 28 | u32::from(bench.cq.count);
        bench
            .driver
            .memory
            .write(bench.cq.record + 4, &word.to_be_bytes());
        let bell = [word, bench.cq.number].map(u32::to_be_bytes).concat();
        bench.driver.registers.write(9 * 4096 + 0x20, &bell);
    };
    let events = |bench: &Bench| {
        let owner = |n: u64| bench.driver.memory.read(bench.eq + n * 64 + 63, 1)[0];
        (0..16).take_while(|n| owner(*n) == 0).count()
    };
    for n in 0..8u8 {
        bench.receive();
        arm(&mut bench, u32::from(n) % 4);
        // The doorbell is lost, or was seen; the completion comes before or after.
        if n % 2 == 0 {
            bench.turns();
        }
        if n % 3 == 0 {
            bench.driver.succeed();
        }
        bench.send(n);
        bench.turns();
        if n % 3 == 1 {
            bench.driver.succeed();
            bench.turns();
        }
        assert_eq!(events(&bench), usize::from(n) + 1, "{n}");
        while bench.completion().is_some() {}
    }
}

#[test]
fn a_completion_of_an_armed_queue_is_an_event() {
    let mut bench = Bench::new();
    let arm = [0, bench.cq.number].map(u32::to_be_bytes).concat();
    bench.driver.registers.write(9 * 4096 + 0x20, &arm);
    bench.turns();
    assert_eq!(bench.driver.memory.read(bench.eq + 63, 1), [1], "none yet");
    bench.send(1);
    bench.turns();
    let event = bench.driver.memory.read(bench.eq, 64);
    assert_eq!((event[1], event[63]), (0, 0));
    assert_eq!(Field::new(59, 0, 8).get(&event), bench.cq.number & 0xff);
}

#[test]
fn queues_that_stay_go_on_and_new_ones_of_the_same_number_begin_anew() {
    let mut bench = Bench::new();
    for n in 0..3 {
        bench.receive();
        bench.send(n);
    }
    bench.turns();
    while bench.completion().is_some() {}

    // Another queue comes, and the sender's number goes to a new one.
    let cqn = bench.cq.number;
    new_rq(&mut bench.driver, cqn);
    let gone = bench.sq.number;
    bench.driver.ok(op::DESTROY_SQ, &about(gone), 16);
    bench.sq = new_sq(&mut bench.driver, cqn);
    assert_eq!(bench.sq.number, gone);
    bench.receive();
    bench.send(7);
    bench.turns();
    assert_eq!(bench.completion(), Some((SENT, 0)), "from the beginning");
    assert_eq!(bench.completion(), Some((RECEIVED, 3)), "went on");
    assert_eq!(bench.payload(3), 7);
}

#[test]
fn a_queue_that_was_reset_begins_anew() {
    let mut bench = Bench::new();
    bench.receive();
    bench.send(1);
    bench.turns();
    while bench.completion().is_some() {}
    for (from, to) in [(1, 3), (3, 0), (0, 1)] {
        let change = modify(bench.rq.number, from, rqc::STATE, to);
        bench.driver.ok(op::MODIFY_RQ, &change, 16);
    }
    bench.rq.count = 0;
    bench.receive();
    bench.send(2);
    bench.turns();
    assert_eq!(bench.completion(), Some((SENT, 1)));
    assert_eq!(bench.completion(), Some((RECEIVED, 0)));
    assert_eq!(bench.payload(0), 2);
}

#[test]
fn a_send_queue_that_fails_says_so_and_flushes_until_it_is_reset() {
    const FAILED: u8 = 0xd;
    let mut bench = Bench::new();
    let state = |bench: &mut Bench| {
        let context = bench
            .driver
            .ok(op::QUERY_SQ, &about(bench.sq.number), 0x110);
        sqc::STATE.at(AT).get(&context)
    };
    assert_eq!(state(&mut bench), 1);
    // A key that there is not.
    bench.key += 1;
    bench.send(1);
    bench.key -= 1;
    bench.send(2);
    bench.turns();
    assert_eq!(state(&mut bench), 3);
    bench.driver.succeed();
    bench.turns();
    assert_eq!(state(&mut bench), 3, "a successor knows");
    bench.send(3);
    bench.turns();
    for n in 0..3 {
        assert_eq!(bench.completion(), Some((FAILED, n)));
    }
    assert_eq!(bench.completion(), None);
    for (from, to) in [(3, 0), (0, 1)] {
        let change = modify(bench.sq.number, from, sqc::STATE, to);
        bench.driver.ok(op::MODIFY_SQ, &change, 16);
    }
    bench.sq.count = 0;
    bench.send(4);
    bench.turns();
    assert_eq!(
        (bench.completion(), state(&mut bench)),
        (Some((SENT, 0)), 1)
    );
}

#[test]
fn frames_wait_for_entries_without_keeping_the_data_path_busy() {
    let mut bench = Bench::new();
    bench.send(5);
    bench.turns();
    assert_eq!(bench.completion(), Some((SENT, 0)));
    assert_eq!(bench.completion(), None);
    assert!(bench.driver.device.waits_for_receives());
    let patience = bench.driver.device.patience(Instant::now()).unwrap();
    assert!(patience > Duration::ZERO, "looks again, but not at once");
    let reader = bench.driver.memory.table.reader();
    let has_frames = |bench: &mut Bench| {
        let Driver { device, links, .. } = &mut bench.driver;
        device.has_frames(links, &reader.pin())
    };
    assert!(!has_frames(&mut bench));
    bench.receive();
    assert!(has_frames(&mut bench));
    bench.turns();
    assert_eq!(bench.completion(), Some((RECEIVED, 0)));
    assert!(!bench.driver.device.waits_for_receives());
    assert_eq!(bench.driver.device.patience(Instant::now()), None);
}

#[test]
fn without_a_driver_frames_are_dropped() {
    let mut bench = Bench::new();
    bench.send(5);
    bench.turns();
    assert!(bench.driver.device.waits_for_receives());
    bench.driver.ok(op::TEARDOWN_HCA, &[], 16);
    bench.turns();
    assert!(!bench.driver.device.waits_for_receives());
    let drops: Vec<_> = bench.driver.device.ether().counters.drops().collect();
    assert_eq!(drops, [("not-running", 1)]);
}
