//! What drivers may ask for beyond frames in and out.

use super::*;
use crate::frame::FrameMeta;
use crate::net::hash::types;
use crate::net::header;
use crate::port::{Port, RxSink, TxError};
use crate::virtio::feature::RING_RESET;
use m2m_fabric::proto::LinkStats;
use vm_memory::VolatileSlice;

/// Frames that lie on a wire.
type Wire = Arc<Mutex<Vec<Sent>>>;
type Sent = (FrameMeta, Vec<u8>);

/// A wire on which a test lays frames.
struct Laid(Wire);

impl Port for Laid {
    fn name(&self) -> &str {
        "laid"
    }

    fn transmit(&mut self, _: &Frame<'_>) -> Result<(), TxError> {
        Ok(())
    }

    fn flush(&mut self) {}

    fn receive(&mut self, _budget: usize, sink: &mut dyn RxSink) -> usize {
        let mut frames = std::mem::take(&mut *self.0.lock().unwrap());
        for (meta, bytes) in &mut frames {
            sink.frame(&Frame::new(*meta, &[VolatileSlice::from(&mut bytes[..])]));
        }
        frames.len()
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

/// A bench with such a wire.
fn with_wire(features: u64) -> (Bench, Wire) {
    let mut b = Bench::new(features);
    let wire = Wire::default();
    assert!(
        b.links
            .add(Link::new(1, Box::new(Laid(wire.clone())), None), false)
    );
    (b, wire)
}

/// UDP over IPv4 from a port; the checksum is unfinished.
fn udp(from: u16, payload: usize) -> (FrameMeta, Vec<u8>) {
    let mut f = [&[0xff; 6][..], &[2, 9, 9, 9, 9, 9], &[8, 0], &[0x45, 0]].concat();
    f.extend((28 + payload as u16).to_be_bytes());
    f.extend([0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend(from.to_be_bytes());
    f.extend([0, 80]);
    f.extend((8 + payload as u16).to_be_bytes());
    let sum: u32 = 0x0a00 + 1 + 0x0a00 + 2 + 17 + 8 + payload as u32;
    f.extend((sum as u16).to_be_bytes());
    f.extend((0..payload).map(|n| n as u8));
    let meta = FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..FrameMeta::default()
    };
    (meta, f)
}

fn udp_sum(frame: &[u8]) -> u16 {
    let udp = &frame[34..];
    let pseudo = [&frame[26..34], &[0, 17], &(udp.len() as u16).to_be_bytes()].concat();
    ones_sum(&[&pseudo, udp].concat())
}

fn large_udp() -> (FrameMeta, Vec<u8>) {
    let (meta, bytes) = udp(1000, 3000);
    let meta = FrameMeta {
        gso_type: FrameMeta::GSO_UDP,
        gso_size: 1400,
        hdr_len: 42,
        ..meta
    };
    (meta, bytes)
}

#[test]
fn large_udp_frames_stay_whole_or_are_cut_as_the_driver_takes_them() {
    for offered in RINGS {
        let (mut b, wire) = with_wire(offered);
        let (meta, bytes) = large_udp();
        b.receive_buffers(&[2048; 3]);
        wire.lock().unwrap().push((meta, bytes.clone()));
        b.turns();
        let used: u32 = b.rings[RX].take_used().iter().map(|(_, len)| len).sum();
        assert_eq!(used as usize, 12 + bytes.len());
        assert_eq!(
            b.memory.read(buffer(0), 6),
            [1, 5, 42, 0, 0x78, 5],
            "as it was sent"
        );

        let (mut b, wire) = with_wire(offered & !features::GUEST_USO6);
        b.receive_buffers(&[2048; 4]);
        wire.lock().unwrap().push((meta, bytes.clone()));
        b.turns();
        assert_eq!(b.rings[RX].take_used(), [(0, 1454), (1, 1454), (2, 254)]);
        for (n, len) in [(0, 1400), (1, 1400), (2, 200)] {
            let got = b.memory.read(buffer(n) + 12, 42 + len);
            assert_eq!(udp_sum(&got), 0xffff, "segment {n}");
            assert_eq!(ones_sum(&got[14..34]), 0xffff, "segment {n}");
            assert_eq!(got[38..40], (8 + len as u16).to_be_bytes());
            let at = 42 + 1400 * n as usize;
            assert_eq!(got[42..], bytes[at..at + len]);
        }
    }
}

#[test]
fn a_driver_sends_large_udp_and_cwr_only_if_that_was_negotiated() {
    let (meta, bytes) = large_udp();
    let udp_header = header::emit(&meta, 0);
    let (mut tcp_header, tcp_bytes) = tcp(3000);
    tcp_header[1] = 0x81;
    tcp_header[4..6].copy_from_slice(&1000u16.to_le_bytes());
    let cases: [(u64, [u8; 12], Vec<u8>); 2] = [
        (features::HOST_USO, udp_header, bytes),
        (features::HOST_ECN, tcp_header, tcp_bytes),
    ];
    for (feature, header, bytes) in cases {
        let mut b = Bench::new(SHORT);
        b.send(&header, &bytes);
        assert_eq!(b.device.stats().queues[TX].packets, 1, "{feature:#x}");
        let mut b = Bench::new(SHORT & !feature);
        b.send(&header, &bytes);
        assert_eq!(b.dropped(TX, drop_reason::BAD_OFFLOAD), 1, "{feature:#x}");
    }
}

#[test]
fn frames_with_cwr_stay_whole_only_for_drivers_that_take_them() {
    let (header, bytes) = tcp(3000);
    let meta = FrameMeta {
        gso_type: FrameMeta::GSO_TCPV4 | FrameMeta::GSO_ECN,
        gso_size: 1000,
        ..header::parse(&header)
    };
    for (features, frames) in [(SHORT, 1), (SHORT & !features::GUEST_ECN, 3)] {
        let (mut b, wire) = with_wire(features);
        b.receive_buffers(&[4096; 4]);
        wire.lock().unwrap().push((meta, bytes.clone()));
        b.turns();
        assert_eq!(b.device.stats().queues[RX].packets, frames);
    }
}

#[test]
fn offloads_are_taken_and_left_while_the_driver_runs() {
    let (mut b, wire) = with_wire(SHORT);
    let (meta, bytes) = udp(1000, 100);
    b.receive_buffers(&[2048; 3]);
    wire.lock().unwrap().push((meta, bytes.clone()));
    b.turns();
    assert_eq!(b.control(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), OK);
    wire.lock().unwrap().push((meta, bytes.clone()));
    b.turns();
    let all = features::GUEST_OFFLOADS.to_le_bytes();
    assert_eq!(b.control(&[&[5, 0][..], &all].concat()), OK);
    wire.lock().unwrap().push((meta, bytes));
    b.turns();
    assert_eq!(b.rings[RX].take_used().len(), 3);
    let flags: Vec<u8> = (0..3).map(|n| b.memory.read(buffer(n), 1)[0]).collect();
    assert_eq!(flags, [1, 0, 1], "unfinished, finished, unfinished");
    assert_eq!(udp_sum(&b.memory.read(buffer(1) + 12, 142)), 0xffff);
}

/// Scaling over both pairs with a key of ones and zeroes.
fn scale(table: &[u16], kinds: u32) -> Vec<u8> {
    let mut command = vec![4, 1];
    command.extend(kinds.to_le_bytes());
    command.extend((table.len() as u16 - 1).to_le_bytes());
    command.extend([1, 0]);
    command.extend(table.iter().flat_map(|pair| pair.to_le_bytes()));
    command.extend([2, 0, 40]);
    command.extend((0..40u8).map(|n| n.wrapping_mul(7) ^ 0x35));
    command
}

#[test]
fn scaling_sends_a_flow_where_its_hash_leads() {
    let (mut b, wire) = with_wire(SHORT);
    let received = |b: &Bench| [RX, 2].map(|q| b.device.stats().queues[q].packets);
    for ring in [RX, 2] {
        for n in 0..14u16 {
            b.rings[ring].chain(
                n,
                &[(buffer(u64::from(n) + 14 * (ring as u64 / 2)), 512, WRITE)],
            );
        }
    }
    let flows = |wire: &Wire| (0..5).for_each(|n| wire.lock().unwrap().push(udp(n, 10)));
    assert_eq!(b.control(&scale(&[0, 0], types::UDPV4)), OK);
    flows(&wire);
    b.turns();
    assert_eq!(received(&b), [5, 0]);
    assert_eq!(b.control(&scale(&[0, 1], types::UDPV4)), OK);
    flows(&wire);
    b.turns();
    let [first, second] = received(&b);
    assert!(
        first > 5 && second > 0 && first + second == 10,
        "{first} {second}"
    );
    // Without a hash: the unclassified pair.
    assert_eq!(b.control(&scale(&[0, 0], types::TCPV4)), OK);
    wire.lock().unwrap().push(udp(1, 10));
    b.turns();
    assert_eq!(received(&b), [first, second + 1]);
}

#[test]
fn reported_hashes_stand_in_a_longer_header_both_ways() {
    for layout in [0, RING_PACKED] {
        let (mut b, wire) = with_wire(OFFERED & !RING_PACKED | layout);
        assert_eq!(b.control(&scale(&[0, 0], types::UDPV4)), OK);
        b.receive_buffers(&[2048; 2]);
        // Where what is not hashed goes.
        b.rings[2].chain(0, &[(buffer(9), 512, WRITE)]);
        wire.lock().unwrap().push(udp(7, 10));
        wire.lock().unwrap().push(udp(8, 10));
        wire.lock().unwrap().push((FrameMeta::default(), frame(60)));
        b.turns();
        assert_eq!(b.rings[RX].take_used(), [(0, 72), (1, 72)]);
        assert_eq!(b.rings[2].take_used(), [(0, 80)]);
        let header = |n| b.memory.read(buffer(n), 20);
        assert_eq!(header(0)[16..], [3, 0, 0, 0], "UDP over IPv4");
        assert_ne!(header(0)[12..16], header(1)[12..16]);
        assert_eq!(header(9)[12..], [0; 8], "not hashed");
        assert_eq!(b.memory.read(buffer(9) + 20, 60), frame(60));
        let at = DATA + 0x8_0000;
        b.memory.write(at, &[&[0; 20][..], &frame(60)].concat());
        b.rings[TX].chain(0, &[(at, 80, 0)]);
        b.turns();
        let stats = b.device.stats();
        assert_eq!((stats.queues[TX].packets, stats.queues[TX].bytes), (1, 60));
    }
}

#[test]
fn interrupts_wait_for_as_many_frames_and_as_long_as_the_driver_says() {
    for layout in [0, RING_PACKED] {
        let (mut b, wire) = with_wire(SHORT & !(RING_PACKED | feature::EVENT_IDX) | layout);
        b.receive_buffers(&[512; 12]);
        let interrupts = |b: &Bench| b.device.stats().queues[RX].interrupts;
        let came = |b: &mut Bench, wire: &Wire| {
            wire.lock().unwrap().push((FrameMeta::default(), frame(60)));
            b.turns();
        };
        came(&mut b, &wire);
        assert_eq!(interrupts(&b), 1, "at once");
        assert_eq!(b.control(&[6, 1, 3, 0, 0, 0, 0x40, 0x42, 0x0f, 0]), OK);
        came(&mut b, &wire);
        came(&mut b, &wire);
        assert_eq!(interrupts(&b), 1, "two of three");
        assert!(b.device.deadline(&b.links, Instant::now()).is_some());
        came(&mut b, &wire);
        assert_eq!(interrupts(&b), 2);
        came(&mut b, &wire);
        b.links.set_now(b.links.now() + Duration::from_millis(999));
        b.turns();
        assert_eq!(interrupts(&b), 2);
        b.links.set_now(b.links.now() + Duration::from_millis(1));
        b.turns();
        assert_eq!(interrupts(&b), 3, "a second later");
        // One queue alone, and what it was set to.
        assert_eq!(b.control(&[6, 2, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]), OK);
        assert_eq!(b.ask(&[6, 3, 0, 0, 0, 0], 8), [OK, 1, 0, 0, 0, 9, 0, 0, 0]);
        came(&mut b, &wire);
        assert_eq!(interrupts(&b), 4);
    }
}

#[test]
fn statistics_are_answered_and_begin_anew_with_the_driver() {
    for offered in RINGS {
        let (mut b, wire) = with_wire(offered);
        b.receive_buffers(&[2048; 2]);
        // Where what is not hashed goes.
        b.rings[2].chain(0, &[(buffer(9), 512, WRITE)]);
        wire.lock().unwrap().push(udp(7, 10));
        b.turns();
        b.rings[TX].chain(0, &[(DATA, 5, 0)]);
        b.turns();
        let caps = b.ask(&[8, 0], 8);
        assert_eq!(caps, [OK, 7, 0, 7, 0, 1, 0, 0, 0]);
        let entry = |queue: u8, types: u64| {
            [&[queue, 0, 0, 0, 0, 0, 0, 0][..], &types.to_le_bytes()].concat()
        };
        let ask = [
            &[8, 1][..],
            &entry(0, 3),
            &entry(1, 1 << 16),
            &entry(4, 1 << 32),
        ]
        .concat();
        let got = b.ask(&ask, 400);
        assert_eq!((got[0], got.len()), (OK, 1 + 56 + 40 + 56 + 24));
        let word = |at: usize| u64::from_le_bytes(got[at..at + 8].try_into().unwrap());
        assert_eq!(
            (word(1 + 16), word(1 + 24)),
            (1, 52),
            "received frames and bytes"
        );
        assert_eq!(word(57 + 16), 1, "of them with an unfinished checksum");
        assert_eq!((word(97 + 40), word(97 + 48)), (1, 1), "dropped, malformed");
        assert_eq!(
            (word(153 + 8), word(153 + 16)),
            (2, 1),
            "commands: the one before was done"
        );
        assert_eq!(b.ask(&ask, 100), [ERR], "no room for all of it");
        b.start(offered);
        let got = b.ask(&ask, 400);
        assert!(got[9..57].iter().all(|byte| *byte == 0), "{got:?}");
    }
}

#[test]
fn a_driver_whose_device_moved_is_asked_to_announce_itself_until_it_says_that_it_did() {
    let mut b = Bench::new(SHORT);
    let setups: Vec<_> = b.rings.iter().map(|ring| ring.setup).collect();
    b.device.resume(SHORT & !(RING_PACKED | IN_ORDER), &setups);
    b.start_rings(SHORT & !(RING_PACKED | IN_ORDER));
    let before = b.signals.config_generation();
    b.device.wired();
    b.turns();
    assert!(b.device.config.announce());
    assert_ne!(b.signals.config_generation(), before);
    assert_eq!(b.control(&[3, 0]), OK);
    assert!(!b.device.config.announce());
    // Without the feature nobody is asked.
    let without = SHORT & !(RING_PACKED | IN_ORDER | features::GUEST_ANNOUNCE);
    b.start_rings(without);
    b.device.resume(without, &setups);
    b.turns();
    assert!(!b.device.config.announce());
}

#[test]
fn without_multiqueue_the_third_queue_takes_commands() {
    let plain = SHORT & !(features::MQ | features::RSS | RING_PACKED | IN_ORDER);
    let mut b = Bench::new(plain);
    let at = DATA + 0xf_0000;
    b.memory.write(at, &[0, 0, 0, 0xaa]);
    b.rings[2].chain(0, &[(at, 3, 0), (at + 3, 1, WRITE)]);
    b.turns();
    assert_eq!(b.rings[2].take_used(), [(0, 1)]);
    assert_eq!(b.memory.read(at + 3, 1), [OK]);
}

#[test]
fn frames_wait_on_the_wire_until_a_former_process_s_driver_is_taken_over() {
    let (mut b, wire) = with_wire(SHORT);
    b.device.stop(&mut b.links);
    b.device.resuming();
    b.device.wired();
    wire.lock().unwrap().push(udp(1, 10));
    b.turns();
    assert_eq!(wire.lock().unwrap().len(), 1);
    b.device.taken_over();
    b.turns();
    assert!(wire.lock().unwrap().is_empty());
}

#[test]
fn a_queue_that_is_reset_alone_begins_anew_and_the_others_do_not_notice() {
    for offered in RINGS {
        let mut b = Bench::new(offered | RING_RESET);
        b.receive_buffers(&[2048; 2]);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
        b.device.stop_queue(RX as u16, &mut b.links);
        b.send(&[0; 12], &frame(61));
        assert_eq!(b.rings[TX].take_used().len(), 2);
        assert_eq!(b.dropped(RX, drop_reason::NOT_RUNNING), 1);
        b.rings[RX] = Driver::fresh(&b.memory, RX as u64, SIZE, RingFeatures::of(offered));
        let setup = b.rings[RX].setup;
        b.device.start_queue(RX as u16, setup);
        b.receive_buffers(&[2048]);
        b.send(&[0; 12], &frame(62));
        assert_eq!(b.rings[RX].take_used(), [(0, 74)]);
        assert!(!b.signals.needs_reset());
    }
}

/// Where a ring begins, as [`Ring::position`] says it.
fn beginning(features: u64) -> u32 {
    match features & RING_PACKED {
        0 => 0,
        // As DPDK's virtio-user says it, without the upper half.
        _ => 0x8000,
    }
}

#[test]
fn queues_stop_and_go_on_where_they_are_also_with_another_driver_in_between() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.start_rings(offered);
        b.device.wired();
        b.device.open(offered, &mut b.links);
        let mut positions = [beginning(offered); 2];
        for n in 0..50 {
            for queue in [RX, TX] {
                let setup = b.rings[queue].setup;
                let position = positions[queue];
                assert!(b.device.start_queue_at(queue as u16, setup, position));
            }
            b.receive_buffers(&[2048]);
            b.send(&[0; 12], &frame(60 + n));
            assert_eq!(b.rings[RX].take_used(), [(0, 72 + n as u32)]);
            assert_eq!(b.rings[TX].take_used().len(), 1);
            for queue in [RX, TX] {
                let position = b.device.stop_queue(queue as u16, &mut b.links);
                positions[queue] = position.unwrap();
                assert_eq!(b.device.stop_queue(queue as u16, &mut b.links), None);
            }
            if n % 3 == 0 {
                b.device.open(offered, &mut b.links);
            }
        }
    }
}

#[test]
fn a_front_end_that_is_faster_than_the_wires_loses_no_frame() {
    let mut b = Bench::new(SHORT);
    b.start_rings(SHORT);
    b.device.open(SHORT, &mut b.links);
    let setup = b.rings[TX].setup;
    assert!(b.device.start_queue_at(TX as u16, setup, beginning(SHORT)));
    b.send(&[0; 12], &frame(60));
    assert_eq!(b.rings[TX].take_used(), []);
    b.device.wired();
    b.turns();
    assert_eq!(b.rings[TX].take_used().len(), 1);
}

#[test]
fn positions_that_a_ring_does_not_have_are_refused() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        let setup = b.rings[RX].setup;
        b.device.stop(&mut b.links);
        let start = beginning(offered);
        assert!(!b.device.start_queue_at(0, setup, start), "nobody is there");
        b.device.open(offered, &mut b.links);
        let size = u32::from(SIZE);
        let wrong = match offered & RING_PACKED {
            0 => vec![1 << 16, 0x8000_0000],
            _ => vec![start | size, size, 0x7fff, 0x8000_8000 | size],
        };
        for position in wrong {
            let started = b.device.start_queue_at(0, setup, position);
            assert!(!started, "{position:#x}");
        }
        assert!(b.device.start_queue_at(0, setup, start));
        if offered & RING_PACKED != 0 {
            // Both halves are told, whatever was said.
            let position = b.device.stop_queue(0, &mut b.links);
            assert_eq!(position, Some(0x8000_8000));
        }
        assert!(!b.device.start_queue_at(99, setup, start));
    }
}

