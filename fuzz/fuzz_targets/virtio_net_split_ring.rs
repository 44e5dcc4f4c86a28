//! A hostile virtio-net driver: rings, descriptors and buffers of any content under the network device.

#![no_main]

use arbitrary::Arbitrary;
use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
use em_device::net::device::NetDevice;
use em_device::net::links::{Link, Links};
use em_device::port::loopback::LoopbackPort;
use em_device::virtio::common::QueueSetup;
use em_device::virtio::signals::Signals;
use libfuzzer_sys::fuzz_target;
use m2m_fabric::proto::{VirtioNetSpec, VirtioPciLayout, Window};
use smartep::irq::Irqs;
use std::sync::Arc;

/// First guest address; offsets of 16 bits reach all that is mapped and as much that is not.
const BASE: u64 = 0x10_0000;
const BYTES: u64 = 0x8000;
/// Receive, transmit, control.
const QUEUES: u64 = 3;
const SIZE: u16 = 16;
/// Bytes of a queue's rings; buffers lie behind all of them.
const RINGS: u64 = 0x1000;
const DATA: u64 = BASE + QUEUES * RINGS;
/// `VIRTIO_F_RING_PACKED`.
const PACKED: u64 = 1 << 34;
/// Rounds after which what was offered must be done.
const ROUNDS: usize = 10_000;

#[derive(Debug, Arbitrary)]
enum Action {
    /// Bytes anywhere.
    Write {
        at: u16,
        bytes: Vec<u8>,
    },
    /// A descriptor whose buffer is likely to be good.
    Describe {
        queue: u8,
        index: u8,
        at: u16,
        len: u16,
        flags: u8,
        next: u8,
    },
    /// Any descriptor.
    Raw {
        queue: u8,
        index: u8,
        bytes: [u8; 16],
    },
    /// A head in the available ring.
    Offer {
        queue: u8,
        head: u8,
    },
    /// An available index.
    Index {
        queue: u8,
        index: u16,
    },
    Turn,
    Link {
        up: bool,
    },
    BusMaster {
        on: bool,
    },
    /// The driver begins anew.
    Start {
        features: u64,
    },
}

struct Guest {
    mapping: Arc<HostMapping>,
    available: [u16; QUEUES as usize],
}

fn window(offset: u32) -> Window {
    Window {
        offset,
        len: 0x1000,
    }
}

fn setup(queue: u64) -> QueueSetup {
    let at = BASE + queue * RINGS;
    QueueSetup {
        size: SIZE,
        enabled: true,
        desc: at,
        avail: at + 0x400,
        used: at + 0x800,
    }
}

impl Guest {
    fn write(&self, addr: u64, bytes: &[u8]) {
        let span = self
            .mapping
            .span(addr.wrapping_sub(BASE), bytes.len() as u64, Access::Write);
        if let Some(span) = span {
            let _ = span.copy_from(bytes);
        }
    }

    fn offer(&mut self, queue: usize, head: u16) {
        let ring = setup(queue as u64).avail;
        let slot = u64::from(self.available[queue] % SIZE);
        self.write(ring + 4 + 2 * slot, &head.to_le_bytes());
        self.available[queue] = self.available[queue].wrapping_add(1);
        self.write(ring + 2, &self.available[queue].to_le_bytes());
    }
}

fuzz_target!(|actions: Vec<Action>| {
    let mapping = HostMapping::anonymous(BYTES).unwrap();
    let table = Arc::new(DotTable::new());
    let backing = Backing::Mapped {
        mapping: mapping.clone(),
        offset: 0,
    };
    table.map(BASE, BYTES, Perm::RW, backing).unwrap();
    let spec = VirtioNetSpec {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        queue_pairs: 1,
        queue_size: SIZE,
        layout: VirtioPciLayout {
            bar: 0,
            common: window(0),
            isr: window(0x1000),
            device: window(0x2000),
            notify: window(0x3000),
            notify_multiplier: 4,
        },
        face: m2m_fabric::proto::Face::VfioUser,
    };
    let signals = Arc::new(Signals::new(Irqs::new(4), QUEUES as u16));
    let report = Arc::new(|_| ());
    let mut device = NetDevice::new(0, spec, signals, table.reader(), Arc::default(), report);
    let mut links = Links::default();
    links.add(Link::new(1, Box::new(LoopbackPort::new(64)), None), false);
    device.set_bus_master(true);
    device.set_link_up(true);
    let setups: Vec<_> = (0..QUEUES).map(setup).collect();
    device.start(!PACKED, &setups, &mut links);
    let mut guest = Guest {
        mapping,
        available: [0; QUEUES as usize],
    };
    for action in actions {
        match action {
            Action::Write { at, bytes } => guest.write(BASE + u64::from(at), &bytes),
            Action::Describe {
                queue,
                index,
                at,
                len,
                flags,
                next,
            } => {
                let mut bytes = (DATA + u64::from(at % 0x5000)).to_le_bytes().to_vec();
                bytes.extend(u32::from(len % 0x1000).to_le_bytes());
                bytes.extend(u16::from(flags & 7).to_le_bytes());
                bytes.extend(u16::from(next % 16).to_le_bytes());
                let table = setup(u64::from(queue) % QUEUES).desc;
                guest.write(table + 16 * u64::from(index % 16), &bytes);
            }
            Action::Raw {
                queue,
                index,
                bytes,
            } => {
                let table = setup(u64::from(queue) % QUEUES).desc;
                guest.write(table + 16 * u64::from(index % 16), &bytes);
            }
            Action::Offer { queue, head } => {
                guest.offer(usize::from(queue) % QUEUES as usize, u16::from(head % 18));
            }
            Action::Index { queue, index } => {
                let ring = setup(u64::from(queue) % QUEUES).avail;
                guest.write(ring + 2, &index.to_le_bytes());
            }
            Action::Turn => {
                device.turn(&mut links);
            }
            Action::Link { up } => device.set_link_up(up),
            Action::BusMaster { on } => device.set_bus_master(on),
            Action::Start { features } => {
                guest.available = [0; QUEUES as usize];
                device.start(features & !PACKED, &setups, &mut links);
            }
        }
    }
    // With nothing new the device comes to rest.
    let rest = (0..ROUNDS).any(|_| !device.turn(&mut links));
    assert!(rest, "work without end");
});
