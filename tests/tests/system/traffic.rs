//! Frames between two functions over the shared-memory wire.

use crate::fixture::{Pair, exchange, flow, receive_stream, receive_until};
use distdpu_tests::dpu::Net;
use distdpu_tests::memory::Shape;
use distdpu_tests::packet::{Flow, judge, payload};
use distdpu_tests::time::QUIET;
use distdpu_tests::virtio_net::features::{self, LINUX, PLAIN};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use distdpu_tests::wire;

/// Payload of the largest TCP frame over IPv6: 65550 bytes in all, which is what a driver without merged
/// buffers has room for (virtio 1.3 §5.1.6.3.1).
const LARGEST: usize = 65550 - 14 - 40 - 20;

fn plain() -> Setup {
    Setup {
        features: PLAIN,
        ..Setup::default()
    }
}

fn with(features: u64) -> Setup {
    Setup {
        features,
        ..Setup::default()
    }
}

fn all_sizes(pair: &mut Pair) {
    for (seed, len) in [
        60, 61, 64, 128, 590, 1513, 1514, 1518, 2035, 2036, 2037, 4096, 9013, 9014,
    ]
    .into_iter()
    .enumerate()
    {
        for flow in [
            flow(0, 1),
            flow(0, 1).tcp(),
            flow(0, 1).v6(),
            flow(0, 1).tcp().v6(),
        ] {
            if len >= flow.headers() {
                exchange(&mut pair.a, &mut pair.b, &flow.frame(len, seed as u64));
            }
        }
        exchange(
            &mut pair.b,
            &mut pair.a,
            &flow(1, 0).frame(len, seed as u64),
        );
    }
}

#[test]
fn frames_of_all_sizes_arrive_as_they_were_sent() {
    all_sizes(&mut Pair::started(Setup::default()));
}

#[test]
fn frames_of_all_sizes_arrive_without_any_offload() {
    all_sizes(&mut Pair::started(plain()));
}

#[test]
fn every_combination_of_ring_features_carries_frames() {
    let mut pair = Pair::new();
    for (index, without) in [
        0,
        features::EVENT_IDX,
        features::INDIRECT,
        features::MRG_RXBUF,
        features::EVENT_IDX | features::INDIRECT | features::MRG_RXBUF,
        features::CTRL_VQ
            | features::CTRL_RX
            | features::CTRL_VLAN
            | features::MQ
            | features::CTRL_MAC_ADDR,
    ]
    .into_iter()
    .enumerate()
    {
        let pieces = [1, 3, 19, 0, 2, 5][index];
        let setup = Setup {
            features: LINUX & !without,
            transmit_pieces: pieces,
            receive_pieces: 1 + index as u32 % 3,
            receive_buffers: 40,
            ..Setup::default()
        };
        pair.start(setup, setup);
        for len in [60, 1514, 9014] {
            exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(len, 1));
            exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(len, 2));
        }
        let data = payload(60000, 3);
        large(&mut pair.a, &mut pair.b, flow(0, 1).tcp(), &data);
    }
}

/// A TSO frame that the receiver takes whole.
fn large(from: &mut VirtioNet, to: &mut VirtioNet, flow: Flow, data: &[u8]) {
    from.send(&flow.large(1000, data, 1448)).unwrap();
    let got = to.receive().unwrap();
    assert_eq!(got.header.gso_type, if flow.v6 { 4 } else { 1 });
    assert_eq!(got.header.gso_size, 1448);
    assert_ne!(
        got.header.flags & 1,
        0,
        "a GSO frame needs its checksum (virtio 1.3 §5.1.6.4)"
    );
    assert_eq!(usize::from(got.header.csum_start), flow.headers() - 20);
    assert_eq!(got.header.csum_offset, 16);
    let seen = judge(&got.frame).unwrap();
    assert!(
        seen.network_sum && seen.payload == data,
        "{} bytes",
        seen.payload.len()
    );
}

