//! SET_VRING_ENABLE, which QEMU sends before it acknowledged any feature. The `vhost` crate takes that for an error and
//! ends the connection, so that this request is taken out of the socket before the crate sees it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use vhost::vhost_user::Error;

use super::face::Face;

/// `VHOST_USER_SET_VRING_ENABLE`.
const SET_VRING_ENABLE: u32 = 18;
/// Version 1 in the flags of a header.
const VERSION: u32 = 1;
/// Flags: it is a reply.
const REPLY: u32 = 1 << 2;
/// Flags: a reply is wanted.
const NEED_REPLY: u32 = 1 << 3;
/// Request, flags and bytes that follow; then ring and number.
const WORDS: usize = 5;

/// Does the request at the head of the socket if it is the one. Answers whether it was.
///
/// # Errors
/// The socket failed, or the request makes no sense.
pub(super) fn enable(stream: &UnixStream, face: &mut Face) -> Result<bool, Error> {
    let mut bytes = [0; 4 * WORDS];
    // One that comes in pieces is the crate's.
    match recv(
        stream,
        &mut bytes[..],
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    ) {
        Ok((_, length)) if length == bytes.len() => {}
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
        Err(error) => return Err(Error::SocketError(error.into())),
    }
    let mut words = bytes
        .chunks_exact(4)
        .map(|word| u32::from_ne_bytes(word.try_into().unwrap_or_default()));
    let mut next = || words.next().unwrap_or(0);
    let (request, flags, size, ring, number) = (next(), next(), next(), next(), next());
    if (request, flags & !NEED_REPLY, size) != (SET_VRING_ENABLE, VERSION, 8) {
        return Ok(false);
    }
    let mut stream = stream;
    stream.read_exact(&mut bytes).map_err(Error::SocketError)?;
    let done = match number {
        0 | 1 => face.enable(ring, number == 1).map_err(Error::from),
        _ => Err(Error::InvalidParam),
    };
    if face.acknowledges && flags & NEED_REPLY != 0 {
        let reply = acknowledgement(done.is_ok());
        stream.write_all(&reply).map_err(broken)?;
    }
    done.map(|()| true)
}

fn acknowledgement(done: bool) -> Vec<u8> {
    let words = [SET_VRING_ENABLE, VERSION | REPLY, 8, u32::from(!done), 0];
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn broken(error: io::Error) -> Error {
    Error::SocketBroken(error)
}
