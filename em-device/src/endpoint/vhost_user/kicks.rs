//! What a connection's thread waits for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// What woke the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A notification for a ring.
    Kick(u16),
    /// Something on the socket, or on the listening one.
    Socket,
    /// The function is to end.
    Stop,
}

impl Event {
    fn to_bits(self) -> u64 {
        match self {
            Self::Kick(ring) => u64::from(ring),
            Self::Socket => 1 << 32,
            Self::Stop => 2 << 32,
        }
    }

    fn from_bits(bits: u64) -> Self {
        match bits >> 32 {
            0 => Self::Kick(bits as u16),
            1 => Self::Socket,
            _ => Self::Stop,
        }
    }
}

/// Descriptors that are waited for.
///
/// Notifications are waited for by edges and never read: a write to an eventfd wakes whatever it counts already, a
/// descriptor that is something else cannot make the thread spin, and one that blocks cannot hold it.
#[derive(Debug)]
pub(super) struct Kicks {
    epoll: OwnedFd,
}

impl Kicks {
    /// Nothing is waited for.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        })
    }

    /// Waits for a descriptor as long as there is something to read.
    pub(super) fn watch(&self, fd: impl AsFd, event: Event) -> io::Result<()> {
        let data = epoll::EventData::new_u64(event.to_bits());
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// Waits for notifications. One that came before counts.
    pub(super) fn add(&self, fd: impl AsFd, ring: u16) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(Event::Kick(ring).to_bits());
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, data, flags)
    }

    /// Waits for it no longer. Has to come before it is closed: the front end has copies.
    pub(super) fn remove(&self, fd: impl AsFd) {
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            log::error!("a descriptor is waited for in vain: {error}");
        }
    }

    /// Waits until something happens, or until `timeout`; what it was is in `events`.
    pub(super) fn wait(
        &self,
        events: &mut Vec<Event>,
        timeout: Option<&Timespec>,
    ) -> io::Result<()> {
        let mut raw: Vec<epoll::Event> = Vec::with_capacity(16);
        events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut raw), timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        events.extend(raw.iter().map(|event| Event::from_bits(event.data.u64())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    const NOW: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };

    fn seen(kicks: &Kicks) -> Vec<Event> {
        let mut events = Vec::new();
        kicks.wait(&mut events, Some(&NOW)).unwrap();
        events
    }

    fn kick(fd: &OwnedFd) {
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    }

    #[test]
    fn each_notification_is_seen_once_also_one_that_came_before() {
        let kicks = Kicks::new().unwrap();
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        kick(&fd);
        kicks.add(&fd, 7).unwrap();
        assert_eq!(seen(&kicks), [Event::Kick(7)]);
        assert_eq!(seen(&kicks), []);
        kick(&fd);
        assert_eq!(seen(&kicks), [Event::Kick(7)]);
        assert_eq!(seen(&kicks), []);
    }

    #[test]
    fn a_descriptor_that_was_removed_is_not_seen_through_its_copies() {
        let kicks = Kicks::new().unwrap();
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        let copy = fd.try_clone().unwrap();
        kicks.add(&fd, 0).unwrap();
        kicks.remove(&fd);
        drop(fd);
        kick(&copy);
        assert_eq!(seen(&kicks), []);
    }

    #[test]
    fn files_are_refused_and_a_pipe_at_its_end_is_no_busy_loop() {
        let kicks = Kicks::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        assert_eq!(kicks.add(&file, 0), Err(Errno::PERM));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        kicks.add(&reader, 1).unwrap();
        drop(writer);
        assert_eq!(seen(&kicks), [Event::Kick(1)]);
        assert_eq!(seen(&kicks), []);
    }
}
