//! The requesting side of a ring: turns, waiting, deadlines.

use super::ring::{self, Access, Requester, Slots, Submitted};
use super::spin::Spin;
use crate::error::FabricError;
use crate::fabric::RegisterPort;
use crate::link::Link;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a posted write waits for room.
pub(crate) const POST_PATIENCE: Duration = Duration::from_millis(100);
/// Longest sleep before the requester looks whether the connection still is up. Teardown wakes it;
/// this is for a wake-up that came just before the sleep.
const SLICE: Duration = Duration::from_millis(20);

/// What only the caller whose turn it is may touch.
#[derive(Debug)]
struct Turn {
    requester: Requester,
    spin: Spin,
}

/// The peer's registers, through a ring.
#[derive(Debug)]
pub(crate) struct Port<S> {
    slots: S,
    link: Arc<Link>,
    turn: Mutex<Option<Turn>>,
    next_turn: Condvar,
    waits_for: AtomicU64,
}

impl<S: Slots> Port<S> {
    pub(crate) fn new(slots: S, link: Arc<Link>) -> Self {
        Self {
            slots,
            link,
            turn: Mutex::new(Some(Turn {
                requester: Requester::default(),
                spin: Spin::new(),
            })),
            next_turn: Condvar::new(),
            waits_for: AtomicU64::new(0),
        }
    }

    /// Makes a waiting caller look whether the connection still is up.
    pub(crate) fn rouse(&self) {
        ring::rouse(&self.slots, self.waits_for.load(Ordering::Relaxed));
        self.next_turn.notify_all();
    }

    /// One access from submission to completion; `late` is the error when the deadline passes.
    fn access(
        &self,
        access: Access,
        timeout: Duration,
        late: FabricError,
    ) -> Result<u32, FabricError> {
        let deadline = Instant::now().checked_add(timeout);
        let Some(mut turn) = self.take_turn(deadline)? else {
            return Err(late);
        };
        let result = self.perform(&mut turn, access, deadline);
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = Some(turn);
        self.next_turn.notify_one();
        match result {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(late),
            Err(error) => Err(error),
        }
    }

    /// Waits for this caller's turn; a lock held during the whole access would have no deadline.
    fn take_turn(&self, deadline: Option<Instant>) -> Result<Option<Turn>, FabricError> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            self.link.check()?;
            if let Some(mine) = turn.take() {
                return Ok(Some(mine));
            }
            let Some(slice) = slice(deadline) else {
                return Ok(None);
            };
            turn = self
                .next_turn
                .wait_timeout(turn, slice)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn perform(
        &self,
        turn: &mut Turn,
        access: Access,
        deadline: Option<Instant>,
    ) -> Result<Option<u32>, FabricError> {
        let position = loop {
            match turn.requester.submit(&self.slots, access) {
                Ok(Submitted::At(position)) => break position,
                Ok(Submitted::Full(last)) => {
                    if self.wait(&mut turn.spin, last, deadline)?.is_none() {
                        return Ok(None);
                    }
                }
                Err(corrupt) => return Err(self.fail(corrupt)),
            }
        };
        if matches!(access, Access::Post { .. }) {
            return Ok(Some(0));
        }
        self.wait(&mut turn.spin, position, deadline)
    }

    fn wait(
        &self,
        spin: &mut Spin,
        position: u64,
        deadline: Option<Instant>,
    ) -> Result<Option<u32>, FabricError> {
        let ready = || ring::completion(&self.slots, position).transpose();
        if let Some(done) = spin.until(ready) {
            return done.map(Some).map_err(|corrupt| self.fail(corrupt));
        }
        self.waits_for.store(position, Ordering::Relaxed);
        loop {
            if let Some(done) = ready() {
                return done.map(Some).map_err(|corrupt| self.fail(corrupt));
            }
            self.link.check()?;
            let Some(slice) = slice(deadline) else {
                return Ok(None);
            };
            ring::wait_for_completion(&self.slots, position, slice);
        }
    }

    fn fail(&self, corrupt: ring::Corrupt) -> FabricError {
        self.link.fail(FabricError::Window(corrupt.0));
        FabricError::Window(corrupt.0)
    }
}

/// How long to sleep at most; `None` when the deadline has passed.
fn slice(deadline: Option<Instant>) -> Option<Duration> {
    let Some(deadline) = deadline else {
        return Some(SLICE);
    };
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.min(SLICE))
}

/// Whether there is such an access.
pub(crate) fn check(address: u32, byte_enable: u8) -> Result<(), FabricError> {
    if address % 4 == 0 && byte_enable <= 0xf {
        Ok(())
    } else {
        Err(FabricError::Access {
            address,
            byte_enable,
        })
    }
}

impl<S: Slots + Send + Sync> RegisterPort for Port<S> {
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
        self.access(access, timeout, FabricError::Timeout(timeout))
    }

    fn post(&self, address: u32, byte_enable: u8, value: u32) -> Result<(), FabricError> {
        check(address, byte_enable)?;
        let access = Access::Post {
            address,
            byte_enable,
            value,
        };
        self.access(access, POST_PATIENCE, FabricError::Full)
            .map(drop)
    }

    fn read(&self, address: u32, timeout: Duration) -> Result<u32, FabricError> {
        check(address, 0)?;
        let access = Access::Read { address };
        self.access(access, timeout, FabricError::Timeout(timeout))
    }
}
