//! Two ends of a local connection in one process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use m2m_fabric::local::{LocalListener, connect};
use m2m_fabric::proto::{Event, HEARTBEAT_INTERVAL_MS, Hello, Reply, Request, VERSION};
use m2m_fabric::wire::{Frame, Greeting, WireError};
use m2m_fabric::{Fabric, FabricError, Handler};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

/// A module for tests: answers `Stats` by Ok, blocks in `Shutdown` until released, echoes names of
/// `Hello`, counts descriptors of `RemoveLink`.
#[derive(Default)]
struct Module {
    registers: Mutex<HashMap<u32, u32>>,
    events: Mutex<Vec<Event>>,
    downs: Mutex<Vec<String>>,
    down: Condvar,
    released: Mutex<bool>,
    release: Condvar,
}

impl Module {
    fn release(&self) {
        *self.released.lock().unwrap() = true;
        self.release.notify_all();
    }

    fn block(&self) {
        let mut released = self.released.lock().unwrap();
        while !*released {
            released = self.release.wait(released).unwrap();
        }
    }

    fn wait_down(&self) -> Vec<String> {
        let mut downs = self.downs.lock().unwrap();
        while downs.is_empty() {
            let (guard, timeout) = self.down.wait_timeout(downs, LONG).unwrap();
            assert!(!timeout.timed_out(), "down() was not called");
            downs = guard;
        }
        downs.clone()
    }
}

/// The register whose handler blocks until the module is released.
const SLOW: u32 = 0x1000;

impl Handler for Module {
    fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::Hello(hello) => Reply::Failed(hello.em),
            Request::RemoveLink { link } => Reply::Failed(format!("{link} {}", fds.len())),
            Request::Shutdown => {
                self.block();
                Reply::Ok
            }
            _ => Reply::Ok,
        }
    }

    fn event(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }

    fn register_read(&self, address: u32) -> u32 {
        if address == SLOW {
            self.block();
        }
        *self.registers.lock().unwrap().get(&address).unwrap_or(&0)
    }

    fn register_write(&self, address: u32, byte_enable: u8, value: u32) -> u32 {
        let mask = (0..4)
            .filter(|bit| byte_enable >> bit & 1 == 1)
            .fold(0, |mask, bit| mask | 0xff << (8 * bit));
        let mut registers = self.registers.lock().unwrap();
        let register = registers.entry(address).or_default();
        *register = *register & !mask | value & mask;
        !*register
    }

    fn down(&self, reason: &FabricError) {
        self.downs.lock().unwrap().push(reason.to_string());
        self.down.notify_all();
    }

    fn heartbeat(&self) -> (u64, bool) {
        (42, true)
    }
}

/// A listener and what it accepts, both ends started.
struct Pair {
    om: Arc<dyn Fabric>,
    em: Arc<dyn Fabric>,
    om_module: Arc<Module>,
    em_module: Arc<Module>,
    _dir: tempfile::TempDir,
}

fn socket_path(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("m2m.sock")
}

fn join(
    listener: &LocalListener,
    path: &Path,
    om: Arc<dyn Handler>,
    em: Arc<dyn Handler>,
) -> (Arc<dyn Fabric>, Arc<dyn Fabric>) {
    std::thread::scope(|scope| {
        let em = scope.spawn(|| connect(path, em).unwrap());
        let om = listener.accept().unwrap().start(om).unwrap();
        (om, em.join().unwrap())
    })
}

fn pair() -> Pair {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let (om_module, em_module) = (Arc::new(Module::default()), Arc::new(Module::default()));
    let (om, em) = join(&listener, &path, om_module.clone(), em_module.clone());
    Pair {
        om,
        em,
        om_module,
        em_module,
        _dir: dir,
    }
}

fn hello(name: &str) -> Request {
    Request::Hello(Hello {
        em: name.into(),
        pid: 0,
        program: String::new(),
        returns: false,
    })
}

/// A raw socket connected to `path`, to misbehave with.
fn raw(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn send(socket: &OwnedFd, bytes: &[u8]) {
    rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn both_sides_call_each_other_at_the_same_time() {
    let pair = pair();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            for fabric in [&pair.om, &pair.em] {
                scope.spawn(move || {
                    for n in 0..200 {
                        let name = format!("{thread}-{n}");
                        let reply = fabric.call(hello(&name), &[], LONG).unwrap();
                        assert_eq!(reply, Reply::Failed(name));
                    }
                });
            }
        }
    });
}

