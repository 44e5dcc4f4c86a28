//! Engines that are joined in memory.

mod connection;
mod flow;
mod lab;
