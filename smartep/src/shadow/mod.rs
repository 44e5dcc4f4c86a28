//! The shadow: configuration space and control registers as they are now, in memory that the control side writes
//! and the data side's process reads, so that a guest's reads cost no trip to the control side.
//!
//! One memfd, sealed against resizing, in units of little-endian 32-bit words. The content is there twice, and the
//! generation says which copy counts: the writer changes the other one and then switches. A writer that dies at any
//! instruction leaves the last whole content in force.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | magic, layout version, generation: 0 is nothing yet, odd the second copy, even the first |
//! | 4096 | first copy |
//! | 45056 | second copy |
//!
//! | bytes of a copy | content |
//! |---|---|
//! | 0 | [`ConfigState`] bits, number of windows |
//! | 64 + 32·n | window n: region, length, offset low, offset high |
//! | 4096 | configuration space, 4096 bytes |
//! | 8192 + 4096·n | bytes of window n |

mod image;
mod page;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use arc_swap::ArcSwap;
use thiserror::Error;

use crate::CONFIG_REGION;
use crate::config::{CONFIG_SIZE, ConfigState};
use page::Page;

const MAGIC: u32 = 0x5344_5044; // "DPDS"
const VERSION: u32 = 2;
const WORD_MAGIC: usize = 0;
const WORD_VERSION: usize = 1;
const WORD_GENERATION: usize = 2;
const COPIES_AT: usize = 4096;

// Inside a copy:
const STATE_AT: usize = 0;
const WINDOWS_NUMBER_AT: usize = 4;
const WINDOW_TABLE: usize = 64;
const WINDOW_ENTRY: usize = 32;
const CONFIG_AT: usize = 4096;
const WINDOWS_AT: usize = 8192;
const COPY_SIZE: usize = WINDOWS_AT + MAX_WINDOWS * WINDOW_SIZE;

/// Control windows that a shadow has room for.
pub const MAX_WINDOWS: usize = 8;
/// Bytes of the largest control window.
pub const WINDOW_SIZE: usize = 4096;
const SHADOW_SIZE: usize = COPIES_AT + 2 * COPY_SIZE;
/// Tries before a reader gives up on a writer that changes the content faster than it is read.
const TRIES: usize = 10_000;

/// First byte of the copy that counts in a generation.
fn copy_of(generation: u32) -> usize {
    COPIES_AT + (generation % 2) as usize * COPY_SIZE
}

/// The generation after `generation`: the other copy, and never 0.
fn after(generation: u32) -> u32 {
    match generation.wrapping_add(1) {
        0 => 2,
        next => next,
    }
}

