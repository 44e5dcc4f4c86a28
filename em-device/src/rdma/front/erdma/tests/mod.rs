//! The device by a small driver: one function that talks to itself.

mod bench;
mod commands;
mod datagrams;
mod errors;
mod random;
mod successor;
mod work;
