//! A driver with one function, whose packets come back to it.

use super::super::bytes::{u32_at, u64_at};
use super::super::device::Device;
use super::super::registers::{Action, Registers};
use crate::rdma::engine::Context;
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::kept::Kept;
use crate::rdma::packet::{Addresses, Fabric, NotSent, Packet, Route};
use crate::rdma::verbs::{Destination, Path, Peer};
use crate::testing::{BASE, Memory};
use dot_iommu::{DotReader, HostMapping};
use m2m_fabric::proto::{RdmaFace, RdmaLinkLayer, RdmaSpec};
use smartep::irq::Irqs;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const COMMANDS: u64 = BASE;
pub(super) const COMPLETIONS: u64 = BASE + 0x4000;
pub(super) const COMMAND_EVENTS: u64 = BASE + 0x8000;
pub(super) const EVENTS: u64 = BASE + 0x9000;
pub(super) const CEQ: u64 = BASE + 0xa000;
/// Doorbell records: of the command queue, then 0x40 bytes for each number of a queue.
pub(super) const RECORDS: u64 = BASE + 0xb000;
/// A completion queue's entries, 0x1000 bytes for each number.
pub(super) const CQS: u64 = BASE + 0x1_0000;
/// A queue pair's queues, 0x2000 bytes for each number.
pub(super) const QPS: u64 = BASE + 0x2_0000;
/// Memory of programs.
pub(super) const DATA: u64 = BASE + 0x10_0000;

pub(super) const PATH: Path = Path {
    peer: Peer(3),
    generation: 1,
};
pub(super) const CQ_LOG: u32 = 6;
/// log₂ of blocks and of receives.
pub(super) const QP_LOG: u32 = 5;

/// What comes back from a command.
pub(super) type Answer = Result<[u64; 2], u32>;

pub(super) struct Loop {
    packets: VecDeque<Packet>,
    memory: Memory,
    pub(super) addresses: Addresses,
    pub(super) lose: bool,
}

impl Fabric for Loop {
    fn send(&mut self, peer: Peer, packet: &Packet) -> Result<(), NotSent> {
        assert_eq!(peer, PATH.peer);
        if !self.lose {
            self.packets.push_back(packet.clone());
        }
        Ok(())
    }
    fn position(&self, _: Peer) -> u64 {
        0
    }
    fn is_taken(&mut self, _: Peer, _: u64) -> bool {
        true
    }
    fn file(&self, _: Peer, _: u64) -> Option<&HostMapping> {
        Some(self.memory.mapping())
    }
    fn route(&mut self, _: &Destination) -> Route {
        Route::Known(PATH)
    }
    fn is_handled(&mut self, _: Peer) -> bool {
        self.packets.is_empty()
    }
    fn addresses(&self) -> &Addresses {
        &self.addresses
    }
}

pub(super) struct Bench {
    pub(super) memory: Memory,
    reader: DotReader,
    pub(super) registers: Registers,
    pub(super) device: Device,
    pub(super) fabric: Loop,
    pub(super) now: Instant,
    producer: u16,
    answered: u32,
    /// Entries taken from each completion queue.
    taken: [u32; 8],
    kept: Option<Arc<Kept>>,
    doorbells: Arc<Doorbells>,
    /// Commands are executed and kept, and the driver does not hear of it.
    pub(super) half: bool,
    /// First block of the last command.
    last: u16,
}

fn spec() -> RdmaSpec {
    RdmaSpec {
        face: RdmaFace::Erdma,
        link: RdmaLinkLayer::Ethernet,
        mac: [2, 0, 0, 0, 0, 9],
        mtu: 1500,
        guid: 1,
        lid: 0,
        bar: 0,
        mapped_doorbells: false,
        link_up: true,
        windows: false,
    }
}

impl Bench {
    /// A driver that has begun, with one event queue for completions.
    pub(super) fn new() -> Self {
        let mut bench = Self::without_driver();
        bench.begin();
        bench.create_eq();
        bench
    }

    fn create_eq(&mut self) {
        let created = self.command((1, 0), &[(8, CEQ as u32), (16, 0x0106_0101)]);
        assert_eq!(created, Ok([0; 2]));
    }

    /// The same with a device whose objects outlive the process.
    pub(super) fn kept() -> Self {
        let mut bench = Self::without_driver();
        let kept = Kept::create().unwrap();
        bench.device.keep_in(kept.clone());
        bench.kept = Some(kept);
        bench.begin();
        bench.create_eq();
        bench
    }

