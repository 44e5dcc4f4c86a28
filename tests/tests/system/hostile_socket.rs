//! A VMM that breaks the protocol costs itself the connection and nobody anything else.

use crate::fixture::{Pair, works};
use distdpu_tests::client::Client;
use distdpu_tests::dpu::{Dpu, Net};
use distdpu_tests::packet::Random;
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use distdpu_tests::wire::{self, command};
use rustix::event::{EventfdFlags, eventfd};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

const MESSAGES: u32 = 100_000;

fn fds(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

/// Resident kilobytes that are the process's own.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Random messages of the kinds that get furthest: mostly well framed, with lies in one place.
fn message(random: &mut Random, id: u16) -> Vec<u8> {
    let number = |random: &mut Random| match random.below(6) {
        0 => 0,
        1 => random.below(64),
        2 => random.below(1 << 16) & !0xfff,
        3 => u64::MAX - random.below(4096),
        4 => random.next(),
        _ => 1 << random.below(64),
    };
    let pick = random.below(20) as u16;
    let (a, b, c) = (number(random), number(random), number(random));
    let small = [4u32, 1, 8, 2, 0, 3, 64, 4096][random.below(8) as usize];
    let mut payload = match pick {
        command::DMA_MAP => wire::dma_map(a, b, c, random.below(5) as u32),
        command::DMA_UNMAP => wire::dma_unmap(a, b, random.below(8) as u32),
        command::GET_INFO => wire::words(&[16, 0, 0, 0]),
        command::GET_REGION_INFO => {
            wire::words(&[a as u32, 0, random.below(12) as u32, 0, 0, 0, 0, 0])
        }
        command::GET_IRQ_INFO => wire::words(&[16, 0, random.below(8) as u32, 0]),
        command::SET_IRQS => wire::set_irqs(
            random.below(6) as u32,
            random.below(64) as u32,
            a as u32 & 0xff,
            b as u32 & 0xff,
        ),
        command::REGION_READ => wire::region_access(random.below(10) as u32, a & 0xffff, small),
        command::REGION_WRITE => {
            let mut bytes = wire::region_access(random.below(10) as u32, a & 0xffff, small);
            bytes.extend((0..small).map(|n| (b >> (n % 8)) as u8));
            bytes
        }
        command::WRITE_MULTI => wire::write_multi(&[(0, a & 0x7fff, &[1; 4]), (2, b, &[2; 8])]),
        _ => (0..random.below(200))
            .map(|n| (a >> (n % 57)) as u8)
            .collect(),
    };
    match random.below(24) {
        0 => payload.truncate(random.below(payload.len() as u64 + 1) as usize),
        1 => payload.extend_from_slice(&[0x5a; 40]),
        2 if !payload.is_empty() => {
            let at = random.below(payload.len() as u64) as usize;
            payload[at] ^= 1 << random.below(8);
        }
        _ => {}
    }
    let flags = match random.below(16) {
        0 => wire::REPLY,
        1 => random.next() as u32,
        2..6 => wire::NO_REPLY,
        _ => 0,
    };
    let mut bytes = wire::message(id, pick, flags, &payload);
    if random.below(200) == 0 {
        let size = [0, 15, 16, 1 << 20, u32::MAX][random.below(5) as usize];
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
    }
    bytes
}

fn fresh(socket: &Path) -> Client {
    let client = wait_for("the function to accept a VMM", SOON, || {
        Client::connect(socket).ok()
    })
    .unwrap();
    client.stream().set_nonblocking(true).unwrap();
    client
}

/// Reads away what the server said; `false` when it closed.
fn swallow(client: &Client) -> bool {
    let mut sink = [0; 16384];
    loop {
        match (&mut client.stream()).read(&mut sink) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
            Err(_) => return false,
        }
    }
}

