//! Engines that are joined in memory.

mod connection;
mod errors;
mod flow;
mod hostile;
mod lab;
mod random;
mod speed;
mod states;
mod unreliable;
