//! Send queues: entries of 64-byte basic blocks, parsed into work requests.

use super::buffer::{BadBuffer, NotMapped, QueueBuffer};
use super::send_ring::{Head, Posted, SendRing};
use super::umr;
use super::wqe::{
    Atomic, AvRest, BaseAv, Ctrl, DS, DataSeg, INLINE, LIST_END, MAX_WQE, Raddr, opcode, take,
};
use crate::rdma::verbs::{
    Data, Datagram, Destination, MAX_SGE, MemKey, Mixed, Next, Operation, QpNum, Regions,
    SendQueue, Service, Sge, Sges, WorkRequest,
};
use dot_iommu::DotView;
use smallvec::SmallVec;

/// In the count of an inline segment: the bytes that follow.
const INLINE_COUNT: u32 = 0x3ff;

/// A send queue to be made.
#[derive(Debug)]
pub struct SqSetup {
    /// Number of its queue pair.
    pub qpn: u32,
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its size in basic blocks of 64 bytes, 0 to 15.
    pub log_wqebbs: u8,
    /// Bus address of the queue pair's doorbell record of 8 bytes; word 1 is the send counter.
    pub doorbell: u64,
    /// Service of the queue pair.
    pub service: Service,
    /// Whether entries may change memory regions.
    pub umr: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Sq {
    qpn: u32,
    ring: SendRing,
    service: Service,
    umr: bool,
}

impl Sq {
    /// An empty queue.
    pub fn new(setup: SqSetup) -> Result<Self, BadBuffer> {
        Ok(Self {
            qpn: setup.qpn,
            ring: SendRing::new(setup.buffer, setup.log_wqebbs, setup.doorbell)?,
            service: setup.service,
            umr: setup.umr,
        })
    }

    /// Number of its queue pair.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Whether something is posted: for queues whose doorbells are not seen.
    #[inline]
    pub fn is_posted(&self, view: &DotView<'_>) -> bool {
        self.ring.is_posted(view)
    }

    /// An entry of more than one basic block.
    #[inline(never)]
    fn long(
        &self,
        posted: &Posted,
        view: &DotView<'_>,
        regions: &Regions,
    ) -> Result<Option<WorkRequest>, NotMapped> {
        let mut space = [0; MAX_WQE];
        let wqe = self.ring.whole(posted, &mut space, view)?;
        Ok(self.parse(posted.counter, wqe, view, regions))
    }

    /// `None` when the entry makes no sense.
    #[inline]
    fn parse(
        &self,
        counter: u16,
        wqe: &[u8],
        view: &DotView<'_>,
        regions: &Regions,
    ) -> Option<WorkRequest> {
        let bytes = &mut &*wqe;
        let ctrl: Ctrl = take(bytes)?;
        let datagram = match (self.service, ctrl.opcode) {
            (_, opcode::NOP | opcode::UMR) => None,
            (Service::Ud, opcode::SEND | opcode::SEND_IMMEDIATE) => Some(datagram(bytes)?),
            (Service::Ud, _) => return None,
            _ => None,
        };
        let imm = ctrl.imm.get();
        let connected = self.service == Service::Rc;
        let operation = match ctrl.opcode {
            opcode::RDMA_WRITE | opcode::RDMA_WRITE_IMMEDIATE => {
                let raddr: Raddr = take(bytes)?;
                Operation::Write {
                    addr: raddr.addr.get(),
                    key: MemKey(raddr.key.get()),
                    immediate: (ctrl.opcode == opcode::RDMA_WRITE_IMMEDIATE).then_some(imm),
                }
            }
            opcode::SEND | opcode::SEND_IMMEDIATE => Operation::Send {
                immediate: (ctrl.opcode == opcode::SEND_IMMEDIATE).then_some(imm),
                invalidate: None,
            },
            opcode::SEND_INVALIDATE if connected => Operation::Send {
                immediate: None,
                invalidate: Some(MemKey(imm)),
            },
            opcode::RDMA_READ if connected => {
                let raddr: Raddr = take(bytes)?;
                Operation::Read {
                    addr: raddr.addr.get(),
                    key: MemKey(raddr.key.get()),
                    invalidate: None,
                }
            }
            opcode::ATOMIC_CS | opcode::ATOMIC_FA if connected => atomic(ctrl.opcode, bytes)?,
            opcode::NOP => {
                *bytes = &[];
                Operation::Nop
            }
            opcode::UMR if self.umr => {
                let change = umr::parse(imm, bytes, regions, view)?;
                *bytes = &[];
                Operation::Register(Box::new(change))
            }
            _ => return None,
        };
        let data = data(bytes)?;
        let fits = match (&operation, &data) {
            (Operation::Read { .. }, data) => matches!(data, Data::Gather(_)),
            (Operation::CompareSwap { .. } | Operation::FetchAdd { .. }, Data::Gather(sges)) => {
                sges.iter().map(|sge| u64::from(sge.len)).sum::<u64>() == 8
            }
            (Operation::CompareSwap { .. } | Operation::FetchAdd { .. }, _) => false,
            _ => true,
        };
        fits.then_some(WorkRequest {
            cookie: u32::from(counter),
            operation,
            data,
            signaled: ctrl.signaled(),
            solicited: ctrl.solicited(),
            fence: ctrl.fence(),
            datagram,
        })
    }
}

impl SendQueue for Sq {
    #[inline]
    fn next(&mut self, memory: &DotView<'_>, regions: &Regions) -> Next<WorkRequest> {
        let posted = match self.ring.head(memory) {
            Head::Entry(posted) => posted,
            Head::Empty => return Next::Empty,
            Head::Unreadable => return Next::Unreadable,
            Head::Bad(counter) => return Next::Bad(u32::from(counter)),
        };
        let request = match posted.first.get(..posted.len) {
            Some(wqe) => self.parse(posted.counter, wqe, memory, regions),
            None => match self.long(&posted, memory, regions) {
                Ok(request) => request,
                Err(NotMapped) => return Next::Unreadable,
            },
        };
        self.ring.advance(&posted);
        request.map_or(Next::Bad(u32::from(posted.counter)), Next::Entry)
    }

