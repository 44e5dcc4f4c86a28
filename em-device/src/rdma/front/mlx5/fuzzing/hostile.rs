//! What the hostile driver does in a case.

use super::super::bits::put;
use super::super::command::opcode as op;
use super::super::fields::{mkc, tirc};
use super::super::wqe::opcode;
use super::connection::{End, to_init, to_peer, to_send};
use super::entries::{Names, address, entry, page, receive, remote, segment, send};
use super::node::{DATA, INPUT, OUTPUT, QUEUE};
use super::objects::{self, ETHER, Ring, about};
use super::world::{HOSTILE, NEIGHBOUR, World};
use super::{Source, frames};
use crate::rdma::front::mlx5::fields::header;
use std::time::Duration;

/// Objects of a kind that are remembered.
const MOST: usize = 16;

/// A queue pair as its driver knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Qp {
    number: u32,
    datagram: bool,
    /// Whether it was connected with the neighbour's last.
    outside: bool,
    receive: Ring,
    send: Ring,
}

/// Numbers that mean something, or did.
#[derive(Debug, Default)]
pub(super) struct Known {
    pds: Vec<u32>,
    pub(super) eqs: Vec<Ring>,
    pub(super) cqs: Vec<Ring>,
    qps: Vec<Qp>,
    srqs: Vec<Ring>,
    sends: Vec<Ring>,
    receives: Vec<Ring>,
    keys: Vec<u32>,
    /// Keys of the neighbour.
    foreign: Vec<u32>,
    /// Queue pairs of the neighbour and own ones.
    targets: Vec<u32>,
    made: usize,
}

fn remember<T>(all: &mut Vec<T>, made: &mut usize, one: T) {
    *made += 1;
    match all.len() < MOST {
        true => all.push(one),
        false => all[*made % MOST] = one,
    }
}

impl Known {
    /// What a driver knows that has a connection, and the neighbour's keys and queue pairs.
    pub(super) fn after(
        (keys, targets): &(Vec<u32>, Vec<u32>),
        (pd, eq, own): (u32, Ring, [u32; 2]),
        end: &End,
    ) -> Self {
        let qp = Qp {
            number: end.qpn,
            datagram: false,
            outside: true,
            receive: end.receive,
            send: end.send,
        };
        Self {
            pds: vec![pd],
            eqs: vec![eq],
            cqs: vec![end.cq],
            qps: vec![qp],
            keys: own.to_vec(),
            foreign: keys.clone(),
            targets: targets.iter().copied().chain([end.qpn]).collect(),
            ..Self::default()
        }
    }

    /// Queue pairs that were made at most.
    pub(super) fn queue_pairs(&self) -> usize {
        self.made
    }

    fn names(&self) -> Names<'_> {
        Names {
            keys: &self.keys,
            foreign: &self.foreign,
            qps: &self.targets,
        }
    }
}

/// One of them, or a number that may be of something.
pub(super) fn number(source: &mut Source<'_>, all: &[u32]) -> u32 {
    match source.below(24) {
        0 => source.limit() as u32,
        1 => source.below(24) as u32,
        _ if all.is_empty() => 0,
        _ => source.pick(all),
    }
}

pub(super) fn numbers(rings: &[Ring]) -> Vec<u32> {
    rings.iter().map(|ring| ring.number).collect()
}

impl World {
    /// One thing that the hostile driver does, and what comes of it.
    pub fn case(&mut self, source: &mut Source<'_>) {
        if !self.hostile.function.with(|device, _| device.running()) && !source.one_in(4) {
            self.hostile.set_bus_master(true);
            self.give_queue();
            self.hostile.command(op::INIT_HCA, &[], 16);
        }
        // What was taken away comes back soon, or little is tried.
        if source.one_in(4) {
            self.hostile.memory.set_movable(true);
            self.hostile.set_bus_master(true);
            self.hostile
                .function
                .with(|device, _| device.set_link(true));
            self.give_queue();
        }
        match source.below(32) {
            0..=5 => self.make(source),
            6..=8 => self.connect(source, None),
            9..=15 => self.post_send(source),
            16..=18 => self.post_receive(source),
            19..=21 => self.post_frames(source),
            22 => self.arriving_frame(source),
            23 | 24 => self.any_command(source),
            25 => self.any_entry(source),
            26 | 27 => self.scribble(source),
            28 => self.any_register(source),
            29 => self.doorbells(source),
            30 => self.around(source),
            _ => self.now += Duration::from_micros(1 << source.below(21)),
        }
        self.after_case();
    }

    /// Tells the device where the command queue is.
    fn give_queue(&mut self) {
        self.hostile
            .write(0x10, &((QUEUE >> 32) as u32).to_be_bytes());
        self.hostile.write(0x14, &(QUEUE as u32).to_be_bytes());
    }

