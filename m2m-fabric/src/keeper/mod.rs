//! The keeper: descriptors that an EM cannot make again, held by the OM while the EM lives and for the one that
//! takes its place.
//!
//! No VMM connects again after its device's process died, so what a function needs of a client has to outlive that
//! process: the connection itself, guest memory, interrupt eventfds, the state. [`Keeper`] is the EM's end,
//! [`Store`] what the OM has. They talk over a socket pair of their own, one per function and EM process, because
//! what was sent must count when the sender is dead: a connection that went down drops what waits in it, this
//! socket is read to its end. So a descriptor is safe as soon as [`Keeper::keep`] returns.
//!
//! Packets are [`wire`]'s. The OM begins with everything it holds and an end mark; after that only the EM speaks.

mod client;
mod store;
mod wire;

pub use client::{Keeper, KeeperError, Restored};
pub use store::{Change, MAX_KEPT, Store};

/// Names a descriptor of a function. What is behind a key is the EM's matter but for [`Key::CONNECTION`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

impl Key {
    /// The connected socket of the client. Without it there is nothing to take over.
    pub const CONNECTION: Self = Self(1 << 32);
    /// The memory with the function's state.
    pub const STATE: Self = Self(2 << 32);
    /// The memory of a BAR that the client maps.
    pub const BAR: Self = Self(5 << 32);
    /// The memory with the objects of an RDMA function.
    pub const OBJECTS: Self = Self(6 << 32);
    const FILE: u64 = 3;
    const VECTOR: u64 = 4;

    /// A file of guest memory.
    pub const fn file(number: u32) -> Self {
        Self(Self::FILE << 32 | number as u64)
    }

    /// The eventfd of an interrupt vector.
    pub const fn vector(number: u16) -> Self {
        Self(Self::VECTOR << 32 | number as u64)
    }

    /// The number, when it is a file.
    pub fn as_file(self) -> Option<u32> {
        (self.0 >> 32 == Self::FILE).then_some(self.0 as u32)
    }

    /// The number, when it is a vector.
    pub fn as_vector(self) -> Option<u16> {
        (self.0 >> 32 == Self::VECTOR).then_some(self.0 as u16)
    }

    /// As a number, for whoever keeps descriptors elsewhere.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// The key with this number.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests;