    /// A driver that begins after a reset.
    pub(super) fn begin_again(&mut self) {
        self.producer = 0;
        self.answered = 0;
        self.taken = [0; 8];
        self.memory.write(RECORDS, &[0; 0x1000]);
        self.memory.write(CQS, &[0; 0x8000]);
        self.begin();
        self.create_eq();
    }

    /// Another process takes the place of this one.
    pub(super) fn die(&mut self) {
        let kept = self.kept.take().unwrap();
        let kept = Kept::open(kept.fd().try_clone_to_owned().unwrap()).unwrap();
        let saved = self.registers.save();
        self.registers = Registers::new(spec().mac, self.doorbells.clone());
        assert!(self.registers.restore(&saved));
        self.device = Device::new(spec(), PATH.peer, Irqs::new(32), self.doorbells.clone());
        let memory = self.reader.pin();
        let mut cx = Context {
            memory: &memory,
            fabric: &mut self.fabric,
            now: self.now,
        };
        let setup = self.registers.begun();
        let restored = self.device.restore(&kept, setup.as_ref(), &mut cx);
        restored.unwrap();
        self.kept = Some(kept);
    }

    pub(super) fn without_driver() -> Self {
        let memory = Memory::new();
        let doorbells = Arc::new(Doorbells::default());
        let registers = Registers::new(spec().mac, doorbells.clone());
        let device = Device::new(spec(), PATH.peer, Irqs::new(32), doorbells.clone());
        Self {
            reader: memory.table.reader(),
            fabric: Loop {
                packets: VecDeque::new(),
                memory: memory.clone(),
                addresses: device.addresses().clone(),
                lose: false,
            },
            memory,
            registers,
            device,
            kept: None,
            half: false,
            last: 0,
            doorbells,
            now: Instant::now(),
            producer: 0,
            answered: 0,
            taken: [0; 8],
        }
    }

    pub(super) fn begin(&mut self) {
        for (at, value) in [
            (0x20, COMMANDS as u32),
            (0x28, COMPLETIONS as u32),
            (0x30, 512),
            (0x34, 128),
            (0x38, COMMAND_EVENTS as u32),
            (0x40, EVENTS as u32),
            (0x48, 64),
            (0x68, RECORDS as u32),
        ] {
            self.registers.write(at, &u32::to_le_bytes(value));
        }
        let Action::Init(setup) = self.registers.write(0x10, &[2, 0, 0, 0]) else {
            panic!("no initialization");
        };
        self.device.init(&setup);
    }

    /// Executes a command of 32-bit words at offsets, and takes its completion.
    pub(super) fn command(&mut self, (module, opcode): (u8, u8), words: &[(usize, u32)]) -> Answer {
        self.raw_command((module, opcode), words);
        self.answer()
    }

    /// Rings for the last command again, and takes its completion.
    pub(super) fn finish(&mut self) -> Answer {
        self.ring_commands();
        self.answer()
    }

    /// The next completion, which is that of the last command.
    fn answer(&mut self) -> Answer {
        let first = self.last;
        self.fabric.addresses = self.device.addresses().clone();
        let entry = self
            .memory
            .read(COMPLETIONS + 32 * u64::from(self.answered % 512), 32);
        let word = |n: usize| u32_at(&entry, 4 * n).swap_bytes();
        let round = self.answered / 512 % 2;
        assert_eq!(word(0) >> 31, 1 - round, "of this round");
        assert_eq!(word(0) >> 8 & 0xff, 2);
        assert_eq!(word(1), u32::from(first));
        self.answered += 1;
        let long = |n| u64::from(word(n)) | u64::from(word(n + 1)) << 32;
        match word(0) & 0xff {
            0 => Ok([long(2), long(4)]),
            syndrome => Err(syndrome),
        }
    }

