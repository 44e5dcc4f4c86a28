//! Packets as bytes, for the shared-memory wire between two EMs of one host: native byte order.
//!
//! | bytes | what |
//! |---|---|
//! | 0–11 | queue pair to, queue pair from, PSN |
//! | 12 | kind |
//! | 13 | flags |
//! | 14 | kind of the tail, and above it log₂ of the MTU; or the RNR timer's code |
//! | 15 | number of segments |
//! | 16–19 | the tail's value |
//! | 20–23 | R_Key |
//! | 24–31 | address, or an atomic's old value |
//! | 32–35 | bytes of the whole message |
//! | 36–39 | bytes that the packet carries itself |
//! | 40– | compare and swap or add (16 bytes); datagram header (48 bytes); segments (24 bytes each) or bytes |

use super::super::packet::{
    Action, Body, DatagramHeader, MAX_CARRIED, MAX_PAYLOAD, MAX_SEGMENTS, Packet, Payload, Request,
    Segment, Tail, Verdict,
};
use super::super::verbs::{MemKey, QpNum};
use smallvec::SmallVec;

/// Bytes of a packet at most.
pub(super) const MAX_BYTES: usize = HEADER + ATOMIC + DATAGRAM + MAX_CONTENT;

const HEADER: usize = 40;
const ATOMIC: usize = 16;
const DATAGRAM: usize = 48;
const SEGMENT: usize = 24;
/// First bit of the MTU in the byte of the tail's kind.
const MTU_AT: u8 = 4;
const MAX_CONTENT: usize = if MAX_SEGMENTS * SEGMENT > MAX_CARRIED {
    MAX_SEGMENTS * SEGMENT
} else {
    MAX_CARRIED
};

mod kind {
    pub(super) const SEND: u8 = 0;
    pub(super) const WRITE: u8 = 1;
    pub(super) const READ: u8 = 2;
    pub(super) const COMPARE_SWAP: u8 = 3;
    pub(super) const FETCH_ADD: u8 = 4;
    pub(super) const DONE: u8 = 16;
    pub(super) const ATOMIC: u8 = 17;
    pub(super) const RECEIVER_NOT_READY: u8 = 18;
    pub(super) const SEQUENCE: u8 = 19;
    pub(super) const INVALID_REQUEST: u8 = 20;
    pub(super) const ACCESS: u8 = 21;
    pub(super) const OPERATION: u8 = 22;
    pub(super) const MEMORY_UNKNOWN: u8 = 23;
}

mod flag {
    pub(super) const FIRST: u8 = 1;
    pub(super) const LAST: u8 = 2;
    pub(super) const SOLICITED: u8 = 4;
    pub(super) const ACKNOWLEDGE: u8 = 8;
    pub(super) const DATAGRAM: u8 = 16;
    pub(super) const GIDS: u8 = 32;
}

/// A packet's bytes.
pub(super) type Bytes = Vec<u8>;

/// Boxes of requests that are done with.
#[allow(clippy::vec_box)] // packets hold boxes, so boxes are what is kept
pub(super) type Spare = Vec<Box<Request>>;

/// Writes a packet; `None` when it is larger than a packet may be.
pub(super) fn encode(packet: &Packet, to: &mut Bytes) -> Option<()> {
    to.clear();
    to.resize(HEADER, 0);
    let Packet {
        to: qp, from, psn, ..
    } = packet;
    let header = to.first_chunk_mut::<HEADER>()?;
    put(header, 0, &qp.0.to_ne_bytes());
    put(header, 4, &from.0.to_ne_bytes());
    put(header, 8, &psn.to_ne_bytes());
    match &packet.body {
        Body::Answer(verdict) => {
            let (kind, code, value) = match *verdict {
                Verdict::Done => (kind::DONE, 0, 0),
                Verdict::Atomic(old) => (kind::ATOMIC, 0, old),
                Verdict::ReceiverNotReady(code) => (kind::RECEIVER_NOT_READY, code, 0),
                Verdict::Sequence => (kind::SEQUENCE, 0, 0),
                Verdict::InvalidRequest => (kind::INVALID_REQUEST, 0, 0),
                Verdict::Access => (kind::ACCESS, 0, 0),
                Verdict::Operation => (kind::OPERATION, 0, 0),
                Verdict::MemoryUnknown => (kind::MEMORY_UNKNOWN, 0, 0),
            };
            put(header, 12, &[kind, 0, code]);
            put(header, 24, &value.to_ne_bytes());
        }
        Body::Request(request) => encode_request(request, to)?,
    }
    Some(())
}

