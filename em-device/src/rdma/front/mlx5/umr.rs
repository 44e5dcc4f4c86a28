//! UMR: send queue entries that change a memory region (opcode 0x25).

use super::buffer::{NotMapped, copy_in};
use super::wqe::{DataSeg, Mkc, UmrCtrl, take};
use crate::rdma::verbs::{
    ABSENT, NO_READ, NO_WRITE, Pd, Region, RegionChange, Regions, Rights, Translation,
};
use dot_iommu::{Access, DotView};
use std::sync::Arc;

/// `flags`: the list stands in the entry.
const FLAG_INLINE: u8 = 1 << 7;
/// `flags`: the list replaces a part of the region's.
const FLAG_OFFSET: u8 = 1 << 4;

/// `mkey_mask`: what is changed.
mod mask {
    pub(super) const LEN: u64 = 1 << 0;
    pub(super) const PAGE_SIZE: u64 = 1 << 1;
    pub(super) const START: u64 = 1 << 6;
    pub(super) const PD: u64 = 1 << 7;
    pub(super) const EN_RINVAL: u64 = 1 << 8;
    pub(super) const KEY: u64 = 1 << 13;
    pub(super) const LW: u64 = 1 << 18;
    pub(super) const RR: u64 = 1 << 19;
    pub(super) const RW: u64 = 1 << 20;
    pub(super) const A: u64 = 1 << 21;
    pub(super) const FREE: u64 = 1 << 29;
    /// The page size, when its field has six bits.
    pub(super) const PAGE_SIZE_5: u64 = 1 << 42;
}

/// Rights by their bits, of [`Mkc::flags_pd`] and below them of [`Mkc::access`], and by those in the
/// mask.
const RIGHTS: [(Rights, u64, u64); 5] = [
    (Rights::LOCAL_WRITE, 1 << 3, mask::LW),
    (Rights::REMOTE_READ, 1 << 4, mask::RR),
    (Rights::REMOTE_WRITE, 1 << 5, mask::RW),
    (Rights::REMOTE_ATOMIC, 1 << 6, mask::A),
    (Rights::REMOTE_INVALIDATE, 1 << (24 + 8), mask::EN_RINVAL),
];

/// [`Mkc::access`]: access mode, and the mode of page lists (MTT).
const MODE: u8 = 0x3;
const MODE_MTT: u8 = 1;
const STATUS_FREE: u8 = 1 << 6;
const LENGTH64: u32 = 1 << 31;

/// Bytes of a page list's entry (MTT), and of the units of its length.
const ENTRY: usize = 8;
const OCTOWORD: usize = 16;
/// Entries of a region's list at most, as many as a command can bring: 8 GiB of the smallest pages.
const MAX_ENTRIES: usize = 1 << 21;
/// In an entry: the page may be read, may be written.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
/// log₂ of page sizes that regions may have.
const SHIFTS: std::ops::RangeInclusive<u8> = 12..=31;

/// The change that an entry of `mkey` asks for, from what follows its control segment. `None` when it
/// makes no sense for the region as it is now.
///
/// Lists of other keys (KLM, KSM) and signatures are not supported.
pub(super) fn parse(
    mkey: u32,
    bytes: &mut &[u8],
    regions: &Regions,
    view: &DotView<'_>,
) -> Option<RegionChange> {
    let ctrl: UmrCtrl = take(bytes)?;
    let mkc: Mkc = take(bytes)?;
    let region = regions.get(mkey >> 8)?;
    let mask = ctrl.mkey_mask.get();
    let has = |bits: u64| mask & bits != 0;

    let mode_known = matches!(mkc.access & MODE, 0 | MODE_MTT);
    let signature = ctrl.flags & FLAG_OFFSET == 0 && ctrl.xlt_offset.get() != 0;
    if !mode_known || signature {
        return None;
    }
    let start = has(mask::START).then(|| mkc.start.get());
    let shift = has(mask::PAGE_SIZE | mask::PAGE_SIZE_5).then_some(mkc.log_page_size & 0x3f);
    let list = list(&ctrl, bytes, (regions, region.capacity), view)?;
    Some(RegionChange {
        key: region.key,
        variant: has(mask::KEY).then_some(mkc.mkey_7_0),
        pd: has(mask::PD).then(|| Pd(mkc.flags_pd.get() & 0xff_ffff)),
        rights: rights(region, mask, &mkc),
        start,
        len: has(mask::LEN).then(|| match mkc.flags_pd.get() & LENGTH64 {
            0 => mkc.len.get(),
            _ => u64::MAX,
        }),
        translation: translation(region, list, start, shift)?,
        valid: match has(mask::FREE) {
            true => mkc.status & STATUS_FREE == 0,
            false => region.valid,
        },
    })
}

