//! Packets with descriptors over a `SOCK_SEQPACKET` socket.

use super::sys;
use crate::error::FabricError;
use crate::fabric::PeerInfo;
use crate::poll::wait;
use crate::wire::{Frame, MAX_FDS, MAX_FRAME_BYTES};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const CMSG_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// One end of a connection. Sends and receives whole packets; never blocks without a deadline.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
}

/// What [`Socket::receive`] found.
#[derive(Debug)]
pub(super) enum Received {
    /// A frame and its descriptors, all close-on-exec.
    Frame(Frame, Vec<OwnedFd>),
    /// Nothing now.
    Nothing,
}

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    pub(super) fn peer(&self) -> Result<PeerInfo, FabricError> {
        sys::peer_info(&self.fd)
    }

    /// Sends a frame. Without a deadline it fails with [`FabricError::Full`] at once when there is no
    /// room; with one it waits for room.
    pub(super) fn send(
        &self,
        frame: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), FabricError> {
        if fds.len() > MAX_FDS {
            return Err(FabricError::TooManyFds {
                got: fds.len(),
                max: MAX_FDS,
            });
        }
        let mut space = [MaybeUninit::uninit(); CMSG_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(FabricError::TooManyFds {
                got: fds.len(),
                max: MAX_FDS,
            });
        }
        loop {
            match rustix::net::sendmsg(
                &self.fd,
                &[IoSlice::new(frame)],
                &mut control,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = deadline.map_or(Duration::ZERO, |deadline| {
                        deadline.saturating_duration_since(Instant::now())
                    });
                    if left.is_zero() {
                        return Err(FabricError::Full);
                    }
                    self.wait(PollFlags::OUT, left)?;
                }
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Err(FabricError::PeerClosed);
                }
                Err(error) => return Err(FabricError::io("send to the peer")(error)),
            }
        }
    }

    /// Takes the next frame, if one is there, into a buffer that grows with the largest so far: frames are small but
    /// may be large, and an OM has a buffer for each EM. After an error the connection cannot go on.
    pub(super) fn receive(&self, buffer: &mut Vec<u8>) -> Result<Received, FabricError> {
        match self.next_length()? {
            // One more than allowed is cut off, and an error below.
            Some(length) if length > buffer.len() => buffer.resize(length.min(MAX_FRAME_BYTES), 0),
            Some(_) => {}
            None => return Ok(Received::Nothing),
        }
        let mut space = [MaybeUninit::uninit(); CMSG_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let Some(message) = received(|| {
            let mut parts = [IoSliceMut::new(buffer)];
            rustix::net::recvmsg(&self.fd, &mut parts, &mut control, flags)
        })?
        else {
            return Ok(Received::Nothing);
        };
        // Owned from here on: every return closes them.
        let mut fds = Vec::new();
        for control in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = control {
                fds.extend(rights);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(FabricError::FdsLost);
        }
        // The control buffer is rounded up, so a few more than the bound may fit.
        if fds.len() > MAX_FDS {
            return Err(FabricError::TooManyFds {
                got: fds.len(),
                max: MAX_FDS,
            });
        }
        if message.flags.contains(ReturnFlags::TRUNC) {
            return Err(crate::wire::WireError::TooLong(buffer.len()).into());
        }
        if message.bytes == 0 {
            // The end; an empty packet looks the same and is no frame either.
            return Err(FabricError::PeerClosed);
        }
        let frame = Frame::parse(buffer.get(..message.bytes).unwrap_or_default())?;
        if !fds.is_empty() && !matches!(frame, Frame::Request(..) | Frame::Greeting(_)) {
            return Err(FabricError::UnexpectedFds(fds.len()));
        }
        Ok(Received::Frame(frame, fds))
    }

    /// Bytes of the next packet, if one is there.
    fn next_length(&self) -> Result<Option<usize>, FabricError> {
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
        let seen = received(|| rustix::net::recv(&self.fd, &mut [0; 1], flags))?;
        Ok(seen.map(|(_, length)| length))
    }

    /// Waits for a frame until `deadline`; `Full` never comes from here.
    pub(super) fn receive_until(
        &self,
        timeout: Duration,
    ) -> Result<(Frame, Vec<OwnedFd>), FabricError> {
        let deadline = Instant::now() + timeout;
        let mut buffer = Vec::new();
        loop {
            if let Received::Frame(frame, fds) = self.receive(&mut buffer)? {
                return Ok((frame, fds));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(FabricError::Timeout(timeout));
            }
            self.wait(PollFlags::IN, left)?;
        }
    }

    /// Waits until the socket may be ready, or `timeout`.
    pub(super) fn wait(&self, for_what: PollFlags, timeout: Duration) -> Result<(), FabricError> {
        wait(&self.fd, for_what, timeout).map(drop)
    }

    /// Ends both directions; both ends see it.
    pub(super) fn shut_down(&self) {
        // It may be shut down already; nothing else can go wrong.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }
}

/// What a call that does not wait received; `None`: there is nothing.
fn received<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<Option<T>, FabricError> {
    loop {
        match call() {
            Ok(value) => return Ok(Some(value)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET | Errno::PIPE) => return Err(FabricError::PeerClosed),
            Err(error) => return Err(FabricError::io("receive from the peer")(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Event, Request, VERSION};
    use crate::wire::WireError;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn pair() -> (Socket, Socket) {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (Socket::new(a), Socket::new(b))
    }

    fn receive(socket: &Socket) -> Result<Received, FabricError> {
        socket.receive(&mut Vec::new())
    }

    /// Sends `fds` copies of a descriptor, beyond what `send` allows.
    fn send_fds(socket: &Socket, frame: &[u8], fds: usize) {
        let stdin = std::io::stdin();
        let fds = vec![stdin.as_fd(); fds];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let iov = [IoSlice::new(frame)];
        rustix::net::sendmsg(&socket.fd, &iov, &mut control, SendFlags::empty()).unwrap();
    }

    fn stats_frame() -> Vec<u8> {
        Frame::Request(7, Request::Stats).emit().unwrap()
    }

    #[test]
    fn descriptors_arrive_close_on_exec() {
        let (a, b) = pair();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let fds = vec![pipe.as_fd(); MAX_FDS];
        a.send(&stats_frame(), &fds, None).unwrap();
        let Received::Frame(Frame::Request(7, Request::Stats), fds) = receive(&b).unwrap() else {
            panic!("no request");
        };
        assert_eq!(fds.len(), MAX_FDS);
        for fd in fds {
            let flags = rustix::io::fcntl_getfd(fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn too_many_descriptors_are_refused_by_both_ends() {
        let (a, b) = pair();
        let stdin = std::io::stdin();
        let fds = vec![stdin.as_fd(); MAX_FDS + 1];
        assert!(matches!(
            a.send(&stats_frame(), &fds, None),
            Err(FabricError::TooManyFds { got: 17, max: 16 })
        ));
        send_fds(&a, &stats_frame(), MAX_FDS + 1);
        assert!(matches!(
            receive(&b),
            Err(FabricError::TooManyFds { got: 17, max: 16 })
        ));
        send_fds(&a, &stats_frame(), 64);
        assert!(matches!(receive(&b), Err(FabricError::FdsLost)));
    }

    #[test]
    fn event_with_descriptors_is_refused() {
        let (a, b) = pair();
        let event = Frame::Event(Event::ConfigChanged { function: 1 });
        send_fds(&a, &event.emit().unwrap(), 2);
        assert!(matches!(receive(&b), Err(FabricError::UnexpectedFds(2))));
    }

    #[test]
    fn packet_longer_than_a_frame_is_refused() {
        let (a, b) = pair();
        rustix::net::send(&a.fd, &[0; MAX_FRAME_BYTES + 1], SendFlags::empty()).unwrap();
        assert!(matches!(
            receive(&b),
            Err(FabricError::Wire(WireError::TooLong(_)))
        ));
    }

    #[test]
    fn frame_of_another_version_names_both_versions() {
        let (a, b) = pair();
        let mut frame = stats_frame();
        frame[4] += 1;
        a.send(&frame, &[], None).unwrap();
        let Err(FabricError::Wire(WireError::Version { ours, theirs })) = receive(&b) else {
            panic!("accepted");
        };
        assert_eq!((ours, theirs), (VERSION, VERSION + 1));
    }

    #[test]
    fn send_without_deadline_reports_a_full_queue() {
        let (a, _b) = pair();
        let frame = stats_frame();
        let full = (0..100_000).find_map(|_| a.send(&frame, &[], None).err());
        assert!(matches!(full, Some(FabricError::Full)));
    }

    #[test]
    fn end_of_the_peer_is_told_from_silence() {
        let (a, b) = pair();
        assert!(matches!(receive(&b), Ok(Received::Nothing)));
        drop(a);
        assert!(matches!(receive(&b), Err(FabricError::PeerClosed)));
        let sent = b.send(&stats_frame(), &[], None);
        assert!(matches!(sent, Err(FabricError::PeerClosed)));
    }
}