/// The header is there but for what a request has in it.
fn encode_request(request: &Request, to: &mut Bytes) -> Option<()> {
    let (kind, at, key, total, operands) = match request.action {
        Action::Send => (kind::SEND, 0, MemKey(0), 0, None),
        Action::Write { addr, key, total } => (kind::WRITE, addr, key, total, None),
        Action::Read { addr, key, total } => (kind::READ, addr, key, total, None),
        Action::CompareSwap {
            addr,
            key,
            compare,
            swap,
        } => (kind::COMPARE_SWAP, addr, key, 8, Some([compare, swap])),
        Action::FetchAdd { addr, key, add } => (kind::FETCH_ADD, addr, key, 8, Some([add, 0])),
    };
    let flags = [
        (flag::FIRST, request.first),
        (flag::LAST, request.last),
        (flag::SOLICITED, request.solicited),
        (flag::ACKNOWLEDGE, request.acknowledge),
        (flag::DATAGRAM, request.datagram.is_some()),
        (
            flag::GIDS,
            request.datagram.is_some_and(|d| d.gids.is_some()),
        ),
    ];
    let flags = flags.iter().filter(|f| f.1).fold(0, |all, f| all | f.0);
    let (tail, value) = match request.tail {
        Tail::Plain => (0u8, 0),
        Tail::Immediate(value) => (1, value),
        Tail::Invalidate(key) => (2, key.0),
    };
    let (segments, carried) = match &request.payload {
        Payload::Segments(segments) => (segments.len(), 0),
        Payload::Inline(bytes) => (0, bytes.len()),
    };
    if segments > MAX_SEGMENTS || carried > MAX_CARRIED {
        return None;
    }
    let header = to.first_chunk_mut::<HEADER>()?;
    let tail = tail | request.mtu_shift << MTU_AT;
    put(header, 12, &[kind, flags, tail, segments as u8]);
    put(header, 16, &value.to_ne_bytes());
    put(header, 20, &key.0.to_ne_bytes());
    put(header, 24, &at.to_ne_bytes());
    put(header, 32, &total.to_ne_bytes());
    put(header, 36, &(carried as u32).to_ne_bytes());
    for operand in operands.iter().flatten() {
        to.extend_from_slice(&operand.to_ne_bytes());
    }
    if let Some(datagram) = &request.datagram {
        let mut bytes = [0u8; DATAGRAM];
        put(&mut bytes, 0, &datagram.qkey.to_ne_bytes());
        put(&mut bytes, 4, &datagram.lid.to_ne_bytes());
        let small = [
            datagram.service_level,
            datagram.traffic_class,
            datagram.hop_limit,
        ];
        put(&mut bytes, 6, &small);
        if let Some((from, gid)) = &datagram.gids {
            put(&mut bytes, 16, from);
            put(&mut bytes, 32, gid);
        }
        to.extend_from_slice(&bytes);
    }
    match &request.payload {
        Payload::Inline(bytes) => to.extend_from_slice(bytes),
        Payload::Segments(segments) => {
            for segment in segments {
                let mut bytes = [0u8; SEGMENT];
                put(&mut bytes, 0, &segment.file.to_ne_bytes());
                put(&mut bytes, 8, &segment.offset.to_ne_bytes());
                put(&mut bytes, 16, &segment.len.to_ne_bytes());
                to.extend_from_slice(&bytes);
            }
        }
    }
    Some(())
}

/// Reads a packet; `None` when the bytes are none. A request takes one of the boxes in `spare`, if there is one.
pub(super) fn decode(bytes: &[u8], spare: &mut Spare) -> Option<Packet> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let [kind, flags, small, segments] = array(header, 12)?;
    let value = u64::from_ne_bytes(array(header, 24)?);
    let answer = |verdict| Some(Body::Answer(verdict));
    let body = match kind {
        kind::DONE => answer(Verdict::Done),
        kind::ATOMIC => answer(Verdict::Atomic(value)),
        kind::RECEIVER_NOT_READY => answer(Verdict::ReceiverNotReady(small & 31)),
        kind::SEQUENCE => answer(Verdict::Sequence),
        kind::INVALID_REQUEST => answer(Verdict::InvalidRequest),
        kind::ACCESS => answer(Verdict::Access),
        kind::OPERATION => answer(Verdict::Operation),
        kind::MEMORY_UNKNOWN => answer(Verdict::MemoryUnknown),
        _ => decode_request(kind, flags, small, segments, header, rest).map(|request| {
            let boxed = match spare.pop() {
                Some(mut boxed) => {
                    *boxed = request;
                    boxed
                }
                None => Box::new(request),
            };
            Body::Request(boxed)
        }),
    };
    Some(Packet {
        to: QpNum(u32::from_ne_bytes(array(header, 0)?)),
        from: QpNum(u32::from_ne_bytes(array(header, 4)?)),
        psn: u32::from_ne_bytes(array(header, 8)?) & 0xff_ffff,
        body: body?,
    })
}

