//! A front end of queues in memory, a fabric of queues in memory, and functions joined by it.

use crate::rdma::engine::{Context, Counters, Engine, Notice, QpSetup, Refused};
use crate::rdma::packet::{Addresses, Body, Fabric, NotSent, Packet, Route};
use crate::rdma::verbs::*;
use dot_iommu::{Access, Backing, DotReader, DotTable, DotView, HostMapping, Perm};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Guest memory of each function: two ranges that meet in the middle.
pub(super) const BASE: u64 = 0x10_0000;
pub(super) const BYTES: u64 = 0x100_0000;
pub(super) const CQ: CqNum = CqNum(3);
pub(super) const PD: Pd = Pd(7);
pub(super) const QP: QpNum = QpNum(0x40);

#[derive(Debug)]
pub(super) struct Queues;

impl Front for Queues {
    type Send = Sends;
    type Receive = Receives;
    type Completion = Completions;
}

#[derive(Debug, Default)]
pub(super) struct Sends {
    pub(super) posted: VecDeque<Next<WorkRequest>>,
    pub(super) resets: usize,
}

impl SendQueue for Sends {
    fn next(&mut self, _: &DotView<'_>, _: &Regions) -> Next<WorkRequest> {
        self.posted.pop_front().unwrap_or(Next::Empty)
    }
    fn reset(&mut self) {
        self.posted.clear();
        self.resets += 1;
    }
}

#[derive(Debug, Default)]
pub(super) struct Receives {
    pub(super) waiting: VecDeque<Next<ReceiveRequest>>,
}

impl ReceiveQueue for Receives {
    fn next(&mut self, _: &DotView<'_>) -> Next<ReceiveRequest> {
        self.waiting.pop_front().unwrap_or(Next::Empty)
    }
    fn posted(&mut self, _: &DotView<'_>) -> u32 {
        self.waiting.len() as u32
    }
    fn reset(&mut self) {
        self.waiting.clear();
    }
}

#[derive(Debug)]
pub(super) struct Completions {
    pub(super) stored: Vec<Completion>,
    pub(super) room: usize,
    pub(super) armed: bool,
}

impl Default for Completions {
    fn default() -> Self {
        Self {
            stored: Vec::new(),
            room: usize::MAX,
            armed: true,
        }
    }
}

impl CompletionQueue for Completions {
    fn push(&mut self, completion: &Completion, _: &DotView<'_>) -> Pushed {
        if self.stored.len() >= self.room {
            return Pushed::Overrun;
        }
        self.stored.push(*completion);
        match self.armed {
            true => Pushed::Notify,
            false => Pushed::Stored,
        }
    }
}

/// What the fabric does to packets.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// State of the random numbers.
    pub(super) seed: u64,
    /// Of 256 packets, how many are lost.
    pub(super) lose: u8,
    /// Of 256 attempts, how many find no room.
    pub(super) full: u8,
    /// Loses everything.
    pub(super) dead: bool,
    /// There is no way to anybody.
    pub(super) gone: bool,
    /// Nobody comes to take what is sent.
    pub(super) held_up: bool,
    /// Files are unknown to everybody.
    pub(super) strange: bool,
    /// Routes are still being asked for.
    pub(super) asking: bool,
    /// What is lost, by looks.
    pub(super) filter: Option<fn(&Packet) -> bool>,
}

impl Faults {
    fn chance(&mut self, of_256: u8) -> bool {
        self.seed = self
            .seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((self.seed >> 40) as u8) < of_256
    }
}

/// One function's end of the fabric.
#[derive(Debug)]
pub(super) struct Wire {
    own: Peer,
    pub(super) outgoing: VecDeque<(Peer, Packet)>,
    pub(super) faults: Faults,
    files: Arc<HashMap<(Peer, u64), Arc<HostMapping>>>,
    pub(super) routes: HashMap<Destination, Path>,
    pub(super) addresses: Addresses,
    pub(super) packets: usize,
}

impl Fabric for Wire {
    fn send(&mut self, peer: Peer, packet: &Packet) -> Result<(), NotSent> {
        let faults = &mut self.faults;
        if faults.gone {
            return Err(NotSent::Gone);
        }
        let full = faults.full;
        if faults.chance(full) {
            return Err(NotSent::Full);
        }
        self.packets += 1;
        let lose = faults.lose;
        let lost = faults.dead | faults.chance(lose) | faults.filter.is_some_and(|f| f(packet));
        if !lost {
            self.outgoing.push_back((peer, packet.clone()));
        }
        Ok(())
    }
    fn position(&self, _: Peer) -> u64 {
        self.packets as u64
    }
    fn is_taken(&mut self, _: Peer, position: u64) -> bool {
        !self.faults.held_up || position == 0
    }
    fn file(&self, peer: Peer, file: u64) -> Option<&HostMapping> {
        if self.faults.strange {
            return None;
        }
        self.files.get(&(peer, file)).map(|file| &**file)
    }
    fn route(&mut self, to: &Destination) -> Route {
        match self.routes.get(to) {
            _ if self.faults.asking => Route::Asking,
            Some(path) => Route::Known(*path),
            None => Route::Refused,
        }
    }
    fn is_handled(&mut self, peer: Peer) -> bool {
        !self.faults.dead && self.outgoing.iter().all(|(to, _)| *to != peer)
    }
    fn addresses(&self) -> &Addresses {
        &self.addresses
    }
}

