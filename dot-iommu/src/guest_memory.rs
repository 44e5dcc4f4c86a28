//! [`vm_memory::GuestMemory`] on a view, so that virtqueues run on the table.

use std::iter::FusedIterator;

use vm_memory::guest_memory::{Error, GuestMemorySliceIterator, Result};
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryMmap, Permissions, VolatileSlice};

use crate::error::DotError;
use crate::perm::Access;
use crate::sys::span;
use crate::view::DotView;

/// Pieces of host memory that together form a guest buffer, one for each range it touches.
#[derive(Debug)]
pub struct DotSlices<'a> {
    view: &'a DotView<'a>,
    addr: u64,
    rest: u64,
    access: Permissions,
}

impl<'a> DotSlices<'a> {
    #[inline]
    fn piece(&mut self) -> Option<VolatileSlice<'a>> {
        let range = self.view.candidate(self.addr)?;
        // Lengths minus one; the caller checked that `rest` is not 0.
        let to_end = range
            .span
            .checked_sub(self.addr.wrapping_sub(range.start))?;
        let len = to_end.min(self.rest - 1) + 1;
        let span = span::within(range, self.addr, len, rights(self.access))?;
        // Only a buffer's last piece may end at 2^64, and then nothing is left to find.
        self.addr = self.addr.wrapping_add(len);
        self.rest -= len;
        Some(span.as_volatile_slice())
    }

    /// Why the next byte cannot be had.
    #[cold]
    fn why_not(&self) -> Error {
        match access(self.access) {
            Some(access) => to_vm_memory(self.view.why_not(self.addr, 1, access)),
            None => Error::HostAddressNotAvailable,
        }
    }
}

impl<'a> Iterator for DotSlices<'a> {
    type Item = Result<VolatileSlice<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.rest == 0 {
            return None;
        }
        match self.piece() {
            Some(slice) => Some(Ok(slice)),
            None => {
                self.rest = 0;
                Some(Err(self.why_not()))
            }
        }
    }
}

impl FusedIterator for DotSlices<'_> {}

impl<'a> GuestMemorySliceIterator<'a, ()> for DotSlices<'a> {}

/// A buffer may span adjacent ranges. An access that a range does not grant, or that only DMA
/// messages can serve, is an error of kind [`Error::IOError`] which holds the [`DotError`].
impl GuestMemory for DotView<'_> {
    /// There is no physical memory without translation; [`GuestMemory::physical_memory`] is `None`.
    type PhysicalMemory = GuestMemoryMmap<()>;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        self.slices(addr, count, access)
            .is_ok_and(|mut slices| slices.all(|slice| slice.is_ok()))
    }

    #[inline]
    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>> {
        self.slices(addr, count, access)
    }
}

impl DotView<'_> {
    #[inline]
    fn slices(
        &self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<DotSlices<'_>> {
        let rest = count as u64;
        if addr.0.checked_add(rest.saturating_sub(1)).is_none() {
            return Err(Error::GuestAddressOverflow);
        }
        Ok(DotSlices {
            view: self,
            addr: addr.0,
            rest,
            access,
        })
    }
}

#[inline]
fn rights(access: Permissions) -> u8 {
    access as u8
}

fn access(access: Permissions) -> Option<Access> {
    match access {
        Permissions::No => None,
        Permissions::Read => Some(Access::Read),
        Permissions::Write => Some(Access::Write),
        Permissions::ReadWrite => Some(Access::ReadWrite),
    }
}

const _: () = assert!(Permissions::Read as u8 == Access::Read.bits());
const _: () = assert!(Permissions::Write as u8 == Access::Write.bits());

fn to_vm_memory(error: DotError) -> Error {
    match error {
        DotError::NotMapped { addr, .. } => Error::InvalidGuestAddress(GuestAddress(addr)),
        DotError::Wrap { .. } => Error::GuestAddressOverflow,
        other => Error::IOError(other.into()),
    }
}
