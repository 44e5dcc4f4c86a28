//! Interrupts: eventfds that the client gave, one per MSI-X vector.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use rustix::io::Errno;

/// Vectors of one function. The server installs eventfds; any thread triggers without a lock.
#[derive(Debug)]
pub struct Irqs {
    vectors: Box<[Vector]>,
}

#[derive(Debug, Default)]
struct Vector {
    fd: ArcSwapOption<OwnedFd>,
    raised: AtomicU64,
}

impl Irqs {
    /// `vectors` without eventfds.
    pub fn new(vectors: u16) -> Arc<Self> {
        Arc::new(Self {
            vectors: (0..vectors).map(|_| Vector::default()).collect(),
        })
    }

    /// How many vectors there are.
    pub fn count(&self) -> u16 {
        self.vectors.len() as u16
    }

    /// Raises a vector; false when it has no eventfd or does not exist. Masking is the client's matter: it
    /// keeps the pending bit.
    pub fn trigger(&self, vector: u16) -> bool {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return false;
        };
        let fd = vector.fd.load();
        let Some(fd) = fd.as_ref() else {
            return false;
        };
        vector.raised.fetch_add(1, Ordering::Relaxed);
        // A full counter (EAGAIN) already wakes the client; nothing is lost.
        matches!(
            rustix::io::write(fd.as_ref(), &1u64.to_ne_bytes()),
            Ok(_) | Err(Errno::AGAIN)
        )
    }

    /// Whether a vector has an eventfd.
    pub fn is_armed(&self, vector: u16) -> bool {
        self.vectors
            .get(usize::from(vector))
            .is_some_and(|v| v.fd.load().is_some())
    }

    /// Times a vector was raised.
    pub fn raised(&self, vector: u16) -> u64 {
        self.vectors
            .get(usize::from(vector))
            .map_or(0, |v| v.raised.load(Ordering::Relaxed))
    }

    /// Installs or removes a vector's eventfd. It is made non-blocking, so that a client that never reads cannot
    /// hold a worker. False when the vector does not exist.
    ///
    /// # Errors
    /// What the system said.
    pub fn set(&self, vector: u16, fd: Option<OwnedFd>) -> io::Result<bool> {
        let Some(slot) = self.vectors.get(usize::from(vector)) else {
            return Ok(false);
        };
        if let Some(fd) = &fd {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        slot.fd.store(fd.map(Arc::new));
        Ok(true)
    }

    /// Removes all eventfds.
    pub fn clear(&self) {
        for vector in &self.vectors {
            vector.fd.store(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn a_triggered_vector_counts_in_its_eventfd() {
        let irqs = Irqs::new(2);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        assert!(irqs.set(1, Some(fd.try_clone().unwrap())).unwrap());
        assert!(irqs.trigger(1) && irqs.trigger(1));
        let mut count = [0; 8];
        rustix::io::read(&fd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
        assert_eq!(irqs.raised(1), 2);
    }

    #[test]
    fn vectors_without_an_eventfd_or_out_of_range_are_not_raised() {
        let irqs = Irqs::new(1);
        assert!(!irqs.trigger(0) && !irqs.trigger(1) && !irqs.is_armed(0));
        assert!(!irqs.set(7, None).unwrap());
    }

    #[test]
    fn a_saturated_eventfd_does_not_block() {
        let irqs = Irqs::new(1);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        irqs.set(0, Some(fd.try_clone().unwrap())).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(irqs.trigger(0));
    }
}
