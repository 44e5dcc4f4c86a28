//! A function with a scratch BAR, its server on a thread, and a raw client.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use dot_iommu::{DotTable, HostMapping};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer};
use rustix::net::{SendAncillaryMessage, SendFlags};
use smartep::config::{BarKind, BarSpec, Capability, ConfigBuilder, ConfigState};
use smartep::dma::MessageDma;
use smartep::function::{FunctionInfo, RegionInfo, RegionMmap};
use smartep::irq::Irqs;
use smartep::model::{ControlRegisters, LocalControl};
use smartep::route::{Route, RouteTable, Side};
use smartep::server::{Server, StopFd};
use smartep::{CONFIG_REGION, DataSide};

pub const BAR0: usize = 0x4000;
pub const CONTROL_AT: u64 = 0x2000;
/// Where the window onto the BARs is in configuration space.
pub const WINDOW: u64 = 0xf0;
pub const VECTORS: u16 = 40;
pub const QEMU_VERSION: &str = r#"{"capabilities": {"pgsizes": 4096, "max_msg_fds": 16, "max_dma_maps": 65535, "max_data_xfer_size": 1048576, "migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "write_multiple": true}}"#;

/// Records what the server tells the data side.
#[derive(Default)]
pub struct Recorder {
    pub memory: Mutex<Vec<u8>>,
    pub calls: Mutex<Vec<String>>,
    pub dma: Mutex<Option<Arc<MessageDma>>>,
    /// Files that came, by number and size.
    pub came: Mutex<Vec<(u64, u64)>>,
    /// Files that went, by number.
    pub gone: Mutex<Vec<u64>>,
}

impl DataSide for Recorder {
    fn read(&self, _region: u32, offset: u64, data: &mut [u8]) {
        let memory = self.memory.lock().unwrap();
        let start = offset as usize;
        data.copy_from_slice(&memory[start..start + data.len()]);
    }

    fn write(&self, _region: u32, offset: u64, data: &[u8]) {
        let start = offset as usize;
        self.memory.lock().unwrap()[start..start + data.len()].copy_from_slice(data);
    }

    fn config_changed(&self, _old: ConfigState, new: ConfigState) {
        self.calls
            .lock()
            .unwrap()
            .push(format!("bus_master {}", new.bus_master));
    }

    fn reset(&self) {
        self.calls.lock().unwrap().push("reset".into());
    }

    fn connected(&self, dma: Arc<MessageDma>) {
        *self.dma.lock().unwrap() = Some(dma);
        self.calls.lock().unwrap().push("connected".into());
    }

    fn disconnected(&self) {
        self.calls.lock().unwrap().push("disconnected".into());
    }

    fn memory_added(&self, mapping: &Arc<HostMapping>, fd: BorrowedFd<'_>) {
        let size = rustix::fs::fstat(fd).unwrap().st_size as u64;
        assert_eq!(size, mapping.len());
        self.came.lock().unwrap().push((mapping.id(), size));
    }

    fn memory_removed(&self, gone: &[u64]) {
        self.gone.lock().unwrap().extend(gone);
    }
}

/// A served function; stops and joins when dropped.
pub struct Served {
    pub path: PathBuf,
    pub table: Arc<DotTable>,
    pub irqs: Arc<Irqs>,
    pub data: Arc<Recorder>,
    pub bar2: OwnedFd,
    pub stop: StopFd,
    thread: Option<std::thread::JoinHandle<()>>,
    _folder: tempfile::TempDir,
    _turn: Turn,
}

/// Tests that count the process's descriptors or memory have it for themselves, the others share it.
static TURNS: RwLock<()> = RwLock::new(());

