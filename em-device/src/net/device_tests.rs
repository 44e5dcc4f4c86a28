//! A device, its wires and a driver's rings in one process.

use super::*;
use crate::net::Mac;
use crate::net::control::{ERR, OK};
use crate::net::features::OFFERED;
use crate::net::links::Link;
use crate::port::loopback::LoopbackPort;
use crate::port::null::NullPort;
use crate::testing::{BASE, BYTES, Driver, LAYOUT, Memory, WRITE, signals};
use crate::virtio::feature::{self, IN_ORDER, RING_PACKED};
use std::sync::Mutex;

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const SIZE: u16 = 16;
const RX: usize = 0;
const TX: usize = 1;
const CTRL: usize = 4;
/// Where the driver's buffers lie.
const DATA: u64 = BASE + 0x10_0000;

/// All that is offered but the longer header.
const SHORT: u64 = OFFERED & !features::HASH_REPORT;

/// The same with each kind of ring.
const RINGS: [u64; 4] = [
    SHORT & !(RING_PACKED | IN_ORDER),
    SHORT & !RING_PACKED,
    SHORT & !IN_ORDER,
    SHORT,
];

/// Address, length, flags.
type Buffers<'a> = &'a [(u64, u32, u16)];

struct Bench {
    device: NetDevice,
    links: Links,
    signals: Arc<Signals>,
    rings: Vec<Driver>,
    memory: Memory,
    reports: Arc<Mutex<Vec<FunctionState>>>,
}

impl Bench {
    /// Two queue pairs, the link up, a loopback behind it.
    fn new(features: u64) -> Self {
        let memory = Memory::new();
        let signals = signals(5);
        let spec = VirtioNetSpec {
            mac: MAC,
            mtu: 1500,
            queue_pairs: 2,
            queue_size: SIZE,
            layout: LAYOUT,
            face: m2m_fabric::proto::Face::VfioUser,
        };
        let reports = Arc::new(Mutex::new(Vec::new()));
        let sink = reports.clone();
        let report: Report = Arc::new(move |state| sink.lock().unwrap().push(state));
        let mut device = NetDevice::new(
            0,
            spec,
            signals.clone(),
            memory.table.reader(),
            Arc::default(),
            report,
        );
        device.set_bus_master(true);
        device.set_link_up(true);
        let mut links = Links::default();
        links.set_now(Instant::now());
        assert!(links.add(Link::new(1, Box::new(LoopbackPort::new(64)), None), false));
        let mut bench = Self {
            device,
            links,
            signals,
            rings: Vec::new(),
            memory,
            reports,
        };
        bench.start(features);
        bench
    }

    /// Fresh rings, of which the device knows nothing yet.
    fn start_rings(&mut self, features: u64) {
        let rings = RingFeatures::of(features);
        self.rings = (0..5)
            .map(|n| Driver::fresh(&self.memory, n, SIZE, rings))
            .collect();
    }

    /// A driver starts with fresh rings.
    fn start(&mut self, features: u64) {
        self.start_rings(features);
        let setups: Vec<_> = self.rings.iter().map(|ring| ring.setup).collect();
        self.device.start(features, &setups, &mut self.links);
    }

    fn turns(&mut self) {
        for _ in 0..8 {
            self.device.turn(&mut self.links);
        }
    }

    /// Offers receive buffers of these sizes from descriptor 0 on.
    fn receive_buffers(&mut self, sizes: &[u32]) {
        for (n, size) in (0..).zip(sizes) {
            let at = buffer(u64::from(n));
            self.rings[RX].chain(n, &[(at, *size, WRITE)]);
        }
    }

    /// Sends header and frame in two descriptors.
    fn send(&mut self, header: &[u8; 12], frame: &[u8]) {
        let at = DATA + 0x8_0000;
        self.memory.write(at, header);
        self.memory.write(at + 0x1000, frame);
        self.rings[TX].chain(0, &[(at, 12, 0), (at + 0x1000, frame.len() as u32, 0)]);
        self.turns();
    }

    fn control(&mut self, command: &[u8]) -> u8 {
        let answer = self.ask(command, 0);
        assert_eq!(answer.len(), 1);
        answer[0]
    }

