//! The VMM's half: a vfio-user client that does what QEMU does, and on demand what nobody should.

mod region;

use crate::mapped::MappedRegion;
use crate::memory::{GuestMemory, Range};
use crate::time::SOON;
use crate::wire::{self, command};
use crate::{Error, Result};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What a driver needs of a VMM. Implemented by [`Client`] and by Cloud Hypervisor's client in
/// [`crate::compat`].
pub trait Vmm: Send {
    /// Reads from a region; the device's registers are read here.
    ///
    /// # Errors
    /// The socket or the protocol failed.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()>;
    /// Writes to a region.
    ///
    /// # Errors
    /// The socket or the protocol failed.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()>;
    /// Gives a range of guest memory to the device.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    fn map(&mut self, memory: &Arc<GuestMemory>, range: &Range) -> Result<()>;
    /// Gives all of a guest's memory to the device, range by range.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_all(&mut self, memory: &Arc<GuestMemory>) -> Result<()> {
        let mut ranges = memory.ranges();
        ranges.try_for_each(|range| self.map(memory, range))
    }
    /// Takes a range back.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    fn unmap(&mut self, address: u64, len: u64) -> Result<()>;
    /// Sets interrupt eventfds.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()>;
    /// DEVICE_RESET.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    fn reset(&mut self) -> Result<()>;
    /// Bytes of a region, 0 when it does not exist.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    fn region_size(&mut self, region: u32) -> Result<u64>;
    /// Maps what may be mapped of a region, if the server lets it.
    ///
    /// # Errors
    /// The server refused it, the socket failed, or what it says cannot be mapped.
    fn map_region(&mut self, region: u32) -> Result<Option<MappedRegion>> {
        let _ = region;
        Ok(None)
    }
    /// Answers requests of the server that came meanwhile (DMA_READ, DMA_WRITE).
    ///
    /// # Errors
    /// The socket or the protocol failed.
    fn serve(&mut self) -> Result<()>;
    /// Sends a message as it is; no reply is waited for.
    ///
    /// # Errors
    /// The socket failed, or this client cannot.
    fn inject(&mut self, message: &[u8]) -> Result<()>;
    /// The socket to wait on for [`Self::serve`]; `None` when this client has no such requests.
    fn socket(&self) -> Option<BorrowedFd<'_>>;
}

/// A message from the server.
#[derive(Debug, Clone)]
pub struct Message {
    /// Message id.
    pub id: u16,
    /// Command.
    pub command: u16,
    /// Header flags.
    pub flags: u32,
    /// errno of an error reply.
    pub errno: u32,
    /// All after the header.
    pub payload: Vec<u8>,
}

impl Message {
    /// Whether it is a reply with the error flag.
    pub fn is_error(&self) -> bool {
        self.flags & wire::ERROR != 0
    }

    fn word(&self, offset: usize) -> Result<u32> {
        let bytes = self.payload.get(offset..offset + 4).ok_or_else(|| {
            Error::Protocol(format!(
                "the reply to command {} has only {} bytes",
                self.command,
                self.payload.len()
            ))
        })?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}

/// The capabilities QEMU 11.1 sends.
pub const QEMU_CAPABILITIES: &str = r#"{"capabilities": {"pgsizes": 4096, "max_msg_fds": 16, "max_dma_maps": 65535, "max_data_xfer_size": 1048576, "migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "write_multiple": true}}"#;

/// A vfio-user connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    next_id: u16,
    /// Whether writes to BARs are sent without waiting for a reply, as QEMU does.
    pub posted: bool,
    /// JSON of the server's VERSION reply.
    pub server_capabilities: String,
    /// DMA_READ and DMA_WRITE requests that were answered.
    pub served: u64,
    memory: Option<Arc<GuestMemory>>,
}

impl Client {
    /// Connects and agrees on the version, as QEMU does.
    ///
    /// # Errors
    /// The server is not there, closes the connection or answers what QEMU would refuse.
    pub fn connect(path: &Path) -> Result<Self> {
        let mut client = Self::connect_raw(path)?;
        let mut payload = vec![0, 0, 0, 0];
        payload.extend_from_slice(QEMU_CAPABILITIES.as_bytes());
        payload.push(0);
        let limit = payload.len();
        let reply = client.call(command::VERSION, &payload, &[])?;
        if reply.payload.len() > limit {
            return Err(Error::Protocol(format!(
                "the VERSION reply is longer than the request ({} > {limit})",
                reply.payload.len()
            )));
        }
        if reply.payload.len() < 5 || reply.payload[..4] != [0, 0, 0, 0] {
            return Err(Error::Protocol("the VERSION reply is not for 0.0".into()));
        }
        if reply.payload.last() != Some(&0) {
            return Err(Error::Protocol(
                "the VERSION reply's JSON has no NUL at its end".into(),
            ));
        }
        client.server_capabilities =
            String::from_utf8_lossy(&reply.payload[4..reply.payload.len() - 1]).into_owned();
        Ok(client)
    }

