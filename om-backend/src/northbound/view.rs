//! What answers contain. Fields are added, never renamed: scripts read them.

use crate::config::{Attachment, FunctionKind};
use crate::function::Function;
use m2m_fabric::proto::{FunctionStats, LinkStats, QueueStats};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// The OM and its EMs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the OM.
    pub version: String,
    /// Process id of the OM.
    pub pid: u32,
    /// Seconds since the OM started.
    pub uptime_s: f64,
    /// Folder of sockets and logs.
    pub run_dir: String,
    /// The EMs.
    pub ems: Vec<EmView>,
}

/// An EM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EmView {
    /// Its name.
    pub name: String,
    /// `up`, `starting`, `ending`, `restarting` or `away`.
    pub state: String,
    /// Its process, if known.
    pub pid: Option<u32>,
    /// Whether the OM starts it.
    pub managed: bool,
    /// Whether it is on another host.
    #[serde(default)]
    pub remote: bool,
    /// Where it connected from, if it is on another host.
    #[serde(default)]
    pub address: Option<String>,
    /// How often it was started again.
    pub restarts: u64,
    /// Seconds in this state.
    pub since_s: f64,
    /// Why it was last not up.
    pub reason: Option<String>,
    /// Names of its functions.
    pub functions: Vec<String>,
}

/// All functions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Functions {
    /// In the order of the configuration.
    pub functions: Vec<FunctionView>,
}

/// A function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionView {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
    /// Its EM.
    pub em: String,
    /// What it is.
    pub kind: String,
    /// `absent`, `waiting`, `connected`, `running` or `needs-reset`.
    pub state: String,
    /// Why its EM does not serve it.
    pub fault: Option<String>,
    /// `up` or `down`: what the guest sees.
    pub link: String,
    /// `up` or `down`: what the administrator wants.
    pub admin: String,
    /// Whether its wires work.
    pub carrier: bool,
    /// MAC address; empty for a memory function, which has none.
    pub mac: String,
    /// Address of the guest, as the file says.
    pub ip: Option<String>,
    /// Largest payload of a frame in bytes.
    pub mtu: u16,
    /// Receive/transmit pairs of a virtio network device.
    pub queue_pairs: Option<u16>,
    /// Entries of a queue of a virtio network device.
    pub queue_size: Option<u16>,
    /// Speed shown to the driver in Mbit/s.
    pub speed_mbps: Option<u32>,
    /// `vfio-user`, `vhost-user`, or `vhost-user client` where the EM connects.
    pub face: String,
    /// Where the VMM connects, or where the EM does.
    pub socket: String,
    /// Its network, if it is in one.
    pub network: Option<String>,
    /// Its port, if it is in no network: `loopback`, `null` or `tap NAME`.
    pub port: Option<String>,
    /// Its pcap file.
    pub capture: Option<String>,
    /// What only an RDMA device has.
    pub rdma: Option<RdmaView>,
    /// The VM that has it, as the file says.
    pub vm: Option<String>,
    /// What only a memory function has.
    pub memory: Option<MemoryView>,
}

/// What a memory function has beyond other functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryView {
    /// Bytes of its BAR.
    pub bytes: u64,
    /// Guest address where the RDMA functions of its VM reach it, hexadecimal; none while the guest keeps its memory
    /// from being decoded.
    pub window: Option<String>,
}

/// What an RDMA device has beyond other functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaView {
    /// `ethernet` or `infiniband`.
    pub link_type: String,
    /// GUID of node and port, 16 hexadecimal digits.
    pub guid: String,
    /// LID; none on Ethernet.
    pub lid: Option<u16>,
    /// GIDs in use, as IPv6 addresses in the order of their table.
    pub gids: Vec<String>,
    /// Whether the VMM may map the doorbell pages.
    pub mapped_doorbells: bool,
    /// Files of guest memory that it shares with those it may reach.
    pub shared_files: usize,
}