    /// The answer and what follows it, for which there is `room`.
    fn ask(&mut self, command: &[u8], room: u32) -> Vec<u8> {
        let at = DATA + 0xf_0000;
        self.memory.write(at, command);
        let len = command.len() as u32;
        let answer = (at + 0x1000, 1, WRITE);
        self.rings[CTRL].chain(0, &[(at, len, 0), answer, (at + 0x2000, room, WRITE)]);
        self.turns();
        let used = self.rings[CTRL].take_used();
        assert_eq!(used.len(), 1);
        let (head, written) = used[0];
        assert_eq!(head, 0);
        let mut answer = self.memory.read(at + 0x1000, 1);
        if written > 1 {
            answer.extend(self.memory.read(at + 0x2000, written as usize - 1));
        }
        answer
    }

    fn drops(&self, queue: usize) -> Vec<(String, u64)> {
        self.device.stats().queues[queue]
            .drops
            .clone()
            .into_iter()
            .collect()
    }

    fn dropped(&self, queue: usize, reason: &str) -> u64 {
        let drops = self.drops(queue);
        drops
            .iter()
            .find(|(r, _)| r == reason)
            .map_or(0, |(_, n)| *n)
    }
}

/// Guest address of receive buffer `n`.
fn buffer(n: u64) -> u64 {
    DATA + n * 0x4000
}

fn frame(len: usize) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &[2, 9, 9, 9, 9, 9], &[0x88, 0xb5]].concat();
    frame.extend((frame.len()..len).map(|n| n as u8));
    frame
}

/// An unfinished TCP frame and its header: checksum field at 50.
fn tcp(payload: usize) -> ([u8; 12], Vec<u8>) {
    let mut f = [&[0xff; 6][..], &[2, 9, 9, 9, 9, 9], &[8, 0], &[0x45, 0]].concat();
    f.extend((40 + payload as u16).to_be_bytes());
    f.extend([0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0]);
    // The pseudo-header's sum: addresses, protocol, length.
    let sum: u32 = 0x0a00 + 1 + 0x0a00 + 2 + 6 + 20 + payload as u32;
    f.extend((sum as u16).to_be_bytes());
    f.extend([0, 0]);
    f.extend((0..payload).map(|n| n as u8));
    ([1, 0, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0], f)
}

fn ones_sum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|c| u32::from(c[0]) << 8 | c.get(1).map_or(0, |b| u32::from(*b)))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

/// Sum over the TCP segment with its pseudo-header; all ones when it is right.
fn tcp_sum(frame: &[u8]) -> u16 {
    let tcp = &frame[34..];
    let pseudo = [&frame[26..34], &[0, 6], &(tcp.len() as u16).to_be_bytes()].concat();
    ones_sum(&[&pseudo, tcp].concat())
}

#[test]
fn a_frame_goes_out_and_comes_back_whole() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.receive_buffers(&[2048]);
        let sent = frame(1000);
        b.send(&[0; 12], &sent);
        assert_eq!(b.rings[TX].take_used(), [(0, 0)]);
        assert_eq!(b.rings[RX].take_used(), [(0, 1012)]);
        let got = b.memory.read(buffer(0), 1012);
        assert_eq!(got[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(got[12..], sent);
        let stats = b.device.stats();
        for queue in [RX, TX] {
            let q = &stats.queues[queue];
            assert_eq!((q.packets, q.bytes), (1, 1000), "{}", q.name);
        }
    }
}

#[test]
fn a_frame_is_merged_over_as_many_buffers_as_it_takes() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.receive_buffers(&[100, 64, 2048, 2048]);
        let sent = frame(400);
        b.send(&[0; 12], &sent);
        assert_eq!(b.rings[RX].take_used(), [(0, 100), (1, 64), (2, 248)]);
        let first = b.memory.read(buffer(0), 100);
        assert_eq!(first[10..12], [3, 0], "num_buffers");
        let rest = [b.memory.read(buffer(1), 64), b.memory.read(buffer(2), 248)].concat();
        assert_eq!([&first[12..], &rest].concat(), sent);
    }
}

