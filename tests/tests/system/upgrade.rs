//! EMs that go on as another program while guests use them.

use crate::fixture::Pair;
use distdpu_tests::dpu::{Dpu, program};
use distdpu_tests::recovery::while_talking;
use distdpu_tests::virtio_net::Setup;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn script(directory: &TempDir, text: &str) -> PathBuf {
    let path = directory.path().join("em");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

fn upgrade(dpu: &Dpu, em: &str, binary: &Path) -> Result<(), String> {
    let words = ["upgrade", em, "--binary", binary.to_str().unwrap()];
    dpu.ctl(&words).map(drop).map_err(|e| e.to_string())
}

/// What the EM answers that is built here.
fn formats() -> String {
    let own = std::process::Command::new(program("em").unwrap())
        .arg("--formats")
        .output()
        .unwrap();
    String::from_utf8(own.stdout).unwrap()
}

#[test]
fn an_em_becomes_another_program_under_traffic() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("em-2");
    std::fs::copy(program("em").unwrap(), &copy).unwrap();
    let mut pair = Pair::started(Setup::default());
    let Pair { a, b, dpu } = &mut pair;
    while_talking([a, b], |tallies| {
        for em in [0, 1, 0] {
            tallies[0].hears()?;
            tallies[1].hears()?;
            let old = dpu.em_pid(em)?;
            upgrade(dpu, &format!("em{em}"), &copy).unwrap();
            let now = dpu.em_pid(em)?;
            assert_ne!(now, old);
            let exe = std::fs::read_link(format!("/proc/{now}/exe")).unwrap();
            assert_eq!(exe, copy);
        }
        tallies[0].hears()?;
        tallies[1].hears()
    })
    .unwrap();
    let status = pair.dpu.ctl(&["status"]).unwrap();
    let reason = status["ems"][0]["reason"].as_str().unwrap();
    assert_eq!(reason, format!("gives way to {}", copy.display()));
    assert!(pair.a.link_up().unwrap() && pair.b.link_up().unwrap());
}

#[test]
fn a_program_that_cannot_go_on_is_refused_before_anything_stops() {
    let directory = tempfile::tempdir().unwrap();
    let mut pair = Pair::started(Setup::default());
    let pid = pair.dpu.em_pid(0).unwrap();
    let refused = |text: &str| {
        let path = script(&directory, text);
        let error = upgrade(&pair.dpu, "em0", &path).unwrap_err();
        error.replace(path.to_str().unwrap(), "P")
    };
    let m2m = formats().lines().next().unwrap().to_owned();
    let layout = refused(&format!("printf '{m2m}\\nstate 999\\n'"));
    assert!(
        layout.contains("P cannot go on with net0, whose state has layout version"),
        "{layout}"
    );
    let other = refused("printf 'm2m 999\\nstate 1\\n'");
    assert!(other.contains("P speaks version 999 of M2M"), "{other}");
    let none = refused("exit 1");
    assert!(
        none.contains("`em --formats` exited with status 1"),
        "{none}"
    );
    let missing = upgrade(&pair.dpu, "em0", Path::new("/nonexistent/em")).unwrap_err();
    assert!(missing.contains("No such file or directory"), "{missing}");
    let unknown = upgrade(&pair.dpu, "em9", &program("em").unwrap()).unwrap_err();
    assert!(
        unknown.contains("there is no EM \"em9\"; there are em0, em1"),
        "{unknown}"
    );
    assert_eq!(pair.dpu.em_pid(0).unwrap(), pid);
    pair.works();
}

#[test]
fn a_program_that_breaks_its_word_gives_way_to_the_one_before() {
    let directory = tempfile::tempdir().unwrap();
    let mut pair = Pair::started(Setup::default());
    let words = formats().replace('\n', "\\n");
    for (then, reason) in [
        ("exit 7", "the other exited with status 7"),
        ("exec sleep 60", "the other did not connect within 2 s"),
    ] {
        let says = format!("[ \"$1\" = --formats ] && printf '{words}' && exit\n{then}");
        let error = upgrade(&pair.dpu, "em0", &script(&directory, &says)).unwrap_err();
        assert!(error.contains(reason), "{error}");
        pair.works();
        assert!(pair.a.link_up().unwrap());
    }
}
