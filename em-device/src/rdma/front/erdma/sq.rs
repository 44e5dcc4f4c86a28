//! Send queues: rings of blocks of 32 bytes, of which an entry has one to four.

use super::bytes::{bits, u32_at, u64_at};
use super::cq::{cookie, opcode};
use super::memory::QueueMemory;
use super::mr;
use super::tables::{DmaKey, SharedTables};
use crate::rdma::front::buffer::{BadBuffer, NotMapped, Record};
use crate::rdma::verbs::{
    Data, Datagram, MemKey, Next, Operation, QpNum, RegionChange, Regions, Rights, SendQueue,
    Service, Sge, Sges, WorkRequest,
};
use dot_iommu::DotView;
use smallvec::SmallVec;

/// Bytes of a block.
pub(super) const BLOCK: u64 = 32;
/// Bytes of an entry at most.
const MAX_LEN: usize = 128;
/// log₂ of the blocks at most: indices have 16 bits.
const MAX_LOG_SIZE: u32 = 15;
/// Scatter/gather elements of an entry at most, and bytes of one.
const MAX_ELEMENTS: usize = 6;
const ELEMENT: usize = 16;
/// Bytes in the entry itself at most.
const MAX_INLINE: usize = 96;

/// A send queue to be made.
#[derive(Debug)]
pub(super) struct SqSetup {
    pub(super) memory: QueueMemory,
    /// log₂ of its blocks, 0 to 15.
    pub(super) log_size: u32,
    /// Bus address of its doorbell record.
    pub(super) record: u64,
    pub(super) service: Service,
    /// Of a kernel's queue pair, which may also change regions.
    pub(super) dma_key: Option<DmaKey>,
    /// Protection domain of the queue pair.
    pub(super) pd: u32,
    pub(super) tables: SharedTables,
}

/// See the module.
#[derive(Debug)]
pub struct Sq {
    setup: SqSetup,
    size: u16,
    record: Record,
    /// Whether its doorbell was seen since the last reset: what the record held before is of no account.
    rung: bool,
    consumer: u16,
    producer: u16,
}

/// The first word of an entry.
#[derive(Debug, Clone, Copy)]
struct Head(u64);

impl Head {
    /// Elements, or bytes in the entry.
    fn count(self) -> usize {
        (self.0 >> 56) as usize
    }

    fn blocks(self) -> u16 {
        (self.0 >> 52 & 7) as u16 + 1
    }

    fn opcode(self) -> u8 {
        (self.0 >> 27 & 31) as u8
    }

    fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 != 0
    }

    fn is_inline(self) -> bool {
        self.has(25)
    }
}

impl Sq {
    /// An empty queue.
    pub(super) fn new(mut setup: SqSetup) -> Result<Self, BadBuffer> {
        if setup.log_size > MAX_LOG_SIZE {
            return Err(BadBuffer::Size("number of blocks"));
        }
        let whole = setup.memory.buffer;
        setup.memory.buffer = whole.ring(BLOCK << setup.log_size)?;
        Ok(Self {
            size: 1 << setup.log_size,
            record: Record::new(setup.record)?,
            setup,
            rung: false,
            consumer: 0,
            producer: 0,
        })
    }

    /// Its doorbell was rung.
    pub(super) fn ring(&mut self) {
        self.rung = true;
    }

