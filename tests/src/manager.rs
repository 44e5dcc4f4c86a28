//! A service manager with a descriptor store, as far as the OM can tell: it takes `FDSTORE=1` and `FDSTOREREMOVE=1`
//! (sd_notify(3)), and starts programs with what is stored (sd_listen_fds(3)).

use crate::{Error, Result};
use command_fds::{CommandFdExt, FdMapping};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::ffi::OsStr;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

/// First number of a passed descriptor.
const FIRST: i32 = 3;

type Stored = Arc<Mutex<Vec<(String, OwnedFd)>>>;

/// See the module. Its thread ends with the process.
#[derive(Debug)]
pub struct ServiceManager {
    path: PathBuf,
    stored: Stored,
}

impl ServiceManager {
    /// Listens at `path`.
    ///
    /// # Errors
    /// The system refused.
    pub fn start(path: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        let stored = Stored::default();
        let inbox = stored.clone();
        std::thread::spawn(move || {
            while let Ok((text, fds)) = receive(&socket) {
                follow(&inbox, &text, fds);
            }
        });
        Ok(Self {
            path: path.to_owned(),
            stored,
        })
    }

    /// Names of what is stored, in order.
    pub fn names(&self) -> Vec<String> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.iter().map(|(name, _)| name.clone()).collect()
    }

    /// A command for `program` that gets what is stored.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
        let mut mappings = Vec::new();
        for ((_, fd), child_fd) in stored.iter().zip(FIRST..) {
            let parent_fd = fd.try_clone()?;
            mappings.push(FdMapping {
                parent_fd,
                child_fd,
            });
        }
        // Only the process itself knows the number it is going to have.
        let mut command = Command::new("sh");
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh"])
            .arg(program)
            .env("NOTIFY_SOCKET", &self.path)
            .env("LISTEN_FDS", names.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"))
            .fd_mappings(mappings)
            .map_err(|e| Error::Harness(e.to_string()))?;
        Ok(command)
    }
}

fn receive(socket: &UnixDatagram) -> std::io::Result<(String, Vec<OwnedFd>)> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let text = bytes.get(..got.bytes).unwrap_or_default();
    Ok((String::from_utf8_lossy(text).into_owned(), fds))
}

fn follow(stored: &Stored, text: &str, fds: Vec<OwnedFd>) {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let mut stored = stored.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(name) = value("FDNAME=") else {
        return;
    };
    match (value("FDSTORE="), value("FDSTOREREMOVE=")) {
        (Some("1"), None) => stored.extend(fds.into_iter().map(|fd| (name.to_owned(), fd))),
        (None, Some("1")) => stored.retain(|(stored, _)| stored != name),
        _ => {}
    }
}