fn decode_request(
    kind: u8,
    flags: u8,
    tail: u8,
    segments: u8,
    header: &[u8; HEADER],
    mut rest: &[u8],
) -> Option<Request> {
    let addr = u64::from_ne_bytes(array(header, 24)?);
    let key = MemKey(u32::from_ne_bytes(array(header, 20)?));
    let total = u32::from_ne_bytes(array(header, 32)?);
    let mut operands = || {
        let (operands, more) = rest.split_first_chunk::<ATOMIC>()?;
        rest = more;
        let first = u64::from_ne_bytes(array(operands, 0)?);
        Some([first, u64::from_ne_bytes(array(operands, 8)?)])
    };
    let action = match kind {
        kind::SEND => Action::Send,
        kind::WRITE => Action::Write { addr, key, total },
        kind::READ => Action::Read { addr, key, total },
        kind::COMPARE_SWAP => {
            let [compare, swap] = operands()?;
            Action::CompareSwap {
                addr,
                key,
                compare,
                swap,
            }
        }
        kind::FETCH_ADD => {
            let [add, _] = operands()?;
            Action::FetchAdd { addr, key, add }
        }
        _ => return None,
    };
    let datagram = if flags & flag::DATAGRAM != 0 {
        let (bytes, more) = rest.split_first_chunk::<DATAGRAM>()?;
        rest = more;
        let [service_level, traffic_class, hop_limit] = array(bytes, 6)?;
        let gids = (array(bytes, 16)?, array(bytes, 32)?);
        Some(DatagramHeader {
            qkey: u32::from_ne_bytes(array(bytes, 0)?),
            lid: u16::from_ne_bytes(array(bytes, 4)?),
            gids: (flags & flag::GIDS != 0).then_some(gids),
            service_level,
            traffic_class,
            hop_limit,
        })
    } else {
        None
    };
    let value = u32::from_ne_bytes(array(header, 16)?);
    Some(Request {
        action,
        first: flags & flag::FIRST != 0,
        last: flags & flag::LAST != 0,
        tail: match tail & ((1 << MTU_AT) - 1) {
            0 => Tail::Plain,
            1 => Tail::Immediate(value),
            2 => Tail::Invalidate(MemKey(value)),
            _ => return None,
        },
        solicited: flags & flag::SOLICITED != 0,
        payload: payload(segments.into(), header, rest)?,
        datagram,
        acknowledge: flags & flag::ACKNOWLEDGE != 0,
        mtu_shift: Some(tail >> MTU_AT).filter(|shift| (8..=12).contains(shift))?,
    })
}

