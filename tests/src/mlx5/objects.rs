//! Protection domains, keys, queues and their states.

use super::{Cq, Mlx5, Qp, opcode};
use crate::Result;
use crate::memory::PAGE;
use std::time::Duration;

/// Memory with a key.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// Guest address, which is its address in the region too.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// L_Key and R_Key.
    pub key: u32,
}

/// Transport service, as the queue pair's context has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Unreliable datagram.
    Ud = 2,
}

/// How a queue pair is made.
#[derive(Debug, Clone, Copy)]
pub struct QpPlan {
    /// Transport service.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// log₂ of the send queue's 64-byte blocks.
    pub log_send: u8,
    /// log₂ of the receives; each has one segment.
    pub log_receive: u8,
}

/// Remote read, write and atomics.
const ALL_RIGHTS: u32 = 0b111 << 13;

pub(super) fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub(super) fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

impl Mlx5 {
    /// ALLOC_…: the index.
    ///
    /// # Errors
    /// The command failed.
    pub fn allocate(&mut self, opcode: u16) -> Result<u32> {
        let output = self.command(opcode, 0, &[], 16)?;
        Ok(index(&output))
    }

    /// An event queue for events of these types.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_eq(&mut self, at: u64, log_size: u8, vector: u8, mask: u64) -> Result<u8> {
        let pages = pages(at, 64 << log_size);
        let mut input = vec![0; 0x110 + pages.len() * 8];
        put32(&mut input, 0x10 + 0xc, u32::from(log_size) << 24 | self.uar);
        put32(&mut input, 0x10 + 0x14, u32::from(vector));
        put64(&mut input, 0x58, mask);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_EQ, 0, &input[8..], 16)?;
        Ok(output[0xb])
    }

    /// `len` bytes with a key of all rights.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn register(&mut self, pd: u32, len: u64) -> Result<Buffer> {
        let address = self.memory.allocate(len, PAGE)?;
        let key = self.register_at(pd, address, len, 0b1111)?;
        Ok(Buffer { address, len, key })
    }

    /// A key for memory by its pages; `rights`: local read 1, local write 2, remote read 4, remote write 8.
    ///
    /// # Errors
    /// The command failed.
    pub fn register_at(&mut self, pd: u32, address: u64, len: u64, rights: u32) -> Result<u32> {
        let pages = pages(address & !(PAGE - 1), len + address % PAGE);
        let octwords = pages.len().div_ceil(2) as u32;
        let mut input = vec![0; 0x110 + octwords as usize * 16];
        let context = 0x10;
        input[context + 2] = ((rights >> 3 & 1) << 5
            | (rights >> 2 & 1) << 4
            | (rights >> 1 & 1) << 3
            | (rights & 1) << 2
            | 1) as u8;
        // atomics go with remote writing
        input[context + 2] |= ((rights >> 3 & 1) << 6) as u8;
        put32(&mut input, context + 4, 0xffff_ff00 | 0x42);
        put32(&mut input, context + 0xc, pd);
        put64(&mut input, context + 0x10, address);
        put64(&mut input, context + 0x18, len);
        put32(&mut input, context + 0x34, octwords);
        put32(&mut input, context + 0x38, 12);
        put32(&mut input, 0x60, octwords);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_MKEY, 0, &input[8..], 16)?;
        Ok(index(&output) << 8 | 0x42)
    }

    /// DESTROY_MKEY.
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy_key(&mut self, key: u32) -> Result<()> {
        self.destroy(opcode::DESTROY_MKEY, key >> 8)
    }

    /// How long the device takes to register `len` bytes by 4 KiB pages: all of them the same page, since only
    /// their number matters. The key is gone afterwards.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn time_registration(&mut self, pd: u32, len: u64) -> Result<Duration> {
        let pages = vec![self.memory.first(); (len / PAGE) as usize];
        let octwords = pages.len().div_ceil(2) as u32;
        let mut input = vec![0; 0x110 + octwords as usize * 16];
        input[..2].copy_from_slice(&opcode::CREATE_MKEY.to_be_bytes());
        input[0x12] = 0b1101;
        put32(&mut input, 0x14, 0xffff_ff42);
        put32(&mut input, 0x1c, pd);
        put64(&mut input, 0x28, len);
        put32(&mut input, 0x44, octwords);
        put32(&mut input, 0x48, 12);
        put32(&mut input, 0x60, octwords);
        put_pages(&mut input, &pages);
        let (output, time) = self.execute_timed(&input, 16)?;
        if output[0] != 0 {
            return Err(crate::Error::Device(format!("status {:#x}", output[0])));
        }
        self.destroy(opcode::DESTROY_MKEY, index(&output))?;
        Ok(time)
    }

    /// A completion queue with `1 << log_size` entries.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_cq(&mut self, log_size: u8) -> Result<Cq> {
        let at = self.memory.allocate(64 << log_size, PAGE)?;
        for entry in 0..1u64 << log_size {
            self.memory.write(at + entry * 64 + 63, &[0xf1])?;
        }
        let record = self.memory.allocate(64, 64)?;
        let pages = pages(at, 64 << log_size);
        let mut input = vec![0; 0x110 + pages.len() * 8];
        put32(&mut input, 0x10 + 0xc, u32::from(log_size) << 24 | self.uar);
        put32(&mut input, 0x10 + 0x14, self.eqn.into());
        put64(&mut input, 0x10 + 0x38, record);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_CQ, 0, &input[8..], 16)?;
        Cq::new(&self.memory, index(&output), at, record, log_size)
    }

    /// A queue pair in state Reset.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_qp(&mut self, plan: QpPlan, send: &Cq, receive: &Cq) -> Result<Qp> {
        let receive_bytes = 16 << plan.log_receive;
        let bytes = receive_bytes + (64u64 << plan.log_send);
        let at = self.memory.allocate(bytes, PAGE)?;
        let record = self.memory.allocate(64, 64)?;
        let pages = pages(at, bytes);
        let mut input = vec![0; 0x110 + pages.len() * 8];
        let qpc = 0x18;
        input[qpc + 1] = plan.service as u8;
        put32(&mut input, qpc + 4, plan.pd);
        input[qpc + 8] = 5 << 5 | 30; // MTU 4096, messages of 1 GiB
        input[qpc + 9] = plan.log_receive << 3;
        input[qpc + 0xa] = plan.log_send << 3;
        put32(&mut input, qpc + 0xc, self.uar);
        put32(&mut input, qpc + 0x78, 0); // PSN
        put32(&mut input, qpc + 0x7c, send.number);
        put32(&mut input, qpc + 0x9c, receive.number);
        put64(&mut input, qpc + 0xa0, record);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_QP, 0, &input[8..], 16)?;
        let number = index(&output);
        let sends = at + receive_bytes;
        Qp::new(
            &self.memory,
            number,
            (at, plan.log_receive),
            (sends, plan.log_send),
            record,
        )
    }

    /// Takes a queue pair from Reset to ready to send, connected to another.
    ///
    /// # Errors
    /// A command failed.
    pub fn connect(&mut self, qp: &Qp, service: Service, lid: u16, remote: u32) -> Result<()> {
        self.to_init(qp, service)?;
        self.to_rtr(qp, service, lid, remote)?;
        self.to_rts(qp, service)
    }

    /// RST2INIT.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_init(&mut self, qp: &Qp, service: Service) -> Result<()> {
        let mut input = modify(qp, service);
        put32(&mut input, QPC + 0x90, ALL_RIGHTS);
        put32(&mut input, QPC + 0xa8, 0x1111_1111);
        self.command(opcode::RST2INIT_QP, 0, &input[8..], 16)?;
        Ok(())
    }

    /// INIT2RTR.
    ///
    /// # Errors
    /// The command failed: there may be no such destination.
    pub fn to_rtr(&mut self, qp: &Qp, service: Service, lid: u16, remote: u32) -> Result<()> {
        let mut input = modify(qp, service);
        let path = QPC + 0x18;
        input[path + 6..path + 8].copy_from_slice(&lid.to_be_bytes());
        self.ready_to_receive(input, remote)
    }

    /// Takes a queue pair of an Ethernet port from Reset to ready to send, connected to one at MAC address and GID.
    ///
    /// # Errors
    /// A command failed: there may be no such destination.
    pub fn connect_roce(&mut self, qp: &Qp, to: ([u8; 6], [u8; 16]), remote: u32) -> Result<()> {
        let (mac, gid) = to;
        self.to_init(qp, Service::Rc)?;
        let mut input = modify(qp, Service::Rc);
        input[QPC + 0x28..QPC + 0x38].copy_from_slice(&gid);
        input[QPC + 0x3e..QPC + 0x44].copy_from_slice(&mac);
        self.ready_to_receive(input, remote)?;
        self.to_rts(qp, Service::Rc)
    }

    /// Sets an entry of an Ethernet port's GID table; all zeroes remove it.
    ///
    /// # Errors
    /// The command failed.
    pub fn set_gid(&mut self, index: u16, gid: [u8; 16]) -> Result<()> {
        let mut input = [0; 0x30];
        input[8..10].copy_from_slice(&index.to_be_bytes());
        input[0x10..0x20].copy_from_slice(&gid);
        self.command(opcode::SET_ROCE_ADDRESS, 0, &input[8..], 16)?;
        Ok(())
    }

    fn ready_to_receive(&mut self, mut input: Vec<u8>, remote: u32) -> Result<()> {
        input[QPC + 8] = 5 << 5 | 30;
        put32(&mut input, QPC + 0x14, remote);
        put32(&mut input, QPC + 0x90, ALL_RIGHTS | 4 << 21); // 16 reads as responder
        put32(&mut input, QPC + 0x94, 12 << 24); // RNR timer 0.64 ms, PSN 0
        self.command(opcode::INIT2RTR_QP, 0, &input[8..], 16)?;
        Ok(())
    }

    /// RTR2RTS.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_rts(&mut self, qp: &Qp, service: Service) -> Result<()> {
        let mut input = modify(qp, service);
        // ACK timeout 14 (67 ms)
        input[QPC + 0x18 + 8] = 14 << 3;
        put32(&mut input, QPC + 0x70, 4 << 21 | 7 << 16 | 7 << 13);
        self.command(opcode::RTR2RTS_QP, 0, &input[8..], 16)?;
        Ok(())
    }

    /// 2ERR, 2RST: changes without attributes.
    ///
    /// # Errors
    /// The command failed.
    pub fn change_qp(&mut self, opcode: u16, qp: &Qp) -> Result<()> {
        self.command(opcode, 0, &qp.number.to_be_bytes(), 16)?;
        Ok(())
    }

    /// The state that QUERY_QP tells.
    ///
    /// # Errors
    /// The command failed.
    pub fn qp_state(&mut self, qp: &Qp) -> Result<u8> {
        let output = self.command(opcode::QUERY_QP, 0, &qp.number.to_be_bytes(), 0x110)?;
        Ok(output[QPC] >> 4)
    }

    /// DESTROY_…
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy(&mut self, opcode: u16, number: u32) -> Result<()> {
        self.command(opcode, 0, &number.to_be_bytes(), 16)?;
        Ok(())
    }
}

/// Where the context stands in QP commands.
const QPC: usize = 0x18;

fn modify(qp: &Qp, service: Service) -> Vec<u8> {
    let mut input = vec![0; 0x110];
    put32(&mut input, 8, qp.number);
    input[QPC + 1] = service as u8;
    input
}

pub(super) fn index(output: &[u8]) -> u32 {
    u32::from_be_bytes([0, output[9], output[10], output[11]])
}

pub(super) fn pages(at: u64, len: u64) -> Vec<u64> {
    (0..len.div_ceil(PAGE)).map(|n| at + n * PAGE).collect()
}

pub(super) fn put_pages(input: &mut [u8], pages: &[u64]) {
    for (n, page) in pages.iter().enumerate() {
        put64(input, 0x110 + n * 8, *page);
    }
}
