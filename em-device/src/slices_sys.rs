//! How soon the kernel's scheduler lets a thread run that was woken.
#![allow(unsafe_code)] // sched_getattr(2) and sched_setattr(2) have no wrapper

use std::io;
use std::time::Duration;

/// What the data path asks for: the shortest that the kernel grants.
pub const SHORT: Duration = Duration::from_micros(100);

/// Asks for slices of this length for the calling thread and all that it will start. Before a thread of ordinary
/// policy that runs, one with a shorter slice goes first when it wakes, and gives way again sooner: the same share of
/// the processor in smaller pieces. Needs no privilege.
///
/// Linux ≥ 6.12 (`sched_attr::sched_runtime` of `SCHED_OTHER`, 0.1 to 100 ms); older kernels ignore it.
///
/// # Errors
/// What the kernel or a seccomp filter says.
pub fn ask_for_slices(slice: Duration) -> io::Result<()> {
    let mut attributes = attributes()?;
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        // Somebody chose another policy for this process; the slice is not ours to say then.
        return Ok(());
    }
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads `size` bytes of the structure, which is that long.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    check(result)
}

/// Those of the calling thread.
fn attributes() -> io::Result<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: plain numbers, for which all zeroes are valid.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes to the structure, which is that long.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    check(result).map(|()| attributes)
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_priority_and_its_children_have_its_slice() {
        // A thread of its own: what it asks for must not meet other tests.
        let seen = std::thread::spawn(|| {
            let before = attributes().unwrap();
            ask_for_slices(SHORT).unwrap();
            let child = std::thread::spawn(|| attributes().unwrap()).join().unwrap();
            (before, attributes().unwrap(), child)
        });
        let (before, after, child) = seen.join().unwrap();
        assert_eq!(after.sched_policy, before.sched_policy);
        assert_eq!(after.sched_nice, before.sched_nice);
        // A kernel that knows no slices says zero before and after.
        let expected = if before.sched_runtime == 0 {
            0
        } else {
            100_000
        };
        assert_eq!(after.sched_runtime, expected);
        assert_eq!(child.sched_runtime, expected);
    }
}