    /// Executes a command that may be changed; answers the number of the object, if it succeeds.
    fn give(&mut self, source: &mut Source<'_>, opcode: u16, mut input: Vec<u8>) -> Option<u32> {
        if source.one_in(5) {
            let body = input.get_mut(8..).unwrap_or_default();
            source.mutate(body);
        }
        let room = source.pick(&[16, 16, 16, 16, 0x110, 8, 0x1010]);
        let output = self.hostile.command(opcode, &input, room);
        let owner = self.hostile.memory.peek(QUEUE + 63, 1)[0];
        let done = (output[0], owner) == (0, 0);
        self.coverage.commands.0 += 1;
        self.coverage.commands.1 += u64::from(done);
        done.then(|| header::INDEX.get(&output))
    }

    /// An object.
    fn make(&mut self, source: &mut Source<'_>) {
        let pd = number(source, &self.known.pds);
        let eqn = number(source, &numbers(&self.known.eqs));
        let cqs = numbers(&self.known.cqs);
        let cqs = (number(source, &cqs), number(source, &cqs));
        let node = &mut self.hostile;
        let mut made = self.known.made;
        match source.below(16) {
            0 => {
                if let Some(pd) = self.give(source, op::ALLOC_PD, vec![0; 16]) {
                    remember(&mut self.known.pds, &mut made, pd);
                }
            }
            1 => {
                let (input, ring) = objects::eq(node);
                if let Some(number) = self.give(source, op::CREATE_EQ, input) {
                    remember(&mut self.known.eqs, &mut made, Ring { number, ..ring });
                }
            }
            2 | 3 => {
                let (input, ring) = objects::cq(node, eqn);
                if let Some(number) = self.give(source, op::CREATE_CQ, input) {
                    remember(&mut self.known.cqs, &mut made, Ring { number, ..ring });
                }
            }
            4..=7 => {
                let st = source.pick(&[0, 0, 0, 1, 2, 2, 7, 8, 0xc, 0xc]);
                let (mut input, receive, send) = objects::qp(node, st, pd, cqs);
                if source.one_in(3) {
                    // Receives from a shared queue.
                    let srq = number(source, &numbers(&self.known.srqs));
                    let word = 1 << 24 | srq & 0xff_ffff;
                    put(&mut input, 0x18 + 0xac, &u32::to_be_bytes(word));
                }
                if let Some(number) = self.give(source, op::CREATE_QP, input) {
                    let datagram = matches!(st, 2 | 7 | 8);
                    let qp = Qp {
                        number,
                        datagram,
                        outside: false,
                        receive,
                        send,
                    };
                    remember(&mut self.known.qps, &mut made, qp);
                    remember(&mut self.known.targets, &mut made, number);
                    if source.below(4) != 3 {
                        self.connect(source, Some(number));
                    }
                }
            }
            8 | 9 => self.make_key(source, pd),
            10 | 11 => {
                let (opcode, (input, ring)) = match source.below(3) {
                    0 => (op::CREATE_RMP, objects::rmp(node, pd)),
                    1 => (op::CREATE_XRC_SRQ, objects::srq(node, pd)),
                    _ => (op::CREATE_SRQ, objects::srq(node, pd)),
                };
                if let Some(number) = self.give(source, opcode, input) {
                    remember(&mut self.known.srqs, &mut made, Ring { number, ..ring });
                }
            }
            12 => {
                let (input, ring) = objects::ether_send(node, cqs.0);
                if let Some(number) = self.give(source, op::CREATE_SQ, input) {
                    let ring = Ring { number, ..ring };
                    remember(&mut self.known.sends, &mut made, ring);
                    let change = objects::ether_change(number, 0, 1);
                    self.give(source, op::MODIFY_SQ, change);
                }
            }
            13 => {
                let (input, ring) = objects::ether_receive(node, cqs.0);
                if let Some(number) = self.give(source, op::CREATE_RQ, input) {
                    let ring = Ring { number, ..ring };
                    remember(&mut self.known.receives, &mut made, ring);
                    let change = objects::ether_change(number, 0, 1);
                    self.give(source, op::MODIFY_RQ, change);
                }
            }
            14 => {
                let rqn = number(source, &numbers(&self.known.receives));
                let input = objects::input(&[(tirc::INLINE_RQN.at(ETHER), rqn)]);
                self.give(source, op::CREATE_TIR, input);
            }
            _ => {
                // A table of two receive queues.
                let rqs = numbers(&self.known.receives);
                let mut input = vec![0; 0x110];
                put(&mut input, 0x36, &[0, 2]);
                put(&mut input, 0x3a, &[0, 2]);
                for _ in 0..2 {
                    input.extend(number(source, &rqs).to_be_bytes());
                }
                self.give(source, op::CREATE_RQT, input);
            }
        }
        self.known.made = self.known.made.max(made);
    }

