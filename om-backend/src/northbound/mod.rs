//! What the OM tells people and scripts: JSON lines over a unix socket.
//!
//! [`protocol`] has the messages and [`view`] what is in them; [`server`] is in the OM, [`client`] and [`table`] in
//! `dpuctl`. One line is one [`protocol::Request`]; each is answered by one line.

pub mod client;
pub mod protocol;
pub mod server;
pub mod table;
pub mod view;
