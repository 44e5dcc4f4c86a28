//! Commands of the control queue (virtio 1.3 §5.1.6.5).

mod coalesce;
mod rss;
mod statistics;

pub use coalesce::Coalescing;
pub use rss::{Indirection, MAX_TABLE as MAX_INDIRECTION};
pub use statistics::{Commands, Source};

use super::Mac;
use super::features;
use super::filter::{Filter, MAX_TABLE};
use super::hash::Hasher;

/// Longest command that is read; what follows is ignored, and a command that needs it fails.
pub const MAX_COMMAND: usize = 16 << 10;
/// Longest command about hashes; the largest table and key take less. What is set is kept as the command.
const MAX_HASH_COMMAND: usize = 512;
/// Acknowledgement: done.
pub const OK: u8 = 0;
/// Acknowledgement: not done.
pub const ERR: u8 = 1;

const RX: u8 = 0;
const RX_PROMISC: u8 = 0;
const RX_ALLMULTI: u8 = 1;
const MAC: u8 = 1;
const MAC_TABLE_SET: u8 = 0;
const MAC_ADDR_SET: u8 = 1;
const VLAN: u8 = 2;
const VLAN_ADD: u8 = 0;
const VLAN_DEL: u8 = 1;
const ANNOUNCE: u8 = 3;
const ANNOUNCE_ACK: u8 = 0;
const MQ: u8 = 4;
const MQ_VQ_PAIRS_SET: u8 = 0;
const MQ_RSS_CONFIG: u8 = 1;
const MQ_HASH_CONFIG: u8 = 2;
const GUEST_OFFLOADS: u8 = 5;
const GUEST_OFFLOADS_SET: u8 = 0;
const NOTF_COAL: u8 = 6;
const TX_SET: u8 = 0;
const RX_SET: u8 = 1;
const VQ_SET: u8 = 2;
const VQ_GET: u8 = 3;
const STATS: u8 = 8;
const STATS_QUERY: u8 = 0;
const STATS_GET: u8 = 1;

/// What the driver sets by commands, valid from DRIVER_OK to reset.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Receive filter.
    pub filter: Filter,
    /// Queue pairs in use.
    pub pairs: u16,
    /// What is hashed, for scaling and reports.
    pub hasher: Option<Hasher>,
    /// Receive-side scaling.
    pub indirection: Option<Indirection>,
    /// Offloads that the driver takes now: bits of their features.
    pub offloads: u64,
    /// Interrupts.
    pub coalescing: Coalescing,
    /// The driver has announced itself since this was cleared.
    pub announced: bool,
    /// What was done so far.
    pub commands: Commands,
    max_pairs: u16,
    features: u64,
    /// The command that set hasher and indirection.
    hash_command: Option<Vec<u8>>,
}

impl Settings {
    /// As after DRIVER_OK with these features.
    pub fn new(mac: Mac, features: u64, max_pairs: u16) -> Self {
        Self {
            filter: Filter::new(mac, features),
            pairs: 1,
            hasher: None,
            indirection: None,
            offloads: features & features::GUEST_OFFLOADS,
            coalescing: Coalescing::default(),
            announced: false,
            commands: Commands::default(),
            max_pairs,
            features,
            hash_command: None,
        }
    }

    /// Does a command: class, command, data. Answers [`OK`] or [`ERR`], and what follows the answer in `result`;
    /// whatever is not known or was not negotiated is an error.
    pub fn execute(&mut self, command: &[u8], source: &dyn Source, result: &mut Vec<u8>) -> u8 {
        result.clear();
        self.commands.all += 1;
        match self.done(command, source, result) {
            Some(()) => {
                self.commands.ok += 1;
                OK
            }
            None => {
                let start = command.get(..2).unwrap_or(command);
                log::debug!(
                    "control command {start:?} of {} bytes refused",
                    command.len()
                );
                result.clear();
                ERR
            }
        }
    }

