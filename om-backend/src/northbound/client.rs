//! Asking the OM.

use super::protocol::{Answer, MAX_ANSWER, Request};
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens.
    #[error(
        "the OM is not running: nobody listens on {}; start `om --config FILE`, or name its socket \
         with `--socket`",
        .0.display()
    )]
    NotRunning(PathBuf),
    /// The socket is somebody else's.
    #[error("{} belongs to another user; run as that user or as root", .0.display())]
    NotPermitted(PathBuf),
    /// The conversation broke off.
    #[error("the OM did not answer: {0}")]
    Io(std::io::Error),
    /// The answer makes no sense.
    #[error("the answer of the OM is not understood, is it of another version? ({0})")]
    Format(serde_json::Error),
    /// The OM says no.
    #[error("{0}")]
    Refused(String),
}

/// Asks the OM at `socket`.
///
/// # Errors
/// [`AskError`]; its text is for people.
pub fn ask<T: DeserializeOwned>(socket: &Path, request: &Request) -> Result<T, AskError> {
    let mut stream = UnixStream::connect(socket).map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            AskError::NotRunning(socket.to_owned())
        }
        ErrorKind::PermissionDenied => AskError::NotPermitted(socket.to_owned()),
        _ => AskError::Io(e),
    })?;
    stream
        .set_read_timeout(Some(PATIENCE))
        .map_err(AskError::Io)?;
    let mut line = serde_json::to_vec(request).map_err(AskError::Format)?;
    line.push(b'\n');
    // A server that is full answers and closes without reading; its answer says more than EPIPE.
    let written = stream.write_all(&line);
    let mut answer = Vec::new();
    BufReader::new(stream)
        .take(MAX_ANSWER)
        .read_until(b'\n', &mut answer)
        .map_err(AskError::Io)?;
    if answer.is_empty() {
        written.map_err(AskError::Io)?;
        return Err(AskError::Io(ErrorKind::UnexpectedEof.into()));
    }
    match serde_json::from_slice(&answer).map_err(AskError::Format)? {
        Answer::Ok(value) => serde_json::from_value(value).map_err(AskError::Format),
        Answer::Error(reason) => Err(AskError::Refused(reason)),
    }
}
