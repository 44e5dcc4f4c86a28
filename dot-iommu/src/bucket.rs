//! Address → position in a sorted array of ranges, by one load.

/// Position of an address whose bucket several ranges share; no array has that many.
pub(crate) const SEVERAL: u16 = u16::MAX;

/// Divides the address space into buckets of a power-of-two width, just wide enough that `N` of
/// them (a power of two) cover the ranges, and remembers for each the one position that an address
/// in it can belong to. Ranges aligned to the bucket width, which guest memory layouts usually are,
/// leave one position; a bucket with several says so.
#[derive(Debug)]
pub(crate) struct BucketIndex<const N: usize> {
    /// An address's bucket is `(addr >> shift) % N`, so that no base needs to be subtracted.
    shift: u32,
    position: [u16; N],
}

impl<const N: usize> BucketIndex<N> {
    /// `starts` ascending, fewer than [`SEVERAL`] of them; `last` is the last address of the last
    /// range.
    pub(crate) fn new(starts: impl Iterator<Item = u64> + Clone, last: u64) -> Self {
        const { assert!(N.is_power_of_two()) };
        let first = starts.clone().next().unwrap_or(0);
        let mut shift = 0;
        while (last >> shift) - (first >> shift) >= N as u64 {
            shift += 1;
        }
        // An address outside all buckets of the ranges gets any position: no range contains it.
        let mut position = [0; N];
        let mut rest = starts.peekable();
        let mut seen = 0u16;
        for bucket in first >> shift..=last >> shift {
            let low = bucket << shift;
            let high = low | ((1u64 << shift) - 1);
            // The last position that starts at or below an address.
            let mut at = |addr: u64| {
                while rest.next_if(|&start| start <= addr).is_some() {
                    seen += 1;
                }
                seen.saturating_sub(1)
            };
            let (lowest, highest) = (at(low), at(high));
            if let Some(slot) = position.get_mut(bucket as usize % N) {
                *slot = if lowest == highest { lowest } else { SEVERAL };
            }
        }
        BucketIndex { shift, position }
    }

    /// The only position whose range may contain `addr`, or [`SEVERAL`].
    #[inline]
    pub(crate) fn position(&self, addr: u64) -> usize {
        // The shift is below 64 by construction, and the array's size bounds the remainder.
        let bucket = addr.wrapping_shr(self.shift) as usize % N;
        self.position.get(bucket).copied().map_or(0, usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges as (start, last).
    #[track_caller]
    fn check(ranges: &[(u64, u64)]) {
        let starts = ranges.iter().map(|range| range.0);
        let index = BucketIndex::<2048>::new(starts, ranges.last().unwrap().1);
        for &(start, last) in ranges {
            for addr in [
                start,
                start + (last - start) / 3,
                start + (last - start) / 2,
                last,
            ] {
                let wanted = ranges.partition_point(|range| range.0 <= addr) - 1;
                let got = index.position(addr);
                assert!(
                    got == wanted || got == usize::from(SEVERAL),
                    "{addr:#x}: {got}"
                );
            }
        }
    }

    #[test]
    fn a_position_is_right_or_says_several() {
        check(&[(0, 0)]);
        check(&[(u64::MAX, u64::MAX)]);
        check(&[(0, u64::MAX)]);
        check(&[(0, 0), (1, u64::MAX - 1), (u64::MAX, u64::MAX)]);
        check(&[
            (0, 0x9_ffff),
            (0xc_0000, 0xf_ffff),
            (0x10_0000, 0x7fff_ffff),
            (0x1_0000_0000, 0x4_7fff_ffff),
            (0x3800_0000_0000, 0x3800_0000_3fff),
        ]);
        let odd: Vec<_> = (0..500u64)
            .map(|i| (7 + i * 4099, 7 + i * 4099 + i * 8))
            .collect();
        check(&odd);
    }

    #[test]
    fn equal_aligned_ranges_are_always_told_apart() {
        let starts: Vec<u64> = (0..512).map(|i| 0x4000_0000 + (i << 25)).collect();
        let index = BucketIndex::<2048>::new(starts.iter().copied(), starts[511] + 0xff_ffff);
        for (position, start) in starts.iter().enumerate() {
            for offset in [0, 0x1234, 0xff_ffff] {
                assert_eq!(index.position(start + offset), position);
            }
        }
    }
}
