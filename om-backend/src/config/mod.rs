//! The configuration file: which EMs there are, which functions they have, and what joins them.
//!
//! Start from [`Config::load`]. A [`Config`] in hand has been checked: names and MAC addresses are
//! unique, networks exist, values are in range. What only the running system can tell (a socket in
//! use, a missing program) is not checked here.

mod error;
mod function;
mod parse;
mod reader;
mod remote;
#[cfg(test)]
mod tests;
mod values;

pub use error::ConfigError;
pub use values::{IpPrefix, MacAddress};

use m2m_fabric::remote::Files;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Longest path of a unix socket in bytes (`sockaddr_un` without the final NUL).
pub const MAX_SOCKET_PATH: usize = 107;

/// A whole DPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Folder of the sockets and the EMs' logs.
    pub run_dir: PathBuf,
    /// Program of the EMs; `em` beside the OM's own program when not given.
    pub em_binary: Option<PathBuf>,
    /// Where EMs of other hosts connect to, if there may be any.
    pub remote: Option<RemoteConfig>,
    /// Networks by name.
    pub networks: Vec<String>,
    /// The EMs; at least one.
    pub ems: Vec<EmConfig>,
}

/// Where EMs of other hosts connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Address and port.
    pub listen: SocketAddr,
    /// What the OM proves who it is with, and verifies EMs.
    pub files: Files,
}

/// One EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmConfig {
    /// Unique name.
    pub name: String,
    /// Whether the OM starts and restarts it; otherwise somebody else does.
    pub managed: bool,
    /// Whether it is on another host; then it is not managed.
    pub remote: bool,
    /// What it serves; at least one.
    pub functions: Vec<FunctionConfig>,
}

/// One PCIe function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionConfig {
    /// Unique name.
    pub name: String,
    /// What it is to its driver.
    pub kind: FunctionKind,
    /// The VM that has it, by a name of the file's own: functions of one VM reach each other's memory.
    pub vm: Option<String>,
    /// Permanent MAC address, unicast and unique but for that of a function of kind `erdma`, which is that of a
    /// virtio network function of its guest; all zeroes for a memory function, which has none.
    pub mac: MacAddress,
    /// Address that its guest takes, for people and for scripts that set guests up; the DPU does not
    /// use it.
    pub ip: Option<IpPrefix>,
    /// Largest payload of an Ethernet frame in bytes, 68 to 9000; 0 for a memory function.
    pub mtu: u16,
    /// Where the VMM connects, or listens if [`Self::dials`], at most [`MAX_SOCKET_PATH`] bytes.
    pub socket: PathBuf,
    /// Where its frames go.
    pub attachment: Attachment,
    /// Copy of its frames as a pcap file.
    pub capture: Option<PathBuf>,
    /// Whether the administrator lets the link be up at start.
    pub link_up: bool,
}

/// What a function is to its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionKind {
    /// virtio network device.
    VirtioNet(NetConfig),
    /// RDMA device; it is always in a network.
    Rdma(RdmaConfig),
    /// Memory behind a BAR; it is in no network.
    Memory(MemoryConfig),
}

/// What only a memory function has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Bytes of its BAR, a power of two from 1 MiB to 1 TiB.
    pub bytes: u64,
}

/// What only a virtio network device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetConfig {
    /// Receive/transmit pairs, 1 to 32.
    pub queue_pairs: u16,
    /// Entries of a queue, a power of two from 16 to 32768.
    pub queue_size: u16,
    /// Speed shown to the driver in Mbit/s.
    pub speed_mbps: Option<u32>,
    /// What a VMM sees.
    pub face: Face,
}

/// What a VMM sees of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// A PCIe function, over vfio-user.
    VfioUser,
    /// Virtqueues, over vhost-user.
    VhostUser(VhostMode),
}

/// Who makes the socket of a vhost-user function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VhostMode {
    /// The DPU, and the front end connects.
    Server,
    /// The front end, and the EM connects.
    Client,
}

impl Face {
    /// The word in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::VfioUser => "vfio-user",
            Self::VhostUser(_) => "vhost-user",
        }
    }
}

/// What only an RDMA device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Whose driver it is for.
    pub face: RdmaFace,
    /// What its port is attached to: Ethernet unless the file says otherwise.
    pub link_type: LinkType,
    /// Whether the VMM may map the doorbell pages: it may unless the file says otherwise.
    pub mapped_doorbells: bool,
}

/// Whose driver an RDMA device is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RdmaFace {
    /// The drivers of the ConnectX family.
    Mlx5,
    /// The `erdma` driver. The device has no network interface of its own: its driver looks for the one of a
    /// virtio network function with the same MAC address.
    Erdma,
}

/// What an RDMA port is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkType {
    /// RoCEv2; frames of its network interface reach the other Ethernet functions of the network.
    Ethernet,
    /// InfiniBand, with the OM as subnet manager.
    Infiniband,
}

impl LinkType {
    /// The word in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ethernet => "ethernet",
            Self::Infiniband => "infiniband",
        }
    }
}

impl FunctionKind {
    /// The word in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::VirtioNet(_) => "virtio-net",
            Self::Rdma(rdma) => match rdma.face {
                RdmaFace::Mlx5 => "rdma",
                RdmaFace::Erdma => "erdma",
            },
            Self::Memory(_) => "memory",
        }
    }

    /// What only an RDMA device has.
    pub fn rdma(&self) -> Option<&RdmaConfig> {
        match self {
            Self::VirtioNet(_) | Self::Memory(_) => None,
            Self::Rdma(rdma) => Some(rdma),
        }
    }

    /// What only a memory function has.
    pub fn memory(&self) -> Option<&MemoryConfig> {
        match self {
            Self::VirtioNet(_) | Self::Rdma(_) => None,
            Self::Memory(memory) => Some(memory),
        }
    }

    /// Whether it sends and receives Ethernet frames.
    pub fn has_frames(&self) -> bool {
        match self {
            Self::VirtioNet(_) => true,
            Self::Rdma(rdma) => rdma.face == RdmaFace::Mlx5 && rdma.link_type == LinkType::Ethernet,
            Self::Memory(_) => false,
        }
    }
}

/// Where a function's frames go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attachment {
    /// To the other functions of a network.
    Network(String),
    /// To a TAP interface of the host, by name.
    Tap(String),
    /// Back.
    Loopback,
    /// Nowhere.
    Null,
    /// It has none.
    None,
}

impl FunctionConfig {
    /// What a VMM sees of it.
    pub fn face(&self) -> Face {
        match &self.kind {
            FunctionKind::VirtioNet(net) => net.face,
            FunctionKind::Rdma(_) | FunctionKind::Memory(_) => Face::VfioUser,
        }
    }

    /// Whether its EM connects to the socket, instead of whoever uses the function.
    pub fn dials(&self) -> bool {
        self.face() == Face::VhostUser(VhostMode::Client)
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&path.to_string_lossy(), &text)
    }

    /// Checks the text of a file; `file` is its name in complaints.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        parse::parse(reader::Source { file, text })
    }

    /// Socket where the EMs reach the OM.
    pub fn m2m_socket(&self) -> PathBuf {
        self.run_dir.join("m2m.sock")
    }

    /// Socket where `dpuctl` reaches the OM.
    pub fn dpuctl_socket(&self) -> PathBuf {
        self.run_dir.join("dpuctl.sock")
    }
}
