//! What a driver set by commands, as bytes, for a process that takes the place of this one.
//!
//! Numbers are little endian. The layout is part of [`smartep::state::VERSION`]:
//!
//! | bytes | field |
//! |---|---|
//! | 0 | bits: 0 promiscuous, 1 all multicast, 2 table of unicast, 3 of multicast addresses, 4 VLAN filter |
//! | 1..7 | MAC address |
//! | 7..9 | queue pairs in use |
//! | then, where their bit is set | a table: its length in 2 bytes, 6 bytes each; the VLAN filter: 512 bytes |
//! | to the end | commands that bring about the rest: each its length in 2 bytes, then class, command, data |

use super::Mac;
use super::control::Settings;
use super::filter::{MAX_TABLE, VLAN_WORDS};
use crate::virtio::saved::Fields;

const PROMISCUOUS: u8 = 1;
const ALL_MULTICAST: u8 = 2;
const UNICAST: u8 = 4;
const MULTICAST: u8 = 8;
const VLANS: u8 = 16;

/// The settings as bytes.
pub fn to_bytes(settings: &Settings) -> Vec<u8> {
    let filter = &settings.filter;
    let (unicast, multicast) = filter.tables();
    let flag = |set, bit| if set { bit } else { 0u8 };
    let mut bytes = vec![
        flag(filter.promiscuous, PROMISCUOUS)
            | flag(filter.all_multicast, ALL_MULTICAST)
            | flag(unicast.is_some(), UNICAST)
            | flag(multicast.is_some(), MULTICAST)
            | flag(filter.vlans().is_some(), VLANS),
    ];
    bytes.extend(filter.mac);
    bytes.extend(settings.pairs.to_le_bytes());
    for table in [unicast, multicast].into_iter().flatten() {
        bytes.extend((table.len() as u16).to_le_bytes());
        bytes.extend(table.iter().flatten());
    }
    for word in filter.vlans().into_iter().flatten() {
        bytes.extend(word.to_le_bytes());
    }
    for command in settings.commands_to_repeat() {
        bytes.extend((command.len() as u16).to_le_bytes());
        bytes.extend(command);
    }
    bytes
}

/// Puts what was saved into settings as after DRIVER_OK. `None` when the bytes are not of this layout; the settings
/// are of no use then.
pub fn apply(bytes: &[u8], settings: &mut Settings) -> Option<()> {
    let mut fields = Fields(bytes);
    let flags = fields.byte()?;
    let filter = &mut settings.filter;
    filter.promiscuous = flags & PROMISCUOUS != 0;
    filter.all_multicast = flags & ALL_MULTICAST != 0;
    filter.mac = fields.bytes()?;
    let pairs = fields.half()?;
    let unicast = table(&mut fields, flags & UNICAST != 0)?;
    let multicast = table(&mut fields, flags & MULTICAST != 0)?;
    filter.set_tables(unicast, multicast);
    if flags & VLANS != 0 {
        let mut vlans = [0; VLAN_WORDS];
        for word in &mut vlans {
            *word = fields.long()?;
        }
        filter.set_vlans(vlans);
    }
    while !fields.0.is_empty() {
        let len = usize::from(fields.half()?);
        let (command, rest) = fields.0.split_at_checked(len)?;
        settings.repeat(command)?;
        fields = Fields(rest);
    }
    settings.set_pairs(pairs)
}

#[allow(clippy::option_option)] // without a table all pass, and no bytes is an error
fn table(fields: &mut Fields<'_>, there: bool) -> Option<Option<Vec<Mac>>> {
    if !there {
        return Some(None);
    }
    let len = usize::from(fields.half()?);
    if len > MAX_TABLE {
        return None;
    }
    (0..len)
        .map(|_| fields.bytes())
        .collect::<Option<_>>()
        .map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::control::OK;
    use crate::net::features::OFFERED;

    #[test]
    fn a_driver_that_left_scaling_has_not_come_back_to_it_in_the_successor() {
        let new = || Settings::new([2, 0, 0, 0, 0, 1], OFFERED, 4);
        let mut settings = new();
        let scaling = [4, 1, 0xff, 1, 0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 1, 0, 2, 7, 8];
        for command in [&scaling[..], &[4, 0, 2, 0]] {
            assert_eq!(settings.plain(command), OK, "{command:?}");
        }
        let mut next = new();
        apply(&to_bytes(&settings), &mut next).unwrap();
        assert!(next.indirection.is_none());
        assert_eq!(next.pairs, 2);
    }

    #[test]
    fn settings_survive_their_bytes() {
        let new = || Settings::new([2, 0, 0, 0, 0, 1], OFFERED, 4);
        let mut settings = new();
        let other = [2, 0, 0, 0, 0, 9];
        let tables = [&[1, 0, 1, 0, 0, 0][..], &other, &[0; 4]].concat();
        for command in [
            &[0, 0, 0][..],
            &tables,
            &[1, 1, 2, 0, 0, 0, 0, 7],
            &[2, 0, 7, 0],
            &[4, 1, 0xff, 1, 0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 1, 0, 2, 7, 8],
            &[5, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            &[6, 0, 8, 0, 0, 0, 50, 0, 0, 0],
            &[6, 2, 3, 0, 0, 0, 9, 0, 0, 0, 60, 0, 0, 0],
        ] {
            assert_eq!(settings.plain(command), OK, "{command:?}");
        }
        let bytes = to_bytes(&settings);
        let mut next = new();
        apply(&bytes, &mut next).unwrap();
        assert_eq!(to_bytes(&next), bytes);
        assert_eq!(next.pairs, 3);
        let frame = |to: [u8; 6], vlan: u8| [&to[..], &[2; 6], &[0x81, 0, 0, vlan, 8, 0]].concat();
        assert!(
            next.filter.wants(&frame(other, 7)) && next.filter.wants(&frame([2, 0, 0, 0, 0, 7], 7))
        );
        assert!(
            !next.filter.wants(&frame(other, 8))
                && !next.filter.wants(&frame([2, 0, 0, 0, 0, 1], 7))
        );
        assert_eq!(next.indirection, settings.indirection);
        assert_eq!((next.offloads, &next.coalescing), (2, &settings.coalescing));
        // Whole commands at the end may be missing: that is what was saved before them.
        let ends = (0..bytes.len()).filter(|len| apply(&bytes[..*len], &mut new()).is_some());
        assert_eq!(ends.count(), settings.commands_to_repeat().count());
    }
}
