//! The answering side of a ring.

use super::ring::{self, Access, Corrupt, Server, Slots};
use super::spin::Spin;
use crate::error::FabricError;
use crate::fabric::Handler;
use crate::link::Link;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest sleep before the server looks whether the connection still is up. Teardown wakes it; this
/// is for a wake-up that came just before the sleep.
const SLICE: Duration = Duration::from_millis(250);

/// Answers register accesses of the peer on the thread that calls [`run`](Self::run).
#[derive(Debug)]
pub(crate) struct RegisterServer<S> {
    slots: S,
    waits_for: AtomicU64,
}

impl<S: Slots> RegisterServer<S> {
    pub(crate) fn new(slots: S) -> Self {
        Self {
            slots,
            waits_for: AtomicU64::new(0),
        }
    }

    /// Makes the server look whether the connection still is up.
    pub(crate) fn rouse(&self) {
        ring::rouse(&self.slots, self.waits_for.load(Ordering::Relaxed));
    }

    /// Answers until the connection goes down. A violation of the ring's protocol takes it down.
    pub(crate) fn run(&self, handler: &dyn Handler, link: &Link) {
        if let Err(Corrupt(what)) = self.serve(handler, link) {
            link.fail(FabricError::Window(what));
        }
    }

    fn serve(&self, handler: &dyn Handler, link: &Link) -> Result<(), Corrupt> {
        let mut server = Server::default();
        let mut spin = Spin::new();
        loop {
            let Some(access) = self.next(&server, &mut spin, link)? else {
                return Ok(());
            };
            let completion = match access {
                Access::Read { address } => handler.register_read(address),
                Access::Write {
                    address,
                    byte_enable,
                    value,
                }
                | Access::Post {
                    address,
                    byte_enable,
                    value,
                } => handler.register_write(address, byte_enable, value),
            };
            server.complete(&self.slots, completion)?;
        }
    }

    /// The next access, `None` when the connection is down.
    fn next(
        &self,
        server: &Server,
        spin: &mut Spin,
        link: &Link,
    ) -> Result<Option<Access>, Corrupt> {
        // A peer that always has another access ready must not keep the thread of a closed
        // connection alive.
        if link.check().is_err() {
            return Ok(None);
        }
        if let Some(access) = spin.until(|| server.take(&self.slots).transpose()) {
            return access.map(Some);
        }
        self.waits_for.store(server.head(), Ordering::Relaxed);
        loop {
            if let Some(access) = server.take(&self.slots)? {
                return Ok(Some(access));
            }
            if link.check().is_err() {
                return Ok(None);
            }
            server.wait(&self.slots, SLICE);
        }
    }
}