/// One function.
pub(super) struct Node {
    pub(super) engine: Engine<Queues>,
    pub(super) wire: Wire,
    pub(super) table: DotTable,
    reader: DotReader,
    pub(super) notices: Vec<Notice>,
}

/// Functions that are joined.
pub(super) struct Lab {
    pub(super) nodes: Vec<Node>,
    pub(super) now: Instant,
}

impl Node {
    pub(super) fn with<T>(
        &mut self,
        now: Instant,
        work: impl FnOnce(&mut Engine<Queues>, &mut Context<'_>) -> T,
    ) -> T {
        let view = self.reader.pin();
        let mut cx = Context {
            memory: &view,
            fabric: &mut self.wire,
            now,
        };
        work(&mut self.engine, &mut cx)
    }

    pub(super) fn write(&self, addr: u64, bytes: &[u8]) {
        let view = self.reader.pin();
        for (at, byte) in bytes.iter().enumerate() {
            let span = view.translate(addr + at as u64, 1, Access::Write).unwrap();
            span.copy_from(&[*byte]).unwrap();
        }
    }

    pub(super) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let view = self.reader.pin();
        let mut bytes = vec![0; len];
        for (at, byte) in bytes.iter_mut().enumerate() {
            let span = view.translate(addr + at as u64, 1, Access::Read).unwrap();
            span.copy_to(std::slice::from_mut(byte)).unwrap();
        }
        bytes
    }

    /// A region of pages that lie in another order than their addresses.
    pub(super) fn region(&mut self, start: u64, pages: &[u64], offset: u64, len: u64) -> MemKey {
        let rights = Rights::LOCAL_WRITE
            | Rights::REMOTE_WRITE
            | Rights::REMOTE_READ
            | Rights::REMOTE_ATOMIC;
        let translation = Translation::Pages {
            shift: 12,
            pages: pages.iter().map(|page| BASE + page * 0x1000).collect(),
            offset,
        };
        self.insert(start, len, translation, rights)
    }

    /// A region of everything.
    pub(super) fn whole(&mut self, rights: Rights) -> MemKey {
        self.insert(BASE, BYTES, Translation::Identity, rights)
    }

    fn insert(&mut self, start: u64, len: u64, translation: Translation, rights: Rights) -> MemKey {
        let index = self.engine.regions_mut().allocate().unwrap();
        let key = MemKey(index << 8 | 0x5a);
        let region = Region {
            key,
            pd: PD,
            rights,
            start,
            len,
            translation,
            capacity: 1 << 20,
            valid: true,
        };
        self.engine.regions_mut().insert(region).unwrap();
        key
    }

    pub(super) fn post(&mut self, qp: QpNum, request: WorkRequest) {
        let queue = self.engine.send_queue_mut(qp).unwrap();
        queue.posted.push_back(Next::Entry(request));
        self.engine.ring(qp);
    }

    pub(super) fn post_receive(&mut self, qp: QpNum, cookie: u32, sges: &[Sge]) {
        let queue = self.engine.receive_queue_mut(qp).unwrap();
        let sges = sges.iter().copied().collect();
        queue
            .waiting
            .push_back(Next::Entry(ReceiveRequest { cookie, sges }));
    }

    pub(super) fn take_completions(&mut self) -> Vec<Completion> {
        std::mem::take(&mut self.engine.cq_mut(CQ).unwrap().stored)
    }

    /// Cookies and statuses of what completed.
    pub(super) fn completed(&mut self) -> Vec<(u32, Status)> {
        let completions = self.take_completions();
        completions.iter().map(|c| (c.cookie, c.status)).collect()
    }

    /// Number of the file behind the first half of memory.
    pub(super) fn file(&self) -> u64 {
        let view = self.reader.pin();
        view.locate(BASE, 1, Access::Read).unwrap().mapping
    }

    pub(super) fn state(&self, qp: QpNum) -> QpState {
        self.engine.qp(qp).unwrap().state
    }

    pub(super) fn counters(&self) -> Counters {
        *self.engine.counters()
    }
}

impl Lab {
    /// `count` functions, each with memory and a completion queue.
    pub(super) fn new(count: u32) -> Self {
        let mut files = HashMap::new();
        let mut tables = Vec::new();
        for own in 0..count {
            let table = DotTable::new();
            for half in 0..2 {
                let mapping = HostMapping::anonymous(BYTES / 2).unwrap();
                let backing = Backing::Mapped {
                    mapping: mapping.clone(),
                    offset: 0,
                };
                let start = BASE + half * BYTES / 2;
                table.map(start, BYTES / 2, Perm::RW, backing).unwrap();
                files.insert((Peer(own), mapping.id()), mapping);
            }
            tables.push(table);
        }
        let files = Arc::new(files);
        let nodes = tables.into_iter().zip(0..).map(|(table, own)| {
            let mut engine = Engine::new(Peer(own));
            engine.add_cq(CQ, Completions::default()).unwrap();
            Node {
                engine,
                wire: Wire {
                    own: Peer(own),
                    outgoing: VecDeque::new(),
                    faults: Faults::default(),
                    files: files.clone(),
                    routes: HashMap::new(),
                    addresses: Addresses::default(),
                    packets: 0,
                },
                reader: table.reader(),
                table,
                notices: Vec::new(),
            }
        });
        Self {
            nodes: nodes.collect(),
            now: Instant::now(),
        }
    }

