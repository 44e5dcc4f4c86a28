//! A hostile function, its neighbour, and whether only the first was harmed.

use super::super::command::opcode as op;
use super::connection::{End, RECEIVED, SENT};
use super::hostile::Known;
use super::memory::BASE;
use super::node::{DATA, Node, PAGE_COUNT, PAGES};
use super::objects;
use crate::net::links::Link;
use crate::port::shm::ShmPort;
use crate::port::shm::test_support::{pair, take};
use crate::rdma::verbs::{Peer, QpNum, QpState};
use m2m_fabric::proto::RdmaLinkLayer;
use std::time::{Duration, Instant};

pub(super) const HOSTILE: Peer = Peer(1);
pub(super) const NEIGHBOUR: Peer = Peer(2);
/// Rounds that a case has.
const ROUNDS: usize = 48;
/// Rounds in which all that was posted must be done: each takes some of a queue's entries, of which
/// there are 2¹⁵ at most.
const MOST_ROUNDS: usize = 100_000;
/// Packets of one queue pair in one turn at most.
const PACKETS: u64 = 64;

/// The neighbour's memory: what its peer may write and read, what it receives into, and what nobody
/// but itself may touch, with a part for each of its own two queue pairs.
pub(super) const WINDOW: (u64, u64) = (DATA, 0x8000);
const RECEIVES: (u64, u64) = (DATA + 0x8000, 0x8000);
const PRIVATE: (u64, u64) = (DATA + 0x1_0000, 0x8000);
const HALF: u32 = 0x4000;
/// What the private part is full of.
const SECRET: [u8; 8] = [0xc3, 0x5e, 0x91, 0x7d, 0xe8, 0x24, 0xb6, 0x0f];
/// Of pages that the neighbour does not use.
const UNUSED: u8 = 0x6b;
/// All rights on a key.
const ALL_RIGHTS: u32 = 0xf;

/// A driver that does nothing wrong.
#[derive(Debug)]
struct Neighbour {
    node: Node,
    /// Connected with each other.
    own: [End; 2],
    /// Connected with the hostile function's.
    to_hostile: End,
    datagrams: End,
    window: u32,
    unused: u64,
}

/// What cases came to, so that tests can tell that they get somewhere.
#[derive(Debug, Default, Clone, Copy)]
pub struct Coverage {
    /// Commands that were given, and that succeeded.
    pub commands: (u64, u64),
    /// Packets that the hostile function sent.
    pub packets: u64,
    /// Its messages that succeeded, and that failed.
    pub messages: (u64, u64),
    /// Frames that it sent.
    pub frames: u64,
}

/// See the module.
#[derive(Debug)]
pub struct World {
    pub(super) hostile: Node,
    pub(super) known: Known,
    pub(super) outside: ShmPort,
    pub(super) now: Instant,
    pub(super) coverage: Coverage,
    neighbour: Neighbour,
    checks: u32,
}

fn pages((start, len): (u64, u64)) -> Vec<u64> {
    (0..len / 4096).map(|n| start + n * 4096).collect()
}

/// A key over a range whose addresses are bus addresses.
fn key(node: &mut Node, pd: u32, rights: u32, range: (u64, u64)) -> u32 {
    let input = objects::key(pd, rights, range.0, range.1, &pages(range));
    node.create(op::CREATE_MKEY, &input) << 8 | 0x42
}

impl Neighbour {
    fn new(mut node: Node) -> Self {
        node.start();
        let (input, _) = objects::eq(&mut node);
        let eqn = node.create(op::CREATE_EQ, &input);
        let [shared, private] = [0; 2].map(|_| node.create(op::ALLOC_PD, &[]));
        let window = key(&mut node, shared, ALL_RIGHTS, WINDOW);
        let receives = key(&mut node, shared, 1, RECEIVES);
        let secret = key(&mut node, private, ALL_RIGHTS, PRIVATE);
        let mut own = [(); 2].map(|()| End::new(&mut node, 0, eqn, private, secret));
        let to_hostile = End::new(&mut node, 0, eqn, shared, receives);
        let mut datagrams = End::new(&mut node, 2, eqn, shared, receives);
        let [one, other] = &mut own;
        one.connect(&mut node, NEIGHBOUR, other.qpn);
        other.connect(&mut node, NEIGHBOUR, one.qpn);
        datagrams.connect(&mut node, NEIGHBOUR, 0);
        let unused = node.page();
        let len = PAGES + PAGE_COUNT * 4096 - unused;
        node.memory.poke(unused, &vec![UNUSED; len as usize]);
        node.memory.poke(PRIVATE.0, &secrets(0, PRIVATE.1));
        Self {
            node,
            own,
            to_hostile,
            datagrams,
            window,
            unused,
        }
    }

