//! Tests of Ethernet receive queues.

use super::super::test_queue::Place;
use super::test_frames::{
    HERE, RSS_KEY, THERE, finished, is_right, payload, tcp4, tcp6, udp4, udp6,
};
use super::tx_tests::{KEY, all_memory};
use super::{
    EtherContext, EtherCounters, EtherFilter, EtherReceive, EtherRx, HashFunction, Rss, RxSetup,
};
use crate::frame::{Frame, FrameMeta};
use crate::net::links::{Link, Links};
use crate::offload::checksum::plain_checksum;
use crate::port::fault::{FaultPort, Faults};
use crate::port::loopback::LoopbackPort;
use crate::port::null::NullPort;
use crate::port::{Port, Rx};
use crate::rdma::verbs::{Pushed, Regions};
use crate::testing::{BASE, Memory};
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

const L3_OK: u8 = 2;
const L4_OK: u8 = 4;

/// Two queues with their driver. Entries have two buffers.
struct Bench {
    memory: Memory,
    places: [Place; 2],
    posted: [u32; 2],
    receive: EtherReceive,
    links: Links,
    regions: Regions,
    counters: EtherCounters,
    cqes: Vec<(u32, [u8; 64])>,
    link_up: bool,
}

const ENTRIES: u64 = 8;

impl Bench {
    fn new() -> Self {
        Self::with(Box::new(LoopbackPort::default()))
    }

    fn with(port: Box<dyn Port>) -> Self {
        let memory = Memory::new();
        let places = [0, 1].map(|n| Place::new(&memory, n, 64 * ENTRIES));
        let mut receive = EtherReceive::new(EtherFilter::new(HERE), 1500);
        for (rqn, place) in (10..).zip(&places) {
            let mut rq = EtherRx::new(RxSetup {
                rqn,
                buffer: place.buffer(),
                log_size: 3,
                log_stride: 6,
                doorbell: place.doorbell(),
                cqn: 100 + rqn,
                vlan_strip: false,
            })
            .unwrap();
            rq.ready = true;
            receive.rqs.insert(rqn, rq);
        }
        receive.rss = Some(Rss::new(vec![10], HashFunction::None));
        let mut links = Links::default();
        assert!(links.add(Link::new(1, port, None), false));
        Self {
            memory,
            places,
            posted: [0; 2],
            receive,
            links,
            regions: all_memory(),
            counters: EtherCounters::default(),
            cqes: Vec::new(),
            link_up: true,
        }
    }

    /// Where the buffers of an entry are.
    fn buffers(queue: usize, index: u64, first: u32) -> [(u32, u64); 2] {
        let at = BASE + 0x20_0000 + queue as u64 * 0x10_0000 + index % ENTRIES * 0x1_0000;
        [(first, at + 0x77), (0x3000, at + 0x2000)]
    }

    /// Posts `count` entries whose first buffer has `first` bytes.
    fn post(&mut self, queue: usize, count: u32, first: u32) {
        for _ in 0..count {
            let index = u64::from(self.posted[queue]);
            let mut entry = Vec::new();
            for (len, addr) in Self::buffers(queue, index, first) {
                entry.extend((1 << 31 | len).to_be_bytes());
                entry.extend(KEY.to_be_bytes());
                entry.extend(addr.to_be_bytes());
            }
            entry.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            self.places[queue].put(index % ENTRIES * 64, &entry);
            self.posted[queue] += 1;
        }
        self.places[queue].record(0, self.posted[queue]);
    }

    /// Frames come in.
    fn arrive(&mut self, meta: FrameMeta, frame: &[u8]) {
        let mut bytes = frame.to_vec();
        let slices = [VolatileSlice::from(&mut bytes[..])];
        for link in self.links.iter_mut() {
            link.port.transmit(&Frame::new(meta, &slices)).unwrap();
            link.port.flush();
        }
    }

    fn turn(&mut self) -> usize {
        let reader = self.memory.table.reader();
        let view = reader.pin();
        let cqes = &mut self.cqes;
        let mut cx = EtherContext {
            view: &view,
            regions: &self.regions,
            links: &mut self.links,
            complete: &mut |cqn, cqe| {
                cqes.push((cqn, cqe));
                Pushed::Stored
            },
            counters: &mut self.counters,
            link_up: self.link_up,
        };
        self.receive.turn(&mut cx)
    }

    /// Bytes that the `n`th completion is about.
    fn received(&self, n: usize, first: u32) -> Vec<u8> {
        let (cqn, cqe) = &self.cqes[n];
        assert_eq!(cqe[63], 0x20);
        let index = u64::from(u16::from_be_bytes([cqe[60], cqe[61]]));
        let mut len = u32::from_be_bytes(cqe[44..48].try_into().unwrap()) as usize;
        let mut bytes = Vec::new();
        for (room, addr) in Self::buffers((cqn - 110) as usize, index, first) {
            let part = len.min(room as usize);
            if part != 0 {
                bytes.extend(self.memory.read(addr, part));
            }
            len -= part;
        }
        assert_eq!(len, 0);
        bytes
    }

