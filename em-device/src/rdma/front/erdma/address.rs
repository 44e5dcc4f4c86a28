//! Address vectors, of connections and of address handles: 36 bytes.

use super::bytes::{bytes_at, u16_at, u32_at};
use super::tables::Address;
use crate::rdma::verbs::Destination;

/// Bytes of an address vector.
pub(super) const AV: usize = 36;

/// Parses an address vector; `pd` is whose it is.
pub(super) fn parse(av: &[u8], pd: u32) -> Address {
    let [traffic_class, hop_limit, service_level] = [4, 5, 6].map(|at| u32_at(av, at) as u8);
    Address {
        pd,
        to: Destination {
            lid: 0,
            gid: Some(bytes_at(av, 20)),
            mac: bytes_at(av, 12),
        },
        // Tables have 16 entries; a number beyond is that of none.
        source_gid: u8::try_from(u16_at(av, 10)).unwrap_or(u8::MAX),
        traffic_class,
        hop_limit,
        service_level,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_has_its_fields_where_the_driver_puts_them() {
        let mut av: Vec<u8> = (0..AV as u8).collect();
        av[10..12].copy_from_slice(&[3, 0]);
        let address = parse(&av, 7);
        assert_eq!(address.to.mac, [12, 13, 14, 15, 16, 17]);
        assert_eq!(address.to.gid.unwrap()[..2], [20, 21]);
        assert_eq!((address.pd, address.source_gid), (7, 3));
        let small = (
            address.traffic_class,
            address.hop_limit,
            address.service_level,
        );
        assert_eq!(small, (4, 5, 6));
        av[11] = 1;
        assert_eq!(parse(&av, 7).source_gid, u8::MAX);
    }
}
