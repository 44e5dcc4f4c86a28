//! Transfers into and out of the memory of another function of the same VM.

use super::{Pair, Side};
use crate::recovery::{self, LIVES};
use distdpu_tests::device_memory::DeviceMemory;
use distdpu_tests::dpu::{Dpu, Rdma};
use distdpu_tests::memory::{Range, Shape};
use distdpu_tests::mlx5::{Send, Service, opcode};
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::virtio_net::Guest;
use rustix::process::Signal;

/// Where the guests place their BARs.
pub(crate) const BAR: u64 = 0x40_0000_0000;
/// Bytes of the BAR that regions have.
const LEN: u64 = 8 << 20;
/// All rights.
const RIGHTS: u32 = 0b1111;

const ERROR_SEND: u8 = 0xd;
const LOCAL_PROTECTION: u8 = 4;
const REMOTE_ACCESS: u8 = 0x13;

/// Two guests with an RDMA function and a memory function each.
pub(crate) struct Rig {
    pub(crate) pair: Pair,
    pub(crate) gpu: [DeviceMemory; 2],
    /// A region over the first part of each BAR.
    pub(crate) key: [u32; 2],
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(Shape::Whole)
    }

    /// Guests whose memory lies like this.
    fn with(shape: Shape) -> Self {
        let plan = Rdma {
            memory: 1,
            ..Rdma::new(2)
        };
        let guest = Guest {
            shape,
            ..Guest::default()
        };
        let mut pair = Pair::on(plan, Service::Rc, guest, guest);
        let open = |vm| DeviceMemory::open(&pair.dpu.memory_socket(vm, 0), BAR).unwrap();
        let gpu = [open(0), open(1)];
        let key = [&mut pair.a, &mut pair.b].map(|side| {
            announce(side, BAR, gpu[0].len);
            register(side, BAR)
        });
        Self { pair, gpu, key }
    }

    /// One request of side A; its syndrome, 0 when all is well.
    fn request(&mut self, send: Send<'_>, segment: (u32, u64, u32)) -> u8 {
        let side = &mut self.pair.a;
        side.qp.post_send(send, &[segment], true).unwrap();
        side.driver.ring(&mut side.qp).unwrap();
        let done = side.sends.wait().unwrap();
        match done.opcode {
            ERROR_SEND => done.syndrome,
            _ => 0,
        }
    }

    /// Connects the queue pairs anew, after an error.
    pub(crate) fn reconnect(&mut self) {
        let Pair { a, b, .. } = &mut self.pair;
        let (lids, numbers) = ([b.driver.lid, a.driver.lid], [b.qp.number, a.qp.number]);
        for ((side, lid), peer) in [a, b].into_iter().zip(lids).zip(numbers) {
            side.driver.change_qp(opcode::TO_RST_QP, &side.qp).unwrap();
            side.qp.forget().unwrap();
            let connected = side.driver.connect(&side.qp, Service::Rc, lid, peer);
            connected.unwrap();
        }
    }
}

/// Tells the RDMA function of a BAR as QEMU does: a range without a descriptor.
fn announce(side: &mut Side, address: u64, len: u64) {
    let range = Range {
        address,
        len,
        offset: 0,
        with_fd: false,
    };
    let memory = side.driver.memory.clone();
    side.driver.vmm.map(&memory, &range).unwrap();
}

pub(crate) fn register(side: &mut Side, address: u64) -> u32 {
    let key = side.driver.register_at(side.pd, address, LEN, RIGHTS);
    key.unwrap()
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| (n as u8).wrapping_mul(31) ^ (n >> 8) as u8 ^ seed)
        .collect()
}

/// Offsets and lengths: within a page, over pages, large.
const CASES: [(u64, u32); 5] = [
    (0, 1),
    (4093, 8),
    (4096, 4096),
    (12345, 65537),
    (1 << 20, 3 << 20),
];

#[test]
fn writes_and_reads_reach_the_memory_of_the_other_guest_s_device() {
    for shape in [Shape::Whole, Shape::Pages] {
        writes_and_reads(Rig::with(shape));
    }
}