#[test]
fn large_frames_pass_whole_between_guests_that_take_them() {
    let mut pair = Pair::started(Setup::default());
    for (seed, len) in [1449, 2896, 30000, LARGEST].into_iter().enumerate() {
        let data = payload(len, seed as u64);
        large(&mut pair.a, &mut pair.b, flow(0, 1).tcp(), &data);
        large(&mut pair.b, &mut pair.a, flow(1, 0).tcp().v6(), &data);
    }
    pair.works();
}

#[test]
fn large_frames_are_cut_for_a_guest_that_does_not_take_them() {
    let mut pair = Pair::new();
    let csum_only = LINUX & !(features::GUEST_TSO4 | features::GUEST_TSO6 | features::GUEST_CSUM);
    for receiver in [plain(), with(csum_only)] {
        pair.start(Setup::default(), receiver);
        for flow in [flow(0, 1).tcp(), flow(0, 1).tcp().v6()] {
            for (len, segment) in [
                (1449, 1448),
                (14480, 1448),
                (LARGEST, 1448),
                (LARGEST, 8940),
                (3000, 536),
            ] {
                let data = payload(len, len as u64);
                pair.a.send(&flow.large(1000, &data, segment)).unwrap();
                let got = receive_stream(&mut pair.b, len, segment.into());
                assert!(got == data, "{len} bytes in segments of {segment}");
            }
        }
        exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(1514, 2));
    }
}

#[test]
fn checksums_are_completed_for_a_guest_that_does_not_take_partial_ones() {
    let mut pair = Pair::new();
    pair.start(Setup::default(), plain());
    let tagged = Flow {
        vlan: Some(9),
        ..flow(0, 1)
    };
    let odd = [1, 2, 3, 99, 1000, 1471, 8000];
    for flow in [
        flow(0, 1),
        flow(0, 1).v6(),
        flow(0, 1).tcp(),
        flow(0, 1).tcp().v6(),
        tagged,
    ] {
        for len in odd {
            let data = payload(len, 7);
            pair.a.send(&flow.partial(1, &data)).unwrap();
            let got = pair.b.receive().unwrap();
            assert_eq!(got.header.flags & 1, 0);
            let seen = judge(&got.frame).unwrap();
            assert!(seen.transport_sum, "{flow:?} with {len} bytes");
            assert!(seen.payload == data);
        }
    }
}

#[test]
fn partial_checksums_pass_to_a_guest_that_takes_them() {
    let mut pair = Pair::started(Setup::default());
    let data = payload(1000, 7);
    let sent = flow(0, 1).partial(1, &data);
    pair.a.send(&sent).unwrap();
    let got = pair.b.receive().unwrap();
    let seen = judge(&got.frame).unwrap();
    assert!(seen.payload == data);
    if got.header.flags & 1 == 0 {
        assert!(seen.transport_sum, "completed, or marked as partial");
    } else {
        assert_eq!((got.header.csum_start, got.header.csum_offset), (34, 6));
    }
}

#[test]
fn a_udp_checksum_that_comes_out_as_zero_is_sent_as_ones() {
    let mut pair = Pair::new();
    pair.start(Setup::default(), plain());
    // The last word makes the sum 0xffff, whose inverse is 0, which UDP reads as "none" (RFC 768).
    let base = flow(0, 1).finished(0, &[0, 0]);
    let sum = !u16::from_be_bytes([base.frame[40], base.frame[41]]);
    let word = (!sum).to_be_bytes();
    pair.a.send(&flow(0, 1).partial(0, &word)).unwrap();
    let got = pair.b.receive().unwrap();
    assert_eq!(got.frame[40..42], [0xff, 0xff]);
}

#[test]
fn small_merged_buffers_carry_large_frames() {
    let mut pair = Pair::new();
    let setup = Setup {
        receive_buffer: 256,
        receive_buffers: 256,
        ..Setup::default()
    };
    pair.start(setup, setup);
    for (seed, len) in [60, 243, 244, 245, 1514, 9014].into_iter().enumerate() {
        exchange(
            &mut pair.a,
            &mut pair.b,
            &flow(0, 1).frame(len, seed as u64),
        );
    }
    large(
        &mut pair.a,
        &mut pair.b,
        flow(0, 1).tcp(),
        &payload(40000, 3),
    );
    pair.works();
}

