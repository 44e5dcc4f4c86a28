//! Two guests' RDMA drivers over two EMs: what moves, and what fails how.

mod doorbells;
mod errors;
mod kept;
mod om_change;
pub(crate) mod transfer;
mod unreliable;
mod windows;
mod windows_under_load;

use distdpu_tests::dpu::{Dpu, Rdma};
use distdpu_tests::mlx5::{Buffer, Cq, Mlx5, Qp, QpPlan, Service};
use distdpu_tests::virtio_net::Guest;

/// A guest's driver with one queue pair.
pub(crate) struct Side {
    pub(crate) driver: Mlx5,
    pub(crate) pd: u32,
    pub(crate) sends: Cq,
    pub(crate) receives: Cq,
    pub(crate) qp: Qp,
    pub(crate) buffer: Buffer,
}

/// Two guests whose queue pairs are connected.
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) dpu: Dpu,
}

/// Bytes of each side's buffer.
pub(crate) const BUFFER: u64 = 8 << 20;

impl Side {
    pub(crate) fn new(dpu: &Dpu, index: usize, service: Service, guest: Guest) -> Self {
        let driver = Mlx5::open(&dpu.rdma_socket(index), guest).unwrap();
        Self::of(driver, service)
    }

    /// Starts a driver whose device is as after power-on.
    pub(crate) fn of(mut driver: Mlx5, service: Service) -> Self {
        driver.start().unwrap();
        let pd = driver
            .allocate(distdpu_tests::mlx5::opcode::ALLOC_PD)
            .unwrap();
        let sends = driver.create_cq(8).unwrap();
        let receives = driver.create_cq(8).unwrap();
        let plan = QpPlan {
            service,
            pd,
            log_send: 7,
            log_receive: 6,
        };
        let qp = driver.create_qp(plan, &sends, &receives).unwrap();
        let buffer = driver.register(pd, BUFFER).unwrap();
        Self {
            driver,
            pd,
            sends,
            receives,
            qp,
            buffer,
        }
    }

    /// A pattern in the buffer that says where each byte is from.
    pub(crate) fn fill(&self, seed: u8) -> Vec<u8> {
        let data: Vec<u8> = (0..self.buffer.len)
            .map(|n| (n as u8) ^ (n >> 8) as u8 ^ (n >> 16) as u8 ^ seed)
            .collect();
        self.driver
            .memory
            .write(self.buffer.address, &data)
            .unwrap();
        data
    }

    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        self.driver
            .memory
            .bytes(self.buffer.address + offset, len)
            .unwrap()
    }
}

impl Pair {
    pub(crate) fn new(service: Service) -> Self {
        Self::with(service, Guest::default(), Guest::default())
    }

    pub(crate) fn with(service: Service, a: Guest, b: Guest) -> Self {
        Self::on(Rdma::new(2), service, a, b)
    }

    /// With doorbell pages that the VMM maps, or not.
    pub(crate) fn mapped(mapped_doorbells: bool, service: Service) -> Self {
        let plan = Rdma {
            mapped_doorbells,
            ..Rdma::new(2)
        };
        let pair = Self::on(plan, service, Guest::default(), Guest::default());
        assert_eq!(pair.a.driver.has_mapped_doorbells(), mapped_doorbells);
        pair
    }

    pub(crate) fn on(plan: Rdma, service: Service, a: Guest, b: Guest) -> Self {
        Self::over(Dpu::start_rdma(plan).unwrap(), service, a, b)
    }

    /// Over a DPU with two functions.
    pub(crate) fn over(dpu: Dpu, service: Service, a: Guest, b: Guest) -> Self {
        let mut a = Side::new(&dpu, 0, service, a);
        let mut b = Side::new(&dpu, 1, service, b);
        let (lid_a, lid_b) = (a.driver.lid, b.driver.lid);
        a.driver
            .connect(&a.qp, service, lid_b, b.qp.number)
            .unwrap();
        b.driver
            .connect(&b.qp, service, lid_a, a.qp.number)
            .unwrap();
        Self { a, b, dpu }
    }
}
