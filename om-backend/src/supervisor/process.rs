//! One EM process.

use crate::fd_store::VARIABLES;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// Why an EM could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// Its log could not be opened.
    #[error("cannot write the log {}: {source}", path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The program could not be run.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A running child. The process is not ended by dropping this: an EM outlives its OM.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    /// Names this very process, also after its number was given to another.
    pidfd: OwnedFd,
}

impl Process {
    /// Starts `program` for the EM `name`; both its outputs are appended to `log`. `exited` is called
    /// from a thread of its own when it ended.
    ///
    /// # Errors
    /// [`SpawnError`]; nothing runs then.
    pub fn spawn(
        program: &Path,
        name: &str,
        m2m_socket: &Path,
        log: &Path,
        exited: impl FnOnce(u32, std::io::Result<ExitStatus>) + Send + 'static,
    ) -> Result<Self, SpawnError> {
        let log_error = |source| SpawnError::Log {
            path: log.to_owned(),
            source,
        };
        let start_error = |source| SpawnError::Start {
            path: program.to_owned(),
            source,
        };
        let output = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(log)
            .map_err(log_error)?;
        let mut command = Command::new(program);
        for variable in VARIABLES {
            command.env_remove(variable);
        }
        let mut child = command
            .arg("--om")
            .arg(m2m_socket)
            .args(["--name", name])
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(log_error)?)
            .stderr(output)
            // Ctrl-C at a terminal is for the OM, which then ends its EMs in order.
            .process_group(0)
            .spawn()
            .map_err(start_error)?;
        let pid = child.id();
        // Nobody has waited for the child yet, so its number is still its own.
        let pidfd = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(rustix::io::Errno::SRCH)
            .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
        let pidfd = match pidfd {
            Ok(pidfd) => pidfd,
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(start_error(e.into()));
            }
        };
        let process = Self { pid, pidfd };
        std::thread::Builder::new()
            .name(format!("wait-{name}"))
            .spawn(move || {
                let status = child.wait();
                exited(pid, status);
            })
            .map_err(|e| {
                process.kill();
                start_error(e)
            })?;
        Ok(process)
    }

    /// Watches a process that another OM started. `exited` is called from a thread of its own when it ended.
    ///
    /// # Errors
    /// What the system said; there may be no such process.
    pub fn adopt(
        name: &str,
        pid: u32,
        exited: impl FnOnce(u32, std::io::Result<ExitStatus>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or(rustix::io::Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(raw, PidfdFlags::empty())?;
        let watched = pidfd.try_clone()?;
        std::thread::Builder::new()
            .name(format!("wait-{name}"))
            .spawn(move || {
                let mut fds = [PollFd::new(&watched, PollFlags::IN)];
                while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
                let unknown = "it was started by another OM";
                exited(pid, Err(std::io::Error::other(unknown)));
            })?;
        Ok(Self { pid, pidfd })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Ends it at once. Nothing happens when it has ended already.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// How a process ended, for people: `exited with status 1`.
pub fn describe_exit(status: &std::io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with status {code}"),
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(e) => format!("ended, with a status that cannot be known: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    fn script(dir: &Path, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = dir.join("em");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn spawn(dir: &Path, text: &str) -> (Process, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel();
        let process = Process::spawn(
            &script(dir, text),
            "em0",
            Path::new("/x/m2m.sock"),
            &dir.join("em0.log"),
            move |_, status| {
                let _ = sender.send(describe_exit(&status));
            },
        )
        .unwrap();
        (process, receiver)
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn its_end_is_reported_and_its_output_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (_process, end) = spawn(dir.path(), "echo \"$@\"; echo bad >&2; exit 3");
        assert_eq!(end.recv_timeout(LONG).unwrap(), "exited with status 3");
        assert_eq!(
            std::fs::read_to_string(dir.path().join("em0.log")).unwrap(),
            "--om /x/m2m.sock --name em0\nbad\n"
        );
    }

    #[test]
    fn a_process_that_does_not_listen_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (process, end) = spawn(dir.path(), "trap '' TERM INT; while :; do sleep 1; done");
        process.kill();
        assert_eq!(end.recv_timeout(LONG).unwrap(), "was ended by signal 9");
        process.kill();
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let e = Process::spawn(
            Path::new("/nonexistent/em"),
            "em0",
            Path::new("/x"),
            &dir.path().join("em0.log"),
            |_, _| {},
        )
        .unwrap_err();
        assert_eq!(
            e.to_string(),
            "cannot start /nonexistent/em: No such file or directory (os error 2)"
        );
    }
}
