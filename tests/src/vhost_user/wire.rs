//! The vhost-user protocol (QEMU docs/interop/vhost-user), written out for the tests.

use crate::time::SOON;
use crate::wire::send_with_fds;
use crate::{Error, Result};
use std::io::Read;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Requests of a front end.
pub mod request {
    #![allow(missing_docs)]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Protocol features.
pub mod protocol {
    #![allow(missing_docs)]
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const CONFIG: u64 = 1 << 9;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Feature bit: there are protocol features.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature bit: what the device writes is logged.
pub const LOG_ALL: u64 = 1 << 26;
/// Header flags: version 1.
pub const VERSION: u32 = 1;
/// Header flags: a reply.
pub const REPLY: u32 = 1 << 2;
/// Header flags: a reply is wanted.
pub const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header.
pub const HEADER: usize = 12;
/// SET_VRING_KICK and others: no descriptor comes along.
pub const NO_FD: u64 = 1 << 8;

/// A request as it goes over the socket.
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    for word in [request, flags, payload.len() as u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// Numbers of 64 bits.
pub fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// A ring and a number (`struct vhost_vring_state`).
pub fn ring(index: u32, number: u32) -> Vec<u8> {
    [index.to_le_bytes(), number.to_le_bytes()].concat()
}

/// A ring's addresses (`struct vhost_vring_addr`).
pub fn ring_addresses(index: u32, flags: u32, [desc, used, avail, log]: [u64; 4]) -> Vec<u8> {
    [ring(index, flags), longs(&[desc, used, avail, log])].concat()
}

/// A connection to a back end.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
}

impl Channel {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::new(UnixStream::connect(path)?)
    }

    /// On a connection.
    ///
    /// # Errors
    /// The socket failed.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(SOON))?;
        Ok(Self { stream })
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The socket failed.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        send_with_fds(&mut self.stream, bytes, fds)
    }

    /// Sends a request that has a reply, and waits for it.
    ///
    /// # Errors
    /// The socket failed, or something else came.
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Result<Vec<u8>> {
        self.send_bytes(&message(request, VERSION, payload), &[])?;
        self.reply(request)
    }

    /// The same for a reply of one number.
    ///
    /// # Errors
    /// The socket failed, or something else came.
    pub fn ask_long(&mut self, request: u32) -> Result<u64> {
        let reply = self.ask(request, &[])?;
        let number = reply.as_slice().try_into().map(u64::from_le_bytes);
        number.map_err(|_| Error::Protocol(format!("{} bytes for a number", reply.len())))
    }

    /// Sends a request and waits until it was done, by the acknowledgement of the protocol.
    ///
    /// # Errors
    /// The socket failed, or the back end refused it.
    pub fn tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_bytes(&message(request, VERSION | NEED_REPLY, payload), fds)?;
        match self.reply(request)?.as_slice() {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            _ => Err(Error::Protocol(format!("request {request} was refused"))),
        }
    }

    /// The reply to a request.
    ///
    /// # Errors
    /// The socket failed, or something else came.
    pub fn reply(&mut self, request: u32) -> Result<Vec<u8>> {
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header)?;
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        if (word(0), word(4)) != (request, VERSION | REPLY) || word(8) > 4096 {
            return Err(Error::Protocol(format!(
                "{header:?} is no reply to request {request}"
            )));
        }
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }
}