#[test]
fn descriptors_travel_with_a_request() {
    let pair = pair();
    let stdin = std::io::stdin();
    let fds = vec![stdin.as_fd(); 16];
    let request = Request::RemoveLink { link: 5 };
    let reply = pair.om.call(request.clone(), &fds, LONG).unwrap();
    assert_eq!(reply, Reply::Failed("5 16".into()));
    let fds = vec![stdin.as_fd(); 17];
    assert!(matches!(
        pair.om.call(request, &fds, LONG),
        Err(FabricError::TooManyFds { got: 17, max: 16 })
    ));
    assert!(pair.om.is_up());
}

#[test]
fn registers_work_both_ways_with_byte_enables() {
    let pair = pair();
    for (fabric, module) in [(&pair.em, &pair.om_module), (&pair.om, &pair.em_module)] {
        let registers = fabric.registers();
        assert_eq!(
            registers.write(8, 0xf, 0x1122_3344, LONG).unwrap(),
            !0x1122_3344
        );
        assert_eq!(
            registers.write(8, 0b0101, 0xaabb_ccdd, LONG).unwrap(),
            !0x11bb_33dd
        );
        registers.post(8, 0b1000, 0xee00_0000).unwrap();
        assert_eq!(registers.read(8, LONG).unwrap(), 0xeebb_33dd);
        assert_eq!(registers.read(12, LONG).unwrap(), 0);
        assert_eq!(module.registers.lock().unwrap().len(), 1);
    }
}

#[test]
fn register_access_that_does_not_exist_is_refused_here() {
    let pair = pair();
    let registers = pair.em.registers();
    assert!(matches!(
        registers.read(2, LONG),
        Err(FabricError::Access { address: 2, .. })
    ));
    assert!(matches!(
        registers.post(4, 0x10, 0),
        Err(FabricError::Access {
            byte_enable: 0x10,
            ..
        })
    ));
    assert!(pair.em.is_up());
}

#[test]
fn posted_writes_beyond_the_ring_are_done_in_order() {
    let pair = pair();
    for value in 0..2000 {
        pair.em.registers().post(0, 0xf, value).unwrap();
    }
    assert_eq!(pair.em.registers().read(0, LONG).unwrap(), 1999);
}

#[test]
fn register_callers_share_the_port() {
    let pair = pair();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let em = &pair.em;
            scope.spawn(move || {
                for n in 0..500 {
                    let value = thread << 16 | n;
                    let address = thread * 4;
                    assert_eq!(
                        em.registers().write(address, 0xf, value, LONG).unwrap(),
                        !value
                    );
                    assert_eq!(em.registers().read(address, LONG).unwrap(), value);
                }
            });
        }
    });
}

#[test]
fn late_completion_is_not_taken_for_a_later_access() {
    let pair = pair();
    let registers = pair.em.registers();
    pair.om_module.registers.lock().unwrap().insert(4, 7);
    for _ in 0..3 {
        assert!(matches!(
            registers.read(SLOW, Duration::from_millis(5)),
            Err(FabricError::Timeout(_))
        ));
    }
    pair.om_module.release();
    assert_eq!(registers.read(4, LONG).unwrap(), 7);
    assert_eq!(registers.read(SLOW, LONG).unwrap(), 0);
}

#[test]
fn posted_writes_to_a_stuck_peer_end_in_full_not_in_a_hang() {
    let pair = pair();
    let registers = pair.em.registers();
    let _ = registers.read(SLOW, Duration::from_millis(1));
    let full = (0..100_000).find_map(|n| registers.post(0, 0xf, n).err());
    assert!(matches!(full, Some(FabricError::Full)));
    pair.om_module.release();
    registers.write(0, 0xf, 1, LONG).unwrap();
}

#[test]
fn slow_request_delays_neither_replies_nor_registers() {
    let pair = pair();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| pair.om.call(Request::Shutdown, &[], LONG));
        // The EM's handler thread is busy; its own call still gets its reply.
        assert_eq!(
            pair.em.call(hello("x"), &[], LONG).unwrap(),
            Reply::Failed("x".into())
        );
        assert_eq!(pair.om.registers().read(0, LONG).unwrap(), 0);
        pair.em_module.release();
        assert_eq!(slow.join().unwrap().unwrap(), Reply::Ok);
    });
}

#[test]
fn reply_after_the_deadline_is_dropped() {
    let pair = pair();
    assert!(matches!(
        pair.om
            .call(Request::Shutdown, &[], Duration::from_millis(5)),
        Err(FabricError::Timeout(_))
    ));
    pair.em_module.release();
    assert_eq!(
        pair.om.call(hello("later"), &[], LONG).unwrap(),
        Reply::Failed("later".into())
    );
}

