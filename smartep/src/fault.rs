//! Named points at which a process ends itself on request, for tests of what comes after.
//!
//! The variable `DISTDPU_FAULT` is `NAME:N`: the process is killed the Nth time that it comes to the point `NAME`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

struct Fault {
    name: String,
    left: AtomicU64,
}

static FAULT: OnceLock<Option<Fault>> = OnceLock::new();

fn read() -> Option<Fault> {
    let text = std::env::var("DISTDPU_FAULT").ok()?;
    let (name, count) = text.split_once(':')?;
    let left = AtomicU64::new(count.parse().ok()?);
    Some(Fault {
        name: name.to_owned(),
        left,
    })
}

/// The process came to the point `name`.
pub fn point(name: &str) {
    if let Some(fault) = FAULT.get_or_init(read) {
        hit(fault, name);
    }
}

#[cold]
fn hit(fault: &Fault, name: &str) {
    if fault.name == name && fault.left.fetch_sub(1, Ordering::Relaxed) == 1 {
        // As abruptly as from outside: no destructor, no handler.
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        std::process::abort();
    }
}
