//! Tests of Ethernet send queues.

use super::super::test_queue::Place;
use super::test_frames::{HERE, finished, is_right, payload, tcp4, tcp6, udp4, udp6};
use super::{Count, EtherContext, EtherCounters, EtherTx, TxSetup};
use crate::frame::{Frame, FrameMeta};
use crate::net::links::{Link, Links};
use crate::offload::{Segmenter, complete_checksum};
use crate::port::Rx;
use crate::port::fault::{FaultPort, Faults};
use crate::port::loopback::LoopbackPort;
use crate::rdma::verbs::{MemKey, Pd, Pushed, Region, Regions, Rights, Translation};
use crate::testing::{BASE, Memory};

/// Key of all memory.
pub(super) const KEY: u32 = 1 << 8 | 5;
const DATA: u64 = BASE + 0x20_0000;
const L3L4: u8 = 0xc0;
const SQN: u32 = 0x1234;
const CQN: u32 = 77;

pub(super) fn all_memory() -> Regions {
    let mut regions = Regions::default();
    assert_eq!(regions.allocate(), Ok(1));
    let region = Region {
        key: MemKey(KEY),
        pd: Pd(1),
        rights: Rights::LOCAL_WRITE,
        start: 0,
        len: u64::MAX,
        translation: Translation::Identity,
        capacity: 1 << 20,
        valid: true,
    };
    regions.insert(region).unwrap();
    regions
}

/// A queue with its driver.
struct Bench {
    memory: Memory,
    place: Place,
    tx: EtherTx,
    links: Links,
    regions: Regions,
    counters: EtherCounters,
    cqes: Vec<[u8; 64]>,
    link_up: bool,
    counter: u32,
}

/// Fields of an entry.
#[derive(Default)]
struct Wqe<'a> {
    opcode: u8,
    flags: u8,
    mss: u16,
    /// Headers in the entry.
    inline: &'a [u8],
    vlan: Option<(u16, u16)>,
    /// Lengths of the pieces that the rest of the frame lies in; the last takes what is left.
    pieces: &'a [usize],
}

impl Bench {
    fn new(limit: usize) -> Self {
        Self::with(Box::new(LoopbackPort::new(limit)))
    }

    fn with(port: Box<dyn crate::port::Port>) -> Self {
        let memory = Memory::new();
        let place = Place::new(&memory, 0, 64 << 6);
        let tx = EtherTx::new(TxSetup {
            sqn: SQN,
            buffer: place.buffer(),
            log_size: 6,
            doorbell: place.doorbell(),
            cqn: CQN,
        })
        .unwrap();
        let mut links = Links::default();
        assert!(links.add(Link::new(1, port, None), false));
        Self {
            memory,
            place,
            tx,
            links,
            regions: all_memory(),
            counters: EtherCounters::default(),
            cqes: Vec::new(),
            link_up: true,
            counter: 0,
        }
    }

    /// Posts raw bytes as an entry.
    fn post_raw(&mut self, bytes: &[u8]) {
        self.place.put(u64::from(self.counter % 64) * 64, bytes);
        self.counter += bytes.len().div_ceil(64) as u32;
        self.place.record(1, self.counter & 0xffff);
    }

