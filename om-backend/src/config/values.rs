//! Values with a form of their own.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Whether it names a group of stations (IEEE 802, the I/G bit).
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether it is all zeroes, which names nobody.
    pub fn is_zero(self) -> bool {
        self.0 == [0; 6]
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = ();

    /// Six pairs of hexadecimal digits with colons between.
    fn from_str(s: &str) -> Result<Self, ()> {
        let mut bytes = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or(())?;
            if !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ())?;
        }
        if parts.next().is_some() {
            return Err(());
        }
        Ok(Self(bytes))
    }
}

/// An address with the length of its network's prefix, for example `10.0.0.1/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpPrefix {
    /// The address.
    pub address: IpAddr,
    /// Bits of the prefix, at most 32 or 128.
    pub length: u8,
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl FromStr for IpPrefix {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        let (address, length) = s.split_once('/').ok_or(())?;
        let address: IpAddr = address.parse().map_err(|_| ())?;
        let length: u8 = length.parse().map_err(|_| ())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        (length <= most)
            .then_some(Self { address, length })
            .ok_or(())
    }
}

/// Whether `name` can name an EM, a function or a network: it becomes part of file names.
pub(super) fn is_name(name: &str) -> bool {
    (1..=32).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_have_six_pairs_of_hexadecimal_digits() {
        assert_eq!(
            "02:00:00:00:aB:01".parse(),
            Ok(MacAddress([2, 0, 0, 0, 0xab, 1]))
        );
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:01:02",
            "2:0:0:0:0:1",
            "02-00-00-00-00-01",
            "+2:00:00:00:00:01",
        ] {
            assert_eq!(bad.parse::<MacAddress>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn prefixes_are_no_longer_than_the_address() {
        assert!("10.0.0.1/32".parse::<IpPrefix>().is_ok());
        assert!("fd00::1/64".parse::<IpPrefix>().is_ok());
        for bad in ["10.0.0.1", "10.0.0.1/33", "10.0.0/24", "fd00::1/129"] {
            assert_eq!(bad.parse::<IpPrefix>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn names_are_safe_in_file_names() {
        assert!(is_name("net0-a.1"));
        for bad in ["", ".", "..", "a/b", "a b", "ä", &"x".repeat(33)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
