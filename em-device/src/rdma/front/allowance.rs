//! How much memory a driver's page lists may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of page lists that one function may hold: those of 128 GiB in pages of 4 KiB.
pub(crate) const MAX_LIST_BYTES: u64 = 256 << 20;
/// How much of the allowance is used.
#[derive(Debug, Clone, Default)]
pub(crate) struct Allowance(Arc<AtomicU64>);

impl Allowance {
    /// Takes bytes until the charge is dropped; `None`: there are not so many left.
    pub(crate) fn take(&self, bytes: u64) -> Option<Charge> {
        let used = self.0.load(Ordering::Relaxed);
        match used.checked_add(bytes) {
            Some(sum) if sum <= MAX_LIST_BYTES => self.0.store(sum, Ordering::Relaxed),
            _ => return None,
        }
        Some(Charge(self.0.clone(), bytes))
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A part of the allowance; an object holds it as long as it lives.
#[derive(Debug)]
pub(crate) struct Charge(Arc<AtomicU64>, u64);

impl Drop for Charge {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allowance_ends() {
        let allowance = Allowance::default();
        let charge = allowance.take(MAX_LIST_BYTES).unwrap();
        assert!(allowance.take(8).is_none());
        drop(charge);
        assert!(allowance.take(8).is_some());
    }
}