    fn done(&mut self, command: &[u8], source: &dyn Source, result: &mut Vec<u8>) -> Option<()> {
        let (&[class, number], data) = command.split_first_chunk()?;
        match (class, number) {
            (RX, RX_PROMISC) => {
                self.need(features::CTRL_RX)?;
                self.filter.promiscuous = *data.first()? != 0;
            }
            (RX, RX_ALLMULTI) => {
                self.need(features::CTRL_RX)?;
                self.filter.all_multicast = *data.first()? != 0;
            }
            (MAC, MAC_TABLE_SET) => {
                self.need(features::CTRL_RX)?;
                let (unicast, rest) = table(data)?;
                let (multicast, _) = table(rest)?;
                self.filter.set_tables(unicast, multicast);
            }
            (MAC, MAC_ADDR_SET) => {
                self.need(features::CTRL_MAC_ADDR)?;
                let mac = *data.first_chunk::<6>()?;
                // A multicast address or none cannot be anybody's.
                if mac[0] & 1 == 1 || mac == [0; 6] {
                    return None;
                }
                self.filter.mac = mac;
            }
            (VLAN, VLAN_ADD | VLAN_DEL) => {
                self.need(features::CTRL_VLAN)?;
                let vlan = u16::from_le_bytes(*data.first_chunk()?);
                self.filter
                    .set_vlan(vlan, number == VLAN_ADD)
                    .then_some(())?;
            }
            (ANNOUNCE, ANNOUNCE_ACK) => {
                self.need(features::GUEST_ANNOUNCE)?;
                self.announced = true;
            }
            (MQ, MQ_VQ_PAIRS_SET) => {
                self.need(features::MQ)?;
                self.set_pairs(u16::from_le_bytes(*data.first_chunk()?))?;
                // The driver is back to steering by the device (§5.1.6.5.6).
                self.indirection = None;
            }
            (MQ, MQ_RSS_CONFIG) => {
                self.need(features::RSS)?;
                (command.len() <= MAX_HASH_COMMAND).then_some(())?;
                let config = rss::rss(data, self.max_pairs)?;
                self.pairs = config.pairs;
                self.hasher = Some(config.hasher);
                self.indirection = Some(config.indirection);
                self.hash_command = Some(command.to_vec());
            }
            (MQ, MQ_HASH_CONFIG) => {
                self.need(features::HASH_REPORT)?;
                (command.len() <= MAX_HASH_COMMAND).then_some(())?;
                self.hasher = Some(rss::hash(data)?);
                self.indirection = None;
                self.hash_command = Some(command.to_vec());
            }
            (GUEST_OFFLOADS, GUEST_OFFLOADS_SET) => {
                self.need(features::CTRL_GUEST_OFFLOADS)?;
                let offloads = u64::from_le_bytes(*data.first_chunk()?);
                if offloads & !(self.features & features::GUEST_OFFLOADS) != 0 {
                    return None;
                }
                self.offloads = offloads;
            }
            (NOTF_COAL, TX_SET | RX_SET) => {
                self.need(features::NOTF_COAL)?;
                self.coalescing.set_all(number == RX_SET, data)?;
            }
            (NOTF_COAL, VQ_SET) => {
                self.need(features::VQ_NOTF_COAL)?;
                self.coalescing.set_one(2 * self.max_pairs, data)?;
            }
            (NOTF_COAL, VQ_GET) => {
                self.need(features::VQ_NOTF_COAL)?;
                self.coalescing.get_one(2 * self.max_pairs, data, result)?;
            }
            (STATS, STATS_QUERY) => {
                self.need(features::DEVICE_STATS)?;
                statistics::query(result);
            }
            (STATS, STATS_GET) => {
                self.need(features::DEVICE_STATS)?;
                statistics::get(data, source, self.commands, result)?;
            }
            _ => return None,
        }
        Some(())
    }

    /// Commands that bring about what [`super::saved`] has no fields for.
    pub(super) fn commands_to_repeat(&self) -> impl Iterator<Item = Vec<u8>> {
        let offloads = (self.features & features::CTRL_GUEST_OFFLOADS != 0).then(|| {
            let mut command = vec![GUEST_OFFLOADS, GUEST_OFFLOADS_SET];
            command.extend(self.offloads.to_le_bytes());
            command
        });
        let coalescing = self.coalescing.commands();
        let coalescing = coalescing.map(|command| [&[NOTF_COAL][..], &command].concat());
        // A driver that left scaling for steering by the device keeps its hash, not the table.
        let scaled = matches!(self.hash_command.as_deref(), Some([MQ, MQ_RSS_CONFIG, ..]));
        let back = (scaled && self.indirection.is_none()).then(|| {
            let [low, high] = self.pairs.to_le_bytes();
            vec![MQ, MQ_VQ_PAIRS_SET, low, high]
        });
        offloads
            .into_iter()
            .chain(self.hash_command.clone())
            .chain(back)
            .chain(coalescing)
    }

    /// Repeats such a command. `None` when it is none.
    pub(super) fn repeat(&mut self, command: &[u8]) -> Option<()> {
        self.done(command, &NoSource, &mut Vec::new())
    }

    /// Sets the queue pairs in use; `None` when there are not so many.
    pub(super) fn set_pairs(&mut self, pairs: u16) -> Option<()> {
        if pairs == 0 || pairs > self.max_pairs {
            return None;
        }
        self.pairs = pairs;
        Some(())
    }

    fn need(&self, feature: u64) -> Option<()> {
        (self.features & feature != 0).then_some(())
    }
}

/// For commands that ask nothing.
struct NoSource;

impl Source for NoSource {
    fn figures(&self, _queue: u16) -> Option<super::queue::Figures> {
        None
    }

    fn control(&self) -> u16 {
        u16::MAX
    }
}

/// Addresses that a driver lets in; `None`: more than fit.
type Table = Option<Vec<Mac>>;

/// `struct virtio_net_ctrl_mac` and what follows it.
fn table(data: &[u8]) -> Option<(Table, &[u8])> {
    let (count, rest) = data.split_first_chunk::<4>()?;
    let bytes = usize::try_from(u32::from_le_bytes(*count))
        .ok()?
        .checked_mul(6)?;
    let (entries, rest) = rest.split_at_checked(bytes)?;
    let macs = entries.chunks_exact(6).filter_map(|m| m.try_into().ok());
    let fits = bytes / 6 <= MAX_TABLE;
    Some((fits.then(|| macs.collect()), rest))
}

#[cfg(test)]
impl Settings {
    /// A command without figures and result.
    pub(super) fn plain(&mut self, command: &[u8]) -> u8 {
        self.execute(command, &NoSource, &mut Vec::new())
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
