//! The memory of queues as commands describe it.

use super::bytes::read_list;
use super::command::Fault;
use crate::rdma::front::allowance::{Allowance, Charge};
use crate::rdma::front::buffer::QueueBuffer;
use dot_iommu::DotView;

/// Where the pages of a queue are.
#[derive(Debug, Clone)]
pub(super) enum Pages {
    /// These.
    Inline(Vec<u64>),
    /// In a list of so many at a bus address.
    List(u64, usize),
}

/// A queue's place in memory.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) pages: Pages,
    /// log₂ of the page size in bytes.
    pub(super) shift: u8,
    /// Bytes of the first page in front of the queue.
    pub(super) offset: u64,
    /// Bytes of the queue.
    pub(super) len: u64,
}

/// A queue's memory, and what its page list takes from the function's allowance.
#[derive(Debug)]
pub(super) struct QueueMemory {
    pub(super) buffer: QueueBuffer,
    pub(super) charge: Charge,
}

impl Place {
    /// Reads the list, of which only what the queue needs is kept.
    pub(super) fn find(
        self,
        allowance: &Allowance,
        memory: &DotView<'_>,
    ) -> Result<QueueMemory, Fault> {
        let page = 1u64.checked_shl(self.shift.into()).unwrap_or(u64::MAX);
        let needed = self.offset.saturating_add(self.len).div_ceil(page);
        let needed = usize::try_from(needed).unwrap_or(usize::MAX);
        let (list, charge) = match self.pages {
            Pages::Inline(mut pages) => {
                pages.truncate(needed);
                (pages, allowance.take(0))
            }
            Pages::List(at, count) => {
                let count = count.min(needed);
                let charge = allowance.take(count as u64 * 8);
                let list = charge.as_ref().map(|_| read_list(at, count, memory));
                let list = list.ok_or(Fault::Room)?;
                (list.ok_or(Fault::Memory("page list of a queue"))?, charge)
            }
        };
        let charge = charge.ok_or(Fault::Room)?;
        let buffer = QueueBuffer::anywhere(list.into(), self.shift, self.offset, self.len)?;
        Ok(QueueMemory { buffer, charge })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BASE, Memory};

    #[test]
    fn a_list_is_charged_while_its_queue_lives_and_only_what_it_needs() {
        let memory = Memory::new();
        let reader = memory.table.reader();
        let pages: Vec<u8> = (1..=600u64)
            .flat_map(|page| (page << 12).to_le_bytes())
            .collect();
        memory.write(BASE, &pages);
        let allowance = Allowance::default();
        let place = |count, len| Place {
            pages: Pages::List(BASE, count),
            shift: 12,
            offset: 0x800,
            len,
        };
        let queue = place(600, 0x2000).find(&allowance, &reader.pin()).unwrap();
        assert_eq!((allowance.used(), queue.buffer.len()), (3 * 8, 0x2000));
        drop(queue);
        assert_eq!(allowance.used(), 0);
        let short = place(2, 0x2000).find(&allowance, &reader.pin());
        assert!(matches!(short, Err(Fault::Buffer(_))));
        let away = Place {
            pages: Pages::List(0x10, 3),
            ..place(0, 0x2000)
        };
        let away = away.find(&allowance, &reader.pin());
        assert!(matches!(away, Err(Fault::Memory(_))));
        assert_eq!(allowance.used(), 0);
    }
}