    fn make_key(&mut self, source: &mut Source<'_>, pd: u32) {
        let input = match source.below(4) {
            0 => objects::physical_key(pd),
            1 => objects::free_key(),
            _ => {
                let pages: Vec<u64> = (0..1 + source.below(8)).map(|_| page(source)).collect();
                let start = address(source);
                let len = pages.len() as u64 * 4096 - (start & 0xfff);
                let rights = source.u8().into();
                objects::key(pd, rights, start, len, &pages)
            }
        };
        let variant = mkc::MKEY_7_0.at(mkc::AT).get(&input);
        if let Some(index) = self.give(source, op::CREATE_MKEY, input) {
            remember(
                &mut self.known.keys,
                &mut self.known.made,
                index << 8 | variant,
            );
        }
    }

    /// Queue pairs go from Reset to Ready to Send, most of the way.
    fn connect(&mut self, source: &mut Source<'_>, new: Option<u32>) {
        let qps: Vec<u32> = self.known.qps.iter().map(|qp| qp.number).collect();
        let one = new.unwrap_or_else(|| number(source, &qps));
        let (peer, other) = match source.below(3) {
            0 => (NEIGHBOUR, number(source, &self.known.targets)),
            _ => (HOSTILE, number(source, &qps)),
        };
        for (qpn, remote) in [(one, other), (other, one)] {
            if !source.one_in(4) {
                self.give(source, op::QP_2RST, about(qpn));
                self.begin_anew(qpn, peer == NEIGHBOUR);
            }
            self.give(source, op::RST2INIT_QP, to_init(qpn));
            self.give(source, op::INIT2RTR_QP, to_peer(qpn, peer, remote));
            self.give(source, op::RTR2RTS_QP, to_send(qpn));
            if peer == NEIGHBOUR {
                break;
            }
        }
        if source.one_in(8) {
            let opcode = source.pick(&[op::QP_2ERR, op::QP_2RST, op::RTS2RTS_QP, op::SQERR2RTS_QP]);
            self.give(source, opcode, about(one));
        }
    }

    /// A queue pair's rings are empty, as after a reset.
    fn begin_anew(&mut self, qpn: u32, outside: bool) {
        for qp in self.known.qps.iter_mut().filter(|qp| qp.number == qpn) {
            qp.outside = outside;
            (qp.send.count, qp.receive.count) = (0, 0);
            self.hostile.memory.scribble(qp.send.record, &[0; 8]);
        }
    }

    /// Entries of a queue pair's send queue.
    fn post_send(&mut self, source: &mut Source<'_>) {
        if self.known.qps.is_empty() {
            return;
        }
        let index = source.below(self.known.qps.len() as u64) as usize;
        let mut qp = self.known.qps[index];
        for _ in 0..1 + source.below(4) {
            let head = (qp.send.count as u16, qp.number);
            let bytes = match source.below(2) {
                0 if !qp.datagram => self.good_entry(source, head, qp.outside),
                _ => send(source, &self.known.names(), head, qp.datagram),
            };
            for block in bytes.chunks(64) {
                self.hostile
                    .memory
                    .scribble(qp.send.at(qp.send.count), block);
                qp.send.count = qp.send.count.wrapping_add(1);
            }
        }
        let count = match source.below(64) {
            0 => source.limit() as u32,
            _ => qp.send.count,
        };
        self.hostile
            .memory
            .scribble(qp.send.record + 4, &count.to_be_bytes());
        // A driver that takes no completions is soon at its end.
        self.take_completions(source);
        self.hostile.ring_send(qp.number);
        self.known.qps[index] = qp;
    }

    /// An RDMA WRITE or READ that succeeds where nothing was spoilt.
    fn good_entry(&self, source: &mut Source<'_>, head: (u16, u32), outside: bool) -> Vec<u8> {
        let known = &self.known;
        let own = known.keys.first().copied().unwrap_or_default();
        let key = match outside {
            // The last one is the one that is meant for this.
            true => known.foreign.last().copied().unwrap_or_default(),
            false => own,
        };
        let opcode = source.pick(&[opcode::RDMA_WRITE, opcode::RDMA_READ]);
        let [there, here] = [(); 2].map(|()| DATA + source.below(0x4000));
        let len = source.below(0x2000) as u32;
        let segments = [remote(there, key), segment(len, own, here)].concat();
        entry((head.0, opcode, head.1), 8, 0, &segments)
    }

