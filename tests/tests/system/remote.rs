//! An EM of another host, over TCP with TLS; here both hosts are one.

use crate::certificates::Authority;
use distdpu_tests::client::Client;
use distdpu_tests::dpu::{Dpu, mac, program};
use distdpu_tests::packet::Flow;
use distdpu_tests::pci::{self, Function};
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::vhost_user::{FrontEnd, Slots};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::File;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};

/// What an EM is started with.
struct Start {
    om: String,
    ca: PathBuf,
    /// Certificate and key.
    files: [PathBuf; 2],
}

impl Start {
    fn command(&self) -> Command {
        let mut command = Command::new(program("em").unwrap());
        command
            .args(["--om", &self.om, "--name", "em0", "--ca"])
            .arg(&self.ca)
            .arg("--certificate")
            .arg(&self.files[0])
            .arg("--key")
            .arg(&self.files[1])
            .stdin(Stdio::null());
        command
    }

    /// Starts it; its log is in `folder`.
    fn spawn(&self, folder: &Path) -> Running {
        let mut options = File::options();
        let log = options.create(true).append(true);
        let log = log.open(folder.join("em0.log")).unwrap();
        let mut command = self.command();
        let command = command.stdout(log.try_clone().unwrap()).stderr(log);
        Running(command.spawn().unwrap())
    }

    /// Runs one that is refused.
    fn output(&self) -> Output {
        self.command().output().unwrap()
    }
}

/// A process of this test's.
struct Running(Child);

