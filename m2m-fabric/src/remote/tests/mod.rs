//! Two ends in one process, over the loopback interface.

mod certificates;
mod hostile;
mod refusals;

use super::dial::{connect, reach};
use super::listener::RemoteListener;
use super::*;
use crate::error::FabricError;
use crate::fabric::{Fabric, Handler};
use crate::proto::{Event, Hello, Image, Reply, Request};
use certificates::Authority;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

const LONG: Duration = Duration::from_secs(20);
/// The function for whose image the module has a fault.
const PANICS: u32 = 0xdead;
/// The register whose handler waits until the module is released.
const SLOW: u32 = 0x1000;

/// A module: a register is what was written to it, `Hello` is answered with the name, `Shutdown` when it is released.
#[derive(Default)]
struct Module {
    seen: Mutex<Seen>,
    changed: Condvar,
    /// Where a write to a register shows an image before its completion.
    shows: OnceLock<Arc<dyn Fabric>>,
}

#[derive(Default)]
struct Seen {
    registers: BTreeMap<u32, u32>,
    images: Vec<Image>,
    events: Vec<Event>,
    down: Vec<String>,
    released: bool,
}

impl Module {
    fn change(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait<T>(&self, mut until: impl FnMut(&mut Seen) -> Option<T>) -> T {
        let mut seen = self.seen.lock().unwrap();
        loop {
            if let Some(found) = until(&mut seen) {
                return found;
            }
            let (next, waited) = self.changed.wait_timeout(seen, LONG).unwrap();
            assert!(!waited.timed_out(), "it did not come");
            seen = next;
        }
    }

    /// Why the connection ended.
    fn down(&self) -> String {
        self.wait(|seen| seen.down.first().cloned())
    }

    fn released(&self) {
        self.wait(|seen| seen.released.then_some(()));
    }
}

impl Handler for Module {
    fn request(&self, request: Request, _fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::Hello(hello) => Reply::Failed(hello.em),
            Request::Shutdown => {
                self.released();
                Reply::Ok
            }
            _ => Reply::Ok,
        }
    }

    fn event(&self, event: Event) {
        if !matches!(event, Event::Heartbeat { .. }) {
            self.change(|seen| seen.events.push(event));
        }
    }

    fn register_read(&self, address: u32) -> u32 {
        if address == SLOW {
            self.released();
        }
        let seen = self.seen.lock().unwrap();
        seen.registers.get(&address).copied().unwrap_or(0)
    }

    fn register_write(&self, address: u32, byte_enable: u8, value: u32) -> u32 {
        self.change(|seen| {
            seen.registers.insert(address, value);
        });
        if let Some(fabric) = self.shows.get() {
            let (function, bytes) = (address, value.to_le_bytes().to_vec());
            fabric.show(Image { function, bytes }).unwrap();
        }
        u32::from(byte_enable)
    }

    fn image(&self, image: Image) {
        assert_ne!(image.function, PANICS, "as it should be in one test");
        self.change(|seen| seen.images.push(image));
    }

    fn down(&self, reason: &FabricError) {
        self.change(|seen| seen.down.push(reason.to_string()));
    }
}

fn listen(files: Files, silence: Duration) -> (RemoteListener, String) {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let listener = RemoteListener::bind_with(anywhere, files, silence).unwrap();
    let address = listener.address().unwrap().to_string();
    (listener, address)
}

struct Pair {
    om: Arc<dyn Fabric>,
    em: Arc<dyn Fabric>,
    om_module: Arc<Module>,
    em_module: Arc<Module>,
}

/// Both ends of a connection.
fn pair() -> Pair {
    let authority = Authority::new();
    let (listener, address) = listen(authority.files("om"), SILENCE);
    let files = authority.files("em1");
    let [om_module, em_module] = [(); 2].map(|()| Arc::new(Module::default()));
    let (om, em) = std::thread::scope(|scope| {
        let em = scope.spawn(|| connect(&address, &files, em_module.clone()).unwrap());
        let om = listener.accept().unwrap().start(om_module.clone()).unwrap();
        (om, em.join().unwrap())
    });
    Pair {
        om,
        em,
        om_module,
        em_module,
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

#[test]
fn both_sides_call_each_other_at_the_same_time() {
    let pair = pair();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            for fabric in [&pair.om, &pair.em] {
                scope.spawn(move || {
                    for n in 0..100 {
                        // Some are longer than a TLS record.
                        let name = format!("{thread}-{n}-").repeat(1 + n % 7 * 1000);
                        let reply = fabric.call(hello(&name), &[], LONG).unwrap();
                        assert!(reply == Reply::Failed(name));
                    }
                });
            }
        }
    });
}

