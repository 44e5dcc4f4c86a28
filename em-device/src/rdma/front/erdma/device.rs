//! The function on the data path: its objects, its commands' execution, its events.

use super::address::{self, AV};
use super::bytes::{bits, bytes_at};
use super::command::{Command, CommandQueue, Fault, Response, opcode};
use super::cq::{CQE, Cq};
use super::eq::{Eq, Eqe, event};
use super::kept::KeptDevice;
use super::memory::{Pages, Place, QueueMemory};
use super::registers::{AEQ, COMMAND_CQ, Setup, page};
use super::tables::{DMA_KEY, MAX_ADDRESSES, MAX_CQS, MAX_QPS, SharedTables};
use super::{Erdma, mr};
use crate::rdma::engine::{Context, Engine, Notice};
use crate::rdma::front::allowance::{Allowance, Charge};
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::packet::{Addresses, Packet, Request};
use crate::rdma::verbs::{CqNum, Path, Peer, QpNum};
use dot_iommu::DotView;
use m2m_fabric::proto::RdmaSpec;
use smartep::fault;
use smartep::irq::Irqs;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// GIDs of a port at most; a bit each in a word.
const MAX_GIDS: usize = 16;
/// Bytes of an Ethernet frame's payload that are not the transport's payload: IPv6, UDP, BTH, the longest extended
/// header and ICRC (IBTA 1.5 §9.2, annex A17).
const HEADERS: u16 = 40 + 8 + 12 + 28 + 4;

/// QUERY_DEVICE's answer: log₂ of limits, and what is there beside what the driver takes for granted.
mod capability {
    use super::super::tables;

    const LOG_GIDS: u64 = 4;
    const LOG_CQES: u64 = 20;
    const LOG_RECEIVES: u64 = 13;
    const LOG_ADDRESSES: u64 = tables::MAX_ADDRESSES.trailing_zeros() as u64;
    const LOG_REGION_BYTES: u64 = 40;
    const ATOMIC: u64 = 1 << 7;
    const PAGE_TABLES: u64 = 1 << 5;
    const DOORBELL_PAGES: u64 = 1 << 3;
    const FLAGS: u64 = ATOMIC | PAGE_TABLES | DOORBELL_PAGES;

    pub(super) const FIRST: u64 = LOG_GIDS << 48
        | LOG_CQES << 40
        | FLAGS << 24
        | LOG_RECEIVES << 16
        | LOG_ADDRESSES << 8
        | LOG_REGION_BYTES;

    /// Congestion control that nobody asks for over RoCE.
    const CUBIC: u64 = 1;
    /// Queue pairs, in 1024.
    const QP_BLOCKS: u64 = tables::MAX_QPS as u64 / 1024;

    pub(super) const SECOND: u64 = (tables::DMA_KEY.0 as u64) << 32 | CUBIC << 28 | QP_BLOCKS << 16;
}

/// See the module.
#[derive(Debug)]
pub struct Device {
    pub(super) spec: RdmaSpec,
    pub(super) irqs: Arc<Irqs>,
    doorbells: Arc<Doorbells>,
    pub(super) engine: Engine<Erdma>,
    pub(super) tables: SharedTables,
    pub(super) commands: Option<CommandQueue>,
    /// Of asynchronous events.
    pub(super) events: Option<Eq>,
    /// Of completions, by number; the first is 1.
    pub(super) eqs: BTreeMap<u32, Eq>,
    pub(super) allowance: Allowance,
    /// What the page lists of regions take, by index.
    charges: HashMap<u32, Charge>,
    addresses: Addresses,
    /// A bit for each GID that changed and that nobody took yet.
    gid_news: u16,
    /// Programs that got doorbell pages so far.
    contexts: u32,
    mtu: u16,
    pub(super) link_up: bool,
    /// Events that found no room in their queue.
    pub(super) lost_events: u64,
    /// What outlives the process.
    pub(super) kept: KeptDevice,
}

