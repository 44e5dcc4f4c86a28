//! Layer 2 forwarding from one function to its links: a table of MAC addresses, static ones of the
//! peers the OM told of and learned ones of those behind a TAP.
//!
//! A function never forwards from link to link, so that there are no loops to care for.

use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A MAC address.
pub type Mac = [u8; 6];

const ETHERTYPE_VLAN: u16 = 0x8100;

/// The start of a frame that forwarding looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L2Header {
    /// Destination address.
    pub destination: Mac,
    /// Source address.
    pub source: Mac,
    /// VLAN id; 0 for no tag and for a tag that is only a priority (IEEE 802.1Q §9.6).
    pub vlan: u16,
    /// Ethernet type of what follows, after the tag if there is one.
    pub ethertype: u16,
}

impl L2Header {
    /// Bytes of a frame that [`L2Header::parse`] looks at.
    pub const BYTES: usize = 18;

    /// Bytes to copy out for it: a whole vector register, which is read back without waiting for other stores.
    pub const COPY: usize = 32;

    /// From the first bytes of a frame. `None` when they are too few.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let mut vlan = 0;
        let mut ethertype = half(12)?;
        if ethertype == ETHERTYPE_VLAN {
            vlan = half(14)? & 0x0fff;
            ethertype = half(16)?;
        }
        Some(Self {
            destination: bytes.get(..6)?.try_into().ok()?,
            source: bytes.get(6..12)?.try_into().ok()?,
            vlan,
            ethertype,
        })
    }
}

/// Whether an address is for more than one station.
fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Most links a function can have; their indices are below this.
pub const MAX_LINKS: usize = 256;

/// A set of link indices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkSet {
    words: [u64; MAX_LINKS / 64],
}

impl LinkSet {
    /// No link.
    pub const EMPTY: Self = Self {
        words: [0; MAX_LINKS / 64],
    };

    /// One link. Empty when `link` is not below [`MAX_LINKS`].
    pub fn one(link: usize) -> Self {
        let mut set = Self::EMPTY;
        set.insert(link);
        set
    }

    /// Puts a link in. Returns false when `link` is not below [`MAX_LINKS`].
    pub fn insert(&mut self, link: usize) -> bool {
        match self.words.get_mut(link / 64) {
            Some(word) => {
                *word |= 1 << (link % 64);
                true
            }
            None => false,
        }
    }

    /// Takes a link out.
    pub fn remove(&mut self, link: usize) {
        if let Some(word) = self.words.get_mut(link / 64) {
            *word &= !(1 << (link % 64));
        }
    }

    /// Whether a link is in it.
    pub fn contains(&self, link: usize) -> bool {
        let word = self.words.get(link / 64).copied().unwrap_or(0);
        word & (1 << (link % 64)) != 0
    }

    /// Whether it has no link.
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Number of links in it.
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// The links, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        self.words.into_iter().enumerate().flat_map(|(i, word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                if left == 0 {
                    return None;
                }
                let bit = left.trailing_zeros() as usize;
                left &= left - 1;
                Some(i * 64 + bit)
            })
        })
    }
}

/// Key of a learned address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key(u64);

impl Key {
    fn new(mac: Mac, vlan: u16) -> Self {
        let [a, b, c, d, e, f] = mac;
        let [v, w] = vlan.to_be_bytes();
        Self(u64::from_be_bytes([v, w, a, b, c, d, e, f]))
    }
}

#[derive(Debug, Clone, Copy)]
struct Learned {
    link: usize,
    seen: Instant,
}

/// How often expired addresses are looked for when the table is full. In between, new addresses are
/// not learned: their frames go to all links, which is slower but right.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// An address seen again on its link is noted only after this long, to keep the common case cheap.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// The MAC addresses behind a function's links.
#[derive(Debug)]
pub struct MacTable {
    links: LinkSet,
    /// By address alone: a peer function has its address in every VLAN.
    fixed: HashMap<Mac, usize>,
    /// The one that was looked up last, with its link: a burst has few destinations.
    found: Cell<Option<(Mac, usize)>>,
    /// The standard hasher is keyed at random, so nobody can choose addresses that collide.
    learned: HashMap<Key, Learned>,
    limit: usize,
    age: Duration,
    swept: Option<Instant>,
    /// What was noted last: a burst has few sources.
    last: Option<(Key, Learned)>,
    refused: u64,
}

impl MacTable {
    /// Learned addresses of one function, as is usual for a small bridge.
    pub const DEFAULT_LIMIT: usize = 4096;
    /// How long an address is known after it was seen (IEEE 802.1Q §8.8.3).
    pub const DEFAULT_AGE: Duration = Duration::from_secs(300);

