use super::sys::packet;
use super::*;
use crate::port::shm::test_support::{readable, send, take};

/// Opens a TAP with a name that no other test has. `None`, and a line that says so, for users who may
/// not; root on a machine with TAPs gets a failure instead.
fn tap(test: &str) -> Option<TapPort> {
    let name = format!("dt{:x}{test}", std::process::id() & 0xff_ffff);
    let root = rustix::process::geteuid().is_root();
    match TapPort::open(&name) {
        Ok(port) => Some(port),
        Err(error) if root && std::path::Path::new("/dev/net/tun").exists() => panic!("{error}"),
        Err(error) => {
            eprintln!("NOT RUN, needs root and /dev/net/tun: {error}");
            None
        }
    }
}

/// An Ethernet frame of a type that the host's stack ignores.
fn frame(byte: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![byte; len];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    bytes
}

/// The host may send frames of its own accord (IPv6): only ours count.
fn ours(frames: Vec<(FrameMeta, Vec<u8>)>) -> Vec<(FrameMeta, Vec<u8>)> {
    frames
        .into_iter()
        .filter(|(_, bytes)| bytes[12..14] == [0x88, 0xb5])
        .collect()
}

#[test]
fn frames_reach_the_host_and_come_from_it() {
    let Some(mut port) = tap("a") else { return };
    let host = packet::socket(port.interface());
    let sent = frame(7, 1000);
    send(&mut port, FrameMeta::default(), &sent).unwrap();
    let mut buf = [0u8; 2000];
    loop {
        assert!(readable(host.as_fd(), 5000), "nothing reached the host");
        let len = rustix::io::read(&host, &mut buf).unwrap();
        if buf[12..14] == [0x88, 0xb5] {
            assert_eq!(&buf[..len], &sent);
            break;
        }
    }

    while !take(&mut port, 99).is_empty() {}
    while port.arm() {
        take(&mut port, 99);
    }
    let back = frame(9, 1500);
    packet::send(&host, &back);
    let mut arrived = Vec::new();
    while arrived.is_empty() {
        assert!(readable(port.wake_fd().unwrap(), 5000), "no wake-up");
        port.disarm();
        arrived = ours(take(&mut port, 99));
        if arrived.is_empty() {
            port.arm();
        }
    }
    assert_eq!(arrived[0].1, back);
    assert!(port.stats().rx_packets >= 1 && port.stats().tx_packets == 1);
}

