//! Which pages of guest memory the device wrote, for a VMM that copies the memory of a running guest elsewhere.

use dot_iommu::HostMapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use vm_memory::VolatileMemory;

/// Bytes of a page of the log.
const PAGE: u64 = 4096;

/// A bit for each page of 4096 bytes of guest addresses, shared with who reads and clears it.
#[derive(Debug, Clone)]
pub struct DirtyLog(Arc<HostMapping>);

impl DirtyLog {
    /// On memory that is the log from its first byte on. What lies behind it is not logged.
    pub fn new(mapping: Arc<HostMapping>) -> Self {
        Self(mapping)
    }

    /// `len` bytes from `addr` on were written. Comes after the write: who finds the bit copies what it is about.
    pub fn mark(&self, addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|span| addr.saturating_add(span)) else {
            return;
        };
        let bits = self.0.as_volatile_slice();
        // Not more than there are: a buffer of the driver's may claim to be very long.
        let end = (last / PAGE).min(self.0.len().saturating_mul(8).saturating_sub(1));
        for page in addr / PAGE..=end {
            let byte = usize::try_from(page / 8).ok();
            if let Some(byte) = byte.and_then(|at| bits.get_atomic_ref::<AtomicU8>(at).ok()) {
                byte.fetch_or(1 << (page % 8), Ordering::AcqRel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(writes: &[(u64, u64)]) -> Vec<u8> {
        let mapping = HostMapping::anonymous(4).unwrap();
        let log = DirtyLog::new(mapping.clone());
        writes.iter().for_each(|(addr, len)| log.mark(*addr, *len));
        let mut bytes = vec![0; 4];
        mapping.as_volatile_slice().copy_to(&mut bytes[..]);
        bytes
    }

    #[test]
    fn every_page_that_a_write_touches_is_marked_and_no_other() {
        assert_eq!(marked(&[(0, 1)]), [1, 0, 0, 0]);
        assert_eq!(marked(&[(4095, 2)]), [3, 0, 0, 0]);
        assert_eq!(marked(&[(0x7000, 0x1001)]), [0x80, 1, 0, 0]);
        assert_eq!(marked(&[(0x3000, 4096), (0x1f_ffff, 1)]), [8, 0, 0, 0]);
        assert_eq!(marked(&[(0x1000, 0)]), [0; 4]);
    }

    #[test]
    fn what_is_behind_the_log_is_left_out() {
        assert_eq!(marked(&[(31 * 4096, 5 * 4096)]), [0, 0, 0, 0x80]);
        assert_eq!(
            marked(&[(32 * 4096, 1), (u64::MAX, 1), (u64::MAX - 1, u64::MAX)]),
            [0; 4]
        );
        assert_eq!(marked(&[(0, u64::MAX)]), [0xff; 4]);
    }
}