#[test]
fn registers_work_both_ways_in_order() {
    let pair = pair();
    for (fabric, module) in [(&pair.em, &pair.om_module), (&pair.om, &pair.em_module)] {
        let registers = fabric.registers();
        assert_eq!(registers.write(0x10, 0b0110, 7, LONG).unwrap(), 0b0110);
        assert_eq!(registers.read(0x10, LONG).unwrap(), 7);
        for n in 0..10 * registers::WINDOW as u32 {
            registers.post(0x20 + n % 4 * 4, 15, n).unwrap();
        }
        let last = registers.read(0x2c, LONG).unwrap();
        assert_eq!(last, 10 * registers::WINDOW as u32 - 1);
        assert_eq!(module.seen.lock().unwrap().registers.len(), 5);
        assert!(matches!(
            registers.write(0x11, 15, 0, LONG),
            Err(FabricError::Access { .. })
        ));
        assert!(matches!(
            registers.post(0x10, 16, 0),
            Err(FabricError::Access { .. })
        ));
    }
}

#[test]
fn what_a_write_shows_is_there_before_its_completion() {
    let pair = pair();
    let shows = pair.om_module.shows.set(pair.om.clone());
    assert!(shows.is_ok());
    for n in 0..200 {
        pair.em.registers().write(4 * n, 15, n, LONG).unwrap();
        let seen = pair.em_module.seen.lock().unwrap();
        let last = seen.images.last().unwrap();
        assert_eq!((last.function, &*last.bytes), (4 * n, &n.to_le_bytes()[..]));
        assert_eq!(seen.images.len(), n as usize + 1);
    }
    pair.om.close();
}

#[test]
fn events_come_in_order() {
    let pair = pair();
    for function in 0..100 {
        pair.om.notify(Event::ConfigChanged { function }).unwrap();
    }
    let events = pair
        .em_module
        .wait(|seen| (seen.events.len() == 100).then(|| seen.events.clone()));
    for (function, event) in (0..).zip(events) {
        assert_eq!(event, Event::ConfigChanged { function });
    }
}

#[test]
fn descriptors_stay_on_their_host() {
    let pair = pair();
    assert!(!pair.om.carries_fds());
    let stdin = std::io::stdin();
    let sent = pair.om.call(Request::Stats, &[stdin.as_fd()], LONG);
    let Err(error @ FabricError::NoFds) = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(
        error.to_string(),
        "file descriptors do not travel over a remote transport"
    );
    assert_eq!(pair.om.call(Request::Stats, &[], LONG).unwrap(), Reply::Ok);
}

#[test]
fn the_end_of_a_side_fails_what_waits_on_the_other_and_is_told_once() {
    let pair = pair();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| pair.em.call(Request::Shutdown, &[], LONG));
        let read = scope.spawn(|| pair.em.registers().read(SLOW, LONG));
        pair.em.registers().post(0, 15, 1).unwrap();
        pair.om_module.change(|seen| seen.released = true);
        pair.om.close();
        // Answered before the end, or not any more.
        drop(call.join().unwrap());
        drop(read.join().unwrap());
    });
    assert_eq!(pair.em_module.down(), "the peer closed the connection");
    assert!(matches!(
        pair.em.call(Request::Stats, &[], LONG),
        Err(FabricError::Down(_))
    ));
    assert!(matches!(
        pair.em.registers().post(0, 15, 0),
        Err(FabricError::Down(_))
    ));
    drop(pair.em);
    drop(pair.om);
    assert_eq!(pair.em_module.seen.lock().unwrap().down.len(), 1);
    assert_eq!(
        pair.om_module.seen.lock().unwrap().down,
        ["the connection was closed on this side"]
    );
}

#[test]
fn a_late_completion_goes_to_nobody_and_makes_room() {
    let pair = pair();
    for _ in 0..3 {
        let read = pair.em.registers().read(SLOW, Duration::from_millis(1));
        assert!(matches!(read, Err(FabricError::Timeout(_))));
    }
    // The peer is behind: posted writes have room, then none.
    let full = (0..registers::WINDOW).find_map(|_| pair.em.registers().post(8, 15, 9).err());
    assert!(matches!(full, Some(FabricError::Full)), "{full:?}");
    pair.om_module.change(|seen| seen.released = true);
    assert_eq!(pair.em.registers().read(8, LONG).unwrap(), 9);
    assert!(pair.em.is_up());
}

#[test]
fn who_waits_for_peers_hears_of_the_end() {
    let authority = Authority::new();
    let (listener, _) = listen(authority.files("om"), SILENCE);
    std::thread::scope(|scope| {
        let accepts = scope.spawn(|| listener.accept());
        listener.close();
        assert!(matches!(accepts.join().unwrap(), Err(FabricError::Closed)));
    });
}
