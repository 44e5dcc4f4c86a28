//! Two guests' `erdma` drivers over two EMs: what the driver expects, what moves, and what fails how.

mod datagrams;
mod errors;
mod hostile;
mod kept;
mod memory;
mod mixed;
mod probe;
mod transfer;

use distdpu_tests::dpu::{Dpu, RdmaFace, rdma_mac};
use distdpu_tests::erdma::{Buffer, Cq, CqPlan, Erdma, Path, Qp, QpPlan, Send};
use distdpu_tests::virtio_net::Guest;

/// A key, an address and bytes.
type Segment = (u32, u64, u32);

/// A guest's driver with one queue pair.
struct Side {
    driver: Erdma,
    pd: u32,
    sends: Cq,
    receives: Cq,
    qp: Qp,
    buffer: Buffer,
}

/// Two guests whose queue pairs are connected.
struct Pair {
    a: Side,
    b: Side,
    dpu: Dpu,
}

/// Bytes of each side's buffer.
const BUFFER: u64 = 8 << 20;

/// A queue pair as users make them, or as the kernel does.
fn plan(pd: u32, user: bool) -> QpPlan {
    QpPlan {
        pd,
        log_send: 8,
        log_receive: 7,
        user,
        datagrams: false,
        number: None,
    }
}

fn cq_plan(user: bool) -> CqPlan {
    CqPlan {
        log_size: 8,
        user,
        eqn: 1,
    }
}

/// GID of a guest: ::ffff:10.0.0.N, index 1 as by the kernel.
fn gid(index: usize) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, index as u8 + 1]);
    gid
}

/// Link-local GID of a guest, index 0.
fn local_gid(index: usize) -> [u8; 16] {
    let [a, b, c, d, e, f] = rdma_mac(index);
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}

/// Where a guest is.
fn path(index: usize) -> Path {
    Path {
        mac: rdma_mac(index),
        gid: gid(index),
        own_index: 1,
    }
}

impl Side {
    fn new(dpu: &Dpu, index: usize, user: bool, guest: Guest) -> Self {
        let driver = Erdma::open(&dpu.erdma_socket(index), guest).unwrap();
        Self::of(driver, index, user)
    }

    /// Starts a driver whose device is as after power-on.
    fn of(mut driver: Erdma, index: usize, user: bool) -> Self {
        driver.start().unwrap();
        driver.set_gid(0, Some(local_gid(index))).unwrap();
        driver.set_gid(1, Some(gid(index))).unwrap();
        let pd = 1;
        let sends = driver.create_cq(cq_plan(user)).unwrap();
        let receives = driver.create_cq(cq_plan(user)).unwrap();
        let qp = driver.create_qp(plan(pd, user), &sends, &receives);
        let buffer = driver.register(pd, BUFFER).unwrap();
        Self {
            qp: qp.unwrap(),
            driver,
            pd,
            sends,
            receives,
            buffer,
        }
    }

    /// Takes the queue pair to ready to send.
    fn connect(&mut self, peer: usize, remote: u32) {
        self.driver.to_rtr(&self.qp, path(peer), remote).unwrap();
        self.driver.to_rts(&self.qp).unwrap();
    }

    /// A part of the buffer.
    fn part(&self, offset: u64, len: u32) -> Segment {
        (self.buffer.key, self.buffer.address + offset, len)
    }

    /// Posts a signaled entry and rings; answers its first block.
    fn send(&mut self, send: Send<'_>, segments: &[Segment]) -> u16 {
        let first = self.qp.post_send(send, segments, true).unwrap();
        self.driver.ring(&self.qp).unwrap();
        first
    }

    /// Posts a receive into a part of the buffer.
    fn receive(&mut self, offset: u64, len: u32) -> u16 {
        let part = self.part(offset, len);
        let index = self.driver.receive(&mut self.qp, Some(part)).unwrap();
        // The device has seen the doorbell when it answers what came later.
        self.driver.read32(0).unwrap();
        index
    }

    /// A pattern in the buffer that says where each byte is from.
    fn fill(&self, seed: u8) -> Vec<u8> {
        let data: Vec<u8> = (0..self.buffer.len)
            .map(|n| (n as u8) ^ (n >> 8) as u8 ^ (n >> 16) as u8 ^ seed)
            .collect();
        let at = self.buffer.address;
        self.driver.memory.write(at, &data).unwrap();
        data
    }

    fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let at = self.buffer.address + offset;
        self.driver.memory.bytes(at, len).unwrap()
    }
}

impl Pair {
    fn new(user: bool) -> Self {
        Self::with(user, Guest::default(), Guest::default())
    }

    fn with(user: bool, a: Guest, b: Guest) -> Self {
        let dpu = Dpu::start_faces(&[RdmaFace::Erdma; 2], false).unwrap();
        let a = Side::new(&dpu, 0, user, a);
        let b = Side::new(&dpu, 1, user, b);
        let mut pair = Self { a, b, dpu };
        pair.connect();
        pair
    }

    fn connect(&mut self) {
        let (a, b) = (self.a.qp.number, self.b.qp.number);
        self.a.connect(1, b);
        self.b.connect(0, a);
    }

    /// Whether an 8-byte write from `a` to `b` arrives.
    fn works(&mut self) {
        let data = self.a.fill(0x5a);
        let (_, at, _) = self.b.part(77, 8);
        self.a
            .driver
            .memory
            .write(self.a.buffer.address, &data[..8])
            .unwrap();
        let part = self.a.part(0, 8);
        self.a
            .send(Send::Write(at, self.b.buffer.key, None), &[part]);
        self.a.sends.success().unwrap();
        assert_eq!(self.b.bytes(77, 8), data[..8]);
    }
}
