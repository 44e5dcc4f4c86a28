//! Two guests on one EM and what one of them sends the other, as fast as the EM takes it.

use crate::figures::{Outcome, check, gigabytes};
use distdpu_tests::mlx5::{Buffer, Cq, Mlx5, Qp, QpPlan, Service, opcode};
use distdpu_tests::packet::{Flow, Packet};
use distdpu_tests::time::SOON;
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Requests between two doorbells; the last one is signaled.
const BATCH: u64 = 16;
/// Batches under way at the most.
const UNDER_WAY: u64 = 4;
/// Bytes of the guests' buffers.
const BUFFER: u64 = 1 << 20;

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// RDMA WRITEs of 4 KiB.
    Write4k,
    /// RDMA WRITEs of 8 bytes.
    Write8,
    /// Frames of 1514 bytes from virtio-net to virtio-net.
    Frames,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Write4k, Self::Write8, Self::Frames];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write4k => "write_4k",
            Self::Write8 => "write_8",
            Self::Frames => "frames",
        }
    }

    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Write4k => "RDMA WRITE of 4 KiB",
            Self::Write8 => "RDMA WRITE of 8 bytes",
            Self::Frames => "frames of 1514 bytes, virtio-net",
        }
    }

    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Write4k => "GB/s",
            Self::Write8 | Self::Frames => "M/s",
        }
    }
}

struct Side {
    driver: Mlx5,
    cq: Cq,
    pd: u32,
    buffer: Buffer,
}

/// See the module.
pub(crate) struct Guests {
    rdma: [Side; 2],
    qp: Qp,
    net: [VirtioNet; 2],
    frame: Packet,
}

impl Guests {
    /// Connects guests to the functions whose sockets `socket` names by kind and number.
    pub(crate) fn on(socket: impl Fn(&str, usize) -> PathBuf) -> Outcome<Self> {
        let mut sides = [side(&socket("rdma", 0))?, side(&socket("rdma", 1))?];
        let [a, b] = &mut sides;
        let plan = |pd| QpPlan {
            service: Service::Rc,
            pd,
            log_send: 7,
            log_receive: 2,
        };
        let qp = a.driver.create_qp(plan(a.pd), &a.cq, &a.cq)?;
        let peer = b.driver.create_qp(plan(b.pd), &b.cq, &b.cq)?;
        a.driver
            .connect(&qp, Service::Rc, b.driver.lid, peer.number)?;
        b.driver
            .connect(&peer, Service::Rc, a.driver.lid, qp.number)?;
        let net = |n| -> Outcome<VirtioNet> {
            let mut driver = VirtioNet::open(&socket("net", n), Guest::default())?;
            driver.start(Setup::default())?;
            Ok(driver)
        };
        let mut net = [net(0)?, net(1)?];
        let flow = Flow::new(net[0].mac()?, net[1].mac()?);
        Ok(Self {
            rdma: sides,
            qp,
            net,
            frame: flow.frame(1472, 1),
        })
    }

    /// Sends for so long; what was reached, in the kind's unit.
    pub(crate) fn run(&mut self, kind: Kind, time: Duration) -> Outcome<f64> {
        match kind {
            Kind::Write4k => {
                let (count, begin) = self.write(4096, time)?;
                Ok(gigabytes(count * 4096, begin))
            }
            Kind::Write8 => {
                let (count, begin) = self.write(8, time)?;
                Ok(count as f64 / begin.elapsed().as_secs_f64() / 1e6)
            }
            Kind::Frames => Ok(self.frames(time)? / 1e6),
        }
    }

    /// How many requests were done, and since when.
    fn write(&mut self, len: u64, time: Duration) -> Outcome<(u64, Instant)> {
        let [a, b] = &mut self.rdma;
        let (local, remote) = (a.buffer, b.buffer);
        let begin = Instant::now();
        let (mut posted, mut done) = (0u64, 0u64);
        while done < posted || begin.elapsed() < time {
            while posted < done + UNDER_WAY && begin.elapsed() < time {
                for n in 0..BATCH {
                    let at = (posted * BATCH + n) * len % BUFFER;
                    let from = (local.key, local.address + at, len as u32);
                    self.qp
                        .post_write((remote.address + at, remote.key), from, n + 1 == BATCH)?;
                }
                a.driver.ring(&mut self.qp)?;
                posted += 1;
            }
            if done == posted {
                break;
            }
            check(a.cq.wait()?)?;
            done += 1;
        }
        Ok((done * BATCH, begin))
    }

    /// Frames that arrive, a second.
    fn frames(&mut self, time: Duration) -> Outcome<f64> {
        let [from, to] = &mut self.net;
        let begin = Instant::now();
        let (mut sent, mut got) = (0u64, 0u64);
        while got < sent || begin.elapsed() < time {
            if begin.elapsed() < time {
                while sent < got + BATCH && from.try_queue(0, &self.frame)? {
                    sent += 1;
                }
                from.kick_transmit(0)?;
            }
            while to.try_receive(0)?.is_some() {
                got += 1;
            }
            if begin.elapsed() > time + SOON {
                return Err(format!("{got} of {sent} frames arrived").into());
            }
            std::hint::spin_loop();
        }
        Ok(got as f64 / begin.elapsed().as_secs_f64())
    }
}

fn side(socket: &std::path::Path) -> Outcome<Side> {
    let mut driver = Mlx5::open(socket, Guest::default())?;
    driver.start()?;
    let pd = driver.allocate(opcode::ALLOC_PD)?;
    let cq = driver.create_cq(10)?;
    let buffer = driver.register(pd, BUFFER)?;
    Ok(Side {
        driver,
        cq,
        pd,
        buffer,
    })
}
