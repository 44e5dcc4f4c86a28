//! A hostile VMM: messages of any content, with and without descriptors, to the vfio-user server.

#![no_main]

use arbitrary::Arbitrary;
use dot_iommu::DotTable;
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use smartep::config::{BarKind, BarSpec, Capability, ConfigBuilder, ConfigState};
use smartep::dma::MessageDma;
use smartep::function::{FunctionInfo, RegionInfo};
use smartep::irq::Irqs;
use smartep::model::LocalControl;
use smartep::route::RouteTable;
use smartep::server::{Server, StopFd};
use smartep::{CONFIG_REGION, DataSide};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const BAR: u64 = 0x4000;
const VECTORS: u16 = 4;
const VERSION: &[u8] = b"\0\0\0\0{\"capabilities\": {\"max_msg_fds\": 8}}\0";

#[derive(Debug, Arbitrary)]
enum Message {
    /// A header that fits its payload.
    Whole {
        command: u8,
        flags: u8,
        payload: Vec<u8>,
        fds: u8,
    },
    /// An access to a region: command 9 reads, 10 writes.
    Access {
        write: bool,
        offset: u16,
        region: u8,
        data: Vec<u8>,
    },
    /// A range of memory, with a descriptor.
    Map {
        flags: u8,
        offset: u16,
        address: u16,
        size: u16,
    },
    Unmap {
        flags: u8,
        address: u16,
        size: u16,
    },
    /// Any bytes.
    Raw {
        bytes: Vec<u8>,
    },
}

/// Memory in which accesses must stay.
struct Bar;

impl DataSide for Bar {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        assert!(region == 0 && offset + data.len() as u64 <= BAR);
        data.fill(0xd1);
    }
    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        assert!(region == 0 && offset + data.len() as u64 <= BAR);
    }
    fn config_changed(&self, _: ConfigState, _: ConfigState) {}
    fn reset(&self) {}
    fn connected(&self, _: Arc<MessageDma>) {}
    fn disconnected(&self) {}
}

fn server() -> Server {
    let regions = vec![
        RegionInfo::trapped(0, BAR),
        RegionInfo::trapped(CONFIG_REGION, 4096),
    ];
    let info = FunctionInfo::new(regions, RouteTable::new(vec![]).unwrap(), VECTORS).unwrap();
    let bar = BarSpec {
        size: BAR,
        kind: BarKind::Mem64,
        prefetchable: false,
    };
    let msix = Capability::MsiX {
        vectors: VECTORS,
        table_bar: 0,
        table_offset: 0x1000,
        pba_bar: 0,
        pba_offset: 0x1800,
    };
    let config = ConfigBuilder {
        vendor: 0x1af4,
        device: 0x1041,
        bars: [Some(bar), None, None, None, None, None],
        capabilities: vec![Capability::PciExpress, Capability::PowerManagement, msix],
        ..Default::default()
    };
    let control = LocalControl::new(config.build().unwrap(), vec![], None);
    Server::new(
        info,
        Arc::new(DotTable::new()),
        Irqs::new(VECTORS),
        Box::new(control),
        Arc::new(Bar),
    )
}

fn file() -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 0x10_0000).unwrap();
    fd
}

fn whole(number: usize, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (number as u16).to_le_bytes().to_vec();
    bytes.extend(command.to_le_bytes());
    bytes.extend((16 + payload.len() as u32).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(payload);
    bytes
}

impl Message {
    /// Bytes and number of descriptors.
    fn encode(self, number: usize) -> (Vec<u8>, usize) {
        match self {
            Self::Whole {
                command,
                flags,
                payload,
                fds,
            } => (
                whole(number, command.into(), flags.into(), &payload),
                usize::from(fds % 4),
            ),
            Self::Access {
                write,
                offset,
                region,
                data,
            } => {
                let mut payload = u64::from(offset).to_le_bytes().to_vec();
                payload.extend(u32::from(region % 9).to_le_bytes());
                payload.extend((data.len() as u32).to_le_bytes());
                if write {
                    payload.extend(data);
                }
                (whole(number, if write { 10 } else { 9 }, 0, &payload), 0)
            }
            Self::Map {
                flags,
                offset,
                address,
                size,
            } => {
                let page = |n: u16| (u64::from(n) << 12).to_le_bytes();
                let mut payload = 32u32.to_le_bytes().to_vec();
                payload.extend(u32::from(flags & 7).to_le_bytes());
                for value in [offset % 0x200, address, size % 0x200] {
                    payload.extend(page(value));
                }
                (whole(number, 2, 0, &payload), 1)
            }
            Self::Unmap {
                flags,
                address,
                size,
            } => {
                let mut payload = 24u32.to_le_bytes().to_vec();
                payload.extend(u32::from(flags & 3).to_le_bytes());
                for value in [address, size] {
                    payload.extend((u64::from(value) << 12).to_le_bytes());
                }
                (whole(number, 3, 0, &payload), 0)
            }
            Self::Raw { bytes } => (bytes, 0),
        }
    }
}

/// `false` when the server has hung up.
fn send(stream: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) -> bool {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let flags = SendFlags::NOSIGNAL;
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags);
    match sent {
        Ok(sent) if sent < bytes.len() => (&*stream).write_all(&bytes[sent..]).is_ok(),
        Ok(_) => true,
        Err(_) => false,
    }
}

fuzz_target!(|input: (bool, Vec<Message>)| {
    let (negotiate, messages) = input;
    let (own, stream) = UnixStream::pair().unwrap();
    // The server's replies are read meanwhile, or it would wait for room.
    let mut replies = own.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while replies.read(&mut bytes).is_ok_and(|n| n != 0) {}
    });
    let writer = std::thread::spawn(move || {
        let mut open = !negotiate || send(&own, &whole(0, 1, 0, VERSION), &[]);
        for (number, message) in (1..).zip(messages) {
            let (bytes, fds) = message.encode(number);
            let fds: Vec<_> = (0..fds).map(|_| file()).collect();
            open = open && (bytes.is_empty() || send(&own, &bytes, &fds));
        }
        let _ = own.shutdown(Shutdown::Write);
    });
    // However it ends: not by a panic, and not never.
    let _ = server().serve(stream, &StopFd::new().unwrap());
    writer.join().unwrap();
    reader.join().unwrap();
});