    fn take(
        &mut self,
        view: &DotView<'_>,
        regions: &Regions,
    ) -> Result<Next<WorkRequest>, NotMapped> {
        if !self.rung {
            return Ok(Next::Empty);
        }
        if self.producer == self.consumer {
            self.producer = self.record.load_whole(view)? as u16;
        }
        let index = self.consumer;
        let posted = self.producer.wrapping_sub(index);
        if posted == 0 {
            return Ok(Next::Empty);
        }
        let mut entry = [0; MAX_LEN];
        let slot = |index: u16| u64::from(index & (self.size - 1)) * BLOCK;
        let (first, rest) = entry.split_at_mut(BLOCK as usize);
        let buffer = &self.setup.memory.buffer;
        buffer.read(slot(index), first, view)?;
        let head = Head(u64_at(first, 0));
        let rest = rest.get_mut(..(usize::from(head.blocks()) - 1) * BLOCK as usize);
        let Some(rest) = rest.filter(|_| posted <= self.size && head.blocks() <= posted) else {
            // Where the next entry begins is not known.
            self.consumer = self.producer;
            return Ok(Next::Bad(cookie(index, head.opcode())));
        };
        if !rest.is_empty() {
            buffer.read(slot(index.wrapping_add(1)), rest, view)?;
        }
        self.consumer = index.wrapping_add(head.blocks());
        let len = usize::from(head.blocks()) * BLOCK as usize;
        let cookie = cookie(index, head.opcode());
        let request = entry
            .get(..len)
            .and_then(|wqe| self.parse(cookie, head, wqe, view, regions));
        Ok(request.map_or(Next::Bad(cookie), Next::Entry))
    }

    /// `None` when the entry makes no sense.
    fn parse(
        &self,
        cookie: u32,
        head: Head,
        wqe: &[u8],
        view: &DotView<'_>,
        regions: &Regions,
    ) -> Option<WorkRequest> {
        let code = head.opcode();
        let datagram = self.setup.service == Service::Ud;
        let sends = matches!(
            code,
            opcode::SEND | opcode::SEND_IMMEDIATE | opcode::SEND_INVALIDATE
        );
        if datagram && (!sends || code == opcode::SEND_INVALIDATE) {
            return None;
        }
        let address = u64_at(wqe, 20);
        // The bytes of immediate data are those of the wire.
        let immediate = || u32_at(wqe, 8).swap_bytes();
        let (operation, data) = match code {
            opcode::WRITE | opcode::WRITE_IMMEDIATE => {
                let operation = Operation::Write {
                    addr: address,
                    key: MemKey(u32_at(wqe, 16)),
                    immediate: (code == opcode::WRITE_IMMEDIATE).then(immediate),
                };
                (operation, self.data(head, wqe, 32)?)
            }
            _ if sends => {
                let operation = Operation::Send {
                    immediate: (code == opcode::SEND_IMMEDIATE).then(immediate),
                    invalidate: (code == opcode::SEND_INVALIDATE).then(|| MemKey(u32_at(wqe, 8))),
                };
                let behind = if datagram { 32 } else { 16 };
                (operation, self.data(head, wqe, behind)?)
            }
            opcode::READ | opcode::READ_INVALIDATE => {
                let operation = Operation::Read {
                    addr: u64_at(wqe, 32),
                    key: MemKey(u32_at(wqe, 44)),
                    invalidate: (code == opcode::READ_INVALIDATE).then(|| MemKey(u32_at(wqe, 8))),
                };
                let to = self.element(address, u32_at(wqe, 12), u32_at(wqe, 16));
                (operation, Data::Gather(to))
            }
            opcode::COMPARE_SWAP | opcode::FETCH_ADD => self.atomic(code, wqe)?,
            opcode::REGISTER | opcode::INVALIDATE if self.setup.dma_key.is_some() => {
                let change = match code {
                    opcode::REGISTER => self.register(wqe, view)?,
                    _ => invalidate(MemKey(u32_at(wqe, 20)), regions)?,
                };
                let nothing = Data::Gather(Sges::new());
                (Operation::Register(Box::new(change)), nothing)
            }
            _ => return None,
        };
        let datagram = match datagram {
            true => Some(self.datagram(wqe)?),
            false => None,
        };
        Some(WorkRequest {
            cookie,
            operation,
            data,
            signaled: head.has(22),
            solicited: head.has(23),
            fence: head.has(24),
            datagram,
        })
    }

    fn element(&self, addr: u64, len: u32, key: u32) -> Sges {
        let key = DmaKey::meant(self.setup.dma_key, MemKey(key));
        let mut sges = Sges::new();
        if len != 0 {
            sges.push(Sge { key, addr, len });
        }
        sges
    }

