//! What the hostile driver does beside commands and entries: doorbells, registers, bytes anywhere, and
//! what happens around it.

use super::hostile::{number, numbers};
use super::memory::BASE;
use super::node::{DATA, PAGE_COUNT, PAGES, UAR};
use super::world::World;
use super::{Source, frames};
use crate::port::shm::test_support;

impl World {
    /// A frame comes from a wire.
    pub(super) fn arriving_frame(&mut self, source: &mut Source<'_>) {
        let (meta, bytes) = frames::arriving(source);
        // A full wire is one more case.
        let _ = test_support::send(&mut self.outside, meta, &bytes);
        crate::port::Port::flush(&mut self.outside);
    }

    /// Bytes anywhere: in queues, records, contexts, mailboxes.
    pub(super) fn scribble(&mut self, source: &mut Source<'_>) {
        let len = 1 + source.below(128) as usize;
        let one_in = 1 << source.below(4);
        let bytes = source.fill(len, one_in);
        let at = match source.below(8) {
            0 => BASE + source.below(0x1_0000),
            1 => DATA + source.below(0x1_0000),
            _ => PAGES + source.below(PAGE_COUNT) * 4096 + source.below(0x1000),
        };
        self.hostile.memory.scribble(at, &bytes);
    }

    /// Writes to and reads of registers.
    pub(super) fn any_register(&mut self, source: &mut Source<'_>) {
        let offset = match source.below(4) {
            0 => source.limit(),
            1 => source.below(0x40) & !3,
            2 => UAR * (1 + source.below(4)) + source.below(0x1000),
            _ => source.below(16 << 20) & !3,
        };
        let len = 1 + source.below(64) as usize;
        let mut bytes = source.fill(len, 2);
        self.hostile.write(offset, &bytes);
        let now = self.now;
        self.hostile.registers.read(offset, &mut bytes, now);
    }

    /// Doorbells of any queue.
    pub(super) fn doorbells(&mut self, source: &mut Source<'_>) {
        let any = source.limit() as u32;
        let cqn = number(source, &numbers(&self.known.cqs));
        let eqn = number(source, &numbers(&self.known.eqs));
        let cq = self.known.cqs.iter().find(|cq| cq.number == cqn);
        if let Some(cq) = cq {
            let arm = (source.u32() & 0x1ff_ffff).to_be_bytes();
            self.hostile.memory.scribble(cq.record + 4, &arm);
        }
        self.hostile.ring_cq(cqn);
        self.hostile.ring_send(any & 0xff_ffff);
        let word = (eqn << 24 | source.limit() as u32 & 0xff_ffff).to_be_bytes();
        let at = source.pick(&[0x40, 0x48]);
        self.hostile.write(UAR + at, &word);
    }

    /// What happens around the driver: memory comes and goes, so do bus mastering and the link.
    pub(super) fn around(&mut self, source: &mut Source<'_>) {
        let on = !source.one_in(2);
        match source.below(4) {
            0 | 1 => self.hostile.memory.set_movable(on),
            2 => self.hostile.set_bus_master(on),
            _ => self.hostile.function.with(|device, _| device.set_link(on)),
        }
        if self.hostile.function.arm() {
            self.hostile.function.disarm();
        }
        let _ = self.hostile.function.deadline(self.now);
        let _ = self.hostile.function.stats();
    }
}
