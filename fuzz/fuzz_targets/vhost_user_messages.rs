//! A hostile vhost-user front end: requests of any content and order, with and without descriptors, rings that run
//! meanwhile, memory that goes away under them.
//!
//! The endpoint is one for all inputs, as an EM's is for its front ends. Each input begins with a connection of its own and
//! ends when the back end has closed that.

#![no_main]

use arbitrary::Arbitrary;
use dot_iommu::{Access, HostMapping, Perm};
use em_device::endpoint::{Belongings, Endpoint};
use em_device::net::links::Link;
use em_device::port::loopback::LoopbackPort;
use em_device::worker::Handle;
use libfuzzer_sys::fuzz_target;
use m2m_fabric::proto::{Face, FunctionKind, FunctionSpec, VirtioNetSpec, VirtioPciLayout, Window};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use smartep::config::ConfigState;
use smartep::shadow::{ShadowWindow, ShadowWriter};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Bytes of the memory that all ranges are parts of.
const BYTES: u64 = 0x2_0000;
/// Where the front end has its memory, and where its guest has it.
const USER: u64 = 0x7000_0000;
const GUEST: u64 = 0x10_0000;
const PAIRS: u16 = 2;
const SIZE: u16 = 16;
/// Bytes between two rings, which begin the memory.
const RING: u64 = 0x1000;

/// Requests (QEMU `docs/interop/vhost-user.rst`).
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const RESET_DEVICE: u32 = 34;
    pub const ADD_MEM_REG: u32 = 37;
}
/// Bytes of a header.
const HEADER: usize = 12;
/// Header flags: version 1; an answer is wanted.
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// `VIRTIO_F_VERSION_1`, `VIRTIO_F_RING_PACKED`, `VHOST_USER_F_PROTOCOL_FEATURES`, `VHOST_F_LOG_ALL`.
const VERSION_1: u64 = 1 << 32;
const PACKED: u64 = 1 << 34;
const PROTOCOL: u64 = 1 << 30;
const LOG_ALL: u64 = 1 << 26;
/// MQ, LOG_SHMFD, REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;

/// What goes along with a request.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Descriptor {
    Memory,
    Event,
    Pipe,
    Device,
}

/// A range of memory, in pages of 4 KiB.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Range {
    guest: u8,
    pages: u8,
    user: u8,
    offset: u8,
    /// Taken from each of the four as it is.
    skew: u8,
}

#[derive(Debug, Arbitrary)]
enum Action {
    /// Everything that two pairs of rings need to run.
    Run {
        packed: bool,
        log: bool,
    },
    Features {
        extra: u64,
        packed: bool,
        log: bool,
    },
    ProtocolFeatures {
        bits: u64,
    },
    Table {
        ranges: Vec<Range>,
    },
    /// One range comes or goes.
    Slot {
        remove: bool,
        range: Range,
    },
    Log {
        size: u32,
        offset: u16,
        with: Option<Descriptor>,
    },
    Size {
        ring: u8,
        size: u16,
    },
    Addresses {
        ring: u8,
        flags: u8,
        at: [u32; 3],
    },
    Base {
        ring: u8,
        position: u32,
    },
    Stop {
        ring: u8,
    },
    /// Kick, call and error.
    Eventfd {
        kind: u8,
        ring: u8,
        with: Option<Descriptor>,
    },
    Enable {
        ring: u8,
        value: u8,
    },
    Config {
        write: bool,
        at: u8,
        size: u8,
    },
    Reset {
        owner: bool,
    },
    /// Any request, its size as it is.
    Whole {
        request: u8,
        flags: u8,
        payload: Vec<u8>,
        with: Vec<Descriptor>,
    },
    /// Any bytes.
    Raw {
        bytes: Vec<u8>,
    },
    /// The driver writes.
    Write {
        at: u16,
        bytes: Vec<u8>,
    },
    /// All rings that were given the descriptor are notified.
    Notify,
    /// The front end leaves and another one comes, with the same memory.
    Again,
}

fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