    /// Connects and says nothing.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn connect_raw(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.set_write_timeout(Some(SOON))?;
        Ok(Self {
            stream,
            next_id: 1,
            posted: true,
            server_capabilities: String::new(),
            served: 0,
            memory: None,
        })
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Longest wait for a byte from the server.
    ///
    /// # Errors
    /// The socket refuses.
    pub fn set_patience(&self, limit: Duration) -> Result<()> {
        self.stream.set_read_timeout(Some(limit))?;
        self.stream.set_write_timeout(Some(limit))?;
        Ok(())
    }

    /// Sends bytes as they are, with descriptors.
    ///
    /// # Errors
    /// The socket failed.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        wire::send_with_fds(&mut self.stream, bytes, fds)
    }

    /// Sends a command; returns its id.
    ///
    /// # Errors
    /// The socket failed.
    pub fn send(
        &mut self,
        command: u16,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u16> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.send_bytes(&wire::message(id, command, flags, payload), fds)?;
        Ok(id)
    }

    /// The next message, whatever it is.
    ///
    /// # Errors
    /// The socket failed, nothing came in time, or the header makes no sense.
    pub fn receive(&mut self) -> Result<Message> {
        let mut header = [0; wire::HEADER];
        self.stream.read_exact(&mut header)?;
        self.rest_of(header)
    }

    fn rest_of(&mut self, header: [u8; wire::HEADER]) -> Result<Message> {
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let size = word(4) as usize;
        if !(wire::HEADER..=1 << 21).contains(&size) {
            return Err(Error::Protocol(format!(
                "a message of {size} bytes from the server"
            )));
        }
        let mut payload = vec![0; size - wire::HEADER];
        self.stream.read_exact(&mut payload)?;
        Ok(Message {
            id: half(0),
            command: half(2),
            flags: word(8),
            errno: word(12),
            payload,
        })
    }

    /// The reply to the command `id`; requests of the server that come before are answered.
    ///
    /// # Errors
    /// Like [`Self::receive`], or a reply that nobody asked for.
    pub fn reply_to(&mut self, id: u16) -> Result<Message> {
        loop {
            let message = self.receive()?;
            if message.flags & wire::TYPE_MASK == wire::REPLY {
                if message.id != id {
                    return Err(Error::Protocol(format!(
                        "reply to {} where {id} was next",
                        message.id
                    )));
                }
                return Ok(message);
            }
            self.answer(&message)?;
        }
    }

    /// Sends a command and waits for its reply; an error reply is [`Error::Refused`].
    ///
    /// # Errors
    /// Also those of [`Self::reply_to`].
    pub fn call(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Message> {
        let id = self.send(command, 0, payload, fds)?;
        let reply = self.reply_to(id)?;
        if reply.command != command {
            return Err(Error::Protocol(format!(
                "command {command} was answered as {}",
                reply.command
            )));
        }
        if reply.is_error() {
            return Err(Error::Refused {
                command,
                errno: reply.errno,
            });
        }
        Ok(reply)
    }

    /// GET_INFO: flags, regions, interrupt indices.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    pub fn device_info(&mut self) -> Result<(u32, u32, u32)> {
        let reply = self.call(command::GET_INFO, &wire::words(&[16, 0, 0, 0]), &[])?;
        Ok((reply.word(4)?, reply.word(8)?, reply.word(12)?))
    }

    /// GET_REGION_INFO: flags and size.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    pub fn region_info(&mut self, region: u32) -> Result<(u32, u64)> {
        let payload = wire::words(&[32, 0, region, 0, 0, 0, 0, 0]);
        let reply = self.call(command::GET_REGION_INFO, &payload, &[])?;
        let size = u64::from(reply.word(16)?) | u64::from(reply.word(20)?) << 32;
        Ok((reply.word(4)?, size))
    }

    /// GET_IRQ_INFO: flags and count.
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    pub fn irq_info(&mut self, index: u32) -> Result<(u32, u32)> {
        let reply = self.call(command::GET_IRQ_INFO, &wire::words(&[16, 0, index, 0]), &[])?;
        Ok((reply.word(4)?, reply.word(12)?))
    }

    /// Takes everything back (DMA_UNMAP with the ALL flag).
    ///
    /// # Errors
    /// The server refused it or the socket failed.
    pub fn unmap_all(&mut self) -> Result<()> {
        self.call(
            command::DMA_UNMAP,
            &wire::dma_unmap(0, 0, wire::UNMAP_ALL),
            &[],
        )?;
        Ok(())
    }

    /// Remembers the memory from which DMA_READ and DMA_WRITE are answered.
    pub fn lend(&mut self, memory: &Arc<GuestMemory>) {
        self.memory = Some(Arc::clone(memory));
    }

    fn answer(&mut self, request: &Message) -> Result<()> {
        let address = u64::from(request.word(0)?) | u64::from(request.word(4)?) << 32;
        let count = u64::from(request.word(8)?) | u64::from(request.word(12)?) << 32;
        if count > 65536 {
            return Err(Error::Protocol(format!(
                "message DMA of {count} bytes: QEMU breaks above 64 KiB"
            )));
        }
        self.served += 1;
        let memory = self.memory.clone();
        let mut payload = request.payload.get(..16).unwrap_or_default().to_vec();
        let done = match (request.command, memory) {
            (command::DMA_READ, Some(memory)) => {
                let data = memory.bytes(address, count as usize);
                data.map(|data| payload.extend_from_slice(&data)).is_ok()
            }
            (command::DMA_WRITE, Some(memory)) => {
                if request.payload.len() as u64 != 16 + count {
                    return Err(Error::Protocol(format!(
                        "DMA_WRITE of {count} bytes carries {}",
                        request.payload.len() - 16
                    )));
                }
                memory.write(address, &request.payload[16..]).is_ok()
            }
            (command::DMA_READ | command::DMA_WRITE, None) => false,
            (other, _) => {
                return Err(Error::Protocol(format!(
                    "the server sent command {other}, which clients do not serve"
                )));
            }
        };
        if request.flags & wire::NO_REPLY != 0 {
            return Ok(());
        }
        let mut reply = wire::message(request.id, request.command, wire::REPLY, &payload);
        if !done {
            reply = wire::message(request.id, request.command, wire::REPLY | wire::ERROR, &[]);
            reply[12] = 19;
        }
        self.stream.write_all(&reply)?;
        Ok(())
    }
}

