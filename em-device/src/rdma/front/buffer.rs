//! The memory of a queue: a list of guest pages that is contiguous to its driver; and doorbell records.

use dot_iommu::{Access, DotView, HostSpan};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;
use vm_memory::Bytes;

/// Queues, and so all entries of 64 bytes, begin at multiples of this.
const ALIGN: u64 = 64;

/// Why memory cannot hold a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadBuffer {
    /// Pages are of 2¹² to 2³¹ bytes.
    #[error("pages of 2^{0} bytes cannot be used")]
    PageShift(u8),
    /// A page's address is no multiple of its size.
    #[error("page {0:#x} is not a multiple of the page size")]
    Page(u64),
    /// The offset is no multiple of 64.
    #[error("the queue begins at {0:#x} of its first page, which is no multiple of 64")]
    Offset(u64),
    /// The pages end before the queue does.
    #[error("a queue of {needed:#x} bytes does not fit into {there:#x}")]
    Short {
        /// Bytes that the queue takes.
        needed: u64,
        /// Bytes that there are.
        there: u64,
    },
    /// A size that the format does not have.
    #[error("the queue's {0} is out of range")]
    Size(&'static str),
    /// A doorbell record is 8 bytes at a multiple of 8.
    #[error("doorbell record {0:#x} is no multiple of 8")]
    Doorbell(u64),
}

/// Memory of the queue is not mapped, or not at all in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the queue's memory is not mapped")]
pub struct NotMapped;

/// Guest memory of one queue. It keeps bus addresses only: each access translates anew.
#[derive(Debug, Clone)]
pub struct QueueBuffer {
    pages: Arc<[u64]>,
    page_shift: u8,
    offset: u64,
    len: u64,
}

impl QueueBuffer {
    /// `len` bytes from byte `offset` of the first of `pages`, whose bus addresses are multiples of
    /// 2^`page_shift` bytes.
    pub fn new(
        pages: Arc<[u64]>,
        page_shift: u8,
        offset: u64,
        len: u64,
    ) -> Result<Self, BadBuffer> {
        if !(12..=31).contains(&page_shift) {
            return Err(BadBuffer::PageShift(page_shift));
        }
        if let Some(page) = pages
            .iter()
            .find(|page| *page & ((1 << page_shift) - 1) != 0)
        {
            return Err(BadBuffer::Page(*page));
        }
        Self::anywhere(pages, page_shift, offset, len)
    }

    /// As [`Self::new`], for pages that begin at multiples of 64 bytes: such as one that is larger than the queue.
    pub fn anywhere(
        pages: Arc<[u64]>,
        page_shift: u8,
        offset: u64,
        len: u64,
    ) -> Result<Self, BadBuffer> {
        if !(12..=31).contains(&page_shift) {
            return Err(BadBuffer::PageShift(page_shift));
        }
        let ends = |page: &u64| page.checked_add(1 << page_shift).is_some();
        if let Some(page) = pages.iter().find(|page| *page % ALIGN != 0 || !ends(page)) {
            return Err(BadBuffer::Page(*page));
        }
        if offset % ALIGN != 0 {
            return Err(BadBuffer::Offset(offset));
        }
        // A list of 2³² pages of 2³¹ bytes would be needed to overflow this.
        let there = ((pages.len() as u64) << page_shift).saturating_sub(offset);
        if len == 0 || len > there {
            return Err(BadBuffer::Short { needed: len, there });
        }
        Ok(Self {
            pages,
            page_shift,
            offset,
            len,
        })
    }

    /// Bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The first `len` bytes of it: the whole of a ring of that size.
    pub fn ring(mut self, len: u64) -> Result<Self, BadBuffer> {
        if len == 0 || len > self.len {
            let there = self.len;
            return Err(BadBuffer::Short { needed: len, there });
        }
        self.len = len;
        Ok(self)
    }

    /// Bus address of byte `at`, and how many bytes follow in its page and in the buffer.
    #[inline]
    fn bus(&self, at: u64) -> Result<(u64, u64), NotMapped> {
        if at >= self.len {
            return Err(NotMapped);
        }
        let byte = self.offset + at;
        let index = (byte >> self.page_shift) as usize;
        let within = byte & ((1 << self.page_shift) - 1);
        let page = self.pages.get(index).ok_or(NotMapped)?;
        let run = ((1 << self.page_shift) - within).min(self.len - at);
        Ok((page + within, run))
    }

