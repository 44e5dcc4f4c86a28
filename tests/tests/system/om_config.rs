//! `om --check` names the line and the remedy.

use distdpu_tests::dpu::{Net, config, program};
use std::path::Path;
use std::process::{Command, Output};

fn check(text: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("distdpu.toml");
    std::fs::write(&file, text).unwrap();
    Command::new(program("om").unwrap())
        .arg("--check")
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap()
}

fn good() -> String {
    config(
        Path::new("/tmp/distdpu-check"),
        &[Net::default(), Net::default()],
    )
}

#[test]
fn a_right_file_passes() {
    let done = check(&good());
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    assert!(
        !Path::new("/tmp/distdpu-check").exists(),
        "a check makes nothing"
    );
}

#[test]
fn each_mistake_is_one_sentence_with_its_line() {
    let cases: &[(&str, &str, &str, &str)] = &[
        ("an unknown key", "mtu = 9000", "mtus = 9000", "mtus"),
        ("an MTU out of range", "mtu = 9000", "mtu = 9001", "9000"),
        (
            "a MAC address of 5 bytes",
            "02:00:00:00:00:01",
            "02:00:00:00:01",
            "mac",
        ),
        (
            "a multicast MAC address",
            "02:00:00:00:00:01",
            "03:00:00:00:00:01",
            "mac",
        ),
        (
            "a queue size of 100",
            "queue_size = 256",
            "queue_size = 100",
            "power of two",
        ),
        ("an unknown kind", "virtio-net", "virtio-blk", "virtio-net"),
        (
            "a network that is not there",
            "network = \"lab\"",
            "network = \"wan\"",
            "wan",
        ),
        (
            "a string for a number",
            "queue_pairs = 1",
            "queue_pairs = \"1\"",
            "queue_pairs",
        ),
        (
            "the same EM twice",
            "name = \"em1\"",
            "name = \"em0\"",
            "em0",
        ),
        ("not TOML", "kind = \"virtio-net\"", "kind = = 1", "TOML"),
    ];
    for (what, from, to, word) in cases {
        let text = good();
        assert!(text.contains(from), "{what}: {from} is not in the file");
        let line = 1 + text[..text.find(from).unwrap()].matches('\n').count();
        let done = check(&text.replacen(from, to, 1));
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success(), "{what} was taken");
        assert!(said.contains(word), "{what}: {said}");
        assert!(
            said.contains(&format!(":{line}:")),
            "{what} at line {line}: {said}"
        );
        assert_eq!(
            said.trim().lines().count(),
            1,
            "{what}: one sentence: {said}"
        );
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let done = Command::new(program("om").unwrap())
        .args(["--check", "--config", "/nonexistent/distdpu.toml"])
        .output()
        .unwrap();
    assert!(!done.status.success());
    assert!(String::from_utf8_lossy(&done.stderr).contains("/nonexistent/distdpu.toml"));
}
