//! A place in a packed ring (virtio 1.3 §2.8.1): an index and the wrap counter that goes with it.

/// Index in bits 0 to 14, wrap counter in bit 15, as in the event suppression structures (§2.8.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position(u16);

const WRAP: u16 = 1 << 15;

impl Position {
    /// Where a ring begins: at its first descriptor, with the wrap counter set.
    pub const START: Self = Self(WRAP);

    /// From the bits of an event suppression structure; any are possible.
    pub fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// As bits.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// Index of the descriptor.
    pub fn index(self) -> u16 {
        self.0 & !WRAP
    }

    /// The wrap counter.
    pub fn wrap(self) -> bool {
        self.0 & WRAP != 0
    }

    /// The place `slots` further on in a ring of `size` descriptors. `slots` is at most `size`, which is at most 32768.
    #[inline]
    #[must_use]
    pub fn forward(self, slots: u16, size: u16) -> Self {
        // At most 32767 + 32768.
        let index = self.index() + slots;
        if index >= size {
            Self((index - size) | (self.0 & WRAP ^ WRAP))
        } else {
            Self(index | self.0 & WRAP)
        }
    }

    /// The place `slots` before.
    #[must_use]
    pub fn back(self, slots: u16, size: u16) -> Self {
        let index = self.index();
        if index >= slots {
            Self((index - slots) | self.0 & WRAP)
        } else {
            // At least 0, since `slots` is at most `size`.
            let index = (u32::from(index) + u32::from(size) - u32::from(slots)) as u16;
            Self(index | (self.0 & WRAP ^ WRAP))
        }
    }

    /// Descriptors from here to `to`, below twice the size: places repeat after two laps.
    pub fn distance(self, to: Self, size: u16) -> u32 {
        let laps = 2 * u32::from(size);
        let linear =
            |place: Self| u32::from(place.index()) + if place.wrap() { 0 } else { u32::from(size) };
        (linear(to) % laps + laps - linear(self) % laps) % laps
    }

    /// Whether a descriptor with these flags (§2.8.1) is available at this place.
    #[inline]
    pub fn is_available(self, flags: u16) -> bool {
        let (available, used) = (flags & AVAIL != 0, flags & USED != 0);
        available == self.wrap() && used != self.wrap()
    }

    /// Flags of a descriptor that was used at this place.
    pub fn used_flags(self) -> u16 {
        if self.wrap() { AVAIL | USED } else { 0 }
    }
}

/// `VIRTQ_DESC_F_AVAIL`.
const AVAIL: u16 = 1 << 7;
/// `VIRTQ_DESC_F_USED`.
const USED: u16 = 1 << 15;

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes at both ends and around powers of two.
    const SIZES: [u16; 12] = [1, 2, 3, 7, 8, 255, 256, 257, 1000, 32766, 32767, 32768];

    /// All places of a ring, in order over both laps.
    fn laps(size: u16) -> impl Iterator<Item = Position> {
        let lap = move |wrap: u16| (0..size).map(move |index| Position(index | wrap));
        lap(WRAP).chain(lap(0))
    }

    #[test]
    fn one_step_on_is_the_next_place_at_every_place_of_every_size() {
        for size in SIZES {
            let all: Vec<Position> = laps(size).collect();
            assert_eq!(all.len(), 2 * usize::from(size));
            for (n, place) in all.iter().enumerate() {
                let next = all[(n + 1) % all.len()];
                assert_eq!(place.forward(1, size), next, "{place:?} of {size}");
                assert_eq!(next.back(1, size), *place, "{next:?} of {size}");
                assert!(place.index() < size);
            }
        }
    }

    #[test]
    fn steps_of_any_length_lead_as_far_as_they_say_and_back() {
        for size in SIZES {
            for place in laps(size).step_by(usize::from(size / 40 + 1)) {
                for slots in (0..=size).step_by(usize::from(size / 50 + 1)).chain([size]) {
                    let there = place.forward(slots, size);
                    assert_eq!(
                        there.back(slots, size),
                        place,
                        "{place:?}, {slots} of {size}"
                    );
                    assert_eq!(
                        place.distance(there, size),
                        u32::from(slots) % (2 * u32::from(size))
                    );
                    assert_eq!(
                        (place.distance(there, size) + there.distance(place, size))
                            % (2 * u32::from(size)),
                        0
                    );
                }
            }
        }
    }

    #[test]
    fn exactly_the_flags_of_this_lap_are_available_for_all_flags() {
        for place in [Position(WRAP | 5), Position(5)] {
            for flags in 0..=u16::MAX {
                let (avail, used) = (flags >> 7 & 1 == 1, flags >> 15 == 1);
                let want = (avail, used) == (place.wrap(), !place.wrap());
                assert_eq!(place.is_available(flags), want, "{flags:#x}");
            }
            assert!(!place.is_available(place.used_flags()));
            let next_lap = place.forward(10, 10);
            assert!(
                !next_lap.is_available(place.used_flags()),
                "not until the driver says so"
            );
        }
    }

    #[test]
    fn bits_of_a_driver_are_taken_as_they_are_for_all_of_them() {
        for bits in 0..=u16::MAX {
            let place = Position::from_bits(bits);
            assert_eq!(place.bits(), bits);
            // Also places outside the ring have some distance and do not panic.
            assert!(Position::START.distance(place, 3) < 6);
        }
    }
}