    fn reset(&mut self) {
        self.ring.reset();
    }

    #[inline]
    fn position(&self) -> u16 {
        self.ring.position()
    }

    fn seek(&mut self, position: u16) {
        self.ring.seek(position);
    }
}

fn atomic(opcode: u8, bytes: &mut &[u8]) -> Option<Operation> {
    let raddr: Raddr = take(bytes)?;
    let atomic: Atomic = take(bytes)?;
    let (addr, key) = (raddr.addr.get(), MemKey(raddr.key.get()));
    Some(match opcode {
        opcode::ATOMIC_CS => Operation::CompareSwap {
            addr,
            key,
            compare: atomic.compare.get(),
            swap: atomic.swap_add.get(),
        },
        _ => Operation::FetchAdd {
            addr,
            key,
            add: atomic.swap_add.get(),
        },
    })
}

fn datagram(bytes: &mut &[u8]) -> Option<Datagram> {
    const GRH: u32 = 1 << 30;
    let av: BaseAv = take(bytes)?;
    let dqp = av.dqp.get();
    let rest: Option<AvRest> = match dqp & BaseAv::EXTENDED {
        0 => None,
        _ => Some(take(bytes)?),
    };
    let mac = rest.map_or([0; 6], |rest| rest.rmac);
    // RoCE has a GRH always; its drivers leave the bit that says so for InfiniBand clear.
    let grh = rest.filter(|rest| mac != [0; 6] || rest.grh_gid_fl.get() & GRH != 0);
    // Only Ethernet's have a MAC; they have a UDP port in the place of the LID.
    let (lid, service_level) = match mac {
        [0, 0, 0, 0, 0, 0] => (av.rlid.get(), av.stat_rate_sl & 0xf),
        _ => (0, av.stat_rate_sl >> 1 & 0x7),
    };
    Some(Datagram {
        to: Destination {
            lid,
            gid: grh.map(|grh| grh.rgid),
            mac,
        },
        qp: QpNum(dqp & 0xff_ffff),
        qkey: av.qkey.get(),
        source_gid: grh.map(|grh| (grh.grh_gid_fl.get() >> 20) as u8),
        traffic_class: grh.map_or(0, |grh| grh.tclass),
        hop_limit: grh.map_or(0, |grh| grh.hop_limit),
        service_level,
    })
}

/// The inline and data segments that make up the rest of an entry; inline ones come first.
#[inline]
fn data(bytes: &mut &[u8]) -> Option<Data> {
    let inline = bytes.first().is_some_and(|first| first & 0x80 != 0);
    if inline {
        return inline_data(bytes);
    }
    gather(bytes).map(Data::Gather)
}

#[inline]
fn gather(bytes: &mut &[u8]) -> Option<Sges> {
    let mut sges = Sges::new();
    while !bytes.is_empty() {
        let seg: DataSeg = take(bytes)?;
        let (count, key) = (seg.count.get(), seg.key.get());
        if count & INLINE != 0 {
            return None;
        }
        if count == 0 && key == LIST_END {
            break;
        }
        if count == 0 {
            continue;
        }
        if sges.len() == MAX_SGE {
            return None;
        }
        sges.push(Sge {
            key: MemKey(key),
            addr: seg.addr.get(),
            len: count,
        });
    }
    Some(sges)
}

fn inline_data(bytes: &mut &[u8]) -> Option<Data> {
    let mut data = SmallVec::new();
    while let Some((count, rest)) = bytes.split_first_chunk::<4>() {
        let count = u32::from_be_bytes(*count);
        if count & INLINE == 0 {
            let (inline, sges) = (data, gather(bytes)?);
            return Some(Data::Mixed(Box::new(Mixed { inline, sges })));
        }
        let len = (count & INLINE_COUNT) as usize;
        data.extend_from_slice(rest.get(..len)?);
        // Segments are padded to whole units.
        *bytes = bytes.get((len + 4).next_multiple_of(DS)..)?;
    }
    Some(Data::Inline(data))
}
