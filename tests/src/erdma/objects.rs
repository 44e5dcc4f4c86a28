//! Regions, queues and their states.

use super::{Cq, DoorbellPages, Erdma, KERNEL_PAGES, Qp, Request, command};
use crate::Result;
use crate::memory::PAGE;

/// Memory with a key.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// Guest address, which is its address in the region too.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// L_Key and R_Key.
    pub key: u32,
}

/// Rights of a region.
pub mod rights {
    /// Atomics by peers.
    pub const ATOMIC: u32 = 1;
    /// Reading by the owner, which is always there.
    pub const LOCAL_READ: u32 = 2;
    /// Writing by the owner.
    pub const LOCAL_WRITE: u32 = 4;
    /// Reading by peers.
    pub const REMOTE_READ: u32 = 8;
    /// Writing by peers.
    pub const REMOTE_WRITE: u32 = 16;
    /// All of them.
    pub const ALL: u32 = 31;
}

/// States of a queue pair.
pub mod state {
    #![allow(missing_docs)] // as in verbs
    pub const RESET: u32 = 0;
    pub const INIT: u32 = 1;
    pub const RTR: u32 = 2;
    pub const RTS: u32 = 3;
    pub const ERROR: u32 = 6;
}

/// What MODIFY_QP changes.
pub mod modify {
    #![allow(missing_docs)] // as in verbs
    pub const STATE: u32 = 1;
    pub const QKEY: u32 = 2;
    pub const PATH: u32 = 4;
    pub const SQ_PSN: u32 = 8;
    pub const RQ_PSN: u32 = 16;
    pub const DESTINATION: u32 = 32;
}

/// How the pages of a region are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// In the command: at most 4.
    Inline,
    /// In one array.
    Array,
    /// In tables of 512 entries under a root of at most 512.
    TwoLevels,
    /// The same under one root more.
    ThreeLevels,
}

/// How a completion queue is made.
#[derive(Debug, Clone, Copy)]
pub struct CqPlan {
    /// log₂ of its entries.
    pub log_size: u8,
    /// Whether it is a user's: pages by a list and a doorbell page of the context's own.
    pub user: bool,
    /// Completion event queue.
    pub eqn: u8,
}

/// How a queue pair is made.
#[derive(Debug, Clone, Copy)]
pub struct QpPlan {
    /// Protection domain.
    pub pd: u32,
    /// log₂ of the send queue's 32-byte blocks.
    pub log_send: u8,
    /// log₂ of the receives.
    pub log_receive: u8,
    /// Whether it is a user's: one buffer by its pages and doorbell pages of the context's own.
    pub user: bool,
    /// Whether it sends datagrams instead of having a connection.
    pub datagrams: bool,
    /// The number, if it is not to be the next one.
    pub number: Option<u32>,
}

/// An address vector: where a peer is.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// MAC address.
    pub mac: [u8; 6],
    /// GID.
    pub gid: [u8; 16],
    /// Index of the own GID.
    pub own_index: u16,
}

