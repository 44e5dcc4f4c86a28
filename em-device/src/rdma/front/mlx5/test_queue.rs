//! For tests of queues: memory of a queue on scattered pages, and a doorbell record.

use super::buffer::QueueBuffer;
use crate::testing::{BASE, Memory};

/// Guest memory with a queue of scattered pages of 4 KiB, that begins 64 bytes before the end of the
/// first, and a doorbell record.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) memory: Memory,
    at: u64,
    pages: u64,
    pub(super) len: u64,
}

const PAGE: u64 = 0x1000;
const OFFSET: u64 = PAGE - 64;

impl Place {
    /// The `n`th queue in this memory, of `len` bytes.
    pub(super) fn new(memory: &Memory, n: u64, len: u64) -> Self {
        Self {
            memory: memory.clone(),
            at: BASE + n * 0x10_0000,
            pages: (OFFSET + len).div_ceil(PAGE),
            len,
        }
    }

    /// Pages lie backwards, with a hole behind each.
    fn page(&self, index: u64) -> u64 {
        self.at + 0x1000 + 2 * PAGE * (self.pages - 1 - index)
    }

    pub(super) fn buffer(&self) -> QueueBuffer {
        let pages: Vec<u64> = (0..self.pages).map(|index| self.page(index)).collect();
        QueueBuffer::new(pages.into(), 12, OFFSET, self.len).unwrap()
    }

    pub(super) fn doorbell(&self) -> u64 {
        self.at
    }

    pub(super) fn record(&self, word: u64, value: u32) {
        self.memory.write(self.at + 4 * word, &value.to_be_bytes());
    }

    fn address(&self, at: u64) -> u64 {
        let byte = OFFSET + at % self.len;
        self.page(byte / PAGE) + byte % PAGE
    }

    /// Writes at a byte of the ring, around its end.
    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        for (n, byte) in bytes.chunks(4).enumerate() {
            self.memory.write(self.address(at + 4 * n as u64), byte);
        }
    }

    pub(super) fn get(&self, at: u64, len: usize) -> Vec<u8> {
        (0..len as u64)
            .flat_map(|n| self.memory.read(self.address(at + n), 1))
            .collect()
    }
}