#[test]
fn without_enough_buffers_nothing_is_used_until_there_are() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.receive_buffers(&[100, 100]);
        b.send(&[0; 12], &frame(400));
        assert_eq!(b.rings[RX].take_used(), []);
        assert!(b.links.iter().any(|link| link.blocked.is_some()));
        b.rings[RX].chain(2, &[(buffer(2), 2048, WRITE)]);
        b.turns();
        assert_eq!(b.rings[RX].take_used(), [(0, 100), (1, 100), (2, 212)]);
        assert!(b.links.iter().all(|link| link.blocked.is_none()));
    }
}

#[test]
fn a_driver_without_merging_gets_a_frame_in_one_chain_or_not_at_all() {
    for offered in RINGS {
        let mut b = Bench::new(offered & !features::MRG_RXBUF);
        b.receive_buffers(&[100, 2048]);
        b.send(&[0; 12], &frame(400));
        assert_eq!(b.rings[RX].take_used(), []);
        assert_eq!(b.dropped(RX, drop_reason::SMALL_BUFFER), 1);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
    }
}

#[test]
fn bad_receive_buffers_are_given_back_and_the_frame_takes_the_next() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        let cases: [(&str, Buffers<'_>); 5] = [
            (drop_reason::WRONG_DIRECTION, &[(buffer(0), 2048, 0)]),
            (drop_reason::SMALL_BUFFER, &[(buffer(0), 5, WRITE)]),
            (drop_reason::SMALL_BUFFER, &[(buffer(0), 0, WRITE)]),
            ("chain-not-mapped", &[(0x70_0000_0000, 2048, WRITE)]),
            ("chain-not-mapped", &[(u64::MAX - 100, 2048, WRITE)]),
        ];
        for (reason, bad) in cases {
            b.start(offered);
            let before = b.dropped(RX, reason);
            b.rings[RX].chain(0, bad);
            b.rings[RX].chain(4, &[(buffer(4), 2048, WRITE)]);
            b.send(&[0; 12], &frame(60));
            assert_eq!(
                b.rings[RX].take_used(),
                [(0, 0), (4, 72)],
                "{reason}: {bad:x?}"
            );
            assert_eq!(b.dropped(RX, reason), before + 1);
        }
    }
}

#[test]
fn a_bad_buffer_in_the_middle_of_a_merge_takes_those_before_it_along() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.rings[RX].chain(0, &[(buffer(0), 100, WRITE)]);
        b.rings[RX].chain(1, &[(buffer(1), 100, 0)]);
        b.rings[RX].chain(2, &[(buffer(2), 2048, WRITE)]);
        b.send(&[0; 12], &frame(400));
        assert_eq!(b.rings[RX].take_used(), [(0, 0), (1, 0), (2, 412)]);
    }
}

