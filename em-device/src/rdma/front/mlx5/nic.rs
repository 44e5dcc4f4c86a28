//! The network interface's objects as data: what the driver's commands made, for the frame data path
//! to work from.

use super::buffer::QueueBuffer;
use super::command::Status;
use super::doorbells::MAX_NUMBER;
use super::ether::EtherCounters;
use super::pages::Charge;
use super::table::Table;
use std::collections::HashSet;

/// Send queues have numbers from here on; queue pairs those below.
pub(crate) const FIRST_SQ: u32 = MAX_NUMBER - (1 << 12);
/// Other objects of the interface of one kind.
const MAX_OBJECTS: u32 = 1 << 12;
/// Entries of all flow tables at most.
pub(crate) const MAX_FLOW_ENTRIES: usize = 1 << 14;

/// State of a send or receive queue (`MLX5_SQC_STATE_*`, `MLX5_RQC_STATE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueState {
    /// New: nothing is taken from it.
    Reset,
    /// At work.
    Ready,
    /// What is posted to a send queue is flushed; nothing is taken from a receive queue.
    Error,
}

impl QueueState {
    /// By its code.
    pub(crate) fn of(code: u32) -> Result<Self, Status> {
        match code {
            0 => Ok(Self::Reset),
            1 => Ok(Self::Ready),
            3 => Ok(Self::Error),
            _ => Err(Status::BadParameter),
        }
    }

    /// Its code.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Reset => 0,
            Self::Ready => 1,
            Self::Error => 3,
        }
    }
}

/// A ring in guest memory (`wq`).
#[derive(Debug, Clone)]
pub struct WorkQueue {
    /// Its memory.
    pub buffer: QueueBuffer,
    /// log₂ of its entries, at most 15.
    pub log_size: u8,
    /// log₂ of an entry's bytes, 4 to 12.
    pub log_stride: u8,
    /// Bus address of the doorbell record.
    pub doorbell: u64,
    /// Protection domain.
    pub pd: u32,
}

/// A send queue (`sqc`).
#[derive(Debug)]
pub struct SendQueue {
    /// Its ring: entries are in blocks of 64 bytes.
    pub queue: WorkQueue,
    /// Where sends complete.
    pub cqn: u32,
    /// Goes into its completions.
    pub user_index: u32,
    /// State.
    pub state: QueueState,
    /// Transport interface, if it has one: queues without are for the driver's own signals.
    pub tisn: Option<u32>,
    pub(crate) context: Vec<u8>,
    pub(crate) _charge: Charge,
}

/// A receive queue (`rqc`).
#[derive(Debug)]
pub struct ReceiveQueue {
    /// Its ring.
    pub queue: WorkQueue,
    /// Where receives complete.
    pub cqn: u32,
    /// Goes into its completions.
    pub user_index: u32,
    /// State.
    pub state: QueueState,
    /// Whether VLAN tags are taken out of frames.
    pub strip_vlan: bool,
    /// Set of counters.
    pub counter_set: u8,
    pub(crate) context: Vec<u8>,
    pub(crate) _charge: Charge,
}

/// Where a transport interface for receives sends frames (`tirc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// To a receive queue.
    Direct(u32),
    /// By hash to one of a table of receive queues.
    Indirect(u32),
}

/// A transport interface for receives (`tirc`).
#[derive(Debug, Clone)]
pub struct Tir {
    /// Where to.
    pub dispatch: Dispatch,
    /// `rx_hash_fn`: 0 none, 1 inverted XOR, 2 Toeplitz.
    pub hash_fn: u8,
    /// `rx_hash_symmetric`.
    pub symmetric: bool,
    /// Toeplitz key.
    pub key: [u8; 40],
    /// `rx_hash_field_selector_outer`: L3 type, L4 type, selected fields.
    pub fields: u32,
    pub(crate) context: Vec<u8>,
}

/// A table of receive queues (`rqtc`).
#[derive(Debug, Clone, Default)]
pub struct Rqt {
    /// Numbers of receive queues, as many as a power of two; there may be no such queue any more.
    pub rqs: Vec<u32>,
    pub(crate) max: u32,
}

/// A flow table; what is in it does not count: frames go by destination and hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlowTable {
    pub(crate) log_size: u32,
    pub(crate) groups: u32,
}

