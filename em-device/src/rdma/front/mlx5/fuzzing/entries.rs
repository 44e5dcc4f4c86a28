//! Work queue entries, as drivers write them and not quite so.

use super::super::bits::put;
use super::super::wqe::opcode;
use super::Source;
use super::memory::{BASE, HOLE, MOVABLE, OPEN, READABLE};
use super::node::{DATA, DATA_BYTES, PAGES};
use super::objects::NOWHERE;

/// Opcodes of the network interface's send queues.
const LSO: u8 = 0x0e;
/// All send opcodes that mean something.
const OPCODES: [u8; 11] = [
    opcode::NOP,
    opcode::SEND_INVALIDATE,
    opcode::RDMA_WRITE,
    opcode::RDMA_WRITE_IMMEDIATE,
    opcode::SEND,
    opcode::SEND_IMMEDIATE,
    opcode::RDMA_READ,
    opcode::ATOMIC_CS,
    opcode::ATOMIC_FA,
    opcode::UMR,
    LSO,
];

/// What entries can name.
#[derive(Debug)]
pub(super) struct Names<'a> {
    /// Own keys.
    pub(super) keys: &'a [u32],
    /// The neighbour's.
    pub(super) foreign: &'a [u32],
    /// Queue pairs of either.
    pub(super) qps: &'a [u32],
}

impl Names<'_> {
    /// A key for own memory, or one that may be wrong.
    fn key(&self, source: &mut Source<'_>) -> u32 {
        match source.below(32) {
            0 => source.u32(),
            1 => (source.below(64) as u32) << 8 | 0x42,
            2 if !self.foreign.is_empty() => source.pick(self.foreign),
            _ if self.keys.is_empty() => 0,
            _ => source.pick(self.keys),
        }
    }

    /// A key for the memory of a peer, which may be the neighbour.
    fn remote_key(&self, source: &mut Source<'_>) -> u32 {
        match source.below(2) {
            0 if !self.foreign.is_empty() => source.pick(self.foreign),
            _ => self.key(source),
        }
    }

    fn qp(&self, source: &mut Source<'_>) -> u32 {
        match source.below(4) {
            0 => source.below(32) as u32,
            _ if self.qps.is_empty() => 0,
            _ => source.pick(self.qps),
        }
    }
}

/// An address that is likely to be of something, or next to it.
pub(super) fn address(source: &mut Source<'_>) -> u64 {
    let base = match source.below(24) {
        0 => source.limit(),
        1 => BASE + HOLE.start,
        2 => BASE + READABLE.start,
        3 => BASE + MOVABLE.start,
        4 => BASE + MOVABLE.end,
        5 => BASE + OPEN.end,
        6 => PAGES + 4096 * source.below(64),
        7 => 0,
        8 => DATA + source.below(DATA_BYTES),
        // What all keys reach that are for one range.
        _ => return DATA + source.below(0x6000),
    };
    match source.below(4) {
        0 => base.wrapping_add(source.below(0x2000)),
        1 => base.wrapping_sub(source.below(0x40)),
        _ => base,
    }
}

fn len(source: &mut Source<'_>) -> u32 {
    match source.below(32) {
        0 => source.limit() as u32,
        1 => 0,
        2 => source.below(0x1_0000) as u32,
        3 | 4 => 8,
        _ => source.below(0x1800) as u32,
    }
}

/// A data segment.
pub(super) fn segment(len: u32, key: u32, addr: u64) -> Vec<u8> {
    let words = [len, key].map(u32::to_be_bytes).concat();
    [words, addr.to_be_bytes().to_vec()].concat()
}

/// A remote address segment.
pub(super) fn remote(addr: u64, key: u32) -> Vec<u8> {
    let mut bytes = addr.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// An entry with these segments behind its control segment, which says how long it is.
pub(super) fn entry(head: (u16, u8, u32), flags: u8, imm: u32, segments: &[u8]) -> Vec<u8> {
    let (index, opcode, qpn) = head;
    let units = (16 + segments.len()).div_ceil(16) as u32;
    let words = [
        u32::from(index) << 8 | u32::from(opcode),
        qpn << 8 | units & 0x3f,
        flags.into(),
        imm,
    ];
    let mut bytes = words.map(u32::to_be_bytes).concat();
    bytes.extend(segments);
    bytes.resize(units as usize * 16, 0);
    bytes
}

fn data(source: &mut Source<'_>, names: &Names<'_>) -> Vec<u8> {
    if source.one_in(4) {
        let len = source.below(200) as usize;
        let mut bytes = (1u32 << 31 | len as u32).to_be_bytes().to_vec();
        bytes.resize(bytes.len() + len, 0xa5);
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        return bytes;
    }
    let count = match source.below(8) {
        0 => source.below(20),
        _ => 1,
    };
    let one = |_| {
        let key = names.key(source);
        segment(len(source), key, address(source))
    };
    (0..count).flat_map(one).collect()
}

fn address_vector(source: &mut Source<'_>, names: &Names<'_>) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    let qp = names.qp(source);
    put(&mut bytes, 0, &0x11u32.to_be_bytes());
    put(&mut bytes, 8, &(qp | 1 << 31).to_be_bytes());
    let peer = 1 + source.below(3) as u8;
    // LID, MAC, GRH with GID index 0, GID.
    bytes[15] = peer;
    if source.one_in(2) {
        put(&mut bytes, 20, &[2, 0, 0, 0, 0, peer]);
        put(&mut bytes, 28, &(1u32 << 30).to_be_bytes());
        put(
            &mut bytes,
            32,
            &super::node::gid(crate::rdma::verbs::Peer(peer.into())),
        );
    }
    bytes
}