    /// What stands behind the first `at` bytes of an entry.
    fn data(&self, head: Head, wqe: &[u8], at: usize) -> Option<Data> {
        let rest = wqe.get(at..).unwrap_or_default();
        if head.is_inline() {
            let bytes = rest.get(..head.count())?;
            return (bytes.len() <= MAX_INLINE).then(|| Data::Inline(SmallVec::from_slice(bytes)));
        }
        if head.count() > MAX_ELEMENTS {
            return None;
        }
        let mut sges = Sges::new();
        for sge in rest.get(..head.count() * ELEMENT)?.chunks_exact(ELEMENT) {
            sges.extend(self.element(u64_at(sge, 0), u32_at(sge, 8), u32_at(sge, 12)));
        }
        Some(Data::Gather(sges))
    }

    fn atomic(&self, code: u8, wqe: &[u8]) -> Option<(Operation, Data)> {
        let (addr, key) = (u64_at(wqe, 32), MemKey(u32_at(wqe, 44)));
        let operand = u64_at(wqe, 16);
        let operation = match code {
            opcode::COMPARE_SWAP => Operation::CompareSwap {
                addr,
                key,
                compare: u64_at(wqe, 24),
                swap: operand,
            },
            _ => Operation::FetchAdd {
                addr,
                key,
                add: operand,
            },
        };
        let (len, key) = (u32_at(wqe, 56), u32_at(wqe, 60));
        let to = self.element(u64_at(wqe, 48), len, key);
        (len == 8).then_some((operation, Data::Gather(to)))
    }

    fn register(&self, wqe: &[u8], view: &DotView<'_>) -> Option<RegionChange> {
        let (stag, flags) = (u32_at(wqe, 20), u32_at(wqe, 24));
        let (start, len) = (u64_at(wqe, 8), u32_at(wqe, 16));
        let count = bits(flags, 12..=31) as usize;
        let inline = bits(flags, 6..=7) == 0;
        let listed = self
            .setup
            .tables
            .get()
            .page_tables
            .get(&(stag >> 8))
            .copied()?;
        let pages = match inline {
            true => {
                let bytes = wqe.get(32..)?.get(..8 * count)?;
                bytes.chunks_exact(8).map(|page| u64_at(page, 0)).collect()
            }
            false if count <= listed.count as usize => {
                super::bytes::read_list(listed.at, count, view)?
            }
            false => return None,
        };
        Some(RegionChange {
            key: MemKey(stag),
            variant: Some(stag as u8),
            pd: None,
            rights: Some(mr::rights(bits(flags, 1..=5)) | Rights::REMOTE_INVALIDATE),
            start: Some(start),
            len: Some(len.into()),
            translation: Some(mr::registered_pages(start, len.into(), pages)?),
            valid: true,
        })
    }

    fn datagram(&self, wqe: &[u8]) -> Option<Datagram> {
        let tables = self.setup.tables.get();
        let address = tables.addresses.get(&u32_at(wqe, 24))?;
        (address.pd == self.setup.pd).then_some(Datagram {
            to: address.to,
            qp: QpNum(bits(u32_at(wqe, 20), 0..=19)),
            qkey: u32_at(wqe, 16),
            source_gid: Some(address.source_gid),
            traffic_class: address.traffic_class,
            hop_limit: address.hop_limit,
            service_level: address.service_level,
        })
    }
}

/// Takes a key out of use.
fn invalidate(key: MemKey, regions: &Regions) -> Option<RegionChange> {
    let region = regions.get(key.0 >> 8)?;
    (region.key == key).then_some(RegionChange {
        key,
        variant: None,
        pd: None,
        rights: None,
        start: None,
        len: None,
        translation: None,
        valid: false,
    })
}

impl SendQueue for Sq {
    fn next(&mut self, memory: &DotView<'_>, regions: &Regions) -> Next<WorkRequest> {
        self.take(memory, regions).unwrap_or(Next::Unreadable)
    }

    fn reset(&mut self) {
        self.rung = false;
        self.consumer = 0;
        self.producer = 0;
    }

    fn position(&self) -> u16 {
        self.consumer
    }

    /// Doorbells of a queue that is taken over were rung.
    fn seek(&mut self, position: u16) {
        self.rung = true;
        self.consumer = position;
        self.producer = self.consumer;
    }
}
