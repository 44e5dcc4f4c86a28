//! A front end that breaks the protocol costs itself the connection and nobody anything else.

use super::{Mixed, state};
use crate::fixture::works;
use crate::hostile_socket::settled;
use crate::recovery::kill;
use distdpu_tests::packet::Random;
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::vhost_user::wire::{
    Channel, HEADER, NEED_REPLY, NO_FD, PROTOCOL_FEATURES, REPLY, VERSION, longs, message, request,
    ring, ring_addresses,
};
use distdpu_tests::vhost_user::{FrontEnd, Slots};
use distdpu_tests::virtio_net::features::{PACKED, VERSION_1};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::process::Signal;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

const MESSAGES: u32 = 10_000;
/// Where a front end says that its memory is, and how much there is.
const USER: u64 = 0x1000_0000;
const MEMORY: u64 = 1 << 20;

fn memory() -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, MEMORY).unwrap();
    fd
}

/// Something to send along, not always what is expected.
fn descriptor(random: &mut Random) -> OwnedFd {
    match random.below(8) {
        0 => rustix::pipe::pipe().unwrap().0,
        1 => std::fs::File::open("/dev/null").unwrap().into(),
        2 => memory(),
        _ => eventfd(0, EventfdFlags::empty()).unwrap(),
    }
}

/// A request that often makes sense, with lies in it.
fn random_request(random: &mut Random) -> (Vec<u8>, Vec<OwnedFd>) {
    let index = match random.below(12) {
        0 => random.next() as u32,
        1 => 255,
        _ => random.below(3) as u32,
    };
    let number = |random: &mut Random| match random.below(5) {
        0 => random.next(),
        1 => u64::MAX - random.below(4096),
        2 => 1 << random.below(64),
        _ => random.below(1024),
    };
    let at = |random: &mut Random| match random.below(8) {
        0 => number(random),
        _ => USER + (random.below(MEMORY) & !0xf),
    };
    let mut fds = Vec::new();
    let kind = match random.below(10) {
        0 => random.below(50) as u32,
        _ => [
            request::GET_FEATURES,
            request::SET_FEATURES,
            request::SET_MEM_TABLE,
            request::SET_VRING_NUM,
            request::SET_VRING_ADDR,
            request::SET_VRING_BASE,
            request::GET_VRING_BASE,
            request::SET_VRING_KICK,
            request::SET_VRING_CALL,
            request::SET_VRING_ERR,
            request::SET_VRING_ENABLE,
            request::GET_CONFIG,
            request::SET_CONFIG,
            request::RESET_DEVICE,
            request::ADD_MEM_REG,
            request::REM_MEM_REG,
        ][random.below(16) as usize],
    };
    let region = |random: &mut Random| match random.below(3) {
        0 => [number(random), number(random), at(random), number(random)],
        _ => [0x10_0000 * random.below(3), MEMORY, USER, 0],
    };
    let mut payload = match kind {
        request::SET_FEATURES => {
            let extra = if random.below(8) == 0 {
                number(random)
            } else {
                0
            };
            longs(&[[VERSION_1, PACKED][random.below(2) as usize] | PROTOCOL_FEATURES | extra])
        }
        request::SET_MEM_TABLE => {
            let count = random.below(4);
            let mut payload = ring(count as u32, 0);
            for n in 0..count {
                let mut one = region(random);
                one[0] = one[0].wrapping_add(n * 0x100_0000 * random.below(2));
                payload.extend(longs(&one));
                fds.push(memory());
            }
            payload
        }
        request::SET_VRING_NUM => ring(index, [16, 64, 256, 3, 0, 65536][random.below(6) as usize]),
        request::SET_VRING_ADDR => {
            let addresses = [at(random), at(random), at(random), number(random)];
            ring_addresses(index, random.below(3) as u32, addresses)
        }
        request::SET_VRING_BASE => ring(index, number(random) as u32),
        request::GET_VRING_BASE => ring(index, 0),
        request::SET_VRING_ENABLE => ring(index, random.below(8) as u32 % 3),
        request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
            let none = random.below(8) == 0;
            if !none {
                fds.push(descriptor(random));
            }
            longs(&[u64::from(index & 0xff) | if none { NO_FD } else { 0 }])
        }
        request::GET_CONFIG | request::SET_CONFIG => {
            let size = random.below(80) as u32;
            let head = [random.below(80) as u32, size, random.below(2) as u32];
            let mut payload = head.map(u32::to_le_bytes).concat();
            payload.resize(12 + size as usize, 0x5a);
            payload
        }
        request::ADD_MEM_REG | request::REM_MEM_REG => {
            if kind == request::ADD_MEM_REG {
                fds.push(memory());
            }
            [longs(&[0]), longs(&region(random))].concat()
        }
        _ => Vec::new(),
    };
    match random.below(60) {
        0 => payload.truncate(random.below(payload.len() as u64 + 1) as usize),
        1 => payload.extend([1; 20]),
        2 => fds.extend((0..random.below(40)).map(|_| descriptor(random))),
        3 => fds.clear(),
        _ => {}
    }
    let flags = match random.below(40) {
        0 => random.next() as u32,
        1 => VERSION | REPLY,
        2..30 => VERSION | NEED_REPLY,
        _ => VERSION,
    };
    let mut bytes = message(kind, flags, &payload);
    if random.below(300) == 0 {
        let size = [0, 1 << 12, 1 << 20, u32::MAX][random.below(4) as usize];
        bytes[8..12].copy_from_slice(&size.to_le_bytes());
    }
    (bytes, fds)
}