impl FunctionView {
    /// A function as it is now.
    pub fn new(function: &Function, em: String, carrier: bool, rdma: Option<RdmaView>) -> Self {
        let config = &function.config;
        let net = match &config.kind {
            FunctionKind::VirtioNet(net) => Some(net),
            FunctionKind::Rdma(_) | FunctionKind::Memory(_) => None,
        };
        let admin_up = function.admin_up.load(Ordering::Acquire);
        let word = |up| if up { "up" } else { "down" }.to_owned();
        let (network, port) = match &config.attachment {
            Attachment::Network(name) => (Some(name.clone()), None),
            Attachment::Tap(name) => (None, Some(format!("tap {name}"))),
            Attachment::Loopback => (None, Some("loopback".to_owned())),
            Attachment::Null => (None, Some("null".to_owned())),
            Attachment::None => (None, None),
        };
        Self {
            name: config.name.clone(),
            id: function.id(),
            em,
            kind: config.kind.as_str().to_owned(),
            state: function.life().as_str().to_owned(),
            fault: function.fault(),
            link: word(admin_up && carrier),
            admin: word(admin_up),
            carrier,
            mac: match config.mac.is_zero() {
                true => String::new(),
                false => config.mac.to_string(),
            },
            ip: config.ip.map(|ip| ip.to_string()),
            mtu: config.mtu,
            queue_pairs: net.map(|n| n.queue_pairs),
            queue_size: net.map(|n| n.queue_size),
            speed_mbps: net.and_then(|n| n.speed_mbps),
            face: match config.dials() {
                true => "vhost-user client".to_owned(),
                false => config.face().as_str().to_owned(),
            },
            socket: config.socket.to_string_lossy().into_owned(),
            network,
            port,
            capture: config
                .capture
                .as_ref()
                .map(|path| path.to_string_lossy().into_owned()),
            rdma,
            vm: config.vm.clone(),
            memory: config.kind.memory().map(|memory| MemoryView {
                bytes: memory.bytes,
                window: function.placed().map(|range| format!("{:#x}", range.start)),
            }),
        }
    }
}

/// The counters. They count from the start of each EM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// By EM.
    pub ems: Vec<EmCounters>,
    /// By function; those whose EM did not answer are missing.
    pub functions: Vec<FunctionCounters>,
    /// By end of a wire.
    pub links: Vec<LinkCounters>,
}

/// What an EM counts for itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EmCounters {
    /// Its name.
    pub name: String,
    /// Why there are no counters.
    pub error: Option<String>,
    /// Times the data path slept and was woken.
    pub wakeups: u64,
    /// Bursts of work.
    pub bursts: u64,
}

/// What is counted for a function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCounters {
    /// Its name.
    pub name: String,
    /// Its EM.
    pub em: String,
    /// Negotiated feature bits as hexadecimal digits; JSON numbers end at 2⁵³.
    pub features: String,
    /// Mapped ranges of guest memory.
    pub dma_ranges: u64,
    /// Mapped bytes of guest memory.
    pub dma_bytes: u64,
    /// By queue.
    pub queues: Vec<QueueStats>,
}

impl FunctionCounters {
    /// From what the EM says.
    pub fn new(name: String, em: String, stats: FunctionStats) -> Self {
        Self {
            name,
            em,
            features: format!("{:#x}", stats.features),
            dma_ranges: stats.dma_ranges,
            dma_bytes: stats.dma_bytes,
            queues: stats.queues,
        }
    }
}

/// What is counted for an end of a wire.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// Its EM.
    pub em: String,
    /// The counters.
    #[serde(flatten)]
    pub counters: LinkStats,
}

/// Everything the OM knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspect {
    /// The OM and its EMs.
    pub status: Status,
    /// The functions.
    pub functions: Vec<FunctionView>,
    /// What each function shows its guest, by name.
    pub presentation: BTreeMap<String, PresentationView>,
    /// The ends of the wires.
    pub wires: Vec<EndView>,
}

/// What a function shows its guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PresentationView {
    /// Sizes of its regions in bytes, by vfio index.
    pub regions: BTreeMap<u32, u64>,
    /// MSI-X vectors.
    pub msix_vectors: u16,
    /// Whether the guest lets it do DMA.
    pub bus_master: bool,
    /// Whether its BARs answer.
    pub memory: bool,
    /// Whether the guest uses MSI-X.
    pub msix_enabled: bool,
    /// The first 64 bytes of config space as hexadecimal digits.
    pub config_header: String,
}

/// An end of a wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndView {
    /// Its number.
    pub id: u32,
    /// Its function.
    pub function: String,
    /// The function at the other end, `port` or `capture`.
    pub to: String,
    /// `pending`, `attached` or `failed: …`.
    pub state: String,
}
