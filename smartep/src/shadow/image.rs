//! The content of a shadow as bytes, for a data side that cannot map its memory.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | layout version of the shadow, little-endian like all that follows |
//! | 4 | [`ConfigState`] bits |
//! | 8 | number of windows |
//! | 12 + 16·n | window n: region (4), length (4), offset (8) |
//! | behind them | configuration space, 4096 bytes; then the bytes of each window |

use super::{
    CONFIG_AT, MAX_WINDOWS, STATE_AT, ShadowError, ShadowReader, ShadowWindow, ShadowWriter,
    VERSION, WINDOW_ENTRY, WINDOW_SIZE, WINDOW_TABLE, WINDOWS_AT, WINDOWS_NUMBER_AT,
};
use crate::config::{CONFIG_SIZE, ConfigState};

impl ShadowReader {
    /// All that is published, as it was at one moment; `None` when nothing is.
    pub fn image(&self) -> Option<Vec<u8>> {
        self.consistently(|page, copy| {
            let load = |at: usize| page.load((copy + at) / 4);
            let windows = (load(WINDOWS_NUMBER_AT) as usize).min(MAX_WINDOWS);
            let mut image = Vec::new();
            for word in [VERSION, load(STATE_AT), windows as u32] {
                image.extend_from_slice(&word.to_le_bytes());
            }
            let mut contents = vec![(CONFIG_AT, CONFIG_SIZE)];
            for window in 0..windows {
                let at = WINDOW_TABLE + window * WINDOW_ENTRY;
                let len = load(at + 4).min(WINDOW_SIZE as u32);
                for word in [load(at), len, load(at + 8), load(at + 12)] {
                    image.extend_from_slice(&word.to_le_bytes());
                }
                contents.push((WINDOWS_AT + window * WINDOW_SIZE, len as usize));
            }
            for (at, len) in contents {
                let from = image.len();
                image.resize(from + len, 0);
                page.copy_out(copy + at, image.get_mut(from..).unwrap_or_default());
            }
            Some(image)
        })
    }
}

impl ShadowWriter {
    /// Publishes what a [`ShadowReader::image`] holds.
    ///
    /// # Errors
    /// [`ShadowError::Image`], [`ShadowError::Windows`]; nothing changed then.
    pub fn publish_image(&mut self, image: &[u8]) -> Result<(), ShadowError> {
        let mut rest = image;
        let mut word = || -> Result<u32, ShadowError> {
            let (word, behind) = rest
                .split_first_chunk()
                .ok_or(ShadowError::Image("it is too short"))?;
            rest = behind;
            Ok(u32::from_le_bytes(*word))
        };
        if word()? != VERSION {
            return Err(ShadowError::Image("it has another version"));
        }
        let state = ConfigState::from_bits(word()?);
        let number = word()? as usize;
        if number > MAX_WINDOWS {
            return Err(ShadowError::Windows);
        }
        let mut table = Vec::with_capacity(number);
        for _ in 0..number {
            let (region, len) = (word()?, word()?);
            let offset = u64::from(word()?) | u64::from(word()?) << 32;
            table.push((region, len as usize, offset));
        }
        let mut bytes = |len: usize| {
            let (bytes, behind) = rest
                .split_at_checked(len)
                .ok_or(ShadowError::Image("it is too short"))?;
            rest = behind;
            Ok::<_, ShadowError>(bytes)
        };
        let config = bytes(CONFIG_SIZE)?;
        let mut windows = Vec::with_capacity(number);
        for (region, len, offset) in table {
            windows.push(ShadowWindow {
                region,
                offset,
                bytes: bytes(len)?,
            });
        }
        if !rest.is_empty() {
            return Err(ShadowError::Image("it is too long"));
        }
        self.publish(config, &windows, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published() -> (ShadowWriter, ShadowReader) {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(fd).unwrap();
        assert_eq!(reader.image(), None);
        let config: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
        let windows = [
            (0, 0x2000, &[1u8, 2, 3, 4, 5][..]),
            (4, 1 << 40, &[9; 4096]),
        ];
        let windows = windows.map(|(region, offset, bytes)| ShadowWindow {
            region,
            offset,
            bytes,
        });
        let state = ConfigState {
            memory: true,
            ..Default::default()
        };
        writer.publish(&config, &windows, state).unwrap();
        (writer, reader)
    }

    #[test]
    fn an_image_makes_another_shadow_the_same() {
        let (_, reader) = published();
        let image = reader.image().unwrap();
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let other = ShadowReader::new(fd).unwrap();
        writer.publish_image(&image).unwrap();
        assert_eq!(other.image(), Some(image));
        assert_eq!(other.state(), reader.state());
        for (region, offset, len) in [(7, 0, 4096), (0, 0x2000, 5), (4, (1 << 40) + 90, 4000)] {
            let [mut a, mut b] = [vec![0; len], vec![1; len]];
            assert!(reader.read(region, offset, &mut a) && other.read(region, offset, &mut b));
            assert_eq!(a, b);
        }
        assert!(!other.read(0, 0x2000, &mut [0; 6]));
    }

    #[test]
    fn what_is_no_image_changes_nothing() {
        let (mut writer, reader) = published();
        let image = reader.image().unwrap();
        for len in (0..64).chain([4000, image.len() - 1]) {
            assert!(writer.publish_image(&image[..len]).is_err(), "{len}");
        }
        let changed = |at: usize, value: u8| {
            let mut other = image.clone();
            other[at] = value;
            other
        };
        // Another version, too many windows, a window that is too long, too short.
        for (at, value) in [(0, 77), (8, 9), (18, 1), (16, 4)] {
            assert!(writer.publish_image(&changed(at, value)).is_err(), "{at}");
        }
        assert!(writer.publish_image(&[&*image, &[0]].concat()).is_err());
        assert_eq!(reader.image(), Some(image));
    }
}