    /// Posts a frame, of which the first bytes are in the entry and the rest in memory.
    fn post(&mut self, frame: &[u8], wqe: &Wqe<'_>) {
        let opcode = if wqe.opcode == 0 { 0x0a } else { wqe.opcode };
        let mut bytes = vec![0, 0, 0, opcode, 0, 0x12, 0x34, 0, 0, 0, 0, 8, 0, 0, 0, 0];
        bytes.extend([0, 0, 0, 0, wqe.flags, 0]);
        bytes.extend(wqe.mss.to_be_bytes());
        bytes.extend([0; 4]);
        match wqe.vlan {
            Some((kind, tag)) => {
                bytes.extend((0x8000 | kind).to_be_bytes());
                bytes.extend(tag.to_be_bytes());
            }
            None => {
                bytes.extend((wqe.inline.len() as u16).to_be_bytes());
                bytes.extend(wqe.inline);
            }
        }
        bytes.resize(bytes.len().next_multiple_of(16).max(32), 0);
        let mut rest = &frame[wqe.inline.len()..];
        let mut at = DATA + u64::from(self.counter % 8) * 0x2_0000;
        for piece in wqe.pieces.iter().copied().chain([usize::MAX]) {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            if now.is_empty() {
                continue;
            }
            self.memory.write(at, now);
            bytes.extend((now.len() as u32).to_be_bytes());
            bytes.extend(KEY.to_be_bytes());
            bytes.extend(at.to_be_bytes());
            at += now.len() as u64 + 0x123;
            rest = later;
        }
        bytes[7] = (bytes.len() / 16) as u8;
        self.post_raw(&bytes);
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
                assert_eq!(cqn, CQN);
                cqes.push(cqe);
                Pushed::Stored
            },
            counters: &mut self.counters,
            link_up: self.link_up,
        };
        let done = self.tx.turn(&mut cx);
        self.links.flush();
        done
    }

    /// What came out of the wire.
    fn sent(&mut self) -> Vec<(FrameMeta, Vec<u8>)> {
        let mut frames = Vec::new();
        for link in self.links.split().wires {
            link.port.receive(1000, &mut |frame: &Frame<'_>| {
                frames.push((frame.meta, frame.to_vec()));
                Rx::Taken
            });
        }
        frames
    }

    /// The one frame that comes of an entry.
    fn one(&mut self, frame: &[u8], wqe: &Wqe<'_>) -> (FrameMeta, Vec<u8>) {
        self.post(frame, wqe);
        assert_eq!(self.turn(), 1);
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{:?}", self.drops());
        sent.remove(0)
    }

    fn drops(&self) -> Vec<(&'static str, u64)> {
        self.counters.drops().collect()
    }
}

#[test]
fn frames_are_put_together_from_the_entry_and_memory() {
    let mut bench = Bench::new(100);
    for (len, inline, pieces) in [
        (60, 0, &[][..]),
        (60, 18, &[]),
        (61, 60, &[]),
        (1514, 18, &[1, 2, 700]),
        (9014, 14, &[100, 4096, 4096]),
        (60, 60, &[]),
        (300, 18, &[20; 10]),
    ] {
        let mut frame = payload(len);
        frame[..6].copy_from_slice(&HERE);
        let (inline, flags) = (&frame[..inline], 0);
        let sent = bench.one(
            &frame,
            &Wqe {
                inline,
                pieces,
                flags,
                ..Wqe::default()
            },
        );
        assert_eq!(sent, (FrameMeta::default(), frame));
    }
    assert_eq!(bench.cqes.len(), 7);
    assert_eq!(bench.counters.transmitted.unicast.packets, 7);
}

#[test]
fn completions_name_the_first_block_of_signaled_entries() {
    let mut bench = Bench::new(100);
    let frame = tcp4(&payload(100));
    for pieces in [&[10; 8][..], &[], &[]] {
        let wqe = Wqe {
            pieces,
            ..Wqe::default()
        };
        bench.post(&frame, &wqe);
    }
    // One that asks for no completion, and one that carries nothing.
    let mut nop = [0; 64];
    nop[7] = 1;
    bench.post_raw(&nop);
    nop[11] = 8;
    bench.post_raw(&nop);
    assert_eq!(bench.turn(), 5);
    let seen: Vec<_> = bench
        .cqes
        .iter()
        .map(|cqe| (u16::from_be_bytes([cqe[60], cqe[61]]), cqe[56], cqe[63]))
        .collect();
    assert_eq!(seen, [(0, 0x0a, 0), (3, 0x0a, 0), (4, 0x0a, 0), (6, 0, 0)]);
    assert_eq!(bench.cqes[0][57..60], [0, 0x12, 0x34]);
}

