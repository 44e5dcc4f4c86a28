//! Messages of all kinds, sizes and alignments over a fabric that loses and refuses packets.

use super::lab::*;
use crate::rdma::verbs::*;
use dot_iommu::Access;
use proptest::prelude::*;
use std::time::Duration;

/// Where the first byte of regions lies in their first page.
const OFFSET: u64 = 0x123;
/// Address of the first byte of regions: nothing like where they lie.
const START: u64 = 0x7fff_0000_0123;
const PAGES: u64 = 48;
const LEN: u64 = PAGES * 0x1000 - OFFSET;

#[derive(Debug, Clone)]
struct Message {
    kind: u8,
    len: usize,
    /// Where at the peer.
    remote: u64,
    /// Offsets of own elements, and where the message is cut.
    pieces: Vec<(u64, usize)>,
    seed: u64,
    fence: bool,
}

fn messages() -> impl Strategy<Value = Message> {
    let len = prop_oneof![0..200usize, 0..5000usize, 0..100_000usize];
    let pieces = proptest::collection::vec((0..1000u64, 1..100usize), 1..=16);
    (
        0..5u8,
        len,
        0..90_000u64,
        pieces,
        any::<u64>(),
        any::<bool>(),
    )
        .prop_map(|(kind, len, remote, weights, seed, fence)| {
            let sum: usize = weights.iter().map(|(_, weight)| weight).sum();
            let mut left = len;
            let mut pieces: Vec<_> = weights
                .iter()
                .map(|(gap, weight)| {
                    let part = len * weight / sum;
                    left -= part;
                    (*gap, part)
                })
                .collect();
            pieces[0].1 += left;
            let kind = if len < 8 { kind % 4 } else { kind };
            Message {
                kind,
                len: if kind == 4 { 8 } else { len },
                remote,
                pieces: if kind == 4 { vec![(3, 8)] } else { pieces },
                seed,
                fence,
            }
        })
}

/// Pages in an order with neighbours and jumps, across the border of the ranges.
fn pages(seed: u64) -> Vec<u64> {
    let first = BYTES / 0x2000 - 20;
    (0..PAGES)
        .map(|n| first + (n / 3 * 29 + seed) % (PAGES / 3) * 3 + n % 3)
        .collect()
}

/// Elements one after the other with gaps, from the region's start.
fn elements(key: MemKey, message: &Message) -> Vec<Sge> {
    let mut at = START;
    let place = |(gap, len): &(u64, usize)| {
        let sge = sge(key, at + gap, *len as u32);
        at += gap + *len as u64;
        sge
    };
    message.pieces.iter().map(place).collect()
}

/// Reads or writes a region through its own pieces, byte by byte.
fn bus(lab: &Lab, node: usize, key: MemKey, addr: u64) -> u64 {
    let region = lab.nodes[node].engine.regions().get(key.0 >> 8).unwrap();
    region.pieces(addr, 1, Access::Read).next().unwrap().0
}

fn put(lab: &Lab, node: usize, key: MemKey, addr: u64, bytes: &[u8]) {
    for (n, byte) in bytes.iter().enumerate() {
        let at = bus(lab, node, key, addr + n as u64);
        lab.nodes[node].write(at, &[*byte]);
    }
}

fn get(lab: &Lab, node: usize, key: MemKey, addr: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|n| lab.nodes[node].read(bus(lab, node, key, addr + n), 1)[0])
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn bytes_arrive_once_and_where_they_should(
        messages in proptest::collection::vec(messages(), 1..6),
        seed in any::<u64>(),
        lose in 0..25u8,
        full in 0..200u8,
        mtu in 8..13u32,
    ) {
        let mut lab = Lab::new(2);
        for node in 0..2 {
            lab.add_qp(node, QP, Service::Rc, ReceiveFrom::Own);
            for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                let mut change = change((1 - node, QP));
                change.mtu = Some(1 << mtu);
                change.retry_count = Some(7);
                change.rnr_retry = Some(7);
                change.timeout = Some(1);
                lab.modify(node, QP, state, &change).unwrap();
            }
        }
        let a = lab.nodes[0].region(START, &pages(seed % 7), OFFSET, LEN);
        let b = lab.nodes[1].region(START, &pages(seed % 5), OFFSET, LEN);
        for (node, faults) in lab.nodes.iter_mut().enumerate() {
            faults.wire.faults.seed = seed ^ node as u64;
            faults.wire.faults.lose = lose;
            faults.wire.faults.full = full;
        }
        for (n, message) in messages.iter().enumerate() {
            let cookie = n as u32;
            let sges = elements(a, message);
            let bytes = pattern(message.seed, message.len);
            let fill = |lab: &Lab, bytes: &[u8]| {
                let mut at = 0;
                for sge in &sges {
                    put(lab, 0, a, sge.addr, &bytes[at..at + sge.len as usize]);
                    at += sge.len as usize;
                }
            };
            let mut remote = START + message.remote;
            let operation = match message.kind {
                0 | 1 => send(),
                2 => write(remote, b),
                3 => Operation::Read { addr: remote, key: b, invalidate: None },
                _ => {
                    remote = remote.next_multiple_of(8);
                    Operation::FetchAdd { addr: remote, key: b, add: 3 }
                }
            };
            match message.kind {
                0 | 1 => {
                    fill(&lab, &bytes);
                    let mut here = message.clone();
                    here.pieces.reverse();
                    let to = elements(b, &here);
                    lab.nodes[1].post_receive(QP, 100 + cookie, &to);
                }
                2 => fill(&lab, &bytes),
                _ => put(&lab, 1, b, remote, &bytes),
            }
            let mut one = request(cookie, operation, &sges);
            one.fence = message.fence;
            lab.nodes[0].post(QP, one);
            lab.run(Duration::from_secs(100));
            let (expected, got) = (
                bytes.clone(),
                match message.kind {
                    0 | 1 => {
                        let mut here = message.clone();
                        here.pieces.reverse();
                        let mut got = Vec::new();
                        for sge in elements(b, &here) {
                            got.extend(get(&lab, 1, b, sge.addr, sge.len as usize));
                        }
                        got
                    }
                    2 => get(&lab, 1, b, remote, message.len),
                    _ => {
                        let mut got = Vec::new();
                        for sge in &sges {
                            got.extend(get(&lab, 0, a, sge.addr, sge.len as usize));
                        }
                        got
                    }
                },
            );
            prop_assert_eq!(lab.nodes[0].completed(), [(cookie, Status::Success)]);
            prop_assert!(expected == got, "message {}", n);
            let received = lab.nodes[1].completed();
            prop_assert_eq!(received.len(), usize::from(message.kind < 2));
            if message.kind == 4 {
                let old = u64::from_ne_bytes(bytes.try_into().unwrap());
                let new = get(&lab, 1, b, remote, 8);
                prop_assert_eq!(new, old.wrapping_add(3).to_ne_bytes());
            }
        }
        prop_assert!(!lab.nodes[0].engine.has_outstanding());
    }
}
