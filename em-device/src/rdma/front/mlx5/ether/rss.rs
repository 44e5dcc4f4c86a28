//! Receive-side scaling: which receive queue a frame goes to.

use super::headers::{Layout, TCP, UDP};
pub(super) use crate::flow::toeplitz::KEY_BYTES;
use crate::flow::toeplitz::{INPUT_BYTES, Toeplitz};

/// `rx_hash_fn` of a TIR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashFunction {
    /// Always the first queue of the table.
    None,
    /// XOR of all bytes of the input, inverted.
    InvertedXor8,
    /// Toeplitz with this key.
    Toeplitz {
        /// The key.
        key: [u8; KEY_BYTES],
        /// Whether both directions of a flow have the same hash.
        symmetric: bool,
    },
}

/// Indirection table (RQT) and hash.
#[derive(Debug)]
pub struct Rss {
    /// Numbers of receive queues.
    rqns: Vec<u32>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    None,
    Xor,
    Toeplitz { hash: Toeplitz, symmetric: bool },
}

/// A frame's hash, as completions say it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Hash {
    pub(super) result: u32,
    /// Of what it was made: IP version in bits 3:2, transport in 7:6.
    pub(super) kind: u8,
}

impl Rss {
    /// Queues by `rqns`, which may have any length.
    pub fn new(rqns: Vec<u32>, function: HashFunction) -> Self {
        let kind = match function {
            HashFunction::None => Kind::None,
            HashFunction::InvertedXor8 => Kind::Xor,
            HashFunction::Toeplitz { key, symmetric } => Kind::Toeplitz {
                hash: Toeplitz::new(&key),
                symmetric,
            },
        };
        Self { rqns, kind }
    }

    /// Replaces the indirection table.
    pub fn set_table(&mut self, rqns: Vec<u32>) {
        self.rqns = rqns;
    }

    /// The queue of a hash.
    pub(super) fn queue(&self, hash: Hash) -> Option<u32> {
        let index = hash.result as usize % self.rqns.len().max(1);
        self.rqns.get(index).copied()
    }

    /// The hash of a frame that begins with `start`: over addresses and ports, or addresses alone; 0
    /// for what is no IP.
    pub(super) fn hash(&self, start: &[u8], layout: Option<&Layout>) -> Hash {
        self.try_hash(start, layout).unwrap_or_default()
    }

    fn try_hash(&self, start: &[u8], layout: Option<&Layout>) -> Option<Hash> {
        let layout = layout?;
        let addresses = layout.addresses(start)?;
        let ports = layout
            .transport
            .and_then(|transport| start.get(transport.at..transport.at + 4));
        let mut input = [0; INPUT_BYTES];
        let symmetric = matches!(
            self.kind,
            Kind::Toeplitz {
                symmetric: true,
                ..
            }
        );
        let mut len = put(&mut input, 0, addresses, symmetric)?;
        if let Some(ports) = ports {
            len = put(&mut input, len, ports, symmetric)?;
        }
        let input = input.get(..len)?;
        let result = match &self.kind {
            Kind::None => return None,
            Kind::Xor => u32::from(!input.iter().fold(0, |all, byte| all ^ byte)),
            Kind::Toeplitz { hash, .. } => hash.hash(input),
        };
        let ip = if layout.ipv6 { 2 } else { 1 };
        let transport = match layout.transport.map(|transport| transport.protocol) {
            Some(TCP) => 1,
            Some(UDP) => 2,
            _ => 0,
        };
        Some(Hash {
            result,
            kind: ip << 2 | transport << 6,
        })
    }
}

/// Puts source and destination into the input; for a symmetric hash the smaller one first.
fn put(input: &mut [u8], at: usize, pair: &[u8], symmetric: bool) -> Option<usize> {
    let (source, destination) = pair.split_at_checked(pair.len() / 2)?;
    let (first, second) = match symmetric && source > destination {
        true => (destination, source),
        false => (source, destination),
    };
    let (middle, end) = (at + first.len(), at + pair.len());
    input.get_mut(at..middle)?.copy_from_slice(first);
    input.get_mut(middle..end)?.copy_from_slice(second);
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::super::test_frames::{RSS_KEY, tcp4, udp4};
    use super::*;

    fn rss(symmetric: bool) -> Rss {
        let key = RSS_KEY;
        Rss::new(vec![5, 6, 7, 8], HashFunction::Toeplitz { key, symmetric })
    }

    fn frame(source: [u8; 4], destination: [u8; 4], ports: (u16, u16)) -> Vec<u8> {
        let mut frame = tcp4(b"");
        frame[26..30].copy_from_slice(&source);
        frame[30..34].copy_from_slice(&destination);
        frame[34..36].copy_from_slice(&ports.0.to_be_bytes());
        frame[36..38].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    fn hash(rss: &Rss, frame: &[u8]) -> Hash {
        rss.hash(frame, Layout::parse(frame).as_ref())
    }

    #[test]
    fn the_hash_is_that_of_the_verification_suite() {
        let rss = rss(false);
        let first = frame([66, 9, 149, 187], [161, 142, 100, 80], (2794, 1766));
        let found = hash(&rss, &first);
        assert_eq!((found.result, found.kind), (0x51cc_c178, 1 << 2 | 1 << 6));
        let second = frame([199, 92, 111, 2], [65, 69, 140, 83], (14230, 4739));
        assert_eq!(hash(&rss, &second).result, 0xc626_b0ea);
        // The same without ports.
        let mut fragment = first;
        fragment[20] = 0x20;
        let found = hash(&rss, &fragment);
        assert_eq!((found.result, found.kind), (0x323e_8fc2, 1 << 2));
    }

    #[test]
    fn a_symmetric_hash_is_the_same_for_both_directions() {
        let there = frame([1, 2, 3, 4], [5, 6, 7, 8], (1000, 80));
        let back = frame([5, 6, 7, 8], [1, 2, 3, 4], (80, 1000));
        assert_eq!(hash(&rss(true), &there), hash(&rss(true), &back));
        assert_ne!(hash(&rss(false), &there), hash(&rss(false), &back));
    }

    #[test]
    fn hashes_choose_from_the_table() {
        let mut rss = rss(false);
        let hash = |result| Hash { result, kind: 0 };
        assert_eq!(rss.queue(hash(6)), Some(7));
        assert_eq!(rss.queue(hash(0)), Some(5));
        rss.set_table(vec![]);
        assert_eq!(rss.queue(hash(6)), None);
    }

    #[test]
    fn other_functions_and_frames_have_hashes_too() {
        let none = Rss::new(vec![1], HashFunction::None);
        assert_eq!(hash(&none, &udp4(b"x")), Hash::default());
        assert_eq!(hash(&rss(false), &[0xff; 20]), Hash::default());
        let xor = Rss::new(vec![1], HashFunction::InvertedXor8);
        let found = hash(&xor, &frame([1, 2, 4, 8], [16, 32, 64, 128], (0x0f0f, 0)));
        assert_eq!(found.result, 0);
    }
}
