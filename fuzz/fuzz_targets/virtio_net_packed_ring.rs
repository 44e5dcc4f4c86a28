//! A hostile virtio-net driver with packed rings: descriptors and buffers of any content, queues that are reset alone,
//! processes that are replaced in between.

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
use smartep::state::State;
use std::sync::Arc;

/// First guest address; offsets of 16 bits reach all that is mapped and as much that is not.
const BASE: u64 = 0x10_0000;
const BYTES: u64 = 0x8000;
/// Receive, transmit, control.
const QUEUES: u64 = 3;
/// No power of two.
const SIZE: u16 = 13;
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
    /// The next descriptor, whose buffer is likely to be good, as a driver makes it available.
    Offer {
        queue: u8,
        at: u16,
        len: u16,
        flags: u8,
        id: u16,
    },
    /// Any descriptor at any place.
    Raw {
        queue: u8,
        index: u8,
        bytes: [u8; 16],
    },
    /// The driver's wish for interrupts.
    Events {
        queue: u8,
        place: u16,
        flags: u8,
    },
    Turn,
    Sleep,
    Link {
        up: bool,
    },
    /// One queue begins anew.
    Reset {
        queue: u8,
    },
    /// The driver begins anew.
    Start {
        features: u64,
    },
    /// The process is replaced; the driver does not notice.
    Replace,
}

struct Guest {
    mapping: Arc<HostMapping>,
    /// Next place of each ring, counted on.
    next: [u32; QUEUES as usize],
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

    fn descriptor(&self, queue: u64, index: u64, (addr, len): (u64, u32), id: u16, flags: u16) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        self.write(setup(queue).desc + 16 * index, &bytes);
    }

    fn clear(&mut self, queue: u64) {
        self.write(setup(queue).desc, &[0; 16 * SIZE as usize]);
        self.next[queue as usize] = 0;
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
    let state = Arc::new(State::create().unwrap().0);
    let make = || {
        let report = Arc::new(|_| ());
        let (spec, signals) = (spec.clone(), signals.clone());
        let device = NetDevice::new(0, spec, signals, table.reader(), Arc::default(), report);
        let mut device = device.noted_in(state.clone());
        device.set_bus_master(true);
        device.set_link_up(true);
        device
    };
    let mut device = make();
    let mut links = Links::default();
    links.add(Link::new(1, Box::new(LoopbackPort::new(64)), None), false);
    let setups: Vec<_> = (0..QUEUES).map(setup).collect();
    let mut features = u64::MAX;
    device.start(features, &setups, &mut links);
    let mut guest = Guest {
        mapping,
        next: [0; QUEUES as usize],
    };
    for action in actions {
        match action {
            Action::Write { at, bytes } => guest.write(BASE + u64::from(at), &bytes),
            Action::Offer {
                queue,
                at,
                len,
                flags,
                id,
            } => {
                let queue = u64::from(queue) % QUEUES;
                let place = guest.next[queue as usize];
                guest.next[queue as usize] = place.wrapping_add(1);
                let lap = place / u32::from(SIZE);
                let available = if lap % 2 == 0 { 1 << 7 } else { 1 << 15 };
                let buffer = (DATA + u64::from(at % 0x5000), u32::from(len % 0x1000));
                let index = u64::from(place % u32::from(SIZE));
                let flags = u16::from(flags & 7) | available;
                guest.descriptor(queue, index, buffer, id, flags);
            }
            Action::Raw {
                queue,
                index,
                bytes,
            } => {
                let table = setup(u64::from(queue) % QUEUES).desc;
                guest.write(table + 16 * u64::from(index % 16), &bytes);
            }
            Action::Events {
                queue,
                place,
                flags,
            } => {
                let events = setup(u64::from(queue) % QUEUES).avail;
                guest.write(events, &place.to_le_bytes());
                guest.write(events + 2, &[flags, 0]);
            }
            Action::Turn => {
                device.turn(&mut links);
            }
            Action::Sleep => {
                device.arm(&mut links);
                device.disarm(&mut links);
            }
            Action::Link { up } => device.set_link_up(up),
            Action::Reset { queue } => {
                let queue = u64::from(queue) % QUEUES;
                device.stop_queue(queue as u16, &mut links);
                guest.clear(queue);
                if let Some(place) = state.queue(queue as u16) {
                    place.clear();
                }
                device.start_queue(queue as u16, setup(queue));
            }
            Action::Start { features: wanted } => {
                features = wanted | PACKED;
                (0..QUEUES).for_each(|queue| guest.clear(queue));
                state.clear_queues();
                device.start(features, &setups, &mut links);
            }
            Action::Replace => {
                device = make();
                device.resume(features, &setups);
                device.wired();
            }
        }
    }
    // With nothing new the device comes to rest.
    let rest = (0..ROUNDS).any(|_| !device.turn(&mut links));
    assert!(rest, "work without end");
});
