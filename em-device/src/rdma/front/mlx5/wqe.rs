//! Segments of work queue entries (`qp.h`, `device.h` of the Linux driver), as the guest writes them.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opcodes of send queue entries.
pub(super) mod opcode {
    pub(in super::super) const NOP: u8 = 0x00;
    pub(in super::super) const SEND_INVALIDATE: u8 = 0x01;
    pub(in super::super) const RDMA_WRITE: u8 = 0x08;
    pub(in super::super) const RDMA_WRITE_IMMEDIATE: u8 = 0x09;
    pub(in super::super) const SEND: u8 = 0x0a;
    pub(in super::super) const SEND_IMMEDIATE: u8 = 0x0b;
    pub(in super::super) const RDMA_READ: u8 = 0x10;
    pub(in super::super) const ATOMIC_CS: u8 = 0x11;
    pub(in super::super) const ATOMIC_FA: u8 = 0x12;
    pub(in super::super) const UMR: u8 = 0x25;
}

/// Bytes of a send queue's basic block (WQEBB).
pub(super) const WQEBB: usize = 64;
/// Bytes of the units that entries are counted in (DS).
pub(super) const DS: usize = 16;
/// Bytes of an entry at most.
pub(super) const MAX_WQE: usize = 63 * DS;
/// L_Key that ends the list of a receive entry when its count is 0.
pub(super) const LIST_END: u32 = 0x100;
/// In a count: the bytes follow (send), or padding may be written behind them (receive).
pub(super) const INLINE: u32 = 1 << 31;

/// Control segment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Ctrl {
    pub(super) opmod: u8,
    /// Of the first basic block.
    pub(super) index: U16,
    pub(super) opcode: u8,
    pub(super) qpn: [u8; 3],
    pub(super) ds: u8,
    pub(super) signature: u8,
    pub(super) reserved: [u8; 2],
    /// Fence mode in bits 7:5, completion request in 3:2, solicited event in 1.
    pub(super) fm_ce_se: u8,
    /// Immediate data, key to invalidate, or mkey to change.
    pub(super) imm: U32,
}

impl Ctrl {
    /// Bytes of the entry; [`None`] when it has not even a control segment.
    #[inline]
    pub(super) fn len(&self) -> Option<usize> {
        let ds = usize::from(self.ds & 0x3f);
        (ds != 0).then_some(ds * DS)
    }

    /// Whether success makes a completion.
    #[inline]
    pub(super) fn signaled(&self) -> bool {
        self.fm_ce_se & 0x08 != 0
    }

    #[inline]
    pub(super) fn solicited(&self) -> bool {
        self.fm_ce_se & 0x02 != 0
    }

    /// Modes 0 and 1 order changes of regions only, which are in order anyway.
    #[inline]
    pub(super) fn fence(&self) -> bool {
        self.fm_ce_se >> 5 >= 2
    }
}

/// Remote address segment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Raddr {
    pub(super) addr: U64,
    pub(super) key: U32,
    pub(super) reserved: U32,
}

/// Atomic segment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Atomic {
    pub(super) swap_add: U64,
    pub(super) compare: U64,
}

/// Data segment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct DataSeg {
    pub(super) count: U32,
    pub(super) key: U32,
    pub(super) addr: U64,
}

/// First part of an address vector; all of it without [`BaseAv::EXTENDED`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct BaseAv {
    pub(super) qkey: U32,
    pub(super) reserved: U32,
    /// Queue pair in the lower 24 bits.
    pub(super) dqp: U32,
    pub(super) stat_rate_sl: u8,
    pub(super) fl_mlid: u8,
    /// LID, or UDP source port on Ethernet.
    pub(super) rlid: U16,
}

impl BaseAv {
    /// In `dqp`: [`AvRest`] follows.
    pub(super) const EXTENDED: u32 = 1 << 31;
}

/// Second part of an address vector.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct AvRest {
    pub(super) reserved: [u8; 4],
    pub(super) rmac: [u8; 6],
    pub(super) tclass: u8,
    pub(super) hop_limit: u8,
    /// Bit 30: there is a GRH; 27:20 source GID index; 19:0 flow label.
    pub(super) grh_gid_fl: U32,
    pub(super) rgid: [u8; 16],
}

/// UMR control segment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct UmrCtrl {
    pub(super) flags: u8,
    pub(super) reserved: [u8; 3],
    /// Length of the list in units of 16 bytes.
    pub(super) xlt_octowords: U16,
    /// Lower half of the place in the region's list, in units of 16 bytes, with `OFFSET`; else the
    /// length of a signature description.
    pub(super) xlt_offset: U16,
    pub(super) mkey_mask: U64,
    pub(super) xlt_offset_47_16: U32,
    pub(super) reserved_14: [u8; 28],
}

/// Memory key context (`mkc` of `mlx5_ifc`).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Mkc {
    /// Bit 6: free.
    pub(super) status: u8,
    pub(super) pcie: u8,
    /// Rights, and the access mode in bits 1:0.
    pub(super) access: u8,
    pub(super) translation_mode: u8,
    pub(super) qpn: [u8; 3],
    pub(super) mkey_7_0: u8,
    pub(super) reserved_8: U32,
    /// Bit 31: all of memory; PD in the lower 24 bits.
    pub(super) flags_pd: U32,
    pub(super) start: U64,
    pub(super) len: U64,
    pub(super) bsf_octowords: U32,
    pub(super) reserved_24: [u8; 16],
    pub(super) xlt_octowords: U32,
    pub(super) reserved_38: [u8; 3],
    /// Lower 6 bits: log₂ of the page size.
    pub(super) log_page_size: u8,
    pub(super) reserved_3c: U32,
}

/// Head of an entry of a linked receive queue.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct SrqNext {
    pub(super) reserved: U16,
    pub(super) next_wqe_index: U16,
    pub(super) signature: u8,
    pub(super) reserved_5: [u8; 11],
}

const _: () = {
    assert!(size_of::<Ctrl>() == DS && size_of::<SrqNext>() == DS);
    assert!(size_of::<UmrCtrl>() == 48 && size_of::<Mkc>() == 64);
    assert!(size_of::<BaseAv>() == DS && size_of::<AvRest>() == 2 * DS);
};

/// Takes a segment off the front of an entry.
#[inline]
pub(super) fn take<T: FromBytes + Unaligned + KnownLayout + Immutable + Copy>(
    bytes: &mut &[u8],
) -> Option<T> {
    let (segment, rest) = T::read_from_prefix(bytes).ok()?;
    *bytes = rest;
    Some(segment)
}