    /// The memory of `[at, at + len)`, which must lie in one page: true for parts of an aligned 64 bytes.
    #[inline]
    pub fn span<'v>(
        &self,
        at: u64,
        len: u64,
        access: Access,
        view: &'v DotView<'_>,
    ) -> Result<HostSpan<'v>, NotMapped> {
        match self.bus(at)? {
            (bus, run) if len <= run => view.translate(bus, len, access).map_err(|_| NotMapped),
            _ => Err(NotMapped),
        }
    }

    /// Copies from byte `at` on, and from the beginning after the end: the buffer is a ring. At most
    /// its length.
    #[inline]
    pub fn read(&self, at: u64, into: &mut [u8], view: &DotView<'_>) -> Result<(), NotMapped> {
        let (bus, run) = self.bus(at)?;
        if into.len() as u64 <= run {
            return copy_in(bus, into, view);
        }
        self.read_pieces(at, into, view)
    }

    fn read_pieces(
        &self,
        mut at: u64,
        mut into: &mut [u8],
        view: &DotView<'_>,
    ) -> Result<(), NotMapped> {
        if into.len() as u64 > self.len {
            return Err(NotMapped);
        }
        while !into.is_empty() {
            let (bus, run) = self.bus(at)?;
            let len = into.len().min(run as usize);
            let (piece, rest) = into.split_at_mut_checked(len).ok_or(NotMapped)?;
            copy_in(bus, piece, view)?;
            into = rest;
            at = (at + len as u64) % self.len;
        }
        Ok(())
    }

    /// Copies to byte `at` on, as [`Self::read`].
    pub fn write(&self, mut at: u64, mut from: &[u8], view: &DotView<'_>) -> Result<(), NotMapped> {
        if from.len() as u64 > self.len {
            return Err(NotMapped);
        }
        while !from.is_empty() {
            let (bus, run) = self.bus(at)?;
            let len = from.len().min(run as usize);
            let (piece, rest) = from.split_at_checked(len).ok_or(NotMapped)?;
            let span = view
                .translate(bus, len as u64, Access::Write)
                .map_err(|_| NotMapped)?;
            span.copy_from(piece).map_err(|_| NotMapped)?;
            from = rest;
            at = (at + len as u64) % self.len;
        }
        Ok(())
    }
}

/// Copies from bus address `bus`, where one range holds all of it.
#[inline]
pub(super) fn copy_in(bus: u64, into: &mut [u8], view: &DotView<'_>) -> Result<(), NotMapped> {
    if into.is_empty() {
        return Ok(());
    }
    view.translate(bus, into.len() as u64, Access::Read)
        .and_then(|span| span.copy_to(into))
        .map(|_| ())
        .map_err(|_| NotMapped)
}

/// A doorbell record: 8 bytes that the driver writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record(u64);

impl Record {
    pub(super) fn new(addr: u64) -> Result<Self, BadBuffer> {
        match addr % 8 == 0 && addr.checked_add(7).is_some() {
            true => Ok(Self(addr)),
            false => Err(BadBuffer::Doorbell(addr)),
        }
    }

    /// Word 0 or 1. What the driver wrote before it is visible afterwards.
    #[inline]
    pub(super) fn load(self, word: u64, view: &DotView<'_>) -> Result<u32, NotMapped> {
        let span = view
            .translate(self.0 + 4 * word, 4, Access::Read)
            .map_err(|_| NotMapped)?;
        span.as_volatile_slice()
            .load::<u32>(0, Ordering::Acquire)
            .map(u32::from_be)
            .map_err(|_| NotMapped)
    }

