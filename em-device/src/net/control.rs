//! Commands of the control queue (virtio 1.3 §5.1.6.5).

use super::Mac;
use super::features;
use super::filter::{Filter, MAX_TABLE};

/// Longest command that is read; what follows is ignored, and a command that needs it fails.
pub const MAX_COMMAND: usize = 16 << 10;
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
const MQ: u8 = 4;
const MQ_VQ_PAIRS_SET: u8 = 0;

/// What the driver sets by commands, valid from DRIVER_OK to reset.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Receive filter.
    pub filter: Filter,
    /// Queue pairs in use.
    pub pairs: u16,
    max_pairs: u16,
    features: u64,
}

impl Settings {
    /// As after DRIVER_OK with these features.
    pub fn new(mac: Mac, features: u64, max_pairs: u16) -> Self {
        Self {
            filter: Filter::new(mac, features),
            pairs: 1,
            max_pairs,
            features,
        }
    }

    /// Does a command: class, command, data. Answers [`OK`] or [`ERR`]; whatever is not known or was
    /// not negotiated is an error.
    pub fn execute(&mut self, command: &[u8]) -> u8 {
        match self.done(command) {
            Some(()) => OK,
            None => {
                let start = command.get(..2).unwrap_or(command);
                log::debug!(
                    "control command {start:?} of {} bytes refused",
                    command.len()
                );
                ERR
            }
        }
    }

    fn done(&mut self, command: &[u8]) -> Option<()> {
        let (&[class, command], data) = command.split_first_chunk()?;
        match (class, command) {
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
                    .set_vlan(vlan, command == VLAN_ADD)
                    .then_some(())?;
            }
            (MQ, MQ_VQ_PAIRS_SET) => {
                self.need(features::MQ)?;
                self.set_pairs(u16::from_le_bytes(*data.first_chunk()?))?;
            }
            _ => return None,
        }
        Some(())
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

/// `struct virtio_net_ctrl_mac` and what follows it. `Some(None)` as a table: more than fit.
#[allow(clippy::type_complexity)]
fn table(data: &[u8]) -> Option<(Option<Vec<Mac>>, &[u8])> {
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
mod tests {
    use super::*;
    use crate::net::features::OFFERED;

    const OWN: Mac = [2, 0, 0, 0, 0, 1];

    fn settings() -> Settings {
        Settings::new(OWN, OFFERED, 4)
    }

    #[test]
    fn commands_are_answered_ok_only_if_they_make_sense() {
        let long = [&[1, 0, 100, 0, 0, 0][..], &[2; 600], &[0; 4]].concat();
        let cases: &[(&str, &[u8], u8)] = &[
            ("promiscuous on", &[0, 0, 1], OK),
            ("promiscuous without a byte", &[0, 0], ERR),
            ("all multicast off", &[0, 1, 0], OK),
            ("an unknown receive mode", &[0, 9, 1], ERR),
            ("empty tables", &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], OK),
            ("one table", &[1, 0, 0, 0, 0, 0], ERR),
            (
                "a table cut short",
                &[1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
                ERR,
            ),
            (
                "a table of 2^32 - 1",
                &[1, 0, 255, 255, 255, 255, 0, 0, 0, 0],
                ERR,
            ),
            ("a table of 100", &long, OK),
            ("an address", &[1, 1, 2, 0, 0, 0, 0, 7], OK),
            ("a multicast address", &[1, 1, 1, 0, 0, 0, 0, 7], ERR),
            ("the null address", &[1, 1, 0, 0, 0, 0, 0, 0], ERR),
            ("a short address", &[1, 1, 2, 0, 0], ERR),
            ("VLAN 7", &[2, 0, 7, 0], OK),
            ("VLAN 7 gone", &[2, 1, 7, 0], OK),
            ("VLAN 4096", &[2, 0, 0, 16], ERR),
            ("VLAN of one byte", &[2, 0, 7], ERR),
            ("an announcement, not offered", &[3, 0], ERR),
            ("1 pair", &[4, 0, 1, 0], OK),
            ("4 pairs", &[4, 0, 4, 0], OK),
            ("0 pairs", &[4, 0, 0, 0], ERR),
            ("5 pairs", &[4, 0, 5, 0], ERR),
            ("pairs of one byte", &[4, 0, 1], ERR),
            ("RSS, not offered", &[4, 1, 0, 0], ERR),
            (
                "offloads, not offered",
                &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                ERR,
            ),
            ("an unknown class", &[77, 0, 1], ERR),
            ("no command", &[4], ERR),
            ("nothing", &[], ERR),
        ];
        for (name, command, want) in cases {
            assert_eq!(settings().execute(command), *want, "{name}");
        }
    }

    #[test]
    fn a_refused_command_changes_nothing() {
        let mut s = settings();
        assert_eq!(s.execute(&[4, 0, 3, 0]), OK);
        assert_eq!(s.execute(&[4, 0, 9, 0]), ERR);
        assert_eq!(s.pairs, 3);
    }

    #[test]
    fn commands_take_effect() {
        let mut s = settings();
        let other = [2, 0, 0, 0, 0, 9];
        let frame = [&other[..], &[0; 12]].concat();
        assert!(s.filter.wants(&frame));
        s.execute(&[0, 0, 0]);
        assert!(!s.filter.wants(&frame));
        let tables = [&[1, 0, 1, 0, 0, 0][..], &other, &[0; 4]].concat();
        s.execute(&tables);
        assert!(s.filter.wants(&frame));
        s.execute(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(!s.filter.wants(&frame));
        let many = [&[1, 0, 65, 0, 0, 0][..], &[2; 390], &[0; 4]].concat();
        s.execute(&many);
        assert!(
            s.filter.wants(&frame),
            "a table that is too long lets all in"
        );
    }

    #[test]
    fn what_was_not_negotiated_is_refused() {
        let mut s = Settings::new(OWN, features::CTRL_VQ, 4);
        for command in [
            &[0, 0, 1][..],
            &[1, 1, 2, 0, 0, 0, 0, 7],
            &[2, 0, 7, 0],
            &[4, 0, 1, 0],
        ] {
            assert_eq!(s.execute(command), ERR, "{command:?}");
        }
    }
}