/// Why a shadow cannot be made or used.
#[derive(Debug, Error)]
pub enum ShadowError {
    /// The system refused.
    #[error("cannot {0} the shadow's memory: {1}")]
    System(&'static str, #[source] rustix::io::Errno),
    /// The descriptor is not a shadow of this version.
    #[error("the shadow has magic {0:#x} and version {1}; {MAGIC:#x} and {VERSION} are understood")]
    Foreign(u32, u32),
    /// Bytes are no image of a shadow.
    #[error("an image of a shadow is broken: {0}")]
    Image(&'static str),
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
        let next = after(self.page.load(WORD_GENERATION));
        self.fill(copy_of(next), config, windows, state);
        self.page.switch(WORD_GENERATION, next);
        Ok(())
    }

    /// Writes the copy that does not count.
    fn fill(&self, copy: usize, config: &[u8], windows: &[ShadowWindow<'_>], state: ConfigState) {
        self.page.before_change();
        let store = |at: usize, value| self.page.store((copy + at) / 4, value);
        store(STATE_AT, state.to_bits());
        store(WINDOWS_NUMBER_AT, windows.len() as u32);
        let config = config.get(..CONFIG_SIZE).unwrap_or(config);
        self.page.copy_in(copy + CONFIG_AT, config);
        for (i, window) in windows.iter().enumerate() {
            let at = WINDOW_TABLE + i * WINDOW_ENTRY;
            store(at, window.region);
            store(at + 4, window.bytes.len() as u32);
            store(at + 8, window.offset as u32);
            store(at + 12, (window.offset >> 32) as u32);
            let content = copy + WINDOWS_AT + i * WINDOW_SIZE;
            self.page.copy_in(content, window.bytes);
        }
    }
}

/// The data side's end.
#[derive(Debug)]
pub struct ShadowReader {
    page: ArcSwap<Page>,
}

impl ShadowReader {
    /// Maps a shadow read-only.
    pub fn new(fd: impl AsFd) -> Result<Self, ShadowError> {
        let page = ArcSwap::from_pointee(Self::open(fd)?);
        Ok(Self { page })
    }

    /// Reads another shadow from now on: that of a control side which took the place of the former.
    pub fn replace(&self, fd: impl AsFd) -> Result<(), ShadowError> {
        self.page.store(Arc::new(Self::open(fd)?));
        Ok(())
    }

    fn open(fd: impl AsFd) -> Result<Page, ShadowError> {
        let page = Page::open(fd.as_fd(), SHADOW_SIZE)?;
        let (magic, version) = (page.load(WORD_MAGIC), page.load(WORD_VERSION));
        if (magic, version) != (MAGIC, VERSION) {
            return Err(ShadowError::Foreign(magic, version));
        }
        Ok(page)
    }

    /// Fills `data` from `offset` of `region`; false when those bytes are not shadowed, or nothing was published.
    pub fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> bool {
        self.consistently(|page, copy| {
            let at = Self::locate(page, copy, region, offset, data.len())?;
            page.copy_out(at, data);
            Some(())
        })
        .is_some()
    }

    /// State of configuration space.
    pub fn state(&self) -> ConfigState {
        self.consistently(|page, copy| {
            Some(ConfigState::from_bits(page.load((copy + STATE_AT) / 4)))
        })
        .unwrap_or_default()
    }

    /// What `read` gets from a copy that counted all the while.
    fn consistently<T>(&self, mut read: impl FnMut(&Page, usize) -> Option<T>) -> Option<T> {
        let page = self.page.load();
        for _ in 0..TRIES {
            let generation = page.begin_read(WORD_GENERATION);
            if generation == 0 {
                return None;
            }
            let result = read(&page, copy_of(generation));
            if page.end_read(WORD_GENERATION) == generation {
                return result;
            }
            std::hint::spin_loop();
        }
        None
    }

    fn locate(page: &Page, copy: usize, region: u32, offset: u64, len: usize) -> Option<usize> {
        if region == CONFIG_REGION {
            let end = offset.checked_add(len as u64)?;
            return (end <= CONFIG_SIZE as u64).then_some(copy + CONFIG_AT + offset as usize);
        }
        let load = |at: usize| page.load((copy + at) / 4);
        let windows = (load(WINDOWS_NUMBER_AT) as usize).min(MAX_WINDOWS);
        (0..windows).find_map(|i| {
            let at = WINDOW_TABLE + i * WINDOW_ENTRY;
            let bytes = u64::from(load(at + 4)).min(WINDOW_SIZE as u64);
            let start = u64::from(load(at + 8)) | u64::from(load(at + 12)) << 32;
            let inside = offset.checked_sub(start)?;
            (load(at) == region && inside.checked_add(len as u64)? <= bytes)
                .then_some(copy + WINDOWS_AT + i * WINDOW_SIZE + inside as usize)
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
    fn a_writer_that_dies_inside_a_change_leaves_the_last_content_in_force() {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        let on = ConfigState {
            bus_master: true,
            ..Default::default()
        };
        for last in 1..=3u8 {
            writer
                .publish(&[last; 4096], &[window(&[last])], on)
                .unwrap();
            let next = after(writer.page.load(WORD_GENERATION));
            writer.fill(copy_of(next), &[0xee; 4096], &[], ConfigState::default());
            let (mut config, mut register) = ([0; 8], [0]);
            assert!(reader.read(7, 100, &mut config) && reader.read(0, 0x2000, &mut register));
            assert_eq!((config, register), ([last; 8], [last]));
            assert_eq!(reader.state(), on);
        }
    }

    #[test]
    fn generations_alternate_between_the_copies_and_skip_zero() {
        assert_eq!([after(0), after(1), after(u32::MAX)], [1, 2, 2]);
        for generation in [0, 1, 7, u32::MAX - 1, u32::MAX] {
            assert_ne!(copy_of(generation), copy_of(after(generation)));
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