/// A change of a region.
fn registration(source: &mut Source<'_>, names: &Names<'_>) -> Vec<u8> {
    const ENABLE: u64 = 0x201e_20c3;
    let inline = source.below(2) == 0;
    let count = match source.below(8) {
        0 => source.below(80),
        _ => 4 * source.below(5),
    };
    let mut bytes = vec![0; 48 + 64];
    bytes[0] = u8::from(inline) << 7 | u8::from(source.one_in(4)) << 4;
    let octowords = count.div_ceil(2) as u16;
    put(&mut bytes, 4, &octowords.to_be_bytes());
    if source.one_in(4) {
        put(&mut bytes, 6, &(source.below(64) as u16).to_be_bytes());
    }
    let mask = match source.below(4) {
        0 => source.u64(),
        1 => 0x2000_0080,
        _ => ENABLE,
    };
    put(&mut bytes, 8, &mask.to_be_bytes());
    let context = 48;
    bytes[context] = u8::from(source.one_in(4)) << 6;
    bytes[context + 2] = 0x79;
    bytes[context + 7] = 0x42;
    put(
        &mut bytes,
        context + 12,
        &(source.below(4) as u32).to_be_bytes(),
    );
    put(&mut bytes, context + 16, &address(source).to_be_bytes());
    put(&mut bytes, context + 24, &(count * 4096).to_be_bytes());
    bytes[context + 59] = match source.below(8) {
        0 => source.u8(),
        _ => 12,
    };
    if inline {
        for _ in 0..octowords * 2 {
            bytes.extend(page(source).to_be_bytes());
        }
    } else {
        let key = names.key(source);
        bytes.extend(segment(u32::from(octowords) * 16, key, address(source)));
    }
    bytes
}

/// An entry of a list of pages.
pub(super) fn page(source: &mut Source<'_>) -> u64 {
    match source.below(8) {
        0 => source.u64(),
        1 => NOWHERE,
        _ => address(source) & !0xfff | 3,
    }
}

/// An entry for the send queue of a queue pair.
pub(super) fn send(
    source: &mut Source<'_>,
    names: &Names<'_>,
    (index, qpn): (u16, u32),
    datagram: bool,
) -> Vec<u8> {
    let opcode = match source.below(2) {
        0 if datagram => opcode::SEND,
        0 => opcode::RDMA_WRITE,
        _ => source.pick(&OPCODES),
    };
    let mut segments = Vec::new();
    if datagram && !source.one_in(8) {
        segments.extend(address_vector(source, names));
    }
    let imm = match opcode {
        opcode::UMR => names.key(source),
        opcode::SEND_INVALIDATE => names.remote_key(source),
        _ => source.u32(),
    };
    match opcode {
        opcode::NOP => {}
        opcode::UMR => segments = registration(source, names),
        opcode::SEND | opcode::SEND_IMMEDIATE | opcode::SEND_INVALIDATE => {
            segments.extend(data(source, names));
        }
        LSO => segments = super::frames::segments(source, names.keys),
        opcode::ATOMIC_CS | opcode::ATOMIC_FA => {
            let key = names.remote_key(source);
            segments.extend(remote(address(source) & !7, key));
            segments.extend(source.limit().to_be_bytes());
            segments.extend(source.limit().to_be_bytes());
            let key = names.key(source);
            segments.extend(segment(8, key, address(source)));
        }
        _ => {
            let key = names.remote_key(source);
            segments.extend(remote(address(source), key));
            segments.extend(data(source, names));
        }
    }
    let flags = match source.below(4) {
        0 => source.u8(),
        _ => 8,
    };
    let mut bytes = entry((index, opcode, qpn), flags, imm, &segments);
    if source.one_in(6) {
        source.mutate(&mut bytes);
    }
    bytes
}

/// An entry for a receive queue; a linked one says which is next.
pub(super) fn receive(
    source: &mut Source<'_>,
    names: &Names<'_>,
    next: Option<u16>,
    log_stride: u32,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(next) = next {
        bytes = vec![0; 16];
        put(&mut bytes, 2, &next.to_be_bytes());
    }
    let size = 1usize << log_stride;
    while bytes.len() + 16 <= size {
        let key = names.key(source);
        bytes.extend(segment(len(source), key, address(source)));
        if source.below(2) == 0 {
            bytes.extend(segment(0, 0x100, 0));
        }
    }
    bytes.truncate(size);
    if source.one_in(4) {
        source.mutate(&mut bytes);
    }
    bytes
}
