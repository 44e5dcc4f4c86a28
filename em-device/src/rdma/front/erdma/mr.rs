//! Memory regions, and the page tables in guest memory that describe them.

use super::bytes::{bits, read_list};
use super::command::{Command, Fault};
use super::tables::{MAX_REGIONS, PageTable};
use crate::rdma::front::allowance::{Allowance, Charge};
use crate::rdma::verbs::{MemKey, Pd, Region, Rights, Translation};
use dot_iommu::DotView;

/// Kinds of regions.
const NORMAL: u32 = 0;
const REGISTERED_LATER: u32 = 1;
const ALL_MEMORY: u32 = 2;

/// Pages of a region at most, so that one command is not too much work: 16 GiB in the smallest pages.
const MAX_PAGES: u64 = 1 << 22;
/// log₂ of the page sizes.
const PAGE_SHIFTS: std::ops::RangeInclusive<u32> = 12..=31;
/// Entries of a page of a table of several levels.
const FAN: usize = 512;
/// Addresses that stand in the command.
const INLINE: u64 = 4;
/// log₂ of the pages that work requests register.
const SMALL: u8 = 12;

/// Rights by the bits that commands and work requests have for them.
pub(super) fn rights(bits: u32) -> Rights {
    let all = [
        (1, Rights::REMOTE_ATOMIC),
        (4, Rights::LOCAL_WRITE),
        (8, Rights::REMOTE_READ),
        (16, Rights::REMOTE_WRITE),
    ];
    all.iter().fold(Rights::NONE, |sum, (bit, right)| {
        sum | right.when(bits & bit != 0)
    })
}

/// The key that a command of a region names.
pub(super) fn key(command: &Command) -> Result<MemKey, Fault> {
    let word = command.word(8);
    let index = bits(word, 0..=19);
    match (1..MAX_REGIONS).contains(&index) {
        true => Ok(MemKey(index << 8 | bits(word, 20..=27))),
        false => Err(Fault::Number("memory region")),
    }
}

/// A region to be made.
#[derive(Debug)]
pub(super) struct NewRegion {
    pub(super) region: Region,
    pub(super) charge: Charge,
    /// Where its pages stand that a work request will register.
    pub(super) table: Option<PageTable>,
}

/// Reads REG_MR and the page table that it names.
pub(super) fn parse(
    command: &Command,
    allowance: &Allowance,
    memory: &DotView<'_>,
) -> Result<NewRegion, Fault> {
    let key = key(command)?;
    let owner = command.word(12);
    let layout = Layout::of(command);
    let mut region = Region {
        key,
        pd: Pd(bits(owner, 12..=31)),
        rights: rights(bits(owner, 1..=5)),
        start: command.long(16),
        len: 0,
        translation: Translation::Identity,
        capacity: 0,
        valid: true,
    };
    let (charged, mut table) = match bits(owner, 6..=7) {
        ALL_MEMORY => (0, None),
        NORMAL | REGISTERED_LATER => (layout.count, None),
        _ => return Err(Fault::Field("the kind of the memory region")),
    };
    if charged > MAX_PAGES {
        return Err(Fault::Field("the number of pages"));
    }
    let charge = allowance.take(charged * 8).ok_or(Fault::Room)?;
    match bits(owner, 6..=7) {
        ALL_MEMORY => {
            region.start = 0;
            region.len = u64::MAX;
        }
        REGISTERED_LATER => {
            region.valid = false;
            region.rights = Rights::REMOTE_INVALIDATE;
            region.translation = pages(SMALL.into(), 0, Vec::new())?;
            region.capacity = layout.count as usize;
            table = Some(PageTable {
                at: layout.root,
                count: layout.count as u32,
            });
        }
        _ => {
            let size = 1u64.checked_shl(layout.shift).unwrap_or(0);
            let offset = region.start & size.wrapping_sub(1);
            region.len = layout.length(offset)?;
            let list = layout.read(command, memory)?;
            region.translation = pages(layout.shift, offset, list)?;
        }
    }
    Ok(NewRegion {
        region,
        charge,
        table,
    })
}

/// The translation of a region that a work request registers.
pub(super) fn registered_pages(start: u64, len: u64, list: Vec<u64>) -> Option<Translation> {
    let offset = start & ((1 << SMALL) - 1);
    let there = (list.len() as u64) << SMALL;
    if offset + len > there {
        return None;
    }
    pages(SMALL.into(), offset, list).ok()
}

fn pages(shift: u32, offset: u64, list: Vec<u64>) -> Result<Translation, Fault> {
    let within = (1u64 << shift) - 1;
    if list.iter().any(|page| page & within != 0) {
        return Err(Fault::Field("a page's address"));
    }
    Ok(Translation::Pages {
        shift: shift as u8,
        pages: list.into(),
        offset,
    })
}

