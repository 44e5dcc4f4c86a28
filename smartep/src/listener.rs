//! The sockets that VMMs connect to. The control side makes and keeps them, so that a function's path stays while the
//! process that serves it is replaced, which accepts on a copy; unless that one is on another host and makes its own.

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Connections that may wait: one VMM, and those that are to be turned away.
const BACKLOG: i32 = 16;

/// Why a listening socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody listens there.
    #[error(
        "the socket path {} is in use: another process listens on it; stop that process or choose \
         another path",
        .0.display()
    )]
    InUse(PathBuf),
    /// A file is there that is no socket.
    #[error("{} exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {}: {source}; is its folder there and writable?", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A listening stream socket with a path, for its owner only (mode 0600). Dropping it removes the
/// path, if it still is its own.
#[derive(Debug)]
pub struct PathListener {
    socket: Option<OwnedFd>,
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
    /// Nobody listens here: the function connects to who does.
    dials: bool,
}

impl PathListener {
    /// Listens at `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// [`ListenError`]; nothing was made then.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let io = |e: Errno| ListenError::Io {
            path: path.to_owned(),
            source: e.into(),
        };
        remove_stale(path)?;
        let socket = stream_socket().map_err(io)?;
        let address = SocketAddrUnix::new(path).map_err(io)?;
        rustix::net::bind(&socket, &address).map_err(|e| match e {
            Errno::ADDRINUSE => ListenError::InUse(path.to_owned()),
            e => io(e),
        })?;
        // Before `listen` nobody can connect, so nobody gets in before the mode is right.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(io)?;
        let file = identity(path).map_err(io)?;
        rustix::net::listen(&socket, BACKLOG).map_err(io)?;
        Ok(Self {
            socket: Some(socket),
            path: path.to_owned(),
            file,
            dials: false,
        })
    }

    /// The place of a function that connects to `path` itself: its socket is not bound, and the path is another's.
    /// Without `now` there is no socket, since an EM may return with one.
    ///
    /// # Errors
    /// [`ListenError::Io`].
    pub fn of_front_end(path: &Path, now: bool) -> Result<Self, ListenError> {
        let mut place = Self::of_another(path);
        place.dials = true;
        if now {
            place.again()?;
        }
        Ok(place)
    }

    /// Makes the socket after all, since no EM returned with it.
    ///
    /// # Errors
    /// [`ListenError`]; nothing changes then.
    pub fn again(&mut self) -> Result<(), ListenError> {
        if !self.dials {
            *self = Self::bind(&self.path)?;
            return Ok(());
        }
        let socket = stream_socket().map_err(|e| ListenError::Io {
            path: self.path.clone(),
            source: e.into(),
        })?;
        self.socket = Some(socket);
        Ok(())
    }

    /// As [`bind`](Self::bind); makes the folder too.
    ///
    /// # Errors
    /// [`ListenError`]; no socket was made then.
    pub fn make(path: &Path) -> Result<Self, ListenError> {
        if let Some(folder) = path.parent() {
            let made = std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(folder);
            made.map_err(|source| ListenError::Io {
                path: path.to_owned(),
                source,
            })?;
        }
        Self::bind(path)
    }

    /// Nobody of this process listens: another one may do so at `path`, and give the socket later.
    pub fn of_another(path: &Path) -> Self {
        Self {
            socket: None,
            path: path.to_owned(),
            file: (0, 0),
            dials: false,
        }
    }

    /// Takes the socket that listens at the path, as the other process gave it.
    pub fn adopt(&mut self, socket: OwnedFd) {
        if !self.dials {
            self.file = identity(&self.path).unwrap_or_default();
        }
        self.socket = Some(socket);
    }

    /// The socket, if this process has one.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PathListener {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.file) {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
}

fn identity(path: &Path) -> Result<(u64, u64), Errno> {
    rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let io = |e: Errno| ListenError::Io {
        path: path.to_owned(),
        source: e.into(),
    };
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(io(e)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    let probe = stream_socket().map_err(io)?;
    let address = SocketAddrUnix::new(path).map_err(io)?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map_err(io),
        // connected, or of another type, or not ours to connect to: somebody has it
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn it_listens_for_its_owner_only_and_takes_its_path_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let listener = PathListener::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_in_use_is_left_alone_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let _other = UnixListener::bind(&path).unwrap();
        let e = PathListener::bind(&path).unwrap_err().to_string();
        assert_eq!(
            e,
            format!(
                "the socket path {} is in use: another process listens on it; stop that process \
                 or choose another path",
                path.display()
            )
        );
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_socket_whose_listener_died_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let _listener = PathListener::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn the_socket_of_a_front_end_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let _front_end = UnixListener::bind(&path).unwrap();
        let mut place = PathListener::of_front_end(&path, false).unwrap();
        assert!(place.socket().is_none());
        place.again().unwrap();
        let socket = place.socket().unwrap().try_clone_to_owned().unwrap();
        place.adopt(socket);
        drop(place);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(
            PathListener::bind(&path),
            Err(ListenError::NotASocket(_))
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