impl Running {
    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn end(&mut self) -> ExitStatus {
        wait_for("the EM to end", SOON, || self.0.try_wait().unwrap()).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An OM, and an EM that connects to it like one of another host, with function `net0` on a loopback port.
struct Lab {
    em: Running,
    dpu: Dpu,
    start: Start,
    authority: Authority,
}

impl Lab {
    fn new() -> Self {
        Self::with("")
    }

    /// With these lines about the function.
    fn with(lines: &str) -> Self {
        let authority = Authority::new();
        let om = authority.sign("om");
        // Nobody else takes it within the test, as far as one can tell.
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let start = Start {
            om: address.clone(),
            ca: authority.ca(),
            files: authority.sign("em0"),
        };
        let mut em = None;
        let dpu = Dpu::with_config(1, |directory| {
            // It is there before its OM, and waits.
            em = Some(start.spawn(directory));
            format!(
                "[dpu]\nrun_dir = \"{}\"\n[dpu.remote]\nlisten = \"{address}\"\nca = \"{}\"\n\
                 certificate = \"{}\"\nkey = \"{}\"\n[[em]]\nname = \"em0\"\nremote = true\n\
                 [[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\n\
                 mac = \"02:00:00:00:00:01\"\nmtu = 9000\nport = {{ loopback = true }}\n{lines}",
                directory.display(),
                authority.ca().display(),
                om[0].display(),
                om[1].display(),
            )
        });
        Self {
            em: em.unwrap(),
            dpu: dpu.unwrap(),
            start,
            authority,
        }
    }

    fn driver(&self) -> VirtioNet {
        let mut driver = VirtioNet::open(&self.dpu.socket(0), Guest::default()).unwrap();
        driver.start(Setup::default()).unwrap();
        driver
    }

    fn em(&self) -> Value {
        self.dpu.ctl(&["status"]).unwrap()["ems"][0].clone()
    }

    fn function(&self) -> Value {
        self.dpu.ctl(&["functions"]).unwrap()["functions"][0].clone()
    }

    fn wait_function(&self, state: &str) -> Value {
        wait_for(state, SOON, || {
            Some(self.function()).filter(|f| f["state"] == state)
        })
        .unwrap_or_else(|_| panic!("{} is not {state}\n{}", self.function(), self.dpu.log_end()))
    }

    fn wait_log(&self, words: &str) {
        let log = || std::fs::read_to_string(self.dpu.directory().join("om.log")).unwrap();
        let found = wait_for(words, SOON, || log().contains(words).then_some(()));
        assert!(found.is_ok(), "no \"{words}\" in\n{}", log());
    }
}

fn frames_come_back(driver: &mut VirtioNet, seed: u64) {
    for (n, len) in [60, 1514, 9014].into_iter().enumerate() {
        let sent = Flow::new(mac(0), mac(0)).frame(len, seed + n as u64);
        driver.send(&sent).unwrap();
        assert!(driver.receive().unwrap().frame == sent.frame, "{len} bytes");
    }
}

/// The driver sees the link go and come as the administrator says.
fn link_follows(lab: &Lab, driver: &mut VirtioNet) {
    for word in ["down", "up"] {
        lab.dpu.ctl(&["link", "set", "net0", word]).unwrap();
        driver.wait_config_change().unwrap();
        let seen = wait_for("the link", SOON, || {
            (driver.link_up().unwrap() == (word == "up")).then_some(())
        });
        assert!(seen.is_ok(), "the link is not {word}");
    }
    // The OM says one thing after the other, so what the data path was told of the link came before this.
    lab.dpu.function_stats(0).unwrap();
}

/// Between an EM and its OM, to break connections.
struct Cable {
    address: String,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn to(om: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let open = Arc::new(Mutex::new(Vec::new()));
        let all = open.clone();
        std::thread::spawn(move || {
            for em in listener.incoming().flatten() {
                // Without an OM there is nobody to connect to.
                let Ok(om) = TcpStream::connect(&om) else {
                    continue;
                };
                let copies = [&em, &om].map(|side| side.try_clone().unwrap());
                all.lock().unwrap().extend(copies);
                for (mut from, mut to) in [(&em, &om), (&om, &em)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, open }
    }

    fn cut(&self) {
        for side in self.open.lock().unwrap().drain(..) {
            let _ = side.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn a_function_of_an_em_elsewhere_works() {
    let lab = Lab::new();
    let em = lab.em();
    assert_eq!((&em["state"], &em["remote"]), (&"up".into(), &true.into()));
    let address = em["address"].as_str().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{em}");
    assert_eq!((&em["pid"], &em["managed"]), (&Value::Null, &false.into()));
    let mut driver = lab.driver();
    assert_eq!(driver.mac().unwrap(), mac(0));
    assert!(driver.link_up().unwrap());
    frames_come_back(&mut driver, 1);
    link_follows(&lab, &mut driver);
    frames_come_back(&mut driver, 10);
    let stats = lab.dpu.function_stats(0).unwrap();
    assert_eq!(stats["queues"][1]["packets"], 6, "{stats}");
    assert_eq!(lab.wait_function("running")["link"], "up");
}

#[test]
fn what_a_guest_writes_to_config_space_is_read_at_once() {
    let lab = Lab::new();
    let mut client = Client::connect(&lab.dpu.socket(0)).unwrap();
    let function = Function::probe(&mut client).unwrap();
    assert_eq!((function.vendor, function.device), (0x1af4, 0x1041));
    for n in 0..50 {
        // A BAR and the command register: through the OM, and read from what it shows.
        let bar = 0x8000_0000 + n * 0x10_0000;
        pci::write32(&mut client, 0x10, bar).unwrap();
        assert_eq!(pci::read32(&mut client, 0x10).unwrap() & !0xf, bar);
        let command = if n % 2 == 0 { 6 } else { 0 };
        pci::write16(&mut client, 4, command).unwrap();
        assert_eq!(pci::read16(&mut client, 4).unwrap() & 6, command);
    }
}

#[test]
fn an_em_elsewhere_that_was_killed_is_configured_anew_when_it_connects_again() {
    let mut lab = Lab::new();
    let mut driver = lab.driver();
    frames_come_back(&mut driver, 1);
    lab.em.kill();
    lab.wait_function("absent");
    assert_eq!(lab.em()["state"], "away");
    wait_for("the link to go down", SOON, || {
        (lab.function()["link"] == "down").then_some(())
    })
    .unwrap();
    drop(driver);
    lab.em = lab.start.spawn(lab.dpu.directory());
    lab.wait_function("waiting");
    let mut driver = lab.driver();
    assert!(driver.link_up().unwrap());
    frames_come_back(&mut driver, 20);
}

#[test]
fn a_guest_of_an_em_elsewhere_outlives_the_om() {
    let mut lab = Lab::new();
    let mut driver = lab.driver();
    link_follows(&lab, &mut driver);
    lab.dpu.kill_om().unwrap();
    frames_come_back(&mut driver, 1);
    assert!(driver.link_up().unwrap());
    lab.dpu.start_another_om().unwrap();
    lab.wait_function("running");
    frames_come_back(&mut driver, 10);
    link_follows(&lab, &mut driver);
    frames_come_back(&mut driver, 20);
    // The counters say that nothing began anew.
    let stats = lab.dpu.function_stats(0).unwrap();
    assert_eq!(stats["queues"][1]["packets"], 9, "{stats}");
}

#[test]
fn a_connection_that_breaks_is_made_again_under_a_guest() {
    let mut lab = Lab::new();
    // The same EM, but through a cable that can be cut.
    let cable = Cable::to(lab.start.om.clone());
    lab.start.om = cable.address.clone();
    lab.em.kill();
    lab.wait_function("absent");
    lab.em = lab.start.spawn(lab.dpu.directory());
    lab.wait_function("waiting");
    let mut driver = lab.driver();
    frames_come_back(&mut driver, 1);
    for round in 1..4 {
        cable.cut();
        frames_come_back(&mut driver, 10 * round);
        wait_for("the OM to know of it", SOON, || {
            let log = std::fs::read_to_string(lab.dpu.directory().join("om.log")).unwrap();
            (log.matches("EM em0 is adopted").count() as u64 >= round).then_some(())
        })
        .unwrap();
        lab.wait_function("running");
        link_follows(&lab, &mut driver);
    }
    let stats = lab.dpu.function_stats(0).unwrap();
    assert_eq!(stats["queues"][1]["packets"], 12, "{stats}");
}

/// A guest behind this front end has a function of an EM elsewhere, also when the OM is another.
fn front_end_works(lab: &mut Lab, front: &FrontEnd) {
    let mut driver = front.driver(Guest::default()).unwrap();
    driver.start(Setup::default()).unwrap();
    assert_eq!(driver.mac().unwrap(), mac(0));
    frames_come_back(&mut driver, 1);
    lab.wait_function("running");
    lab.dpu.kill_om().unwrap();
    frames_come_back(&mut driver, 10);
    lab.dpu.start_another_om().unwrap();
    lab.wait_function("running");
    frames_come_back(&mut driver, 20);
    let stats = lab.dpu.function_stats(0).unwrap();
    assert_eq!(stats["queues"][1]["packets"], 9, "{stats}");
}

#[test]
fn a_front_end_connects_to_an_em_elsewhere() {
    let mut lab = Lab::with("face = \"vhost-user\"\n");
    let front = FrontEnd::connect(&lab.dpu.socket(0), Slots::Table).unwrap();
    front_end_works(&mut lab, &front);
    // The next process has the same path.
    lab.em.kill();
    lab.wait_function("absent");
    lab.em = lab.start.spawn(lab.dpu.directory());
    lab.wait_function("waiting");
    front.reconnect(&lab.dpu.socket(0)).unwrap();
    lab.wait_function("running");
}

#[test]
fn an_em_elsewhere_connects_to_a_front_end() {
    let mut lab = Lab::with("face = \"vhost-user\"\nvhost_mode = \"client\"\n");
    let path = lab.dpu.socket(0);
    let listener = UnixListener::bind(&path).unwrap();
    let front = FrontEnd::accept(&listener, Slots::Table).unwrap();
    front_end_works(&mut lab, &front);
    lab.em.kill();
    lab.wait_function("absent");
    lab.em = lab.start.spawn(lab.dpu.directory());
    front.accept_again(&listener).unwrap();
    lab.wait_function("running");
    lab.em.signal(Signal::TERM);
    assert!(lab.em.end().success());
    assert!(path.exists(), "the path is the front end's");
}

#[test]
fn an_em_elsewhere_without_guests_takes_what_the_next_om_gives() {
    let mut lab = Lab::new();
    lab.dpu.kill_om().unwrap();
    lab.dpu.start_another_om().unwrap();
    lab.wait_function("waiting");
    frames_come_back(&mut lab.driver(), 1);
}

#[test]
fn an_em_elsewhere_without_an_om_waits_and_can_be_ended() {
    let mut lab = Lab::new();
    lab.dpu.kill_om().unwrap();
    assert!(lab.em.0.try_wait().unwrap().is_none());
    lab.em.signal(Signal::TERM);
    assert!(lab.em.end().success());
    // Nor does it depend on having had one.
    let log = lab.dpu.directory().join("em0.log");
    let attempts = || {
        std::fs::read_to_string(&log)
            .unwrap()
            .matches("trying again")
            .count()
    };
    let before = attempts();
    let mut em = lab.start.spawn(lab.dpu.directory());
    wait_for("an attempt", SOON, || (attempts() > before).then_some(())).unwrap();
    em.signal(Signal::TERM);
    assert!(em.end().success());
}

#[test]
fn an_em_that_cannot_prove_who_it_is_is_refused_and_named() {
    let lab = Lab::new();
    let said = |start: &Start| {
        let output = start.output();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let other = Authority::new();
    let stranger = Start {
        om: lab.start.om.clone(),
        ca: lab.authority.ca(),
        files: other.sign("em0"),
    };
    let text = said(&stranger);
    assert!(text.contains("UnknownCA"), "{text}");
    lab.wait_log(
        "did not become an EM: no secure connection: invalid peer certificate: UnknownIssuer",
    );
    let impostor = Start {
        om: lab.start.om.clone(),
        ca: lab.authority.ca(),
        files: lab.authority.sign("em7"),
    };
    let text = said(&impostor);
    let named = "the peer calls itself \"em0\", but its certificate does not have that name";
    assert!(text.contains(named), "{text}");
    lab.wait_log(&format!("as EM em0: {named}"));
    let doubtful = Start {
        om: lab.start.om.clone(),
        ca: other.ca(),
        files: lab.authority.sign("em0"),
    };
    let text = said(&doubtful);
    assert!(
        text.contains("invalid peer certificate: UnknownIssuer"),
        "{text}"
    );
    // The right one is not disturbed.
    frames_come_back(&mut lab.driver(), 1);
}

#[test]
fn without_certificates_nobody_connects_to_another_host() {
    let em = |words: &[&str]| {
        let mut command = Command::new(program("em").unwrap());
        let output = command.args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = em(&["--om", "127.0.0.1:1", "--name", "em0"]);
    assert!(
        said.contains("takes --ca, --certificate and --key"),
        "{said}"
    );
    let said = em(&["--om", "127.0.0.1:1", "--name", "em0", "--ca", "ca.pem"]);
    assert!(said.contains("--certificate"), "{said}");
}

#[test]
fn an_om_whose_certificates_are_missing_says_so_and_does_not_start() {
    let authority = Authority::new();
    let file = authority.folder().join("distdpu.toml");
    let text = format!(
        "[dpu]\nrun_dir = \"{0}\"\n[dpu.remote]\nlisten = \"127.0.0.1:0\"\nca = \"{0}/ca.pem\"\n\
         certificate = \"{0}/om.pem\"\nkey = \"{0}/om.key\"\n[[em]]\nname = \"em0\"\nremote = true\n\
         [[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\nmac = \"02:00:00:00:00:01\"\n\
         port = {{ null = true }}\n",
        authority.folder().display()
    );
    std::fs::write(&file, text).unwrap();
    let om = Command::new(program("om").unwrap())
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8(om.stderr).unwrap();
    assert!(!om.status.success());
    assert!(
        said.contains("EMs of other hosts cannot connect to 127.0.0.1:0: cannot read certificate"),
        "{said}"
    );
}