#[test]
fn without_a_control_queue_pairs_are_used_as_the_face_says() {
    let mut b = Bench::new(SHORT);
    b.start_rings(SHORT);
    b.device.open(SHORT, &mut b.links);
    b.device.wired();
    let start = beginning(SHORT);
    for queue in 0..4 {
        let setup = b.rings[queue].setup;
        assert!(b.device.start_queue_at(queue as u16, setup, start));
    }
    for pairs in [2, 99, 0] {
        b.device.use_pairs(pairs);
        let session = b.device.session.as_ref().unwrap();
        assert_eq!(session.settings.pairs, pairs.clamp(1, 2));
        // What is to be sent is taken from each ring there is.
        b.rings[3].chain(0, &[(DATA, 72, 0)]);
        b.turns();
        assert_eq!(b.rings[3].take_used().len(), 1);
    }
    b.device.arm(&mut b.links);
    assert!(b.rings[3].wants_kick());
}

#[test]
fn a_transmit_queue_that_discards_gives_all_back_and_sends_nothing() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        b.start_rings(offered);
        b.device.wired();
        b.device.open(offered, &mut b.links);
        let setup = b.rings[TX].setup;
        let started = b
            .device
            .start_queue_at(TX as u16, setup, beginning(offered));
        assert!(started);
        b.device.discard_from(TX as u16, true);
        for n in 1..40 {
            b.send(&[0; 12], &frame(60));
            assert_eq!(b.rings[TX].take_used().len(), 1);
            assert_eq!(b.dropped(TX, drop_reason::NOT_RUNNING), n);
        }
        assert_eq!(b.device.stats().queues[TX].packets, 0);
        b.device.discard_from(TX as u16, false);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.device.stats().queues[TX].packets, 1);
    }
}

#[test]
fn a_broken_queue_is_counted_with_its_reason_and_the_others_go_on() {
    for offered in RINGS {
        let mut b = Bench::new(offered);
        assert_eq!(b.control(&[4, 0, 2, 0]), OK);
        b.rings[3].break_ring();
        b.turns();
        assert_eq!(b.control(&[4, 0, 1, 0]), OK);
        assert!(b.signals.needs_reset());
        let drops = b.drops(3);
        assert!(
            drops.len() == 1 && drops[0].0.starts_with("ring-"),
            "{drops:?}"
        );
        b.receive_buffers(&[2048]);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
        assert_eq!(b.control(&[0, 0, 1]), OK);
    }
}
