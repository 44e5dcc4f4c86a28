//! Host memory that a translation found, with copies that tolerate a racing guest.
#![allow(unsafe_code)] // turns a checked host address into a volatile slice

use std::marker::PhantomData;

use vm_memory::VolatileSlice;

use crate::entry::Direct;
use crate::error::DotError;
use crate::perm::{Access, Perm};

/// A contiguous piece of host memory inside one range. It borrows the view that found it, so the
/// memory stays mapped while the span exists.
///
/// The guest may change the bytes at any time: copy once, then check the copy.
#[derive(Clone, Copy, Debug)]
pub struct HostSpan<'a> {
    host: usize,
    len: usize,
    /// Rights asked for by the translation, as in [`Perm`].
    rights: u8,
    view: PhantomData<&'a ()>,
}

impl<'a> HostSpan<'a> {
    /// # Safety
    ///
    /// `[host, host + len)` must be memory of one [`super::mapping::HostMapping`] that stays alive
    /// for `'a` and whose protection allows `rights`.
    #[inline]
    pub(crate) unsafe fn new(host: usize, len: usize, rights: u8) -> HostSpan<'a> {
        HostSpan {
            host,
            len,
            rights,
            view: PhantomData,
        }
    }

    /// Bytes in the span; never 0.
    #[allow(clippy::len_without_is_empty)]
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Host address of the first byte, for code that passes it to a system call or measures it.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.host)
    }

    /// The span as vm-memory's slice: byte order, atomics, file reads and writes.
    ///
    /// The slice does not know the direction the span was translated for; writing through a slice
    /// of a range that is mapped read-only raises SIGSEGV.
    #[inline]
    pub fn as_volatile_slice(&self) -> VolatileSlice<'a> {
        // SAFETY: `new` promised mapped memory of this length for `'a`; VolatileSlice assumes
        // concurrent writers.
        unsafe { VolatileSlice::new(self.as_ptr(), self.len) }
    }

    /// Asks the processor to fetch the first bytes, at most two cache lines, for the access that the span was translated
    /// for. Reads and writes nothing.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in [self.host, self.host.wrapping_add(self.len.min(128) - 1)] {
            use std::arch::asm;
            // The intrinsic for writing is one for reading where the processor is not said to have it; one that does not
            // know this instruction takes it for none (AMD64 Architecture Programmer's Manual, volume 3, PREFETCHW).
            // SAFETY: hints, whatever the address.
            unsafe {
                match self.rights & Access::Write.bits() {
                    0 => {
                        asm!("prefetcht0 [{}]", in(reg) line, options(nostack, readonly, preserves_flags))
                    }
                    _ => {
                        asm!("prefetchw [{}]", in(reg) line, options(nostack, readonly, preserves_flags))
                    }
                }
            }
        }
    }

    /// Copies guest memory into `dst`: the shorter of the two lengths. Returns the bytes copied.
    ///
    /// Fails with [`DotError::SpanAccess`] when the span was not translated for reading.
    #[inline]
    pub fn copy_to(&self, dst: &mut [u8]) -> Result<usize, DotError> {
        self.need(Access::Read)?;
        Ok(self.as_volatile_slice().copy_to(dst))
    }

    /// Copies `src` into guest memory: the shorter of the two lengths. Returns the bytes copied.
    ///
    /// Fails with [`DotError::SpanAccess`] when the span was not translated for writing.
    #[inline]
    pub fn copy_from(&self, src: &[u8]) -> Result<usize, DotError> {
        self.need(Access::Write)?;
        self.as_volatile_slice().copy_from(src);
        Ok(self.len.min(src.len()))
    }

    /// Copies this span to `dst` (of the same or another table): the shorter of the two lengths.
    /// Returns the bytes copied. The two may overlap; what overlapping bytes hold is then
    /// unspecified.
    ///
    /// Fails with [`DotError::SpanAccess`] when `self` was not translated for reading or `dst` not
    /// for writing.
    #[inline]
    pub fn copy_span(&self, dst: HostSpan<'_>) -> Result<usize, DotError> {
        self.need(Access::Read)?;
        dst.need(Access::Write)?;
        self.as_volatile_slice()
            .copy_to_volatile_slice(dst.as_volatile_slice());
        Ok(self.len.min(dst.len))
    }

    /// The part of the span from byte `offset`, `len` bytes long, or `None` when that is not inside.
    #[inline]
    pub fn subspan(&self, offset: usize, len: usize) -> Option<HostSpan<'a>> {
        let end = offset.checked_add(len)?;
        (len != 0 && end <= self.len).then_some(HostSpan {
            host: self.host + offset,
            len,
            ..*self
        })
    }

    #[inline]
    fn need(&self, access: Access) -> Result<(), DotError> {
        if self.rights & access.bits() == access.bits() {
            Ok(())
        } else {
            Err(DotError::SpanAccess(access))
        }
    }
}

const _: () = assert!(Perm::RW.bits() == Access::ReadWrite.bits());

/// The host memory of `[addr, addr + len)` when the range holds all of it and grants `rights`
/// (not 0) on host memory.
#[inline]
pub(crate) fn within(range: &Direct, addr: u64, len: u64, rights: u8) -> Option<HostSpan<'_>> {
    let offset = addr.wrapping_sub(range.start);
    // A length of 0 wraps to the largest value and is refused by the same comparison.
    let fits = offset <= range.span && len.wrapping_sub(1) <= range.span - offset;
    let asked = u64::from(rights);
    if !fits || asked == 0 || range.rights & asked != asked {
        return None;
    }
    // SAFETY: the low bits of the rights are 0 for a range without host memory. Else the entry beside which `range` is
    // stored (see `Direct`) holds the mapping for as long as the borrow, `map` checked that the whole range lies in the mapping and that the mapping
    // grants the rights, and the bytes lie in the range. They fit in usize as the mapping does.
    Some(unsafe { HostSpan::new(range.host + offset as usize, len as usize, rights) })
}
