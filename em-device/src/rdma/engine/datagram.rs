//! Unreliable datagrams, both ends.

use super::Context;
use super::memory::{Cursor, Fault, Part};
use super::payload::Gather;
use super::qp::{Qp, Taken};
use super::requester::{Fate, Step};
use super::responder::{Failure, measure};
use super::tables::Shared;
use crate::rdma::packet::{
    Action, Body, DatagramHeader, MAX_INLINE, NotSent, Payload, Request, Route, Tail,
};
use crate::rdma::verbs::{
    Datagram, Done, Front, Operation, Peer, QpNum, Rights, Service, Source, Status,
};
use dot_iommu::Access;
use smallvec::SmallVec;
use std::net::Ipv6Addr;

/// Bytes of the GRH in front of a received datagram (IBTA 1.5 §8.3).
const GRH: u32 = 40;
/// Bytes of a datagram at most.
const MAX_DATAGRAM: u32 = 4096;
/// Asks for the sending queue pair's own Q_Key (IBTA 1.5 §10.2.5).
const OWN_QKEY: u32 = 1 << 31;
/// IP protocol number.
const UDP: u8 = 17;

impl<F: Front> Qp<F> {
    /// Sends the datagram at the cursor.
    pub(super) fn send_datagram(&mut self, sh: &mut Shared<F>, cx: &mut Context<'_>) -> Step {
        let r = &mut self.requester;
        let Some(flight) = r.flight.get_mut(r.cursor) else {
            return Step::Wait;
        };
        let Some(datagram) = flight.request.datagram else {
            flight.fate = Fate::Failed(Status::LocalQpOperation);
            return Step::Done;
        };
        let source = Gather {
            pd: self.pd,
            offset: 0,
            shift: self.attributes.mtu_shift,
            copied: MAX_INLINE as u32,
        };
        let path = match cx.fabric.route(&datagram.to) {
            Route::Known(path) => Some(path),
            Route::Asking => return Step::Full,
            Route::Refused => None,
        };
        let payload = match source.payload(flight, sh, cx) {
            Ok((payload, _)) => payload,
            Err(status) => {
                flight.fate = Fate::Failed(status);
                return Step::Done;
            }
        };
        // The peer must have copied the bytes before their owner may change them.
        let mut waits = matches!(payload, Payload::Segments(_));
        let tail = match flight.request.operation {
            Operation::Send {
                immediate: Some(value),
                ..
            } => Tail::Immediate(value),
            _ => Tail::Plain,
        };
        let header = header(&datagram, self.attributes.qkey, cx);
        let packet = &mut sh.packet;
        packet.to = datagram.qp;
        packet.from = self.num;
        packet.psn = flight.psn;
        if let Body::Request(request) = &mut packet.body {
            **request = Request {
                action: Action::Send,
                first: true,
                last: true,
                tail,
                solicited: flight.request.solicited,
                payload,
                datagram: Some(header),
                acknowledge: waits,
                mtu_shift: self.attributes.mtu_shift as u8,
            };
        }
        // A network too loses what it does not take anywhere.
        let sent = match path {
            Some(path) => cx.fabric.send(path.peer, packet),
            None => Err(NotSent::Gone),
        };
        match sent {
            Ok(()) => {}
            Err(NotSent::Full) => return Step::Full,
            Err(NotSent::Gone) => {
                sh.counters.dropped += 1;
                waits = false;
            }
        }
        sh.counters.packets_sent += 1;
        r.sent = flight.end();
        if !waits {
            flight.fate = Fate::Done;
        }
        r.cursor += 1;
        if waits && self.answer_timer.due.is_none() {
            self.restart_timer(cx.now);
        }
        Step::Done
    }

    /// A datagram came in.
    pub(super) fn datagram(
        &mut self,
        from: (Peer, QpNum),
        request: &Request,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) {
        match self.take_datagram(from, request, sh, cx) {
            Ok(()) => {}
            Err(Failure::Again(_)) => sh.counters.dropped += 1,
            Err(Failure::Fatal(_, failed)) => {
                if let Some((taken, status)) = failed {
                    self.complete_receive(&taken, status, sh, cx);
                }
                self.enter_error(sh, cx);
            }
        }
    }