#[test]
fn transmit_chains_that_are_no_frames_come_back_with_a_reason() {
    for offered in RINGS {
        let cases: [(&str, Buffers<'_>); 9] = [
            (drop_reason::SHORT_HEADER, &[(DATA, 5, 0)]),
            (drop_reason::SHORT_HEADER, &[(DATA, 0, 0)]),
            (drop_reason::SHORT_FRAME, &[(DATA, 12, 0)]),
            (drop_reason::SHORT_FRAME, &[(DATA, 25, 0)]),
            (drop_reason::WRONG_DIRECTION, &[(DATA, 600, WRITE)]),
            (drop_reason::ABOVE_MTU, &[(DATA, 12, 0), (DATA, 1519, 0)]),
            (drop_reason::ABOVE_MTU, &[(DATA, 0x2_0000, 0)]),
            ("chain-not-mapped", &[(0xffff_ffff_ffff_ff00, 512, 0)]),
            ("chain-not-mapped", &[(BASE + BYTES - 100, 512, 0)]),
        ];
        for (reason, buffers) in cases {
            let mut b = Bench::new(offered);
            b.rings[TX].chain(3, buffers);
            b.turns();
            assert_eq!(b.rings[TX].take_used(), [(3, 0)], "{reason}: {buffers:x?}");
            assert_eq!(b.drops(TX), [(reason.to_owned(), 1)], "{buffers:x?}");
            b.send(&[0; 12], &frame(60));
            assert_eq!(b.device.stats().queues[TX].packets, 1, "the queue lives on");
        }
    }
}

#[test]
fn offload_facts_that_lie_or_were_not_negotiated_are_refused() {
    for offered in RINGS {
        let (header, body) = tcp(100);
        let with = |change: fn(&mut [u8; 12])| {
            let mut header = header;
            change(&mut header);
            header
        };
        let cases = [
            ("checksum behind the frame", offered, with(|h| h[7] = 0xff)),
            (
                "an unknown segmentation",
                offered,
                with(|h| (h[1], h[4]) = (3, 100)),
            ),
            ("segments of nothing", offered, with(|h| h[1] = 1)),
            (
                "a checksum without CSUM",
                offered & !(features::CSUM | features::HOST_TSO4),
                header,
            ),
            (
                "segmentation without HOST_TSO4",
                offered & !features::HOST_TSO4,
                with(|h| (h[1], h[4]) = (1, 50)),
            ),
        ];
        for (name, features, header) in cases {
            let mut b = Bench::new(features);
            b.send(&header, &body);
            assert_eq!(b.rings[TX].take_used(), [(0, 0)], "{name}");
            assert_eq!(b.dropped(TX, drop_reason::BAD_OFFLOAD), 1, "{name}");
        }
    }
}

#[test]
fn an_unfinished_checksum_is_passed_on_or_finished_as_the_driver_takes_it() {
    for offered in RINGS {
        let (header, body) = tcp(101);
        let mut b = Bench::new(offered);
        b.receive_buffers(&[2048]);
        b.send(&header, &body);
        let got = b.memory.read(buffer(0), 12 + body.len());
        assert_eq!((got[0], &got[6..10]), (1, &[34, 0, 16, 0][..]));
        assert_eq!(got[12..], body);

        let plain = offered & !(features::GUEST_CSUM | features::GUEST_TSO4 | features::GUEST_TSO6);
        b.start(plain);
        b.receive_buffers(&[60, 2048]);
        b.send(&header, &body);
        assert_eq!(b.rings[RX].take_used().len(), 2);
        let got = [
            b.memory.read(buffer(0), 60),
            b.memory.read(buffer(1), body.len() - 48),
        ]
        .concat();
        assert_eq!(got[..10], [0; 10]);
        assert_eq!(tcp_sum(&got[12..]), 0xffff);
        assert_ne!(got[12..], body);
    }
}

#[test]
fn a_large_frame_is_segmented_for_a_driver_that_cannot_and_goes_on_where_buffers_ended() {
    for offered in RINGS {
        let (mut header, body) = tcp(3000);
        header[1] = 1;
        header[4..6].copy_from_slice(&1000u16.to_le_bytes());
        let plain = offered & !(features::GUEST_TSO4 | features::GUEST_TSO6);
        let mut b = Bench::new(plain);
        b.receive_buffers(&[2048, 2048]);
        b.send(&header, &body);
        assert_eq!(b.rings[RX].take_used(), [(0, 1066), (1, 1066)]);
        b.rings[RX].chain(2, &[(buffer(2), 2048, WRITE)]);
        b.turns();
        assert_eq!(
            b.rings[RX].take_used(),
            [(2, 1066)],
            "no segment comes twice"
        );
        for (n, offset) in [(0, 0), (1, 1000), (2, 2000)] {
            let got = b.memory.read(buffer(n) + 12, 1054);
            assert_eq!(got[54..], body[54 + offset..1054 + offset]);
            assert_eq!(tcp_sum(&got), 0xffff);
        }
    }
}

#[test]
fn control_commands_are_answered_and_take_effect() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        assert_eq!(b.control(&[4, 0, 2, 0]), OK);
        assert_eq!(b.control(&[4, 0, 3, 0]), ERR);
        assert_eq!(b.control(&[77, 0]), ERR);
        assert_eq!(b.control(&[0, 0, 0]), OK);
        b.receive_buffers(&[2048]);
        let mut stranger = frame(60);
        stranger[..6].copy_from_slice(&[2, 7, 7, 7, 7, 7]);
        b.send(&[0; 12], &stranger);
        assert_eq!(b.rings[RX].take_used(), []);
        let filtered: u64 = [RX, 2]
            .iter()
            .map(|q| b.dropped(*q, drop_reason::FILTERED))
            .sum();
        assert_eq!(filtered, 1);
    }
}

