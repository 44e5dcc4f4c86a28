//! A guest that writes random bytes: what it may do, and what must be left unharmed.
//!
//! [`World`] has a hostile function and a neighbour that is connected with it, each with memory of its
//! own. A [`Source`] decides what the hostile driver does in each case: valid objects first, then
//! commands, work queue entries, doorbells, registers and queue contents that are valid but for some
//! bytes, or are no more than bytes. [`World::check`] says whether only the hostile function was harmed
//! and makes it usable again.
//!
//! Tests draw cases from a seed, the fuzz targets from the bytes that they are given.

// It is test code, wherever it is compiled: what must not be ends it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod around;
mod connection;
mod entries;
mod frames;
mod hostile;
mod memory;
mod node;
mod objects;
mod source;
mod world;

#[cfg(test)]
mod tests;

pub use source::Source;
pub use world::World;

use m2m_fabric::proto::RdmaLinkLayer;

/// Cases between two checks, when bytes decide.
const CHECK_EVERY: u32 = 256;

/// Cases as `bytes` decide until they are used up, and a check.
///
/// # Panics
///
/// When something else than the hostile function was harmed.
pub fn run(bytes: &[u8]) {
    // A fuzzer learns the secret from the search for it; who says it himself has not read it.
    if world::names_secret(bytes) {
        return;
    }
    let mut source = Source::bytes(bytes);
    let link = match source.below(2) {
        0 => RdmaLinkLayer::Infiniband,
        _ => RdmaLinkLayer::Ethernet,
    };
    let mut world = World::new(link);
    let mut cases = 0;
    while !source.is_over() {
        world.case(&mut source);
        cases += 1;
        if cases % CHECK_EVERY == 0 {
            world.check();
        }
    }
    world.check();
}
