//! The Toeplitz hash of receive-side scaling.

/// Bytes of a key.
pub const KEY_BYTES: usize = 40;
/// Bytes of the longest input: IPv6 addresses and ports.
pub const INPUT_BYTES: usize = 36;

/// A key, made ready so that each byte of an input costs one look-up.
#[derive(Clone)]
pub struct Toeplitz {
    /// For each byte of the input and each of its values, what it adds to the hash.
    tables: Box<[[u32; 256]; INPUT_BYTES]>,
}

impl std::fmt::Debug for Toeplitz {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Toeplitz").finish_non_exhaustive()
    }
}

impl Toeplitz {
    /// With this key.
    pub fn new(key: &[u8; KEY_BYTES]) -> Self {
        let mut tables = Box::new([[0; 256]; INPUT_BYTES]);
        for (table, key) in tables.iter_mut().zip(key.windows(5)) {
            // Bit 7 of the byte takes the key's 32 bits from the byte's first bit on, and so on.
            let window = key
                .iter()
                .fold(0u64, |all, byte| all << 8 | u64::from(*byte));
            for (value, entry) in table.iter_mut().enumerate() {
                *entry = (0..8)
                    .filter(|bit| value >> (7 - bit) & 1 == 1)
                    .fold(0, |hash, bit| hash ^ (window >> (8 - bit)) as u32);
            }
        }
        Self { tables }
    }

    /// The hash of an input; what is behind [`INPUT_BYTES`] does not count.
    pub fn hash(&self, input: &[u8]) -> u32 {
        let bytes = self.tables.iter().zip(input);
        bytes.fold(0, |hash, (table, byte)| hash ^ table[usize::from(*byte)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_give_what_the_definition_gives() {
        let mut key = [0; KEY_BYTES];
        for (n, byte) in key.iter_mut().enumerate() {
            *byte = (n * 37 + 11) as u8;
        }
        let bit = |n: usize| u32::from(key[n / 8] >> (7 - n % 8) & 1);
        let toeplitz = Toeplitz::new(&key);
        for seed in 0..200u32 {
            let byte = |n: u32| (seed.wrapping_mul(2654435761).wrapping_add(n * n * 77) >> 9) as u8;
            let input: Vec<u8> = (0..36).map(byte).collect();
            let mut want = 0;
            for n in 0..8 * input.len() {
                if input[n / 8] >> (7 - n % 8) & 1 == 1 {
                    want ^= (0..32).fold(0, |window, at| window << 1 | bit(n + at));
                }
            }
            assert_eq!(toeplitz.hash(&input), want);
        }
    }
}