fn payload(segments: usize, header: &[u8; HEADER], rest: &[u8]) -> Option<Payload> {
    let carried = u32::from_ne_bytes(array(header, 36)?) as usize;
    if segments == 0 {
        if carried > MAX_CARRIED {
            return None;
        }
        return Some(Payload::Inline(SmallVec::from_slice(rest.get(..carried)?)));
    }
    if segments > MAX_SEGMENTS {
        return None;
    }
    let mut all = SmallVec::new();
    let mut sum = 0u32;
    for bytes in rest.get(..segments * SEGMENT)?.chunks_exact(SEGMENT) {
        let segment = Segment {
            file: u64::from_ne_bytes(array(bytes, 0)?),
            offset: u64::from_ne_bytes(array(bytes, 8)?),
            len: u32::from_ne_bytes(array(bytes, 16)?),
        };
        sum = sum.checked_add(segment.len).filter(|n| *n <= MAX_PAYLOAD)?;
        all.push(segment);
    }
    Some(Payload::Segments(all))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// `at` and the length are constants that fit.
fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + value.len()) {
        to.copy_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Send),
            any::<(u64, u32, u32)>().prop_map(|(addr, key, total)| Action::Write {
                addr,
                key: MemKey(key),
                total
            }),
            any::<(u64, u32, u32)>().prop_map(|(addr, key, total)| Action::Read {
                addr,
                key: MemKey(key),
                total
            }),
            any::<(u64, u32, u64, u64)>().prop_map(|(addr, key, compare, swap)| {
                Action::CompareSwap {
                    addr,
                    key: MemKey(key),
                    compare,
                    swap,
                }
            }),
            any::<(u64, u32, u64)>().prop_map(|(addr, key, add)| Action::FetchAdd {
                addr,
                key: MemKey(key),
                add
            }),
        ]
    }

    fn tail() -> impl Strategy<Value = Tail> {
        prop_oneof![
            Just(Tail::Plain),
            any::<u32>().prop_map(Tail::Immediate),
            any::<u32>().prop_map(|key| Tail::Invalidate(MemKey(key))),
        ]
    }

    fn carried() -> impl Strategy<Value = Payload> {
        let segment = (any::<u64>(), any::<u64>(), 0..=MAX_PAYLOAD / 64)
            .prop_map(|(file, offset, len)| Segment { file, offset, len });
        prop_oneof![
            prop::collection::vec(segment, 1..=MAX_SEGMENTS)
                .prop_map(|all| Payload::Segments(all.into_iter().collect())),
            prop::collection::vec(any::<u8>(), 0..=MAX_CARRIED)
                .prop_map(|bytes| Payload::Inline(bytes.into_iter().collect())),
        ]
    }

    fn datagram() -> impl Strategy<Value = DatagramHeader> {
        let gids = prop::option::of(any::<([u8; 16], [u8; 16])>());
        (any::<(u32, u16, u8, u8, u8)>(), gids).prop_map(|(small, gids)| DatagramHeader {
            qkey: small.0,
            lid: small.1,
            gids,
            service_level: small.2,
            traffic_class: small.3,
            hop_limit: small.4,
        })
    }

    fn request() -> impl Strategy<Value = Body> {
        let parts = (action(), tail(), carried(), prop::option::of(datagram()));
        (parts, any::<[bool; 4]>()).prop_map(|((action, tail, payload, datagram), flags)| {
            Body::Request(Box::new(Request {
                action,
                first: flags[0],
                last: flags[1],
                tail,
                solicited: flags[2],
                payload,
                datagram,
                acknowledge: flags[3],
                mtu_shift: 12 - u8::from(flags[0]),
            }))
        })
    }

    fn answer() -> impl Strategy<Value = Body> {
        prop_oneof![
            Just(Verdict::Done),
            any::<u64>().prop_map(Verdict::Atomic),
            (0..32u8).prop_map(Verdict::ReceiverNotReady),
            Just(Verdict::Sequence),
            Just(Verdict::InvalidRequest),
            Just(Verdict::Access),
            Just(Verdict::Operation),
            Just(Verdict::MemoryUnknown),
        ]
        .prop_map(Body::Answer)
    }

    proptest! {
        #[test]
        fn a_packet_survives_the_wire(
            to: u32, from: u32, psn in 0..1u32 << 24, body in prop_oneof![request(), answer()],
        ) {
            let packet = Packet { to: QpNum(to), from: QpNum(from), psn, body };
            let mut bytes = Bytes::new();
            encode(&packet, &mut bytes).unwrap();
            prop_assert!(bytes.len() <= MAX_BYTES);
            prop_assert_eq!(decode(&bytes, &mut Vec::new()), Some(packet));
            // Cut anywhere, it is none; but an answer is its header alone.
            prop_assert_eq!(decode(&bytes[..bytes.len() - 1], &mut Vec::new()), None);
        }

        #[test]
        fn any_bytes_are_a_packet_within_bounds_or_none(
            bytes in prop::collection::vec(any::<u8>(), 0..MAX_BYTES),
        ) {
            if let Some(Packet { body: Body::Request(request), .. }) = decode(&bytes, &mut Vec::new()) {
                match request.payload {
                    Payload::Segments(all) => {
                        prop_assert!(all.iter().map(|s| u64::from(s.len)).sum::<u64>() <= MAX_PAYLOAD.into());
                    }
                    Payload::Inline(bytes) => prop_assert!(bytes.len() <= MAX_CARRIED),
                }
            }
        }
    }
}
