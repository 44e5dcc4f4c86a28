//! EM processes that the OM starts. This test program plays the EM too: the OM runs it again with
//! [`plays_an_em`] as the only test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake_em;

use fake_em::{FakeEm, LONG, config, query};
use om_backend::Om;
use om_backend::config::Config;
use om_backend::northbound::protocol::Request;
use om_backend::northbound::view::{EmView, Status};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Not a test of anything, but the EM of the tests below.
#[test]
fn plays_an_em() {
    let (Ok(socket), Ok(name)) = (std::env::var("FAKE_EM_OM"), std::env::var("FAKE_EM_NAME"))
    else {
        return;
    };
    let em = FakeEm::try_join(Path::new(&socket), &name).unwrap();
    em.wait_down_or_shutdown();
    std::process::exit(0);
}

/// A configuration with one EM that runs `script`, a shell script with the arguments of `em`.
fn managed(dir: &Path, script: &str) -> Config {
    let path = dir.join("em");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut config = config(&dir.join("run"), 1);
    config.em_binary = Some(path);
    config.ems[0].managed = true;
    config
}

/// A configuration whose EM works.
fn working(dir: &Path) -> Config {
    playing(dir, "fine")
}

/// A configuration whose EM does; its data path is `fine` or `stuck`.
fn playing(dir: &Path, progress: &str) -> Config {
    let own = std::env::current_exe().unwrap();
    managed(
        dir,
        &format!(
            "FAKE_EM_PROGRESS={progress} FAKE_EM_OM=\"$2\" FAKE_EM_NAME=\"$4\" exec {} --exact plays_an_em --nocapture",
            own.display()
        ),
    )
}

fn wait_em(om: &Om, what: &str, wanted: impl Fn(&EmView) -> bool) -> EmView {
    let deadline = Instant::now() + LONG;
    loop {
        let status: Status = query(om, &Request::Status);
        let em = status.ems[0].clone();
        if wanted(&em) {
            return em;
        }
        assert!(Instant::now() < deadline, "never {what}: {em:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(em: &EmView, signal: Signal) {
    let pid = Pid::from_raw(em.pid.unwrap() as i32).unwrap();
    kill_process(pid, signal).unwrap();
}

fn runs(em: &EmView) -> bool {
    Path::new(&format!("/proc/{}", em.pid.unwrap())).exists()
}

#[test]
fn an_em_is_started_and_ended_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(working(dir.path())).unwrap();
    let em = wait_em(&om, "up", |em| em.state == "up");
    assert!(runs(&em));
    om.stop();
    assert!(!runs(&em));
    let left: Vec<_> = std::fs::read_dir(dir.path().join("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["em0.log"]);
}

#[test]
fn a_killed_em_is_replaced_and_the_reason_kept() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(working(dir.path())).unwrap();
    let first = wait_em(&om, "up", |em| em.state == "up");
    signal(&first, Signal::KILL);
    let second = wait_em(&om, "up again", |em| {
        em.state == "up" && em.pid != first.pid
    });
    assert_eq!(second.restarts, 1);
    assert_eq!(second.reason.as_deref(), Some("was ended by signal 9"));
}

#[test]
fn a_silent_em_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(working(dir.path())).unwrap();
    let first = wait_em(&om, "up", |em| em.state == "up");
    signal(&first, Signal::STOP);
    let second = wait_em(&om, "up again", |em| {
        em.state == "up" && em.pid != first.pid
    });
    let reason = second.reason.unwrap();
    assert!(reason.starts_with("was silent for "), "{reason}");
}

#[test]
fn an_em_whose_data_path_stands_still_with_work_is_replaced() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let busy = Om::start(working(other.path())).unwrap();
    let healthy = wait_em(&busy, "up", |em| em.state == "up");
    let om = Om::start(playing(dir.path(), "stuck")).unwrap();
    let first = wait_em(&om, "up", |em| em.state == "up");
    let second = wait_em(&om, "up again", |em| {
        em.state == "up" && em.pid != first.pid
    });
    let reason = second.reason.unwrap();
    assert!(
        reason.starts_with("its data path was stuck for "),
        "{reason}"
    );
    assert!(!runs(&first));
    let same = wait_em(&busy, "up", |em| em.state == "up");
    assert_eq!(
        same.pid, healthy.pid,
        "one that is busy and comes round stays"
    );
}

#[test]
fn an_em_that_fails_at_once_is_tried_again_and_its_exit_status_kept() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(managed(dir.path(), "echo no memory; exit 7")).unwrap();
    let em = wait_em(&om, "tried again", |em| em.restarts >= 2);
    assert_eq!(em.reason.as_deref(), Some("exited with status 7"));
    om.stop();
    let log = std::fs::read_to_string(dir.path().join("run/em0.log")).unwrap();
    assert!(log.starts_with("no memory\nno memory\n"), "{log}");
}

#[test]
fn an_em_that_does_not_end_is_killed_when_the_om_stops() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(working(dir.path())).unwrap();
    let em = wait_em(&om, "up", |em| em.state == "up");
    signal(&em, Signal::STOP);
    om.stop();
    assert!(!runs(&em));
}

#[test]
fn nobody_else_takes_the_place_of_a_managed_em() {
    let dir = tempfile::tempdir().unwrap();
    let om = Om::start(managed(dir.path(), "exec sleep 100")).unwrap();
    let reason = FakeEm::try_join(&om.config().m2m_socket(), "em0")
        .err()
        .unwrap();
    assert_eq!(
        reason,
        "the OM starts EM \"em0\" itself; set `managed = false` to start it yourself"
    );
}
