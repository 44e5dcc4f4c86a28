//! The shadow: configuration space and control registers as they are now, in memory that the control side writes
//! and the data side's process reads, so that a guest's reads cost no trip to the control side.
//!
//! One memfd, sealed against resizing, in units of little-endian 32-bit words:
//!
//! | bytes | content |
//! |---|---|
//! | 0 | magic, layout version, sequence (odd while it is written), [`ConfigState`] bits, number of windows |
//! | 64 + 32·n | window n: region, length, offset low, offset high |
//! | 4096 | configuration space, 4096 bytes |
//! | 8192 + 4096·n | bytes of window n |

mod page;

use std::os::fd::{AsFd, OwnedFd};

use thiserror::Error;

use crate::CONFIG_REGION;
use crate::config::{CONFIG_SIZE, ConfigState};
use page::Page;

const MAGIC: u32 = 0x5344_5044; // "DPDS"
const VERSION: u32 = 1;
const WORD_MAGIC: usize = 0;
const WORD_VERSION: usize = 1;
const WORD_SEQUENCE: usize = 2;
const WORD_STATE: usize = 3;
const WORD_WINDOWS: usize = 4;
const WINDOW_TABLE: usize = 64;
const WINDOW_ENTRY: usize = 32;
const CONFIG_AT: usize = 4096;
const WINDOWS_AT: usize = 8192;

/// Control windows that a shadow has room for.
pub const MAX_WINDOWS: usize = 8;
/// Bytes of the largest control window.
pub const WINDOW_SIZE: usize = 4096;
const SHADOW_SIZE: usize = WINDOWS_AT + MAX_WINDOWS * WINDOW_SIZE;
/// Tries before a reader gives up on a writer that never finishes.
const TRIES: usize = 10_000;

/// Why a shadow cannot be made or used.
#[derive(Debug, Error)]
pub enum ShadowError {
    /// The system refused.
    #[error("cannot {0} the shadow's memory: {1}")]
    System(&'static str, #[source] rustix::io::Errno),
    /// The descriptor is not a shadow of this version.
    #[error("the shadow has magic {0:#x} and version {1}; {MAGIC:#x} and {VERSION} are understood")]
    Foreign(u32, u32),
    /// Too many or too large windows.
    #[error("a shadow holds {MAX_WINDOWS} windows of at most {WINDOW_SIZE} bytes")]
    Windows,
}

/// A control register window to publish.
#[derive(Debug, Clone, Copy)]
pub struct ShadowWindow<'a> {
    /// vfio region index.
    pub region: u32,
    /// First byte in the region.
    pub offset: u64,
    /// Content, at most [`WINDOW_SIZE`] bytes.
    pub bytes: &'a [u8],
}

/// The control side's end.
#[derive(Debug)]
pub struct ShadowWriter {
    page: Page,
}

impl ShadowWriter {
    /// A new shadow, and a descriptor of it for the data side. Reads as absent until the first
    /// [`Self::publish`].
    pub fn new() -> Result<(Self, OwnedFd), ShadowError> {
        let (page, fd) = Page::create(SHADOW_SIZE)?;
        page.store(WORD_MAGIC, MAGIC);
        page.store(WORD_VERSION, VERSION);
        Ok((Self { page }, fd))
    }

    /// Replaces the content. Readers see either the old or the new.
    pub fn publish(
        &mut self,
        config: &[u8],
        windows: &[ShadowWindow<'_>],
        state: ConfigState,
    ) -> Result<(), ShadowError> {
        if windows.len() > MAX_WINDOWS || windows.iter().any(|w| w.bytes.len() > WINDOW_SIZE) {
            return Err(ShadowError::Windows);
        }
        let sequence = self.page.load(WORD_SEQUENCE);
        self.page.begin_write(WORD_SEQUENCE, sequence | 1);
        self.page.store(WORD_STATE, state.to_bits());
        self.page.store(WORD_WINDOWS, windows.len() as u32);
        self.page
            .copy_in(CONFIG_AT, config.get(..CONFIG_SIZE).unwrap_or(config));
        for (i, window) in windows.iter().enumerate() {
            let at = (WINDOW_TABLE + i * WINDOW_ENTRY) / 4;
            self.page.store(at, window.region);
            self.page.store(at + 1, window.bytes.len() as u32);
            self.page.store(at + 2, window.offset as u32);
            self.page.store(at + 3, (window.offset >> 32) as u32);
            self.page
                .copy_in(WINDOWS_AT + i * WINDOW_SIZE, window.bytes);
        }
        self.page
            .end_write(WORD_SEQUENCE, (sequence | 1).wrapping_add(1));
        Ok(())
    }
}

/// The data side's end.
#[derive(Debug)]
pub struct ShadowReader {
    page: Page,
}

impl ShadowReader {
    /// Maps a shadow read-only.
    pub fn new(fd: impl AsFd) -> Result<Self, ShadowError> {
        let page = Page::open(fd.as_fd(), SHADOW_SIZE)?;
        let (magic, version) = (page.load(WORD_MAGIC), page.load(WORD_VERSION));
        if (magic, version) != (MAGIC, VERSION) {
            return Err(ShadowError::Foreign(magic, version));
        }
        Ok(Self { page })
    }