    /// All of it as one little-endian number. What the driver wrote before it is visible afterwards.
    #[inline]
    pub(super) fn load_whole(self, view: &DotView<'_>) -> Result<u64, NotMapped> {
        let span = view
            .translate(self.0, 8, Access::Read)
            .map_err(|_| NotMapped)?;
        span.as_volatile_slice()
            .load::<u64>(0, Ordering::Acquire)
            .map(u64::from_le)
            .map_err(|_| NotMapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BASE, BYTES, Memory};
    use proptest::prelude::*;

    /// Pages that lie in guest memory in the opposite order.
    fn buffer(count: u64, offset: u64, len: u64) -> QueueBuffer {
        let pages: Vec<u64> = (0..count).rev().map(|n| BASE + 0x2000 * n).collect();
        QueueBuffer::new(pages.into(), 12, offset, len).unwrap()
    }

    #[test]
    fn impossible_buffers_are_refused() {
        let new = |pages: &[u64], shift, offset, len| {
            QueueBuffer::new(pages.into(), shift, offset, len).map(|_| ())
        };
        assert_eq!(new(&[0x1000], 12, 0x40, 0xfc0), Ok(()));
        assert_eq!(new(&[0x1000], 11, 0, 64), Err(BadBuffer::PageShift(11)));
        assert_eq!(new(&[0x1000], 32, 0, 64), Err(BadBuffer::PageShift(32)));
        assert_eq!(new(&[0x1800], 12, 0, 64), Err(BadBuffer::Page(0x1800)));
        assert_eq!(new(&[0x1000], 12, 8, 64), Err(BadBuffer::Offset(8)));
        for (offset, len) in [
            (0x40, 0xfc1),
            (0, 0),
            (u64::MAX - 63, 64),
            (0, u64::MAX),
            (0x1000, 64),
        ] {
            let error = new(&[0x1000], 12, offset, len).unwrap_err();
            assert!(matches!(error, BadBuffer::Short { .. }), "{offset} {len}");
        }
        assert!(buffer(1, 0, 0x1000).ring(0x1001).is_err());
        assert_eq!(Record::new(4).unwrap_err(), BadBuffer::Doorbell(4));
        assert!(Record::new(u64::MAX - 7).is_ok());
    }

    #[test]
    fn an_access_outside_of_the_buffer_or_of_guest_memory_fails() {
        let memory = Memory::new();
        let reader = memory.table.reader();
        let view = reader.pin();
        let buffer = buffer(2, 0x40, 0x1000);
        let mut bytes = [0; 0x1001];
        assert_eq!(buffer.read(0x1000, &mut [0; 1], &view), Err(NotMapped));
        assert_eq!(buffer.read(0, &mut bytes, &view), Err(NotMapped));
        assert_eq!(buffer.write(0, &bytes, &view), Err(NotMapped));
        assert!(buffer.span(0xfc0, 0x40, Access::Read, &view).is_ok());
        assert!(buffer.span(0xfa0, 0x40, Access::Read, &view).is_err());
        let away = QueueBuffer::new([BASE + BYTES].into(), 12, 0, 64).unwrap();
        assert_eq!(away.read(0, &mut [0; 64], &view), Err(NotMapped));
        assert!(Record(BASE + BYTES - 4).load(0, &view).is_ok());
        assert!(Record(BASE + BYTES - 4).load(1, &view).is_err());
    }

    #[test]
    fn a_record_is_two_big_endian_words() {
        let memory = Memory::new();
        let reader = memory.table.reader();
        memory.write(BASE + 8, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let record = Record::new(BASE + 8).unwrap();
        let view = reader.pin();
        assert_eq!(record.load(0, &view), Ok(0x0102_0304));
        assert_eq!(record.load(1, &view), Ok(0x0506_0708));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back_from_the_pages_in_order(
            at in 0u64..0x2fc0, len in 0usize..0x2fc0, seed: u8,
        ) {
            let memory = Memory::new();
            let reader = memory.table.reader();
            let view = reader.pin();
            let buffer = buffer(3, 0x40, 0x2fc0);
            let bytes: Vec<u8> = (0..len).map(|n| (n as u8).wrapping_add(seed)).collect();
            buffer.write(at, &bytes, &view).unwrap();
            let mut back = vec![0; len];
            buffer.read(at, &mut back, &view).unwrap();
            prop_assert_eq!(&back, &bytes);
            for (n, byte) in bytes.iter().enumerate() {
                let place = 0x40 + (at + n as u64) % 0x2fc0;
                let addr = BASE + 0x2000 * (2 - (place >> 12)) + (place & 0xfff);
                prop_assert_eq!(memory.read(addr, 1)[0], *byte);
            }
        }
    }
}