/// Where the pages of a region are.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// log₂ of the page size.
    shift: u32,
    level: u32,
    count: u64,
    root: u64,
    /// Bytes, of which the older form tells only 32 bits.
    size: u64,
    whole_size: bool,
}

impl Layout {
    fn of(command: &Command) -> Self {
        let (head, shape) = (command.word(8), command.word(28));
        let whole_size = bits(head, 28..=30) != 0;
        let high = |at| match whole_size {
            true => u64::from(command.word(at)),
            false => 0,
        };
        Self {
            shift: bits(shape, 27..=31),
            level: bits(shape, 20..=21),
            count: u64::from(bits(shape, 0..=19)) | high(44) << 20,
            root: command.long(32),
            size: u64::from(command.word(24)) | high(40) << 32,
            whole_size,
        }
    }

    /// Bytes of a region that begins `offset` bytes into its first page.
    fn length(&self, offset: u64) -> Result<u64, Fault> {
        if !PAGE_SHIFTS.contains(&self.shift) {
            return Err(Fault::Field("the page size"));
        }
        let there = (self.count << self.shift).saturating_sub(offset);
        if self.size > there {
            return Err(Fault::Field("the size of the memory region"));
        }
        // The pages tell what a size of 32 bits does not.
        let more = match self.whole_size {
            true => 0,
            false => (there - self.size) >> 32 << 32,
        };
        Ok(self.size + more)
    }

    fn read(&self, command: &Command, memory: &DotView<'_>) -> Result<Vec<u64>, Fault> {
        let count = self.count as usize;
        let missing = Fault::Memory("page table");
        match self.level {
            0 if self.count <= INLINE => {
                let entries = (32..).step_by(8).take(count);
                Ok(entries.map(|at| command.long(at)).collect())
            }
            0 => Err(Fault::Field("the number of pages")),
            level => read_level(level, self.root, count, memory).ok_or(missing),
        }
    }
}

