//! RDMA: verbs on a function that a guest drives with the RDMA driver it has.
//!
//! A send's way: a doorbell → [`front`] reads the work queue entry into a [`verbs::WorkRequest`] →
//! [`engine`] (requester) → [`packet`] on a fabric to the peer's EM → its engine (responder) checks
//! and copies, memory to memory → the acknowledgement comes back → the engine completes → [`front`]
//! writes the completion queue entry and the interrupt.
//!
//! [`verbs`] is plain data and knows no driver; [`engine`] knows verbs and packets only; a folder of
//! [`front`] knows one driver's formats and owns no transport state.

pub mod engine;
pub mod fabric;
pub mod front;
pub mod function;
pub mod kept;
pub mod packet;
pub mod verbs;
