//! Device statistics as a driver asks for them (virtio 1.4 draft §5.1.6.5.9, `VIRTIO_NET_F_DEVICE_STATS`).

use super::super::queue::Figures;

/// Types of statistics: a bit in requests, the same number in answers.
mod kind {
    pub(super) const RX_BASIC: u8 = 0;
    pub(super) const RX_CSUM: u8 = 1;
    pub(super) const RX_GSO: u8 = 2;
    pub(super) const TX_BASIC: u8 = 16;
    pub(super) const TX_CSUM: u8 = 17;
    pub(super) const TX_GSO: u8 = 18;
    pub(super) const CONTROL: u8 = 32;
}

const RECEIVE: [u8; 3] = [kind::RX_BASIC, kind::RX_CSUM, kind::RX_GSO];
const TRANSMIT: [u8; 3] = [kind::TX_BASIC, kind::TX_CSUM, kind::TX_GSO];
const CONTROL: [u8; 1] = [kind::CONTROL];
/// Bytes of an answer at the most: more than all types of all queues take once.
const MOST: usize = 64 << 10;

/// What the control queue did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Commands {
    /// Commands.
    pub all: u64,
    /// Of those, answered with OK.
    pub ok: u64,
}

/// Where figures come from.
pub trait Source {
    /// Those of a queue, if it is one of the pairs.
    fn figures(&self, queue: u16) -> Option<Figures>;
    /// Index of the control queue.
    fn control(&self) -> u16;
}

/// Appends `struct virtio_net_stats_capabilities`.
pub(super) fn query(result: &mut Vec<u8>) {
    let all = RECEIVE.iter().chain(&TRANSMIT).chain(&CONTROL);
    let bits = all.fold(0u64, |bits, kind| bits | 1 << kind);
    result.extend(bits.to_le_bytes());
}

/// Appends what is asked for: pairs of a queue (8 bytes) and a set of types. `None`: that makes no sense.
pub(super) fn get(
    request: &[u8],
    source: &dyn Source,
    commands: Commands,
    result: &mut Vec<u8>,
) -> Option<()> {
    let entries = request.chunks_exact(16);
    if request.is_empty() || !entries.remainder().is_empty() {
        return None;
    }
    for entry in entries {
        let (&[low, high, ..], types) = entry.split_first_chunk::<8>()?;
        let queue = u16::from_le_bytes([low, high]);
        let wanted = u64::from_le_bytes(*types.first_chunk()?);
        let (figures, possible) = if queue == source.control() {
            (Figures::default(), &CONTROL[..])
        } else if queue % 2 == 0 {
            (source.figures(queue)?, &RECEIVE[..])
        } else {
            (source.figures(queue)?, &TRANSMIT[..])
        };
        let known = possible.iter().fold(0u64, |bits, kind| bits | 1 << kind);
        if wanted & !known != 0 {
            return None;
        }
        for kind in possible.iter().filter(|kind| wanted >> **kind & 1 == 1) {
            reply(*kind, queue, &values(*kind, &figures, commands), result);
        }
        if result.len() > MOST {
            return None;
        }
    }
    Some(())
}

fn values(kind: u8, f: &Figures, commands: Commands) -> Vec<u64> {
    let plain = f.packets.saturating_sub(f.needs_csum);
    match kind {
        kind::RX_BASIC => vec![
            f.kicks,
            f.packets,
            f.bytes,
            f.interrupts,
            f.drops,
            f.overruns,
        ],
        kind::TX_BASIC => vec![
            f.kicks,
            f.packets,
            f.bytes,
            f.interrupts,
            f.drops,
            f.malformed,
        ],
        // Those found good, unfinished, not looked at, found bad; the device does not look.
        kind::RX_CSUM => vec![0, f.needs_csum, plain, 0],
        kind::TX_CSUM => vec![plain, f.needs_csum],
        // Large frames as they were delivered, and of how much that was put together.
        kind::RX_GSO => vec![f.gso_packets, f.gso_bytes, f.gso_packets, f.gso_bytes],
        // Large frames, the segments they were cut into, and those that stayed whole on the wire.
        kind::TX_GSO => vec![f.gso_packets, f.gso_bytes, 0, 0, f.gso_packets, f.gso_bytes],
        _ => vec![commands.all, commands.ok],
    }
}

