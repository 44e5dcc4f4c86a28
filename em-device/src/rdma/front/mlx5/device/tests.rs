//! A driver in a few lines: the probe and unload of the stock driver, by the order of its commands.

mod driver;
mod ethernet;
mod frames;
mod mapped;
mod objects;
mod probe;
mod random;
mod successor;
