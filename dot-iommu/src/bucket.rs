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
        let mut at = 0u16;
        while let Some(start) = rest.next() {
            let bucket = start >> shift;
            let whole = (bucket << shift) == start;
            if let Some(slot) = position.get_mut(bucket as usize % N) {
                // A range that begins inside the bucket shares it with the one before.
                *slot = if whole || at == 0 { at } else { SEVERAL };
            }
            // Up to the bucket in which the next range begins, or the end of the last range.
            let more = match rest.peek() {
                Some(next) => ((next >> shift) - bucket).saturating_sub(1),
                None => (last >> shift) - bucket,
            };
            fill(&mut position, bucket.wrapping_add(1), more, at);
            at += 1;
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

/// Writes `value` to `count` buckets from `first`, fewer than `N`.
fn fill<const N: usize>(buckets: &mut [u16; N], first: u64, count: u64, value: u16) {
    let count = count as usize;
    let (wrapped, straight) = buckets.split_at_mut(first as usize % N);
    let tail = count.min(straight.len());
    let head = (count - tail).min(wrapped.len());
    for part in [straight.get_mut(..tail), wrapped.get_mut(..head)]
        .into_iter()
        .flatten()
    {
        part.fill(value);
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