impl Path {
    /// The 36 bytes.
    pub fn bytes(&self) -> [u8; 36] {
        let mut bytes = [0; 36];
        let is_v6 = self.gid[..12] != [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        bytes[..4].copy_from_slice(&(u32::from(is_v6) << 20 | 0x1234).to_le_bytes());
        bytes[5] = 64;
        bytes[8..10].copy_from_slice(&0xc123u16.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.own_index.to_le_bytes());
        bytes[12..18].copy_from_slice(&self.mac);
        bytes[20..].copy_from_slice(&self.gid);
        bytes
    }
}

impl Erdma {
    /// SET_GID: an entry of the GID table; `None` removes it.
    ///
    /// # Errors
    /// The command failed.
    pub fn set_gid(&mut self, index: u16, gid: Option<[u8; 16]>) -> Result<()> {
        let is_v6 = gid.is_some_and(|gid| gid[..12] != [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        let word = u32::from(index) | u32::from(is_v6) << 16 | u32::from(gid.is_none()) << 31;
        let request = Request::new(command::SET_GID).word(8, word);
        self.command(&request.bytes(12, &gid.unwrap_or_default()))?;
        Ok(())
    }

    /// `len` bytes with a key of all rights, page by page.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn register(&mut self, pd: u32, len: u64) -> Result<Buffer> {
        let address = self.memory.allocate(len, PAGE)?;
        let shape = match len.div_ceil(PAGE) {
            0..=4 => Pages::Inline,
            _ => Pages::Array,
        };
        let key = self.register_at(pd, (address, address, len), rights::ALL, shape)?;
        Ok(Buffer { address, len, key })
    }

    /// A key for memory (virtual address in the region, guest address, bytes) by its 4 KiB pages.
    ///
    /// # Errors
    /// The memory for tables is used up, or the command failed.
    pub fn register_at(
        &mut self,
        pd: u32,
        place: (u64, u64, u64),
        rights: u32,
        shape: Pages,
    ) -> Result<u32> {
        let (start, address, len) = place;
        let first = address & !(PAGE - 1);
        let count = (address % PAGE + len).div_ceil(PAGE);
        let pages: Vec<u64> = (0..count).map(|n| first + n * PAGE).collect();
        self.register_pages(pd, (start, len), rights, (12, &pages), shape)
    }

    /// A key for memory (virtual address, bytes) by its pages (log₂ of their size, their addresses).
    ///
    /// # Errors
    /// The memory for tables is used up, or the command failed.
    pub fn register_pages(
        &mut self,
        pd: u32,
        (start, len): (u64, u64),
        rights: u32,
        (shift, pages): (u32, &[u64]),
        shape: Pages,
    ) -> Result<u32> {
        let key = self.next_key();
        let level = match shape {
            Pages::Inline => 0,
            Pages::Array => 1,
            Pages::TwoLevels => 2,
            Pages::ThreeLevels => 3,
        };
        let head = 1 << 31 | u32::from(level > 1) << 28 | (key & 0xff) << 20 | key >> 8;
        let count = pages.len() as u32;
        let mut request = Request::new(command::REG_MR)
            .word(8, head)
            .word(12, pd << 12 | rights << 1)
            .long(16, start)
            .word(24, len as u32)
            .word(28, shift << 27 | level << 20 | count & 0xf_ffff);
        if shape == Pages::Inline {
            for (n, page) in pages.iter().enumerate() {
                request = request.long(32 + n * 8, *page);
            }
        } else {
            request = request.long(32, self.table(pages, level)?);
        }
        if level > 1 {
            request = request
                .word(40, (len >> 32) as u32)
                .word(44, count >> 20 << 20);
        }
        self.command(&request)?;
        Ok(key)
    }

    /// An array of addresses, or a tree of such arrays, one a page.
    fn table(&self, pages: &[u64], level: u32) -> Result<u64> {
        if level > 1 {
            let parts = pages.chunks(512).map(|part| self.table(part, 1));
            return self.table(&parts.collect::<Result<Vec<_>>>()?, level - 1);
        }
        let at = self.memory.allocate(pages.len() as u64 * 8, PAGE)?;
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.memory.write(at, &bytes)?;
        Ok(at)
    }

    /// The next key, as the driver gives them.
    pub fn next_key(&mut self) -> u32 {
        let index = self.next_region;
        self.next_region += 1;
        (index << 8) + index * 7 % 256
    }

    /// A region of type FRMR with room for `count` pages, which a work request activates; its key.
    ///
    /// # Errors
    /// The command failed.
    pub fn fast_region(&mut self, pd: u32, count: u32) -> Result<(u32, u64)> {
        let key = self.next_key();
        let table = self.memory.allocate(u64::from(count) * 8, PAGE)?;
        let request = Request::new(command::REG_MR)
            .word(8, (key & 0xff) << 20 | key >> 8)
            .word(12, pd << 12 | 1 << 6)
            .word(28, 12 << 27 | 1 << 20 | count)
            .long(32, table);
        self.command(&request)?;
        Ok((key, table))
    }

    /// The region of all memory, for kernel users.
    ///
    /// # Errors
    /// The command failed.
    pub fn dma_region(&mut self, pd: u32) -> Result<u32> {
        let key = self.next_key();
        let request = Request::new(command::REG_MR)
            .word(8, (key & 0xff) << 20 | key >> 8)
            .word(12, pd << 12 | 2 << 6 | rights::ALL << 1);
        self.command(&request)?;
        Ok(key)
    }

    /// DEREG_MR.
    ///
    /// # Errors
    /// The command failed.
    pub fn deregister(&mut self, key: u32) -> Result<()> {
        let word = (key & 0xff) << 20 | key >> 8;
        self.command(&Request::new(command::DEREG_MR).word(8, word))?;
        Ok(())
    }

    /// A completion queue.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_cq(&mut self, plan: CqPlan) -> Result<Cq> {
        let number = self.next_cqn;
        let bytes = 32u64 << plan.log_size;
        let at = self.memory.allocate(bytes, PAGE)?;
        let record = self.memory.allocate(64, 64)?;
        let count = bytes.div_ceil(PAGE) as u32;
        // A kernel's is contiguous, in one page of 32 MiB.
        let (shift, address, list) = match plan.user {
            true => (0, self.queue_pages(at, bytes)?, count << 16 | 1 << 15),
            false => (13, at, 1 << 16),
        };
        let request = Request::new(command::CREATE_CQ)
            .word(8, u32::from(plan.log_size) << 24 | shift << 20 | number)
            .long(12, address)
            .word(20, list | u32::from(plan.user) << 11 | u32::from(plan.eqn))
            .long(24, record)
            .word(36, (self.pages_of(plan.user).cq / PAGE) as u32);
        self.command(&request)?;
        self.next_cqn += 1;
        let doorbell = self.pages_of(plan.user).cq + u64::from(number & 511) * 8;
        Ok(Cq::new(
            &self.memory,
            number,
            (at, plan.log_size),
            record,
            doorbell,
        ))
    }

