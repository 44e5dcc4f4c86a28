//! UDP segmentation: one large datagram becomes many of the same payload.

use super::headers::{Layout, Transport};
use super::tx_entry::{ip_checksum, pseudo_checksum};
use crate::frame::{FrameMeta, MIN_GSO_SIZE};

/// The headers that datagrams have in common.
#[derive(Debug)]
pub(super) struct Datagrams<'h> {
    headers: &'h mut [u8],
    layout: Layout,
    udp: Transport,
    id: u16,
    payload: usize,
    size: usize,
}

/// One datagram of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Datagram {
    /// Where its payload begins in the large frame.
    pub(super) offset: usize,
    /// Bytes of its payload.
    pub(super) len: usize,
    /// Its offload facts: the checksum is unfinished.
    pub(super) meta: FrameMeta,
}

impl<'h> Datagrams<'h> {
    /// Of a frame of `len` bytes that begins with `start`, with `size` bytes of payload each. `None`
    /// when they would be too small, or a packet longer than IP allows.
    pub(super) fn new(
        start: &'h mut [u8],
        layout: Layout,
        udp: Transport,
        len: usize,
        size: u16,
    ) -> Option<Self> {
        let header_bytes = udp.at + udp.len;
        let payload = len.checked_sub(header_bytes)?;
        let size = usize::from(size);
        let packet = header_bytes - layout.ip + size.min(payload);
        if size < usize::from(MIN_GSO_SIZE) || packet > usize::from(u16::MAX) {
            return None;
        }
        let headers = start.get_mut(..header_bytes)?;
        let id = headers.get(layout.ip + 4..layout.ip + 6)?.try_into().ok()?;
        Some(Self {
            headers,
            layout,
            udp,
            id: u16::from_be_bytes(id),
            payload,
            size,
        })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.payload.div_ceil(self.size).max(1)
    }

    /// Makes the headers those of number `index`.
    pub(super) fn prepare(&mut self, index: usize) -> Option<Datagram> {
        let offset = index.checked_mul(self.size)?;
        let len = self.payload.checked_sub(offset)?.min(self.size);
        let udp_len = self.udp.len + len;
        let packet = self.headers.len() - self.layout.ip + len;
        let ip = self.layout.ip;
        if self.layout.ipv6 {
            put(self.headers, ip + 4, (packet - 40) as u16)?;
        } else {
            put(self.headers, ip + 2, packet as u16)?;
            put(self.headers, ip + 4, self.id.wrapping_add(index as u16))?;
            ip_checksum(self.headers, &self.layout)?;
        }
        put(self.headers, self.udp.at + 4, udp_len as u16)?;
        pseudo_checksum(self.headers, &self.layout, &self.udp, udp_len)?;
        Some(Datagram {
            offset: self.headers.len() + offset,
            len,
            meta: FrameMeta {
                flags: FrameMeta::NEEDS_CSUM,
                csum_start: self.udp.at as u16,
                csum_offset: self.udp.checksum() as u16,
                ..FrameMeta::default()
            },
        })
    }

    /// The headers of the datagram that was prepared last.
    pub(super) fn headers(&mut self) -> &mut [u8] {
        self.headers
    }
}

fn put(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes
        .get_mut(at..at + 2)?
        .copy_from_slice(&value.to_be_bytes());
    Some(())
}