    /// Delivers one frame into one entry.
    fn one(&mut self, meta: FrameMeta, frame: &[u8]) -> (Vec<u8>, [u8; 64]) {
        let before = self.cqes.len();
        self.post(0, 1, 100);
        self.arrive(meta, frame);
        assert_eq!(self.turn(), 1);
        assert_eq!(self.cqes.len(), before + 1, "{:?}", self.drops());
        (self.received(before, 100), self.cqes[before].1)
    }

    fn drops(&self) -> Vec<(&'static str, u64)> {
        self.counters.drops().collect()
    }
}

fn unfinished(start: u16, offset: u16) -> FrameMeta {
    FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        csum_start: start,
        csum_offset: offset,
        ..FrameMeta::default()
    }
}

/// The frame with the sum of its pseudo-header where the checksum goes.
fn partial(frame: &[u8], start: usize, offset: usize) -> Vec<u8> {
    let protocol = if offset == 16 { 6 } else { 17 };
    let mut pseudo = match start {
        34 => frame[26..34].to_vec(),
        _ => frame[22..54].to_vec(),
    };
    pseudo.extend([0, protocol]);
    pseudo.extend(((frame.len() - start) as u32).to_be_bytes());
    let mut frame = frame.to_vec();
    let sum = !plain_checksum(&pseudo);
    frame[start + offset..start + offset + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// As a driver checks it: the sum of all that follows the Ethernet header.
fn has_right_sum(cqe: &[u8; 64], frame: &[u8]) -> bool {
    let said = u16::from_be_bytes([cqe[20], cqe[21]]);
    let real = !plain_checksum(&frame[14..]);
    said == real || said % 0xffff == real % 0xffff
}

#[test]
fn a_frame_fills_the_buffers_of_an_entry_in_order() {
    let mut bench = Bench::new();
    for len in [1, 47, 100, 1460] {
        let frame = finished(tcp4(&payload(len)));
        let (received, cqe) = bench.one(FrameMeta::default(), &frame);
        assert_eq!(received, frame);
        assert!(has_right_sum(&cqe, &frame));
        assert_eq!(cqe[28] & (L3_OK | L4_OK), L3_OK);
    }
    assert_eq!(bench.counters.received.unicast.packets, 4);
    let counters: Vec<u16> = bench
        .cqes
        .iter()
        .map(|(_, cqe)| u16::from_be_bytes([cqe[60], cqe[61]]))
        .collect();
    assert_eq!(counters, [0, 1, 2, 3]);
}

#[test]
fn unfinished_checksums_are_finished() {
    for (frame, start, offset) in [
        (tcp4(&payload(500)), 34, 16),
        (tcp6(&payload(501)), 54, 16),
        (udp4(&payload(77)), 34, 6),
        (udp6(&payload(1000)), 54, 6),
    ] {
        let mut bench = Bench::new();
        let partial = partial(&frame, start, offset);
        let meta = unfinished(start as u16, offset as u16);
        let (received, cqe) = bench.one(meta, &partial);
        assert!(is_right(&received));
        assert_eq!(received, finished(frame));
        assert!(has_right_sum(&cqe, &received));
        assert_eq!(cqe[28] & (L3_OK | L4_OK), L3_OK | L4_OK);
    }
}

#[test]
fn checksums_that_are_vouched_for_need_no_reading() {
    let mut bench = Bench::new();
    let frame = finished(tcp6(&payload(333)));
    let meta = FrameMeta {
        flags: FrameMeta::DATA_VALID,
        ..FrameMeta::default()
    };
    let (received, cqe) = bench.one(meta, &frame);
    assert!(has_right_sum(&cqe, &received));
    assert_ne!(cqe[28] & L4_OK, 0);
}

#[test]
fn a_checksum_that_is_no_transports_counts_in_the_sum() {
    let mut bench = Bench::new();
    // GRE-like: protocol 47, with a checksum somewhere in it.
    let mut frame = tcp4(&payload(200));
    frame[23] = 47;
    let (received, cqe) = bench.one(unfinished(60, 6), &frame);
    assert_ne!(received, frame);
    assert!(has_right_sum(&cqe, &received));
    assert_eq!(cqe[28] & L4_OK, 0);
}

#[test]
fn frames_that_are_no_ip_have_neither_sum_nor_flags() {
    let mut bench = Bench::new();
    let mut arp = payload(60);
    arp[..6].copy_from_slice(&[0xff; 6]);
    arp[12..14].copy_from_slice(&[8, 6]);
    let (received, cqe) = bench.one(FrameMeta::default(), &arp);
    assert_eq!(received, arp);
    assert_eq!(
        (cqe[28] & L3_OK, cqe[16], cqe[12..16] == [0; 4]),
        (0, 0, true)
    );
    assert_eq!(bench.counters.received.broadcast.octets, 60);
}

#[test]
fn padding_is_not_in_the_sum() {
    let mut bench = Bench::new();
    let frame = finished(tcp4(b"hi"));
    let mut padded = frame.clone();
    padded.resize(70, 0x5a);
    let (received, cqe) = bench.one(FrameMeta::default(), &padded);
    assert_eq!(received, padded);
    assert!(has_right_sum(&cqe, &frame));
}

#[test]
fn large_frames_arrive_in_segments() {
    let mut bench = Bench::new();
    let frame = tcp4(&payload(6000));
    let meta = FrameMeta {
        gso_type: FrameMeta::GSO_TCPV4,
        gso_size: 1400,
        hdr_len: 54,
        ..unfinished(34, 16)
    };
    bench.post(0, 3, 100);
    bench.arrive(meta, &partial(&frame, 34, 16));
    assert_eq!(bench.turn(), 0, "it waits for entries");
    assert_eq!(bench.cqes.len(), 3);
    let reader = bench.memory.table.reader();
    assert!(!bench.receive.can_go_on(&bench.links, &reader.pin()));
    bench.post(0, 5, 100);
    assert!(bench.receive.can_go_on(&bench.links, &reader.pin()));
    assert_eq!(bench.turn(), 1);
    let mut all: Vec<u8> = Vec::new();
    for n in 0..bench.cqes.len() {
        let segment = bench.received(n, 100);
        assert!(is_right(&segment) && segment.len() <= 1454);
        assert!(has_right_sum(&bench.cqes[n].1, &segment));
        all.extend(&segment[54..]);
    }
    assert_eq!(all, frame[54..]);
    assert_eq!(bench.cqes.len(), 5);
}

#[test]
fn a_frame_waits_for_an_entry_but_not_for_ever() {
    let mut bench = Bench::new();
    bench.arrive(FrameMeta::default(), &tcp4(b"x"));
    assert_eq!(bench.turn(), 0);
    assert!(bench.links.iter().all(|link| link.blocked.is_some()));
    let start = Instant::now();
    while bench.turn() == 0 {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    assert_eq!(bench.drops(), [("no-buffer", 1)]);
    assert_eq!(bench.counters.out_of_buffer, 1);
    assert!(bench.cqes.is_empty());
}

#[test]
fn tags_are_taken_off_where_the_queue_says_so() {
    let frame = finished(udp4(&payload(90)));
    let mut tagged = frame.clone();
    tagged.splice(12..12, [0x81, 0, 0x60, 0x07]);
    let mut bench = Bench::new();
    let (received, cqe) = bench.one(FrameMeta::default(), &tagged);
    assert_eq!((received, cqe[29] & 1), (tagged.clone(), 0));
    bench.receive.rqs.get_mut(&10).unwrap().vlan_strip = true;
    let (received, cqe) = bench.one(FrameMeta::default(), &tagged);
    assert_eq!(received, frame);
    assert_eq!((cqe[29] & 1, &cqe[30..32]), (1, &[0x60, 0x07][..]));
    assert!(has_right_sum(&cqe, &frame));
    // A checksum to be finished moves with the rest.
    let mut unsummed = partial(&udp4(&payload(90)), 34, 6);
    unsummed.splice(12..12, [0x81, 0, 0x60, 0x07]);
    let (received, _) = bench.one(unfinished(38, 6), &unsummed);
    assert_eq!(received, frame);
}

#[test]
fn flows_are_spread_over_queues_and_stay_on_theirs() {
    let mut bench = Bench::new();
    let function = HashFunction::Toeplitz {
        key: RSS_KEY,
        symmetric: false,
    };
    bench.receive.rss = Some(Rss::new(vec![10, 11, 11, 10], function));
    for port in 0..4u8 {
        bench.post(0, 2, 100);
        bench.post(1, 2, 100);
        for _ in 0..2 {
            let mut frame = tcp4(b"x");
            frame[35] = port * 16;
            bench.arrive(FrameMeta::default(), &frame);
        }
        assert_eq!(bench.turn(), 2);
    }
    let cqns: Vec<u32> = bench.cqes.iter().map(|(cqn, _)| *cqn).collect();
    assert_eq!(cqns, [111, 111, 110, 110, 110, 110, 111, 111]);
    assert!(bench.cqes.iter().all(|(_, cqe)| cqe[16] == 1 << 2 | 1 << 6));
}

#[test]
fn frames_that_nobody_wants_are_counted() {
    let mut bench = Bench::new();
    let mut stranger = tcp4(b"x");
    stranger[..6].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
    bench.post(0, 1, 100);
    bench.arrive(FrameMeta::default(), &stranger);
    bench.turn();
    bench.arrive(FrameMeta::default(), &tcp4(&payload(1600)));
    bench.turn();
    bench.receive.rqs.get_mut(&10).unwrap().ready = false;
    bench.arrive(FrameMeta::default(), &tcp4(b"x"));
    bench.turn();
    bench.link_up = false;
    bench.arrive(FrameMeta::default(), &tcp4(b"x"));
    bench.turn();
    bench.link_up = true;
    bench.receive.rss = None;
    bench.arrive(FrameMeta::default(), &tcp4(b"x"));
    bench.turn();
    let expected = [
        ("above-mtu", 1),
        ("filtered", 1),
        ("link-down", 1),
        ("not-running", 2),
    ];
    assert_eq!(bench.drops(), expected);
    assert!(bench.cqes.is_empty());
}

#[test]
fn an_entry_that_is_too_small_is_kept_for_the_next_frame() {
    let mut bench = Bench::new();
    bench.receive.set_mtu(9000);
    let mut small = 80u32.to_be_bytes().to_vec();
    small.extend(KEY.to_be_bytes());
    small.extend((BASE + 0x20_0077).to_be_bytes());
    small.extend([0, 0, 0, 0, 0, 0, 1, 0]);
    bench.places[0].put(0, &small);
    bench.places[0].record(0, 1);
    for len in [100, 10] {
        bench.arrive(FrameMeta::default(), &tcp4(&payload(len)));
        assert_eq!(bench.turn(), 1);
    }
    assert_eq!(bench.drops(), [("small-buffer", 1)]);
    assert_eq!(bench.received(0, 100), tcp4(&payload(10)));
}

#[test]
fn memory_that_may_not_be_written_puts_the_queue_in_error() {
    let mut bench = Bench::new();
    bench.post(0, 1, 100);
    bench.regions.clear();
    bench.arrive(FrameMeta::default(), &tcp4(b"x"));
    assert_eq!(bench.turn(), 1);
    let (cqn, cqe) = bench.cqes[0];
    assert_eq!((cqn, cqe[63], cqe[55]), (110, 0xe0, 4));
    let rq = bench.receive.rqs.get_mut(&10).unwrap();
    assert!(rq.failed());
    rq.reset();
    assert!(!rq.failed());
}

#[test]
fn addresses_behind_a_wire_are_learned() {
    let mut bench = Bench::new();
    assert!(
        bench
            .links
            .add(Link::new(2, Box::new(LoopbackPort::default()), None), false)
    );
    bench.post(0, 2, 100);
    // Only the first wire brings it.
    let mut frame = tcp4(b"x");
    let meta = FrameMeta::default();
    {
        let slices = [VolatileSlice::from(&mut frame[..])];
        let link = bench.links.iter_mut().next().unwrap();
        link.port.transmit(&Frame::new(meta, &slices)).unwrap();
        link.port.flush();
    }
    assert_eq!(bench.turn(), 1);
    let mut back = tcp4(b"y");
    back[..6].copy_from_slice(&THERE);
    back[6..12].copy_from_slice(&HERE);
    let slices = [VolatileSlice::from(&mut back[..])];
    bench.links.forward(&Frame::new(meta, &slices), false);
    bench.links.flush();
    let mut seen = Vec::new();
    for link in bench.links.split().wires {
        let id = link.id;
        link.port.receive(10, &mut |_: &Frame<'_>| {
            seen.push(id);
            Rx::Taken
        });
    }
    assert_eq!(seen, [1]);
}

#[test]
fn a_null_wire_brings_nothing_and_damaged_frames_are_delivered_as_they_come() {
    let mut bench = Bench::with(Box::new(NullPort::default()));
    bench.post(0, 1, 100);
    assert_eq!(bench.turn(), 0);
    let faults = Faults {
        corrupt: 1_000_000,
        ..Faults::default()
    };
    let port = FaultPort::new(LoopbackPort::default(), faults, 7);
    let mut bench = Bench::with(Box::new(port));
    bench.receive.filter.promisc_all = true;
    let frame = finished(tcp4(&payload(800)));
    for _ in 0..50 {
        bench.post(0, 1, 100);
        bench.arrive(FrameMeta::default(), &frame);
        bench.turn();
    }
    assert!(bench.cqes.len() > 40, "{:?}", bench.drops());
    let vouched = bench.cqes.iter().filter(|(_, cqe)| cqe[28] & L4_OK != 0);
    assert_eq!(vouched.count(), 0);
}