    /// An empty table that learns at most `limit` addresses and forgets those not seen for `age`.
    pub fn new(limit: usize, age: Duration) -> Self {
        Self {
            links: LinkSet::EMPTY,
            fixed: HashMap::new(),
            found: Cell::new(None),
            learned: HashMap::new(),
            limit,
            age,
            swept: None,
            last: None,
            refused: 0,
        }
    }

    /// Adds a link. Returns false when the index is not below [`MAX_LINKS`].
    pub fn add_link(&mut self, link: usize) -> bool {
        self.links.insert(link)
    }

    /// Removes a link and every address behind it.
    pub fn remove_link(&mut self, link: usize) {
        self.links.remove(link);
        self.fixed.retain(|_, of| *of != link);
        self.found.set(None);
        self.learned.retain(|_, entry| entry.link != link);
        self.last = None;
    }

    /// All links.
    pub fn links(&self) -> LinkSet {
        self.links
    }

    /// Says that `mac` is behind `link`, whatever is learned. Group addresses are ignored.
    pub fn set_static(&mut self, mac: Mac, link: usize) {
        if !is_group(mac) && self.links.contains(link) {
            self.found.set(None);
            self.fixed.insert(mac, link);
        }
    }

    /// Notes that a frame from `source` in `vlan` came in on `link`. Static addresses, group
    /// addresses and unknown links teach nothing.
    pub fn learn(&mut self, source: Mac, vlan: u16, link: usize, now: Instant) {
        let key = Key::new(source, vlan);
        let just_noted = self.last.is_some_and(|(last, entry)| {
            last == key
                && entry.link == link
                && now.saturating_duration_since(entry.seen) < REFRESH_INTERVAL
        });
        if just_noted {
            return;
        }
        if is_group(source) || self.fixed.contains_key(&source) || !self.links.contains(link) {
            return;
        }
        let entry = Learned { link, seen: now };
        if self.learned.len() >= self.limit && !self.learned.contains_key(&key) {
            self.sweep(now);
            if self.learned.len() >= self.limit {
                self.refused += 1;
                return;
            }
        }
        self.learned.insert(key, entry);
        self.last = Some((key, entry));
    }

    fn sweep(&mut self, now: Instant) {
        let due = self
            .swept
            .is_none_or(|at| now.saturating_duration_since(at) >= SWEEP_INTERVAL);
        if due {
            self.swept = Some(now);
            let age = self.age;
            self.learned
                .retain(|_, entry| now.saturating_duration_since(entry.seen) < age);
        }
    }

    /// The links that a frame of the function to `destination` in `vlan` leaves by: one when it is
    /// known where the address is, otherwise all.
    #[inline]
    pub fn lookup(&self, destination: Mac, vlan: u16, now: Instant) -> LinkSet {
        match self.found.get() {
            Some((known, link)) if known == destination => LinkSet::one(link),
            _ => self.find(destination, vlan, now),
        }
    }

    #[inline(never)]
    fn find(&self, destination: Mac, vlan: u16, now: Instant) -> LinkSet {
        if is_group(destination) {
            return self.links;
        }
        if let Some(link) = self.fixed.get(&destination) {
            self.found.set(Some((destination, *link)));
            return LinkSet::one(*link);
        }
        match self.learned.get(&Key::new(destination, vlan)) {
            Some(entry) if now.saturating_duration_since(entry.seen) < self.age => {
                LinkSet::one(entry.link)
            }
            _ => self.links,
        }
    }

    /// Learned addresses in the table, expired ones included.
    pub fn learned(&self) -> usize {
        self.learned.len()
    }