impl Device {
    /// Function `own` without a driver.
    pub fn new(spec: RdmaSpec, own: Peer, irqs: Arc<Irqs>, doorbells: Arc<Doorbells>) -> Self {
        Self {
            mtu: spec.mtu,
            link_up: spec.link_up,
            spec,
            irqs,
            doorbells,
            engine: Engine::new(own),
            tables: SharedTables::default(),
            commands: None,
            events: None,
            eqs: BTreeMap::new(),
            allowance: Allowance::default(),
            charges: HashMap::new(),
            addresses: no_addresses(),
            gid_news: 0,
            contexts: 0,
            lost_events: 0,
            kept: KeptDevice::default(),
        }
    }

    /// The transport engine.
    pub fn engine(&mut self) -> &mut Engine<Erdma> {
        &mut self.engine
    }

    /// The transport engine.
    pub fn engine_ref(&self) -> &Engine<Erdma> {
        &self.engine
    }

    /// GIDs at present.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Whether a driver has the function in use.
    pub fn running(&self) -> bool {
        self.commands.is_some()
    }

    /// A GID that the driver changed: index and value, all zeroes when it removed it.
    pub fn take_gid_change(&mut self) -> Option<(u16, [u8; 16])> {
        let index = (self.gid_news != 0).then(|| self.gid_news.trailing_zeros())?;
        self.gid_news &= self.gid_news - 1;
        let gid = self.addresses.gids.get(index as usize).copied();
        Some((index as u16, gid.unwrap_or_default()))
    }

    /// Whether the port is up. The driver does not ask: it goes by its network interface.
    pub fn set_link(&mut self, up: bool) {
        self.link_up = up;
    }

    /// Path MTU of new connections: the largest that the function's frames hold.
    pub(super) fn path_mtu(&self) -> u16 {
        let room = self.mtu.saturating_sub(HEADERS);
        [4096, 2048, 1024, 512]
            .into_iter()
            .find(|mtu| *mtu <= room)
            .unwrap_or(256)
    }

    /// The driver begins.
    pub fn init(&mut self, setup: &Setup) {
        self.commands = match CommandQueue::new(setup) {
            Ok(queue) => Some(queue),
            Err(fault) => {
                log::warn!("a driver's command queue cannot be used: {fault}");
                None
            }
        };
        self.events = Eq::new(setup.asynchronous, setup.asynchronous_depth, 0);
        let Some(kept) = self.kept.get() else {
            return;
        };
        if let Some(queue) = &mut self.commands {
            queue.keep_in(kept);
        }
        if let (Some(eq), Some(place)) = (&mut self.events, kept.eq(AEQ)) {
            eq.keep_in(place);
        }
    }

    /// Forgets all that a driver made; nothing of its memory is touched after this.
    pub fn reset(&mut self) {
        self.engine.clear();
        self.tables = SharedTables::default();
        self.commands = None;
        self.events = None;
        self.eqs.clear();
        self.charges.clear();
        for (index, gid) in self.addresses.gids.iter().enumerate() {
            if *gid != [0; 16] {
                self.gid_news |= 1 << index;
            }
        }
        self.addresses = no_addresses();
        self.contexts = 0;
        self.mtu = self.spec.mtu;
        self.doorbells.clear();
        self.kept.clear();
    }

    /// The next command up to the block `producer` of the queue.
    pub fn next_command(&mut self, producer: u16, memory: &DotView<'_>) -> Option<Command> {
        self.commands.as_mut()?.next(producer, memory)
    }

    /// Executes a command and tells the driver. A command that [`Self::destination`] has an answer for fails without
    /// `path`.
    pub fn execute(&mut self, command: &Command, path: Option<Path>, cx: &mut Context<'_>) {
        let result = match self.kept.owed(command) {
            Some(response) => Ok(response),
            None => {
                let result = self.dispatch(command, path, cx);
                self.keep_command(command, result);
                result
            }
        };
        fault::point("command");
        if let Err(fault) = result {
            log::debug!("command {:?} fails: {fault}", command.code);
        }
        if let Some(queue) = &mut self.commands {
            queue.complete(command, result, cx.memory, &self.irqs);
        }
        self.kept.told();
    }

