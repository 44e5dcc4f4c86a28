//! A program that somebody wants an EM to run.

use m2m_fabric::proto::Formats;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long it may take to say what it knows.
const PATIENCE: Duration = Duration::from_secs(1);
/// More than this it does not say.
const LONGEST: u64 = 4096;

/// Why a program is not tried.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// Where a relative path leads is not the OM's to say.
    #[error("{} is not an absolute path", .0.display())]
    Relative(PathBuf),
    /// It could not be run.
    #[error("cannot run {}: {source}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It does not say which formats it knows.
    #[error("{} is no EM that can take over: `em --formats` {reason}", path.display())]
    Unknown {
        /// The program.
        path: PathBuf,
        /// What it did instead.
        reason: String,
    },
}

/// A program and what it can take over.
#[derive(Debug)]
pub struct Program {
    /// Where it is.
    pub path: PathBuf,
    /// What it says of itself.
    pub formats: Formats,
}

impl Program {
    /// Asks the program at `path`; takes up to a second.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn examine(path: PathBuf) -> Result<Self, ProgramError> {
        if !path.is_absolute() {
            return Err(ProgramError::Relative(path));
        }
        let text = match ask(&path) {
            Ok(Ok(text)) => text,
            Ok(Err(reason)) => return Err(ProgramError::Unknown { path, reason }),
            Err(source) => return Err(ProgramError::Run { path, source }),
        };
        match text.parse() {
            Ok(formats) => Ok(Self { path, formats }),
            Err(error) => Err(ProgramError::Unknown {
                path,
                reason: format!("is not understood: {error}"),
            }),
        }
    }
}

fn ask(path: &Path) -> std::io::Result<Result<String, String>> {
    let mut child = Command::new(path)
        .arg("--formats")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let status = wait(&mut child);
    // What a child of it holds open is not read to its end.
    let _ = child.kill();
    let ended = child.wait()?;
    let mut text = String::new();
    match (status?, child.stdout.take()) {
        (None, _) => Ok(Err("does not end".to_owned())),
        (Some(()), Some(output)) if ended.success() => {
            output.take(LONGEST).read_to_string(&mut text)?;
            Ok(Ok(text))
        }
        _ => Ok(Err(super::process::describe_exit(&Ok(ended)))),
    }
}

fn wait(child: &mut Child) -> std::io::Result<Option<()>> {
    let end = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(Some(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examine(text: &str) -> Result<Formats, String> {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("em");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = Program::examine(path.clone());
        let known = |e: ProgramError| e.to_string().replace(&path.display().to_string(), "P");
        program.map(|p| p.formats).map_err(known)
    }

    #[test]
    fn it_says_what_it_knows() {
        let formats = examine("[ \"$*\" = --formats ] && printf 'm2m 7\\nstate 1 2\\n'").unwrap();
        assert_eq!((formats.m2m, formats.state), (7, vec![1, 2]));
    }

    #[test]
    fn what_is_no_em_is_named() {
        let is = "P is no EM that can take over: `em --formats` ";
        let refused = |text| examine(text).unwrap_err().replace(is, "");
        assert_eq!(refused("exit 2"), "exited with status 2");
        assert_eq!(refused("sleep 30"), "does not end");
        assert!(refused("echo hello").starts_with("is not understood"));
        let missing = Program::examine("/nonexistent/em".into()).unwrap_err();
        let text = "cannot run /nonexistent/em: No such file or directory (os error 2)";
        assert_eq!(missing.to_string(), text);
        let relative = Program::examine("em".into()).unwrap_err();
        assert_eq!(relative.to_string(), "em is not an absolute path");
    }
}
