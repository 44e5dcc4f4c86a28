//! Which pages are logged as written.

use super::*;
use dot_iommu::HostMapping;

/// Bytes of the log, for twice the memory there is.
const LOG: usize = (2 * (BASE + BYTES) / 4096 / 8) as usize;

struct Log(Arc<HostMapping>);

impl Log {
    fn of(bench: &mut Bench) -> Self {
        let mapping = HostMapping::anonymous(LOG as u64).unwrap();
        let log = DirtyLog::new(mapping.clone());
        bench.device.log_to(Some(log));
        Self(mapping)
    }

    /// Addresses of the pages that were logged since the last call.
    fn take(&self) -> Vec<u64> {
        let mut bytes = vec![0u8; LOG];
        let slice = self.0.as_volatile_slice();
        slice.copy_to(&mut bytes[..]);
        slice.copy_from(&[0u8; LOG]);
        let bit = |page: &u64| bytes[(page / 8) as usize] >> (page % 8) & 1 == 1;
        let pages = (0..8 * LOG as u64).filter(bit);
        pages.map(|page| 4096 * page).collect()
    }
}

/// Pages of a ring that the device writes.
fn ring_pages(bench: &Bench, queue: usize, features: u64) -> Vec<u64> {
    let setup = bench.rings[queue].setup;
    let mut pages = vec![setup.used & !4095];
    if features & RING_PACKED != 0 {
        pages.push(setup.desc & !4095);
    }
    pages
}

fn sorted(mut pages: Vec<u64>) -> Vec<u64> {
    pages.sort_unstable();
    pages.dedup();
    pages
}

#[test]
fn a_frame_logs_its_pages_and_rings_and_rounds_without_work_log_nothing() {
    for features in RINGS {
        let mut b = Bench::new(features);
        let log = Log::of(&mut b);
        b.turns();
        log.take();
        b.turns();
        assert!(log.take().is_empty());
        b.receive_buffers(&[0x4000]);
        b.send(&[0; 12], &frame(60));
        assert_eq!(b.rings[RX].take_used(), [(0, 72)]);
        // Of a large buffer only the page that was written.
        let rings = [RX, TX]
            .map(|queue| ring_pages(&b, queue, features))
            .concat();
        assert_eq!(log.take(), sorted([rings, vec![buffer(0)]].concat()));
    }
}

#[test]
fn buffers_that_claim_more_than_there_is_or_are_put_back_log_nothing_of_theirs() {
    for features in RINGS {
        let mut b = Bench::new(features);
        let log = Log::of(&mut b);
        for n in 0..8 {
            b.rings[RX].chain(n, &[(buffer(0), u32::MAX, WRITE)]);
        }
        b.send(&[0; 12], &frame(60));
        assert!(!b.rings[RX].take_used().is_empty());
        assert!(b.device.pool.written.as_ref().is_some_and(Vec::is_empty));
        let rings = (0..5).flat_map(|queue| ring_pages(&b, queue, features));
        assert_eq!(log.take(), sorted(rings.collect()));
        // Too little room for the next frame, and then none.
        b.receive_buffers(&[20]);
        b.send(&[0; 12], &frame(60));
        let logged = log.take();
        assert!(!logged.contains(&buffer(0)), "{features:#x}: {logged:x?}");
    }
}

#[test]
fn wishes_for_notifications_are_logged_also_those_of_a_queue_that_stops() {
    for features in RINGS {
        let mut b = Bench::new(features);
        let log = Log::of(&mut b);
        b.turns();
        log.take();
        b.device.arm(&mut b.links);
        let used = b.rings[TX].setup.used & !4095;
        assert!(log.take().contains(&used));
        b.device.disarm(&mut b.links);
        assert!(log.take().contains(&used));
        b.device.stop_queue(TX as u16, &mut b.links);
        assert!(log.take().contains(&used));
        b.device.stop(&mut b.links);
        let rx = b.rings[RX].setup.used & !4095;
        assert!(log.take().contains(&rx));
    }
}
