//! Peers that have a certificate and misbehave.

use super::*;
use crate::remote::registers::WINDOW;
use crate::remote::stream::Stream;
use crate::wire::{Access, Frame, Greeting, WireError};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection};
use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

/// What the OM is given in these tests before it takes a peer for dead.
const SHORT: Duration = Duration::from_millis(1500);

/// An OM, and a peer that can send it anything.
struct Lab {
    _listener: RemoteListener,
    stream: Stream,
    _authority: Authority,
}

fn deadline() -> Instant {
    Instant::now() + LONG
}

fn greeting() -> Vec<u8> {
    Frame::Greeting(Greeting { window_bytes: 0 })
        .emit()
        .unwrap()
}

impl Lab {
    /// The peer connects, and says `first` when TLS is agreed on.
    fn start(first: &[u8]) -> (Self, Result<Arc<dyn Fabric>, FabricError>, Arc<Module>) {
        let authority = Authority::new();
        let (listener, address) = listen(authority.files("om"), SHORT);
        let config = authority.files("em1").client().unwrap();
        let module = Arc::new(Module::default());
        let (om, stream) = std::thread::scope(|scope| {
            let stream = scope.spawn(|| {
                let name = ServerName::try_from(OM_NAME).unwrap();
                let tls = Connection::Client(ClientConnection::new(config, name).unwrap());
                let socket = reach(&address).unwrap();
                let mut stream = Stream::agree(socket, tls, deadline()).unwrap();
                stream.send(first, deadline()).unwrap();
                stream
            });
            let om = listener.accept().unwrap().start(module.clone());
            (om, stream.join().unwrap())
        });
        let lab = Self {
            _listener: listener,
            stream,
            _authority: authority,
        };
        (lab, om, module)
    }

    /// The same after greetings.
    fn greeted() -> (Self, Arc<dyn Fabric>, Arc<Module>) {
        let (mut lab, om, module) = Self::start(&greeting());
        let theirs = lab.stream.receive(deadline()).unwrap();
        assert!(matches!(theirs, Frame::Greeting(_)));
        (lab, om.unwrap(), module)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.send(bytes, deadline()).unwrap();
    }
}

#[test]
fn a_peer_of_another_version_is_refused_and_hears_ours() {
    let mut other = greeting();
    other[4] += 1;
    let (mut lab, om, _) = Lab::start(&other);
    assert!(matches!(
        om,
        Err(FabricError::Wire(WireError::Version { .. }))
    ));
    assert!(matches!(
        lab.stream.receive(deadline()),
        Ok(Frame::Greeting(_))
    ));
}

#[test]
fn a_peer_that_does_not_greet_is_refused() {
    let first = Frame::Request(1, Request::Stats).emit().unwrap();
    let (_lab, om, _) = Lab::start(&first);
    assert!(matches!(om, Err(FabricError::Protocol(_))));
}

#[test]
fn garbage_takes_the_connection_down() {
    let (mut lab, _om, module) = Lab::greeted();
    lab.send(&[0x5a; 100]);
    assert!(
        module
            .down()
            .contains("the first bytes are [5a, 5a, 5a, 5a]")
    );
}

#[test]
fn bytes_that_are_not_encrypted_take_the_connection_down() {
    let (lab, _om, module) = Lab::greeted();
    let mut socket: &TcpStream = lab.stream.socket();
    socket.write_all(&[0x5a; 100]).unwrap();
    let said = module.down();
    assert!(said.starts_with("no secure connection"), "{said}");
}

#[test]
fn a_frame_that_would_be_too_long_is_refused_before_it_comes() {
    let (mut lab, _om, module) = Lab::greeted();
    let mut frame = Frame::Request(1, Request::Stats).emit().unwrap();
    frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    lab.send(&frame[..16]);
    assert!(module.down().contains("a body of 4294967295 bytes"));
}

#[test]
fn frames_in_parts_are_put_together() {
    let (mut lab, _om, module) = Lab::greeted();
    let event = Event::ConfigChanged { function: 7 };
    for byte in Frame::Event(event.clone()).emit().unwrap() {
        lab.send(&[byte]);
    }
    module.wait(|seen| seen.events.contains(&event).then_some(()));
}