    /// Completion queues have room again, mostly.
    fn take_completions(&mut self, source: &mut Source<'_>) {
        if source.one_in(8) {
            return;
        }
        for cq in &self.known.cqs {
            let number = crate::rdma::verbs::CqNum(cq.number);
            let produced = self
                .hostile
                .function
                .with_mlx5(|device, _| device.engine().cq_mut(number).map(|cq| cq.producer()));
            let produced = produced.flatten().unwrap_or_default().to_be_bytes();
            self.hostile.memory.scribble(cq.record, &produced);
        }
    }

    /// Entries of a receive queue of a queue pair, of a shared one, or of the network interface.
    fn post_receive(&mut self, source: &mut Source<'_>) {
        let kind = source.below(4);
        let known = &mut self.known;
        let names = Names {
            keys: &known.keys,
            foreign: &known.foreign,
            qps: &known.targets,
        };
        let count = known
            .qps
            .len()
            .max(known.srqs.len())
            .max(known.receives.len());
        let index = source.below(count.max(1) as u64) as usize;
        let (ring, linked) = match kind {
            0 => (known.srqs.get_mut(index), true),
            1 => (known.receives.get_mut(index), false),
            _ => (known.qps.get_mut(index).map(|qp| &mut qp.receive), false),
        };
        let Some(ring) = ring else {
            return;
        };
        for _ in 0..1 + source.below(6) {
            let next = linked.then(|| (ring.count as u16 + 1) & 0xf);
            let bytes = receive(source, &names, next, ring.log_stride);
            self.hostile.memory.scribble(ring.at(ring.count), &bytes);
            ring.count = (ring.count + 1) & 0xffff;
        }
        let record = ring.count.to_be_bytes();
        self.hostile.memory.scribble(ring.record, &record);
    }

    /// Entries of a send queue of the network interface.
    fn post_frames(&mut self, source: &mut Source<'_>) {
        if self.known.sends.is_empty() {
            return;
        }
        let index = source.below(self.known.sends.len() as u64) as usize;
        let mut ring = self.known.sends[index];
        for _ in 0..1 + source.below(3) {
            let segments = frames::segments(source, &self.known.keys);
            let opcode = source.pick(&[0x0a, 0x0a, 0x0e, 0x00]);
            let head = (ring.count as u16, opcode, ring.number);
            let mut bytes = super::entries::entry(head, 8, 0, &segments);
            if source.one_in(6) {
                source.mutate(&mut bytes);
            }
            for block in bytes.chunks(64) {
                self.hostile.memory.scribble(ring.at(ring.count), block);
                ring.count = ring.count.wrapping_add(1);
            }
        }
        let record = ring.count.to_be_bytes();
        self.hostile.memory.scribble(ring.record + 4, &record);
        self.take_completions(source);
        self.hostile.ring_send(ring.number);
        self.known.sends[index] = ring;
    }

    /// Any command, with an input of any bytes.
    fn any_command(&mut self, source: &mut Source<'_>) {
        let opcode = source.pick(op::ALL);
        let len = 16 + source.below(0x300) as usize;
        let one_in = 1 << source.below(8);
        let mut input = source.fill(len, one_in);
        let known = &self.known;
        let qps: Vec<u32> = known.qps.iter().map(|qp| qp.number).collect();
        let lists = [
            numbers(&known.eqs),
            numbers(&known.cqs),
            numbers(&known.srqs),
            numbers(&known.sends),
            numbers(&known.receives),
            known.keys.iter().map(|key| key >> 8).collect(),
            known.pds.clone(),
            qps,
        ];
        let list = source.below(lists.len() as u64) as usize;
        if !source.one_in(4) {
            let index = number(source, &lists[list]);
            put(&mut input, 8, &index.to_be_bytes());
        }
        put(&mut input, 6, &[0, source.u8() & 0xf]);
        self.give(source, opcode, input);
    }

    /// Entries of the command queue and mailboxes that are no more than bytes.
    fn any_entry(&mut self, source: &mut Source<'_>) {
        let slot = source.below(4);
        let one_in = 1 << source.below(4);
        let mut entry = source.fill(64, one_in);
        if !source.one_in(4) {
            entry[0] = 7;
            let opcode = source.pick(op::ALL).to_be_bytes();
            put(&mut entry, 16, &opcode);
            put(&mut entry, 4, &[0, 0, source.u8() & 15, 16]);
            put(&mut entry, 56, &[0, 0, source.u8() & 15, 16]);
            for (at, mailbox) in [(8, INPUT), (48, OUTPUT)] {
                let place = mailbox + 512 * source.below(40);
                put(&mut entry, at, &place.to_be_bytes());
            }
        }
        entry[63] |= 1;
        self.hostile.memory.scribble(QUEUE + 64 * slot, &entry);
        self.hostile.ring_commands(source.u8().into());
    }
}
