//! The virtio network function (virtio 1.3 §5.1).
//!
//! * [`features`]: what is offered and what needs what;
//! * [`header`]: `virtio_net_hdr_v1` and the offload facts of a frame;
//! * [`filter`]: which frames the driver wants;
//! * [`hash`]: hashes of frames, for scaling and for the driver;
//! * [`config`]: what the data path adds to the device configuration;
//! * [`control`]: commands of the control queue;
//! * `session`: what a driver negotiated, and its commands on their way;
//! * [`steer`]: which queue pair a frame goes to;
//! * `lanes`: receive queues in a burst;
//! * [`links`]: the function's wires;
//! * [`moderation`]: when a driver hears of frames that were sent;
//! * [`queue`]: a virtqueue with its counters;
//! * [`receive`], [`transmit`]: the two ways of a frame;
//! * [`saved`]: what a driver set, for the next process;
//! * [`device`]: the function as the data path holds it.

pub mod config;
pub mod control;
pub mod device;
pub mod dirty;
pub mod features;
pub mod filter;
pub mod hash;
pub mod header;
mod lanes;
pub mod links;
pub mod moderation;
pub mod queue;
pub mod receive;
pub mod saved;
mod session;
pub mod steer;
pub mod transmit;

/// A MAC address.
pub type Mac = [u8; 6];
