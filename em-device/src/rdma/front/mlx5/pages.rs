//! Page lists of commands, checked against sizes and charged to the function's allowance.

use super::bits::get64;
use super::command::{Status, fields::header::PAS};
use std::sync::Arc;

pub(crate) use crate::rdma::front::allowance::{Allowance, Charge};

/// log₂ of the page size that a context's value of 0 stands for (`MLX5_ADAPTER_PAGE_SHIFT`).
const ADAPTER_PAGE_SHIFT: u32 = 12;
/// Largest log₂ of a page.
const MAX_PAGE_SHIFT: u32 = 31;

/// A list of pages that cover a buffer.
#[derive(Debug, Clone)]
pub(crate) struct PageList {
    pub(crate) pages: Arc<[u64]>,
    /// log₂ of the page size, 12 to 31.
    pub(crate) shift: u8,
    /// Bytes of the first page in front of the buffer.
    pub(crate) offset: u64,
}

/// The list of a queue's buffer: `log_page_size` counts from 4 KiB, `page_offset` is in 1/64 of a page,
/// `bytes` is the buffer's length.
pub(crate) fn queue_pages(
    input: &[u8],
    log_page_size: u32,
    page_offset: u32,
    bytes: u64,
    allowance: &Allowance,
) -> Result<(PageList, Charge), Status> {
    let shift = log_page_size.saturating_add(ADAPTER_PAGE_SHIFT);
    if shift > MAX_PAGE_SHIFT {
        return Err(Status::BadParameter);
    }
    let offset = u64::from(page_offset) << (shift - 6);
    list(input, shift, offset, bytes, allowance)
}

/// The list of `bytes` that begin `offset` bytes into the first page. 8 bytes a page from
/// [`PAS`](super::fields::header::PAS) on, of which the low ones are flags.
pub(crate) fn list(
    input: &[u8],
    shift: u32,
    offset: u64,
    bytes: u64,
    allowance: &Allowance,
) -> Result<(PageList, Charge), Status> {
    if !(ADAPTER_PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&shift) {
        return Err(Status::BadParameter);
    }
    let end = offset.checked_add(bytes).ok_or(Status::BadParameter)?;
    let count = end.div_ceil(1 << shift);
    let there = (input.len().saturating_sub(PAS) / 8) as u64;
    if count > there {
        return Err(Status::BadInputLength);
    }
    let charge = allowance.take(count * 8).ok_or(Status::LimitExceeded)?;
    let address = |n| get64(input, PAS + 8 * n as usize) & !((1 << shift) - 1);
    let list = PageList {
        pages: (0..count).map(address).collect(),
        shift: shift as u8,
        offset,
    };
    Ok((list, charge))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(pages: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0; PAS];
        bytes.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
        bytes
    }

    #[test]
    fn a_list_has_the_pages_that_the_buffer_needs_without_flags() {
        let allowance = Allowance::default();
        let input = input(&[0x5003, 0x9003, 0xd003]);
        let (list, charge) = queue_pages(&input, 0, 32, 4096, &allowance).unwrap();
        assert_eq!(
            (&*list.pages, list.shift, list.offset),
            (&[0x5000, 0x9000][..], 12, 2048)
        );
        assert_eq!(allowance.used(), 16);
        drop(charge);
        assert_eq!(allowance.used(), 0);
    }

    #[test]
    fn a_list_that_is_too_short_is_refused() {
        let allowance = Allowance::default();
        let refused = |offset, bytes| {
            queue_pages(&input(&[0x5000]), 0, offset, bytes, &allowance)
                .map(|_| ())
                .unwrap_err()
        };
        assert_eq!(refused(0, 4097), Status::BadInputLength);
        assert_eq!(refused(1, 4096), Status::BadInputLength);
        assert_eq!(refused(0, u64::MAX), Status::BadInputLength);
        assert_eq!(refused(63, u64::MAX), Status::BadParameter);
        assert_eq!(
            queue_pages(&[], 0, 0, 1, &allowance)
                .map(|_| ())
                .unwrap_err(),
            Status::BadInputLength
        );
        assert_eq!(allowance.used(), 0);
    }

    #[test]
    fn page_sizes_out_of_range_are_refused() {
        let allowance = Allowance::default();
        let input = input(&[0; 4]);
        assert!(queue_pages(&input, 20, 0, 64, &allowance).is_err());
        assert!(list(&input, 11, 0, 64, &allowance).is_err());
        assert!(list(&input, 63, 0, 64, &allowance).is_err());
        assert!(list(&input, 31, 0, 64, &allowance).is_ok());
    }
}