    pub(super) fn dispatch(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
    ) -> Result<Response, Fault> {
        match command.code {
            opcode::QUERY_DEVICE => Ok([capability::FIRST, capability::SECOND]),
            opcode::CREATE_QP => self.create_qp(command, cx.memory),
            opcode::DESTROY_QP => self.destroy_qp(command),
            opcode::MODIFY_QP => self.modify_qp(command, path, cx),
            opcode::QUERY_QP => self.query_qp(command),
            opcode::REFLUSH => self.reflush(command),
            opcode::CREATE_CQ => self.create_cq(command, cx.memory),
            opcode::DESTROY_CQ => self.destroy_cq(command),
            opcode::REG_MR => self.reg_mr(command, cx.memory),
            opcode::DEREG_MR => self.dereg_mr(command),
            opcode::SET_GID => self.set_gid(command),
            opcode::CREATE_AH => self.create_ah(command),
            opcode::DESTROY_AH => self.destroy_ah(command),
            opcode::CREATE_EQ => self.create_eq(command),
            opcode::DESTROY_EQ => self.destroy_eq(command),
            // Shown as 0.0.1.
            opcode::QUERY_FW_INFO => Ok([1, 0]),
            opcode::CONF_MTU => self.conf_mtu(command),
            opcode::GET_STATS => self.get_stats(command, cx.memory),
            opcode::CONF_DEVICE | opcode::FREE_DB => Ok([0; 2]),
            opcode::ALLOC_DB => Ok([self.alloc_doorbells(), 0]),
            _ => Err(Fault::Opcode),
        }
    }

    /// Pages for a program's doorbells. The queue's number is in each value, so programs may share pages; the kernel's
    /// are not given out. The driver takes the upper field for the page of completion queues and the one below it
    /// for that of receive queues, against their names.
    fn alloc_doorbells(&mut self) -> u64 {
        let context = u64::from(self.contexts);
        self.contexts = self.contexts.wrapping_add(1);
        let pick = |pages: std::ops::Range<u64>| pages.start + context % (pages.end - pages.start);
        let sends = pick(page::SENDS.start..page::SENDS.end - 2);
        let receives = pick(page::RECEIVES.start + 1..page::RECEIVES.end);
        let completions = pick(page::COMPLETIONS.start + 1..page::COMPLETIONS.end);
        completions << 48 | receives << 32 | sends
    }

    fn conf_mtu(&mut self, command: &Command) -> Result<Response, Fault> {
        let mtu = u16::try_from(command.word(8)).map_err(|_| Fault::Field("the MTU"))?;
        self.mtu = mtu.min(self.spec.mtu);
        Ok([0; 2])
    }

    fn create_eq(&mut self, command: &Command) -> Result<Response, Fault> {
        let [vector, number, log_size, _] = command.word(16).to_le_bytes();
        let number = u32::from(number);
        if !(1..AEQ).contains(&number) || self.eqs.contains_key(&number) {
            return Err(Fault::Number("event queue"));
        }
        let size = 1u32.checked_shl(log_size.into()).unwrap_or(0);
        let eq = Eq::new(command.long(8), size, vector.into());
        let mut eq = eq.ok_or(Fault::Field("the event queue"))?;
        if let Some(place) = self.kept.get().and_then(|kept| kept.eq(number)) {
            eq.keep_in(place);
        }
        self.eqs.insert(number, eq);
        Ok([0; 2])
    }

    fn destroy_eq(&mut self, command: &Command) -> Result<Response, Fault> {
        let [_, number, ..] = command.word(16).to_le_bytes();
        let removed = self.eqs.remove(&number.into());
        removed.map(|_| [0; 2]).ok_or(Fault::Number("event queue"))
    }