#[test]
fn a_control_chain_without_room_for_the_answer_comes_back() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.memory.write(DATA, &[0, 0, 0]);
        b.rings[CTRL].chain(0, &[(DATA, 3, 0)]);
        b.turns();
        assert_eq!(b.rings[CTRL].take_used(), [(0, 0)]);
        assert_eq!(b.dropped(CTRL, drop_reason::NO_ANSWER_ROOM), 1);
    }
}

#[test]
fn a_broken_ring_stops_the_function_until_a_reset_revives_it() {
    for offered in RINGS {
        for queue in [RX, TX, CTRL] {
            let mut b = Bench::new(offered);
            b.rings[queue].break_ring();
            // The receive queue is looked at when a frame wants to go there.
            b.send(&[0; 12], &frame(60));
            assert!(b.signals.needs_reset(), "queue {queue}");
            assert_eq!(*b.reports.lock().unwrap(), [FunctionState::NeedsReset]);
            b.signals.reset();
            b.start(offered);
            b.receive_buffers(&[2048]);
            b.send(&[0; 12], &frame(60));
            assert_eq!(b.rings[RX].take_used(), [(0, 72)], "after queue {queue}");
        }
    }
}

#[test]
fn without_bus_mastering_memory_is_left_alone() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.device.set_bus_master(false);
        b.receive_buffers(&[2048]);
        b.send(&[0; 12], &frame(60));
        assert_eq!(
            (b.rings[TX].take_used(), b.rings[RX].take_used()),
            (vec![], vec![])
        );
        b.device.set_bus_master(true);
        b.turns();
        assert_eq!(b.rings[TX].take_used(), [(0, 0)]);
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
    }
}

#[test]
fn with_the_link_down_frames_are_dropped_and_come_back_as_used() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.device.set_link_up(false);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.rings[TX].take_used(), [(0, 0)]);
        assert_eq!(b.dropped(TX, drop_reason::LINK_DOWN), 1);
    }
}

#[test]
fn memory_that_is_away_for_a_while_stalls_and_loses_nothing() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.receive_buffers(&[2048]);
        let at = DATA + 0x8_0000;
        b.memory.write(at, &[&[0; 12][..], &frame(60)].concat());
        b.rings[TX].chain(0, &[(at, 72, 0)]);
        b.memory.table.unmap(BASE, BYTES).unwrap();
        b.turns();
        assert!(
            b.device.deadline(&b.links, Instant::now()).is_some(),
            "looks again by itself"
        );
        b.memory.map();
        b.turns();
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
        assert!(!b.signals.needs_reset());
    }
}

#[test]
fn an_armed_device_sees_what_came_before_it_slept() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.turns();
        assert!(!b.device.arm(&mut b.links));
        assert!(b.rings[TX].wants_kick());
        b.device.disarm(&mut b.links);
        let at = DATA + 0x8_0000;
        b.rings[TX].chain(0, &[(at, 72, 0)]);
        assert!(b.device.arm(&mut b.links));
    }
}

#[test]
fn a_known_peer_gets_its_frames_alone() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        let peer = [2, 0, 0, 0, 0, 2];
        b.links.remove(1);
        for (id, mac) in [(2, peer), (3, [2, 0, 0, 0, 0, 3])] {
            assert!(
                b.links
                    .add(Link::new(id, Box::new(NullPort::new()), Some(mac)), false)
            );
        }
        let sent = |b: &Bench| -> Vec<u64> {
            b.links
                .iter()
                .map(|link| link.port.stats().tx_packets)
                .collect()
        };
        let mut to_peer = frame(60);
        to_peer[..6].copy_from_slice(&peer);
        b.send(&[0; 12], &to_peer);
        assert_eq!(sent(&b), [1, 0]);
        b.rings[TX].take_used();
        b.send(&[0; 12], &frame(60));
        assert_eq!(sent(&b), [2, 1]);
    }
}

#[path = "device_log_tests.rs"]
mod logged_pages;

#[path = "device_feature_tests.rs"]
mod features_of_drivers;
