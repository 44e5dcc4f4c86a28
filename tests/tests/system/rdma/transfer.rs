//! What arrives is what was sent.

use super::{BUFFER, Pair};
use distdpu_tests::memory::Shape;
use distdpu_tests::mlx5::{Send, Service};
use distdpu_tests::virtio_net::Guest;

/// Guests whose memory lies in pieces, differently on each side.
fn scattered() -> (Guest, Guest) {
    let shaped = |shape| Guest {
        shape,
        ..Guest::default()
    };
    (shaped(Shape::Pages), shaped(Shape::Split))
}

/// Sizes around pages, MTUs and packets, and where they begin.
pub(crate) const CASES: [(u64, u64, u32); 12] = [
    (0, 0, 0),
    (0, 0, 1),
    (3, 5, 8),
    (4090, 1, 13),
    (1, 4095, 4096),
    (0, 0, 4096),
    (4095, 4095, 4097),
    (7, 9, 65536),
    (0, 0, 262_144),
    (1, 0, 262_145),
    (123, 4567, 1 << 20),
    (4096, 1, 5 << 20),
];

#[test]
fn writes_arrive_whole_and_touch_nothing_else() {
    let (a, b) = scattered();
    let mut pair = Pair::with(Service::Rc, a, b);
    let data = pair.a.fill(0x11);
    for (from, to, len) in CASES {
        let before = pair.b.fill(0xee);
        let (local, remote) = (pair.a.buffer, pair.b.buffer);
        let send = Send::Write(remote.address + to, remote.key, None);
        let segment = [(local.key, local.address + from, len)];
        pair.a.qp.post_send(send, &segment, true).unwrap();
        pair.a.driver.ring(&mut pair.a.qp).unwrap();
        let done = pair.a.sends.wait().unwrap();
        assert_eq!((done.opcode, done.qpn), (0, pair.a.qp.number), "{done:?}");
        let mut expected = before;
        expected[to as usize..][..len as usize]
            .copy_from_slice(&data[from as usize..][..len as usize]);
        assert!(
            pair.b.bytes(0, BUFFER as usize) == expected,
            "{len} bytes from {from} to {to}"
        );
    }
}

#[test]
fn reads_bring_what_is_there() {
    let (a, b) = scattered();
    let mut pair = Pair::with(Service::Rc, a, b);
    let data = pair.b.fill(0x22);
    for (to, from, len) in CASES {
        let before = pair.a.fill(0xdd);
        let (local, remote) = (pair.a.buffer, pair.b.buffer);
        let send = Send::Read(remote.address + from, remote.key);
        let segment = [(local.key, local.address + to, len)];
        pair.a.qp.post_send(send, &segment, true).unwrap();
        pair.a.driver.ring(&mut pair.a.qp).unwrap();
        assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
        let mut expected = before;
        expected[to as usize..][..len as usize]
            .copy_from_slice(&data[from as usize..][..len as usize]);
        assert!(
            pair.a.bytes(0, BUFFER as usize) == expected,
            "{len} bytes from {from} to {to}"
        );
    }
}

#[test]
fn sends_fill_receives_in_order() {
    for (mapped, service) in [
        (false, Service::Rc),
        (false, Service::Uc),
        (true, Service::Rc),
    ] {
        let mut pair = Pair::mapped(mapped, service);
        let data = pair.a.fill(0x33);
        let (local, remote) = (pair.a.buffer, pair.b.buffer);
        for n in 0..20u32 {
            let at = remote.address + u64::from(n) * 10_000;
            pair.b.qp.post_receive(remote.key, at, 10_000).unwrap();
        }
        for n in 0..20u32 {
            let immediate = (n % 3 == 0).then_some(0x5000_0000 + n);
            let pieces = [
                (local.key, local.address + u64::from(n), 400 * n),
                (local.key, local.address + 100_000, n),
            ];
            pair.a
                .qp
                .post_send(Send::Send(immediate), &pieces, n % 4 == 3)
                .unwrap();
        }
        pair.a.driver.ring(&mut pair.a.qp).unwrap();
        for n in 0..20u32 {
            let done = pair.b.receives.wait().unwrap();
            let opcode = if n % 3 == 0 { 3 } else { 2 };
            assert_eq!((done.opcode, done.counter), (opcode, n as u16), "{done:?}");
            assert_eq!(done.len, 401 * n);
            if n % 3 == 0 {
                assert_eq!(done.immediate, 0x5000_0000 + n);
            }
            let got = pair.b.bytes(u64::from(n) * 10_000, 401 * n as usize);
            let (first, second) = got.split_at(400 * n as usize);
            assert!(first == &data[n as usize..][..400 * n as usize]);
            assert!(second == &data[100_000..][..n as usize]);
        }
        for n in [3, 7, 11, 15, 19] {
            let done = pair.a.sends.wait().unwrap();
            assert_eq!((done.opcode, done.counter), (0, n));
        }
        assert_eq!(pair.a.sends.poll().unwrap(), None, "the others are silent");
    }
}