    fn pages_of(&self, user: bool) -> DoorbellPages {
        if user { self.user_pages } else { KERNEL_PAGES }
    }

    /// The list of a queue's 4 KiB pages.
    fn queue_pages(&self, at: u64, bytes: u64) -> Result<u64> {
        let pages: Vec<u64> = (0..bytes.div_ceil(PAGE)).map(|n| at + n * PAGE).collect();
        self.table(&pages, 1)
    }

    /// A queue pair in state Reset.
    ///
    /// # Errors
    /// The memory is used up, or the command failed.
    pub fn create_qp(&mut self, plan: QpPlan, send: &Cq, receive: &Cq) -> Result<Qp> {
        let number = plan.number.unwrap_or(self.next_qpn);
        let send_bytes = (32u64 << plan.log_send).next_multiple_of(PAGE);
        let receive_bytes = 32u64 << plan.log_receive;
        // A kernel's are contiguous, each in one page of 1 MiB that begins anywhere.
        let shift = if plan.user { 0 } else { 8 };
        let sends = self.memory.allocate(send_bytes + receive_bytes, PAGE)?;
        let receives = sends + send_bytes;
        let record = self.memory.allocate(64, 64)?;
        let records = match plan.user {
            true => (record, record + 8),
            false => (record, record + 32),
        };
        let pages = self.pages_of(plan.user);
        let mut request = Request::new(command::CREATE_QP)
            .word(8, u32::from(plan.log_send) << 20 | number)
            .word(12, u32::from(plan.log_receive) << 20 | plan.pd)
            .word(16, shift << 28 | u32::from(plan.user) << 25 | send.number)
            .word(20, shift << 28 | receive.number)
            .long(48, records.0)
            .long(56, records.1)
            .word(112, (((pages.sq / PAGE) << 16) + pages.rq / PAGE) as u32)
            .word(116, plan.datagrams.into());
        for (at, len, address, config, more) in [
            (sends, send_bytes, 24, 40, 64),
            (receives, receive_bytes, 32, 44, 88),
        ] {
            let count = if plan.user { len.div_ceil(PAGE) } else { 1 };
            let first = if count > 4 {
                self.queue_pages(at, len)?
            } else {
                at
            };
            let level = u32::from(count > 4);
            request = request
                .long(address, first)
                .word(config, (count as u32) << 1 | level);
            for n in 1..count.min(4) {
                if level == 0 {
                    request = request.long(more + (n as usize - 1) * 8, at + n * PAGE);
                }
            }
        }
        self.command(&request)?;
        self.next_qpn = self.next_qpn.max(number + 1);
        let doorbells = (
            pages.sq + u64::from(number & 31) * 128,
            pages.rq + u64::from(number & 127) * 32,
        );
        Ok(Qp::new(
            &self.memory,
            number,
            (sends, plan.log_send),
            (receives, plan.log_receive),
            records,
            doorbells,
        ))
    }