    /// Two functions with [`QP`] of one connected with [`QP`] of the other.
    pub(super) fn pair(service: Service) -> Self {
        let mut lab = Self::new(2);
        for node in 0..2 {
            lab.add_qp(node, QP, service, ReceiveFrom::Own);
        }
        lab.connect((0, QP), (1, QP), service);
        lab.connect((1, QP), (0, QP), service);
        lab
    }

    pub(super) fn add_qp(&mut self, node: usize, num: QpNum, service: Service, from: ReceiveFrom) {
        let setup = QpSetup {
            num,
            service,
            pd: PD,
            tag: num.0 + 1000,
            send_cq: CQ,
            receive_cq: CQ,
            send: Some(Sends::default()),
            receive: (from == ReceiveFrom::Own).then(Receives::default),
            receive_from: from,
            registers_all: false,
        };
        self.nodes[node].engine.add_qp(setup).unwrap();
    }

    pub(super) fn modify(
        &mut self,
        node: usize,
        num: QpNum,
        to: QpState,
        change: &QpChange,
    ) -> Result<(), Refused> {
        let now = self.now;
        self.nodes[node].with(now, |engine, cx| engine.modify_qp(num, to, change, cx))
    }

    /// Takes a queue pair from Reset to Rts.
    pub(super) fn connect(&mut self, own: (usize, QpNum), to: (usize, QpNum), service: Service) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = change(to);
            self.modify(own.0, own.1, state, &change).unwrap();
        }
        let _ = service;
    }

    /// Gives every function a turn and carries packets until nothing moves.
    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.round() {
                return;
            }
        }
        panic!("the functions never come to rest");
    }

    /// Whether anything was done.
    pub(super) fn round(&mut self) -> bool {
        let mut did = false;
        for from in 0..self.nodes.len() {
            let now = self.now;
            let node = &mut self.nodes[from];
            did |= node.with(now, |engine, cx| engine.turn(cx));
            while let Some(notice) = node.engine.take_notice() {
                node.notices.push(notice);
            }
            let own = node.wire.own;
            if node.wire.faults.held_up {
                continue;
            }
            for (to, packet) in std::mem::take(&mut node.wire.outgoing) {
                did = true;
                if let Body::Request(request) = &packet.body {
                    assert!(request.first || request.datagram.is_none());
                }
                let to = &mut self.nodes[to.0 as usize];
                to.with(now, |engine, cx| engine.receive(own, packet, cx));
            }
        }
        did
    }

    /// As [`Self::settle`], and whenever nothing moves the clock goes on, for `time` in all.
    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.settle();
            let now = self.now;
            let patience = |node: &Node| node.engine.patience(now);
            let Some(wait) = self.nodes.iter().filter_map(patience).min() else {
                return;
            };
            self.now += wait.max(Duration::from_micros(1));
            if self.now > end {
                self.now = end;
                return;
            }
        }
    }
}

/// All attributes of a connection.
pub(super) fn change(to: (usize, QpNum)) -> QpChange {
    QpChange {
        remote_rights: Some(Rights::REMOTE_WRITE | Rights::REMOTE_READ | Rights::REMOTE_ATOMIC),
        qkey: Some(0x1234),
        dest_qp: Some(to.1),
        path: Some(Path {
            peer: Peer(to.0 as u32),
            generation: 5,
        }),
        mtu: Some(1024),
        receive_psn: Some(0xff_fffe),
        send_psn: Some(0xff_fffe),
        min_rnr_timer: Some(12),
        timeout: Some(14),
        retry_count: Some(3),
        rnr_retry: Some(2),
        max_reads: Some(4),
        max_dest_reads: Some(4),
    }
}

/// A signaled request.
pub(super) fn request(cookie: u32, operation: Operation, sges: &[Sge]) -> WorkRequest {
    WorkRequest {
        cookie,
        operation,
        data: Data::Gather(sges.iter().copied().collect()),
        signaled: true,
        solicited: false,
        fence: false,
        datagram: None,
    }
}

pub(super) fn send() -> Operation {
    Operation::Send {
        immediate: None,
        invalidate: None,
    }
}

pub(super) fn write(addr: u64, key: MemKey) -> Operation {
    Operation::Write {
        addr,
        key,
        immediate: None,
    }
}

pub(super) fn sge(key: MemKey, addr: u64, len: u32) -> Sge {
    Sge { key, addr, len }
}

/// Bytes that differ everywhere.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}