fn writes_and_reads(mut rig: Rig) {
    let local = rig.pair.a.buffer;
    for (n, (offset, len)) in CASES.into_iter().enumerate() {
        let data = pattern(n as u8, len as usize);
        rig.pair
            .a
            .driver
            .memory
            .write(local.address, &data)
            .unwrap();
        let write = Send::Write(BAR + offset, rig.key[1], None);
        assert_eq!(rig.request(write, (local.key, local.address, len)), 0);
        assert!(rig.gpu[1].bytes(offset, len as usize).unwrap() == data);
        let data = pattern(!(n as u8), len as usize);
        rig.gpu[1].write(offset, &data).unwrap();
        let read = Send::Read(BAR + offset, rig.key[1]);
        assert_eq!(rig.request(read, (local.key, local.address, len)), 0);
        assert!(rig.pair.a.bytes(0, len as usize) == data);
    }
}

#[test]
fn a_device_s_memory_is_sent_from_and_received_into() {
    let mut rig = Rig::new();
    let keys = rig.key;
    for (n, (offset, len)) in CASES.into_iter().enumerate() {
        let data = pattern(n as u8, len as usize);
        rig.gpu[0].write(offset, &data).unwrap();
        // From BAR to BAR, by a send and by a write.
        let b = &mut rig.pair.b;
        b.qp.post_receive(keys[1], BAR + offset, len).unwrap();
        assert_eq!(
            rig.request(Send::Send(None), (keys[0], BAR + offset, len)),
            0
        );
        assert_eq!(rig.pair.b.receives.wait().unwrap().len, len);
        assert!(rig.gpu[1].bytes(offset, len as usize).unwrap() == data);
        rig.gpu[1].write(offset, &vec![0; len as usize]).unwrap();
        let write = Send::Write(BAR + offset, keys[1], None);
        assert_eq!(rig.request(write, (keys[0], BAR + offset, len)), 0);
        assert!(rig.gpu[1].bytes(offset, len as usize).unwrap() == data);
        // A read that fills the own device's memory.
        let data = pattern(!(n as u8), len as usize);
        rig.gpu[1].write(offset, &data).unwrap();
        let read = Send::Read(BAR + offset, keys[1]);
        assert_eq!(rig.request(read, (keys[0], BAR + offset, len)), 0);
        assert!(rig.gpu[0].bytes(offset, len as usize).unwrap() == data);
    }
}

#[test]
fn without_memory_decode_requests_fail_and_the_next_registration_works() {
    let mut rig = Rig::new();
    let (keys, local) = (rig.key, rig.pair.a.buffer);
    let before = pattern(7, 4096);
    rig.gpu[1].write(0, &before).unwrap();
    rig.gpu[1].set_decode(false).unwrap();
    let write = Send::Write(BAR, keys[1], None);
    let segment = (local.key, local.address, 4096);
    assert_eq!(rig.request(write, segment), REMOTE_ACCESS);
    assert!(
        rig.gpu[1].bytes(0, 4096).unwrap() == before,
        "it is as it was"
    );
    rig.reconnect();
    rig.gpu[0].set_decode(false).unwrap();
    let away = rig.request(write, (keys[0], BAR, 4096));
    assert_eq!(away, LOCAL_PROTECTION);
    rig.reconnect();
    for gpu in &mut rig.gpu {
        gpu.set_decode(true).unwrap();
    }
    let key = register(&mut rig.pair.b, BAR);
    assert_eq!(rig.request(Send::Write(BAR, key, None), segment), 0);
}

