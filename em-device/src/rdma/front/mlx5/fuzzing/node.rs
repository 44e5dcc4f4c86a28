//! A function with its memory, as its endpoint and the data path's worker treat it.

use super::super::bits::put;
use super::super::command::{self, mailbox, opcode as op};
use super::super::{Action, Device, Doorbells, Registers};
use super::memory::{BASE, Memory};
use crate::rdma::fabric::Wires;
use crate::rdma::front::mlx5::fields::header;
use crate::rdma::function::RdmaFunction;
use crate::rdma::verbs::{Destination, Path, Peer};
use m2m_fabric::proto::{RdmaFace, RdmaLinkLayer, RdmaSpec};
use smartep::irq::Irqs;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The command queue.
pub(super) const QUEUE: u64 = BASE;
/// Mailboxes of 1 KiB for inputs and outputs.
pub(super) const INPUT: u64 = BASE + 0x1000;
pub(super) const OUTPUT: u64 = BASE + 0x5000;
/// Bytes of an input or output at most.
pub(super) const MAX_COMMAND: usize = 0x2000;
/// Pages of queues and doorbell records, given out in turn.
pub(super) const PAGES: u64 = BASE + 0x1_0000;
pub(super) const PAGE_COUNT: u64 = 0x50;
/// Payload.
pub(super) const DATA: u64 = BASE + 0x6_0000;
pub(super) const DATA_BYTES: u64 = 0x2_0000;
/// Vectors of a function.
pub(super) const VECTORS: u16 = 4;
/// The first doorbell page.
pub(super) const UAR: u64 = 8 * 4096;

/// A function and its driver.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) memory: Memory,
    pub(super) function: RdmaFunction,
    pub(super) registers: Registers,
    questions: Arc<Mutex<Vec<Destination>>>,
    page: u64,
    bus_master: bool,
}

/// LID, and the last byte of GID and MAC.
fn address(own: Peer) -> u16 {
    own.0 as u16
}

pub(super) fn gid(own: Peer) -> [u8; 16] {
    (0xfe80u128 << 112 | u128::from(own.0)).to_be_bytes()
}

/// What an OM answers that lets functions 1 and 2 speak with each other.
fn resolve(to: &Destination) -> Option<Path> {
    let number = match to.gid {
        Some(gid) => u32::from(gid[15]),
        None => to.lid.into(),
    };
    (1..=2).contains(&number).then_some(Path {
        peer: Peer(number),
        generation: 1,
    })
}

impl Node {
    pub(super) fn new(own: Peer, link: RdmaLinkLayer) -> Self {
        let memory = Memory::new();
        let doorbells = Arc::new(Doorbells::default());
        let spec = RdmaSpec {
            face: RdmaFace::Mlx5,
            link,
            mac: [2, 0, 0, 0, 0, own.0 as u8],
            mtu: 1500,
            guid: own.0.into(),
            lid: match link {
                RdmaLinkLayer::Infiniband => address(own),
                RdmaLinkLayer::Ethernet => 0,
            },
            bar: 0,
            mapped_doorbells: false,
            link_up: true,
            windows: false,
        };
        let device = Device::new(spec, own, Irqs::new(VECTORS), doorbells.clone());
        let device = crate::rdma::front::Device::Mlx5(Box::new(device));
        let questions = Arc::new(Mutex::new(Vec::new()));
        let asked = questions.clone();
        let ask = Box::new(move |to| asked.lock().unwrap().push(to));
        let mut wires = Wires::new(own, ask);
        wires.add_file(own, memory.mapping().id(), memory.mapping().clone());
        let reader = memory.table.reader();
        let mut function = RdmaFunction::new(own.0, device, wires, reader);
        function.addresses_changed();
        let mut this = Self {
            memory,
            function,
            registers: Registers::new(doorbells, Instant::now()),
            questions,
            page: 0,
            bus_master: false,
        };
        this.set_bus_master(true);
        this
    }

    /// Begins as a driver does after power-on.
    pub(super) fn start(&mut self) {
        self.write(0x10, &((QUEUE >> 32) as u32).to_be_bytes());
        self.write(0x14, &(QUEUE as u32).to_be_bytes());
        self.ok(op::ENABLE_HCA, &[], 16);
        self.ok(op::INIT_HCA, &[], 16);
    }

    /// DEVICE_RESET: as after power-on, but for memory.
    pub(super) fn reset(&mut self) {
        self.registers.reset();
        self.function.reset();
        self.page = 0;
    }

