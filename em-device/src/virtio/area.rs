//! A range of guest memory that is accessed many times in a burst, as a ring is.

use dot_iommu::{Access, DotView};
use std::sync::atomic::Ordering;
use vm_memory::{AtomicAccess, ByteValued, Bytes, GuestAddress, VolatileSlice};

/// Translated once when it lies in one range of the table, at each access otherwise.
#[derive(Debug)]
pub struct GuestArea<'v> {
    view: &'v DotView<'v>,
    addr: u64,
    slice: Option<VolatileSlice<'v>>,
}

impl<'v> GuestArea<'v> {
    /// `[addr, addr + len)`, which must not wrap. An area that is not mapped fails at its accesses.
    pub fn new(view: &'v DotView<'_>, addr: u64, len: u64, access: Access) -> Self {
        let slice = view.translate(addr, len, access).ok();
        Self {
            view,
            addr,
            slice: slice.map(|span| span.as_volatile_slice()),
        }
    }

    /// Reads an object, not at once. `None` when it is not mapped.
    pub fn read<T: ByteValued>(&self, offset: u64) -> Option<T> {
        match &self.slice {
            Some(slice) => slice.read_obj(usize::try_from(offset).ok()?).ok(),
            None => self.view.read_obj(self.at(offset)?).ok(),
        }
    }

    /// Writes an object, not at once. `None` when it is not mapped.
    pub fn write<T: ByteValued>(&self, offset: u64, value: T) -> Option<()> {
        match &self.slice {
            Some(slice) => slice.write_obj(value, usize::try_from(offset).ok()?).ok(),
            None => self.view.write_obj(value, self.at(offset)?).ok(),
        }
    }

    /// Reads an aligned integer at once. `None` when it is not mapped.
    pub fn load<T: AtomicAccess>(&self, offset: u64, order: Ordering) -> Option<T> {
        match &self.slice {
            Some(slice) => slice.load(usize::try_from(offset).ok()?, order).ok(),
            None => self.view.load(self.at(offset)?, order).ok(),
        }
    }

    /// Writes an aligned integer at once. `None` when it is not mapped.
    pub fn store<T: AtomicAccess>(&self, offset: u64, value: T, order: Ordering) -> Option<()> {
        match &self.slice {
            Some(slice) => slice
                .store(value, usize::try_from(offset).ok()?, order)
                .ok(),
            None => self.view.store(value, self.at(offset)?, order).ok(),
        }
    }

    fn at(&self, offset: u64) -> Option<GuestAddress> {
        self.addr.checked_add(offset).map(GuestAddress)
    }
}
