//! Responder: RDMA WRITE, RDMA READ, atomics.

use super::Context;
use super::memory::{Cursor, Fault, walk};
use super::qp::Qp;
use super::responder::{Failure, Message};
use super::tables::Shared;
use crate::rdma::packet::{Request, Tail, Verdict};
use crate::rdma::verbs::{Denied, Done, Front, MemKey, Peer, Rights, Status};
use dot_iommu::Access;
use std::sync::atomic::AtomicU64;
use vm_memory::VolatileMemory;

impl<F: Front> Qp<F> {
    pub(super) fn accessed(
        &mut self,
        peer: Peer,
        request: &Request,
        access: RemoteAccess,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> Result<Verdict, Failure> {
        let RemoteAccess {
            read,
            addr,
            key,
            total,
            len,
        } = access;
        let needed = if read {
            Rights::REMOTE_READ
        } else {
            Rights::REMOTE_WRITE
        };
        let (left, total) = match self.responder.message {
            Message::Access { left, total, .. } => (left, total),
            _ => (total, total),
        };
        let complete = if request.last {
            len == left
        } else {
            len < left
        };
        if !complete || read && self.attributes.max_dest_reads == 0 {
            return Err(Verdict::InvalidRequest.into());
        }
        if !self.attributes.remote_rights.allow(needed) {
            return Err(Verdict::Access.into());
        }
        if request.first && total != 0 {
            check(
                sh.regions
                    .check(key, self.pd, addr, u64::from(total), needed),
            )?;
        }
        // Immediate data needs a receive, and finding none leaves everything as it was.
        let taken = match request.tail {
            Tail::Immediate(value) if !read => Some((self.take_receive(sh, cx)?, value)),
            _ => None,
        };
        let copied = if len == 0 {
            Ok(())
        } else {
            let whole = u64::from(len);
            let region = sh.regions.check(key, self.pd, addr, whole, needed);
            let fabric = &*cx.fabric;
            region.map_err(Fault::from).and_then(|region| {
                if read {
                    let mut to = Cursor::new(&request.payload, fabric, peer, Access::Write);
                    walk(cx.memory, region, addr, whole, Access::Read, |span| {
                        to.drain(span)
                    })
                } else {
                    let mut from = Cursor::new(&request.payload, fabric, peer, Access::Read);
                    walk(cx.memory, region, addr, whole, Access::Write, |span| {
                        from.fill(span)
                    })
                }
            })
        };
        if let Err(fault) = copied {
            let taken = taken.map(|(taken, _)| taken);
            let verdict = match fault {
                Fault::PeerUnknown => {
                    self.responder.held = taken;
                    return Err(Failure::Again(Verdict::MemoryUnknown));
                }
                Fault::PeerRange => Verdict::InvalidRequest,
                Fault::Denied(_) => Verdict::Access,
                Fault::Unmapped => Verdict::Operation,
            };
            let failed = taken.map(|taken| (taken, Status::LocalAccess));
            return Err(Failure::Fatal(verdict, failed));
        }
        self.responder.message = if request.last {
            Message::None
        } else {
            Message::Access {
                read,
                next: addr.wrapping_add(u64::from(len)),
                key,
                left: left - len,
                total,
            }
        };
        let (packets, bytes) = if read {
            let counters = &mut sh.counters;
            (&mut counters.served_reads, &mut counters.served_read_bytes)
        } else {
            let counters = &mut sh.counters;
            (
                &mut counters.served_writes,
                &mut counters.served_write_bytes,
            )
        };
        *packets += u64::from(request.last);
        *bytes += u64::from(len);
        match taken {
            Some((taken, value)) => {
                let done = Done::ReceiveWriteImmediate(value);
                self.received(&taken, done, total, request.solicited, sh, cx)
            }
            None => Ok(Verdict::Done),
        }
    }

    pub(super) fn atomic(
        &mut self,
        addr: u64,
        key: MemKey,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
        operation: impl FnOnce(&AtomicU64) -> u64,
    ) -> Result<Verdict, Failure> {
        if addr % 8 != 0 || self.attributes.max_dest_reads == 0 {
            return Err(Verdict::InvalidRequest.into());
        }
        let needed = Rights::REMOTE_ATOMIC;
        if !self.attributes.remote_rights.allow(needed) {
            return Err(Verdict::Access.into());
        }
        let region = sh.regions.check(key, self.pd, addr, 8, needed);
        let region = check(region)?;
        // 8 aligned bytes are in one page, which may be aligned differently than its address.
        let span = region
            .pieces(addr, 8, Access::ReadWrite)
            .next()
            .filter(|(_, run)| *run == 8)
            .and_then(|(bus, run)| cx.memory.translate(bus, run, Access::ReadWrite).ok())
            .ok_or(Verdict::Operation)?;
        let slice = span.as_volatile_slice();
        let memory = slice
            .get_atomic_ref::<AtomicU64>(0)
            .map_err(|_| Verdict::Operation)?;
        sh.counters.served_atomics += 1;
        if let Some(place) = &self.place {
            place.atomic(self.responder.expected);
        }
        Ok(Verdict::Atomic(operation(memory)))
    }
}

/// What an RDMA WRITE or READ asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemoteAccess {
    pub(super) read: bool,
    pub(super) addr: u64,
    pub(super) key: MemKey,
    pub(super) total: u32,
    /// Of this packet.
    pub(super) len: u32,
}

fn check<T>(checked: Result<T, Denied>) -> Result<T, Failure> {
    checked.map_err(|_| Failure::from(Verdict::Access))
}
