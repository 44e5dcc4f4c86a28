//! Entries of Ethernet send queues (`mlx5_wqe_eth_seg` of the Linux driver), and the offload facts of
//! the frames that they describe.

use super::super::wqe::{Ctrl, DS, DataSeg, INLINE, take};
use super::headers::{HEADER_BYTES, Layout, TCP, Transport, UDP};
use super::memory::{Slices, append};
use crate::frame::{FrameMeta, MAX_FRAME};
use crate::offload::Checksum;
use crate::rdma::verbs::{MemKey, Regions};
use dot_iommu::DotView;
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Send a frame.
pub(super) const SEND: u8 = 0x0a;
/// Send a frame in segments.
pub(super) const LSO: u8 = 0x0e;

/// `cs_flags`: the adapter makes the checksum of IPv4, of TCP and UDP.
const L3_CSUM: u8 = 1 << 6;
const L4_CSUM: u8 = 1 << 7;
/// `sz`: no headers stand in the segment, but a tag to insert.
const INSERT_VLAN: u16 = 1 << 15;
/// `sz` of a tag: it is 802.1ad's.
const SVLAN: u16 = 1;
/// `sz`: bytes of headers.
const INLINE_BYTES: u16 = 0x3ff;
/// Bytes of headers that stand in the segment itself; the others follow.
const START: usize = 2;

/// Ethernet segment.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Eth {
    swp: [u8; 4],
    cs_flags: u8,
    swp_flags: u8,
    mss: U16,
    metadata: U32,
    sz: U16,
    /// First bytes of the headers, or the tag's VLAN.
    start: [u8; START],
}

/// An entry, parsed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry<'w> {
    pub(super) opcode: u8,
    pub(super) signaled: bool,
    pub(super) ask: Ask,
    /// First bytes of the frame.
    pub(super) inline: &'w [u8],
    /// Data segments with the rest.
    data: &'w [u8],
}

/// What an entry asks of the adapter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ask {
    l3_csum: bool,
    l4_csum: bool,
    /// Payload bytes of each segment.
    mss: Option<u16>,
    /// Tag to insert behind the addresses.
    tag: Option<[u8; 4]>,
}

impl Ask {
    /// Whether the frame goes as it is.
    pub(super) fn nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl<'w> Entry<'w> {
    /// `None` when the entry makes no sense.
    pub(super) fn parse(wqe: &'w [u8]) -> Option<Self> {
        let bytes = &mut &*wqe;
        let ctrl: Ctrl = take(bytes)?;
        let mut entry = Self {
            opcode: ctrl.opcode,
            signaled: ctrl.signaled(),
            ask: Ask::default(),
            inline: &[],
            data: &[],
        };
        if !matches!(ctrl.opcode, SEND | LSO) {
            return Some(entry);
        }
        let eth: Eth = take(bytes)?;
        let sz = eth.sz.get();
        entry.ask = Ask {
            l3_csum: eth.cs_flags & L3_CSUM != 0,
            l4_csum: eth.cs_flags & L4_CSUM != 0,
            mss: (ctrl.opcode == LSO).then(|| eth.mss.get()),
            tag: None,
        };
        if sz & INSERT_VLAN != 0 {
            let [t0, t1] = match sz & SVLAN {
                0 => [0x81, 0x00],
                _ => [0x88, 0xa8],
            };
            entry.ask.tag = Some([t0, t1, eth.start[0], eth.start[1]]);
        } else {
            let len = usize::from(sz & INLINE_BYTES);
            let first = 2 * DS - START;
            entry.inline = wqe.get(first..first + len)?;
            let more = len.saturating_sub(START).next_multiple_of(DS);
            *bytes = bytes.get(more..)?;
        }
        entry.data = bytes;
        Some(entry)
    }

    /// Appends the memory of the data segments. `None` when they make no sense.
    pub(super) fn gather<'v>(
        &self,
        slices: &mut Slices<'v>,
        regions: &Regions,
        view: &'v DotView<'_>,
    ) -> Option<()> {
        let mut bytes = self.data;
        let mut total = self.inline.len();
        while !bytes.is_empty() {
            let seg: DataSeg = take(&mut bytes)?;
            let count = seg.count.get();
            total = total.saturating_add(count as usize);
            if count & INLINE != 0 || total > MAX_FRAME {
                return None;
            }
            if count != 0 {
                let at = (MemKey(seg.key.get()), seg.addr.get(), count);
                append(slices, at, false, regions, view)?;
            }
        }
        Some(())
    }
}

