//! What has to outlive the process that serves a client, and who keeps it.

use std::os::fd::BorrowedFd;

/// A descriptor of a function that its process cannot make again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// The client's connection.
    Connection,
    /// The memory of [`crate::state::State`].
    State,
    /// The memory of a BAR that the client maps. The data side's to keep.
    Bar,
    /// The memory of objects that the driver made. The data side's to keep.
    Objects,
    /// A file of the client's memory.
    File(u32),
    /// The eventfd of a vector.
    Vector(u16),
}

/// Keeps descriptors of one function outside this process.
pub trait Keep: Send + Sync {
    /// Keeps a copy in place of what was kept under the same name. `true` once it outlives this process; `false`
    /// when what is kept cannot be relied on any more.
    fn keep(&self, what: Kept, fd: BorrowedFd<'_>) -> bool;
    /// Keeps it no longer; answers as [`Keep::keep`].
    fn forget(&self, what: Kept) -> bool;
    /// Keeps nothing any longer; answers as [`Keep::keep`].
    fn clear(&self) -> bool;
}
