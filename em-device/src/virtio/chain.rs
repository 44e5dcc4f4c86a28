//! The walk through one descriptor chain (virtio 1.3 §2.7.5), bounded and into a buffer that is used again.

use super::area::GuestArea;
use dot_iommu::{Access, DotView};
use std::fmt;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// Descriptors a chain may have, whatever the queue's size: bounds the work for one head.
pub const MAX_DESCRIPTORS: u32 = 1024;
/// Bytes of a descriptor.
pub(super) const DESCRIPTOR_BYTES: u64 = 16;
/// `VIRTQ_DESC_F_NEXT`.
pub(super) const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub(super) const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub(super) const INDIRECT: u16 = 4;

/// Has the processor fetch the buffer of a descriptor of either layout: address and length are at the same places.
#[inline]
pub(super) fn prefetch(view: &DotView<'_>, table: &GuestArea<'_>, index: u16, access: Access) {
    let at = DESCRIPTOR_BYTES * u64::from(index);
    let (addr, len) = (table.read::<u64>(at), table.read::<u32>(at + 8));
    let (Some(addr), Some(len)) = (addr, len) else {
        return;
    };
    let len = u64::from(u32::from_le(len)).min(PREFETCHED);
    if let Ok(span) = view.translate(u64::from_le(addr), len, access) {
        span.prefetch();
    }
}

/// Bytes of a buffer that are fetched ahead: two cache lines wherever it begins.
const PREFETCHED: u64 = 76;

/// Why a chain is none. The head is given back with length 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BadChain {
    /// More descriptors than the queue has, or than [`MAX_DESCRIPTORS`]; also a loop.
    TooLong,
    /// `next` is outside the table.
    NextOutOfRange,
    /// An indirect descriptor although that was not negotiated.
    IndirectNotNegotiated,
    /// An indirect table of no entries, of a length that is no multiple of 16, or of more than 65536
    /// entries.
    IndirectSize,
    /// An indirect descriptor in an indirect table, or one with NEXT (virtio 1.3 §2.7.5.3.1).
    IndirectNested,
    /// A buffer or table that is not mapped for this access, or whose address wraps.
    NotMapped,
    /// A buffer the device may read after one it may write (virtio 1.3 §2.7.4.2).
    Order,
}

impl BadChain {
    /// All of them, for counters.
    pub const ALL: [Self; 7] = [
        Self::TooLong,
        Self::NextOutOfRange,
        Self::IndirectNotNegotiated,
        Self::IndirectSize,
        Self::IndirectNested,
        Self::NotMapped,
        Self::Order,
    ];

    /// The name of the counter.
    pub fn name(self) -> &'static str {
        match self {
            Self::TooLong => "chain-too-long",
            Self::NextOutOfRange => "chain-next-out-of-range",
            Self::IndirectNotNegotiated => "chain-indirect-not-negotiated",
            Self::IndirectSize => "chain-indirect-size",
            Self::IndirectNested => "chain-indirect-nested",
            Self::NotMapped => "chain-not-mapped",
            Self::Order => "chain-order",
        }
    }
}

impl fmt::Display for BadChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The allocation of [`Parts`] between two bursts. It holds no addresses, so any thread may do the next burst.
#[derive(Debug, Default)]
pub struct Spare(Vec<[usize; SLICE_WORDS]>);

/// Words of the same size as a slice, so that one allocation serves for both.
const SLICE_WORDS: usize = size_of::<VolatileSlice<'static>>() / size_of::<usize>();

/// Host memory of buffers, in order. Holds one chain or, for receive, several one after the other.
#[derive(Debug, Default)]
pub struct Parts<'v> {
    slices: Vec<VolatileSlice<'v>>,
    /// Guest addresses and lengths of what may be written, while somebody wants to know what is.
    writable: Vec<(u64, u64)>,
    /// Guest addresses and lengths of what was written, if somebody wants to know.
    written: Option<Vec<(u64, u64)>>,
}

impl<'v> Parts<'v> {
    /// An empty list on an allocation that was kept.
    pub fn reuse(spare: Spare) -> Self {
        // Collected in place: nothing is there to convert but the type.
        let slices = spare.0.into_iter().map_while(|_| None).collect();
        Self {
            slices,
            writable: Vec::new(),
            written: None,
        }
    }

    /// Remembers in `ranges` what [`Self::wrote`] says, until [`Self::take_written`].
    pub fn remember_written(&mut self, ranges: Option<Vec<(u64, u64)>>) {
        self.written = ranges;
    }

    /// What was remembered.
    pub fn take_written(&mut self) -> Option<Vec<(u64, u64)>> {
        self.written.take()
    }

    /// The first `bytes` of what may be written were written.
    #[inline]
    pub fn wrote(&mut self, bytes: u64) {
        let Some(written) = &mut self.written else {
            return;
        };
        let mut left = bytes;
        for (addr, len) in self.writable.drain(..) {
            let part = len.min(left);
            left -= part;
            if part != 0 {
                written.push((addr, part));
            }
        }
    }