enum Turn {
    Shared(#[allow(dead_code)] RwLockReadGuard<'static, ()>),
    Alone(#[allow(dead_code)] RwLockWriteGuard<'static, ()>),
}

/// [`serve_alone`], beside other tests.
pub fn serve() -> Served {
    let turn = TURNS.read().unwrap_or_else(PoisonError::into_inner);
    serve_in(Turn::Shared(turn))
}

/// Serves a function while no other test does.
pub fn serve_alone() -> Served {
    let turn = TURNS.write().unwrap_or_else(PoisonError::into_inner);
    serve_in(Turn::Alone(turn))
}

/// BAR0 is trapped, with control registers at [`CONTROL_AT`]; BAR2 can be mapped but for its second page.
fn serve_in(turn: Turn) -> Served {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (table, irqs) = (Arc::new(DotTable::new()), Irqs::new(VECTORS));
    let data = Arc::new(Recorder {
        memory: Mutex::new(vec![0; 0x8000]),
        ..Default::default()
    });
    let bar2 = HostFile::new(0x8000).0;
    let mut server = Server::new(
        function(&bar2),
        table.clone(),
        irqs.clone(),
        Box::new(control()),
        data.clone(),
    );
    let stop = StopFd::new().unwrap();
    let thread = std::thread::spawn({
        let stop = stop.clone();
        move || server.run(&listener, &stop).unwrap()
    });
    Served {
        path,
        table,
        irqs,
        data,
        bar2,
        stop,
        thread: Some(thread),
        _folder: folder,
        _turn: turn,
    }
}

fn function(bar2: &OwnedFd) -> FunctionInfo {
    let mmap = RegionMmap {
        fd: bar2.try_clone().unwrap(),
        offset: 0,
        areas: vec![(0, 0x1000), (0x2000, 0x6000)],
    };
    let regions = vec![
        RegionInfo::trapped(0, BAR0 as u64),
        RegionInfo {
            mmap: Some(mmap),
            ..RegionInfo::trapped(2, 0x8000)
        },
        RegionInfo::trapped(CONFIG_REGION, 4096),
    ];
    let route = Route {
        region: 0,
        start: CONTROL_AT,
        end: CONTROL_AT + 0x1000,
        side: Side::Control,
    };
    FunctionInfo::new(regions, RouteTable::new(vec![route]).unwrap(), VECTORS)
        .unwrap()
        .with_window(WINDOW)
}

fn control() -> LocalControl {
    let bar = |size| {
        Some(BarSpec {
            size,
            kind: BarKind::Mem64,
            prefetchable: false,
        })
    };
    let msix = Capability::MsiX {
        vectors: VECTORS,
        table_bar: 2,
        table_offset: 0x1000,
        pba_bar: 2,
        pba_offset: 0x1800,
    };
    let config = ConfigBuilder {
        vendor: 0x1af4,
        device: 0x1041,
        bars: [bar(BAR0 as u64), None, bar(0x8000), None, None, None],
        capabilities: vec![Capability::PciExpress, Capability::PowerManagement, msix],
        ..Default::default()
    };
    let registers = ControlRegisters {
        region: 0,
        offset: CONTROL_AT,
        bytes: vec![0xc0; 16],
    };
    LocalControl::new(config.build().unwrap(), vec![registers], None)
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Served {
    /// A client that negotiated.
    pub fn client(&self) -> Raw {
        let mut raw = self.raw();
        let reply = raw.call(1, &[&[0; 4], QEMU_VERSION.as_bytes(), &[0]].concat());
        assert_eq!(reply.error, None);
        raw
    }

    /// A client that said nothing yet.
    pub fn raw(&self) -> Raw {
        Raw::new(UnixStream::connect(&self.path).unwrap())
    }

    /// Waits until `ready`, for what the server does on its own thread.
    pub fn until(&self, what: &str, ready: impl Fn() -> bool) {
        for _ in 0..2000 {
            if ready() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{what} did not happen");
    }
}

/// A reply as a client sees it.
#[derive(Debug)]
pub struct Reply {
    pub id: u16,
    pub command: u16,
    pub is_command: bool,
    /// Bytes of the whole message.
    pub size: usize,
    pub error: Option<u32>,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Reply {
    pub fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.body[at..at + 4].try_into().unwrap())
    }

    pub fn long(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.body[at..at + 8].try_into().unwrap())
    }
}

/// A client that sends what it is told.
pub struct Raw {
    pub stream: UnixStream,
    id: u16,
}

pub fn header(id: u16, command: u16, size: usize, flags: u32) -> Vec<u8> {
    [
        &id.to_le_bytes()[..],
        &command.to_le_bytes(),
        &(size as u32).to_le_bytes(),
        &flags.to_le_bytes(),
        &[0; 4],
    ]
    .concat()
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

pub fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    [
        &offset.to_le_bytes()[..],
        &region.to_le_bytes(),
        &count.to_le_bytes(),
    ]
    .concat()
}

impl Raw {
    pub fn new(stream: UnixStream) -> Self {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream
            .set_write_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self { stream, id: 100 }
    }

    pub fn send(&mut self, command: u16, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> u16 {
        self.id = self.id.wrapping_add(1);
        let message = [&header(self.id, command, 16 + body.len(), flags)[..], body].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let iov = [IoSlice::new(&message)];
        let sent = rustix::net::sendmsg(&self.stream, &iov, &mut ancillary, SendFlags::NOSIGNAL);
        let sent = sent.unwrap();
        self.stream.write_all(&message[sent..]).unwrap();
        self.id
    }

    pub fn receive(&mut self) -> std::io::Result<Reply> {
        let mut head = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [std::io::IoSliceMut::new(&mut head)];
        let got = rustix::net::recvmsg(&self.stream, &mut iov, &mut ancillary, RecvFlags::empty())?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.bytes == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.stream.read_exact(&mut head[got.bytes..])?;
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
        let mut body = vec![0; word(4) as usize - 16];
        self.stream.read_exact(&mut body)?;
        Ok(Reply {
            id: word(0) as u16,
            command: (word(0) >> 16) as u16,
            is_command: word(8) & 15 == 0,
            size: word(4) as usize,
            error: (word(8) & 32 != 0).then(|| word(12)),
            body,
            fds,
        })
    }

    pub fn call_with(&mut self, command: u16, body: &[u8], fds: &[BorrowedFd<'_>]) -> Reply {
        let id = self.send(command, 0, body, fds);
        let reply = self.receive().unwrap();
        assert_eq!(
            (reply.id, reply.command, reply.is_command),
            (id, command, false)
        );
        reply
    }

    pub fn call(&mut self, command: u16, body: &[u8]) -> Reply {
        self.call_with(command, body, &[])
    }

    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let reply = self.call(9, &access(region, offset, count));
        assert_eq!((reply.error, reply.size), (None, 32 + count as usize));
        reply.body[16..].to_vec()
    }

    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Reply {
        let body = [&access(region, offset, data.len() as u32)[..], data].concat();
        self.call(10, &body)
    }

    pub fn map(&mut self, address: u64, size: u64, fd: Option<(&OwnedFd, u64)>) -> Option<u32> {
        let offset = fd.map_or(0, |f| f.1);
        let body = [
            &words(&[32, 3])[..],
            &offset.to_le_bytes(),
            &address.to_le_bytes(),
            &size.to_le_bytes(),
        ]
        .concat();
        let fds: Vec<_> = fd.iter().map(|f| f.0.as_fd()).collect();
        self.call_with(2, &body, &fds).error
    }

    pub fn unmap(&mut self, address: u64, size: u64, flags: u32) -> Reply {
        let body = [
            &words(&[24, flags])[..],
            &address.to_le_bytes(),
            &size.to_le_bytes(),
        ]
        .concat();
        self.call(3, &body)
    }

    /// The server closed the connection.
    pub fn closed(mut self) -> bool {
        loop {
            match self.receive() {
                Ok(_) => {}
                Err(e) => {
                    return !matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    );
                }
            }
        }
    }
}

/// A memfd.
pub struct HostFile(pub OwnedFd);

impl HostFile {
    pub fn new(size: u64) -> Self {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        Self(fd)
    }
}

pub fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