    /// MODIFY_QP with what the mask says.
    ///
    /// # Errors
    /// The command failed.
    pub fn modify(
        &mut self,
        qp: &Qp,
        state: u32,
        mask: u32,
        to: (u32, Option<Path>),
    ) -> Result<()> {
        let (destination, path) = to;
        let path = path.map(|path| path.bytes());
        let request = Request::new(command::MODIFY_QP)
            .word(8, state << 24 | qp.number)
            .word(12, destination)
            .word(16, mask)
            .word(20, 0x8001_0000)
            .bytes(32, &path.unwrap_or([0; 36]));
        self.command(&request)?;
        Ok(())
    }

    /// From Reset to ready to receive, connected to another.
    ///
    /// # Errors
    /// A command failed.
    pub fn to_rtr(&mut self, qp: &Qp, path: Path, remote: u32) -> Result<()> {
        self.modify(qp, state::INIT, modify::STATE, (0, None))?;
        let mask = modify::STATE | modify::PATH | modify::RQ_PSN | modify::DESTINATION;
        self.modify(qp, state::RTR, mask, (remote, Some(path)))
    }

    /// From ready to receive to ready to send.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_rts(&mut self, qp: &Qp) -> Result<()> {
        self.modify(qp, state::RTS, modify::STATE | modify::SQ_PSN, (0, None))
    }

    /// From Reset to ready to send datagrams.
    ///
    /// # Errors
    /// A command failed.
    pub fn start_datagrams(&mut self, qp: &Qp) -> Result<()> {
        self.modify(qp, state::INIT, modify::STATE | modify::QKEY, (0, None))?;
        self.modify(qp, state::RTR, modify::STATE, (0, None))?;
        self.to_rts(qp)
    }

    /// Changes the state and nothing else.
    ///
    /// # Errors
    /// The command failed.
    pub fn change_state(&mut self, qp: &Qp, state: u32) -> Result<()> {
        self.modify(qp, state, modify::STATE, (0, None))
    }

    /// The state that QUERY_QP tells.
    ///
    /// # Errors
    /// The command failed.
    pub fn qp_state(&mut self, qp: &Qp) -> Result<u32> {
        let [word, _] = self.command(&Request::new(command::QUERY_QP).word(8, qp.number))?;
        Ok((word >> 48 & 0xff) as u32)
    }

    /// REFLUSH: a kernel's way to have flushed what it posted to a queue pair in error.
    ///
    /// # Errors
    /// The command failed.
    pub fn reflush(&mut self, qp: &Qp) -> Result<()> {
        let (sends, receives) = qp.produced();
        let request = Request::new(command::REFLUSH)
            .word(8, qp.number)
            .word(12, sends.into())
            .word(16, receives.into());
        self.command(&request)?;
        Ok(())
    }

    /// CREATE_AH of this number.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_ah(&mut self, pd: u32, ahn: u32, path: Path) -> Result<()> {
        let request = Request::new(command::CREATE_AH)
            .word(8, pd)
            .word(12, ahn)
            .bytes(16, &path.bytes());
        self.command(&request)?;
        Ok(())
    }

    /// DESTROY_QP.
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy_qp(&mut self, qp: &Qp) -> Result<()> {
        self.command(&Request::new(command::DESTROY_QP).word(8, qp.number))?;
        Ok(())
    }

    /// DESTROY_CQ.
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy_cq(&mut self, cq: &Cq) -> Result<()> {
        self.command(&Request::new(command::DESTROY_CQ).word(8, cq.number))?;
        Ok(())
    }
}