    /// Keeps the allocation; the view may go.
    pub fn retire(mut self) -> Spare {
        self.slices.clear();
        Spare(self.slices.into_iter().map_while(|_| None).collect())
    }

    /// Removes all.
    pub fn clear(&mut self) {
        self.slices.clear();
        self.writable.clear();
    }

    /// Keeps the first `count` slices.
    pub fn truncate(&mut self, count: usize) {
        self.slices.truncate(count);
    }

    /// The slices.
    pub fn slices(&self) -> &[VolatileSlice<'v>] {
        &self.slices
    }

    /// Copies the first bytes out; what is left begins at the index that is returned. `None` when
    /// there are fewer bytes than `out` takes.
    pub fn take_front(&mut self, out: &mut [u8]) -> Option<usize> {
        let mut done = 0;
        for (index, slice) in self.slices.iter_mut().enumerate() {
            let copied = slice.copy_to(out.get_mut(done..)?);
            done += copied;
            if copied < slice.len() {
                *slice = slice.offset(copied).ok()?;
                return Some(index);
            }
            if done == out.len() {
                return Some(index + 1);
            }
        }
        None
    }

    /// [`Self::take_front`] of `len` bytes, of which some more may be in `out` behind them: a whole vector register is read
    /// back without waiting for other stores.
    #[inline]
    pub fn take_header(&mut self, len: usize, out: &mut [u8; 32]) -> Option<usize> {
        match self.slices.first_mut() {
            Some(first) if first.len() > out.len() && len <= out.len() => {
                first.copy_to(&mut out[..]);
                *first = first.offset(len).ok()?;
                Some(0)
            }
            _ => self.take_front(out.get_mut(..len)?),
        }
    }

    /// Copies two words to the front of the list, each at once where that is possible.
    #[inline]
    pub fn write_words(&self, (low, high): (u64, u32)) {
        let whole = self.slices.first().filter(|first| first.len() >= 12);
        let written = whole.map(|first| {
            first
                .write_obj(low.to_le(), 0)
                .and_then(|()| first.write_obj(high.to_le(), 8))
        });
        if !matches!(written, Some(Ok(()))) {
            self.write(0, &low.to_le_bytes());
            self.write(8, &high.to_le_bytes());
        }
    }

    /// Copies bytes over the list from byte `offset` on. Answers how many fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for slice in &self.slices {
            let Ok(rest) = slice.offset(skip.min(slice.len())) else {
                break;
            };
            skip -= skip.min(slice.len());
            let Some(left) = bytes.get(done..) else {
                break;
            };
            rest.copy_from(left);
            done += rest.len().min(left.len());
            if done == bytes.len() {
                break;
            }
        }
        done
    }

    fn push(
        &mut self,
        view: &'v DotView<'_>,
        addr: u64,
        len: u64,
        write: bool,
    ) -> Result<(), BadChain> {
        let (access, permissions) = match write {
            true => (Access::Write, Permissions::Write),
            false => (Access::Read, Permissions::Read),
        };
        if let Ok(span) = view.translate(addr, len, access) {
            self.slices.push(span.as_volatile_slice());
        } else {
            self.push_pieces(view, addr, len, permissions)?;
        }
        if write && self.written.is_some() {
            self.writable.push((addr, len));
        }
        Ok(())
    }

    /// A buffer over several ranges, as behind a virtual IOMMU.
    fn push_pieces(
        &mut self,
        view: &'v DotView<'_>,
        addr: u64,
        len: u64,
        permissions: Permissions,
    ) -> Result<(), BadChain> {
        let count = usize::try_from(len).map_err(|_| BadChain::NotMapped)?;
        let pieces = view
            .get_slices(GuestAddress(addr), count, permissions)
            .map_err(|_| BadChain::NotMapped)?;
        for piece in pieces {
            // Pages of a vIOMMU: 4 GiB of them in one descriptor would be a million.
            if self.slices.len() >= MAX_SLICES {
                return Err(BadChain::TooLong);
            }
            self.slices.push(piece.map_err(|_| BadChain::NotMapped)?);
        }
        Ok(())
    }
}

/// Host pieces that one list holds at most.
const MAX_SLICES: usize = 4 * MAX_DESCRIPTORS as usize;

/// What a walk found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Walked {
    /// Slices added that the device may read; those it may write follow.
    pub readable_slices: usize,
    /// Bytes the device may read.
    pub readable: u64,
    /// Bytes the device may write.
    pub writable: u64,
}

/// Collects the buffers of one chain.
#[derive(Debug)]
pub(super) struct Chain<'p, 'v> {
    parts: &'p mut Parts<'v>,
    walked: Walked,
    first: usize,
}

impl<'p, 'v> Chain<'p, 'v> {
    /// Appends to `parts`.
    pub(super) fn new(parts: &'p mut Parts<'v>) -> Self {
        let first = parts.slices.len();
        Self {
            parts,
            walked: Walked::default(),
            first,
        }
    }

