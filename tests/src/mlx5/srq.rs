//! Shared receive queues: entries that link to each other.

use super::objects::{index, pages, put_pages, put32, put64};
use super::queues::segment;
use super::{Cq, Mlx5, Qp, QpPlan, opcode};
use crate::Result;
use crate::memory::{GuestMemory, PAGE};
use std::sync::Arc;

/// log₂ of an entry's bytes: a link and one segment.
const LOG_STRIDE: u8 = 5;

/// A shared receive queue whose entries are used in turn.
#[derive(Debug)]
pub struct Srq {
    /// SRQN.
    pub number: u32,
    memory: Arc<GuestMemory>,
    at: u64,
    record: u64,
    log_size: u8,
    posted: u16,
}

impl Srq {
    /// Posts a receive of one buffer: key, address, bytes. Answers its index.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn post(&mut self, key: u32, address: u64, len: u32) -> Result<u16> {
        let mask = (1 << self.log_size) - 1;
        let place = self.posted & mask;
        let mut entry = [0; 32];
        entry[2..4].copy_from_slice(&((place + 1) & mask).to_be_bytes());
        entry[16..].copy_from_slice(&segment(key, address, len));
        self.memory
            .write(self.at + (u64::from(place) << LOG_STRIDE), &entry)?;
        self.posted = self.posted.wrapping_add(1);
        let counter = u32::from(self.posted);
        self.memory.write(self.record, &counter.to_be_bytes())?;
        Ok(place)
    }
}

impl Mlx5 {
    /// A shared receive queue with `1 << log_size` entries.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_srq(&mut self, pd: u32, log_size: u8) -> Result<Srq> {
        let bytes = 1 << (log_size + LOG_STRIDE);
        let at = self.memory.allocate(bytes, PAGE)?;
        let record = self.memory.allocate(64, 64)?;
        let pages = pages(at, bytes);
        let mut input = vec![0; 0x110 + pages.len() * 8];
        let context = 0x10;
        input[context] = log_size;
        input[context + 4] = LOG_STRIDE - 4;
        put32(&mut input, context + 0x18, pd);
        put64(&mut input, context + 0x28, record);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_SRQ, 0, &input[8..], 16)?;
        Ok(Srq {
            number: index(&output),
            memory: self.memory.clone(),
            at,
            record,
            log_size,
            posted: 0,
        })
    }

    /// A queue pair in state Reset whose receives come from a shared queue.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_qp_on(&mut self, plan: QpPlan, cqs: [&Cq; 2], srq: &Srq) -> Result<Qp> {
        let bytes = 64u64 << plan.log_send;
        let at = self.memory.allocate(bytes, PAGE)?;
        let record = self.memory.allocate(64, 64)?;
        let pages = pages(at, bytes);
        let mut input = vec![0; 0x110 + pages.len() * 8];
        let qpc = 0x18;
        input[qpc + 1] = plan.service as u8;
        put32(&mut input, qpc + 4, plan.pd);
        input[qpc + 8] = 5 << 5 | 30;
        input[qpc + 0xa] = plan.log_send << 3;
        put32(&mut input, qpc + 0xc, self.uar);
        put32(&mut input, qpc + 0x7c, cqs[0].number);
        put32(&mut input, qpc + 0x9c, cqs[1].number);
        put64(&mut input, qpc + 0xa0, record);
        put32(&mut input, qpc + 0xac, 1 << 24 | srq.number);
        put_pages(&mut input, &pages);
        let output = self.command(opcode::CREATE_QP, 0, &input[8..], 16)?;
        let sends = (at, plan.log_send);
        Qp::new(&self.memory, index(&output), (at, 0), sends, record)
    }
}