#[test]
fn peer_that_floods_requests_is_dropped() {
    let pair = pair();
    let mut failed = false;
    for _ in 0..30 {
        // Nobody takes them off the EM's queue, because the first blocks its handler.
        let result = pair
            .om
            .call(Request::Shutdown, &[], Duration::from_millis(1));
        failed |= matches!(result, Err(FabricError::Down(_) | FabricError::PeerClosed));
    }
    assert!(failed);
    assert_eq!(
        pair.em_module.wait_down(),
        ["the peer has more than 16 requests waiting here"]
    );
    pair.em_module.release();
}

#[test]
fn close_fails_waiting_calls_at_once_and_down_comes_once() {
    let pair = pair();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| pair.om.call(Request::Shutdown, &[], LONG));
        let read = scope.spawn(|| pair.em.registers().read(SLOW, LONG));
        while pair.om_module.events.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        std::thread::scope(|inner| {
            // Both ends block in handlers, so only the signal part of close can be waited for here.
            inner.spawn(|| pair.om.close());
            assert!(matches!(
                call.join().unwrap(),
                Err(FabricError::Down(reason)) if matches!(*reason, FabricError::Closed)
            ));
            assert!(matches!(
                read.join().unwrap(),
                Err(FabricError::Down(reason)) if matches!(*reason, FabricError::PeerClosed)
            ));
            pair.om_module.release();
            pair.em_module.release();
        });
    });
    pair.om.close();
    pair.em.close();
    assert_eq!(
        pair.om_module.wait_down(),
        ["the connection was closed on this side"]
    );
    assert_eq!(
        pair.em_module.wait_down(),
        ["the peer closed the connection"]
    );
    assert!(!pair.om.is_up() && !pair.em.is_up());
    assert!(matches!(
        pair.em.registers().read(0, LONG),
        Err(FabricError::Down(_))
    ));
    assert!(matches!(
        pair.em.notify(Event::ConfigChanged { function: 0 }),
        Err(FabricError::Down(_))
    ));
}

/// Closes its own connection from inside a request.
struct Suicidal {
    fabric: Mutex<Receiver<Arc<dyn Fabric>>>,
    down: Sender<()>,
}

impl Handler for Suicidal {
    fn request(&self, _: Request, _: Vec<OwnedFd>) -> Reply {
        let fabric = self.fabric.lock().unwrap().recv().unwrap();
        fabric.close();
        Reply::Ok
    }
    fn event(&self, _: Event) {}
    fn register_read(&self, _: u32) -> u32 {
        0
    }
    fn register_write(&self, _: u32, _: u8, _: u32) -> u32 {
        0
    }
    fn down(&self, _: &FabricError) {
        self.down.send(()).unwrap();
    }
}

#[test]
fn handler_may_close_its_own_connection_and_hold_the_last_handle() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let (give, fabric) = channel();
    let (down, downs) = channel();
    let handler = Suicidal {
        fabric: Mutex::new(fabric),
        down,
    };
    let (om, em) = join(
        &listener,
        &path,
        Arc::new(handler),
        Arc::new(Module::default()),
    );
    give.send(om).unwrap();
    assert!(em.call(Request::Stats, &[], LONG).is_err());
    downs.recv_timeout(LONG).unwrap();
    assert!(downs.recv_timeout(LONG).is_err());
}