impl Vmm for Client {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        let request = wire::region_access(region, offset, data.len() as u32);
        let reply = self.call(command::REGION_READ, &request, &[])?;
        if reply.payload.len() != 16 + data.len() {
            return Err(Error::Protocol(format!(
                "a read of {} bytes was answered with {}",
                data.len(),
                reply.payload.len().saturating_sub(16)
            )));
        }
        data.copy_from_slice(&reply.payload[16..]);
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let mut request = wire::region_access(region, offset, data.len() as u32);
        request.extend_from_slice(data);
        if self.posted && region < 6 {
            self.send(command::REGION_WRITE, wire::NO_REPLY, &request, &[])?;
            return Ok(());
        }
        let reply = self.call(command::REGION_WRITE, &request, &[])?;
        if reply.payload.len() != 16 {
            return Err(Error::Protocol(format!(
                "a write was answered with {} bytes: Cloud Hypervisor waits for 32",
                16 + reply.payload.len()
            )));
        }
        Ok(())
    }

    fn map(&mut self, memory: &Arc<GuestMemory>, range: &Range) -> Result<()> {
        self.lend(memory);
        let request = wire::dma_map(range.address, range.len, range.offset, wire::DMA_READ_WRITE);
        let fds = [memory.fd()];
        let fds = if range.with_fd { &fds[..] } else { &[] };
        self.call(command::DMA_MAP, &request, fds)?;
        Ok(())
    }

    fn unmap(&mut self, address: u64, len: u64) -> Result<()> {
        let request = wire::dma_unmap(address, len, 0);
        let reply = self.call(command::DMA_UNMAP, &request, &[])?;
        if reply.payload.len() != 24 {
            return Err(Error::Protocol(format!(
                "an unmap was answered with {} bytes: Cloud Hypervisor waits for 40",
                16 + reply.payload.len()
            )));
        }
        Ok(())
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let request = wire::set_irqs(index, flags, start, count);
        self.call(command::SET_IRQS, &request, fds)?;
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.call(command::DEVICE_RESET, &[], &[])?;
        Ok(())
    }

    fn region_size(&mut self, region: u32) -> Result<u64> {
        Ok(self.region_info(region)?.1)
    }

    fn map_region(&mut self, region: u32) -> Result<Option<MappedRegion>> {
        let (info, fd) = self.region_with_fd(region)?;
        let long = |at: usize| {
            Ok::<_, Error>(u64::from(info.word(at)?) | u64::from(info.word(at + 4)?) << 32)
        };
        if info.word(4)? & wire::REGION_MMAP == 0 {
            return Ok(None);
        }
        // As QEMU, which then waits for each write to this device.
        self.posted = false;
        let capabilities = info.word(12)? as usize;
        let (id, count) = match capabilities {
            0 => (0, 0),
            at => (info.word(at)? & 0xffff, info.word(at + 8)?),
        };
        let (Some(fd), wire::SPARSE_MMAP) = (fd, id) else {
            return Err(Error::Protocol("no descriptor or no areas to map".into()));
        };
        let areas = (0..count as usize)
            .map(|n| capabilities + 16 + n * 16)
            .map(|at| Ok((long(at)?, long(at + 8)?)))
            .collect::<Result<Vec<_>>>()?;
        MappedRegion::new(fd, long(24)?, &areas).map(Some)
    }

    fn serve(&mut self) -> Result<()> {
        while rustix::io::ioctl_fionread(&self.stream).map_err(std::io::Error::from)? > 0 {
            let message = self.receive()?;
            if message.flags & wire::TYPE_MASK == wire::REPLY {
                return Err(Error::Protocol(format!(
                    "reply to command {} that nobody waits for",
                    message.command
                )));
            }
            self.answer(&message)?;
        }
        Ok(())
    }

    fn inject(&mut self, message: &[u8]) -> Result<()> {
        self.send_bytes(message, &[])
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }
}