fn fresh(socket: &Path) -> Channel {
    let mut channel = Channel::connect(socket).unwrap();
    channel.ask_long(request::GET_FEATURES).unwrap();
    let protocol = channel.ask_long(request::GET_PROTOCOL_FEATURES).unwrap();
    let all = longs(&[protocol]);
    channel
        .tell(request::SET_PROTOCOL_FEATURES, &all, &[])
        .unwrap();
    channel.stream().set_nonblocking(true).unwrap();
    channel
}

/// The same with two rings that run, in zeroed memory.
fn running(socket: &Path) -> Channel {
    let mut channel = fresh(socket);
    channel.stream().set_nonblocking(false).unwrap();
    let file = memory();
    let mut tell = |request, payload: &[u8], fds: &[BorrowedFd<'_>]| {
        channel.tell(request, payload, fds).unwrap();
    };
    let features = longs(&[VERSION_1 | PROTOCOL_FEATURES]);
    tell(request::SET_FEATURES, &features, &[]);
    let table = [ring(1, 0), longs(&[0, MEMORY, USER, 0])].concat();
    tell(request::SET_MEM_TABLE, &table, &[file.as_fd()]);
    for index in 0..2 {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let at = USER + 0x10_000 * u64::from(index);
        tell(request::SET_VRING_NUM, &ring(index, 64), &[]);
        let addresses = [at, at + 0x2000, at + 0x4000, 0];
        tell(
            request::SET_VRING_ADDR,
            &ring_addresses(index, 0, addresses),
            &[],
        );
        let number = longs(&[u64::from(index)]);
        tell(request::SET_VRING_KICK, &number, &[event.as_fd()]);
        tell(request::SET_VRING_ENABLE, &ring(index, 1), &[]);
    }
    channel.stream().set_nonblocking(true).unwrap();
    channel
}

/// Whether the back end is there and reads requests; reads away what it said.
fn answers(channel: &mut Channel) -> bool {
    let ask = message(request::GET_FEATURES, VERSION, &[]);
    let answer = message(request::GET_FEATURES, VERSION | REPLY, &longs(&[0]));
    let head = &answer[..HEADER];
    if channel.send_bytes(&ask, &[]).is_err() {
        return false;
    }
    let mut said = Vec::new();
    // One that waits for the rest of a request does not answer.
    let end = wait_for("an answer", Duration::from_millis(300), || {
        let alive = swallow(channel, &mut said);
        let answered = said.len() >= answer.len();
        let answered = answered && said[said.len() - answer.len()..].starts_with(head);
        (!alive || answered).then_some(alive)
    });
    end.unwrap_or(false)
}