fn rights(region: &Region, mask: u64, mkc: &Mkc) -> Option<Rights> {
    let flags = u64::from(mkc.flags_pd.get()) << 8 | u64::from(mkc.access);
    RIGHTS.iter().any(|(_, _, bit)| mask & bit != 0).then(|| {
        RIGHTS.iter().fold(Rights::NONE, |all, (right, flag, bit)| {
            let on = match mask & bit {
                0 => region.rights.allow(*right),
                _ => flags & flag != 0,
            };
            all | right.when(on)
        })
    })
}

/// New entries of a region's list, and the number of the first.
struct List {
    first: usize,
    pages: Vec<u64>,
}

/// `Some(None)` when the entry has no list.
fn list(
    ctrl: &UmrCtrl,
    bytes: &mut &[u8],
    (regions, capacity): (&Regions, usize),
    view: &DotView<'_>,
) -> Option<Option<List>> {
    let len = usize::from(ctrl.xlt_octowords.get()) * OCTOWORD;
    if len == 0 {
        return Some(None);
    }
    let octowords = match ctrl.flags & FLAG_OFFSET {
        0 => 0,
        _ => u64::from(ctrl.xlt_offset_47_16.get()) << 16 | u64::from(ctrl.xlt_offset.get()),
    };
    let first = usize::try_from(octowords).ok()? * (OCTOWORD / ENTRY);
    if first.checked_add(len / ENTRY)? > capacity.min(MAX_ENTRIES) {
        return None;
    }
    let mut raw = vec![0; len];
    match ctrl.flags & FLAG_INLINE {
        0 => read_list(take(bytes)?, &mut raw, regions, view).ok()?,
        // A list that fills up less than its units is not padded.
        _ => raw.copy_from_slice(bytes.get(..len)?),
    }
    let pages = raw
        .chunks_exact(ENTRY)
        .filter_map(|entry| Some(u64::from_be_bytes(entry.try_into().ok()?)))
        .map(page)
        .collect();
    Some(Some(List { first, pages }))
}

/// A page as an entry gives it: what the entry does not allow is not done.
fn page(entry: u64) -> u64 {
    let denied = match entry & (READABLE | WRITABLE) {
        0 => return ABSENT,
        READABLE => NO_WRITE,
        WRITABLE => NO_READ,
        _ => 0,
    };
    entry & !0xfff | denied
}

/// Reads a list that a data segment points at.
fn read_list(
    seg: DataSeg,
    into: &mut [u8],
    regions: &Regions,
    view: &DotView<'_>,
) -> Result<(), NotMapped> {
    let (key, addr, len) = (seg.key.get(), seg.addr.get(), into.len() as u64);
    if len > u64::from(seg.count.get()) {
        return Err(NotMapped);
    }
    let region = regions.get(key >> 8).ok_or(NotMapped)?;
    let key = crate::rdma::verbs::MemKey(key);
    let region = regions
        .check(key, region.pd, addr, len, Rights::NONE)
        .map_err(|_| NotMapped)?;
    let mut into = into;
    for (mut bus, mut run) in region.pieces(addr, len, Access::Read) {
        // What is contiguous on the bus may still be of several ranges, each of whole pages.
        while run != 0 {
            let part = run.min(0x1000 - (bus & 0xfff));
            let (now, rest) = into.split_at_mut_checked(part as usize).ok_or(NotMapped)?;
            copy_in(bus, now, view)?;
            into = rest;
            bus = bus.wrapping_add(part);
            run -= part;
        }
    }
    match into.is_empty() {
        true => Ok(()),
        false => Err(NotMapped),
    }
}

/// `Some(None)` when the translation stays as it is.
fn translation(
    region: &Region,
    list: Option<List>,
    start: Option<u64>,
    new_shift: Option<u8>,
) -> Option<Option<Translation>> {
    if list.is_none() && start.is_none() && new_shift.is_none() {
        return Some(None);
    }
    let Translation::Pages { shift, pages, .. } = &region.translation else {
        // Addresses are bus addresses, which nothing but its range can change.
        return (list.is_none() && new_shift.is_none()).then_some(None);
    };
    let shift = new_shift.unwrap_or(*shift);
    if !SHIFTS.contains(&shift) {
        return None;
    }
    let size = 1u64 << shift;
    let pages = match list {
        None if new_shift.is_none() => pages.clone(),
        list => {
            let mut all = pages.to_vec();
            if let Some(List { first, pages }) = list {
                let end = first + pages.len();
                if all.len() < end {
                    all.resize(end, ABSENT);
                }
                all.get_mut(first..end)?.copy_from_slice(&pages);
            }
            if new_shift.is_some() {
                for page in &mut all {
                    *page &= !(size - 1) | NO_READ | NO_WRITE;
                }
            }
            Arc::from(all)
        }
    };
    Some(Some(Translation::Pages {
        shift,
        pages,
        offset: start.unwrap_or(region.start) & (size - 1),
    }))
}