/// How a frame is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// As one, with these facts.
    One(FrameMeta),
    /// As UDP datagrams of this payload: nobody else segments those.
    Datagrams {
        layout: Layout,
        udp: Transport,
        size: u16,
    },
}

/// A copy of a frame's first bytes, which are prepared for others to finish.
#[derive(Debug)]
pub(super) struct Start {
    bytes: [u8; HEADER_BYTES + 4],
    len: usize,
}

impl Start {
    /// Room for the copy.
    pub(super) fn new() -> Self {
        Self {
            bytes: [0; HEADER_BYTES + 4],
            len: 0,
        }
    }

    /// Where the frame's first bytes go.
    pub(super) fn space(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..HEADER_BYTES).unwrap_or_default()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..self.len).unwrap_or_default()
    }

    /// Does what the entry asks in the copy: `copied` first bytes of a frame of `len` bytes. `None`
    /// when the frame is none of which that can be asked.
    pub(super) fn prepare(&mut self, copied: usize, len: usize, ask: &Ask) -> Option<Plan> {
        self.len = copied;
        let mut len = len;
        if let Some(tag) = ask.tag {
            if copied < 12 {
                return None;
            }
            self.bytes.copy_within(12..copied, 16);
            self.bytes.get_mut(12..16)?.copy_from_slice(&tag);
            self.len += 4;
            len += 4;
        }
        if !ask.l3_csum && !ask.l4_csum && ask.mss.is_none() {
            return Some(Plan::One(FrameMeta::default()));
        }
        let start = self.bytes_mut();
        let Some(layout) = Layout::parse(start) else {
            // What is no IP has no such checksums.
            return ask.mss.is_none().then_some(Plan::One(FrameMeta::default()));
        };
        if ask.l3_csum && !layout.ipv6 {
            ip_checksum(start, &layout)?;
        }
        let Some(transport) = layout.transport else {
            return ask.mss.is_none().then_some(Plan::One(FrameMeta::default()));
        };
        if let (Some(size), UDP) = (ask.mss, transport.protocol) {
            return Some(Plan::Datagrams {
                layout,
                udp: transport,
                size,
            });
        }
        if !ask.l4_csum && ask.mss.is_none() {
            return Some(Plan::One(FrameMeta::default()));
        }
        let end = match ask.mss {
            // The length in the header may be that of one segment.
            Some(_) => len,
            None => layout.end_in(len),
        };
        pseudo_checksum(start, &layout, &transport, end.checked_sub(transport.at)?)?;
        let mut meta = FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            csum_start: transport.at as u16,
            csum_offset: transport.checksum() as u16,
            ..FrameMeta::default()
        };
        if let Some(size) = ask.mss {
            meta.gso_size = size;
            meta.hdr_len = (transport.at + transport.len) as u16;
            meta.gso_type = tcp_gso(start, &layout, &transport)?;
        }
        meta.check(len).ok().map(|()| Plan::One(meta))
    }
}

fn tcp_gso(start: &[u8], layout: &Layout, transport: &Transport) -> Option<u8> {
    const CWR: u8 = 0x80;
    if transport.protocol != TCP {
        return None;
    }
    let kind = match layout.ipv6 {
        true => FrameMeta::GSO_TCPV6,
        false => FrameMeta::GSO_TCPV4,
    };
    match start.get(transport.at + 13)? & CWR {
        0 => Some(kind),
        _ => Some(kind | FrameMeta::GSO_ECN),
    }
}

/// Makes the checksum of an IPv4 header.
pub(super) fn ip_checksum(start: &mut [u8], layout: &Layout) -> Option<()> {
    let header = start.get_mut(layout.ip..layout.ip + layout.ip_len)?;
    header.get_mut(10..12)?.copy_from_slice(&[0, 0]);
    let mut sum = Checksum::new();
    sum.add(header);
    header
        .get_mut(10..12)?
        .copy_from_slice(&sum.finish().to_be_bytes());
    Some(())
}

/// Puts the sum of the pseudo-header where the checksum of a packet of `len` bytes goes.
pub(super) fn pseudo_checksum(
    start: &mut [u8],
    layout: &Layout,
    transport: &Transport,
    len: usize,
) -> Option<()> {
    let mut sum = Checksum::new();
    sum.add(layout.addresses(start)?);
    sum.add_u16(u16::from(transport.protocol));
    sum.add_u32(len as u32);
    let at = transport.at + transport.checksum();
    start
        .get_mut(at..at + 2)?
        .copy_from_slice(&sum.sum().to_be_bytes());
    Some(())
}
