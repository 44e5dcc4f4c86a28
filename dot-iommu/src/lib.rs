//! Direct Offset Translation (DOT): guest address → host memory by range and offset.
//!
//! A VMM announces guest memory as a handful of large ranges. Translating an address then needs no
//! page walk: find the range, add an offset. [`DotTable`] holds the ranges; each has rights
//! ([`Perm`]), a [`Generation`] and a [`Backing`]: memory mapped into this process, or the
//! knowledge that the range exists and is reachable only by DMA messages to the VMM.
//!
//! A control thread calls [`DotTable::map`] and [`DotTable::unmap`]. A worker holds a
//! [`DotReader`], takes a [`DotView`] with [`DotReader::pin`] for one burst of work and translates
//! through it without locks. `unmap` returns only after every view that could still see the old
//! range is gone, so its acknowledgement may be sent at once.
//!
//! [`DotView`] implements [`vm_memory::GuestMemory`], so `virtio-queue` runs on it directly.
//!
//! What this crate is not: it speaks no vfio-user, sends no DMA messages and caches no file
//! descriptors; whoever serves the VMM does that and fills the table.
//!
//! ```
//! use dot_iommu::{Access, Backing, DotTable, HostMapping, Perm};
//!
//! let table = DotTable::new();
//! let mapping = HostMapping::anonymous(0x10000)?;
//! table.map(0x4000_0000, 0x10000, Perm::RW, Backing::Mapped { mapping, offset: 0 })?;
//!
//! let reader = table.reader();
//! {
//!     let view = reader.pin();
//!     view.translate(0x4000_0100, 5, Access::Write)?.copy_from(b"hello")?;
//!     let mut out = [0u8; 5];
//!     view.translate(0x4000_0100, 5, Access::Read)?.copy_to(&mut out)?;
//!     assert_eq!(&out, b"hello");
//! } // a view that is alive delays `unmap`
//! assert_eq!(table.unmap(0x4000_0000, 0x10000)?.ranges, 1);
//! # Ok::<(), dot_iommu::DotError>(())
//! ```

mod bucket;
mod entry;
mod error;
mod guest_memory;
mod perm;
mod snapshot;
mod sys;
mod table;
mod view;

pub use entry::{Backing, Entry, Generation, RangeInfo};
pub use error::DotError;
pub use guest_memory::DotSlices;
pub use perm::{Access, Perm};
pub use sys::mapping::HostMapping;
pub use sys::span::HostSpan;
pub use table::{DotTable, MAX_RANGES, Unmapped};
pub use view::{DotReader, DotView, Located};