    /// What nobody else may touch is untouched, and its own connection works.
    fn check(&mut self, checks: u32, now: Instant) {
        let node = &mut self.node;
        node.memory.check();
        let len = PAGES + PAGE_COUNT * 4096 - self.unused;
        let unused = node.memory.peek(self.unused, len as usize);
        assert!(unused.iter().all(|byte| *byte == UNUSED), "unused pages");
        let private = node.memory.peek(PRIVATE.0, PRIVATE.1 as usize);
        assert!(private == secrets(checks, PRIVATE.1), "private memory");
        for end in &self.own {
            let state = node
                .function
                .with_mlx5(|device, _| device.engine().qp(QpNum(end.qpn)))
                .flatten();
            assert_eq!(state.map(|qp| qp.state), Some(QpState::Rts));
        }
        // Both halves change by a WRITE to the one and a READ into the other.
        let [one, _] = &mut self.own;
        let (low, high) = (PRIVATE.0, PRIVATE.0 + u64::from(HALF));
        node.memory.poke(low, &secrets(checks + 1, HALF.into()));
        one.access(node, false, (low, HALF), (high, one.key));
        turn(node, now);
        one.done(node, SENT);
        node.memory.poke(low, &[0; HALF as usize]);
        one.access(node, true, (low, HALF), (high, one.key));
        turn(node, now);
        one.done(node, SENT);
        let private = node.memory.peek(PRIVATE.0, PRIVATE.1 as usize);
        assert!(private == secrets(checks + 1, PRIVATE.1), "a transfer");
        for end in [&mut self.to_hostile, &mut self.datagrams] {
            while end.poll(node).is_some() {}
        }
    }
}

/// What the private memory holds after so many checks: always [`SECRET`], in turns.
fn secrets(checks: u32, len: u64) -> Vec<u8> {
    let mut one = SECRET;
    one.rotate_left(checks as usize % 8);
    one.repeat(len as usize / 8)
}

/// Whether bytes have half of [`SECRET`], wherever it begins.
pub(super) fn names_secret(bytes: &[u8]) -> bool {
    let twice = SECRET.repeat(2);
    bytes
        .windows(SECRET.len() / 2)
        .any(|half| twice.windows(half.len()).any(|part| part == half))
}

fn turn(node: &mut Node, now: Instant) {
    for _ in 0..MOST_ROUNDS {
        if !node.turn(now) {
            return;
        }
    }
    panic!("a transfer without end");
}

impl World {
    /// Two functions whose ports are of this kind.
    pub fn new(link: RdmaLinkLayer) -> Self {
        let mut nodes = [HOSTILE, NEIGHBOUR].map(|own| Node::new(own, link));
        let (one, other) = pair();
        let [hostile, neighbour] = &mut nodes;
        hostile.function.wires.add(1, NEIGHBOUR, one);
        neighbour.function.wires.add(1, HOSTILE, other);
        let files = [&*hostile, &*neighbour].map(|node| node.memory.mapping().clone());
        let [file, other] = files;
        hostile
            .function
            .wires
            .add_file(NEIGHBOUR, other.id(), other);
        neighbour.function.wires.add_file(HOSTILE, file.id(), file);
        let (one, outside) = pair();
        hostile
            .function
            .links
            .add(Link::new(2, Box::new(one), None), false);
        let [hostile, neighbour] = nodes;
        let mut this = Self {
            hostile,
            known: Known::default(),
            outside,
            now: Instant::now(),
            coverage: Coverage::default(),
            neighbour: Neighbour::new(neighbour),
            checks: 0,
        };
        this.begin();
        this
    }

