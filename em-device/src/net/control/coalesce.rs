//! How long the driver may be left without interrupts (virtio 1.3 §5.1.6.5.8).

use super::super::moderation::Coalesce;

/// Bytes of `struct virtio_net_ctrl_coal`.
const COAL_BYTES: usize = 8;

/// What the driver set for its queues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// For all transmit and all receive queues.
    transmit: Option<Coalesce>,
    receive: Option<Coalesce>,
    /// For single queues, by index.
    queues: Vec<Option<Coalesce>>,
}

impl Coalescing {
    /// What counts for a queue; `None`: the driver said nothing.
    pub fn of(&self, queue: u16) -> Option<Coalesce> {
        let own = self.queues.get(usize::from(queue)).copied().flatten();
        own.or(if queue % 2 == 0 {
            self.receive
        } else {
            self.transmit
        })
    }

    /// A queue that was reset has what is set for all of its kind.
    pub fn forget(&mut self, queue: u16) {
        if let Some(own) = self.queues.get_mut(usize::from(queue)) {
            *own = None;
        }
    }

    /// For all queues of a kind; single ones have it too from now on.
    pub(super) fn set_all(&mut self, receive: bool, data: &[u8]) -> Option<()> {
        let coalesce = parse(data)?;
        let first = if receive {
            self.receive = Some(coalesce);
            0
        } else {
            self.transmit = Some(coalesce);
            1
        };
        self.queues
            .iter_mut()
            .skip(first)
            .step_by(2)
            .for_each(|own| *own = None);
        Some(())
    }

    /// For one queue of `count` that may be set.
    pub(super) fn set_one(&mut self, count: u16, data: &[u8]) -> Option<()> {
        let (queue, rest) = queue(count, data)?;
        let coalesce = parse(rest)?;
        self.queues.resize(usize::from(count), None);
        *self.queues.get_mut(usize::from(queue))? = Some(coalesce);
        Some(())
    }

    /// Appends what one queue has.
    pub(super) fn get_one(&self, count: u16, data: &[u8], result: &mut Vec<u8>) -> Option<()> {
        let (queue, _) = queue(count, data)?;
        result.extend(bytes(self.of(queue).unwrap_or_default()));
        Some(())
    }

    /// Commands without their class that bring this about.
    pub(super) fn commands(&self) -> impl Iterator<Item = Vec<u8>> {
        let all = [
            (super::TX_SET, self.transmit),
            (super::RX_SET, self.receive),
        ];
        let all = all
            .into_iter()
            .filter_map(|(command, coalesce)| Some([&[command][..], &bytes(coalesce?)].concat()));
        let single = (0u16..).zip(&self.queues).filter_map(|(queue, own)| {
            let [low, high] = queue.to_le_bytes();
            Some([&[super::VQ_SET, low, high, 0, 0][..], &bytes((*own)?)].concat())
        });
        all.chain(single)
    }
}

fn bytes(coalesce: Coalesce) -> [u8; COAL_BYTES] {
    let both = u64::from(coalesce.max_packets) | u64::from(coalesce.max_usecs) << 32;
    both.to_le_bytes()
}

fn parse(data: &[u8]) -> Option<Coalesce> {
    let (packets, rest) = data.split_first_chunk()?;
    Some(Coalesce {
        max_packets: u32::from_le_bytes(*packets),
        max_usecs: u32::from_le_bytes(*rest.first_chunk()?),
    })
}

/// Queue index, then 2 bytes that are reserved.
fn queue(count: u16, data: &[u8]) -> Option<(u16, &[u8])> {
    let (&[low, high, _, _], rest) = data.split_first_chunk()?;
    let queue = u16::from_le_bytes([low, high]);
    (queue < count).then_some((queue, rest))
}
