//! What processes take, as /proc says.

use crate::figures::Outcome;
use std::time::Duration;

/// CPU time of all threads of some processes until now.
pub(crate) fn cpu(pids: &[u32]) -> Outcome<Duration> {
    let mut total = 0;
    for pid in pids {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may end meanwhile.
            let text = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
            let run = text.split(' ').next().and_then(|n| n.parse::<u64>().ok());
            total += run.unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(total))
}

/// KiB of some processes together; a page that n processes share is 1/n in each.
pub(crate) fn pss(pids: &[u32]) -> Outcome<u64> {
    let of = |pid: &u32| field(*pid, "Pss:");
    pids.iter().map(of).sum()
}

/// KiB as each process alone has them: shared text counts in every one.
pub(crate) fn rss(pids: &[u32]) -> Outcome<u64> {
    let of = |pid: &u32| field(*pid, "Rss:");
    pids.iter().map(of).sum()
}

/// KiB that they wrote and nobody else has mapped: no text, whoever else runs the program.
pub(crate) fn written(pids: &[u32]) -> Outcome<u64> {
    let of = |pid: &u32| field(*pid, "Private_Dirty:");
    pids.iter().map(of).sum()
}

fn field(pid: u32, name: &str) -> Outcome<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    Ok(kib.ok_or_else(|| format!("process {pid}: no {name} in smaps_rollup"))?)
}