    /// What cases came to.
    pub fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Rounds of both until nothing is left to do, so many at most. Answers whether nothing is.
    pub(super) fn rounds(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let before = self.sent();
            let worked = self.hostile.turn(self.now);
            let queue_pairs = self.known.queue_pairs() as u64 + 4;
            let sent = self.sent().saturating_sub(before);
            assert!(sent <= queue_pairs * PACKETS, "{sent} packets in one turn");
            let frames = take(&mut self.outside, 256).len();
            self.coverage.frames += frames as u64;
            if !(worked | self.neighbour.node.turn(self.now)) {
                return true;
            }
        }
        false
    }

    fn sent(&mut self) -> u64 {
        let counters = |device: &mut super::super::Device| device.engine().counters().packets_sent;
        let sent = self
            .hostile
            .function
            .with_mlx5(|device, _| counters(device));
        sent.unwrap_or_default()
    }

    /// After a case: what it posted is done, or some of it.
    pub(super) fn after_case(&mut self) {
        self.now += Duration::from_micros(20);
        self.rounds(ROUNDS);
    }

    /// Whether only the hostile function was harmed. A reset makes it usable again, and all it does is
    /// right.
    ///
    /// # Panics
    ///
    /// When something else was harmed.
    pub fn check(&mut self) {
        assert!(self.rounds(MOST_ROUNDS), "work without end");
        self.hostile.memory.check();
        let seen = self
            .hostile
            .memory
            .peek(BASE, super::memory::OPEN.end as usize);
        let secret = memchr(&seen, &SECRET);
        assert_eq!(secret, None, "the neighbour's private memory was read");
        self.neighbour.check(self.checks, self.now);
        self.checks += 1;
        self.hostile.function.with_mlx5(|device, _| {
            let counters = device.engine().counters();
            self.coverage.packets += counters.packets_sent;
            let done = counters.writes + counters.sends + counters.reads + counters.atomics;
            self.coverage.messages.0 += done;
            self.coverage.messages.1 += counters.failed;
        });
        self.begin();
    }

    /// Resets the hostile function, and transfers as a well-behaved driver does.
    fn begin(&mut self) {
        let node = &mut self.hostile;
        node.memory.set_movable(true);
        node.reset();
        node.set_bus_master(true);
        node.function.with(|device, _| device.set_link(true));
        self.rounds(MOST_ROUNDS);
        let node = &mut self.hostile;
        node.start();
        let (input, mut eq) = objects::eq(node);
        eq.number = node.create(op::CREATE_EQ, &input);
        let pd = node.create(op::ALLOC_PD, &[]);
        let range = (DATA, 0x8000);
        let key = key(node, pd, ALL_RIGHTS, range);
        let mut end = End::new(node, 0, eq.number, pd, key);
        let neighbour = &mut self.neighbour;
        end.connect(node, NEIGHBOUR, neighbour.to_hostile.qpn);
        neighbour
            .to_hostile
            .connect(&mut neighbour.node, HOSTILE, end.qpn);
        self.transfer(&mut end);
        let all = self
            .hostile
            .create(op::CREATE_MKEY, &objects::physical_key(pd))
            << 8
            | 0x42;
        self.known = Known::after(&self.neighbour_names(), (pd, eq, [key, all]), &end);
    }

    /// Keys and queue pairs of the neighbour that its peer may know or guess.
    fn neighbour_names(&self) -> (Vec<u32>, Vec<u32>) {
        let n = &self.neighbour;
        let ends = [&n.own[0], &n.own[1], &n.to_hostile, &n.datagrams];
        let keys = ends.iter().map(|end| end.key).chain([n.window]);
        (keys.collect(), ends.iter().map(|end| end.qpn).collect())
    }

    /// WRITE, READ and SEND to the neighbour; bytes and completions are right.
    fn transfer(&mut self, end: &mut End) {
        const LEN: u32 = 0x3000;
        let checks = self.checks as u8;
        let pattern: Vec<u8> = (0..LEN)
            .map(|n| (n >> 4) as u8 ^ n as u8 ^ checks)
            .collect();
        let (from, back) = (DATA, DATA + 0x4000);
        let (window, key) = (WINDOW.0 + 0x123, self.neighbour.window);
        self.hostile.memory.poke(from, &pattern);
        self.hostile.memory.poke(back, &[0; LEN as usize]);
        let n = &mut self.neighbour;
        n.to_hostile.receive(&mut n.node, RECEIVES.0, LEN);
        end.access(&mut self.hostile, false, (from, LEN), (window, key));
        end.access(&mut self.hostile, true, (back, LEN), (window, key));
        end.send(&mut self.hostile, from, LEN);
        assert!(self.rounds(MOST_ROUNDS));
        for _ in 0..3 {
            end.done(&mut self.hostile, SENT);
        }
        assert!(self.hostile.memory.peek(back, LEN as usize) == pattern);
        let n = &mut self.neighbour;
        n.to_hostile.done(&mut n.node, RECEIVED);
        for at in [window, RECEIVES.0] {
            assert!(n.node.memory.peek(at, LEN as usize) == pattern);
        }
        for _ in 0..8 {
            n.to_hostile.receive(&mut n.node, RECEIVES.0, LEN);
            n.datagrams
                .receive(&mut n.node, RECEIVES.0 + 0x4000, 0x1000);
        }
    }
}

/// Where the bytes are.
fn memchr(all: &[u8], wanted: &[u8; 8]) -> Option<usize> {
    let candidates = all
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == wanted[0]);
    candidates
        .map(|(at, _)| at)
        .find(|at| all[*at..].starts_with(wanted))
}
