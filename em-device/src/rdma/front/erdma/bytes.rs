//! Little-endian numbers in bytes; what is not there is 0.

use dot_iommu::DotView;
use std::ops::RangeInclusive;
use vm_memory::{Bytes, GuestAddress};

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.copied().unwrap_or([0; N])
}

/// 16 bits at `at`.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

/// 32 bits at `at`.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// 64 bits at `at`.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// `N` bytes at `at`.
pub(super) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    array(bytes, at)
}

/// These bits of a word, of which the highest is below 32.
pub(super) fn bits(word: u32, range: RangeInclusive<u32>) -> u32 {
    let width = range.end() - range.start() + 1;
    word >> range.start() & (u32::MAX >> (32 - width))
}

/// `count` numbers of 64 bits that stand one after the other in guest memory.
pub(super) fn read_list(at: u64, count: usize, memory: &DotView<'_>) -> Option<Vec<u64>> {
    let mut list = Vec::with_capacity(count);
    let mut block = [0u8; 4096];
    let mut at = at;
    while list.len() < count {
        let part = block.get_mut(..8 * (count - list.len()).min(512))?;
        memory.read_slice(part, GuestAddress(at)).ok()?;
        list.extend(part.chunks_exact(8).map(|entry| u64_at(entry, 0)));
        at = at.checked_add(part.len() as u64)?;
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BASE, BYTES, Memory};

    #[test]
    fn numbers_are_little_endian_and_bits_count_from_below() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(u16_at(&bytes, 1), 0x0302);
        assert_eq!(u32_at(&bytes, 4), 0x0807_0605);
        assert_eq!(u64_at(&bytes, 0), 0x0807_0605_0403_0201);
        assert_eq!(u32_at(&bytes, 6), 0, "not all of it is there");
        assert_eq!(bits(0xf123_4567, 20..=31), 0xf12);
        assert_eq!(bits(0xf123_4567, 0..=31), 0xf123_4567);
    }

    #[test]
    fn a_list_is_read_in_blocks_and_must_be_mapped() {
        let memory = Memory::new();
        let reader = memory.table.reader();
        let list: Vec<u8> = (0..600u64).flat_map(u64::to_le_bytes).collect();
        memory.write(BASE + 24, &list);
        let read = read_list(BASE + 24, 600, &reader.pin()).unwrap();
        assert!(read.iter().copied().eq(0..600));
        assert_eq!(read_list(BASE + BYTES - 8, 2, &reader.pin()), None);
        assert_eq!(read_list(u64::MAX, 1, &reader.pin()), None);
    }
}
