//! The Orchestration Module.

pub mod config;
