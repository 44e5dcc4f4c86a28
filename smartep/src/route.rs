//! Which side answers which bytes.

use thiserror::Error;

use crate::CONFIG_REGION;

/// A side of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Configuration space and control registers.
    Control,
    /// Everything that carries traffic.
    Data,
}

/// A range of a region that belongs to one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// vfio region index.
    pub region: u32,
    /// First byte.
    pub start: u64,
    /// First byte after.
    pub end: u64,
    /// Who answers.
    pub side: Side,
}

/// Why routes do not make a table.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RouteError {
    /// A range is empty or reversed.
    #[error("the route of region {0} at {1:#x} is empty")]
    Empty(u32, u64),
    /// Two ranges share bytes.
    #[error("two routes of region {0} overlap at {1:#x}")]
    Overlap(u32, u64),
}

/// (region, offset range) → side. Configuration space is on the control side, all else on the data side unless
/// a route says otherwise.
#[derive(Debug, Clone, Default)]
pub struct RouteTable {
    routes: Vec<Route>,
}

impl RouteTable {
    /// Checks and sorts routes.
    pub fn new(mut routes: Vec<Route>) -> Result<Self, RouteError> {
        routes.sort_by_key(|r| (r.region, r.start));
        if let Some(r) = routes.iter().find(|r| r.start >= r.end) {
            return Err(RouteError::Empty(r.region, r.start));
        }
        for (a, b) in routes.iter().zip(routes.iter().skip(1)) {
            if a.region == b.region && b.start < a.end {
                return Err(RouteError::Overlap(b.region, b.start));
            }
        }
        Ok(Self { routes })
    }

    /// Splits an access into pieces that each belong to one side: `(side, offset, bytes)`. The access must not
    /// wrap; one that does is cut at the end of the address space.
    pub fn pieces(
        &self,
        region: u32,
        offset: u64,
        len: usize,
    ) -> impl Iterator<Item = (Side, u64, usize)> + '_ {
        let (mut at, end) = (offset, offset.saturating_add(len as u64));
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (side, until) = self.at(region, at);
            let until = until.min(end);
            let piece = (side, at, (until - at) as usize);
            at = until;
            Some(piece)
        })
    }

    /// Side of the byte at `offset`, and where that side ends.
    fn at(&self, region: u32, offset: u64) -> (Side, u64) {
        if region == CONFIG_REGION {
            return (Side::Control, u64::MAX);
        }
        for route in self.routes.iter().filter(|r| r.region == region) {
            if offset < route.start {
                return (Side::Data, route.start);
            }
            if offset < route.end {
                return (route.side, route.end);
            }
        }
        (Side::Data, u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(region: u32, start: u64, end: u64) -> Route {
        Route {
            region,
            start,
            end,
            side: Side::Control,
        }
    }

    #[test]
    fn an_access_across_a_border_is_split_there() {
        let table = RouteTable::new(vec![control(0, 0x100, 0x200)]).unwrap();
        let pieces: Vec<_> = table.pieces(0, 0xfe, 0x104).collect();
        let want = [
            (Side::Data, 0xfe, 2),
            (Side::Control, 0x100, 0x100),
            (Side::Data, 0x200, 2),
        ];
        assert_eq!(pieces, want);
        assert_eq!(
            table.pieces(1, 0x100, 4).collect::<Vec<_>>(),
            [(Side::Data, 0x100, 4)]
        );
    }

    #[test]
    fn configuration_space_is_on_the_control_side() {
        let table = RouteTable::default();
        assert_eq!(
            table.pieces(7, 0, 4096).collect::<Vec<_>>(),
            [(Side::Control, 0, 4096)]
        );
    }

    #[test]
    fn pieces_cover_every_access_once() {
        let table =
            RouteTable::new(vec![control(0, 3, 5), control(0, 5, 9), control(0, 11, 12)]).unwrap();
        for offset in 0..16 {
            for len in 0..16 {
                let pieces: Vec<_> = table.pieces(0, offset, len).collect();
                let covered: Vec<u64> = pieces
                    .iter()
                    .flat_map(|&(_, at, n)| at..at + n as u64)
                    .collect();
                assert_eq!(covered, (offset..offset + len as u64).collect::<Vec<_>>());
                for (side, at, n) in pieces {
                    for byte in at..at + n as u64 {
                        let inside = (3..9).contains(&byte) || byte == 11;
                        assert_eq!(side == Side::Control, inside);
                    }
                }
            }
        }
    }

    #[test]
    fn overlapping_and_empty_routes_are_refused() {
        let overlap = RouteTable::new(vec![control(0, 0, 8), control(0, 4, 12)]);
        assert_eq!(overlap.unwrap_err(), RouteError::Overlap(0, 4));
        assert_eq!(
            RouteTable::new(vec![control(2, 8, 8)]).unwrap_err(),
            RouteError::Empty(2, 8)
        );
    }
}
