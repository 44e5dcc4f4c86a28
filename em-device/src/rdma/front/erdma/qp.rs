//! Commands of queue pairs.

use super::address::{self, AV};
use super::bytes::bits;
use super::command::{Command, Fault, Response, opcode};
use super::device::Device;
use super::memory::{Pages, Place, QueueMemory};
use super::rq::{RQE, Rq};
use super::sq::{self, Sq, SqSetup};
use super::tables::{DmaKey, MAX_CQS, MAX_QPS};
use crate::rdma::engine::{Context, QpSetup};
use crate::rdma::front::allowance::Allowance;
use crate::rdma::verbs::{
    CqNum, Destination, Path, Pd, QpChange, QpNum, QpState, ReceiveFrom, Region, Rights, Service,
    Translation,
};
use dot_iommu::DotView;

/// The queue pair of connection managers.
const GSI: u32 = 1;
/// Type of a queue pair of datagrams; older drivers do not say the type, and have connections only.
const DATAGRAM: u32 = 1;
/// In a queue's configuration: of a program, not of the kernel.
const OF_A_PROGRAM: u32 = 1 << 25;
/// Addresses of a queue's pages that stand in the command: one, and three more.
const INLINE: usize = 4;

/// Attributes that MODIFY_QP sets.
mod attribute {
    pub(super) const STATE: u32 = 1;
    pub(super) const QKEY: u32 = 2;
    pub(super) const AV: u32 = 4;
    pub(super) const SEND_PSN: u32 = 8;
    pub(super) const RECEIVE_PSN: u32 = 16;
    pub(super) const DEST_QP: u32 = 32;
}

/// What the driver never says. A receiver that has nothing posted is asked again after 0.64 ms, without end; without
/// any answer requests are sent again every 134 ms for half a minute.
const DEFAULTS: QpChange = QpChange {
    remote_rights: None,
    qkey: None,
    dest_qp: None,
    path: None,
    mtu: None,
    receive_psn: None,
    send_psn: None,
    min_rnr_timer: Some(12),
    timeout: Some(15),
    retry_count: Some(QpChange::PATIENT),
    rnr_retry: Some(7),
    max_reads: Some(128),
    max_dest_reads: Some(128),
};

const PSN: u32 = 0xff_ffff;

fn state(number: u32) -> Result<QpState, Fault> {
    Ok(match number {
        0 => QpState::Reset,
        1 => QpState::Init,
        2 => QpState::Rtr,
        3 => QpState::Rts,
        4 => QpState::Sqd,
        5 => QpState::Sqe,
        6 => QpState::Error,
        _ => return Err(Fault::Field("the state")),
    })
}

fn number(state: QpState) -> u64 {
    match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts => 3,
        QpState::Sqd => 4,
        QpState::Sqe => 5,
        QpState::Error => 6,
    }
}

/// Where the fields of one of the two queues are.
struct Places {
    depth: usize,
    config: usize,
    address: usize,
    pages: usize,
    record: usize,
    more: usize,
}

const SENDS: Places = Places {
    depth: 8,
    config: 16,
    address: 24,
    pages: 40,
    record: 48,
    more: 64,
};
const RECEIVES: Places = Places {
    depth: 12,
    config: 20,
    address: 32,
    pages: 44,
    record: 56,
    more: 88,
};

/// One of the two queues.
struct Queue {
    log_size: u32,
    cq: CqNum,
    record: u64,
    memory: QueueMemory,
}

fn queue(
    command: &Command,
    at: &Places,
    entry: u64,
    allowance: &Allowance,
    memory: &DotView<'_>,
) -> Result<Queue, Fault> {
    let config = command.word(at.config);
    let cq = bits(config, 0..=23);
    let pages = command.word(at.pages);
    let count = bits(pages, 1..=11) as usize;
    let address = command.long(at.address);
    let offset = u64::from(pages & !0xfff);
    let pages = match pages & 1 {
        0 if count <= INLINE => {
            let more = (at.more..).step_by(8).map(|at| command.long(at));
            Pages::Inline(std::iter::once(address).chain(more).take(count).collect())
        }
        0 => return Err(Fault::Field("the number of a queue's pages")),
        _ => Pages::List(address, count),
    };
    let log_size = bits(command.word(at.depth), 20..=31);
    let len = entry
        .checked_shl(log_size)
        .filter(|len| log_size < 16 && *len != 0)
        .ok_or(Fault::Field("the size of a queue"))?;
    if cq == 0 || cq >= MAX_CQS {
        return Err(Fault::Number("completion queue"));
    }
    let place = Place {
        pages,
        shift: bits(config, 28..=31) as u8 + 12,
        offset,
        len,
    };
    Ok(Queue {
        log_size,
        cq: CqNum(cq),
        record: command.long(at.record),
        memory: place.find(allowance, memory)?,
    })
}

