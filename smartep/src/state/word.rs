//! The words of the state memory.
//!
//! Each store is ordered behind all memory accesses before it, so that a process which is killed has done all stores up
//! to one in program order. A test can let any store be the last ([`kill`]).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

macro_rules! word {
    ($name:ident, $atomic:ty, $number:ty) => {
        #[repr(transparent)]
        #[derive(Debug)]
        pub(super) struct $name($atomic);

        impl $name {
            #[inline]
            pub(super) fn load(&self) -> $number {
                self.0.load(Ordering::Acquire)
            }

            #[inline]
            pub(super) fn store(&self, value: $number) {
                before_store();
                self.0.store(value, Ordering::Release);
            }
        }
    };
}

word!(Word32, AtomicU32, u32);
word!(Word64, AtomicU64, u64);

impl Word32 {
    /// Makes it at least `value`.
    pub(super) fn raise(&self, value: u32) {
        before_store();
        self.0.fetch_max(value, Ordering::AcqRel);
    }
}

#[cfg(not(test))]
#[inline(always)]
fn before_store() {}

#[cfg(test)]
use kill::before_store;

#[cfg(test)]
pub(super) mod kill {
    //! A process that is killed before its nth store.

    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local! {
        /// Stores that this thread has left, if they are counted.
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    struct Killed;

    pub(super) fn before_store() {
        LEFT.with(|left| match left.get() {
            None => {}
            Some(0) => resume_unwind(Box::new(Killed)),
            Some(n) => left.set(Some(n - 1)),
        });
    }

    /// Runs `act` until it has stored `stores` times; answers whether it came to its end.
    pub(in super::super) fn after(stores: usize, act: impl FnOnce()) -> bool {
        LEFT.set(Some(stores));
        let ended = catch_unwind(AssertUnwindSafe(act));
        LEFT.set(None);
        match ended {
            Ok(()) => true,
            Err(why) if why.is::<Killed>() => false,
            Err(why) => resume_unwind(why),
        }
    }
}