#[test]
fn heartbeats_carry_the_owners_values_and_move_last_heard() {
    let pair = pair();
    let start = Instant::now();
    while pair.om.last_heard() < start + Duration::from_millis(HEARTBEAT_INTERVAL_MS / 2) {
        assert!(start.elapsed() < LONG, "no second heartbeat");
        std::thread::sleep(Duration::from_millis(10));
    }
    let is_heartbeat = |event: &Event| {
        matches!(
            event,
            Event::Heartbeat {
                progress: 42,
                backlog: true,
                ..
            }
        )
    };
    while !pair
        .om_module
        .events
        .lock()
        .unwrap()
        .iter()
        .any(is_heartbeat)
    {
        assert!(start.elapsed() < LONG, "no heartbeat delivered");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn silence_shows_in_last_heard() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let silent = raw(&path);
    let hello = Frame::Greeting(Greeting { window_bytes: 0 });
    send(&silent, &hello.emit().unwrap());
    let om = listener
        .accept()
        .unwrap()
        .start(Arc::new(Module::default()))
        .unwrap();
    let heard = om.last_heard();
    std::thread::sleep(Duration::from_millis(2 * HEARTBEAT_INTERVAL_MS));
    assert!(om.is_up());
    assert_eq!(om.last_heard(), heard);
}

#[test]
fn garbage_costs_the_sender_its_connection_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let greeting = Frame::Greeting(Greeting { window_bytes: 0 })
        .emit()
        .unwrap();
    let request = Frame::Request(1, Request::Stats).emit().unwrap();
    let completion = Frame::Completion(1, 0).emit().unwrap();
    let mut other_version = request.clone();
    other_version[4] ^= 1;
    for (garbage, reason) in [
        (&b"hello"[..], "truncated"),
        (&[0xa5; 100][..], "first bytes"),
        (&request[..request.len() - 1], "truncated"),
        (&other_version, "version"),
        (&greeting, "second greeting"),
        (&completion, "in place of shared memory"),
    ] {
        let socket = raw(&path);
        send(&socket, &greeting);
        let module = Arc::new(Module::default());
        let om = listener.accept().unwrap().start(module.clone()).unwrap();
        send(&socket, garbage);
        let downs = module.wait_down();
        assert!(
            downs.len() == 1 && downs[0].contains(reason),
            "{downs:?} has no {reason:?}"
        );
        assert!(!om.is_up());
    }
    let (om, _em) = join(
        &listener,
        &path,
        Arc::new(Module::default()),
        Arc::new(Module::default()),
    );
    assert_eq!(om.call(Request::Stats, &[], LONG).unwrap(), Reply::Ok);
}

#[test]
fn listener_tells_a_peer_of_another_version_which_one_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let old = raw(&path);
    let mut greeting = Frame::Greeting(Greeting { window_bytes: 0 })
        .emit()
        .unwrap();
    greeting[4..6].copy_from_slice(&(VERSION + 7).to_le_bytes());
    send(&old, &greeting);
    let refused = listener
        .accept()
        .unwrap()
        .start(Arc::new(Module::default()))
        .err()
        .expect("accepted");
    assert!(matches!(
        refused,
        FabricError::Wire(WireError::Version { theirs, .. }) if theirs == VERSION + 7
    ));
    let mut answer = [0; 64];
    let (len, _) = rustix::net::recv(&old, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
    assert_eq!(answer[..len][4..6], VERSION.to_le_bytes());
}

#[test]
fn connecting_to_a_listener_of_another_version_names_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listening = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&listening, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listening, 1).unwrap();
    std::thread::scope(|scope| {
        let em = scope.spawn(|| connect(&path, Arc::new(Module::default())));
        let accepted = rustix::net::accept(&listening).unwrap();
        let mut greeting = Frame::Greeting(Greeting { window_bytes: 0 })
            .emit()
            .unwrap();
        greeting[4..6].copy_from_slice(&(VERSION + 1).to_le_bytes());
        send(&accepted, &greeting);
        let error = em.join().unwrap().err().expect("connected").to_string();
        assert!(
            error.contains(&format!("version {}", VERSION + 1)),
            "{error}"
        );
        assert!(error.contains(&format!("version {VERSION}")), "{error}");
    });
}

#[test]
fn socket_file_is_private_and_goes_with_the_listener() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    let listener = LocalListener::bind(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(
        LocalListener::bind(&path),
        Err(FabricError::InUse(used)) if used == path
    ));
    drop(listener);
    assert!(!path.exists());
    assert!(matches!(
        connect(&path, Arc::new(Module::default())).err(),
        Some(FabricError::NobodyListens(missing)) if missing == path
    ));
}

#[test]
fn stale_socket_is_replaced_and_another_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(&dir);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = LocalListener::bind(&path).unwrap();
    drop(listener);
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(
        LocalListener::bind(&path),
        Err(FabricError::NotASocket(_))
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    // A listener of another kind is somebody's all the same.
    let _stream = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(matches!(
        LocalListener::bind(&path),
        Err(FabricError::InUse(_))
    ));
    let long = dir.path().join("x".repeat(120));
    assert!(matches!(
        LocalListener::bind(long),
        Err(FabricError::PathTooLong(_))
    ));
}

#[test]
fn closing_the_listener_ends_accept() {
    let dir = tempfile::tempdir().unwrap();
    let listener = LocalListener::bind(socket_path(&dir)).unwrap();
    assert!(
        listener
            .accept_timeout(Duration::from_millis(1))
            .unwrap()
            .is_none()
    );
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        let accept = scope.spawn(|| {
            barrier.wait();
            listener.accept()
        });
        barrier.wait();
        listener.close();
        assert!(matches!(accept.join().unwrap(), Err(FabricError::Closed)));
    });
}
