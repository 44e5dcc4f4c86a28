//! One finished frame into one entry of a receive queue, with its completion.

use super::super::cqe::{Cqe, opcode};
use super::Complete;
use super::headers::{Layout, TCP, UDP};
use super::memory::{Slices, append, write_at};
use super::rss::Hash;
use super::rx::EtherRx;
use crate::frame::{Frame, FrameMeta};
use crate::net::queue::drop_reason;
use crate::offload::Checksum;
use crate::rdma::verbs::{Pushed, ReceiveRequest, Regions};
use dot_iommu::DotView;
use zerocopy::byteorder::big_endian::{U16, U32};

/// `hds_ip_ext`: what was found right.
const L2_OK: u8 = 1 << 0;
const L3_OK: u8 = 1 << 1;
const L4_OK: u8 = 1 << 2;
/// `l4_l3_hdr_type`.
const VLAN_STRIPPED: u8 = 1 << 0;
const L3_IPV6: u8 = 1 << 2;
const L3_IPV4: u8 = 2 << 2;
const L4_TCP: u8 = 4 << 4;
const L4_UDP: u8 = 2 << 4;
/// Syndromes.
const LOCAL_PROTECTION: u32 = 0x04;
const QP_OPERATION: u32 = 0x02;

/// The bytes of a frame: where they came from, or made here.
#[derive(Clone, Copy)]
pub(super) enum Bytes<'a> {
    Frame(&'a Frame<'a>),
    Slice(&'a [u8]),
}

impl Bytes<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Frame(frame) => frame.len(),
            Self::Slice(slice) => slice.len(),
        }
    }

    /// Copies bytes from `offset` on. Answers how many.
    fn copy_out(&self, offset: usize, buf: &mut [u8]) -> usize {
        match self {
            Self::Frame(frame) => frame.copy_out(offset, buf),
            Self::Slice(slice) => {
                let from = slice.get(offset..).unwrap_or_default();
                let count = from.len().min(buf.len());
                if let (Some(to), Some(from)) = (buf.get_mut(..count), from.get(..count)) {
                    to.copy_from_slice(from);
                }
                count
            }
        }
    }

    fn copy_into(&self, offset: usize, to: &Slices<'_>, at: usize) {
        match self {
            Self::Frame(frame) => {
                frame.copy_into(offset, to, at);
            }
            Self::Slice(slice) => write_at(to, at, slice.get(offset..).unwrap_or_default()),
        }
    }

    fn add_to(&self, sum: &mut Checksum, from: usize, to: usize) {
        let mut at = from;
        let mut chunk = [0; 2048];
        while at < to {
            let len = chunk.len().min(to - at);
            let Some(space) = chunk.get_mut(..len) else {
                return;
            };
            let count = self.copy_out(at, space);
            sum.add(space.get(..count).unwrap_or_default());
            if count == 0 {
                return;
            }
            at += count;
        }
    }
}

