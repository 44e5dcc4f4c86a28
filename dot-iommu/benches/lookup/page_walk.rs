//! The peer: a 4-level radix page table of 4 KiB pages behind a set-associative IOTLB.

const PAGE_SHIFT: u32 = 12;
const LEVEL_BITS: u32 = 9;
const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const FLAGS: u64 = 0xfff;

/// Tables in one arena; an entry holds the next table's number (or the host page) above 12 flag bits.
pub(crate) struct PageTable {
    tables: Vec<[u64; 512]>,
}

impl PageTable {
    pub(crate) fn new() -> Self {
        PageTable {
            tables: vec![[0; 512]],
        }
    }

    /// Maps the pages of `[start, start + len)` to consecutive host pages from `host`.
    pub(crate) fn map(&mut self, start: u64, len: u64, host: u64) {
        for offset in (0..len).step_by(1 << PAGE_SHIFT) {
            let addr = start + offset;
            let mut table = 0usize;
            for level in (1..4).rev() {
                let index = Self::index(addr, level);
                if self.tables[table][index] & PRESENT == 0 {
                    let child = self.tables.len() as u64;
                    self.tables.push([0; 512]);
                    self.tables[table][index] = child << PAGE_SHIFT | PRESENT | WRITE;
                }
                table = (self.tables[table][index] >> PAGE_SHIFT) as usize;
            }
            self.tables[table][Self::index(addr, 0)] = (host + offset) & !FLAGS | PRESENT | WRITE;
        }
    }

    fn index(addr: u64, level: u32) -> usize {
        (addr >> (PAGE_SHIFT + LEVEL_BITS * level)) as usize & 511
    }

    /// Host page of `addr`, or `None` when it is not mapped for writing.
    #[inline]
    pub(crate) fn walk(&self, addr: u64) -> Option<u64> {
        let mut table = 0usize;
        for level in (1..4).rev() {
            let entry = self.tables.get(table)?[Self::index(addr, level)];
            if entry & (PRESENT | WRITE) != PRESENT | WRITE {
                return None;
            }
            table = (entry >> PAGE_SHIFT) as usize;
        }
        let entry = self.tables.get(table)?[Self::index(addr, 0)];
        (entry & (PRESENT | WRITE) == PRESENT | WRITE).then_some(entry & !FLAGS)
    }
}

#[derive(Clone, Copy, Default)]
struct Line {
    page: u64,
    /// Equal to the IOTLB's epoch when valid, so that a flush is one addition.
    epoch: u64,
    host: u64,
}

/// `WAYS` lines a set, replaced in turn.
pub(crate) struct Iotlb<const WAYS: usize> {
    sets: Vec<[Line; WAYS]>,
    epoch: u64,
    turn: usize,
}

impl<const WAYS: usize> Iotlb<WAYS> {
    pub(crate) fn new(lines: usize) -> Self {
        Iotlb {
            sets: vec![[Line::default(); WAYS]; lines / WAYS],
            epoch: 1,
            turn: 0,
        }
    }

    pub(crate) fn flush(&mut self) {
        self.epoch += 1;
    }

    /// Host address of `addr`; walks and fills on a miss.
    #[inline]
    pub(crate) fn translate(&mut self, table: &PageTable, addr: u64) -> Option<u64> {
        let page = addr >> PAGE_SHIFT;
        let set = page as usize & (self.sets.len() - 1);
        let lines = self.sets.get_mut(set)?;
        let in_page = addr & FLAGS;
        for line in lines.iter() {
            if line.page == page && line.epoch == self.epoch {
                return Some(line.host | in_page);
            }
        }
        let host = table.walk(addr)?;
        self.turn = (self.turn + 1) % WAYS;
        lines[self.turn] = Line {
            page,
            epoch: self.epoch,
            host,
        };
        Some(host | in_page)
    }
}