#[test]
fn a_window_follows_the_bar_and_ends_with_a_reset() {
    let mut rig = Rig::new();
    let (keys, local) = (rig.key, rig.pair.a.buffer);
    let segment = (local.key, local.address, 64);
    let elsewhere = BAR + (4 << 30);
    rig.gpu[1].place(elsewhere).unwrap();
    let old = rig.request(Send::Write(BAR, keys[1], None), segment);
    assert_eq!(old, REMOTE_ACCESS);
    rig.reconnect();
    // Also where the VMM has not told the RDMA function of the BAR.
    let key = register(&mut rig.pair.b, elsewhere);
    let data = pattern(3, 64);
    rig.pair
        .a
        .driver
        .memory
        .write(local.address, &data)
        .unwrap();
    assert_eq!(rig.request(Send::Write(elsewhere, key, None), segment), 0);
    assert!(rig.gpu[1].bytes(0, 64).unwrap() == data);
    rig.gpu[1].reset().unwrap();
    assert_eq!(rig.gpu[1].command().unwrap() & 2, 0, "as after power-on");
    assert!(rig.gpu[1].bytes(0, 64).unwrap() == data, "a reset keeps it");
    assert_ne!(rig.request(Send::Write(elsewhere, key, None), segment), 0);
    rig.reconnect();
    // A guest finds the address in its VMM and switches decode on only.
    rig.gpu[1].set_decode(true).unwrap();
    let key = register(&mut rig.pair.b, elsewhere);
    assert_eq!(rig.request(Send::Write(elsewhere, key, None), segment), 0);
}

#[test]
fn another_vm_s_device_is_not_reached() {
    let mut rig = Rig::new();
    let local = rig.pair.a.buffer;
    // The other guest's BAR is here, this one's own is not any more.
    rig.gpu[0].set_decode(false).unwrap();
    let key = register(&mut rig.pair.a, BAR);
    let remote = rig.pair.b.buffer;
    let write = Send::Write(remote.address, remote.key, None);
    assert_eq!(rig.request(write, (key, BAR, 64)), LOCAL_PROTECTION);
    rig.reconnect();
    let write = Send::Write(BAR, rig.key[1], None);
    assert_eq!(rig.request(write, (local.key, local.address, 64)), 0);
}

#[test]
fn addresses_behind_which_no_device_s_memory_is_are_errors_and_nothing_else() {
    let mut rig = Rig::new();
    let local = rig.pair.a.buffer;
    let segment = (local.key, local.address, 64);
    let len = rig.gpu[1].len;
    let doorbells = rig.pair.b.driver.pci.bars[0].unwrap().address;
    // Nothing, the function's own doorbells, and what runs past the end of the BAR.
    for (address, at) in [
        (0x30_0000_0000, 0x30_0000_0000),
        (doorbells, doorbells + 0x8800),
        (BAR + len - 4096, BAR + len - 32),
    ] {
        let key = register(&mut rig.pair.b, address);
        assert_ne!(
            rig.request(Send::Write(at, key, None), segment),
            0,
            "{at:#x}"
        );
        rig.reconnect();
    }
    assert_eq!(rig.request(Send::Write(BAR, rig.key[1], None), segment), 0);
}

#[test]
fn devices_that_overlap_leave_the_place_to_the_first_until_it_goes() {
    let plan = Rdma {
        memory: 2,
        ..Rdma::new(2)
    };
    let mut pair = Pair::on(plan, Service::Rc, Guest::default(), Guest::default());
    let mut first = DeviceMemory::open(&pair.dpu.memory_socket(1, 0), BAR).unwrap();
    let second = DeviceMemory::open(&pair.dpu.memory_socket(1, 1), BAR).unwrap();
    let key = register(&mut pair.b, BAR);
    let local = pair.a.buffer;
    let mut write = |data: u8| {
        let side = &mut pair.a;
        side.driver
            .memory
            .write(local.address, &[data; 64])
            .unwrap();
        let write = Send::Write(BAR, key, None);
        let segment = [(local.key, local.address, 64)];
        side.qp.post_send(write, &segment, true).unwrap();
        side.driver.ring(&mut side.qp).unwrap();
        assert_eq!(side.sends.wait().unwrap().opcode, 0);
    };
    write(1);
    assert_eq!(
        (first.bytes(63, 1).unwrap(), second.bytes(63, 1).unwrap()),
        (vec![1], vec![0])
    );
    first.set_decode(false).unwrap();
    write(2);
    assert_eq!(
        (first.bytes(63, 1).unwrap(), second.bytes(63, 1).unwrap()),
        (vec![1], vec![2])
    );
}