#[test]
fn a_frame_that_fits_no_buffer_is_dropped_and_the_next_arrives() {
    let mut pair = Pair::new();
    let small = Setup {
        features: PLAIN,
        receive_buffer: 1526,
        ..Setup::default()
    };
    pair.start(plain(), small);
    pair.a.send(&flow(0, 1).frame(5000, 1)).unwrap();
    exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(1514, 2));
    let stats = pair.dpu.function_stats(1).unwrap();
    let drops: u64 = stats["queues"][0]["drops"]
        .as_object()
        .map_or(0, |d| d.values().filter_map(|n| n.as_u64()).sum());
    assert_eq!(drops, 1, "{stats}");
}

#[test]
fn a_merged_frame_larger_than_the_whole_ring_is_dropped_and_the_next_arrives() {
    let mut pair = Pair::new();
    let tiny = Setup {
        receive_buffer: 256,
        receive_buffers: 16,
        queue_size: 16,
        ..Setup::default()
    };
    pair.start(Setup::default(), tiny);
    pair.a.send(&flow(0, 1).frame(9014, 1)).unwrap();
    pair.a
        .send(&flow(0, 1).tcp().large(1000, &payload(60000, 1), 1448))
        .unwrap();
    exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(1514, 2));
}

#[test]
fn a_firmware_driver_with_queues_of_16_and_no_interrupts_works() {
    let mut pair = Pair::new();
    let firmware = Setup {
        features: PLAIN,
        queue_size: 16,
        receive_buffers: 16,
        interrupts: false,
        ..Setup::default()
    };
    pair.start(firmware, firmware);
    pair.works();
    pair.a.reset().unwrap();
    pair.start(Setup::default(), Setup::default());
    pair.works();
}

#[test]
fn frames_that_wait_before_the_receiver_has_buffers_arrive_after() {
    let mut pair = Pair::new();
    let late = Setup {
        fill: false,
        ..Setup::default()
    };
    pair.start(Setup::default(), late);
    let sent = flow(0, 1).frame(1000, 4);
    pair.a.send(&sent).unwrap();
    assert!(pair.b.receive_within(QUIET).unwrap_err().is_timeout());
    pair.b.fill_receive(0).unwrap();
    let got = pair.b.receive().unwrap();
    assert!(got.frame == sent.frame, "the frame that waited");
    exchange(&mut pair.a, &mut pair.b, &flow(0, 1).frame(60, 5));
}

#[test]
fn four_queue_pairs_share_the_flows_and_keep_each_in_order() {
    let net = Net {
        pairs: 4,
        ..Net::default()
    };
    let mut pair = Pair::with(net, Guest::default());
    let setup = Setup {
        pairs: 4,
        ..Setup::default()
    };
    pair.start(setup, setup);
    let flows: Vec<_> = (0..32)
        .map(|n| flow(0, 1).tcp().port(1000 + 7 * n))
        .collect();
    let mut seen = vec![0u32; flows.len()];
    let mut used = [0usize; 4];
    for round in 0..20u32 {
        for (index, flow) in flows.iter().enumerate() {
            let packet = flow.finished(round, &(index as u32).to_be_bytes());
            pair.a.send_on(index % 4, &packet).unwrap();
        }
        for _ in 0..flows.len() {
            let (queue, got) = pair.b.receive_within(distdpu_tests::time::SOON).unwrap();
            used[queue] += 1;
            let got = judge(&got.frame).unwrap();
            let index = u32::from_be_bytes(got.payload[..4].try_into().unwrap()) as usize;
            assert_eq!(got.sequence, seen[index], "flow {index} in order");
            seen[index] += 1;
        }
    }
    assert!(seen.iter().all(|n| *n == 20), "{seen:?}");
    assert!(
        used.iter().all(|n| *n > 0),
        "each pair gets a share: {used:?}"
    );
}

