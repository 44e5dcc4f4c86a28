//! The OM with EMs that the test plays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake_em;

use fake_em::{FakeEm, LONG, Told, config, query, wait_functions};
use m2m_fabric::proto::{
    ControlAddress, Event, FunctionKind, FunctionState, LinkKind, Request as EmRequest,
};
use om_backend::config::Config;
use om_backend::northbound::client::{AskError, ask};
use om_backend::northbound::protocol::Request;
use om_backend::northbound::view::{Inspect, Stats, Status};
use om_backend::{Om, StartError};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

fn link_bit(em: &FakeEm, function: u32) -> bool {
    let address = ControlAddress {
        function,
        region: 0,
        offset: 0x2004,
    };
    let bits = address.to_bits().unwrap();
    em.fabric.registers().read(bits, LONG).unwrap() & 1 << 16 != 0
}

#[test]
fn an_em_gets_its_function_with_socket_shadow_and_keeper() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let em = FakeEm::join(&om, "em0");
    let (spec, fds) = em.wait(|told| match told {
        Told::Request(EmRequest::AddFunction(spec), fds) => Some((spec, fds)),
        _ => None,
    });
    assert_eq!((spec.id, spec.name.as_str()), (0, "net0"));
    let FunctionKind::VirtioNet(net) = &spec.kind else {
        panic!("{spec:?}");
    };
    assert_eq!((net.mtu, net.mac), (9000, [2, 0, 0, 0, 0, 0]));
    let mut fds = fds.into_iter();
    let listener = UnixListener::from(fds.next().unwrap());
    assert_eq!(fds.count(), 2, "the shadow and the keeper");
    let _vmm = UnixStream::connect(dir.path().join("net0.sock")).unwrap();
    listener.accept().unwrap();
    om.stop();
}

#[test]
fn two_ems_are_wired_and_their_links_go_up_and_down_with_the_peer() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 2)).unwrap();
    let em0 = FakeEm::join(&om, "em0");
    let em1 = FakeEm::join(&om, "em1");
    let (first, fds) = em0.wait_link();
    let (second, _) = em1.wait_link();
    assert_eq!(fds.len(), 3);
    assert!(
        matches!(first.kind, LinkKind::Shm { side: 0, .. }),
        "{first:?}"
    );
    assert!(
        matches!(second.kind, LinkKind::Shm { side: 1, .. }),
        "{second:?}"
    );
    let changed = |told| matches!(told, Told::Event(Event::ConfigChanged { .. })).then_some(());
    em0.wait(changed);
    em1.wait(changed);
    assert!(link_bit(&em0, 0) && link_bit(&em1, 1));

    em1.fabric.close();
    let removed = em0.wait(|told| match told {
        Told::Request(EmRequest::RemoveLink { link }, _) => Some(link),
        _ => None,
    });
    assert_eq!(removed, first.id);
    wait_functions(&om, "down", |f| f.functions[0].link == "down");
    assert!(!link_bit(&em0, 0));

    let em1 = FakeEm::join(&om, "em1");
    let (again, _) = em0.wait_link();
    assert_ne!(again.id, first.id);
    em1.wait_link();
    wait_functions(&om, "up again", |f| {
        f.functions.iter().all(|f| f.link == "up")
    });
    assert!(link_bit(&em0, 0) && link_bit(&em1, 1));
}

#[test]
fn the_administrator_takes_a_link_down_and_up() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 2)).unwrap();
    let (em0, _em1) = (FakeEm::join(&om, "em0"), FakeEm::join(&om, "em1"));
    wait_functions(&om, "up", |f| f.functions.iter().all(|f| f.link == "up"));
    for up in [false, true] {
        let function = "net0".to_owned();
        let _: serde_json::Value = query(&om, &Request::LinkSet { function, up });
        assert_eq!(link_bit(&em0, 0), up);
        let f = wait_functions(&om, "told", |_| true);
        assert_eq!(f.functions[0].link, if up { "up" } else { "down" });
        assert_eq!(f.functions[1].link, "up");
    }
    let request = Request::LinkSet {
        function: "net7".to_owned(),
        up: true,
    };
    let refused = ask::<serde_json::Value>(&om.config().dpuctl_socket(), &request).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "there is no function \"net7\"; there are net0, net1"
    );
}

#[test]
fn a_function_is_absent_without_its_em_and_as_its_em_says_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    wait_functions(&om, "absent", |f| f.functions[0].state == "absent");
    let em = FakeEm::join(&om, "em0");
    wait_functions(&om, "waiting", |f| f.functions[0].state == "waiting");
    let state = FunctionState::Running;
    em.fabric
        .notify(Event::Function { function: 0, state })
        .unwrap();
    wait_functions(&om, "running", |f| f.functions[0].state == "running");
    em.fabric.close();
    wait_functions(&om, "absent", |f| f.functions[0].state == "absent");
    assert!(dir.path().join("net0.sock").exists(), "the path must stay");
}

