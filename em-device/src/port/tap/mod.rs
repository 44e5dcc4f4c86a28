//! A TAP interface of the host as a port.
//!
//! Frames cross with the virtio-net header, so that checksums and TCP segmentation are left to the
//! host's stack, or to whoever receives the frame in the end.

mod sys;

use self::sys::{HEADER, MAX_PIECES};
use super::counters::Counters;
use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use m2m_fabric::proto::LinkStats;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use thiserror::Error;
use vm_memory::VolatileSlice;

/// Longest interface name in bytes.
const MAX_NAME: usize = libc::IFNAMSIZ - 1;

/// Why a TAP interface could not be opened.
#[derive(Debug, Error)]
pub enum TapError {
    /// The kernel would refuse it, or make another name of it.
    #[error(
        "{0:?} is no interface name: it must have 1 to {MAX_NAME} bytes, without spaces, '/', ':' or '%'"
    )]
    Name(String),
    /// No TAPs here, or none for us.
    #[error("cannot open /dev/net/tun: {0}")]
    Device(#[source] Errno),
    /// Making one needs CAP_NET_ADMIN; using one that root made needs to be its owner.
    #[error(
        "no permission for the TAP interface {0}: create it for this user first (`ip tuntap add {0} mode tap user NAME`) or run with CAP_NET_ADMIN"
    )]
    Permission(String),
    /// Another process has it.
    #[error("the TAP interface {0} is in use by another process")]
    Busy(String),
    /// The name is taken by something else.
    #[error("the interface {0} exists and is not a TAP with one queue")]
    OtherKind(String),
    /// Anything else.
    #[error("cannot create the TAP interface {0}: {1}")]
    Create(String, #[source] Errno),
    /// The descriptor is something else.
    #[error("the descriptor is not an open TAP: {0}")]
    NotTap(#[source] Errno),
    /// The descriptor was opened in another way.
    #[error("the TAP was opened without IFF_TAP, IFF_NO_PI or IFF_VNET_HDR")]
    Mode,
    /// The kernel refused what the port needs.
    #[error("cannot set up the TAP interface {0}: {1}")]
    Setup(String, #[source] Errno),
}

/// A TAP interface.
#[derive(Debug)]
pub struct TapPort {
    name: String,
    interface: String,
    tap: OwnedFd,
    /// Watches the TAP only while armed: the TAP itself would stay readable, and keep everybody
    /// awake, while the sink has no room.
    wake: OwnedFd,
    /// A frame that was read, with its header, and how long it is in all.
    buf: Box<[u8]>,
    pending: usize,
    /// The sink did not want it.
    held: bool,
    armed: bool,
    /// For frames in more pieces than one call writes.
    joined: Vec<u8>,
    counters: Counters,
    down: Option<String>,
    /// Whether the host's kernel knows UDP segmentation.
    uso: bool,
}

impl TapPort {
    /// Opens the interface `name`, creates it if there is none, and sets it up where it may.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn open(name: &str) -> Result<Self, TapError> {
        let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/:%".contains(&byte);
        if !(1..=MAX_NAME).contains(&name.len())
            || !name.bytes().all(allowed)
            || matches!(name, "." | "..")
        {
            return Err(TapError::Name(name.into()));
        }
        let port = Self::from_fd(sys::open(name)?)?;
        // An owner without CAP_NET_ADMIN may use the interface but not set it up; then the host's
        // administrator does.
        if let Err(error) = sys::set_up(&port.interface) {
            log::info!("the TAP interface {name} is left as it is: {error}");
        }
        Ok(port)
    }

    /// Takes an open TAP, with `IFF_NO_PI` and `IFF_VNET_HDR`.
    ///
    /// # Errors
    /// The descriptor is something else, or the kernel refuses the offloads.
    pub fn from_fd(tap: OwnedFd) -> Result<Self, TapError> {
        let interface = sys::check(tap.as_fd())?;
        let setup = |error| TapError::Setup(interface.clone(), error);
        let uso = sys::configure(tap.as_fd()).map_err(setup)?;
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(setup)?;
        let data = EventData::new_u64(0);
        epoll::add(&wake, &tap, data, EventFlags::empty()).map_err(setup)?;
        Ok(Self {
            name: format!("tap {interface}"),
            interface,
            tap,
            wake,
            buf: vec![0; HEADER + MAX_FRAME].into_boxed_slice(),
            pending: 0,
            held: false,
            armed: false,
            joined: Vec::new(),
            counters: Counters::default(),
            down: None,
            uso,
        })
    }

    /// Name of the interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    fn watch(&self, events: EventFlags) {
        if let Err(error) = epoll::modify(&self.wake, &self.tap, EventData::new_u64(0), events) {
            log::error!("cannot watch the TAP interface {}: {error}", self.interface);
        }
    }

    fn go_down(&mut self, error: Errno) {
        let reason = if error == Errno::BADFD {
            "the interface was removed".to_owned()
        } else {
            error.to_string()
        };
        log::error!("{} goes down: {reason}", self.name);
        self.down = Some(reason);
        self.watch(EventFlags::empty());
    }

    /// Makes sure that a frame is in the buffer. Returns false when there is none.
    fn read(&mut self) -> bool {
        while self.pending == 0 && self.down.is_none() {
            match rustix::io::read(&self.tap, &mut self.buf[..]) {
                Ok(len) if len >= HEADER + MIN_FRAME => self.pending = len,
                Ok(_) => self.counters.dropped("bad_length"),
                Err(Errno::AGAIN) => return false,
                Err(Errno::INTR) => {}
                // The interface is not up.
                Err(Errno::IO) => return false,
                Err(error) => self.go_down(error),
            }
        }
        self.pending > 0
    }
}

