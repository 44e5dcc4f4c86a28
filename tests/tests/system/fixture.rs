//! What most tests begin with, and the judgement that a pair of functions works.

use distdpu_tests::dpu::{Dpu, Net, mac};
use distdpu_tests::packet::{Flow, Packet, judge};
use distdpu_tests::time::SOON;
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use std::time::Instant;

/// A DPU with two functions on one network and a guest at each, not started.
pub(crate) struct Pair {
    pub(crate) a: VirtioNet,
    pub(crate) b: VirtioNet,
    pub(crate) dpu: Dpu,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(Net::default(), Guest::default())
    }

    pub(crate) fn with(net: Net, guest: Guest) -> Self {
        Self::of(Dpu::start(&[net.clone(), net]).unwrap(), guest)
    }

    /// Guests at the two functions of a DPU.
    pub(crate) fn of(dpu: Dpu, guest: Guest) -> Self {
        let a = VirtioNet::open(&dpu.socket(0), guest).unwrap();
        let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
        Self { a, b, dpu }
    }

    /// Both started the same way.
    pub(crate) fn started(setup: Setup) -> Self {
        let mut pair = Self::new();
        pair.start(setup, setup);
        pair
    }

    pub(crate) fn start(&mut self, a: Setup, b: Setup) {
        self.a.start(a).unwrap();
        self.b.start(b).unwrap();
    }

    pub(crate) fn works(&mut self) {
        works(&mut self.a, &mut self.b);
    }
}

/// From `netX` to `netY`.
pub(crate) fn flow(from: usize, to: usize) -> Flow {
    Flow::new(mac(from), mac(to))
}

/// Frames arrive both ways, whole, in order and nothing else.
pub(crate) fn works(a: &mut VirtioNet, b: &mut VirtioNet) {
    for round in 0..3 {
        for len in [60, 1000, 1514] {
            exchange(a, b, &flow(0, 1).frame(len, round));
            exchange(b, a, &flow(1, 0).frame(len, round + 10));
        }
    }
}

/// Sends a finished frame; it must be the next to arrive.
pub(crate) fn exchange(from: &mut VirtioNet, to: &mut VirtioNet, packet: &Packet) {
    from.send(packet).unwrap();
    let got = to.receive().unwrap();
    assert!(
        got.frame == packet.frame,
        "a frame of {} bytes came as {} bytes with {:?}; first difference at {:?}",
        packet.frame.len(),
        got.frame.len(),
        got.header,
        got.frame
            .iter()
            .zip(&packet.frame)
            .position(|(x, y)| x != y),
    );
    assert_eq!(got.header.gso_type, 0);
    assert_eq!(
        got.header.flags & 1,
        0,
        "a finished frame needs no checksum"
    );
}

/// Throws away whatever arrives until this very frame does.
pub(crate) fn receive_until(driver: &mut VirtioNet, wanted: &Packet) {
    let end = Instant::now() + SOON;
    while driver.receive().unwrap().frame != wanted.frame {
        assert!(Instant::now() < end, "the frame did not arrive");
    }
}

/// Collects the payload of a TCP stream cut into segments, judging each.
pub(crate) fn receive_stream(driver: &mut VirtioNet, bytes: usize, segment: usize) -> Vec<u8> {
    let mut stream = Vec::new();
    while stream.len() < bytes {
        let got = driver.receive().unwrap();
        assert_eq!(got.header.gso_type, 0, "{:?}", got.header);
        assert_eq!(
            got.header.flags & 1,
            0,
            "the checksum is not left to the driver"
        );
        let seen = judge(&got.frame).unwrap();
        assert!(
            seen.network_sum,
            "IP checksum of the segment at {}",
            stream.len()
        );
        assert!(
            seen.transport_sum,
            "TCP checksum of the segment at {}",
            stream.len()
        );
        assert_eq!(seen.sequence as usize, 1000 + stream.len());
        assert!(
            seen.payload.len() <= segment,
            "a segment of {}",
            seen.payload.len()
        );
        stream.extend_from_slice(&seen.payload);
        let last = stream.len() == bytes;
        assert_eq!(
            seen.tcp_flags & 8 != 0,
            last,
            "PSH belongs to the last segment only"
        );
    }
    stream
}