/// What is to be delivered.
#[derive(Clone, Copy)]
pub(super) struct Item<'a> {
    pub(super) bytes: Bytes<'a>,
    /// First bytes.
    pub(super) start: &'a [u8],
    pub(super) layout: Option<Layout>,
    /// Where a finished checksum goes over what is there.
    pub(super) patch: Option<(usize, [u8; 2])>,
    /// Whether the transport's checksum is known to be right.
    pub(super) valid: bool,
    pub(super) hash: Hash,
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivered {
    Yes,
    Dropped(&'static str),
    NoRoom,
}

impl Item<'_> {
    /// The tag, when it has one that can be taken off.
    fn tag(&self) -> Option<u16> {
        match self.start.get(12..16) {
            Some(&[0x81, 0x00, v0, v1]) => Some(u16::from_be_bytes([v0, v1])),
            _ => None,
        }
    }

    /// Delivers it to the next entry of a queue.
    pub(super) fn deliver(
        &self,
        rq: &mut EtherRx,
        regions: &Regions,
        view: &DotView<'_>,
        complete: &mut Complete<'_>,
    ) -> Delivered {
        if !rq.is_open() {
            return Delivered::Dropped(drop_reason::NOT_RUNNING);
        }
        let entry = match rq.take(view) {
            Ok(Some(entry)) => entry,
            Ok(None) => return Delivered::NoRoom,
            Err(cookie) => return fail(rq, cookie, QP_OPERATION, complete),
        };
        let strip = self.tag().filter(|_| rq.vlan_strip);
        let len = self.bytes.len() - if strip.is_some() { 4 } else { 0 };
        let room: u64 = entry.sges.iter().map(|sge| u64::from(sge.len)).sum();
        if (len as u64) > room {
            rq.put_back(entry);
            return Delivered::Dropped(drop_reason::SMALL_BUFFER);
        }
        let Some(slices) = buffers(&entry, len, regions, view) else {
            return fail(rq, entry.cookie, LOCAL_PROTECTION, complete);
        };
        self.copy(&slices, strip.is_some());
        let cqe = self.cqe(&entry, len, strip);
        if complete(rq.cqn, cqe.to_bytes()) == Pushed::Overrun {
            rq.fail();
        }
        rq.keep();
        Delivered::Yes
    }

    fn copy(&self, slices: &Slices<'_>, strip: bool) {
        let removed = if strip {
            let mut addresses = [0; 12];
            self.bytes.copy_out(0, &mut addresses);
            write_at(slices, 0, &addresses);
            self.bytes.copy_into(16, slices, 12);
            4
        } else {
            self.bytes.copy_into(0, slices, 0);
            0
        };
        if let Some((at, sum)) = self.patch {
            write_at(slices, at - removed, &sum);
        }
    }

    fn cqe(&self, entry: &ReceiveRequest, len: usize, tag: Option<u16>) -> Cqe {
        let mut cqe = Cqe {
            rss_hash_result: U32::new(self.hash.result),
            rss_hash_type: self.hash.kind,
            hds_ip_ext: L2_OK,
            byte_cnt: U32::new(len as u32),
            wqe_counter: U16::new(entry.cookie as u16),
            op_own: opcode::SEND << 4,
            ..Cqe::default()
        };
        if let Some(tag) = tag {
            cqe.l4_l3_hdr_type |= VLAN_STRIPPED;
            cqe.vlan_info = U16::new(tag);
        }
        let Some(layout) = &self.layout else {
            return cqe;
        };
        cqe.hds_ip_ext |= L3_OK;
        cqe.l4_l3_hdr_type |= if layout.ipv6 { L3_IPV6 } else { L3_IPV4 };
        cqe.l4_l3_hdr_type |= match layout.transport.map(|transport| transport.protocol) {
            Some(TCP) => L4_TCP,
            Some(UDP) => L4_UDP,
            _ => 0,
        };
        if self.valid && layout.transport.is_some() {
            cqe.hds_ip_ext |= L4_OK;
        }
        cqe.check_sum = U16::new(self.check_sum(layout));
        cqe
    }

    /// Ones' complement sum from the IP header to the packet's end, with the checksum finished.
    fn check_sum(&self, layout: &Layout) -> u16 {
        let end = layout.end_in(self.bytes.len());
        let known = layout.transport.filter(|_| self.valid);
        let mut sum = Checksum::new();
        if let (Some(transport), Some(addresses)) = (known, layout.addresses(self.start)) {
            // A right checksum makes the packet's and the pseudo-header's sum all ones, so the
            // payload need not be read.
            if let Some(headers) = self.start.get(layout.ip..transport.at) {
                sum.add(headers);
                let mut pseudo = Checksum::new();
                pseudo.add(addresses);
                pseudo.add_u16(u16::from(transport.protocol));
                pseudo.add_u32(end.saturating_sub(transport.at) as u32);
                sum.add_u16(pseudo.finish());
                return sum.sum();
            }
        }
        self.bytes.add_to(&mut sum, layout.ip, end);
        sum.sum()
    }
}

/// The memory of an entry, of `len` bytes.
fn buffers<'v>(
    entry: &ReceiveRequest,
    len: usize,
    regions: &Regions,
    view: &'v DotView<'_>,
) -> Option<Slices<'v>> {
    let mut slices = Slices::new();
    let mut left = len as u64;
    for sge in &entry.sges {
        if left == 0 {
            break;
        }
        let part = u64::from(sge.len).min(left) as u32;
        append(&mut slices, (sge.key, sge.addr, part), true, regions, view)?;
        left -= u64::from(part);
    }
    Some(slices)
}

fn fail(rq: &mut EtherRx, cookie: u32, syndrome: u32, complete: &mut Complete<'_>) -> Delivered {
    rq.fail();
    let cqe = Cqe {
        timestamp_l: U32::new(syndrome),
        sop_drop_qpn: U32::new(rq.rqn() & 0xff_ffff),
        wqe_counter: U16::new(cookie as u16),
        op_own: opcode::RESPONDER_ERROR << 4,
        ..Cqe::default()
    };
    // The queue is in error whether the driver can be told or not.
    let _ = complete(rq.cqn, cqe.to_bytes());
    rq.keep();
    Delivered::Dropped(drop_reason::NOT_RUNNING)
}

/// Whether a sender or a wire vouches for a frame's transport checksum.
pub(super) fn vouched(meta: &FrameMeta) -> bool {
    meta.flags & FrameMeta::DATA_VALID != 0
}