    /// Fills `data` from `offset` of `region`; false when those bytes are not shadowed, or when the writer does
    /// not finish a change.
    pub fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> bool {
        self.consistently(|page| {
            let at = Self::locate(page, region, offset, data.len())?;
            page.copy_out(at, data);
            Some(())
        })
        .is_some()
    }

    /// State of configuration space.
    pub fn state(&self) -> ConfigState {
        self.consistently(|page| Some(ConfigState::from_bits(page.load(WORD_STATE))))
            .unwrap_or_default()
    }

    fn consistently<T>(&self, mut read: impl FnMut(&Page) -> Option<T>) -> Option<T> {
        for _ in 0..TRIES {
            let before = self.page.begin_read(WORD_SEQUENCE);
            if before % 2 == 0 {
                let result = read(&self.page);
                if self.page.end_read(WORD_SEQUENCE) == before {
                    return result.filter(|_| before != 0);
                }
            }
            std::hint::spin_loop();
        }
        None
    }

    fn locate(page: &Page, region: u32, offset: u64, len: usize) -> Option<usize> {
        if region == CONFIG_REGION {
            let end = offset.checked_add(len as u64)?;
            return (end <= CONFIG_SIZE as u64).then_some(CONFIG_AT + offset as usize);
        }
        let windows = (page.load(WORD_WINDOWS) as usize).min(MAX_WINDOWS);
        (0..windows).find_map(|i| {
            let at = (WINDOW_TABLE + i * WINDOW_ENTRY) / 4;
            let bytes = u64::from(page.load(at + 1)).min(WINDOW_SIZE as u64);
            let start = u64::from(page.load(at + 2)) | u64::from(page.load(at + 3)) << 32;
            let inside = offset.checked_sub(start)?;
            (page.load(at) == region && inside.checked_add(len as u64)? <= bytes)
                .then_some(WINDOWS_AT + i * WINDOW_SIZE + inside as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(bytes: &[u8]) -> ShadowWindow<'_> {
        ShadowWindow {
            region: 0,
            offset: 0x2000,
            bytes,
        }
    }

    #[test]
    fn reader_sees_what_was_published() {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        let mut data = [0; 3];
        assert!(!reader.read(7, 0, &mut data), "nothing is published yet");
        let config: Vec<u8> = (0..4096).map(|i| i as u8).collect();
        let state = ConfigState {
            bus_master: true,
            ..Default::default()
        };
        writer
            .publish(&config, &[window(&[9, 8, 7, 6, 5])], state)
            .unwrap();
        assert!(reader.read(7, 4093, &mut data));
        assert_eq!(data, [253, 254, 255]);
        assert!(reader.read(0, 0x2001, &mut data));
        assert_eq!(data, [8, 7, 6]);
        assert_eq!(reader.state(), state);
    }

    #[test]
    fn bytes_outside_are_not_shadowed() {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        writer
            .publish(&[0; 4096], &[window(&[1, 2, 3, 4])], Default::default())
            .unwrap();
        let mut data = [0; 4];
        for (region, offset) in [
            (7, 4093),
            (7, u64::MAX),
            (0, 0x2001),
            (0, 0x1fff),
            (1, 0x2000),
        ] {
            assert!(
                !reader.read(region, offset, &mut data),
                "{region} {offset:#x}"
            );
        }
    }

    #[test]
    fn a_read_never_mixes_two_contents() {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        writer.publish(&[0; 4096], &[], Default::default()).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..20_000u32 {
                    writer
                        .publish(&[i as u8; 4096], &[], Default::default())
                        .unwrap();
                }
                done.store(true, std::sync::atomic::Ordering::Release);
            });
            let mut data = [0; 256];
            while !done.load(std::sync::atomic::Ordering::Acquire) {
                if reader.read(7, 1000, &mut data) {
                    assert!(data.iter().all(|b| *b == data[0]));
                }
            }
        });
    }

    #[test]
    fn a_foreign_or_short_memory_is_refused() {
        let fd = rustix::fs::memfd_create("foreign", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(ShadowReader::new(&fd).is_err());
        rustix::fs::ftruncate(&fd, SHADOW_SIZE as u64).unwrap();
        assert!(matches!(
            ShadowReader::new(&fd),
            Err(ShadowError::Foreign(0, 0))
        ));
    }
}