#[test]
fn a_write_with_immediate_takes_a_receive() {
    let mut pair = Pair::new(Service::Rc);
    let data = pair.a.fill(0x44);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    pair.b
        .qp
        .post_receive(remote.key, remote.address, 16)
        .unwrap();
    let send = Send::Write(remote.address + 1000, remote.key, Some(77));
    let segment = [(local.key, local.address, 3000)];
    pair.a.qp.post_send(send, &segment, true).unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    let done = pair.b.receives.wait().unwrap();
    assert_eq!((done.opcode, done.immediate, done.len), (1, 77, 3000));
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
    assert!(pair.b.bytes(1000, 3000) == data[..3000]);
    assert!(pair.b.bytes(0, 16) == [0; 16]);
}

#[test]
fn inline_data_is_taken_from_the_entry() {
    let mut pair = Pair::new(Service::Rc);
    let remote = pair.b.buffer;
    let text = b"these bytes never were in a buffer";
    pair.a
        .qp
        .post_inline(remote.address + 5, remote.key, text, true)
        .unwrap();
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
    assert!(pair.b.bytes(5, text.len()) == text);
}

#[test]
fn atomics_change_memory_once_and_bring_the_old_value() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let at = remote.address + 64;
    pair.b
        .driver
        .memory
        .write(at, &100u64.to_le_bytes())
        .unwrap();
    let old = [(local.key, local.address, 8)];
    let mut all = Vec::new();
    for send in [
        Send::FetchAdd(at, remote.key, 5),
        Send::CompareSwap(at, remote.key, 105, 7),
        Send::CompareSwap(at, remote.key, 105, 8),
        Send::FetchAdd(at, remote.key, u64::MAX),
    ] {
        pair.a.qp.post_send(send, &old, true).unwrap();
        pair.a.driver.ring(&mut pair.a.qp).unwrap();
        assert_eq!(pair.a.sends.wait().unwrap().opcode, 0);
        all.push(pair.a.bytes(0, 8)[0]);
    }
    assert_eq!(all, [100, 105, 7, 7]);
    assert_eq!(pair.b.bytes(64, 8), 6u64.to_le_bytes());
}

#[test]
fn an_armed_queue_brings_one_event_and_one_interrupt() {
    let mut pair = Pair::new(Service::Rc);
    let (local, remote) = (pair.a.buffer, pair.b.buffer);
    let write = Send::Write(remote.address, remote.key, None);
    let segment = [(local.key, local.address, 8)];
    pair.a.driver.arm(&mut pair.a.sends, false).unwrap();
    for _ in 0..3 {
        pair.a.qp.post_send(write, &segment, true).unwrap();
    }
    pair.a.driver.ring(&mut pair.a.qp).unwrap();
    for _ in 0..3 {
        pair.a.sends.wait().unwrap();
    }
    let driver = &mut pair.a.driver;
    let event = distdpu_tests::time::wait_for("an event", distdpu_tests::time::SOON, || {
        driver.event().unwrap()
    });
    assert_eq!(event.unwrap(), (0, pair.a.sends.number));
    assert!(pair.a.driver.interrupted(1));
    assert_eq!(pair.a.driver.event().unwrap(), None);
    assert!(!pair.a.driver.interrupted(1));
}
