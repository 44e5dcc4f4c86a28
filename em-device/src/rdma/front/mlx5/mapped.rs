//! Doorbell pages that the VMM maps: memory that a driver's stores change, and nothing tells of it.
//!
//! A page has few places that matter, each of which the driver overwrites with every doorbell. What is
//! found there is taken and zero put in its place, so that an equal doorbell is seen again. No doorbell is
//! zero: entries have a size, completion and event queues have numbers from 1 on.

use super::doorbells::{Doorbells, ones};
use super::registers::{self, BAR_BYTES, FIRST_UAR, UAR_BYTES};
use crate::worker::Watched;
use dot_iommu::{Access, DotError, HostMapping};
use smartep::function::RegionMmap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use vm_memory::{VolatileMemory, VolatileSlice};

/// The places in a page, of 8 bytes each.
const PLACES: [u64; 11] = [
    0x20, 0x40, 0x48, 0x800, 0x900, 0xa00, 0xb00, 0xc00, 0xd00, 0xe00, 0xf00,
];

/// Pages of which a glance looks at the doorbells: a glance costs the same however many are in use.
const GLANCED: u32 = 128;

/// See the module.
#[derive(Debug)]
pub struct MappedPages {
    memory: Arc<HostMapping>,
    /// A bit for each page that was given out.
    in_use: Box<[AtomicU64]>,
    /// The word of `in_use` that the next glance begins with.
    next: AtomicUsize,
}

impl MappedPages {
    /// Memory for pages, zeroed.
    pub fn memory() -> Result<OwnedFd, DotError> {
        HostMapping::memfd(BAR_BYTES)
    }

    /// Pages in that memory, which a VMM may have mapped already, and what it is told of them: all of BAR0 behind
    /// the initialization segment and the MSI-X table, which stay trapped.
    pub fn of(fd: OwnedFd) -> Result<(Self, RegionMmap), DotError> {
        let memory = HostMapping::of_file(fd.as_fd(), BAR_BYTES)?;
        let first = u64::from(FIRST_UAR) * UAR_BYTES;
        let mmap = RegionMmap {
            fd,
            offset: 0,
            areas: vec![(first, BAR_BYTES - first)],
        };
        let words = (BAR_BYTES / UAR_BYTES).div_ceil(64);
        let pages = Self {
            memory,
            in_use: (0..words).map(|_| AtomicU64::new(0)).collect(),
            next: AtomicUsize::new(0),
        };
        Ok((pages, mmap))
    }

    #[inline]
    fn page(&self, uar: u32) -> Option<VolatileSlice<'_>> {
        let at = u64::from(uar) * UAR_BYTES;
        let span = self.memory.span(at, UAR_BYTES, Access::Write)?;
        Some(span.as_volatile_slice())
    }

    /// Takes the doorbells of a page over to `doorbells`. Answers whether there were any.
    pub(super) fn take(&self, uar: u32, doorbells: &Doorbells) -> bool {
        let mut any = false;
        let Some(page) = self.page(uar) else {
            return any;
        };
        for place in PLACES {
            let Some(word) = word(&page, place) else {
                continue;
            };
            // A swap takes the line from the driver, so only where there is something.
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let bytes = word.swap(0, Ordering::AcqRel).to_ne_bytes();
            for (at, half) in (place..).step_by(4).zip(bytes.chunks_exact(4)) {
                let value = half.try_into().map_or(0, u32::from_be_bytes);
                if value != 0 {
                    any |= registers::ring(doorbells, at, value);
                }
            }
        }
        any
    }

    /// Whether a page has a doorbell.
    pub(super) fn is_rung(&self, uar: u32) -> bool {
        self.page(uar).is_some_and(|page| {
            let mut words = PLACES.into_iter().filter_map(|place| word(&page, place));
            words.any(|word| word.load(Ordering::Acquire) != 0)
        })
    }

    /// A page is given out; glances look at it from now on.
    pub(super) fn open(&self, uar: u32) {
        if let Some(word) = self.in_use.get(uar as usize / 64) {
            word.fetch_or(1 << (uar % 64), Ordering::AcqRel);
        }
    }

    /// A page is returned.
    pub(super) fn close(&self, uar: u32) {
        if let Some(word) = self.in_use.get(uar as usize / 64) {
            word.fetch_and(!(1 << (uar % 64)), Ordering::AcqRel);
        }
    }

    /// All pages are returned.
    pub(super) fn close_all(&self) {
        for word in &self.in_use {
            word.store(0, Ordering::Release);
        }
    }

    /// Forgets what is in a page: its next user begins anew.
    pub(super) fn clear(&self, uar: u32) {
        let Some(page) = self.page(uar) else {
            return;
        };
        for word in PLACES.into_iter().filter_map(|place| word(&page, place)) {
            word.store(0, Ordering::Release);
        }
    }

    /// A driver's store.
    #[cfg(test)]
    pub(super) fn store(&self, offset: u64, bytes: [u8; 8]) {
        let page = self.page((offset / UAR_BYTES) as u32).unwrap();
        let word = word(&page, offset % UAR_BYTES).unwrap();
        word.store(u64::from_ne_bytes(bytes), Ordering::Release);
    }
}

