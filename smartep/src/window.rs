//! A window in configuration space onto the BARs: registers that name a place, and four bytes of data whose
//! access is an access of that place. Firmware uses it before BARs are mapped.
//!
//! The layout is that of virtio 1.3 §4.1.4.9, from `cap.bar` on. It is here because it joins what the two sides
//! hold: the window is in configuration space, and what is behind it may belong to either.

/// Bytes of the window, and of each of its registers' offsets in it.
const LEN: usize = 16;
const BAR: usize = 0;
const OFFSET: usize = 4;
const LENGTH: usize = 8;
const DATA: usize = 12;

/// Where the window is in configuration space, and what its registers hold.
#[derive(Debug, Clone)]
pub struct ConfigWindow {
    at: u64,
    registers: [u8; LEN],
}

/// What the data register stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// BAR index.
    pub bar: u32,
    /// Offset in it, a multiple of `len`.
    pub offset: u64,
    /// Bytes: 1, 2 or 4.
    pub len: usize,
}

impl ConfigWindow {
    /// A window whose BAR register is the byte at `at` of configuration space; all registers are zero.
    pub fn new(at: u64) -> Self {
        Self {
            at,
            registers: [0; LEN],
        }
    }

    /// Back to the state after power-on.
    pub fn reset(&mut self) {
        self.registers = [0; LEN];
    }

    /// All registers.
    pub fn registers(&self) -> [u8; LEN] {
        self.registers
    }

    /// Sets all registers.
    pub fn set_registers(&mut self, registers: [u8; LEN]) {
        self.registers = registers;
    }

    /// Whether every byte of an access of configuration space is a register of the window.
    pub fn covers(&self, offset: u64, len: usize) -> bool {
        (0..len as u64).all(|i| self.register(offset.saturating_add(i)).is_some())
    }

    /// Whether an access of configuration space touches the data.
    pub fn touches_data(&self, offset: u64, len: usize) -> bool {
        (0..len as u64).any(|i| {
            self.register(offset.saturating_add(i))
                .is_some_and(|n| n >= DATA)
        })
    }

    /// What the data register stands for; `None` while the registers name nothing that may be accessed.
    pub fn place(&self) -> Option<Place> {
        let r = &self.registers;
        let bar = r.get(BAR).copied().filter(|bar| *bar < 6)?;
        let (offset, len) = (long(r, OFFSET)?, long(r, LENGTH)?);
        // The driver must keep accesses aligned (virtio 1.3 §4.1.4.9.2); one that is not is none.
        (matches!(len, 1 | 2 | 4) && offset % len == 0).then_some(Place {
            bar: bar.into(),
            offset: offset.into(),
            len: len as usize,
        })
    }

    /// The data register.
    pub fn data(&self) -> [u8; 4] {
        self.registers.last_chunk().copied().unwrap_or_default()
    }

    /// Puts what was read into the data register, from its first byte on; the others keep their value.
    pub fn set_data(&mut self, data: &[u8]) {
        for (to, from) in self.registers.iter_mut().skip(DATA).zip(data) {
            *to = *from;
        }
    }

    /// Fills those bytes of an access of configuration space that are registers of the window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (i, to) in data.iter_mut().enumerate() {
            let register = self.register(offset.saturating_add(i as u64));
            if let Some(from) = register.and_then(|n| self.registers.get(n)) {
                *to = *from;
            }
        }
    }

    /// Takes those bytes of an access of configuration space that are registers of the window.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (i, from) in data.iter().enumerate() {
            let register = self.register(offset.saturating_add(i as u64));
            if let Some(to) = register.and_then(|n| self.registers.get_mut(n)) {
                *to = *from;
            }
        }
    }

    /// The register byte at `offset` of configuration space. `id` and the padding behind `bar` are none: they
    /// are read-only.
    fn register(&self, offset: u64) -> Option<usize> {
        let n = usize::try_from(offset.checked_sub(self.at)?).ok()?;
        (n == BAR || (OFFSET..LEN).contains(&n)).then_some(n)
    }
}

fn long(registers: &[u8; LEN], at: usize) -> Option<u32> {
    let bytes = registers.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointed(bar: u8, offset: u32, len: u32) -> ConfigWindow {
        let mut window = ConfigWindow::new(0xd4);
        window.write(0xd4, &[bar]);
        window.write(0xd8, &offset.to_le_bytes());
        window.write(0xdc, &len.to_le_bytes());
        window
    }

    #[test]
    fn the_registers_name_a_place_once_they_make_sense() {
        assert_eq!(ConfigWindow::new(0xd4).place(), None);
        let place = Place {
            bar: 2,
            offset: 0x1002,
            len: 2,
        };
        assert_eq!(pointed(2, 0x1002, 2).place(), Some(place));
        for (bar, offset, len) in [(6, 0, 4), (0xff, 0, 1), (0, 2, 4), (0, 0, 3), (0, 0, 8)] {
            assert_eq!(
                pointed(bar, offset, len).place(),
                None,
                "{bar} {offset} {len}"
            );
        }
    }

    #[test]
    fn only_its_own_bytes_are_taken_and_given() {
        let mut window = pointed(1, 0x20, 1);
        window.write(0xd0, &[0xee; 32]);
        let mut bytes = [0x11; 24];
        window.read(0xd0, &mut bytes);
        let want = [
            &[0x11; 4][..],
            &[0xee, 0x11, 0x11, 0x11],
            &[0xee; 12],
            &[0x11; 4],
        ];
        assert_eq!(bytes[..], want.concat());
        window.set_data(&[7]);
        assert_eq!(window.data(), [7, 0xee, 0xee, 0xee]);
        window.reset();
        assert_eq!((window.data(), window.place()), ([0; 4], None));
    }

    #[test]
    fn it_knows_which_accesses_are_its_own_and_which_reach_a_bar() {
        let window = ConfigWindow::new(0xd4);
        assert!(window.covers(0xd8, 4) && window.covers(0xe0, 4) && window.covers(0xd4, 1));
        assert!(!window.covers(0xd4, 4) && !window.covers(0xe2, 4) && !window.covers(0, 4));
        assert!(window.touches_data(0xe0, 1) && window.touches_data(0xdc, 8));
        assert!(!window.touches_data(0xd4, 12) && !window.touches_data(0xe4, 4));
        assert!(!window.touches_data(u64::MAX, 4));
    }
}