/// The number of the queue pair in a command.
fn qpn(command: &Command) -> Result<u32, Fault> {
    let number = command.number();
    match (1..MAX_QPS).contains(&number) {
        true => Ok(number),
        false => Err(Fault::Number("queue pair")),
    }
}

impl Device {
    pub(super) fn create_qp(
        &mut self,
        command: &Command,
        memory: &DotView<'_>,
    ) -> Result<Response, Fault> {
        let qpn = qpn(command)?;
        let sends = queue(command, &SENDS, sq::BLOCK, &self.allowance, memory)?;
        let receives = queue(command, &RECEIVES, RQE, &self.allowance, memory)?;
        let datagram = qpn == GSI || bits(command.word(116), 0..=3) == DATAGRAM;
        let service = match datagram {
            true => Service::Ud,
            false => Service::Rc,
        };
        let pd = bits(command.word(12), 0..=19);
        let kernel = command.word(SENDS.config) & OF_A_PROGRAM == 0;
        let dma_key = kernel.then(|| DmaKey::of(qpn));
        let send = Sq::new(SqSetup {
            memory: sends.memory,
            log_size: sends.log_size,
            record: sends.record,
            service,
            dma_key,
            pd,
            tables: self.tables.clone(),
        })?;
        let receive = Rq::new(receives.memory, receives.log_size, receives.record, dma_key)?;
        self.engine.add_qp(QpSetup {
            num: QpNum(qpn),
            service,
            pd: Pd(pd),
            tag: qpn,
            send_cq: sends.cq,
            receive_cq: receives.cq,
            send: Some(send),
            receive: Some(receive),
            receive_from: ReceiveFrom::Own,
            registers_all: false,
        })?;
        if let Some(key) = dma_key {
            self.engine.regions_mut().place(Region {
                key: key.key(),
                pd: Pd(pd),
                rights: Rights::LOCAL_WRITE,
                start: 0,
                len: u64::MAX,
                translation: Translation::Identity,
                capacity: 0,
                valid: true,
            })?;
        }
        Ok([0; 2])
    }

    pub(super) fn destroy_qp(&mut self, command: &Command) -> Result<Response, Fault> {
        let qpn = qpn(command)?;
        self.engine.remove_qp(QpNum(qpn))?;
        let key = DmaKey::of(qpn).key();
        self.engine.regions_mut().displace(key.0 >> 8);
        Ok([0; 2])
    }

    /// Where a command's queue pair is to be connected to.
    pub fn destination(&self, command: &Command) -> Option<Destination> {
        let connects = command.code == opcode::MODIFY_QP
            && command.word(16) & attribute::AV != 0
            && command.word(8) >> 24 == number(QpState::Rtr) as u32;
        let av = command.bytes().get(32..32 + AV).filter(|_| connects)?;
        Some(address::parse(av, 0).to)
    }

    pub(super) fn modify_qp(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
    ) -> Result<Response, Fault> {
        let num = QpNum(qpn(command)?);
        let now = self.engine.qp(num).ok_or(Fault::Number("queue pair"))?;
        let mask = command.word(16);
        let has = |attribute: u32| mask & attribute != 0;
        let to = match has(attribute::STATE) {
            true => state(bits(command.word(8), 24..=31))?,
            false => now.state,
        };
        if self.destination(command).is_some() && path.is_none() {
            return Err(Fault::Path);
        }
        let word = |attribute, at| has(attribute).then(|| command.word(at));
        let remote = Rights::REMOTE_WRITE | Rights::REMOTE_READ | Rights::REMOTE_ATOMIC;
        let change = QpChange {
            remote_rights: Some(remote),
            qkey: word(attribute::QKEY, 20),
            dest_qp: word(attribute::DEST_QP, 12).map(|n| QpNum(bits(n, 0..=19))),
            path: path.filter(|_| has(attribute::AV)),
            mtu: Some(self.path_mtu()),
            receive_psn: word(attribute::RECEIVE_PSN, 24).map(|psn| psn & PSN),
            send_psn: word(attribute::SEND_PSN, 28).map(|psn| psn & PSN),
            ..DEFAULTS
        };
        self.engine.modify_qp(num, to, &change, cx)?;
        Ok([0; 2])
    }

    pub(super) fn query_qp(&self, command: &Command) -> Result<Response, Fault> {
        let num = QpNum(qpn(command)?);
        let qp = self.engine.qp(num).ok_or(Fault::Number("queue pair"))?;
        let psns = u64::from(qp.send_psn) | u64::from(qp.receive_psn) << 24;
        let draining = u64::from(qp.draining) << 56;
        Ok([psns | number(qp.state) << 48 | draining, 0])
    }

    /// A kernel's queue pair in error has new entries to be flushed.
    pub(super) fn reflush(&mut self, command: &Command) -> Result<Response, Fault> {
        let num = QpNum(qpn(command)?);
        self.engine.qp(num).ok_or(Fault::Number("queue pair"))?;
        self.ring_send(num.0);
        self.ring_receive(num.0);
        Ok([0; 2])
    }
}