/// Reads what the back end said; `false` when it closed.
fn swallow(channel: &Channel, said: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 16384];
    loop {
        match (&mut channel.stream()).read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => said.extend_from_slice(&bytes[..count]),
            Err(e) => return e.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn ten_thousand_random_messages_leave_no_trace() {
    let Mixed {
        a,
        front,
        mut b,
        dpu,
    } = Mixed::started();
    let (socket, pid) = (dpu.socket(0), dpu.em_pid(0).unwrap());
    drop((a, front));
    let seed = std::env::var("DISTDPU_SEED").ok();
    let seed = seed.and_then(|s| s.parse().ok()).unwrap_or(0x5eed);
    println!("DISTDPU_SEED={seed}");
    let mut random = Random(seed);
    let mut before = (0, 0);
    let mut connections = 0;
    let mut channel = fresh(&socket);
    for n in 0..MESSAGES {
        if n == MESSAGES / 10 {
            drop(channel);
            drop(fresh(&socket));
            before = settled(pid);
            channel = fresh(&socket);
        }
        let (bytes, given) = random_request(&mut random);
        let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        // Most of the time the back end is let come to its end with each, so that few go to one that is gone.
        let sent = channel.send_bytes(&bytes, &given).is_ok();
        if !sent || random.below(4) != 0 && !answers(&mut channel) {
            connections += 1;
            channel = match connections % 2 {
                0 => fresh(&socket),
                _ => running(&socket),
            };
        }
    }
    drop(channel);
    assert!(
        connections > 100,
        "bad messages cost the connection: {connections}"
    );
    assert_eq!(dpu.em_pid(0).unwrap(), pid, "the EM is the same process");
    let after = settled(pid);
    assert!(after.0 <= before.0, "descriptors: {before:?}, {after:?}");
    assert!(after.1 <= before.1 + 2048, "memory: {before:?}, {after:?}");
    let front = FrontEnd::connect(&socket, Slots::Table).unwrap();
    let mut a = front.driver(Guest::default()).unwrap();
    a.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
}

#[test]
fn each_broken_request_costs_the_connection_only() {
    let Mixed {
        a,
        front,
        mut b,
        dpu,
    } = Mixed::started();
    let (socket, pid) = (dpu.socket(0), dpu.em_pid(0).unwrap());
    drop((a, front));
    let file = memory();
    let fd = [file.as_fd()];
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let kick = [event.as_fd()];
    let reader = rustix::pipe::pipe().unwrap().0;
    let pipe = [reader.as_fd()];
    let zero = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/zero");
    let zero = zero.unwrap();
    let device = [zero.as_fd()];
    let sparse = memory();
    rustix::fs::ftruncate(&sparse, 5 << 40).unwrap();
    let huge = [sparse.as_fd()];
    let region = |guest, size, offset| [longs(&[0]), longs(&[guest, size, USER, offset])].concat();
    let cases: Vec<(&str, u32, Vec<u8>, &[_])> = vec![
        ("ring 255", request::SET_VRING_BASE, ring(255, 0), &[]),
        (
            "ring 2³²-1",
            request::GET_VRING_BASE,
            ring(u32::MAX, 0),
            &[],
        ),
        (
            "kick for ring 255",
            request::SET_VRING_KICK,
            longs(&[255]),
            &kick,
        ),
        (
            "a ring that is polled",
            request::SET_VRING_KICK,
            longs(&[NO_FD]),
            &[],
        ),
        (
            "interrupts by a pipe",
            request::SET_VRING_CALL,
            longs(&[0]),
            &pipe,
        ),
        (
            "a device as memory",
            request::ADD_MEM_REG,
            region(0, 4096, 0),
            &device,
        ),
        (
            "more memory than there may be",
            request::ADD_MEM_REG,
            region(0, 5 << 40, 0),
            &huge,
        ),
        (
            "more log than there may be",
            request::SET_LOG_BASE,
            longs(&[5 << 30, 0]),
            &huge,
        ),
        (
            "a ring of nothing",
            request::SET_VRING_KICK,
            longs(&[0]),
            &kick,
        ),
        (
            "features not offered",
            request::SET_FEATURES,
            longs(&[1 << 60]),
            &[],
        ),
        (
            "more memory than the file",
            request::ADD_MEM_REG,
            region(0, MEMORY + 1, 0),
            &fd,
        ),
        (
            "memory that wraps",
            request::ADD_MEM_REG,
            region(u64::MAX - 4095, 8192, 0),
            &fd,
        ),
        (
            "memory that is an eventfd",
            request::ADD_MEM_REG,
            region(0, 4096, 0),
            &kick,
        ),
        (
            "memory that is not there",
            request::REM_MEM_REG,
            region(0, 4096, 0),
            &[],
        ),
        ("an unknown request", 99, vec![], &[]),
        (
            "a request of nobody",
            request::SET_LOG_BASE,
            longs(&[0, 0]),
            &fd,
        ),
        (
            "a table without descriptors",
            request::SET_MEM_TABLE,
            ring(1, 0),
            &[],
        ),
    ];
    for (name, request, payload, fds) in cases {
        let mut channel = fresh(&socket);
        channel.stream().set_nonblocking(false).unwrap();
        // With it a ring would start; without, it is enabled.
        let features = longs(&[VERSION_1]);
        channel.tell(request::SET_FEATURES, &features, &[]).unwrap();
        let bytes = message(request, VERSION, &payload);
        channel.send_bytes(&bytes, fds).unwrap();
        let end = (&mut channel.stream()).read(&mut [0; 100]);
        assert!(matches!(end, Ok(0) | Err(_)), "`{name}` was answered");
        assert!(
            end.is_ok() || end.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
            "`{name}` was taken"
        );
    }
    assert_eq!(dpu.em_pid(0).unwrap(), pid);
    let front = FrontEnd::connect(&socket, Slots::Single).unwrap();
    let mut a = front.driver(Guest::default()).unwrap();
    a.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
}

#[test]
fn a_broken_ring_is_told_by_its_eventfd_and_a_reset_brings_it_back() {
    let mut mixed = Mixed::started();
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    for _ in 0..3 {
        let tx = longs(&[1]);
        let told = mixed
            .front
            .with_channel(|c| c.tell(request::SET_VRING_ERR, &tx, &[event.as_fd()]));
        told.unwrap();
        let ring = &mixed.a.transmit_rings[0];
        let index = ring.next_available.wrapping_add(10_000);
        mixed.a.memory.store_u16(ring.available + 2, index).unwrap();
        mixed.a.notify(1).unwrap();
        wait_for("the error", SOON, || {
            let mut count = [0; 8];
            rustix::io::read(&event, &mut count).ok()
        })
        .unwrap();
        state(&mixed.dpu, "needs-reset");
        mixed.start(Setup::default());
        mixed.works();
    }
}

#[test]
fn half_a_request_does_not_keep_its_em_from_ending() {
    let Mixed {
        a,
        front,
        b,
        mut dpu,
    } = Mixed::started();
    drop((a, front));
    drop(b);
    let mut channel = fresh(&dpu.socket(0));
    channel.send_bytes(&[1, 0, 0], &[]).unwrap();
    kill(dpu.om_pid(), Signal::TERM);
    let ended = wait_for("the OM to end", SOON, || (!dpu.is_running()).then_some(()));
    ended.unwrap();
    let log = dpu.log_end();
    assert!(!log.contains("did not end in order"), "{log}");
    let closed = !swallow(&channel, &mut Vec::new());
    assert!(closed, "the connection is closed");
}

#[test]
fn a_second_front_end_waits_for_the_first_to_leave() {
    let Mixed {
        mut a,
        front,
        mut b,
        dpu,
    } = Mixed::started();
    let socket = dpu.socket(0);
    let waits = std::thread::spawn(move || FrontEnd::connect(&socket, Slots::Table).unwrap());
    works(&mut a, &mut b);
    assert!(!waits.is_finished());
    drop((a, front));
    let mut a: VirtioNet = waits.join().unwrap().driver(Guest::default()).unwrap();
    a.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
}
