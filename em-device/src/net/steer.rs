//! Which queue pair a received frame goes to: by a hash over addresses and ports, so that a flow stays
//! on one pair and in order.

/// Bytes from a frame's start that [`flow_hash`] looks at: Ethernet, two tags, IPv6, ports.
pub const STEER_BYTES: usize = 14 + 8 + 40 + 4;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
/// Protocols with ports in their first 4 bytes: TCP, UDP, SCTP.
const WITH_PORTS: [u8; 3] = [6, 17, 132];
/// "More fragments" and the fragment offset.
const FRAGMENT: u16 = 0x3fff;

/// A hash that is equal for the frames of one flow. `start` is the first [`STEER_BYTES`] of the
/// frame or all of it.
pub fn flow_hash(start: &[u8]) -> u32 {
    // A frame that is no IP is steered by its Ethernet addresses.
    ip_hash(start).unwrap_or_else(|| mix(start.get(..12).unwrap_or(start), 0))
}

fn ip_hash(start: &[u8]) -> Option<u32> {
    let mut at = 12;
    let mut kind = word(start, at)?;
    for _ in 0..2 {
        if TAGS.contains(&kind) {
            at += 4;
            kind = word(start, at)?;
        }
    }
    let ip = start.get(at + 2..)?;
    let (addresses, protocol, payload) = match kind {
        IPV4 => {
            let header = usize::from(ip.first()? & 15) * 4;
            // All fragments of a packet go the same way, so none may use ports.
            let whole = word(ip, 6)? & FRAGMENT == 0;
            (ip.get(12..20)?, *ip.get(9)?, whole.then_some(header))
        }
        IPV6 => (ip.get(8..40)?, *ip.get(6)?, Some(40)),
        _ => return None,
    };
    let hash = mix(addresses, u32::from(protocol));
    let ports = payload
        .filter(|_| WITH_PORTS.contains(&protocol))
        .and_then(|at| ip.get(at..at + 4));
    Some(ports.map_or(hash, |ports| mix(ports, hash)))
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// FNV-1a over words, with a final avalanche.
fn mix(bytes: &[u8], seed: u32) -> u32 {
    let mut hash = seed ^ 0x811c_9dc5;
    for chunk in bytes.chunks(4) {
        let word = chunk.iter().fold(0u32, |w, b| w << 8 | u32::from(*b));
        hash = (hash ^ word).wrapping_mul(0x0100_0193);
        hash ^= hash >> 15;
    }
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^ hash >> 13
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp4(source_port: u16, fragment: u16) -> Vec<u8> {
        let mut f = [&[2; 12][..], &[8, 0], &[0x45, 0, 0, 40, 0, 0]].concat();
        f.extend(fragment.to_be_bytes());
        f.extend([64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        f.extend(source_port.to_be_bytes());
        f.extend([0, 80]);
        f
    }

    #[test]
    fn ports_spread_flows_and_a_flow_stays() {
        let pairs: std::collections::BTreeSet<u32> =
            (1000..1064).map(|p| flow_hash(&tcp4(p, 0)) % 4).collect();
        assert_eq!(pairs.len(), 4);
        assert_eq!(flow_hash(&tcp4(1000, 0)), flow_hash(&tcp4(1000, 0)));
    }

    #[test]
    fn fragments_of_a_packet_stay_together() {
        let first = flow_hash(&tcp4(1000, 0x2000));
        assert_eq!(first, flow_hash(&tcp4(7, 185)));
        assert_ne!(first, flow_hash(&tcp4(1000, 0)));
    }

    #[test]
    fn frames_of_any_length_have_a_hash() {
        let whole = tcp4(1000, 0);
        for len in 0..whole.len() {
            flow_hash(&whole[..len]);
        }
        let mut tagged = whole.clone();
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        assert_eq!(flow_hash(&tagged), flow_hash(&whole));
        flow_hash(&[0xff; STEER_BYTES]);
    }
}
