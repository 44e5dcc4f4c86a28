//! A driver without sense: commands, entries and doorbells of random bytes, which may only hurt itself.

use super::bench::*;

/// xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A word that is small, an address, all ones or anything.
    fn word(&mut self) -> u32 {
        match self.below(8) {
            0..4 => self.below(16) as u32,
            4 => (DATA + self.below(0x10_0000)) as u32,
            5 => (DATA + 0x1000 * self.below(0x100)) as u32,
            6 => u32::MAX << self.below(32),
            _ => self.next() as u32,
        }
    }
}

#[test]
fn random_drivers_are_survived_and_the_next_one_is_served() {
    for seed in 1..=24 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
        let mut bench = Bench::connected(seed % 2 == 0);
        for _ in 0..150 {
            disturb(&mut bench, &mut random);
            for _ in 0..3 {
                bench.turn();
            }
            bench.now += std::time::Duration::from_millis(random.below(200));
        }
        bench.device.reset();
        bench.turn();
        assert!(!bench.device.running());
    }
    let mut bench = Bench::connected(true);
    bench.post(2, 0, 2, 1 << 22, &words(&[0, 0]));
    bench.post_receive(3, 0, DATA, 0, 0);
    bench.run();
    assert!(bench.poll(1).is_some());
}

fn disturb(bench: &mut Bench, random: &mut Random) {
    match random.below(6) {
        0..3 => {
            let code = match random.below(2) {
                0 => (0, random.below(20) as u8),
                _ => (1, random.below(10) as u8),
            };
            let mut body: Vec<(usize, u32)> = (2..32).map(|n| (4 * n, random.word())).collect();
            if random.below(2) == 0 {
                // An object that there is.
                let number = 1 + random.below(8) as u32;
                body[0].1 = body[0].1 << 20 | number;
            }
            // Reading the page lists of regions may write into the command queue's own memory.
            bench.raw_command(code, &body);
        }
        3 => {
            let qpn = 1 + random.below(4) as u32;
            let body: Vec<u8> = (0..30).flat_map(|_| random.word().to_le_bytes()).collect();
            let body = &body[..24 + 32 * random.below(4) as usize];
            let flags = random.next() & 0xff | random.below(4) << 22 | random.below(9) << 56;
            let opcode = random.below(20) as u8;
            let index = random.below(64) as u16;
            bench.post(qpn, index, opcode, flags & !0xff, body);
        }
        4 => {
            let qpn = 1 + random.below(4) as u32;
            let index = random.below(64) as u16;
            let (addr, len, key) = (random.next(), random.word(), random.word());
            bench.post_receive(qpn, index, addr, len, key);
        }
        _ => {
            let offset = match random.below(2) {
                0 => 8 * random.below(0x1_0000),
                _ => 8 * random.below(0x80),
            };
            // A reset is what the end of the test does, and the data path is told of the rest.
            if offset != 0x10 {
                let value = u64::from(random.word()) << 32 | u64::from(random.word());
                bench.registers.write(offset, &value.to_le_bytes());
            }
        }
    }
}