    fn take_datagram(
        &mut self,
        from: (Peer, QpNum),
        request: &Request,
        sh: &mut Shared<F>,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        use crate::rdma::packet::Verdict;
        let dropped = Failure::Again(Verdict::Done);
        let (Some(header), Some(len)) = (request.datagram, measure(&request.payload)) else {
            return Err(dropped);
        };
        let sound = request.action == Action::Send && request.first && request.last;
        let wanted = self.service == Service::Ud
            && self.receives()
            && header.qkey == self.attributes.qkey
            && len <= MAX_DATAGRAM;
        if !sound || !wanted {
            return Err(dropped);
        }
        let taken = self.take_receive(sh, cx)?;
        let room = taken.request.sges.iter().map(|sge| u64::from(sge.len));
        if room.sum::<u64>() < u64::from(GRH + len) {
            return Err(fatal(taken, Status::LocalLength));
        }
        let mut part = Part {
            regions: &sh.regions,
            pd: self.receive_pd(sh),
            sges: &taken.request.sges,
            skip: 0,
            len: u64::from(GRH),
            needed: Rights::LOCAL_WRITE,
            access: Access::Write,
        };
        let mut stored = Ok(());
        let ipv4 = header
            .gids
            .is_some_and(|(from, to)| is_ipv4(&from) && is_ipv4(&to));
        if let Some(gids) = header.gids {
            let immediate = matches!(request.tail, Tail::Immediate(_));
            let bytes = match F::IPV4_HEADERS && ipv4 {
                true => ipv4_header(&header, &gids, len, immediate),
                false => grh(&header, &gids, len, immediate),
            };
            let mut cursor = Cursor::Bytes(&bytes);
            stored = part.walk(cx.memory, |span| cursor.fill(span));
        }
        part.skip = u64::from(GRH);
        part.len = u64::from(len);
        let mut payload = Cursor::new(&request.payload, &*cx.fabric, from.0, Access::Read);
        match stored.and_then(|()| part.walk(cx.memory, |span| payload.fill(span))) {
            Ok(()) => {}
            Err(Fault::PeerUnknown | Fault::PeerRange) => {
                self.responder.hold(taken);
                return Err(dropped);
            }
            Err(Fault::Denied(_) | Fault::Unmapped) => {
                return Err(fatal(taken, Status::LocalProtection));
            }
        }
        let done = match request.tail {
            Tail::Immediate(value) => Done::ReceiveImmediate(value),
            Tail::Plain | Tail::Invalidate(_) => Done::Receive,
        };
        let mut completion = self.completion(taken.request.cookie, done, Status::Success);
        completion.srq = taken.srq;
        completion.len = GRH + len;
        completion.solicited = request.solicited;
        completion.source = Some(Source {
            qp: from.1,
            lid: header.lid,
            grh: header.gids.is_some(),
            ipv4,
            service_level: header.service_level,
        });
        sh.counters.received += 1;
        sh.counters.received_bytes += u64::from(len);
        self.completing_receive(self.responder.expected, sh);
        if !sh.complete(self.receive_cq, &completion, cx) {
            self.fatal(sh, cx);
        }
        self.keep_received();
        Ok(())
    }
}

fn fatal(taken: Taken, status: Status) -> Failure {
    use crate::rdma::packet::Verdict;
    Failure::Fatal(Verdict::Operation, Some((taken, status)))
}

fn header(datagram: &Datagram, own_qkey: u32, cx: &Context<'_>) -> DatagramHeader {
    let addresses = cx.fabric.addresses();
    let source = datagram
        .source_gid
        .and_then(|index| addresses.gids.get(usize::from(index)))
        .filter(|gid| **gid != [0; 16]);
    DatagramHeader {
        qkey: if datagram.qkey & OWN_QKEY != 0 {
            own_qkey
        } else {
            datagram.qkey
        },
        lid: addresses.lid,
        gids: source.copied().zip(datagram.to.gid),
        service_level: datagram.service_level,
        traffic_class: datagram.traffic_class,
        hop_limit: datagram.hop_limit,
    }
}

/// Bytes behind the GRH or IP header.
fn behind(ethernet: bool, len: u32, immediate: bool) -> u32 {
    // BTH and DETH, immediate data, payload with pad, ICRC; and the UDP header.
    let behind = 20 + 4 * u32::from(immediate) + len.next_multiple_of(4) + 4;
    behind + 8 * u32::from(ethernet)
}

/// Whether a GID is an IPv4 address (`::ffff:a.b.c.d`).
fn is_ipv4(gid: &[u8; 16]) -> bool {
    Ipv6Addr::from(*gid).to_ipv4_mapped().is_some()
}

/// What the first 40 bytes of a receive hold between IPv4 addresses (RoCEv2 annex A17.4.5): the header is at the end.
fn ipv4_header(
    header: &DatagramHeader,
    gids: &([u8; 16], [u8; 16]),
    len: u32,
    immediate: bool,
) -> SmallVec<[u8; 64]> {
    const BEGIN: usize = 20;
    let mut bytes = SmallVec::from_elem(0, BEGIN);
    bytes.extend_from_slice(&[0x45, header.traffic_class]);
    let whole = 20 + behind(true, len, immediate);
    bytes.extend_from_slice(&(whole as u16).to_be_bytes());
    // Not a fragment, and not to be made into some.
    bytes.extend_from_slice(&[0, 0, 0x40, 0]);
    bytes.extend_from_slice(&[header.hop_limit, UDP, 0, 0]);
    for gid in [&gids.0, &gids.1] {
        bytes.extend_from_slice(gid.last_chunk::<4>().unwrap_or(&[0; 4]));
    }
    let words = bytes.chunks_exact(2).skip(BEGIN / 2);
    let sum: u32 = words
        .filter_map(|word| word.try_into().ok())
        .map(|word| u32::from(u16::from_be_bytes(word)))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let check = !((sum & 0xffff) + (sum >> 16)) as u16;
    if let Some(field) = bytes.get_mut(BEGIN + 10..BEGIN + 12) {
        field.copy_from_slice(&check.to_be_bytes());
    }
    bytes
}

/// The GRH that a receive's first 40 bytes hold (IBTA 1.5 §8.3; RoCEv2 annex A17: the IPv6 header).
fn grh(
    header: &DatagramHeader,
    gids: &([u8; 16], [u8; 16]),
    len: u32,
    immediate: bool,
) -> SmallVec<[u8; 64]> {
    const IBA: u8 = 0x1b;
    let ethernet = header.lid == 0;
    let behind = behind(ethernet, len, immediate);
    let class = u32::from(header.traffic_class);
    let mut bytes = SmallVec::new();
    bytes.extend_from_slice(&(6 << 28 | class << 20).to_be_bytes());
    bytes.extend_from_slice(&(behind as u16).to_be_bytes());
    bytes.push(if ethernet { UDP } else { IBA });
    bytes.push(header.hop_limit);
    bytes.extend_from_slice(&gids.0);
    bytes.extend_from_slice(&gids.1);
    bytes
}