    pub(super) fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
        self.function.set_bus_master(on);
    }

    /// One round. Answers whether anything was done.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let questions = std::mem::take(&mut *self.questions.lock().unwrap());
        for to in &questions {
            self.function.wires.answered(*to, resolve(to));
        }
        self.function.turn(now) || !questions.is_empty()
    }

    /// A write to BAR0.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        match self.registers.write(offset, data) {
            Action::None | Action::Kick => {}
            Action::Command(slots) => self.execute(slots),
            Action::Disable | Action::Reset => self.function.reset(),
        }
    }

    fn execute(&mut self, slots: u32) {
        let Some(queue) = self.registers.command_queue() else {
            return;
        };
        for slot in (0..32u8).filter(|slot| slots & 1 << slot != 0) {
            let bus_master = self.bus_master;
            self.function.with_mlx5(|device, cx| {
                // The register side reads what is mapped; without bus mastering nothing is.
                if !bus_master {
                    return;
                }
                match mailbox::read_command(queue, slot, cx.memory) {
                    Ok(command) => {
                        let path = device.destination(&command).and_then(|to| resolve(&to));
                        let output = device.execute(&command, path, cx);
                        command::finish_command(&command, &output, cx.memory);
                        device.command_done(slot, cx.memory);
                        while device.take_gid_change().is_some() {}
                    }
                    Err(why) => mailbox::refuse(why, cx.memory),
                }
            });
            self.function.addresses_changed();
        }
        self.function.wires.flush();
    }

    /// Puts a command into entry 0. `input` begins with its opcode's place; what does not fit into
    /// the mailboxes is cut.
    pub(super) fn put_command(&self, opcode: u16, input: &[u8], out_len: usize) {
        let mut bytes = input.to_vec();
        bytes.resize(input.len().clamp(16, MAX_COMMAND), 0);
        put(&mut bytes, 0, &opcode.to_be_bytes());
        let mut entry = [0; 64];
        entry[0] = 7;
        put(&mut entry, 4, &(bytes.len() as u32).to_be_bytes());
        put(&mut entry, 8, &INPUT.to_be_bytes());
        put(&mut entry, 16, &bytes[..16]);
        put(&mut entry, 48, &OUTPUT.to_be_bytes());
        put(
            &mut entry,
            56,
            &(out_len.min(MAX_COMMAND) as u32).to_be_bytes(),
        );
        entry[63] = 1;
        for (n, block) in (0..).zip(bytes[16..].chunks(512)) {
            self.mailbox(INPUT + n * 1024, block);
        }
        for n in 0..out_len.min(MAX_COMMAND) as u64 / 512 + 1 {
            self.mailbox(OUTPUT + n * 1024, &[]);
        }
        self.memory.poke(QUEUE, &entry);
    }

    fn mailbox(&self, at: u64, data: &[u8]) {
        self.memory.poke(at, data);
        self.memory.poke(at + 560, &(at + 1024).to_be_bytes());
    }

    pub(super) fn ring_commands(&mut self, slots: u32) {
        self.write(0x18, &slots.to_be_bytes());
    }

    /// Executes a command; answers its output, of which the first 16 bytes are of use.
    pub(super) fn command(&mut self, opcode: u16, input: &[u8], out_len: usize) -> Vec<u8> {
        self.put_command(opcode, input, out_len);
        self.ring_commands(1);
        self.memory.peek(QUEUE + 32, 16)
    }

    /// As [`Self::command`], for one that succeeds.
    pub(super) fn ok(&mut self, opcode: u16, input: &[u8], out_len: usize) -> Vec<u8> {
        let output = self.command(opcode, input, out_len);
        let owner = self.memory.peek(QUEUE + 63, 1)[0];
        assert_eq!(
            (output[0], owner),
            (0, 0),
            "status, delivery of {opcode:#x}"
        );
        output
    }

    /// A command that makes an object: its number.
    pub(super) fn create(&mut self, opcode: u16, input: &[u8]) -> u32 {
        header::INDEX.get(&self.ok(opcode, input, 16))
    }

    /// A page, in turn: it may be in use already.
    pub(super) fn page(&mut self) -> u64 {
        let page = PAGES + self.page % PAGE_COUNT * 4096;
        self.page += 1;
        page
    }

    /// Rings a send queue.
    pub(super) fn ring_send(&mut self, number: u32) {
        let bell = [0, number << 8 | 1].map(u32::to_be_bytes).concat();
        self.write(UAR + 0x800, &bell);
    }

    /// Rings a completion queue's arm doorbell.
    pub(super) fn ring_cq(&mut self, number: u32) {
        let bell = [0, number].map(u32::to_be_bytes).concat();
        self.write(UAR + 0x20, &bell);
    }
}
