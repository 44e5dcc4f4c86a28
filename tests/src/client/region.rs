//! What a region is, and the descriptor of one that may be mapped.

use super::{Client, Message};
use crate::wire::{self, command};
use crate::{Error, Result};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

impl Client {
    /// The file of a region all of which may be mapped, and where in it the region begins.
    ///
    /// # Errors
    /// The socket failed, or only parts may be mapped.
    pub fn region_file(&mut self, region: u32) -> Result<Option<(OwnedFd, u64)>> {
        let (info, fd) = self.region_with_fd(region)?;
        if info.word(4)? & wire::REGION_MMAP == 0 {
            return Ok(None);
        }
        if info.word(12)? != 0 {
            return Err(Error::Protocol("the region has capabilities".into()));
        }
        let offset = u64::from(info.word(24)?) | u64::from(info.word(28)?) << 32;
        Ok(fd.map(|fd| (fd, offset)))
    }

    /// GET_REGION_INFO of a region that may be mapped: its reply's payload and descriptor.
    pub(super) fn region_with_fd(&mut self, region: u32) -> Result<(Message, Option<OwnedFd>)> {
        let payload = wire::words(&[4096, 0, region, 0, 0, 0, 0, 0]);
        let id = self.send(command::GET_REGION_INFO, 0, &payload, &[])?;
        let mut header = [0; wire::HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::net::recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(&mut header)],
            &mut control,
            RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC,
        )
        .map_err(std::io::Error::from)?;
        let mut fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if got.bytes != wire::HEADER || fds.len() > 1 {
            return Err(Error::Protocol(format!(
                "a region's reply of {} bytes and {} descriptors",
                got.bytes,
                fds.len()
            )));
        }
        let message = self.rest_of(header)?;
        match message.id == id && !message.is_error() {
            true => Ok((message, fds.pop())),
            false => Err(Error::Protocol("no reply about the region".into())),
        }
    }
}
