//! Guest memory behind the data segments of entries.

use crate::rdma::verbs::{MemKey, Regions, Rights};
use dot_iommu::{Access, DotView};
use smallvec::SmallVec;
use vm_memory::{GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// Pieces of host memory that one frame may lie in.
const MAX_SLICES: usize = 256;

/// Host memory of a frame, in order.
pub(super) type Slices<'v> = SmallVec<[VolatileSlice<'v>; 20]>;

/// Appends the memory of `[addr, addr + len)` of a key. `None`: the key or its memory does not allow
/// it.
#[inline]
pub(super) fn append<'v>(
    slices: &mut Slices<'v>,
    (key, addr, len): (MemKey, u64, u32),
    write: bool,
    regions: &Regions,
    view: &'v DotView<'_>,
) -> Option<()> {
    let needed = Rights::LOCAL_WRITE.when(write);
    let len = u64::from(len);
    let region = regions.get(key.0 >> 8)?;
    let region = regions.check(key, region.pd, addr, len, needed).ok()?;
    let mut found = 0;
    let access = if write { Access::Write } else { Access::Read };
    for (bus, run) in region.pieces(addr, len, access) {
        push(slices, bus, run, write, view)?;
        found += run;
    }
    (found == len).then_some(())
}

#[inline]
fn push<'v>(
    slices: &mut Slices<'v>,
    bus: u64,
    len: u64,
    write: bool,
    view: &'v DotView<'_>,
) -> Option<()> {
    let (access, permissions) = match write {
        true => (Access::Write, Permissions::Write),
        false => (Access::Read, Permissions::Read),
    };
    if slices.len() >= MAX_SLICES {
        return None;
    }
    if let Ok(span) = view.translate(bus, len, access) {
        slices.push(span.as_volatile_slice());
        return Some(());
    }
    // Over several ranges, as behind a virtual IOMMU.
    let count = usize::try_from(len).ok()?;
    let pieces = view
        .get_slices(GuestAddress(bus), count, permissions)
        .ok()?;
    for piece in pieces {
        if slices.len() >= MAX_SLICES {
            return None;
        }
        slices.push(piece.ok()?);
    }
    Some(())
}

/// Copies bytes over a list from byte `offset` on; what does not fit is left out.
pub(super) fn write_at(slices: &[VolatileSlice<'_>], offset: usize, bytes: &[u8]) {
    let (mut skip, mut bytes) = (offset, bytes);
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let Ok(rest) = slice.offset(skip) else {
            return;
        };
        skip = 0;
        rest.copy_from(bytes);
        match bytes.get(rest.len()..) {
            Some(left) if !left.is_empty() => bytes = left,
            _ => return,
        }
    }
}