/// A page table of 1 to 3 levels with `count` pages: the lowest of one level is one list, others have pages of lists.
fn read_level(level: u32, root: u64, count: usize, memory: &DotView<'_>) -> Option<Vec<u64>> {
    let mut lists = vec![root];
    for above in (1..level).rev() {
        let entries = count.div_ceil(FAN.pow(above));
        let mut next = Vec::with_capacity(entries);
        for list in lists {
            let part = (entries - next.len()).min(FAN);
            next.extend(read_list(list, part, memory)?);
        }
        // One page of the root has no more.
        if next.len() < entries {
            return None;
        }
        lists = next;
    }
    if level == 1 {
        return read_list(root, count, memory);
    }
    let mut pages = Vec::with_capacity(count);
    for list in lists {
        pages.extend(read_list(list, (count - pages.len()).min(FAN), memory)?);
    }
    (pages.len() == count).then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BASE, Memory};

    const PAGE: u64 = 0x7000_0000;

    fn command(words: &[(usize, u32)]) -> Command {
        let mut bytes = [0; 128];
        for (at, word) in words {
            bytes[*at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        Command::new(0, bytes)
    }

    fn parsed(words: &[(usize, u32)], memory: &Memory) -> Result<Region, Fault> {
        let reader = memory.table.reader();
        parse(&command(words), &Allowance::default(), &reader.pin()).map(|new| new.region)
    }

    fn list(memory: &Memory, at: u64, entries: impl Iterator<Item = u64>) {
        let bytes: Vec<u8> = entries.flat_map(u64::to_le_bytes).collect();
        memory.write(at, &bytes);
    }

    fn page_list(region: &Region) -> (u8, u64, Vec<u64>) {
        match &region.translation {
            Translation::Pages {
                shift,
                pages,
                offset,
            } => (*shift, *offset, pages.to_vec()),
            Translation::Identity => panic!("no pages"),
        }
    }

    #[test]
    fn a_small_region_stands_in_the_command() {
        let memory = Memory::new();
        let region = parsed(
            &[
                (8, 1 << 31 | 0x5a << 20 | 77),
                (12, 9 << 12 | (4 | 16 | 2) << 1),
                (16, 0x1234),
                (24, 0x2000),
                (28, 12 << 27 | 3),
                (32, PAGE as u32),
                (40, PAGE as u32 + 0x5000),
                (48, PAGE as u32 + 0x3000),
            ],
            &memory,
        )
        .unwrap();
        assert_eq!((region.key, region.pd), (MemKey(77 << 8 | 0x5a), Pd(9)));
        assert_eq!(region.rights, Rights::LOCAL_WRITE | Rights::REMOTE_WRITE);
        assert_eq!((region.start, region.len), (0x1234, 0x2000));
        let pages = vec![PAGE, PAGE + 0x5000, PAGE + 0x3000];
        assert_eq!(page_list(&region), (12, 0x234, pages));
    }

    #[test]
    fn tables_have_one_to_three_levels() {
        let memory = Memory::new();
        let page = |n: u64| PAGE + 0x1000 * n;
        let words = |level: u32, count: u32, root: u64| {
            [
                (8, 1 << 28 | 1),
                (24, count << 12),
                (28, 12 << 27 | level << 20 | count),
                (32, root as u32),
            ]
        };
        list(&memory, BASE + 8, (0..700).map(page));
        let one = parsed(&words(1, 700, BASE + 8), &memory).unwrap();
        let all: Vec<u64> = (0..700).map(page).collect();
        assert_eq!(page_list(&one), (12, 0, all.clone()));
        let (leaf, leaf2, middle, root) = (
            BASE + 0x1_0000,
            BASE + 0x1_3000,
            BASE + 0x1_6000,
            BASE + 0x1_8000,
        );
        list(&memory, leaf, (0..512).map(page));
        list(&memory, leaf2, (512..700).map(page));
        list(&memory, middle, [leaf, leaf2].into_iter());
        let two = parsed(&words(2, 700, middle), &memory).unwrap();
        assert_eq!(page_list(&two), (12, 0, all));
        // 1024 full pages of lists, and one page behind them.
        let count = (1 << 18) + 1;
        list(&memory, middle, std::iter::repeat_n(leaf, 512));
        list(&memory, middle + 0x1000, [leaf2].into_iter());
        list(&memory, root, [middle, middle + 0x1000].into_iter());
        let three = parsed(&words(3, count, root), &memory).unwrap();
        let (_, _, pages) = page_list(&three);
        assert_eq!(pages.len(), count as usize);
        assert_eq!(pages[(1 << 18) - 1..], [page(511), page(512)]);
        for level in 1..=3 {
            let away = parsed(&words(level, 700, 0x10), &memory);
            assert_eq!(away.unwrap_err(), Fault::Memory("page table"));
        }
    }

    #[test]
    fn a_size_that_does_not_fit_its_field_is_that_of_the_pages() {
        let memory = Memory::new();
        let huge = |size| {
            [
                (8, 1),
                (16, 0x1000),
                (24, size),
                (28, 30 << 27 | 1 << 20 | 6),
                (32, BASE as u32),
            ]
        };
        list(&memory, BASE, (1..=6).map(|n| n << 30));
        let region = parsed(&huge(0x3fff_0000), &memory).unwrap();
        assert_eq!(region.len, (1 << 32) + 0x3fff_0000);
        let region = parsed(&huge(0xffff_0000), &memory).unwrap();
        assert_eq!(region.len, 0xffff_0000);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let memory = Memory::new();
        let refused = |words: &[(usize, u32)]| parsed(words, &memory).unwrap_err();
        let number = Fault::Number("memory region");
        assert_eq!(refused(&[(28, 12 << 27 | 1)]), number);
        assert_eq!(refused(&[(8, MAX_REGIONS), (28, 12 << 27 | 1)]), number);
        for (what, shape, size, kind) in [
            ("the page size", 11 << 27 | 1, 1, 0),
            ("the number of pages", 12 << 27 | 5, 1, 0),
            ("the size of the memory region", 12 << 27 | 1, 4097, 0),
            ("a page's address", 12 << 27 | 1, 1, 0),
            ("the kind of the memory region", 12 << 27 | 1, 1, 3),
        ] {
            let fault = refused(&[
                (8, 1),
                (12, kind << 6),
                (24, size),
                (28, shape),
                (32, 0x1001),
            ]);
            assert_eq!(fault, Fault::Field(what));
        }
        let many = [(8, 1 << 28 | 1), (28, 12 << 27 | 1 << 20), (44, 5)];
        assert_eq!(refused(&many), Fault::Field("the number of pages"));
    }

    #[test]
    fn all_memory_and_regions_of_work_requests_have_no_pages() {
        let memory = Memory::new();
        let all = parsed(&[(8, 3), (12, 2 << 6 | 4 << 1)], &memory).unwrap();
        assert_eq!((all.start, all.len), (0, u64::MAX));
        assert_eq!(all.translation, Translation::Identity);
        let later = [
            (8, 3),
            (12, 1 << 6),
            (28, 12 << 27 | 1 << 20 | 16),
            (32, 0x4000),
        ];
        let reader = memory.table.reader();
        let new = parse(&command(&later), &Allowance::default(), &reader.pin()).unwrap();
        assert!(!new.region.valid);
        let table = PageTable {
            at: 0x4000,
            count: 16,
        };
        assert_eq!(new.table, Some(table));
        assert!(registered_pages(0x5800, 0x1000, vec![0x1000]).is_none());
        assert!(registered_pages(0x5800, 0x800, vec![0x1000]).is_some());
        assert!(registered_pages(0x5000, 0x800, vec![0x1008]).is_none());
    }
}