/// Which frames the driver wants, and the settings beside it (`nic_vport_context`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicVport {
    /// The interface's own address.
    pub mac: [u8; 6],
    /// Bytes of payload that the driver set.
    pub mtu: u16,
    /// Unicast addresses that are wanted beside.
    pub unicast: Vec<[u8; 6]>,
    /// Multicast addresses that are wanted.
    pub multicast: Vec<[u8; 6]>,
    /// VLANs that are wanted.
    pub vlans: Vec<u16>,
    /// All unicast frames.
    pub promisc_uc: bool,
    /// All multicast frames.
    pub promisc_mc: bool,
    /// All frames.
    pub promisc_all: bool,
    /// RoCE is in use.
    pub roce_en: bool,
}

/// All objects of the interface.
#[derive(Debug)]
pub struct EtherState {
    pub(crate) sqs: Table<SendQueue>,
    pub(crate) rqs: Table<ReceiveQueue>,
    pub(crate) tirs: Table<Tir>,
    pub(crate) tises: Table<Vec<u8>>,
    pub(crate) rqts: Table<Rqt>,
    pub(crate) domains: Table<()>,
    pub(crate) q_counters: Table<()>,
    pub(crate) flow_tables: Table<FlowTable>,
    /// The table of each group.
    pub(crate) flow_groups: Table<u32>,
    /// Table and index.
    pub(crate) flow_entries: HashSet<(u32, u32)>,
    pub(crate) vport: NicVport,
    /// What is counted.
    pub counters: EtherCounters,
    revision: u64,
}

impl EtherState {
    /// No objects; the interface has this address and payload size.
    pub(crate) fn new(mac: [u8; 6], mtu: u16) -> Self {
        let objects = || (1, MAX_OBJECTS);
        fn table<T>((first, end): (u32, u32)) -> Table<T> {
            Table::new(first, end)
        }
        Self {
            sqs: Table::new(FIRST_SQ, MAX_NUMBER),
            rqs: table(objects()),
            tirs: table(objects()),
            tises: table(objects()),
            rqts: table(objects()),
            domains: table(objects()),
            q_counters: Table::new(1, 256),
            flow_tables: table(objects()),
            flow_groups: table(objects()),
            flow_entries: HashSet::new(),
            vport: NicVport {
                mac,
                mtu,
                unicast: Vec::new(),
                multicast: Vec::new(),
                vlans: Vec::new(),
                promisc_uc: false,
                promisc_mc: false,
                promisc_all: false,
                roce_en: false,
            },
            counters: EtherCounters::default(),
            revision: 0,
        }
    }

    /// Changes with every change of a queue, of where frames go or of the filter.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Counters and revision go on over a teardown.
    pub(crate) fn go_on_from(&mut self, counters: EtherCounters, revision: u64) {
        self.counters = counters;
        self.revision = revision.wrapping_add(1);
    }

    /// Something changed.
    pub(crate) fn changed(&mut self) {
        self.revision = self.revision.wrapping_add(1);
    }

    /// All send queues by number, in no order.
    pub fn send_queues(&self) -> impl Iterator<Item = (u32, &SendQueue)> {
        self.sqs.iter()
    }

    /// A send queue.
    pub fn send_queue(&self, number: u32) -> Option<&SendQueue> {
        self.sqs.get(number).ok()
    }

    /// A receive queue.
    pub fn receive_queue(&self, number: u32) -> Option<&ReceiveQueue> {
        self.rqs.get(number).ok()
    }

    /// Whether a queue completes to this completion queue.
    pub fn uses_cq(&self, cqn: u32) -> bool {
        let mut sends = self.send_queues();
        sends.any(|(_, sq)| sq.cqn == cqn) || self.receive_queues().any(|(_, rq)| rq.cqn == cqn)
    }

    /// All receive queues by number, in no order.
    pub fn receive_queues(&self) -> impl Iterator<Item = (u32, &ReceiveQueue)> {
        self.rqs.iter()
    }

    /// All transport interfaces for receives by number, in no order.
    pub fn tirs(&self) -> impl Iterator<Item = (u32, &Tir)> {
        self.tirs.iter()
    }

    /// A table of receive queues.
    pub fn rqt(&self, number: u32) -> Option<&Rqt> {
        self.rqts.get(number).ok()
    }

    /// The filter and its settings.
    pub fn vport(&self) -> &NicVport {
        &self.vport
    }
}