/// Sends as long as the socket takes it; `false` when the server is gone.
fn push(client: &mut Client, bytes: &[u8], given: &[OwnedFd]) -> bool {
    let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
    for _ in 0..20_000 {
        match client.send_bytes(bytes, &given) {
            Ok(()) => return true,
            // Part of it may be out: after a full socket the framing is anybody's guess, which is the point.
            Err(e) if e.is_timeout() => {
                if !swallow(client) {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(_) => return false,
        }
    }
    panic!("the server neither reads nor closes");
}

#[test]
fn a_hundred_thousand_random_messages_leave_no_trace() {
    // Threads that meet on a busy machine would leave allocator arenas behind, and it is leaks that are looked for.
    let env = [("MALLOC_ARENA_MAX", "1")];
    let dpu = Dpu::start_with_env(&[Net::default(), Net::default()], &env).unwrap();
    let mut pair = Pair::of(dpu, Guest::default());
    pair.start(Setup::default(), Setup::default());
    let (socket, pid) = (pair.dpu.socket(0), pair.dpu.em_pid(0).unwrap());
    let Pair { a, mut b, dpu } = pair;
    drop(a);
    let seed = std::env::var("DISTDPU_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(0x5eed);
    println!("DISTDPU_SEED={seed}");
    let mut random = Random(seed);
    // Once round to let caches and thread stacks reach their size.
    let mut before = (0, 0);
    let mut connections = 0u32;
    let mut client = fresh(&socket);
    for n in 0..MESSAGES {
        if n == MESSAGES / 10 {
            drop(client);
            drop(fresh(&socket));
            before = settled(pid);
            client = fresh(&socket);
        }
        let given: Vec<OwnedFd> = match random.below(10) {
            0 => (0..1 + random.below(20))
                .map(|_| eventfd(0, EventfdFlags::empty()).unwrap())
                .collect(),
            _ => Vec::new(),
        };
        let bytes = message(&mut random, n as u16);
        let alive = push(&mut client, &bytes, &given) && (n % 8 != 0 || swallow(&client));
        if !alive {
            connections += 1;
            client = fresh(&socket);
        }
    }
    drop(client);
    assert!(
        connections > 100,
        "bad messages cost the connection: {connections}"
    );
    assert_eq!(dpu.em_pid(0).unwrap(), pid, "the EM is the same process");
    let after = settled(pid);
    assert!(
        after.0 <= before.0,
        "file descriptors: {} before, {} after",
        before.0,
        after.0
    );
    assert!(
        after.1 <= before.1 + 2048,
        "own memory in kB: {} before, {} after",
        before.1,
        after.1
    );
    let mut a = wait_for("the function", SOON, || {
        VirtioNet::open(&socket, Guest::default()).ok()
    })
    .unwrap();
    a.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
}

/// Descriptors and memory when the last connection is really gone.
pub(crate) fn settled(pid: u32) -> (usize, u64) {
    let mut last = (0, 0);
    wait_for("the EM's descriptors to settle", SOON, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = (fds(pid), resident(pid));
        let same = now.0 == last.0;
        last = now;
        same.then_some(now)
    })
    .unwrap()
}

#[test]
fn each_broken_beginning_costs_the_connection_only() {
    let pair = Pair::started(Setup::default());
    let (socket, pid) = (pair.dpu.socket(0), pair.dpu.em_pid(0).unwrap());
    let Pair { a, mut b, dpu } = pair;
    drop(a);
    let json = |text: &[u8]| [&[0, 0, 0, 0], text].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", vec![]),
        ("half a header", wire::header(1, 1, 20, 0)[..8].to_vec()),
        (
            "a size below the header",
            wire::header(1, 1, 15, 0).to_vec(),
        ),
        ("a size of 4 GiB", wire::header(1, 1, u32::MAX, 0).to_vec()),
        (
            "a command before VERSION",
            wire::message(1, command::GET_INFO, 0, &wire::words(&[16, 0, 0, 0])),
        ),
        (
            "a reply",
            wire::message(1, command::VERSION, wire::REPLY, &json(b"{}\0")),
        ),
        (
            "VERSION of major 1",
            wire::message(1, command::VERSION, 0, &[1, 0, 0, 0]),
        ),
        (
            "VERSION of 2 bytes",
            wire::message(1, command::VERSION, 0, &[0, 0]),
        ),
        (
            "VERSION without NUL",
            wire::message(1, command::VERSION, 0, &json(b"{\"capabilities\":{}}")),
        ),
        (
            "VERSION with garbage",
            wire::message(1, command::VERSION, 0, &json(b"\xff\xfe{{\0")),
        ),
        (
            "VERSION with deep JSON",
            wire::message(1, command::VERSION, 0, &json(&[b'['; 60_000])),
        ),
        (
            "VERSION with a list",
            wire::message(1, command::VERSION, 0, &json(b"{\"capabilities\":[]}\0")),
        ),
        (
            "VERSION with 1e300 descriptors",
            wire::message(
                1,
                command::VERSION,
                0,
                &json(b"{\"capabilities\":{\"max_msg_fds\":1e300,\"pgsizes\":-1}}\0"),
            ),
        ),
        ("zeros", vec![0; 4096]),
        ("ones", vec![0xff; 4096]),
    ];
    for (what, bytes) in &cases {
        let mut client = wait_for(what, SOON, || Client::connect_raw(&socket).ok()).unwrap();
        let _ = client.send_bytes(bytes, &[]);
        drop(client);
        assert_eq!(dpu.em_pid(0).unwrap(), pid, "after {what}");
        let next = wait_for("a new VMM", SOON, || Client::connect(&socket).ok());
        next.unwrap_or_else(|e| panic!("after {what}: {e}"));
    }
    let mut a = wait_for("the function", SOON, || {
        VirtioNet::open(&socket, Guest::default()).ok()
    })
    .unwrap();
    a.start(Setup::default()).unwrap();
    works(&mut a, &mut b);
}