/// `struct virtio_net_stats_reply_hdr` and the figures.
fn reply(kind: u8, queue: u16, values: &[u64], result: &mut Vec<u8>) {
    let [low, high] = queue.to_le_bytes();
    let [size_low, size_high] = (8 + 8 * values.len() as u16).to_le_bytes();
    result.extend([kind, 0, low, high, 0, 0, size_low, size_high]);
    result.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two;

    impl Source for Two {
        fn figures(&self, queue: u16) -> Option<Figures> {
            (queue < 2).then_some(Figures {
                kicks: 1,
                packets: 10,
                bytes: 1000,
                interrupts: 3,
                drops: 7,
                overruns: 5,
                malformed: 6,
                needs_csum: 4,
                gso_packets: 2,
                gso_bytes: 900,
            })
        }

        fn control(&self) -> u16 {
            2
        }
    }

    fn ask(entries: &[(u16, u64)]) -> Option<Vec<u8>> {
        let entry = |(queue, types): &(u16, u64)| [u64::from(*queue), *types].map(u64::to_le_bytes);
        let request: Vec<u8> = entries.iter().flat_map(entry).flatten().collect();
        let mut result = Vec::new();
        get(&request, &Two, Commands { all: 9, ok: 8 }, &mut result)?;
        Some(result)
    }

    fn words(bytes: &[u8]) -> Vec<u64> {
        let word = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().unwrap());
        bytes.chunks(8).map(word).collect()
    }

    #[test]
    fn each_type_has_its_header_and_figures() {
        let header = |kind: u64, queue: u64, count: u64| kind | queue << 16 | (8 + 8 * count) << 48;
        let all: [(u16, u64, &[u64]); 7] = [
            (0, 0, &[1, 10, 1000, 3, 7, 5]),
            (0, 1, &[0, 4, 6, 0]),
            (0, 2, &[2, 900, 2, 900]),
            (1, 16, &[1, 10, 1000, 3, 7, 6]),
            (1, 17, &[6, 4]),
            (1, 18, &[2, 900, 0, 0, 2, 900]),
            (2, 32, &[9, 8]),
        ];
        let mut together = Vec::new();
        for (queue, kind, figures) in all {
            let mut want = vec![header(kind, u64::from(queue), figures.len() as u64)];
            want.extend(figures);
            let got = ask(&[(queue, 1 << kind)]).unwrap();
            assert_eq!(words(&got), want, "type {kind}");
            together.extend(got);
        }
        let bits = all.iter().map(|(queue, kind, _)| (*queue, 1u64 << kind));
        let entries: Vec<_> = (0..3)
            .map(|q| (q, bits.clone().filter(|b| b.0 == q).map(|b| b.1).sum()))
            .collect();
        assert_eq!(ask(&entries), Some(together));
        let mut capabilities = Vec::new();
        query(&mut capabilities);
        assert_eq!(words(&capabilities), [0x1_0007_0007]);
    }

    #[test]
    fn what_is_not_there_is_refused_and_answers_are_bounded() {
        for entries in [
            &[][..],
            &[(3, 1)],
            &[(0, 1 << 16)],
            &[(1, 1)],
            &[(2, 1)],
            &[(0, 1 << 3)],
        ] {
            assert_eq!(ask(entries), None, "{entries:?}");
        }
        assert_eq!(ask(&[(0, 7); 1000]), None);
        let mut result = Vec::new();
        assert_eq!(get(&[0; 15], &Two, Commands::default(), &mut result), None);
    }
}