#[test]
fn checksums_are_left_to_whoever_takes_the_frame() {
    for frame in [
        tcp4(&payload(100)),
        tcp4(&payload(1400)),
        tcp6(&payload(1001)),
        udp4(&payload(33)),
        udp6(&payload(1200)),
    ] {
        let mut bench = Bench::new(10);
        let mut broken = frame.clone();
        if frame[12] == 8 {
            broken[24] ^= 0x55;
        }
        let wqe = Wqe {
            flags: L3L4,
            inline: &broken[..18],
            ..Wqe::default()
        };
        let (meta, mut sent) = bench.one(&broken, &wqe);
        assert!(meta.needs_csum() && !meta.is_gso());
        complete_checksum(&mut sent, &meta).unwrap();
        assert!(is_right(&sent));
        assert_eq!(sent, finished(frame), "the IP checksum is made too");
    }
}

#[test]
fn what_has_no_such_checksum_goes_as_it_is() {
    let mut arp = payload(60);
    arp[12..14].copy_from_slice(&[8, 6]);
    let mut icmp = tcp4(&payload(20));
    icmp[23] = 1;
    let mut bench = Bench::new(10);
    for frame in [arp, icmp] {
        let wqe = Wqe {
            flags: 0x80,
            ..Wqe::default()
        };
        let (meta, sent) = bench.one(&frame, &wqe);
        assert_eq!((meta, sent), (FrameMeta::default(), frame));
    }
}

#[test]
fn tags_are_inserted() {
    let frame = tcp4(&payload(300));
    let mut tagged = frame.clone();
    tagged.splice(12..12, [0x81, 0, 0x20, 0x07]);
    let mut bench = Bench::new(10);
    let vlan = Some((0, 0x2007));
    let plain = Wqe {
        vlan,
        ..Wqe::default()
    };
    assert_eq!(bench.one(&frame, &plain), (FrameMeta::default(), tagged));
    let wqe = Wqe {
        vlan: Some((1, 0x2007)),
        flags: L3L4,
        ..Wqe::default()
    };
    let (meta, sent) = bench.one(&frame, &wqe);
    assert_eq!(meta.csum_start, 38);
    assert_eq!(sent[12..18], [0x88, 0xa8, 0x20, 0x07, 8, 0]);
    assert_eq!(sent.len(), frame.len() + 4);
}

#[test]
fn large_tcp_frames_go_whole_and_can_be_segmented() {
    for (frame, headers, kind) in [
        (tcp4(&payload(30_000)), 54, FrameMeta::GSO_TCPV4),
        (tcp6(&payload(30_001)), 74, FrameMeta::GSO_TCPV6),
    ] {
        let mut bench = Bench::new(10);
        let wqe = Wqe {
            opcode: 0x0e,
            mss: 1400,
            flags: L3L4,
            inline: &frame[..headers],
            pieces: &[5000, 20_000],
            ..Wqe::default()
        };
        let (meta, mut sent) = bench.one(&frame, &wqe);
        assert_eq!((meta.gso_type, meta.gso_size), (kind, 1400));
        assert_eq!(usize::from(meta.hdr_len), headers);
        let slice = [vm_memory::VolatileSlice::from(&mut sent[..])];
        let mut all: Vec<u8> = Vec::new();
        Segmenter::new()
            .segment(&Frame::new(meta, &slice), &mut |segment| {
                assert!(is_right(segment));
                all.extend(&segment[headers..]);
                true
            })
            .unwrap();
        assert_eq!(all, frame[headers..]);
    }
}

#[test]
fn congestion_window_reduced_is_kept_in_mind() {
    let mut frame = tcp4(&payload(3000));
    frame[47] |= 0x80;
    let wqe = Wqe {
        opcode: 0x0e,
        mss: 1400,
        inline: &frame[..54],
        ..Wqe::default()
    };
    let (meta, _) = Bench::new(10).one(&frame, &wqe);
    assert_eq!(meta.gso_type, FrameMeta::GSO_TCPV4 | FrameMeta::GSO_ECN);
}

