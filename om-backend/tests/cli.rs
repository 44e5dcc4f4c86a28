//! The two programs as their users meet them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Output};

fn om(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_om");
    Command::new(program).args(arguments).output().unwrap()
}

fn dpuctl(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_dpuctl");
    Command::new(program).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn write(dir: &Path, queue_size: u32) -> String {
    let path = dir.join("dpu.toml");
    let config = format!(
        "[dpu]\nrun_dir = \"{}\"\nem_binary = \"/nonexistent/em\"\n[[em]]\nname = \"em0\"\n\
         [[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\nmac = \"02:00:00:00:00:01\"\n\
         queue_size = {queue_size}\nport = {{ null = true }}\n",
        dir.display()
    );
    std::fs::write(&path, config).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn check_accepts_a_good_file_and_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), 256);
    let done = om(&["--config", &file, "--check"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_bad_file_is_one_sentence_and_status_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), 300);
    for arguments in [&["--config", &file, "--check"][..], &["--config", &file]] {
        let done = om(arguments);
        assert_eq!(done.status.code(), Some(1));
        assert_eq!(
            text(&done.stderr),
            format!(
                "om: {file}:10: `queue_size` is 300; it must be a power of two from 16 to 32768\n"
            )
        );
    }
}

#[test]
fn a_missing_em_is_one_sentence_and_status_1() {
    let dir = tempfile::tempdir().unwrap();
    let done = om(&["--config", &write(dir.path(), 256)]);
    assert_eq!(done.status.code(), Some(1));
    assert_eq!(
        text(&done.stderr),
        "om: /nonexistent/em is not a program that can be run; build it, or name it with `em_binary`\n"
    );
}

#[test]
fn dpuctl_says_that_the_om_is_not_running_with_status_3() {
    let done = dpuctl(&["--socket", "/nonexistent/dpuctl.sock", "status"]);
    assert_eq!(done.status.code(), Some(3));
    assert_eq!(
        text(&done.stderr),
        "dpuctl: the OM is not running: nobody listens on /nonexistent/dpuctl.sock; start \
         `om --config FILE`, or name its socket with `--socket`\n"
    );
}

#[test]
fn dpuctl_takes_its_options_before_and_after_the_command() {
    for arguments in [
        &["--json", "--socket", "/nonexistent/x", "status"][..],
        &[
            "link",
            "set",
            "net0",
            "up",
            "--json",
            "--socket",
            "/nonexistent/x",
        ],
    ] {
        assert_eq!(dpuctl(arguments).status.code(), Some(3), "{arguments:?}");
    }
    assert_eq!(
        dpuctl(&["link", "set", "net0", "sideways"]).status.code(),
        Some(2)
    );
}