    fn create_cq(&mut self, command: &Command, memory: &DotView<'_>) -> Result<Response, Fault> {
        let (head, shape) = (command.word(8), command.word(20));
        let (cqn, log_size) = (command.number(), bits(head, 24..=31));
        if !(1..MAX_CQS).contains(&cqn) {
            return Err(Fault::Number("completion queue"));
        }
        let (count, level) = (bits(shape, 16..=31) as usize, bits(shape, 15..=15));
        let address = command.long(12);
        let pages = match level {
            0 => Pages::Inline(vec![address]),
            _ => Pages::List(address, count),
        };
        let len = CQE
            .checked_shl(log_size)
            .filter(|_| log_size < 32)
            .ok_or(Fault::Field("the size of a queue"))?;
        let place = Place {
            pages,
            shift: bits(head, 20..=23) as u8 + 12,
            offset: command.word(32).into(),
            len,
        };
        let QueueMemory { buffer, charge } = place.find(&self.allowance, memory)?;
        let eqn = bits(shape, 0..=9);
        let mut cq = Cq::new(buffer, log_size, command.long(24), eqn)?;
        cq.hold(charge);
        if let Some(place) = self.kept.get().and_then(|kept| kept.cq(cqn)) {
            // One of this number may be there already, whose place it is.
            if self.engine.cq_mut(CqNum(cqn)).is_none() {
                cq.keep_in(place);
            }
        }
        self.engine.add_cq(CqNum(cqn), cq)?;
        Ok([0; 2])
    }

    fn destroy_cq(&mut self, command: &Command) -> Result<Response, Fault> {
        self.engine.remove_cq(CqNum(command.number()))?;
        Ok([0; 2])
    }

    fn reg_mr(&mut self, command: &Command, memory: &DotView<'_>) -> Result<Response, Fault> {
        let new = mr::parse(command, &self.allowance, memory)?;
        let index = new.region.key.0 >> 8;
        self.engine.regions_mut().place(new.region)?;
        self.charges.insert(index, new.charge);
        if let Some(table) = new.table {
            self.tables.get().page_tables.insert(index, table);
        }
        Ok([0; 2])
    }

    fn dereg_mr(&mut self, command: &Command) -> Result<Response, Fault> {
        let index = mr::key(command)?.0 >> 8;
        let removed = self.engine.regions_mut().displace(index);
        removed.ok_or(Fault::Number("memory region"))?;
        self.charges.remove(&index);
        self.tables.get().page_tables.remove(&index);
        Ok([0; 2])
    }

    fn set_gid(&mut self, command: &Command) -> Result<Response, Fault> {
        let word = command.word(8);
        let index = bits(word, 0..=15);
        let slot = self.addresses.gids.get_mut(index as usize);
        let slot = slot.ok_or(Fault::Field("the index of the GID"))?;
        *slot = match bits(word, 31..=31) {
            0 => bytes_at(command.bytes(), 12),
            _ => [0; 16],
        };
        self.gid_news |= 1 << index;
        Ok([0; 2])
    }

    fn create_ah(&mut self, command: &Command) -> Result<Response, Fault> {
        let number = command.word(12);
        let av = command.bytes().get(16..16 + AV).unwrap_or_default();
        let mut tables = self.tables.get();
        if number >= MAX_ADDRESSES {
            return Err(Fault::Number("address handle"));
        }
        let address = address::parse(av, command.number());
        tables.addresses.insert(number, address);
        Ok([0; 2])
    }

    fn destroy_ah(&mut self, command: &Command) -> Result<Response, Fault> {
        let removed = self.tables.get().addresses.remove(&command.word(12));
        removed
            .map(|_| [0; 2])
            .ok_or(Fault::Number("address handle"))
    }