#[test]
fn a_device_s_memory_outlives_its_em() {
    let mut rig = Rig::new();
    let local = rig.pair.a.buffer;
    let segment = (local.key, local.address, 64);
    let data = pattern(9, 64);
    rig.pair
        .a
        .driver
        .memory
        .write(local.address, &data)
        .unwrap();
    kill(&rig.pair.dpu, "gpu1");
    // Neither the guest's mapping nor the window needs the EM.
    let write = Send::Write(BAR, rig.key[1], None);
    assert_eq!(rig.request(write, segment), 0);
    assert!(rig.gpu[1].bytes(0, 64).unwrap() == data);
    let read = rig.gpu[1].trapped_read(0).unwrap();
    assert_eq!(read.to_le_bytes(), data[..8]);
    // The next EM takes the window away and gives it again.
    rig.gpu[1].set_decode(false).unwrap();
    assert_eq!(rig.request(write, segment), REMOTE_ACCESS);
    rig.reconnect();
    rig.gpu[1].set_decode(true).unwrap();
    assert_eq!(rig.request(write, segment), 0);
}

#[test]
fn an_rdma_em_that_is_replaced_gets_the_windows_again() {
    let mut rig = Rig::new();
    for (em, round) in [("em1", 1), ("em0", 2)] {
        kill(&rig.pair.dpu, em);
        let data = pattern(5 * round, 4096);
        rig.gpu[0].write(0, &data).unwrap();
        let write = Send::Write(BAR, rig.key[1], None);
        assert_eq!(rig.request(write, (rig.key[0], BAR, 4096)), 0);
        assert!(rig.gpu[1].bytes(0, 4096).unwrap() == data);
    }
}

#[test]
fn another_om_gives_and_takes_the_windows_of_the_one_that_was_killed() {
    let mut rig = Rig::new();
    let local = rig.pair.a.buffer;
    let write = Send::Write(BAR, rig.key[1], None);
    let segment = (local.key, local.address, 64);
    for _ in 0..2 {
        rig.pair.dpu.kill_om().unwrap();
        assert_eq!(rig.request(write, segment), 0, "without an OM");
        rig.pair.dpu.start_another_om().unwrap();
        assert_eq!(rig.request(write, segment), 0, "with another");
        wait_for("the window in the other OM's view", SOON, || {
            let view = rig.pair.dpu.ctl(&["functions"]).ok()?;
            let list = view["functions"].as_array()?;
            let gpu = list.iter().find(|f| f["name"] == "gpu1-0")?;
            gpu["memory"]["window"].as_str().map(|_| ())
        })
        .unwrap();
        rig.gpu[1].set_decode(false).unwrap();
        assert_eq!(rig.request(write, segment), REMOTE_ACCESS);
        rig.reconnect();
        rig.gpu[1].set_decode(true).unwrap();
        assert_eq!(rig.request(write, segment), 0);
    }
}

#[test]
fn the_next_guest_finds_neither_window_nor_content_of_the_last() {
    let mut rig = Rig::new();
    let local = rig.pair.a.buffer;
    let write = Send::Write(BAR, rig.key[1], None);
    let segment = (local.key, local.address, 64);
    rig.gpu[1].write(0, &[7; 64]).unwrap();
    let [first, last] = rig.gpu;
    drop(last);
    let socket = rig.pair.dpu.memory_socket(1, 0);
    let next = wait_for("the function to take another client", SOON, || {
        DeviceMemory::open(&socket, BAR + (8 << 30)).ok()
    });
    rig.gpu = [first, next.unwrap()];
    assert_eq!(rig.gpu[1].bytes(0, 64).unwrap(), [0; 64]);
    assert_eq!(rig.request(write, segment), REMOTE_ACCESS);
}

/// Ends an EM that lives long enough to be replaced at once, and waits for the next.
fn kill(dpu: &Dpu, name: &str) {
    std::thread::sleep(LIVES);
    kill_now(dpu, name);
}

/// Ends an EM as abruptly as can be, and waits for the next.
pub(crate) fn kill_now(dpu: &Dpu, name: &str) {
    let old = dpu.pid_of(name).unwrap();
    recovery::kill(old, Signal::KILL);
    let next = wait_for("the next EM", SOON, || {
        dpu.pid_of(name).ok().filter(|pid| *pid != old)
    });
    next.unwrap();
}
