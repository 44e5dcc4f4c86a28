//! Register accesses as messages.

use super::outbox::Outbox;
use crate::error::FabricError;
use crate::fabric::{Handler, RegisterPort};
use crate::link::Link;
use crate::registers::port::{POST_PATIENCE, check};
use crate::wire::{Access, Frame};
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Accesses of one direction that may wait for their completion, posted ones among them.
pub(super) const WINDOW: usize = 64;

/// The peer's registers.
#[derive(Debug)]
pub(super) struct Port {
    outbox: Arc<Outbox>,
    link: Arc<Link>,
    state: Mutex<State>,
    /// An access was completed, or none will be any more.
    room: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next_id: u32,
    /// Who waits for the completion, if anybody does. One that gave up keeps its place until the peer is done.
    waiting: BTreeMap<u32, Option<SyncSender<u32>>>,
    ended: bool,
}

impl Port {
    pub(super) fn new(outbox: Arc<Outbox>, link: Arc<Link>) -> Self {
        Self {
            outbox,
            link,
            state: Mutex::default(),
            room: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a completion to its access.
    ///
    /// # Errors
    /// The peer completes what nobody asked for.
    pub(super) fn complete(&self, id: u32, value: u32) -> Result<(), FabricError> {
        let waiting = self.lock().waiting.remove(&id);
        let waiting = waiting.ok_or(FabricError::Protocol("a completion without an access"))?;
        self.room.notify_one();
        if let Some(sender) = waiting {
            // The caller may have given up just now.
            let _ = sender.try_send(value);
        }
        Ok(())
    }

    /// Fails all accesses, now and later.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.waiting.clear();
        drop(state);
        self.room.notify_all();
    }

    /// Sends an access as soon as the peer may have one more; `None` when that takes too long.
    fn send(
        &self,
        access: Access,
        answer: Option<SyncSender<u32>>,
        deadline: Option<Instant>,
    ) -> Result<Option<()>, FabricError> {
        let mut state = self.lock();
        while state.waiting.len() >= WINDOW && !state.ended {
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.room.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ended {
            self.link.check()?;
            return Err(FabricError::Closed);
        }
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        let frame = Frame::Register(id, access).emit()?;
        // Under the lock, so that accesses are sent in the order of their ids.
        self.outbox
            .push_bounded(frame)
            .or_else(|error| self.link.check().and(Err(error)))?;
        state.waiting.insert(id, answer);
        Ok(Some(()))
    }

    fn perform(&self, access: Access, timeout: Duration) -> Result<u32, FabricError> {
        let deadline = Instant::now().checked_add(timeout);
        let late = || FabricError::Timeout(timeout);
        let (sender, answer): (_, Receiver<u32>) = sync_channel(1);
        self.send(access, Some(sender), deadline)?
            .ok_or_else(late)?;
        let left = deadline.map_or(timeout, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        match answer.recv_timeout(left) {
            Ok(value) => Ok(value),
            Err(RecvTimeoutError::Timeout) => Err(late()),
            Err(RecvTimeoutError::Disconnected) => {
                self.link.check()?;
                Err(FabricError::Closed)
            }
        }
    }
}

impl RegisterPort for Port {
    fn write(
        &self,
        address: u32,
        byte_enable: u8,
        value: u32,
        timeout: Duration,
    ) -> Result<u32, FabricError> {
        check(address, byte_enable)?;
        let access = Access::Write {
            address,
            byte_enable,
            value,
        };
        self.perform(access, timeout)
    }

    fn post(&self, address: u32, byte_enable: u8, value: u32) -> Result<(), FabricError> {
        check(address, byte_enable)?;
        let access = Access::Write {
            address,
            byte_enable,
            value,
        };
        let deadline = Instant::now().checked_add(POST_PATIENCE);
        self.send(access, None, deadline)?.ok_or(FabricError::Full)
    }

    fn read(&self, address: u32, timeout: Duration) -> Result<u32, FabricError> {
        check(address, 0)?;
        self.perform(Access::Read { address }, timeout)
    }
}

/// The peer's accesses that wait for the register thread.
#[derive(Debug, Default)]
pub(super) struct Accesses {
    state: Mutex<Queue>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(u32, Access)>,
    closed: bool,
}

impl Accesses {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an access; never blocks.
    ///
    /// # Errors
    /// The peer sent more than it may, or what is no access.
    pub(super) fn push(&self, id: u32, access: Access) -> Result<(), FabricError> {
        match access {
            Access::Read { address } => check(address, 0),
            Access::Write {
                address,
                byte_enable,
                ..
            } => check(address, byte_enable),
        }?;
        let mut queue = self.lock();
        if queue.waiting.len() >= WINDOW {
            return Err(FabricError::Overflow {
                what: "register accesses",
                max: WINDOW,
            });
        }
        queue.waiting.push_back((id, access));
        drop(queue);
        self.news.notify_one();
        Ok(())
    }

    /// Waits for the next access; `None` when closed.
    fn pop(&self) -> Option<(u32, Access)> {
        let mut queue = self.lock();
        while !queue.closed {
            if let Some(access) = queue.waiting.pop_front() {
                return Some(access);
            }
            let waited = self.news.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Drops what waits; nothing is answered any more.
    pub(super) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        queue.waiting.clear();
        drop(queue);
        self.news.notify_all();
    }

    /// Answers accesses in their order until it is closed; each completion waits for room for `patience` at most.
    ///
    /// # Errors
    /// The peer does not take its completions.
    pub(super) fn serve(
        &self,
        handler: &dyn Handler,
        outbox: &Outbox,
        patience: Duration,
    ) -> Result<(), FabricError> {
        while let Some((id, access)) = self.pop() {
            let value = match access {
                Access::Read { address } => handler.register_read(address),
                Access::Write {
                    address,
                    byte_enable,
                    value,
                } => handler.register_write(address, byte_enable, value),
            };
            let frame = Frame::Completion(id, value).emit()?;
            outbox.push(frame, Some(Instant::now() + patience))?;
        }
        Ok(())
    }
}
