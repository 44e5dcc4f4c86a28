//! Fields of big-endian structures, by byte and bit as the reference manual counts: bit 0 of a byte
//! is its most significant.

/// A field of 1 to 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    byte: usize,
    bit: u8,
    width: u8,
}

impl Field {
    /// `width` bits that begin with bit `bit` (0 to 7) of byte `byte`.
    pub(crate) const fn new(byte: usize, bit: u8, width: u8) -> Self {
        assert!(bit < 8 && width > 0 && width <= 32);
        Self { byte, bit, width }
    }

    /// The same field of a structure that begins at byte `base`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) const fn at(self, base: usize) -> Self {
        Self {
            byte: self.byte + base,
            ..self
        }
    }

    /// The value; bits beyond the end of `bytes` read as 0.
    pub(crate) fn get(self, bytes: &[u8]) -> u32 {
        (self.window(bytes) >> self.shift() & self.mask()) as u32
    }

    /// Whether any bit is set.
    pub(crate) fn is_set(self, bytes: &[u8]) -> bool {
        self.get(bytes) != 0
    }

    /// Stores the low bits of `value`; bits beyond the end of `bytes` are dropped.
    pub(crate) fn set(self, bytes: &mut [u8], value: u32) {
        let mask = self.mask() << self.shift();
        let new = self.window(bytes) & !mask | u64::from(value) << self.shift() & mask;
        let new = new.to_be_bytes();
        for (to, from) in bytes.iter_mut().skip(self.byte).zip(&new[3..]) {
            *to = *from;
        }
    }

    /// Copies the field from one structure to another of the same kind.
    pub(crate) fn copy(self, from: &[u8], to: &mut [u8]) {
        self.set(to, self.get(from));
    }

    /// The five bytes that any field lies in.
    fn window(self, bytes: &[u8]) -> u64 {
        let mut window = [0; 8];
        for (to, from) in window[3..].iter_mut().zip(bytes.iter().skip(self.byte)) {
            *to = *from;
        }
        u64::from_be_bytes(window)
    }

    fn shift(self) -> u32 {
        40 - u32::from(self.bit) - u32::from(self.width)
    }

    fn mask(self) -> u64 {
        (1 << self.width) - 1
    }
}

/// 64 bits at a byte; 0 when they are not all there.
pub(crate) fn get64(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u64::from_be_bytes(*chunk),
        None => 0,
    }
}

/// Stores bytes at a place, as many as there is room for.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(value) {
        *to = *from;
    }
}

/// A copy of `N` bytes at a place; zeroes where there are none.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut copy = [0; N];
    for (to, from) in copy.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_from_the_most_significant() {
        let bytes = [0x12, 0x34, 0x56, 0x78, 0x9a];
        assert_eq!(Field::new(0, 0, 4).get(&bytes), 1);
        assert_eq!(Field::new(0, 4, 8).get(&bytes), 0x23);
        assert_eq!(Field::new(1, 0, 24).get(&bytes), 0x34_5678);
        assert_eq!(Field::new(0, 7, 32).get(&bytes), 0x1a2b_3c4d);
    }

    #[test]
    fn storing_leaves_the_neighbours() {
        let mut bytes = [0xff; 6];
        Field::new(1, 3, 26).set(&mut bytes, 0);
        assert_eq!(bytes, [0xff, 0xe0, 0, 0, 0x07, 0xff]);
        Field::new(1, 3, 26).set(&mut bytes, 0x3ff_ffff);
        assert_eq!(bytes, [0xff; 6]);
    }

    #[test]
    fn what_is_beyond_the_end_reads_as_zero_and_is_not_stored() {
        let mut bytes = [0xff; 2];
        assert_eq!(Field::new(1, 0, 16).get(&bytes), 0xff00);
        assert_eq!(Field::new(9, 0, 16).get(&bytes), 0);
        Field::new(1, 0, 16).set(&mut bytes, 0x1234);
        assert_eq!(bytes, [0xff, 0x12]);
        assert_eq!((get64(&bytes, 0), array::<3>(&bytes, 1)), (0, [0x12, 0, 0]));
    }
}