#[test]
fn large_udp_frames_become_datagrams() {
    for (frame, headers) in [(udp4(&payload(5000)), 42), (udp6(&payload(5000)), 62)] {
        let mut bench = Bench::new(10);
        let wqe = Wqe {
            opcode: 0x0e,
            mss: 1200,
            flags: L3L4,
            inline: &frame[..headers],
            pieces: &[700],
            ..Wqe::default()
        };
        bench.post(&frame, &wqe);
        assert_eq!(bench.turn(), 1);
        let sent = bench.sent();
        let mut all: Vec<u8> = Vec::new();
        for (index, (meta, mut datagram)) in sent.into_iter().enumerate() {
            complete_checksum(&mut datagram, &meta).unwrap();
            let len = if index == 4 { 200 } else { 1200 };
            assert_eq!(datagram.len(), headers + len);
            // The same as if it had been made alone, but for IPv4's number.
            let data = &frame[headers + 1200 * index..][..len];
            let alone = match headers {
                42 => {
                    let mut alone = udp4(data);
                    alone[19] += index as u8;
                    let sum = u16::from_be_bytes([alone[24], alone[25]]) - index as u16;
                    alone[24..26].copy_from_slice(&sum.to_be_bytes());
                    alone
                }
                _ => udp6(data),
            };
            assert_eq!(datagram, finished(alone));
            all.extend(&datagram[headers..]);
        }
        assert_eq!(all, frame[headers..]);
        assert_eq!(bench.cqes.len(), 1);
    }
}

#[test]
fn tagged_large_udp_frames_keep_their_payload() {
    let mut bench = Bench::new(10);
    let frame = udp4(&payload(2000));
    let wqe = Wqe {
        opcode: 0x0e,
        mss: 900,
        vlan: Some((0, 5)),
        ..Wqe::default()
    };
    bench.post(&frame, &wqe);
    bench.turn();
    let sent = bench.sent();
    let lens: Vec<_> = sent.iter().map(|(_, frame)| frame.len()).collect();
    assert_eq!(lens, [946, 946, 246]);
    let all: Vec<u8> = sent.iter().flat_map(|(_, f)| f[46..].to_vec()).collect();
    assert_eq!(all, frame[42..]);
}

#[test]
fn a_full_wire_is_waited_for_and_loses_nothing() {
    let mut bench = Bench::new(2);
    let frame = udp4(&payload(5000));
    let wqe = Wqe {
        opcode: 0x0e,
        mss: 1200,
        inline: &frame[..42],
        ..Wqe::default()
    };
    bench.post(&frame, &wqe);
    let (mut lens, mut turns) = (Vec::new(), 0);
    while bench.cqes.is_empty() {
        bench.turn();
        lens.extend(bench.sent().iter().map(|(_, frame)| frame.len() - 42));
        turns += 1;
        assert!(turns < 10);
    }
    lens.extend(bench.sent().iter().map(|(_, frame)| frame.len() - 42));
    assert_eq!(lens, [1200, 1200, 1200, 1200, 200]);
    assert!(bench.drops().is_empty());
}

#[test]
fn a_wire_that_stays_full_drops_in_the_end() {
    let mut bench = Bench::new(0);
    bench.post(&tcp4(b"x"), &Wqe::default());
    assert_eq!(bench.turn(), 0);
    let reader = bench.memory.table.reader();
    assert!(!bench.tx.is_posted(&reader.pin()), "the wire wakes");
    while bench.cqes.is_empty() {
        bench.turn();
    }
    assert_eq!(bench.drops(), [("port-full", 1)]);
}

#[test]
fn without_a_link_or_a_frame_entries_complete_all_the_same() {
    let mut bench = Bench::new(10);
    bench.link_up = false;
    bench.post(&tcp4(b"x"), &Wqe::default());
    bench.turn();
    bench.link_up = true;
    bench.post(&[1; 10], &Wqe::default());
    // Segments that would be next to nothing.
    let frame = tcp4(&payload(3000));
    let (opcode, mss) = (0x0e, 8);
    bench.post(
        &frame,
        &Wqe {
            opcode,
            mss,
            ..Wqe::default()
        },
    );
    bench.post(
        &udp4(&payload(3000)),
        &Wqe {
            opcode,
            mss,
            ..Wqe::default()
        },
    );
    bench.turn();
    assert_eq!(
        bench.drops(),
        [("bad-offload", 2), ("link-down", 1), ("short-frame", 1)]
    );
    assert_eq!((bench.cqes.len(), bench.sent().len()), (4, 0));
    assert!(!bench.tx.failed());
}