    /// How often an address was not learned because the table was full.
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

impl Default for MacTable {
    fn default() -> Self {
        Self::new(Self::DEFAULT_LIMIT, Self::DEFAULT_AGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const A: Mac = [2, 0, 0, 0, 0, 1];
    const B: Mac = [2, 0, 0, 0, 0, 2];
    const BROADCAST: Mac = [0xff; 6];

    fn table() -> MacTable {
        let mut table = MacTable::new(8, Duration::from_secs(300));
        for link in [0, 1, 200] {
            assert!(table.add_link(link));
        }
        table
    }

    fn numbered(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        [2, 1, a, b, c, d]
    }

    #[test]
    fn known_addresses_go_to_their_link_and_all_others_to_all() {
        let now = Instant::now();
        let mut table = table();
        table.set_static(A, 200);
        table.learn(B, 0, 1, now);
        assert_eq!(table.lookup(A, 0, now), LinkSet::one(200));
        assert_eq!(table.lookup(A, 7, now), LinkSet::one(200));
        assert_eq!(table.lookup(B, 0, now), LinkSet::one(1));
        assert_eq!(table.lookup(B, 7, now), table.links());
        assert_eq!(table.lookup(BROADCAST, 0, now), table.links());
        assert_eq!(
            table.lookup([0x33, 0x33, 0, 0, 0, 1], 0, now),
            table.links()
        );
        assert_eq!(table.links().len(), 3);
    }

    #[test]
    fn a_static_address_cannot_be_stolen_by_sending_from_it() {
        let now = Instant::now();
        let mut table = table();
        table.set_static(A, 0);
        table.learn(A, 0, 1, now);
        assert_eq!(table.lookup(A, 0, now), LinkSet::one(0));
        assert_eq!(table.learned(), 0);
    }

    #[test]
    fn a_learned_address_moves_with_its_station_and_ages() {
        let now = Instant::now();
        let mut table = table();
        table.learn(B, 0, 0, now);
        table.learn(B, 0, 1, now);
        assert_eq!(table.lookup(B, 0, now), LinkSet::one(1));
        let seen_again = now + Duration::from_secs(200);
        table.learn(B, 0, 1, seen_again);
        let later = now + Duration::from_secs(400);
        assert_eq!(table.lookup(B, 0, later), LinkSet::one(1));
        let gone = seen_again + Duration::from_secs(300);
        assert_eq!(table.lookup(B, 0, gone), table.links());
    }

    #[test]
    fn the_table_is_bounded_and_recovers_when_addresses_expire() {
        let now = Instant::now();
        let mut table = table();
        for n in 0..100 {
            table.learn(numbered(n), 0, 0, now);
        }
        assert_eq!((table.learned(), table.refused()), (8, 92));
        table.learn(numbered(3), 0, 1, now);
        assert_eq!(table.lookup(numbered(3), 0, now), LinkSet::one(1));
        let later = now + Duration::from_secs(301);
        table.learn(B, 0, 1, later);
        assert_eq!(table.lookup(B, 0, later), LinkSet::one(1));
        assert_eq!(table.learned(), 1);
    }

    #[test]
    fn a_removed_link_takes_its_addresses_with_it() {
        let now = Instant::now();
        let mut table = table();
        table.set_static(A, 1);
        table.learn(B, 0, 1, now);
        table.remove_link(1);
        assert!(!table.links().contains(1));
        assert_eq!(table.lookup(A, 0, now), table.links());
        assert_eq!(table.lookup(B, 0, now), table.links());
        table.learn(B, 0, 1, now);
        assert_eq!(table.learned(), 0, "the link is gone");
    }

    #[test]
    fn group_addresses_and_links_out_of_range_are_not_taken() {
        let now = Instant::now();
        let mut table = table();
        table.set_static(BROADCAST, 0);
        table.learn([3, 0, 0, 0, 0, 0], 0, 0, now);
        assert_eq!(table.lookup(BROADCAST, 0, now), table.links());
        assert_eq!(table.learned(), 0);
        assert!(!table.add_link(MAX_LINKS));
        assert!(LinkSet::one(MAX_LINKS).is_empty());
    }

    #[test]
    fn the_header_is_found_with_and_without_a_tag() {
        let mut bytes = [0u8; 18];
        bytes[..6].copy_from_slice(&A);
        bytes[6..12].copy_from_slice(&B);
        bytes[12..14].copy_from_slice(&[0x08, 0x00]);
        let plain = L2Header::parse(&bytes[..14]).unwrap();
        assert_eq!((plain.destination, plain.source), (A, B));
        assert_eq!((plain.vlan, plain.ethertype), (0, 0x0800));
        assert!(L2Header::parse(&bytes[..13]).is_none());
        bytes[12..18].copy_from_slice(&[0x81, 0x00, 0xe0, 0x05, 0x86, 0xdd]);
        let tagged = L2Header::parse(&bytes).unwrap();
        assert_eq!((tagged.vlan, tagged.ethertype), (5, 0x86dd));
        assert!(L2Header::parse(&bytes[..17]).is_none());
    }

    proptest! {
        #[test]
        fn a_link_set_is_a_set(links in prop::collection::vec(0usize..300, 0..40), out in 0usize..300) {
            let mut set = LinkSet::EMPTY;
            let mut model = BTreeSet::new();
            for link in links {
                prop_assert_eq!(set.insert(link), link < MAX_LINKS);
                if link < MAX_LINKS {
                    model.insert(link);
                }
            }
            set.remove(out);
            model.remove(&out);
            prop_assert!(set.iter().eq(model.iter().copied()));
            prop_assert_eq!(set.len(), model.len());
            prop_assert_eq!(set.is_empty(), model.is_empty());
            for link in 0..300 {
                prop_assert_eq!(set.contains(link), model.contains(&link));
            }
        }
    }
}
