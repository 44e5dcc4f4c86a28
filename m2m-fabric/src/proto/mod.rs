//! The messages of the fabric: what the OM tells an EM and what an EM answers.
//!
//! They are plain data with `serde`; [`crate::wire`] frames them, a transport carries them. An
//! incompatible change raises [`VERSION`]; a peer of another version is refused at the hello.

mod formats;
mod function;
mod image;
mod link;
mod rdma;
mod register;
mod stats;

pub use formats::*;
pub use function::*;
pub use image::*;
pub use link::*;
pub use rdma::*;
pub use register::*;
pub use stats::*;

use serde::{Deserialize, Serialize};

/// Version of every message below; both sides must have the same.
pub const VERSION: u16 = 6;

/// First message on a connection, from the EM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The EM's name as the OM's configuration has it, for example `em0`.
    pub em: String,
    /// Process id of the EM, as the EM sees it.
    pub pid: u32,
    /// Version string of the program, for people.
    pub program: String,
    /// It lost its OM while it served clients, and returns with its functions to whoever took that OM's place.
    pub returns: bool,
}

/// What one side asks of the other; every request is answered by one [`Reply`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// EM → OM, once, before anything else.
    Hello(Hello),
    /// OM → EM: present and serve a function. Three descriptors ride along: the listening socket that
    /// the VMM connects to, the memfd of the presentation's shadow, and the socket of its keeper, see
    /// [`crate::keeper`]. None where descriptors cannot travel: the EM makes the socket of
    /// [`FunctionSpec::socket`], an [`Image`] came before, and nothing is kept.
    AddFunction(Box<FunctionSpec>),
    /// OM → EM: stop serving a function and drop its connection.
    RemoveFunction {
        /// Id from [`FunctionSpec::id`].
        function: u32,
    },
    /// OM → EM: join a wire. Descriptors by [`LinkKind`].
    AddLink(LinkSpec),
    /// OM → EM: a function has all the wires that it gets for now. One that took the place of another moves
    /// frames from here on.
    Wired {
        /// Id from [`FunctionSpec::id`].
        function: u32,
    },
    /// OM → EM: leave a wire, because its peer went away or the configuration changed.
    RemoveLink {
        /// Id from [`LinkSpec::id`].
        link: u32,
    },
    /// OM → EM: the counters, now.
    Stats,
    /// EM → OM: a function that the EM serves, when it returns. Two descriptors ride along: the listening socket and
    /// the former OM's shadow. None where descriptors cannot travel; an [`Image`] came before.
    ReturnFunction {
        /// Id from [`FunctionSpec::id`].
        function: u32,
        /// Where it is in its life.
        state: FunctionState,
    },
    /// EM → OM: a wire that the EM has, when it returns. Descriptors by [`LinkKind`].
    ReturnLink(LinkSpec),
    /// EM → OM: that was all.
    Returned,
    /// OM → EM: a function that was returned is this OM's now. Two descriptors ride along: the memfd of the shadow and
    /// the socket of the keeper. None where descriptors cannot travel; an [`Image`] came before.
    Adopt {
        /// Id from [`FunctionSpec::id`].
        function: u32,
    },
    /// About RDMA.
    Rdma(RdmaRequest),
    /// OM → EM: stop all functions in order and exit with status 0.
    Shutdown,
}

/// Answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Ok,
    /// Not done, and why, in a sentence for the log and for `dpuctl`.
    Failed(String),
    /// Answer to [`Request::Stats`].
    Stats(Box<EmStats>),
    /// Answer to [`RdmaRequest::Resolve`].
    Path(RdmaPath),
}

/// News that nobody answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// Both ways, at least every [`HEARTBEAT_INTERVAL_MS`] while the connection is up.
    Heartbeat {
        /// Counts up by one each.
        sequence: u64,
        /// Data-path progress: grows whenever the data path comes round. A value that stands still
        /// although `backlog` is set tells a stuck data path from an idle one.
        progress: u64,
        /// Whether the data path has something to do. False while it sleeps, also when it waits for
        /// somebody else: a peer to make room, a guest to offer buffers.
        backlog: bool,
    },
    /// EM → OM: a function's life cycle went on.
    Function {
        /// Id from [`FunctionSpec::id`].
        function: u32,
        /// Where it is now.
        state: FunctionState,
    },
    /// OM → EM: bytes of the function's shadow changed without an access by the guest (link status,
    /// say); the EM raises the configuration-change interrupt.
    ConfigChanged {
        /// Id from [`FunctionSpec::id`].
        function: u32,
    },
}

/// Longest pause between two heartbeats on a healthy connection, in milliseconds.
pub const HEARTBEAT_INTERVAL_MS: u64 = 500;
