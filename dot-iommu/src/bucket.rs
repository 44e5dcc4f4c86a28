//! Address → candidate positions in a sorted array of start addresses.

/// Divides `[first start, last start]` into equal buckets, each aligned to its own power-of-two
/// width, and remembers for each bucket which positions an address in it may belong to. Ranges that
/// are aligned to the bucket width, which guest memory layouts usually are, leave one candidate.
#[derive(Debug)]
pub(crate) struct BucketIndex {
    /// An address's bucket is `(addr >> shift) - base`.
    shift: u32,
    base: u64,
    /// Lowest and highest candidate position.
    buckets: Box<[(u16, u16)]>,
}

/// Buckets for each start address: memory against the chance of a second candidate.
const BUCKETS_PER_START: usize = 4;

impl BucketIndex {
    /// `starts` ascending, at most 65536 of them (positions are `u16`).
    pub(crate) fn new(starts: impl ExactSizeIterator<Item = u64> + Clone) -> BucketIndex {
        debug_assert!(starts.len() <= 1 << 16);
        let first = starts.clone().next().unwrap_or(0);
        let last = starts.clone().last().unwrap_or(0);
        let limit = (starts.len() * BUCKETS_PER_START).max(16) as u64;
        let mut shift = 0;
        while (last >> shift) - (first >> shift) >= limit {
            shift += 1;
        }
        let base = first >> shift;
        let count = (last >> shift) - base + 1;

        let mut buckets = Vec::with_capacity(count as usize);
        let mut rest = starts.peekable();
        // Position of the last start at or below the address under consideration.
        let mut position = 0u16;
        let mut seen = 0u32;
        for bucket in 0..count {
            let low = (base + bucket) << shift;
            let high = low | ((1u64 << shift) - 1);
            let mut advance_to = |limit: u64| {
                while rest.next_if(|&start| start <= limit).is_some() {
                    position = seen as u16;
                    seen += 1;
                }
                position
            };
            buckets.push((advance_to(low), advance_to(high)));
        }
        BucketIndex {
            shift,
            base,
            buckets: buckets.into(),
        }
    }

    /// Lowest and highest position whose range may contain `addr`: no other can, these need not.
    #[inline]
    pub(crate) fn candidates(&self, addr: u64) -> (usize, usize) {
        // Below the first start the difference wraps and ends in the last bucket, whose ranges all
        // begin above `addr`: the caller's containment check refuses them.
        let bucket = (addr >> self.shift).wrapping_sub(self.base) as usize;
        let bucket = bucket.min(self.buckets.len().wrapping_sub(1));
        match self.buckets.get(bucket) {
            Some(&(low, high)) => (low as usize, high as usize),
            None => (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predecessor(starts: &[u64], addr: u64) -> Option<usize> {
        starts
            .partition_point(|&start| start <= addr)
            .checked_sub(1)
    }

    #[track_caller]
    fn check(starts: &[u64]) {
        let index = BucketIndex::new(starts.iter().copied());
        for &start in starts {
            for addr in [
                start.wrapping_sub(1),
                start,
                start.wrapping_add(1),
                start ^ 0xfff,
            ] {
                if let Some(wanted) = predecessor(starts, addr) {
                    let (low, high) = index.candidates(addr);
                    assert!(
                        (low..=high).contains(&wanted),
                        "{addr:#x}: {wanted} {low} {high}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_preceding_start_is_always_a_candidate() {
        check(&[0]);
        check(&[u64::MAX]);
        check(&[0, u64::MAX]);
        check(&[
            0,
            0xa0000,
            0xc0000,
            0x100000,
            0x1_0000_0000,
            0x3800_0000_0000,
        ]);
        let mut pages: Vec<u64> = (0..500)
            .map(|i| 0x7fff_0000 + i * 4096 * (1 + i % 7))
            .collect();
        pages.sort_unstable();
        pages.dedup();
        check(&pages);
    }

    #[test]
    fn equal_aligned_ranges_leave_one_candidate() {
        let starts: Vec<u64> = (0..64).map(|i| 0x4000_0000 + (i << 26)).collect();
        let index = BucketIndex::new(starts.iter().copied());
        for addr in (0x4000_0000..0x1_4000_0000).step_by(0x1_2345) {
            let (low, high) = index.candidates(addr);
            assert_eq!(low, high);
        }
    }

    #[test]
    fn bucket_count_is_bounded_for_sparse_layouts() {
        let index = BucketIndex::new([0, 1, u64::MAX].into_iter());
        assert!(index.buckets.len() <= 16);
    }
}
