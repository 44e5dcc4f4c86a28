//! Where the OM is.

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use m2m_fabric::remote::Files;
use m2m_fabric::{Fabric, FabricError, Handler, local, remote};

/// Where an EM finds its OM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OmAddress {
    /// On this host, at a socket. The OM, or whoever started the EM, starts another in its place.
    Local(PathBuf),
    /// On another host. The EM stays and connects again when the OM is gone.
    Remote {
        /// `HOST:PORT`.
        address: String,
        /// What the EM proves who it is with.
        files: Files,
    },
}

impl OmAddress {
    /// Connects.
    pub(super) fn connect(
        &self,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<dyn Fabric>, FabricError> {
        match self {
            Self::Local(path) => local::connect(path, handler),
            Self::Remote { address, files } => remote::connect(address, files, handler),
        }
    }

    /// Whether it is on another host.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Remote { .. })
    }
}

impl Display for OmAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => path.display().fmt(f),
            Self::Remote { address, .. } => f.write_str(address),
        }
    }
}

/// Whether another attempt may do better although nobody changed anything here: the OM or the way to it was down.
pub(super) fn may_pass(error: &FabricError) -> bool {
    match error {
        FabricError::Down(reason) => may_pass(reason),
        FabricError::Unreachable { .. }
        | FabricError::Io { .. }
        | FabricError::Timeout(_)
        | FabricError::PeerClosed
        | FabricError::Silent(_) => true,
        _ => false,
    }
}

/// Pauses between attempts to reach an OM.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
    longest: Duration,
}

/// The first pause.
const FIRST: Duration = Duration::from_millis(100);
/// The longest while an OM on another host is away.
const LONGEST: Duration = Duration::from_secs(5);

impl Pauses {
    /// For an OM at `om`: for one on this host always the same.
    pub(super) fn new(om: &OmAddress) -> Self {
        Self {
            next: FIRST,
            longest: if om.is_remote() { LONGEST } else { FIRST },
        }
    }

    /// The next pause.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_for_an_om_on_another_host_only() {
        let remote = OmAddress::Remote {
            address: "om.example:4000".into(),
            files: Files {
                ca: "ca.pem".into(),
                certificate: "em1.pem".into(),
                key: "em1.key".into(),
            },
        };
        let mut pauses = Pauses::new(&remote);
        let all: Vec<u128> = (0..8).map(|_| pauses.next().as_millis()).collect();
        assert_eq!(all, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        let mut pauses = Pauses::new(&OmAddress::Local("/run/m2m.sock".into()));
        assert_eq!([pauses.next(), pauses.next()], [FIRST, FIRST]);
    }
}
