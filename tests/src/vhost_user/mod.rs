//! A VMM with a vhost-user front end, as QEMU has it: it shows the test driver a virtio device of its own and hands
//! rings, memory and eventfds to the back end.
//!
//! [`FrontEnd`] is a [`Vmm`](crate::client::Vmm), so that the driver of all other tests runs on it
//! ([`FrontEnd::driver`]). The control queue, which would be the front end's, is not offered to the driver; pairs are
//! enabled by [`FrontEnd::use_pairs`].

mod front_end;
mod registers;
pub mod wire;

pub use front_end::{FrontEnd, Slots};