impl Range {
    /// All of the memory.
    const ALL: Self = Self {
        guest: 0,
        pages: (BYTES >> 12) as u8,
        user: 0,
        offset: 0,
        skew: 0,
    };

    fn encode(self) -> Vec<u8> {
        let at = |n: u8| u64::from(n) << 12;
        let skew = |bit: u8| match self.skew & bit {
            0 => 0,
            bit => u64::from(bit).wrapping_neg(),
        };
        longs(&[
            (GUEST + at(self.guest)).wrapping_add(skew(1)),
            at(self.pages).wrapping_add(skew(2)),
            (USER + at(self.user)).wrapping_add(skew(4)),
            at(self.offset).wrapping_add(skew(8)),
        ])
    }
}

/// A front end.
struct FrontEnd<'a> {
    stream: UnixStream,
    memory: &'a OwnedFd,
    kick: &'a OwnedFd,
    /// GET_FEATURES that are not answered yet.
    asked: u32,
    /// Whether the back end sees where a request begins.
    framed: bool,
}

impl<'a> FrontEnd<'a> {
    fn connect(memory: &'a OwnedFd, kick: &'a OwnedFd) -> Self {
        let stream = UnixStream::connect_addr(&address()).unwrap();
        Self {
            stream,
            memory,
            kick,
            asked: 0,
            framed: true,
        }
    }

    fn descriptor(&self, kind: Descriptor) -> OwnedFd {
        match kind {
            Descriptor::Memory => self.memory.try_clone().unwrap(),
            Descriptor::Event => self.kick.try_clone().unwrap(),
            Descriptor::Pipe => rustix::pipe::pipe().unwrap().0,
            Descriptor::Device => std::fs::File::open("/dev/null").unwrap().into(),
        }
    }

    /// Sends one request and waits until it is done.
    fn tell(&mut self, request: u32, flags: u32, payload: &[u8], with: &[Descriptor]) {
        let mut bytes = words(&[request, flags, payload.len() as u32]);
        bytes.extend(payload);
        self.asked += u32::from(request == request::GET_FEATURES);
        if self.send(&bytes, with) {
            self.settle();
        }
    }

    fn send(&self, bytes: &[u8], with: &[Descriptor]) -> bool {
        let with = with.iter().take(16);
        let fds: Vec<_> = with.map(|kind| self.descriptor(*kind)).collect();
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        // A back end that waits for the rest of a request does not wait for room.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags);
        sent == Ok(bytes.len())
    }

    /// Waits until all requests are done, or the back end has closed.
    fn settle(&mut self) {
        if !self.framed || !self.send(&words(&[request::GET_FEATURES, VERSION, 0]), &[]) {
            return;
        }
        self.asked += 1;
        while self.asked != 0 {
            let mut header = [0; HEADER];
            if self.stream.read_exact(&mut header).is_err() {
                return;
            }
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let mut rest = vec![0; word(8) as usize];
            if self.stream.read_exact(&mut rest).is_err() {
                return;
            }
            self.asked -= u32::from(word(0) == request::GET_FEATURES);
        }
    }

    /// All that rings need to run.
    fn run(&mut self, packed: bool, log: bool) {
        let features = VERSION_1 | PROTOCOL | if packed { PACKED } else { 0 };
        let protocol = longs(&[PROTOCOL_FEATURES]);
        self.tell(request::SET_PROTOCOL_FEATURES, VERSION, &protocol, &[]);
        let features = features | if log { LOG_ALL } else { 0 };
        self.tell(request::SET_FEATURES, VERSION, &longs(&[features]), &[]);
        let table = [words(&[1, 0]), Range::ALL.encode()].concat();
        let memory = [Descriptor::Memory];
        self.tell(request::SET_MEM_TABLE, VERSION, &table, &memory);
        if log {
            self.tell(
                request::SET_LOG_BASE,
                VERSION,
                &longs(&[0x1000, 0x1_f000]),
                &memory,
            );
        }
        for ring in 0..2 * u32::from(PAIRS) {
            let at = USER + RING * u64::from(ring);
            let addresses = longs(&[at, at + 0x800, at + 0x400, 0]);
            let addresses = [words(&[ring, 0]), addresses].concat();
            self.tell(
                request::SET_VRING_NUM,
                VERSION,
                &words(&[ring, u32::from(SIZE)]),
                &[],
            );
            self.tell(request::SET_VRING_BASE, VERSION, &words(&[ring, 0]), &[]);
            self.tell(request::SET_VRING_ADDR, VERSION, &addresses, &[]);
            self.eventfd(0, ring as u8, Some(Descriptor::Event));
            self.eventfd(1, ring as u8, Some(Descriptor::Event));
            self.tell(request::SET_VRING_ENABLE, VERSION, &words(&[ring, 1]), &[]);
        }
    }

