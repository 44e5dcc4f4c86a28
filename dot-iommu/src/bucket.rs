//! Address → candidate positions in a sorted array of start addresses.

/// Divides `[first start, last start]` into equal buckets, each aligned to its own power-of-two
/// width, and remembers for each bucket which positions an address in it may belong to. Ranges that
/// are aligned to the bucket width, which guest memory layouts usually are, leave one candidate.
#[derive(Debug)]
pub(crate) struct BucketIndex {
    /// An address's bucket is `(addr >> shift) - base`.
    shift: u32,
    base: u64,
    /// The candidate where there is one, else [`SEVERAL`]. Apart from `bounds` so that the path that
    /// most lookups take stays small in the cache.
    exact: Box<[u16]>,
    /// Lowest and highest candidate position.
    bounds: Box<[(u16, u16)]>,
}

/// No position: a chunk never has this many starts.
const SEVERAL: u16 = u16::MAX;

/// Buckets for each start address: memory against the chance of a second candidate.
const BUCKETS_PER_START: usize = 4;

impl BucketIndex {
    /// `starts` ascending, at most 65535 of them (positions are `u16`).
    pub(crate) fn new(starts: impl ExactSizeIterator<Item = u64> + Clone) -> BucketIndex {
        debug_assert!(starts.len() <= usize::from(SEVERAL));
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
        let exact = buckets
            .iter()
            .map(|&(low, high)| if low == high { low } else { SEVERAL });
        BucketIndex {
            shift,
            base,
            exact: exact.collect(),
            bounds: buckets.into(),
        }
    }

    /// The only position whose range may contain `addr`, when `addr`'s bucket has only one.
    #[inline]
    pub(crate) fn exact(&self, addr: u64) -> Option<usize> {
        match self.exact.get(self.bucket(addr)) {
            Some(&position) if position != SEVERAL => Some(position as usize),
            _ => None,
        }
    }

    /// Lowest and highest position whose range may contain `addr`: no other can, these need not.
    #[inline]
    pub(crate) fn candidates(&self, addr: u64) -> (usize, usize) {
        // Above the last start, the last bucket is right. Below the first the difference wraps and
        // ends there too; all its ranges begin above `addr`, and the caller's check refuses them.
        let bucket = self.bucket(addr).min(self.bounds.len().saturating_sub(1));
        match self.bounds.get(bucket) {
            Some(&(low, high)) => (low as usize, high as usize),
            None => (0, 0),
        }
    }

    #[inline]
    fn bucket(&self, addr: u64) -> usize {
        // Bits above 63 are masked off the shift, which is below 64 by construction.
        addr.wrapping_shr(self.shift).wrapping_sub(self.base) as usize
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
            assert!(addr > starts[63] || index.exact(addr) == Some(low));
        }
    }

    #[test]
    fn bucket_count_is_bounded_for_sparse_layouts() {
        let index = BucketIndex::new([0, 1, u64::MAX].into_iter());
        assert!(index.bounds.len() <= 16);
    }
}
