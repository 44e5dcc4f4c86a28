//! The lines.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Longest request in bytes, without the line's end.
pub const MAX_REQUEST: usize = 4096;
/// Longest answer in bytes that a client takes.
pub const MAX_ANSWER: u64 = 16 << 20;

/// A question or an order, for example `{"request":"link-set","function":"net0","up":false}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The OM and its EMs; answered by [`super::view::Status`].
    Status,
    /// The functions; answered by [`super::view::Functions`].
    Functions,
    /// The counters; answered by [`super::view::Stats`].
    Stats,
    /// Everything the OM knows; answered by [`super::view::Inspect`].
    Inspect,
    /// Lets an EM go on as another program; answered by `{}` when it does.
    Upgrade {
        /// Name of the EM.
        em: String,
        /// Absolute path of the program.
        binary: PathBuf,
    },
    /// Lets a function's link be up or not; answered by `{}`.
    LinkSet {
        /// Name of the function.
        function: String,
        /// Whether it may be up.
        up: bool,
    },
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// What was asked for.
    Ok(serde_json::Value),
    /// Why not, in a sentence.
    Error(String),
}
