//! An EM for tests: does what it is told and tells the test about it.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use m2m_fabric::proto::{
    EmStats, Event, FunctionStats, Hello, LinkKind, LinkSpec, QueueStats, Reply, Request,
};
use m2m_fabric::{Fabric, FabricError, Handler};
use om_backend::Om;
use om_backend::config::Config;
use om_backend::northbound::client::ask;
use om_backend::northbound::protocol;
use om_backend::northbound::view::Functions;
use serde::de::DeserializeOwned;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than anything takes; only a failing test waits for it.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Something that the OM told the EM.
pub(crate) enum Told {
    Request(Request, Vec<OwnedFd>),
    Event(Event),
    Down,
}

struct Ears {
    told: Mutex<Sender<Told>>,
    functions: Mutex<Vec<u32>>,
    rounds: Mutex<u64>,
}

impl Ears {
    fn tell(&self, told: Told) {
        let _ = self.told.lock().unwrap().send(told);
    }
}

impl Handler for Ears {
    fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        if let Request::AddFunction(spec) = &request {
            self.functions.lock().unwrap().push(spec.id);
        }
        let reply = match &request {
            Request::Stats => Reply::Stats(Box::new(self.stats())),
            Request::AddLink(LinkSpec {
                kind: LinkKind::Tap { name },
                ..
            }) => Reply::Failed(format!("there is no TAP {name}")),
            _ => Reply::Ok,
        };
        self.tell(Told::Request(request, fds));
        reply
    }

    fn event(&self, event: Event) {
        if !matches!(event, Event::Heartbeat { .. }) {
            self.tell(Told::Event(event));
        }
    }

    fn heartbeat(&self) -> (u64, bool) {
        let mut rounds = self.rounds.lock().unwrap();
        match std::env::var("FAKE_EM_PROGRESS").as_deref() {
            Ok("stuck") => {}
            _ => *rounds += 1,
        }
        (*rounds, true)
    }

    fn register_read(&self, _address: u32) -> u32 {
        0
    }

    fn register_write(&self, _address: u32, _byte_enable: u8, _value: u32) -> u32 {
        0
    }

    fn down(&self, _reason: &FabricError) {
        self.tell(Told::Down);
    }
}

impl Ears {
    fn stats(&self) -> EmStats {
        let queue = QueueStats {
            name: "rx0".into(),
            enabled: true,
            packets: 7,
            bytes: 700,
            kicks: 3,
            interrupts: 2,
            drops: [("no buffer".to_owned(), 5)].into(),
        };
        let functions = self.functions.lock().unwrap();
        EmStats {
            functions: functions
                .iter()
                .map(|id| FunctionStats {
                    function: *id,
                    queues: vec![queue.clone()],
                    ..FunctionStats::default()
                })
                .collect(),
            ..EmStats::default()
        }
    }
}

pub(crate) struct FakeEm {
    pub(crate) fabric: Arc<dyn Fabric>,
    told: Receiver<Told>,
}

impl FakeEm {
    /// Connects and introduces itself; the error is the OM's sentence.
    pub(crate) fn try_join(socket: &Path, name: &str) -> Result<Self, String> {
        let (sender, told) = channel();
        let ears = Ears {
            told: Mutex::new(sender),
            functions: Mutex::new(Vec::new()),
            rounds: Mutex::new(0),
        };
        let fabric = m2m_fabric::local::connect(socket, Arc::new(ears)).unwrap();
        let hello = Hello {
            em: name.into(),
            pid: std::process::id(),
            program: "fake".into(),
            returns: false,
        };
        match fabric.call(Request::Hello(hello), &[], LONG).unwrap() {
            Reply::Ok => Ok(Self { fabric, told }),
            Reply::Failed(reason) => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn join(om: &Om, name: &str) -> Self {
        Self::try_join(&om.config().m2m_socket(), name).unwrap()
    }

    /// Like [`join`](Self::join), as soon as the OM noticed that the last one of that name is gone.
    pub(crate) fn join_again(om: &Om, name: &str) -> Self {
        let deadline = Instant::now() + LONG;
        loop {
            match Self::try_join(&om.config().m2m_socket(), name) {
                Ok(em) => return em,
                Err(reason) => assert!(Instant::now() < deadline, "{reason}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The next thing that `pick` wants; all before it is forgotten.
    pub(crate) fn wait<T>(&self, mut pick: impl FnMut(Told) -> Option<T>) -> T {
        let deadline = Instant::now() + LONG;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let told = self.told.recv_timeout(left).expect("the OM never said it");
            if let Some(wanted) = pick(told) {
                return wanted;
            }
        }
    }

    pub(crate) fn wait_link(&self) -> (LinkSpec, Vec<OwnedFd>) {
        self.wait(|told| match told {
            Told::Request(Request::AddLink(link), fds) => Some((link, fds)),
            _ => None,
        })
    }

    pub(crate) fn wait_down(&self) {
        self.wait(|told| matches!(told, Told::Down).then_some(()));
    }
}

impl FakeEm {
    /// What a process does that is an EM.
    pub(crate) fn wait_down_or_shutdown(&self) {
        while let Ok(told) = self.told.recv() {
            if matches!(told, Told::Down | Told::Request(Request::Shutdown, _)) {
                // The reply leaves after the handler returns.
                std::thread::sleep(Duration::from_millis(20));
                return;
            }
        }
    }
}

/// An OM whose EMs are started by the test; each has one function in one network.
pub(crate) fn config(dir: &Path, ems: usize) -> Config {
    let mut text = format!(
        "[dpu]\nrun_dir = \"{}\"\n[[network]]\nname = \"blue\"\n",
        dir.display()
    );
    for n in 0..ems {
        text += &format!(
            "[[em]]\nname = \"em{n}\"\nmanaged = false\n[[em.function]]\nname = \"net{n}\"\n\
             kind = \"virtio-net\"\nmac = \"02:00:00:00:00:{n:02x}\"\nmtu = 9000\nnetwork = \"blue\"\n"
        );
    }
    Config::parse("test", &text).unwrap()
}

pub(crate) fn query<T: DeserializeOwned>(om: &Om, request: &protocol::Request) -> T {
    ask(&om.config().dpuctl_socket(), request).unwrap()
}

/// Waits until the functions are as `wanted` says.
pub(crate) fn wait_functions(
    om: &Om,
    what: &str,
    wanted: impl Fn(&Functions) -> bool,
) -> Functions {
    let deadline = Instant::now() + LONG;
    loop {
        let functions: Functions = query(om, &protocol::Request::Functions);
        if wanted(&functions) {
            return functions;
        }
        assert!(Instant::now() < deadline, "never {what}: {functions:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