#[test]
fn a_frame_left_for_later_is_kept_and_nobody_is_woken_for_it() {
    let Some(mut port) = tap("b") else { return };
    let host = packet::socket(port.interface());
    for byte in [1, 2] {
        packet::send(&host, &frame(byte, 60));
    }
    assert_eq!(port.receive(9, &mut |_: &Frame<'_>| Rx::Later), 0);
    assert!(!port.arm());
    assert!(!readable(port.wake_fd().unwrap(), 0));
    port.disarm();
    let frames = ours(take(&mut port, 99));
    let bytes: Vec<u8> = frames.iter().map(|(_, bytes)| bytes[20]).collect();
    assert_eq!(bytes, [1, 2]);
}

#[test]
fn a_segment_for_the_host_in_many_pieces_is_taken_with_its_offloads() {
    let Some(mut port) = tap("c") else { return };
    let mut bytes = frame(0, 4054);
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..34].copy_from_slice(&[
        0x45, 0, 0x0f, 0xc8, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2,
    ]);
    bytes[34..54].copy_from_slice(&[
        0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0,
    ]);
    let meta = FrameMeta {
        flags: FrameMeta::NEEDS_CSUM,
        gso_type: FrameMeta::GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    for pieces in [1, MAX_PIECES, MAX_PIECES + 1, 500] {
        let size = bytes.len().div_ceil(pieces);
        let parts: Vec<_> = bytes.chunks_mut(size).map(VolatileSlice::from).collect();
        assert_eq!(port.transmit(&Frame::new(meta, &parts)), Ok(()), "{pieces}");
    }
    assert_eq!(port.stats().tx_bytes, 4 * 4054);
}

#[test]
fn a_name_that_is_taken_is_an_error_that_says_so() {
    let Some(port) = tap("d") else { return };
    let error = TapPort::open(port.interface()).unwrap_err();
    assert!(matches!(error, TapError::Busy(_)), "{error}");
    let error = TapPort::open("lo").unwrap_err();
    assert!(matches!(error, TapError::OtherKind(_)), "{error}");
}

#[test]
fn a_descriptor_that_is_no_tap_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let error = TapPort::from_fd(file.into()).unwrap_err();
    assert!(matches!(error, TapError::NotTap(_)), "{error}");
}

#[test]
fn names_that_are_none_are_refused_before_the_kernel_sees_them() {
    for name in [
        "",
        "sixteen-bytes-ab",
        "a/b",
        "tap%d",
        "a b",
        "..",
        "a:1",
        "ü",
    ] {
        let error = TapPort::open(name).unwrap_err();
        assert!(matches!(error, TapError::Name(_)), "{name:?}: {error}");
    }
}

#[test]
fn the_header_of_the_tap_is_that_of_virtio_net() {
    let meta = FrameMeta {
        flags: 1,
        gso_type: 0x81,
        hdr_len: 0x0102,
        gso_size: 0x0304,
        csum_start: 0x0506,
        csum_offset: 0x0708,
    };
    assert_eq!(from_header(&to_header(&meta)), meta);
    assert_eq!(to_header(&meta)[2..4], 0x0102u16.to_ne_bytes());
}

fn ip(words: &str) {
    let done = std::process::Command::new("ip")
        .args(words.split(' '))
        .status()
        .unwrap();
    assert!(done.success(), "ip {words}");
}

#[test]
fn the_hosts_stack_leaves_checksums_to_the_port_and_takes_unfinished_ones() {
    use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
    use std::time::Duration;
    let Some(mut port) = tap("e") else { return };
    let name = port.interface().to_owned();
    if !std::path::Path::new("/proc/net/if_inet6").exists() {
        eprintln!("NOT RUN, needs IPv6");
        return;
    }
    // Link-local addresses: whatever networks the host is in, they are not touched.
    ip(&format!("addr add fe80::d1/64 dev {name} nodad"));
    ip(&format!(
        "neigh add fe80::d2 lladdr 02:00:00:00:00:02 dev {name}"
    ));
    let index = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).unwrap();
    let scope: u32 = index.trim().parse().unwrap();
    let address = |last, port| {
        let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
        SocketAddrV6::new(ip, port, 0, scope)
    };
    let socket = UdpSocket::bind(address(0xd1, 0)).unwrap();
    socket.send_to(b"to the guest", address(0xd2, 9)).unwrap();
    let (meta, frame) = loop {
        let frames = take(&mut port, 1);
        if let Some(found) = frames
            .into_iter()
            .find(|(_, f)| f.ends_with(b"to the guest"))
        {
            break found;
        }
        if !port.arm() {
            assert!(readable(port.wake_fd().unwrap(), 10_000), "no datagram");
        }
        port.disarm();
    };
    assert!(meta.needs_csum());
    // The same datagram back. The sum of the pseudo-header does not change when both sides swap.
    let mut back = frame.clone();
    back[..6].copy_from_slice(&frame[6..12]);
    back[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    back[22..38].copy_from_slice(&frame[38..54]);
    back[38..54].copy_from_slice(&frame[22..38]);
    back[54..56].copy_from_slice(&frame[56..58]);
    back[56..58].copy_from_slice(&frame[54..56]);
    let wait = Some(Duration::from_secs(10));
    socket.set_read_timeout(wait).unwrap();
    send(&mut port, meta, &back).unwrap();
    let mut data = [0; 64];
    let len = socket.recv(&mut data).unwrap();
    assert_eq!(&data[..len], b"to the guest");
}

#[test]
fn an_interface_that_is_removed_takes_the_carrier_with_it() {
    let Some(mut port) = tap("f") else { return };
    ip(&format!("link del {}", port.interface()));
    take(&mut port, 1);
    assert!(!port.carrier());
    assert!(port.down_reason().unwrap().contains("removed"));
    let refused = send(&mut port, FrameMeta::default(), &frame(1, 60));
    assert_eq!(refused, Err(TxError::Down));
    assert!(!port.arm());
}
