//! A process that is killed before its nth store to memory that outlives it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Stores that this thread has left, if they are counted.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

struct Killed;

/// Called before each such store.
pub(crate) fn before_store() {
    LEFT.with(|left| match left.get() {
        None => {}
        Some(0) => resume_unwind(Box::new(Killed)),
        Some(n) => left.set(Some(n - 1)),
    });
}

/// Runs `act` until it has stored `stores` times; answers whether it came to its end.
pub(crate) fn after(stores: usize, act: impl FnOnce()) -> bool {
    LEFT.set(Some(stores));
    let ended = catch_unwind(AssertUnwindSafe(act));
    LEFT.set(None);
    match ended {
        Ok(()) => true,
        Err(why) if why.is::<Killed>() => false,
        Err(why) => resume_unwind(why),
    }
}