    fn eventfd(&mut self, kind: u8, ring: u8, with: Option<Descriptor>) {
        let none = u64::from(with.is_none()) << 8;
        let request = request::SET_VRING_KICK + u32::from(kind % 3);
        let number = longs(&[u64::from(ring) | none]);
        self.tell(request, VERSION, &number, with.as_slice());
    }

    /// Lets the back end come to its end.
    fn leave(self) {
        let mut stream = self.stream;
        let _ = stream.shutdown(Shutdown::Write);
        let mut bytes = [0; 4096];
        while stream.read(&mut bytes).is_ok_and(|n| n != 0) {}
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Run { packed, log } => self.run(packed, log),
            Action::Features { extra, packed, log } => {
                let base = VERSION_1 | PROTOCOL;
                let packed = if packed { PACKED } else { 0 };
                let log = if log { LOG_ALL } else { 0 };
                let features = longs(&[base ^ extra | packed | log]);
                self.tell(request::SET_FEATURES, VERSION, &features, &[]);
            }
            Action::ProtocolFeatures { bits } => {
                let bits = longs(&[bits & PROTOCOL_FEATURES]);
                self.tell(request::SET_PROTOCOL_FEATURES, VERSION, &bits, &[]);
            }
            Action::Table { ranges } => {
                let mut table = words(&[ranges.len() as u32, 0]);
                ranges.iter().for_each(|range| table.extend(range.encode()));
                let with = vec![Descriptor::Memory; ranges.len()];
                self.tell(request::SET_MEM_TABLE, VERSION | NEED_REPLY, &table, &with);
            }
            Action::Slot { remove, range } => {
                let slot = [longs(&[0]), range.encode()].concat();
                let request = request::ADD_MEM_REG + u32::from(remove);
                let with = [Descriptor::Memory];
                let with = if remove { &[][..] } else { &with };
                self.tell(request, VERSION | NEED_REPLY, &slot, with);
            }
            Action::Log { size, offset, with } => {
                let log = longs(&[size.into(), u64::from(offset) << 12]);
                self.tell(request::SET_LOG_BASE, VERSION, &log, with.as_slice());
            }
            Action::Size { ring, size } => {
                let size = words(&[ring.into(), size.into()]);
                self.tell(request::SET_VRING_NUM, VERSION, &size, &[]);
            }
            Action::Addresses { ring, flags, at } => {
                let at = at.map(|at| USER + u64::from(at));
                let addresses = longs(&[at[0], at[1], at[2], 0]);
                let addresses = [words(&[ring.into(), flags.into()]), addresses].concat();
                self.tell(request::SET_VRING_ADDR, VERSION, &addresses, &[]);
            }
            Action::Base { ring, position } => {
                let base = words(&[ring.into(), position]);
                self.tell(request::SET_VRING_BASE, VERSION, &base, &[]);
            }
            Action::Stop { ring } => {
                let ring = words(&[ring.into(), 0]);
                self.tell(request::GET_VRING_BASE, VERSION, &ring, &[]);
            }
            Action::Eventfd { kind, ring, with } => self.eventfd(kind, ring, with),
            Action::Enable { ring, value } => {
                let enable = words(&[ring.into(), u32::from(value % 3)]);
                self.tell(request::SET_VRING_ENABLE, VERSION, &enable, &[]);
            }
            Action::Config { write, at, size } => {
                let mut config = words(&[at.into(), size.into(), 0]);
                config.resize(12 + usize::from(size), 0x5a);
                let request = request::GET_CONFIG + u32::from(write);
                self.tell(request, VERSION, &config, &[]);
            }
            Action::Reset { owner } => {
                let request = match owner {
                    true => request::RESET_OWNER,
                    false => request::RESET_DEVICE,
                };
                self.tell(request, VERSION, &[], &[]);
            }
            Action::Whole {
                request,
                flags,
                payload,
                with,
            } => self.tell(request.into(), u32::from(flags) ^ VERSION, &payload, &with),
            Action::Raw { bytes } => {
                self.framed = false;
                self.send(&bytes, &[]);
            }
            Action::Notify | Action::Write { .. } | Action::Again => {}
        }
    }
}