    /// What was found.
    pub(super) fn walked(self) -> Walked {
        self.walked
    }

    /// Adds a descriptor's buffer.
    #[inline]
    pub(super) fn buffer(
        &mut self,
        view: &'v DotView<'_>,
        (addr, len): (u64, u32),
        write: bool,
    ) -> Result<(), BadChain> {
        if len == 0 {
            return Ok(());
        }
        if write {
            self.walked.writable += u64::from(len);
        } else if self.walked.writable != 0 {
            return Err(BadChain::Order);
        } else {
            self.walked.readable += u64::from(len);
        }
        self.parts.push(view, addr, u64::from(len), write)?;
        if !write {
            self.walked.readable_slices = self.parts.slices.len() - self.first;
        }
        Ok(())
    }

    /// Adds all buffers of a packed ring's indirect table (virtio 1.3 §2.8.8): its entries follow each other, and of
    /// their flags only WRITE means something.
    pub(super) fn packed_table(
        &mut self,
        view: &'v DotView<'_>,
        (addr, len): (u64, u32),
    ) -> Result<(), BadChain> {
        let (table, entries) = table(view, addr, len)?;
        if entries > MAX_DESCRIPTORS {
            return Err(BadChain::TooLong);
        }
        for index in 0..u64::from(entries) {
            let descriptor = PackedDescriptor::read(&table, index * DESCRIPTOR_BYTES)
                .ok_or(BadChain::NotMapped)?;
            if descriptor.flags() & INDIRECT != 0 {
                return Err(BadChain::IndirectNested);
            }
            self.buffer(view, descriptor.buffer(), descriptor.flags() & WRITE != 0)?;
        }
        Ok(())
    }
}

/// `struct pvirtq_desc` (virtio 1.3 §2.8.13) as two words: address; length, id and flags.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedDescriptor([u64; 2]);

impl PackedDescriptor {
    /// Reads one, not at once.
    #[inline]
    pub(super) fn read(area: &GuestArea<'_>, offset: u64) -> Option<Self> {
        area.read(offset).map(Self)
    }

    pub(super) fn buffer(self) -> (u64, u32) {
        let [addr, rest] = self.0;
        (u64::from_le(addr), u64::from_le(rest) as u32)
    }

    pub(super) fn id(self) -> u16 {
        (u64::from_le(self.0[1]) >> 32) as u16
    }

    pub(super) fn flags(self) -> u16 {
        (u64::from_le(self.0[1]) >> 48) as u16
    }
}

/// An indirect table and its entries.
fn table<'v>(view: &'v DotView<'_>, addr: u64, len: u32) -> Result<(GuestArea<'v>, u32), BadChain> {
    let bytes = u64::from(len);
    let entries = len / DESCRIPTOR_BYTES as u32;
    if entries == 0 || bytes % DESCRIPTOR_BYTES != 0 || entries > 1 << 16 {
        return Err(BadChain::IndirectSize);
    }
    if addr.checked_add(bytes - 1).is_none() {
        return Err(BadChain::NotMapped);
    }
    let area = GuestArea::new(view, addr, bytes, Access::Read);
    Ok((area, entries))
}

/// Appends the buffers of a split ring's chain that begins at `head` to `parts`. On an error `parts` has
/// grown by an unspecified number of slices.
///
/// # Errors
/// [`BadChain`]; never more than [`MAX_DESCRIPTORS`] descriptors were read.
pub fn walk<'v>(
    view: &'v DotView<'_>,
    descriptors: &GuestArea<'v>,
    size: u16,
    head: u16,
    indirect: bool,
    parts: &mut Parts<'v>,
) -> Result<Walked, BadChain> {
    let mut chain = Chain::new(parts);
    let mut budget = u32::from(size).min(MAX_DESCRIPTORS);
    let mut own_table = None;
    let (mut entries, mut index) = (u32::from(size), u32::from(head));
    loop {
        if index >= entries {
            return Err(BadChain::NextOutOfRange);
        }
        budget = budget.checked_sub(1).ok_or(BadChain::TooLong)?;
        let descriptor: Descriptor = own_table
            .as_ref()
            .unwrap_or(descriptors)
            .read(u64::from(index) * DESCRIPTOR_BYTES)
            .ok_or(BadChain::NotMapped)?;
        let flags = descriptor.flags();
        let (addr, len) = (descriptor.addr().0, descriptor.len());
        if flags & INDIRECT != 0 {
            if !indirect {
                return Err(BadChain::IndirectNotNegotiated);
            }
            if own_table.is_some() || flags & NEXT != 0 {
                return Err(BadChain::IndirectNested);
            }
            let (area, length) = table(view, addr, len)?;
            own_table = Some(area);
            // A table of its own may be longer than a small queue.
            (entries, budget, index) = (length, length.min(MAX_DESCRIPTORS), 0);
            continue;
        }
        chain.buffer(view, (addr, len), flags & WRITE != 0)?;
        if flags & NEXT == 0 {
            return Ok(chain.walked());
        }
        index = u32::from(descriptor.next());
    }
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
