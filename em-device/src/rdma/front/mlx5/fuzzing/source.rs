//! Where a hostile driver's decisions come from.

/// Decisions: from a seed without end, or from bytes, which read as zeroes when they are used up.
#[derive(Debug)]
pub struct Source<'a>(Kind<'a>);

#[derive(Debug)]
enum Kind<'a> {
    Bytes(&'a [u8]),
    /// xorshift64*.
    Seed(u64),
}

/// Numbers that are next to limits.
const LIMITS: [u64; 20] = [
    0,
    1,
    2,
    3,
    8,
    0x0f,
    0x3f,
    0x40,
    0xff,
    0xfff,
    0x1000,
    0x7fff,
    0x8000,
    0xffff,
    0xff_ffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    u64::MAX >> 1,
    u64::MAX,
];

impl<'a> Source<'a> {
    /// As these bytes say.
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self(Kind::Bytes(bytes))
    }

    /// Always the same for a seed.
    pub fn seed(seed: u64) -> Self {
        // Small seeds differ in few bits; 0 would stay 0.
        Self(Kind::Seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1))
    }

    /// Whether the bytes are used up.
    pub fn is_over(&self) -> bool {
        matches!(self.0, Kind::Bytes([]))
    }

    /// The low `len` bytes of a number, at most 8.
    fn take(&mut self, len: usize) -> u64 {
        match &mut self.0 {
            Kind::Bytes(bytes) => {
                let (now, later) = bytes.split_at(len.min(bytes.len()));
                *bytes = later;
                now.iter()
                    .fold(0, |value, byte| value << 8 | u64::from(*byte))
            }
            Kind::Seed(state) => {
                *state ^= *state >> 12;
                *state ^= *state << 25;
                *state ^= *state >> 27;
                state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> (64 - 8 * len)
            }
        }
    }

    /// A number below `end`, which is at least 1 and at most 2³².
    pub fn below(&mut self, end: u64) -> u64 {
        let len = match end {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 4,
        };
        self.take(len) % end
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        // Zeroes, with which bytes end, are the usual case.
        self.below(n) == n - 1
    }

    /// One of them; they are some.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// Any number.
    pub fn u64(&mut self) -> u64 {
        self.take(8)
    }

    /// Any number.
    pub fn u32(&mut self) -> u32 {
        self.take(4) as u32
    }

    /// Any number.
    pub fn u8(&mut self) -> u8 {
        self.take(1) as u8
    }

    /// A number that is likely to be next to a limit.
    pub fn limit(&mut self) -> u64 {
        match self.below(4) {
            0 => self.u64(),
            1 => self.below(64),
            _ => self.pick(&LIMITS),
        }
    }

    /// `len` bytes, of which about one in `one_in` is not zero.
    pub fn fill(&mut self, len: usize, one_in: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match one_in {
            0 | 1 => bytes.iter_mut().for_each(|byte| *byte = self.u8()),
            _ => {
                for _ in 0..len as u64 / one_in + 1 {
                    let at = self.below(len.max(1) as u64) as usize;
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = self.u8();
                    }
                }
            }
        }
        bytes
    }

    /// Changes some bytes, bits or words of what would be valid.
    pub fn mutate(&mut self, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len() as u64) as usize;
            match self.below(4) {
                0 => bytes[at] = self.u8(),
                1 => bytes[at] ^= 1 << self.below(8),
                2 => {
                    let value = (self.limit() as u32).to_be_bytes();
                    super::super::bits::put(bytes, at & !3, &value);
                }
                _ => {
                    let value = self.limit().to_be_bytes();
                    super::super::bits::put(bytes, at & !7, &value);
                }
            }
        }
    }
}