fn to_header(meta: &FrameMeta) -> [u8; HEADER] {
    let [h0, h1] = meta.hdr_len.to_ne_bytes();
    let [g0, g1] = meta.gso_size.to_ne_bytes();
    let [s0, s1] = meta.csum_start.to_ne_bytes();
    let [o0, o1] = meta.csum_offset.to_ne_bytes();
    [
        meta.flags & (FrameMeta::NEEDS_CSUM | FrameMeta::DATA_VALID),
        meta.gso_type,
        h0,
        h1,
        g0,
        g1,
        s0,
        s1,
        o0,
        o1,
        0,
        0,
    ]
}

fn from_header(header: &[u8; HEADER]) -> FrameMeta {
    let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, _, _] = *header;
    FrameMeta {
        flags: flags & (FrameMeta::NEEDS_CSUM | FrameMeta::DATA_VALID),
        gso_type,
        hdr_len: u16::from_ne_bytes([h0, h1]),
        gso_size: u16::from_ne_bytes([g0, g1]),
        csum_start: u16::from_ne_bytes([s0, s1]),
        csum_offset: u16::from_ne_bytes([o0, o1]),
    }
}

impl Port for TapPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        if self.down.is_some() {
            self.counters.dropped("no_carrier");
            return Err(TxError::Down);
        }
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
            self.counters.dropped("bad_length");
            return Err(TxError::TooLong);
        }
        let header = to_header(&frame.meta);
        let written = if frame.parts().len() <= MAX_PIECES {
            sys::write(self.tap.as_fd(), &header, frame.parts())
        } else {
            self.joined.clear();
            frame.append_to(&mut self.joined);
            let parts = [VolatileSlice::from(&mut self.joined[..])];
            sys::write(self.tap.as_fd(), &header, &parts)
        };
        match written {
            Ok(_) => {
                self.counters.sent(frame.len());
                return Ok(());
            }
            // Nobody would tell us when there is room again, and the host's queue is not ours to
            // wait for: a wire would have lost the frame too.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => self.counters.dropped("host_full"),
            Err(Errno::IO) => self.counters.dropped("interface_not_up"),
            Err(Errno::INVAL | Errno::FAULT) => self.counters.dropped("refused_by_host"),
            Err(error) => {
                self.go_down(error);
                self.counters.dropped("no_carrier");
            }
        }
        Err(TxError::Down)
    }

    fn flush(&mut self) {}

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        self.held = false;
        let mut count = 0;
        while count < budget && self.read() {
            let pending = self.buf.get_mut(..self.pending).unwrap_or_default();
            let Some((header, bytes)) = pending.split_first_chunk_mut::<HEADER>() else {
                break;
            };
            let meta = from_header(header);
            let len = bytes.len();
            if meta.check(len).is_err() {
                self.counters.dropped("bad_offloads");
            } else if sink.frame(&Frame::new(meta, &[VolatileSlice::from(bytes)])) == Rx::Taken {
                self.counters.received(len);
            } else {
                self.held = true;
                break;
            }
            self.pending = 0;
            count += 1;
        }
        count
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn arm(&mut self) -> bool {
        if self.down.is_some() || self.held {
            return false;
        }
        let mut fds = [PollFd::new(&self.tap, PollFlags::IN)];
        let waiting = self.pending > 0
            || (poll(&mut fds, Some(&Timespec::default())).is_ok()
                && fds.iter().all(|fd| fd.revents().contains(PollFlags::IN)));
        if !waiting {
            self.armed = true;
            self.watch(EventFlags::IN);
        }
        waiting
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.watch(EventFlags::empty());
        }
    }

    fn carrier(&self) -> bool {
        self.down.is_none()
    }

    fn down_reason(&self) -> Option<String> {
        self.down.clone()
    }

    fn stats(&self) -> LinkStats {
        self.counters.stats(&self.name)
    }

    fn accepts_offloads(&self) -> bool {
        true
    }

    fn accepts_udp_segments(&self) -> bool {
        self.uso
    }
}

#[cfg(test)]
mod tests;
