//! Packets between an EM and its keeper, and how they travel.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | operation, little endian |
//! | 4..8 | zero |
//! | 8.. | keys, 8 bytes each, little endian; a descriptor for each when the operation is "keep" |

use super::Key;
use crate::wire::MAX_FDS;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Keys in a packet.
pub(super) const MAX_KEYS: usize = MAX_FDS;
const HEADER: usize = 8;
const PACKET: usize = HEADER + 8 * MAX_KEYS;

const KEEP: u32 = 1;
const FORGET: u32 = 2;
const CLEAR: u32 = 3;
const END: u32 = 4;

/// A packet.
#[derive(Debug)]
pub(super) enum Packet {
    /// Hold these, in place of what had the same keys.
    Keep(Vec<(Key, OwnedFd)>),
    /// Close these.
    Forget(Vec<Key>),
    /// Close everything.
    Clear,
    /// That was everything that was kept.
    End,
}

/// Sends "keep"; at most [`MAX_KEYS`] at once.
pub(super) fn send_keep(
    socket: &OwnedFd,
    kept: &[(Key, BorrowedFd<'_>)],
    patience: Duration,
) -> Result<(), Errno> {
    let keys: Vec<Key> = kept.iter().map(|(key, _)| *key).collect();
    let fds: Vec<BorrowedFd<'_>> = kept.iter().map(|(_, fd)| *fd).collect();
    send(socket, KEEP, &keys, &fds, patience)
}

/// Sends "forget"; at most [`MAX_KEYS`] at once.
pub(super) fn send_forget(socket: &OwnedFd, keys: &[Key], patience: Duration) -> Result<(), Errno> {
    send(socket, FORGET, keys, &[], patience)
}

/// Sends "clear".
pub(super) fn send_clear(socket: &OwnedFd, patience: Duration) -> Result<(), Errno> {
    send(socket, CLEAR, &[], &[], patience)
}

/// Sends the end mark.
pub(super) fn send_end(socket: &OwnedFd, patience: Duration) -> Result<(), Errno> {
    send(socket, END, &[], &[], patience)
}

fn send(
    socket: &OwnedFd,
    operation: u32,
    keys: &[Key],
    fds: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<(), Errno> {
    let mut packet = Vec::with_capacity(PACKET);
    packet.extend(operation.to_le_bytes());
    packet.extend([0; 4]);
    keys.iter()
        .for_each(|key| packet.extend(key.to_bits().to_le_bytes()));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_KEYS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let too_many = keys.len() > MAX_KEYS
        || !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds));
    if too_many {
        return Err(Errno::INVAL);
    }
    let deadline = Instant::now() + patience;
    loop {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::sendmsg(socket, &[IoSlice::new(&packet)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(error) => return Err(error),
        }
    }
}

/// The next packet; `None` at the end of the connection. With a deadline it waits until then at most.
pub(super) fn receive(
    socket: &OwnedFd,
    deadline: Option<Instant>,
) -> Result<Option<Packet>, Errno> {
    let mut bytes = [0; PACKET];
    // One more than allowed fits, so that too many are noticed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_KEYS + 1))];
    let mut resets = 0;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            match deadline {
                Some(_) => RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
                None => RecvFlags::CMSG_CLOEXEC,
            },
        );
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match (received, deadline) {
            (Ok(message), _) => {
                if message.bytes == 0 {
                    return Ok(None);
                }
                let cut = ReturnFlags::CTRUNC | ReturnFlags::TRUNC;
                if message.flags.intersects(cut) {
                    return Err(Errno::MSGSIZE);
                }
                let packet = bytes.get(..message.bytes).unwrap_or_default();
                return parse(packet, fds).map(Some).ok_or(Errno::PROTO);
            }
            (Err(Errno::INTR), _) => {}
            (Err(Errno::AGAIN), Some(deadline)) => wait(socket, PollFlags::IN, deadline)?,
            // A peer that died with unread packets is told once; what it sent is still there behind that.
            (Err(Errno::CONNRESET), _) if resets == 0 => resets = 1,
            (Err(error), _) => return Err(error),
        }
    }
}

fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Option<Packet> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let operation = u32::from_le_bytes(*header.first_chunk()?);
    let (keys, tail) = rest.as_chunks_of_8();
    if !tail.is_empty() || (operation == KEEP) != (keys.len() == fds.len() && !keys.is_empty()) {
        return None;
    }
    match operation {
        KEEP => Some(Packet::Keep(keys.into_iter().zip(fds).collect())),
        FORGET => Some(Packet::Forget(keys)),
        CLEAR => Some(Packet::Clear),
        END => Some(Packet::End),
        _ => None,
    }
}

trait Keys {
    fn as_chunks_of_8(&self) -> (Vec<Key>, &[u8]);
}

impl Keys for [u8] {
    fn as_chunks_of_8(&self) -> (Vec<Key>, &[u8]) {
        let chunks = self.chunks_exact(8);
        let tail = chunks.remainder();
        let keys =
            chunks.filter_map(|c| Some(Key::from_bits(u64::from_le_bytes(c.try_into().ok()?))));
        (keys.collect(), tail)
    }
}

fn wait(socket: &OwnedFd, for_what: PollFlags, deadline: Instant) -> Result<(), Errno> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Errno::TIMEDOUT);
    }
    let timeout = left.try_into().map_err(|_| Errno::INVAL)?;
    match poll(
        &mut [PollFd::new(&socket.as_fd(), for_what)],
        Some(&timeout),
    ) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
