//! The transport between two hosts: TCP with TLS 1.3, where each side proves with a certificate who it is.
//!
//! Both sides have the certificate of one authority. The OM's certificate names [`OM_NAME`], an EM's the EM, as DNS
//! names among the subject's alternative names. There is no connection without certificates, and none that only one
//! side verified.
//!
//! Inside TLS travel the frames of [`crate::wire`]: messages as on the local transport, register accesses and their
//! completions, and the content of shadows. Everything of one direction arrives in the order in which it was sent.
//! Descriptors stay on their host.
//!
//! A side that hears nothing for [`SILENCE`] gives the connection up.

mod credentials;
mod dial;
mod endpoint;
mod handshake;
mod listener;
mod names;
mod outbox;
mod registers;
mod stream;
#[cfg(test)]
mod tests;

pub use credentials::{CredentialsError, Files};
pub use dial::connect;
pub use listener::{RemoteListener, RemotePending};
pub use names::is_certifiable;

use std::time::Duration;

/// What the OM's certificate must name.
pub const OM_NAME: &str = "om";

/// A peer that is silent for this long is gone: ten heartbeats.
pub const SILENCE: Duration = Duration::from_secs(5);

/// How long connecting, the handshake and the greeting may take, each.
const PATIENCE: Duration = Duration::from_secs(5);