#[test]
fn a_bad_entry_puts_the_queue_in_error_until_it_is_reset() {
    let bad_key = {
        let mut bytes = vec![0, 0, 0, 0x0a, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0];
        bytes.extend([0; 16]);
        bytes.extend(60u32.to_be_bytes());
        bytes.extend((KEY + 1).to_be_bytes());
        bytes.extend(DATA.to_be_bytes());
        bytes
    };
    let mut no_entry = vec![0; 64];
    no_entry[3] = 0x0a;
    let mut unknown = vec![0; 64];
    (unknown[3], unknown[7]) = (0x25, 1);
    let mut long_inline = vec![0; 64];
    (long_inline[3], long_inline[7]) = (0x0a, 4);
    long_inline[28..30].copy_from_slice(&[0, 200]);
    for (bytes, syndrome) in [(bad_key, 4), (no_entry, 2), (unknown, 2), (long_inline, 2)] {
        let mut bench = Bench::new(10);
        bench.post(&tcp4(b"x"), &Wqe::default());
        bench.post_raw(&bytes);
        bench.post(&tcp4(b"x"), &Wqe::default());
        bench.turn();
        bench.turn();
        assert!(bench.tx.failed());
        assert_eq!(bench.sent().len(), 1);
        let cqe = bench.cqes[1];
        assert_eq!((cqe[63], cqe[55]), (0xd0, syndrome));
        assert_eq!(cqe[60..62], [0, 1]);
        // What is behind it is flushed, if it can be told what it is, and what comes later.
        bench.post(&tcp4(b"x"), &Wqe::default());
        bench.turn();
        let flushed: Vec<_> = bench.cqes[2..]
            .iter()
            .map(|cqe| (cqe[63], cqe[55]))
            .collect();
        let has_length = bytes[7] != 0;
        let count = if has_length { 2 } else { 1 };
        assert_eq!(flushed, vec![(0xd0, 5); count]);
        assert_eq!(bench.cqes.last().unwrap()[60..62], [0, 3]);
        assert_eq!(bench.sent().len(), 0);
        bench.tx.reset();
        bench.counter = 0;
        bench.post(&tcp4(b"x"), &Wqe::default());
        assert_eq!(bench.turn(), 1);
    }
}

#[test]
fn frames_on_a_faulty_wire_are_done_with() {
    let faults = Faults {
        drop: 1_000_000,
        ..Faults::default()
    };
    let port = FaultPort::new(LoopbackPort::default(), faults, 1);
    let mut bench = Bench::with(Box::new(port));
    for _ in 0..10 {
        bench.post(&tcp4(b"x"), &Wqe::default());
    }
    assert_eq!(bench.turn(), 10);
    assert_eq!((bench.cqes.len(), bench.sent().len()), (10, 0));
    assert_eq!(
        bench.counters.transmitted.unicast,
        Count {
            packets: 10,
            octets: 550
        }
    );
}

#[test]
fn random_entries_never_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut noise = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bench = Bench::new(4);
    let (mut good, mut bad) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = [0u8; 128];
        for chunk in bytes.chunks_mut(8) {
            let word = noise() & noise() & noise();
            chunk.copy_from_slice(&word.to_be_bytes());
        }
        bytes[3] = [0, 0x0a, 0x0e, 0x0e, 0x0a, 0x25][(noise() % 6) as usize];
        bytes[7] = (noise() % 9) as u8;
        // Often a short inline header and a good key.
        bytes[28] &= 0x81;
        bytes[29] = (noise() % 20) as u8;
        for at in [36, 52, 68] {
            if noise() % 4 != 0 {
                bytes[at - 4..at].copy_from_slice(&((noise() % 3000) as u32).to_be_bytes());
                bytes[at..at + 4].copy_from_slice(&KEY.to_be_bytes());
                let addr = BASE + noise() % 0x30_0000;
                bytes[at + 4..at + 12].copy_from_slice(&addr.to_be_bytes());
            }
        }
        bench.post_raw(&bytes);
        bench.turn();
        bench.sent();
        match bench.tx.failed() {
            true => {
                bad += 1;
                bench.tx.reset();
                bench.counter = 0;
                bench.place.record(1, 0);
            }
            false => good += 1,
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} {bad}");
}
