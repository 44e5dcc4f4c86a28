//! A peer in another process: it dies, and descriptors are counted.
//!
//! One test in a file of its own process, because the count of descriptors is the process's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use m2m_fabric::local::{LocalListener, connect};
use m2m_fabric::proto::{Event, Reply, Request};
use m2m_fabric::{Fabric, FabricError, Handler};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const CHILD_SOCKET: &str = "M2M_TEST_CHILD_SOCKET";

/// Answers nothing: every access and request takes forever.
struct Stuck;

impl Handler for Stuck {
    fn request(&self, request: Request, _: Vec<OwnedFd>) -> Reply {
        if request == Request::Shutdown {
            forever();
        }
        Reply::Ok
    }
    fn event(&self, _: Event) {}
    fn register_read(&self, _: u32) -> u32 {
        forever()
    }
    fn register_write(&self, _: u32, _: u8, _: u32) -> u32 {
        forever()
    }
    fn down(&self, _: &FabricError) {}
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

/// Reports the end.
struct Watcher(Sender<String>);

impl Handler for Watcher {
    fn request(&self, _: Request, _: Vec<OwnedFd>) -> Reply {
        Reply::Ok
    }
    fn event(&self, _: Event) {}
    fn register_read(&self, address: u32) -> u32 {
        address
    }
    fn register_write(&self, _: u32, _: u8, value: u32) -> u32 {
        value
    }
    fn down(&self, reason: &FabricError) {
        self.0.send(reason.to_string()).unwrap();
    }
}

/// The child: connects and is stuck. Does nothing when run as a test of its own.
#[test]
fn child() {
    if let Some(path) = std::env::var_os(CHILD_SOCKET) {
        let _fabric = connect(path, Arc::new(Stuck)).unwrap();
        forever();
    }
}

fn spawn_child(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD_SOCKET, path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn watched(listener: &LocalListener, down: &Sender<String>) -> Arc<dyn Fabric> {
    let pending = listener.accept().unwrap();
    pending.start(Arc::new(Watcher(down.clone()))).unwrap()
}

#[test]
fn killed_peer_fails_waiting_calls_and_a_thousand_connections_leak_nothing() {
    if std::env::var_os(CHILD_SOCKET).is_some() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m2m.sock");
    let listener = LocalListener::bind(&path).unwrap();

    let mut child = spawn_child(&path);
    let (down, downs) = channel();
    let om = watched(&listener, &down);
    assert_eq!(om.peer().pid, child.id());
    assert_eq!(om.call(Request::Stats, &[], LONG).unwrap(), Reply::Ok);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| om.call(Request::Shutdown, &[], LONG));
        let write = scope.spawn(|| om.registers().write(0, 0xf, 1, LONG));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!call.is_finished() && !write.is_finished());
        child.kill().unwrap();
        assert!(matches!(call.join().unwrap(), Err(FabricError::Down(_))));
        assert!(matches!(write.join().unwrap(), Err(FabricError::Down(_))));
    });
    child.wait().unwrap();
    drop(om);
    drop(down);
    let downs: Vec<_> = downs.iter().collect();
    assert_eq!(downs, ["the peer closed the connection"]);

    // The other test of this file may end a thread while we count.
    let before = (open_fds(), threads());
    let (down, downs) = channel();
    for n in 0..1000 {
        let em = std::thread::scope(|scope| {
            let em = scope.spawn(|| connect(&path, Arc::new(Watcher(down.clone()))).unwrap());
            let om = watched(&listener, &down);
            let em = em.join().unwrap();
            assert_eq!(om.registers().read(4 * n, LONG).unwrap(), 4 * n);
            if n % 2 == 0 {
                om.close();
            }
            em
        });
        drop(em);
    }
    drop(down);
    assert_eq!(downs.iter().count(), 2000);
    assert_eq!(open_fds(), before.0);
    assert!(threads() <= before.1);
}
