//! Numbers of the vfio-user protocol (QEMU docs/interop/vfio-user) and of vfio, written out for the tests.

use crate::{Error, Result};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

/// Message commands.
pub mod command {
    #![allow(missing_docs)]
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const GET_INFO: u16 = 4;
    pub const GET_REGION_INFO: u16 = 5;
    pub const GET_REGION_IO_FDS: u16 = 6;
    pub const GET_IRQ_INFO: u16 = 7;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DMA_READ: u16 = 11;
    pub const DMA_WRITE: u16 = 12;
    pub const DEVICE_RESET: u16 = 13;
    pub const WRITE_MULTI: u16 = 15;
}

/// Bytes of a message header.
pub const HEADER: usize = 16;
/// Header flags: a reply.
pub const REPLY: u32 = 1;
/// Header flags: mask of the message type.
pub const TYPE_MASK: u32 = 0xf;
/// Header flags: no reply is wanted.
pub const NO_REPLY: u32 = 1 << 4;
/// Header flags: the reply tells an error.
pub const ERROR: u32 = 1 << 5;

/// DMA_MAP: the device may read and write.
pub const DMA_READ_WRITE: u32 = 3;
/// DMA_MAP: the device may only read.
pub const DMA_READ_ONLY: u32 = 1;
/// DMA_UNMAP: everything.
pub const UNMAP_ALL: u32 = 2;

/// Region flags: it may be mapped.
pub const REGION_MMAP: u32 = 4;
/// Region capability: areas that may be mapped.
pub const SPARSE_MMAP: u32 = 1;

/// vfio region index of config space.
pub const CONFIG_REGION: u32 = 7;
/// vfio interrupt index of MSI-X.
pub const IRQ_MSIX: u32 = 2;
/// SET_IRQS: no data, trigger. With count 0 the index is switched off.
pub const IRQ_NONE_TRIGGER: u32 = 0x21;
/// SET_IRQS: eventfds, trigger.
pub const IRQ_EVENTFD_TRIGGER: u32 = 0x24;

/// Sends bytes with descriptors, at most 64.
///
/// # Errors
/// The socket failed.
pub fn send_with_fds(stream: &mut UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    if fds.is_empty() {
        stream.write_all(bytes)?;
        return Ok(());
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::Harness("more than 64 descriptors at once".into()));
    }
    let sent = rustix::net::sendmsg(
        &*stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map_err(std::io::Error::from)?;
    stream.write_all(&bytes[sent..])?;
    Ok(())
}

/// Header of a message: 16 bytes.
pub fn header(id: u16, command: u16, size: u32, flags: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[0..2].copy_from_slice(&id.to_le_bytes());
    bytes[2..4].copy_from_slice(&command.to_le_bytes());
    bytes[4..8].copy_from_slice(&size.to_le_bytes());
    bytes[8..12].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// A whole message with a right header.
pub fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header(id, command, (HEADER + payload.len()) as u32, flags).to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// Payload of REGION_READ, and the head of REGION_WRITE.
pub fn region_access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let mut bytes = offset.to_le_bytes().to_vec();
    bytes.extend_from_slice(&region.to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes
}

/// Payload of DMA_MAP.
pub fn dma_map(address: u64, size: u64, offset: u64, flags: u32) -> Vec<u8> {
    let mut bytes = 32u32.to_le_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_le_bytes());
    for word in [offset, address, size] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Payload of DMA_UNMAP.
pub fn dma_unmap(address: u64, size: u64, flags: u32) -> Vec<u8> {
    let mut bytes = 24u32.to_le_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&address.to_le_bytes());
    bytes.extend_from_slice(&size.to_le_bytes());
    bytes
}

/// Payload of WRITE_MULTI: writes of at most 8 bytes to (region, offset).
pub fn write_multi(writes: &[(u32, u64, &[u8])]) -> Vec<u8> {
    let mut payload = (writes.len() as u64).to_le_bytes().to_vec();
    for (region, offset, data) in writes {
        payload.extend_from_slice(&region_access(*region, *offset, data.len() as u32));
        let mut value = [0; 8];
        value[..data.len()].copy_from_slice(data);
        payload.extend_from_slice(&value);
    }
    payload
}

/// Payload of SET_IRQS without data.
pub fn set_irqs(index: u32, flags: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

/// 32-bit words, little-endian.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