#[test]
fn an_em_reaches_only_its_own_functions() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 2)).unwrap();
    let em0 = FakeEm::join(&om, "em0");
    let id_register = |function| {
        let address = ControlAddress {
            function,
            region: 7,
            offset: 0,
        };
        let bits = address.to_bits().unwrap();
        em0.fabric.registers().read(bits, LONG).unwrap()
    };
    assert_eq!(id_register(0), 0x1041_1af4);
    assert_eq!(id_register(1), u32::MAX);
    assert_eq!(id_register(255), u32::MAX);
}

#[test]
fn ems_that_are_not_expected_hear_why() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let socket = om.config().m2m_socket();
    let _em0 = FakeEm::join(&om, "em0");
    let reason = |name| FakeEm::try_join(&socket, name).err().unwrap();
    assert_eq!(reason("em0"), "EM \"em0\" is connected already");
    assert_eq!(reason("em9"), "no EM is named \"em9\" in the configuration");
}

#[test]
fn counters_come_by_function_and_queue() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 2)).unwrap();
    let _ems = (FakeEm::join(&om, "em1"), FakeEm::join(&om, "em0"));
    wait_functions(&om, "up", |f| f.functions.iter().all(|f| f.link == "up"));
    let stats: Stats = query(&om, &Request::Stats);
    let names: Vec<&str> = stats.functions.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["net0", "net1"]);
    let queue = &stats.functions[0].queues[0];
    assert_eq!(
        (queue.name.as_str(), queue.packets, queue.drops["no buffer"]),
        ("rx0", 7, 5)
    );
}

#[test]
fn what_an_em_cannot_do_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "[dpu]\nrun_dir = \"{}\"\n[[em]]\nname = \"em0\"\nmanaged = false\n[[em.function]]\n\
         name = \"net0\"\nkind = \"virtio-net\"\nmac = \"02:00:00:00:00:01\"\n\
         port = {{ tap = \"tap9\" }}\n",
        dir.path().display()
    );
    let om = Om::start(Config::parse("test", &text).unwrap()).unwrap();
    let em = FakeEm::join(&om, "em0");
    em.wait_link();
    let wire = loop {
        let all: Inspect = query(&om, &Request::Inspect);
        if all.wires[0].state != "pending" {
            break all.wires[0].clone();
        }
    };
    assert_eq!(wire.state, "failed: there is no TAP tap9");
    let functions = wait_functions(&om, "waiting", |f| f.functions[0].state == "waiting");
    assert_eq!(functions.functions[0].link, "down");
}

#[test]
fn stopping_tells_the_ems_and_removes_the_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let dpuctl = om.config().dpuctl_socket();
    let em = FakeEm::join(&om, "em0");
    om.stop();
    em.wait(|told| matches!(told, Told::Request(EmRequest::Shutdown, _)).then_some(()));
    em.wait_down();
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let e = ask::<Status>(&dpuctl, &Request::Status).unwrap_err();
    assert!(matches!(e, AskError::NotRunning(_)), "{e}");
}

#[test]
fn a_second_om_leaves_the_first_alone_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let e = Om::start(config(dir.path(), 1)).unwrap_err();
    assert_eq!(
        e.to_string(),
        format!(
            "the socket path {} is in use: another process listens on it; stop that process or \
             choose another path",
            dir.path().join("net0.sock").display()
        )
    );
    let _: Status = query(&om, &Request::Status);
    UnixStream::connect(dir.path().join("net0.sock")).unwrap();
}

#[test]
fn a_missing_em_program_is_named_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 1);
    config.ems[0].managed = true;
    config.em_binary = Some(dir.path().join("no-em"));
    let e = Om::start(config).unwrap_err();
    assert!(matches!(e, StartError::EmBinary(_)), "{e}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn requests_that_are_none_get_a_sentence_and_long_ones_end_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let mut stream = UnixStream::connect(om.config().dpuctl_socket()).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut ask = |text: &[u8]| {
        stream.write_all(text).unwrap();
        lines.next().map(Result::unwrap)
    };
    let unknown = ask(b"{\"request\":\"dance\"}\n").unwrap();
    assert!(
        unknown.contains("the request is not understood"),
        "{unknown}"
    );
    for garbage in [
        &b"\n"[..],
        b"\xff\xfe\n",
        b"{\"request\":\"link-set\",\"function\":\"net0\",\"up\":true,\"x\":1}\n",
    ] {
        let answer = ask(garbage).unwrap();
        assert!(answer.starts_with("{\"error\""), "{answer}");
    }
    let good = ask(b"{\"request\":\"status\"}\n").unwrap();
    assert!(good.starts_with("{\"ok\":{"), "{good}");
    let long = ask(&[b'x'; 4097]).unwrap();
    assert_eq!(
        long,
        "{\"error\":\"a request is a line of at most 4096 bytes\"}"
    );
    assert_eq!(lines.next().map(|l| l.ok()), None);
}

#[test]
fn too_many_clients_are_turned_away_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(config(dir.path(), 1)).unwrap();
    let socket = om.config().dpuctl_socket();
    let connect = || UnixStream::connect(&socket).unwrap();
    let clients: Vec<UnixStream> = (0..16).map(|_| connect()).collect();
    let mut answer = String::new();
    BufReader::new(connect()).read_line(&mut answer).unwrap();
    assert_eq!(
        answer,
        "{\"error\":\"the OM has 16 clients already; try again\"}\n"
    );
    drop(clients);
}
