//! A TAP interface of the host, with offloads: the host's network stack is the peer.

mod ioctl;

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use m2m_fabric::proto::LinkStats;
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::counters::Counters;
use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, FrameMeta, MAX_FRAME, MIN_FRAME};
use crate::net::header::{self, HEADER_BYTES};

/// Why a TAP interface cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// The name is not one.
    #[error("`{0}` is no interface name; 1 to 15 bytes without `/` and spaces are")]
    Name(String),
    /// No TUN driver.
    #[error("cannot open /dev/net/tun: {0}; is the module `tun` loaded?")]
    Device(#[source] std::io::Error),
    /// The kernel refused the interface.
    #[error("cannot use the TAP interface {name}: {why}")]
    Attach {
        /// Its name.
        name: String,
        /// What to do about it.
        why: String,
    },
}

/// One queue of a TAP interface. The interface is made when it does not exist, and then goes with the port.
#[derive(Debug)]
pub struct TapPort {
    name: String,
    file: File,
    /// What was read and not taken yet: a header and a frame.
    waiting: Option<usize>,
    held: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    counters: Counters,
}

impl TapPort {
    /// Attaches to the interface `name`.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let bad = |c: char| c == '/' || c.is_whitespace() || c == '%';
        if name.is_empty() || name.len() > 15 || name.contains(bad) {
            return Err(TapError::Name(name.into()));
        }
        let file = File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .map_err(TapError::Device)?;
        ioctl::attach(&file, name, HEADER_BYTES).map_err(|e| TapError::Attach {
            name: name.into(),
            why: match e.raw_os_error() {
                Some(libc::EPERM) => "not permitted; run as root, or give the interface to this user (ip tuntap add … user)".into(),
                Some(libc::EBUSY) => "it is in use by another program".into(),
                Some(libc::EINVAL) => "an interface of that name exists and is no TAP with these settings".into(),
                _ => e.to_string(),
            },
        })?;
        rustix::io::ioctl_fionbio(&file, true).map_err(|e| TapError::Attach {
            name: name.into(),
            why: e.to_string(),
        })?;
        Ok(Self {
            name: format!("tap {name}"),
            file,
            waiting: None,
            held: false,
            input: vec![0; HEADER_BYTES + MAX_FRAME],
            output: Vec::new(),
            counters: Counters::default(),
        })
    }

    /// Reads the next frame when none waits.
    fn fill(&mut self) -> bool {
        while self.waiting.is_none() {
            match self.file.read(&mut self.input) {
                Ok(n) if n >= HEADER_BYTES + MIN_FRAME => self.waiting = Some(n),
                Ok(_) => self.counters.dropped("bad_length"),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Port for TapPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
            self.counters.dropped("bad_length");
            return Err(TxError::TooLong);
        }
        self.output.clear();
        frame.append_to(&mut self.output);
        let head = header::emit(&frame.meta, 0);
        match (&self.file).write_vectored(&[IoSlice::new(&head), IoSlice::new(&self.output)]) {
            Ok(_) => {
                self.counters.sent(frame.len());
                Ok(())
            }
            // The kernel refuses what its stack cannot take; so would a cable.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                self.counters.dropped("refused");
                Err(TxError::TooLong)
            }
            // A host interface that is down (EIO) or congested does not hold up the guest.
            Err(_) => {
                self.counters.dropped("interface_down");
                Err(TxError::Down)
            }
        }
    }

    fn flush(&mut self) {}

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        self.held = false;
        let mut count = 0;
        while count < budget && self.fill() {
            let Some((head, frame)) = self
                .waiting
                .and_then(|n| self.input.get_mut(..n))
                .and_then(|bytes| bytes.split_first_chunk_mut::<HEADER_BYTES>())
            else {
                break;
            };
            let mut meta = header::parse(head);
            meta.flags = head[0] & (FrameMeta::NEEDS_CSUM | FrameMeta::DATA_VALID);
            if meta.check(frame.len()).is_err() {
                self.counters.dropped("bad_offload");
                self.waiting = None;
                count += 1;
                continue;
            }
            let len = frame.len();
            if sink.frame(&Frame::new(meta, &[VolatileSlice::from(frame)])) == Rx::Later {
                self.held = true;
                break;
            }
            self.waiting = None;
            self.counters.received(len);
            count += 1;
        }
        count
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        // While a frame is held back, more of them are no reason to wake.
        (!self.held).then(|| self.file.as_fd())
    }

    fn arm(&mut self) -> bool {
        !self.held && self.fill()
    }

    fn disarm(&mut self) {}

    fn carrier(&self) -> bool {
        true
    }

    fn stats(&self) -> LinkStats {
        self.counters.stats(&self.name)
    }

    fn accepts_offloads(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::shm::test_support::{send, take};
    use std::net::UdpSocket;
    use std::process::Command;
    use std::time::{Duration, Instant};

    fn ip(words: &str) {
        let done = Command::new("ip").args(words.split(' ')).status().unwrap();
        assert!(done.success(), "ip {words}");
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for name in ["", "a/b", "a b", "tap%d", "sixteen-bytes-is"] {
            assert!(
                matches!(TapPort::open(name), Err(TapError::Name(_))),
                "{name}"
            );
        }
    }

    #[test]
    fn frames_travel_between_the_port_and_the_hosts_stack() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("NOT RUN: making a TAP interface needs root");
            return;
        }
        let name = format!("ddt{}", std::process::id());
        let mut port = TapPort::open(&name).unwrap();
        let busy = TapPort::open(&name).unwrap_err().to_string();
        assert!(busy.contains("in use"), "{busy}");
        ip(&format!("link set {name} up"));
        ip(&format!("addr add 192.0.2.1/24 dev {name}"));
        ip(&format!(
            "neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev {name}"
        ));
        let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
        socket.send_to(b"to the guest", "192.0.2.2:9").unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let (meta, frame) = loop {
            assert!(
                Instant::now() < deadline,
                "the datagram comes out of the port"
            );
            let frames = take(&mut port, 1);
            if let Some(found) = frames
                .into_iter()
                .find(|(_, f)| f.ends_with(b"to the guest"))
            {
                break found;
            }
            port.arm();
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(
            meta.needs_csum(),
            "the host leaves the checksum to the port"
        );
        // The same datagram back: addresses and ports swapped keep the checksum's facts right.
        let mut back = frame.clone();
        back[..6].copy_from_slice(&frame[6..12]);
        back[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
        back[26..30].copy_from_slice(&frame[30..34]);
        back[30..34].copy_from_slice(&frame[26..30]);
        back[34..36].copy_from_slice(&frame[36..38]);
        back[36..38].copy_from_slice(&frame[34..36]);
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        send(&mut port, meta, &back).unwrap();
        let mut data = [0; 64];
        let n = socket.recv(&mut data).unwrap();
        assert_eq!(&data[..n], b"to the guest");
    }
}