fn address() -> SocketAddr {
    let name = format!("distdpu-fuzz-{}", std::process::id());
    SocketAddr::from_abstract_name(name).unwrap()
}

fn window(offset: u32) -> Window {
    Window { offset, len: 0x40 }
}

/// Serves front ends until the process ends.
fn serve() -> (Endpoint, Handle, ShadowWriter) {
    let layout = VirtioPciLayout {
        bar: 0,
        common: window(0),
        isr: window(0x1000),
        device: window(0x2000),
        notify: window(0x3000),
        notify_multiplier: 4,
    };
    let net = VirtioNetSpec {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        queue_pairs: PAIRS,
        queue_size: SIZE,
        layout,
        face: Face::VhostUser,
    };
    let spec = FunctionSpec {
        id: 0,
        name: "net0".into(),
        regions: vec![],
        control: vec![],
        msix_vectors: 0,
        socket: String::new(),
        kind: FunctionKind::VirtioNet(net),
    };
    let (mut writer, shadow) = ShadowWriter::new().unwrap();
    // Status: the link is up (virtio 1.3 §5.1.4).
    let config = [2, 0, 0, 0, 0, 1, 1, 0];
    let config = ShadowWindow {
        region: 0,
        offset: 0x2000,
        bytes: &config,
    };
    let published = writer.publish(&[0; 4096], &[config], ConfigState::default());
    published.unwrap();
    let belongings = Belongings {
        listener: UnixListener::bind_addr(&address()).unwrap().into(),
        shadow,
        keeper: None,
    };
    let worker = Handle::start(Duration::from_micros(50)).unwrap();
    let endpoint = Endpoint::start(spec, belongings, worker.clone(), Arc::default()).unwrap();
    worker.run(|state| {
        let function = state.functions.get_mut(&0).unwrap();
        let link = Link::new(1, Box::new(LoopbackPort::new(64)), None);
        function.links.add(link, false);
    });
    (endpoint, worker, writer)
}

fuzz_target!(|actions: Vec<Action>| {
    static SERVED: OnceLock<(Endpoint, Handle, ShadowWriter)> = OnceLock::new();
    let (_, worker, _) = SERVED.get_or_init(serve);
    let memory = HostMapping::memfd(BYTES).unwrap();
    let mapping = HostMapping::new(memory.as_fd(), 0, BYTES, Perm::RW).unwrap();
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let mut front = FrontEnd::connect(&memory, &kick);
    for action in actions {
        match action {
            Action::Write { at, bytes } => {
                let span = mapping.span(u64::from(at), bytes.len() as u64, Access::Write);
                if let Some(span) = span {
                    let _ = span.copy_from(&bytes);
                }
            }
            Action::Notify => {
                let _ = rustix::io::write(&kick, &1u64.to_ne_bytes());
                front.settle();
                worker.run(|_| ());
            }
            Action::Again => {
                front.leave();
                front = FrontEnd::connect(&memory, &kick);
            }
            other => front.act(other),
        }
    }
    front.leave();
    // The next one finds a function like the first one did.
    let mut next = FrontEnd::connect(&memory, &kick);
    next.settle();
    assert_eq!(next.asked, 0, "nobody answers");
    let running = worker.run(|state| state.functions.contains_key(&0));
    assert_eq!(running, Some(true), "the function left the data path");
    next.leave();
});