    /// Executes a command, whatever becomes of it.
    pub(super) fn raw_command(&mut self, (module, opcode): (u8, u8), words: &[(usize, u32)]) {
        let mut bytes = [0xee; 128];
        bytes[8..].fill(0);
        let next = self.producer.wrapping_add(4);
        let head = 3u64 << 52 | u64::from(module) << 24 | u64::from(opcode) << 16;
        bytes[..8].copy_from_slice(&(head | u64::from(next)).to_le_bytes());
        for (at, word) in words {
            bytes[*at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let at = COMMANDS + 32 * u64::from(self.producer % 512);
        self.memory.write(at, &bytes);
        self.last = self.producer;
        self.producer = next;
        self.ring_commands();
    }

    fn ring_commands(&mut self) {
        let next = self.producer;
        let rung = self.registers.write(0x200, &u64::from(next).to_le_bytes());
        assert_eq!(rung, Action::Commands(next));
        let memory = self.reader.pin();
        let mut cx = Context {
            memory: &memory,
            fabric: &mut self.fabric,
            now: self.now,
        };
        while let Some(command) = self.device.next_command(next, &memory) {
            let path = self.device.destination(&command).map(|_| PATH);
            match self.half {
                true => {
                    let result = self.device.dispatch(&command, path, &mut cx);
                    self.device.keep_command(&command, result);
                    return;
                }
                false => self.device.execute(&command, path, &mut cx),
            }
        }
    }

    pub(super) fn create_cq(&mut self, cqn: u32) -> Answer {
        let at = CQS + 0x1000 * u64::from(cqn);
        let record = RECORDS + 0x400 + 8 * u64::from(cqn);
        self.command(
            (0, 4),
            &[
                (8, CQ_LOG << 24 | cqn),
                (12, at as u32),
                (20, 1 << 16 | 1),
                (24, record as u32),
            ],
        )
    }

    /// A queue pair of the protection domain 5 that completes to the queue 1; `program`: not the kernel's.
    pub(super) fn create_qp(&mut self, qpn: u32, program: bool) -> Answer {
        let at = QPS + 0x2000 * u64::from(qpn);
        let record = RECORDS + 0x40 * u64::from(qpn);
        let flag = u32::from(program) << 25;
        self.command(
            (0, 1),
            &[
                (8, QP_LOG << 20 | qpn),
                (12, QP_LOG << 20 | 5),
                (16, flag | 1),
                (20, 1),
                (24, at as u32),
                (32, at as u32),
                (40, 1 << 1),
                (44, 0x1000 | 2 << 1),
                (48, record as u32),
                (56, record as u32 + 8),
                (88, at as u32 + 0x1000),
            ],
        )
    }

    pub(super) fn modify(&mut self, qpn: u32, state: u32, mask: u32, peer: u32) -> Answer {
        self.command(
            (0, 3),
            &[
                (8, state << 24 | qpn),
                (12, peer),
                (16, mask),
                (20, 0x8001_0000),
                (24, 100 + peer),
                (28, 100 + qpn),
            ],
        )
    }

    /// Connects a queue pair to one of the same function.
    pub(super) fn connect(&mut self, qpn: u32, peer: u32) {
        for (state, mask) in [(1, 1), (2, 0x35), (3, 9)] {
            assert_eq!(self.modify(qpn, state, mask, peer), Ok([0; 2]));
        }
    }

    /// Two queue pairs, 2 and 3, that are connected to each other, and the region 7 of all of [`DATA`].
    pub(super) fn connected(program: bool) -> Self {
        let mut bench = Self::new();
        bench.connect_all(program);
        bench
    }

    /// The same on a driver that has begun.
    pub(super) fn connect_all(&mut self, program: bool) {
        self.create_cq(1).unwrap();
        for qpn in [2, 3] {
            self.create_qp(qpn, program).unwrap();
        }
        self.connect(2, 3);
        self.connect(3, 2);
        self.register(7, 0x1f).unwrap();
    }

    /// A region of 1 MiB from [`DATA`] on.
    pub(super) fn register(&mut self, index: u32, rights: u32) -> Answer {
        self.command(
            (0, 8),
            &[
                (8, 1 << 31 | index),
                (12, 5 << 12 | rights << 1),
                (16, DATA as u32),
                (24, 0x10_0000),
                (28, 20 << 27 | 1),
                (32, DATA as u32),
            ],
        )
    }

    /// Writes blocks to a send queue from `index` on, and rings.
    pub(super) fn post(
        &mut self,
        qpn: u32,
        index: u16,
        opcode: u8,
        flags: u64,
        body: &[u8],
    ) -> u16 {
        let blocks = (8 + body.len()).div_ceil(32) as u16;
        let next = index.wrapping_add(blocks);
        let head = flags
            | u64::from(blocks - 1) << 52
            | u64::from(qpn) << 32
            | u64::from(opcode) << 27
            | u64::from(next);
        let mut bytes = head.to_le_bytes().to_vec();
        bytes.extend_from_slice(body);
        bytes.resize(usize::from(blocks) * 32, 0);
        for (n, block) in (0..).zip(bytes.chunks(32)) {
            let slot = index.wrapping_add(n) & ((1 << QP_LOG) - 1);
            let at = QPS + 0x2000 * u64::from(qpn) + 32 * u64::from(slot);
            self.memory.write(at, block);
        }
        let bell = (u64::from(qpn) << 32 | u64::from(next)).to_le_bytes();
        self.memory.write(RECORDS + 0x40 * u64::from(qpn), &bell);
        assert_eq!(self.registers.write(0x5f000, &bell), Action::Kick);
        next
    }

    /// Posts a receive, the `index`th of its queue.
    pub(super) fn post_receive(&mut self, qpn: u32, index: u16, addr: u64, len: u32, key: u32) {
        let mut entry = Vec::new();
        let bell = u64::from(qpn) << 32 | u64::from(index.wrapping_add(1));
        for word in [bell, 0, addr, u64::from(key) << 32 | u64::from(len)] {
            entry.extend_from_slice(&word.to_le_bytes());
        }
        let slot = u64::from(index & ((1 << QP_LOG) - 1));
        let at = QPS + 0x2000 * u64::from(qpn) + 0x1000;
        // The queue begins a page into the first of its pages.
        self.memory.write(at + 32 * slot, &entry);
        let record = RECORDS + 0x40 * u64::from(qpn) + 8;
        self.memory.write(record, &bell.to_le_bytes());
        assert_eq!(
            self.registers.write(0x61000, &bell.to_le_bytes()),
            Action::Kick
        );
    }

    /// One round. Answers whether anything was done.
    pub(super) fn turn(&mut self) -> bool {
        let memory = self.reader.pin();
        let mut cx = Context {
            memory: &memory,
            fabric: &mut self.fabric,
            now: self.now,
        };
        let mut worked = self.device.turn(&mut cx);
        for _ in 0..self.fabric.packets.len() {
            let Some(packet) = self.fabric.packets.pop_front() else {
                break;
            };
            worked = true;
            let mut cx = Context {
                memory: &memory,
                fabric: &mut self.fabric,
                now: self.now,
            };
            self.device.engine().receive(PATH.peer, packet, &mut cx);
        }
        worked
    }

    /// Rounds until nothing is done any more.
    pub(super) fn run(&mut self) {
        for _ in 0..1000 {
            if !self.turn() {
                return;
            }
        }
        panic!("no end");
    }

    /// Time goes by.
    pub(super) fn wait(&mut self, time: Duration) {
        self.now += time;
        self.run();
    }

    /// The next entry of a completion queue, as words.
    pub(super) fn poll(&mut self, cqn: u32) -> Option<[u32; 8]> {
        let taken = &mut self.taken[cqn as usize];
        let at = CQS + 0x1000 * u64::from(cqn) + 32 * u64::from(*taken & ((1 << CQ_LOG) - 1));
        let bytes = self.memory.read(at, 32);
        let words: [u32; 8] = std::array::from_fn(|n| u32_at(&bytes, 4 * n).swap_bytes());
        let owner = !*taken >> CQ_LOG & 1;
        // A ring of zeroes is of no round before the first.
        if words[0] >> 31 != owner {
            return None;
        }
        *taken += 1;
        Some([
            words[0] & !(1 << 31),
            words[1],
            words[2],
            words[3],
            words[4],
            words[5],
            words[6],
            words[7],
        ])
    }

    /// Asks for an event of a completion queue.
    pub(super) fn arm(&mut self, cqn: u32, solicited: bool) {
        let value = u64::from(cqn) << 32
            | 1 << 31
            | u64::from(solicited) << 30
            | u64::from(self.taken[cqn as usize] & 0xff_ffff);
        let bell = value.to_le_bytes();
        self.memory
            .write(RECORDS + 0x400 + 8 * u64::from(cqn), &bell);
        self.registers.write(0x79000, &bell);
    }

    /// The words of an event.
    pub(super) fn event(&self, queue: u64, n: u64) -> [u32; 2] {
        let word = u64_at(&self.memory.read(queue + 16 * n, 8), 0);
        [word as u32, (word >> 32) as u32]
    }
}

/// A scatter/gather element.
pub(super) fn sge(addr: u64, len: u32, key: u32) -> Vec<u8> {
    let mut bytes = addr.to_le_bytes().to_vec();
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&key.to_le_bytes());
    bytes
}

/// Words one after the other.
pub(super) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