#[test]
fn a_stream_loses_nothing_in_either_direction() {
    let Pair { mut a, mut b, dpu } = Pair::started(Setup::default());
    const FRAMES: u32 = 8000;
    let run = |driver: &mut VirtioNet, from: usize, to: usize| {
        let flow = flow(from, to).tcp();
        let (mut sent, mut got) = (0, 0);
        let packet = |n: u32| flow.finished(n, &payload(20 + n as usize % 1400, n.into()));
        while got < FRAMES {
            while sent < FRAMES && sent < got + 64 && driver.try_queue(0, &packet(sent)).unwrap() {
                sent += 1;
            }
            driver.kick_transmit(0).unwrap();
            let frame = driver.receive().unwrap().frame;
            let seen = judge(&frame).unwrap();
            assert_eq!(seen.sequence, got);
            assert!(
                seen.transport_sum && seen.payload == payload(20 + got as usize % 1400, got.into())
            );
            got += 1;
        }
        // The peer may still wait for the last ones.
        while sent < FRAMES {
            driver.send(&packet(sent)).unwrap();
            sent += 1;
        }
        driver.drain(0).unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(&mut a, 0, 1));
        run(&mut b, 1, 0);
    });
    drop(dpu);
}

#[test]
fn a_burst_larger_than_the_wire_waits_for_the_receiver() {
    let Pair {
        mut a,
        mut b,
        dpu: _dpu,
    } = Pair::started(Setup::default());
    let data = payload(60000, 1);
    const FRAMES: u32 = 200;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..FRAMES {
                a.send(&flow(0, 1).tcp().large(n, &data, 1448)).unwrap();
            }
            a.drain(0).unwrap();
        });
        for n in 0..FRAMES {
            if n % 50 == 0 {
                std::thread::sleep(QUIET);
            }
            assert_eq!(judge(&b.receive().unwrap().frame).unwrap().sequence, n);
        }
    });
}

#[test]
fn memory_in_several_shapes_is_reached() {
    for shape in [Shape::Split, Shape::Pages] {
        let guest = Guest {
            shape,
            ..Guest::default()
        };
        let mut pair = Pair::with(Net::default(), guest);
        pair.start(Setup::default(), Setup::default());
        pair.works();
        exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(9014, 3));
        large(
            &mut pair.a,
            &mut pair.b,
            flow(0, 1).tcp(),
            &payload(60000, 1),
        );
        large(
            &mut pair.b,
            &mut pair.a,
            flow(1, 0).tcp(),
            &payload(60000, 2),
        );
    }
}

#[test]
fn writes_that_wait_for_their_reply_and_write_multi_both_kick() {
    let guest = Guest {
        posted: false,
        ..Guest::default()
    };
    let mut pair = Pair::with(Net::default(), guest);
    pair.start(plain(), plain());
    pair.works();
    // QEMU packs posted writes under load: here a kick among writes to nothing.
    let sent = flow(0, 1).frame(700, 9);
    assert!(pair.a.try_queue(0, &sent).unwrap());
    let notify = pair.a.pci.virtio.notify;
    let offset = u64::from(notify.offset) + u64::from(pair.a.pci.virtio.notify_multiplier);
    let writes = wire::write_multi(&[
        (2, 0x7000, &[0; 8]),
        (u32::from(notify.bar), offset, &1u16.to_le_bytes()),
        (0, 0x7000, &[0; 4]),
    ]);
    let multi = wire::message(77, wire::command::WRITE_MULTI, wire::NO_REPLY, &writes);
    pair.a.vmm.inject(&multi).unwrap();
    receive_until(&mut pair.b, &sent);
    pair.works();
}

#[test]
fn buffers_made_available_before_driver_ok_are_used_without_a_kick() {
    let mut pair = Pair::new();
    pair.b.start(Setup::default()).unwrap();
    pair.a.start_without_kick(Setup::default()).unwrap();
    exchange(&mut pair.b, &mut pair.a, &flow(1, 0).frame(900, 1));
    pair.works();
}
