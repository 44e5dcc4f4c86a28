//! The only code with `unsafe`: memory that other processes write at the same time.

pub(crate) mod mapping;
pub(crate) mod span;