impl Watched for MappedPages {
    fn glance(&self) -> bool {
        let words = self.in_use.len();
        let first = self.next.load(Ordering::Relaxed);
        let mut looked = 0;
        for n in first..first + words {
            let n = n % words;
            let bits = self.in_use.get(n).map_or(0, |w| w.load(Ordering::Acquire));
            if bits == 0 {
                continue;
            }
            if looked >= GLANCED {
                self.next.store(n, Ordering::Relaxed);
                return false;
            }
            looked += bits.count_ones();
            if ones(bits).any(|bit| self.is_rung(n as u32 * 64 + bit)) {
                return true;
            }
        }
        false
    }
}

/// 8 bytes of a page.
#[inline]
fn word<'p>(page: &'p VolatileSlice<'_>, place: u64) -> Option<&'p AtomicU64> {
    page.get_atomic_ref(place as usize).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sends(doorbells: &Doorbells) -> Vec<u32> {
        let mut taken = Vec::new();
        doorbells.take_sends(|number| taken.push(number));
        taken
    }

    #[test]
    fn equal_doorbells_one_after_the_other_are_both_seen() {
        let (pages, _) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let doorbells = Doorbells::default();
        for _ in 0..2 {
            pages.store(9 * 4096 + 0x800, [0, 0, 1, 0x0a, 0, 0, 0x42, 3]);
            assert!(pages.is_rung(9) && !pages.is_rung(8));
            assert!(!pages.take(8, &doorbells));
            assert!(pages.take(9, &doorbells));
            assert_eq!(sends(&doorbells), [0x42]);
            assert!(!pages.is_rung(9) && !pages.take(9, &doorbells));
        }
    }

    #[test]
    fn all_kinds_of_doorbells_are_found() {
        let (pages, _) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let doorbells = Doorbells::default();
        pages.store(8 * 4096 + 0x20, [0x10, 0, 0, 7, 0, 0, 0, 5]);
        pages.store(8 * 4096 + 0x40, [3, 0, 1, 0, 0, 0, 0, 0]);
        pages.store(8 * 4096 + 0x48, [2, 0, 0, 9, 0, 0, 0, 0]);
        pages.store(8 * 4096 + 0xf00, [0, 0, 0, 8, 0, 1, 0, 2]);
        assert!(pages.take(8, &doorbells));
        let (mut cqs, mut eqs) = (Vec::new(), Vec::new());
        doorbells.take_cqs(|number| cqs.push(number));
        doorbells.take_eqs(|eq, index, arm| eqs.push((eq, index, arm)));
        assert_eq!((cqs, sends(&doorbells)), (vec![5], vec![0x100]));
        assert_eq!(eqs, [(2, 9, false), (3, 256, true)]);
    }

    #[test]
    fn glances_see_the_pages_in_use_some_at_a_time() {
        let (pages, _) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let rung = |uar: u64| pages.store(uar * 4096 + 0x20, [0xff; 8]);
        rung(9);
        assert!(!pages.glance(), "not given out");
        pages.open(9);
        assert!(pages.glance());
        pages.close(9);
        assert!(!pages.glance());
        (100..4000).for_each(|uar| pages.open(uar));
        rung(3999);
        let glances = (1..100).find(|_| pages.glance()).unwrap();
        assert!((20..40).contains(&glances), "{glances}");
        pages.close_all();
        assert!(!pages.glance());
    }

    #[test]
    fn a_page_that_is_cleared_rings_no_more_and_none_lies_outside() {
        let (pages, mmap) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let doorbells = Doorbells::default();
        pages.store(8 * 4096 + 0x20, [0xff; 8]);
        pages.clear(8);
        for uar in [8, 4096, u32::MAX] {
            assert!(!pages.take(uar, &doorbells), "{uar}");
        }
        assert_eq!(mmap.areas, [(0x8000, (16 << 20) - 0x8000)]);
    }
}
