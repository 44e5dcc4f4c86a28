//! Fixed parts of message bodies.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! body {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }
    };
}

body! {
    /// `VFIO_USER_DMA_MAP`.
    DmaMap {
        /// Bytes of this structure.
        argsz: u32,
        /// [`DMA_READ`] and [`DMA_WRITE`].
        flags: u32,
        /// Offset in the descriptor, bytes.
        offset: u64,
        /// Guest address.
        address: u64,
        /// Bytes.
        size: u64,
    }
}
/// The range may be read.
pub const DMA_READ: u32 = 1;
/// The range may be written.
pub const DMA_WRITE: u32 = 2;

body! {
    /// `VFIO_USER_DMA_UNMAP`.
    DmaUnmap {
        /// Bytes of this structure.
        argsz: u32,
        /// [`UNMAP_DIRTY`] and [`UNMAP_ALL`].
        flags: u32,
        /// Guest address.
        address: u64,
        /// Bytes.
        size: u64,
    }
}
/// A dirty bitmap is wanted.
pub const UNMAP_DIRTY: u32 = 1;
/// Everything goes; address and size are zero.
pub const UNMAP_ALL: u32 = 2;

body! {
    /// `VFIO_USER_DEVICE_GET_INFO`.
    DeviceInfo {
        /// Bytes of this structure.
        argsz: u32,
        /// 1: can be reset; 2: PCI.
        flags: u32,
        /// Regions.
        num_regions: u32,
        /// Interrupt indices.
        num_irqs: u32,
    }
}

body! {
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`.
    RegionInfoBody {
        /// In a command, bytes the client has room for; in a reply, bytes that all of it takes.
        argsz: u32,
        /// 1 readable, 2 writable, 4 mappable, 8 with capabilities.
        flags: u32,
        /// Region index.
        index: u32,
        /// Offset of the first capability, 0 without.
        cap_offset: u32,
        /// Bytes.
        size: u64,
        /// Offset in the descriptor.
        offset: u64,
    }
}
#[allow(missing_docs)]
pub mod region_flags {
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const MMAP: u32 = 4;
    pub const CAPS: u32 = 8;
}

body! {
    /// `vfio_region_info_cap_sparse_mmap` without its areas.
    SparseMmapCap {
        /// 1.
        id: u16,
        /// 1.
        version: u16,
        /// Offset of the next capability, 0 at the end.
        next: u32,
        /// Areas that follow.
        nr_areas: u32,
        /// 0.
        reserved: u32,
    }
}

body! {
    /// An area of [`SparseMmapCap`].
    SparseArea {
        /// From the region's start.
        offset: u64,
        /// Bytes.
        size: u64,
    }
}

body! {
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`.
    IrqInfo {
        /// Bytes of this structure.
        argsz: u32,
        /// 1 eventfd, 2 maskable, 4 auto-masked, 8 not resizable.
        flags: u32,
        /// Interrupt index.
        index: u32,
        /// Interrupts of that index.
        count: u32,
    }
}
/// An interrupt is signalled by eventfd.
pub const IRQ_EVENTFD: u32 = 1;

body! {
    /// `VFIO_USER_DEVICE_SET_IRQS` without its data.
    SetIrqs {
        /// Bytes of this structure and its data.
        argsz: u32,
        /// One of [`set_irqs`]' data types and one of its actions.
        flags: u32,
        /// Interrupt index.
        index: u32,
        /// First interrupt.
        start: u32,
        /// Interrupts.
        count: u32,
    }
}
#[allow(missing_docs)]
pub mod set_irqs {
    pub const DATA_NONE: u32 = 1;
    pub const DATA_BOOL: u32 = 2;
    pub const DATA_EVENTFD: u32 = 4;
    pub const DATA_MASK: u32 = 7;
    pub const ACTION_MASK: u32 = 8;
    pub const ACTION_UNMASK: u32 = 16;
    pub const ACTION_TRIGGER: u32 = 32;
    pub const ACTIONS: u32 = 0x38;
}

body! {
    /// Fixed part of `VFIO_USER_REGION_READ` and `_WRITE`.
    RegionAccess {
        /// From the region's start.
        offset: u64,
        /// Region index.
        region: u32,
        /// Bytes.
        count: u32,
    }
}

body! {
    /// A record of `VFIO_USER_REGION_WRITE_MULTI`.
    MultiWrite {
        /// From the region's start.
        offset: u64,
        /// Region index.
        region: u32,
        /// Bytes of `data` that count, at most 8.
        count: u32,
        /// The bytes.
        data: [u8; 8],
    }
}

body! {
    /// Fixed part of `VFIO_USER_DMA_READ` and `_WRITE`.
    DmaAccess {
        /// Guest address.
        address: u64,
        /// Bytes.
        count: u64,
    }
}

/// Interrupt indices (`linux/vfio.h`).
#[allow(missing_docs)]
pub mod irq_index {
    pub const INTX: u32 = 0;
    pub const MSI: u32 = 1;
    pub const MSIX: u32 = 2;
    pub const ERR: u32 = 3;
    pub const REQ: u32 = 4;
    pub const COUNT: u32 = 5;
}