#[test]
fn a_peer_that_falls_silent_is_given_up() {
    let (_lab, om, module) = Lab::greeted();
    // Its socket is open, and the system takes what is sent to it.
    assert_eq!(module.down(), "nothing was heard of the peer for 1.5s");
    assert!(!om.is_up());
}

#[test]
fn a_peer_that_does_not_read_holds_up_nobody() {
    let (mut lab, om, module) = Lab::greeted();
    let heartbeat = Frame::Event(Event::Heartbeat {
        sequence: 0,
        progress: 0,
        backlog: false,
    });
    let heartbeat = heartbeat.emit().unwrap();
    let image = || Image {
        function: 0,
        bytes: vec![0; crate::proto::MAX_IMAGE_BYTES],
    };
    // More than any buffers of the system hold.
    let mut full = None;
    for n in 0..2000 {
        if n % 10 == 0 {
            lab.send(&heartbeat);
        }
        full = om.show(image()).err();
        if full.is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(full, Some(FabricError::Full)), "{full:?}");
    let call = om.call(Request::Stats, &[], Duration::from_millis(10));
    assert!(matches!(call, Err(FabricError::Timeout(_))));
    assert!(matches!(
        om.notify(Event::ConfigChanged { function: 0 }),
        Err(FabricError::Full)
    ));
    assert!(om.is_up(), "it sends heartbeats");
    om.close();
    assert_eq!(module.down(), "the connection was closed on this side");
}

#[test]
fn more_accesses_than_allowed_take_the_connection_down() {
    let (mut lab, _om, module) = Lab::greeted();
    for id in 0..=WINDOW as u32 + 1 {
        let access = Access::Read { address: SLOW };
        let frame = Frame::Register(id, access).emit().unwrap();
        // The last one may be sent to who has hung up.
        let _ = lab.stream.send(&frame, deadline());
    }
    let said = module.down();
    assert_eq!(
        said,
        "the peer has more than 64 register accesses waiting here"
    );
    module.change(|seen| seen.released = true);
}

#[test]
fn an_access_or_a_completion_that_cannot_be_takes_the_connection_down() {
    let (mut lab, _om, module) = Lab::greeted();
    let access = Access::Write {
        address: 2,
        byte_enable: 15,
        value: 0,
    };
    lab.send(&Frame::Register(0, access).emit().unwrap());
    assert!(module.down().starts_with("no such register access"));
    let (mut lab, _om, module) = Lab::greeted();
    lab.send(&Frame::Completion(3, 0).emit().unwrap());
    assert!(module.down().contains("a completion without an access"));
}

#[test]
fn an_image_that_is_too_long_takes_the_connection_down() {
    let (mut lab, _om, module) = Lab::greeted();
    let image = |len| Image {
        function: 1,
        bytes: vec![0; len],
    };
    let longest = crate::proto::MAX_IMAGE_BYTES;
    lab.send(&Frame::Image(image(longest)).emit().unwrap());
    lab.send(&Frame::Image(image(longest + 1)).emit().unwrap());
    assert!(module.down().contains(&(longest + 1).to_string()));
    assert_eq!(module.seen.lock().unwrap().images.len(), 1);
}

#[test]
fn a_handler_that_panics_on_the_stream_thread_ends_the_connection_and_nothing_more() {
    let (mut lab, om, module) = Lab::greeted();
    let image = Image {
        function: PANICS,
        bytes: vec![0; 4],
    };
    lab.send(&Frame::Image(image).emit().unwrap());
    assert!(module.down().contains("a handler of this side panicked"));
    om.close();
    assert!(!om.is_up());
}

#[test]
fn a_peer_that_stops_in_its_handshake_keeps_out_nobody() {
    let authority = Authority::new();
    let (listener, address) = listen(authority.files("om"), SILENCE);
    // It says nothing at all.
    let _mute = TcpStream::connect(&address).unwrap();
    let mute = listener.accept().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| mute.start(Arc::new(Module::default())));
        let em = scope.spawn(|| {
            let files = authority.files("em1");
            connect(&address, &files, Arc::new(Module::default()))
        });
        let om = listener
            .accept()
            .unwrap()
            .start(Arc::new(Module::default()));
        assert!(om.unwrap().is_up());
        assert!(em.join().unwrap().is_ok());
        assert!(matches!(
            waits.join().unwrap(),
            Err(FabricError::Timeout(_))
        ));
    });
}