    /// One round: doorbells, the engine, events. Answers whether anything was done.
    pub fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        let mut worked = self.take_doorbells(cx.memory);
        worked |= self.engine.turn(cx);
        while let Some(notice) = self.engine.take_notice() {
            self.report(notice, cx.memory);
            worked = true;
        }
        worked
    }

    /// Before sleep: whether a doorbell waits.
    pub fn is_rung(&self) -> bool {
        self.doorbells.is_rung()
    }

    pub(super) fn ring_send(&mut self, number: u32) {
        if let Some(queue) = self.engine.send_queue_mut(QpNum(number)) {
            queue.ring();
            self.engine.ring(QpNum(number));
        }
    }

    pub(super) fn ring_receive(&mut self, number: u32) {
        if let Some(queue) = self.engine.receive_queue_mut(QpNum(number)) {
            queue.ring();
            self.engine.ring_receive(QpNum(number));
        }
    }

    /// A packet came in; see [`Engine::receive`]. What was posted before it came is there for it.
    pub fn receive(
        &mut self,
        from: Peer,
        packet: Packet,
        cx: &mut Context<'_>,
    ) -> Option<Box<Request>> {
        if self.doorbells.is_rung() {
            self.take_receives();
        }
        self.engine.receive(from, packet, cx)
    }

    fn take_receives(&mut self) -> bool {
        let mut worked = false;
        let doorbells = self.doorbells.clone();
        doorbells.take_receives(|number| {
            worked = true;
            self.ring_receive(number);
        });
        worked
    }

    fn take_doorbells(&mut self, memory: &DotView<'_>) -> bool {
        let mut worked = false;
        let doorbells = self.doorbells.clone();
        doorbells.take_eqs(|number, index, arm| {
            worked = true;
            let irqs = &self.irqs;
            match number {
                0 => {
                    if let Some(queue) = &mut self.commands {
                        queue.update_events(index, arm, irqs);
                    }
                }
                AEQ => {
                    if let Some(eq) = &mut self.events {
                        eq.update(index, arm, irqs);
                    }
                }
                _ => {
                    if let Some(eq) = self.eqs.get_mut(&number) {
                        eq.update(index, arm, irqs);
                    }
                }
            }
        });
        // What is armed here is told of what comes below.
        doorbells.take_cqs(|number| {
            worked = true;
            if number == COMMAND_CQ {
                if let Some(queue) = &mut self.commands {
                    queue.arm(memory, &self.irqs);
                }
                return;
            }
            let cq = self.engine.cq_mut(CqNum(number));
            if cq.is_some_and(|cq| cq.arm(memory)) {
                self.post_completion(number, memory);
            }
        });
        worked |= self.take_receives();
        doorbells.take_sends(|number| {
            worked = true;
            self.ring_send(number);
        });
        worked
    }

    fn report(&mut self, notice: Notice, memory: &DotView<'_>) {
        let event = match notice {
            Notice::Completion(cq) => return self.post_completion(cq.0, memory),
            Notice::CqError(cq) => Eqe::asynchronous(event::CQ, cq.0),
            Notice::QpFatal(qp) | Notice::InvalidRequest(qp) => {
                Eqe::asynchronous(event::QP_FATAL, qp.0)
            }
            Notice::AccessError(qp) => Eqe::asynchronous(event::ACCESS, qp.0),
            // The driver takes every event of a queue pair for a fatal one.
            Notice::CommunicationEstablished(_)
            | Notice::SendQueueDrained(_)
            | Notice::LastReceive(_)
            | Notice::SrqLimit(_)
            | Notice::SrqError(_) => return,
        };
        let stored = self
            .events
            .as_mut()
            .is_some_and(|eq| eq.push(event, memory, &self.irqs));
        self.lost_events += u64::from(!stored);
    }

    pub(super) fn post_completion(&mut self, cqn: u32, memory: &DotView<'_>) {
        let eqn = self.engine.cq_mut(CqNum(cqn)).map(|cq| cq.eqn());
        let eq = eqn.and_then(|eqn| self.eqs.get_mut(&eqn));
        let stored = eq.is_some_and(|eq| eq.push(Eqe::completion(cqn), memory, &self.irqs));
        self.lost_events += u64::from(!stored);
        if let Some(cq) = self.engine.cq_mut(CqNum(cqn)) {
            cq.event_stored();
        }
    }
}

fn no_addresses() -> Addresses {
    Addresses {
        lid: 0,
        gids: vec![[0; 16]; MAX_GIDS],
    }
}

const _: () = assert!(MAX_QPS % 1024 == 0 && DMA_KEY.0 >> 8 > 2 * MAX_CQS + MAX_QPS);
