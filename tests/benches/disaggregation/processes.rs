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
    let of = |pid: &u32| fields(*pid, &["Pss:"]);
    pids.iter().map(of).sum()
}

/// KiB that nobody else has mapped.
pub(crate) fn private(pids: &[u32]) -> Outcome<u64> {
    let of = |pid: &u32| fields(*pid, &["Private_Clean:", "Private_Dirty:"]);
    pids.iter().map(of).sum()
}

fn fields(pid: u32, names: &[&str]) -> Outcome<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let mut sum = 0;
    for name in names {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        sum += kib.ok_or_else(|| format!("process {pid}: no {name} in smaps_rollup"))?;
    }
    Ok(sum)
}
