//! virtio-queue and vm-memory's byte access on a view of the table.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests count as no tests for clippy.toml

use std::io::{Read, Write};
use std::sync::atomic::Ordering;

use dot_iommu::{Backing, DotTable, HostMapping, Perm};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError, Permissions};

const PAGE: u64 = 0x1000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const DESC: u64 = 0x10_0000;
const AVAIL: u64 = DESC + 0x400;
const USED: u64 = DESC + 0x800;
/// Two adjacent ranges whose host pages are in the opposite order.
const DATA: u64 = 0x20_0000;
/// Where an indirect table lies: beside the data.
const INDIRECT_TABLE: u64 = DATA + 0x800;
/// May be read but not written.
const READ_ONLY: u64 = 0x30_0000;
/// Known to the table but without memory.
const MESSAGE: u64 = 0x40_0000;

fn table() -> DotTable {
    let mapping = HostMapping::anonymous(4 * PAGE).unwrap();
    let table = DotTable::new();
    let backed = |page: u64| Backing::Mapped {
        mapping: mapping.clone(),
        offset: page * PAGE,
    };
    table.map(DESC, PAGE, Perm::RW, backed(0)).unwrap();
    table.map(DATA, PAGE, Perm::RW, backed(2)).unwrap();
    table.map(DATA + PAGE, PAGE, Perm::RW, backed(1)).unwrap();
    table.map(READ_ONLY, PAGE, Perm::R, backed(3)).unwrap();
    table
        .map(MESSAGE, PAGE, Perm::RW, Backing::Message)
        .unwrap();
    table
}

/// virtio 1.3 §2.7.5: addr u64, len u32, flags u16, next u16, little endian.
fn put_descriptor(
    mem: &impl GuestMemory,
    table: u64,
    index: u16,
    (addr, len, flags, next): (u64, u32, u16, u16),
) {
    let at = table + u64::from(index) * 16;
    mem.write_obj(addr.to_le(), GuestAddress(at)).unwrap();
    mem.write_obj(len.to_le(), GuestAddress(at + 8)).unwrap();
    mem.write_obj(flags.to_le(), GuestAddress(at + 12)).unwrap();
    mem.write_obj(next.to_le(), GuestAddress(at + 14)).unwrap();
}

fn make_available(mem: &impl GuestMemory, count: u16, head: u16) {
    let slot = AVAIL + 4 + u64::from(count % 16) * 2;
    mem.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
    mem.store(
        (count + 1).to_le(),
        GuestAddress(AVAIL + 2),
        Ordering::Release,
    )
    .unwrap();
}

fn queue() -> Queue {
    let mut queue = Queue::new(16).unwrap();
    queue.set_desc_table_address(Some(DESC as u32), Some(0));
    queue.set_avail_ring_address(Some(AVAIL as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue.set_ready(true);
    queue
}

#[test]
fn virtqueue_moves_buffers_that_span_ranges() {
    let table = table();
    let reader = table.reader();
    let view = reader.pin();
    let mut queue = queue();
    assert!(queue.is_valid(&view));

    let request: Vec<u8> = (0..600).map(|i| (i % 251) as u8).collect();
    let source = DATA + PAGE - 300;
    view.write_slice(&request, GuestAddress(source)).unwrap();
    put_descriptor(&view, DESC, 0, (source, 600, NEXT, 1));
    put_descriptor(&view, DESC, 1, (DATA, 700, WRITE, 0));
    make_available(&view, 0, 0);

    let chain = queue.pop_descriptor_chain(&view).unwrap();
    let head = chain.head_index();
    let mut got = Vec::new();
    chain
        .clone()
        .reader(&view)
        .unwrap()
        .read_to_end(&mut got)
        .unwrap();
    assert_eq!(got, request);
    let mut writer = chain.writer(&view).unwrap();
    writer.write_all(&got).unwrap();
    let written = writer.bytes_written() as u32;
    queue.add_used(&view, head, written).unwrap();

    let mut out = vec![0; 600];
    view.read_slice(&mut out, GuestAddress(DATA)).unwrap();
    assert_eq!(out, request);
    assert_eq!(view.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
    assert_eq!(view.read_obj::<u32>(GuestAddress(USED + 8)).unwrap(), 600);
}

#[test]
fn virtqueue_follows_an_indirect_table() {
    let table = table();
    let reader = table.reader();
    let view = reader.pin();
    let mut queue = queue();
    view.write_slice(b"indirect", GuestAddress(DATA)).unwrap();
    put_descriptor(&view, INDIRECT_TABLE, 0, (DATA, 8, 0, 0));
    put_descriptor(&view, DESC, 3, (INDIRECT_TABLE, 16, INDIRECT, 0));
    make_available(&view, 0, 3);
    let chain = queue.pop_descriptor_chain(&view).unwrap();
    let mut got = String::new();
    chain
        .reader(&view)
        .unwrap()
        .read_to_string(&mut got)
        .unwrap();
    assert_eq!(got, "indirect");
}
#[test]
fn buffers_the_device_may_not_touch_are_errors() {
    let table = table();
    let reader = table.reader();
    let view = reader.pin();
    let mut queue = queue();
    let hostile = [
        (READ_ONLY, 16, WRITE, 0),
        (MESSAGE, 16, WRITE, 0),
        (0xdead_0000, 16, WRITE, 0),
        (DATA + 2 * PAGE - 8, 16, WRITE, 0),
        (u64::MAX - 7, 16, WRITE, 0),
        (DATA, u32::MAX, WRITE, 0),
    ];
    for (count, descriptor) in hostile.into_iter().enumerate() {
        put_descriptor(&view, DESC, 0, descriptor);
        make_available(&view, count as u16, 0);
        let chain = queue.pop_descriptor_chain(&view).unwrap();
        assert!(chain.writer(&view).is_err(), "{descriptor:x?}");
    }
    // The read-only range serves reads.
    put_descriptor(&view, DESC, 0, (READ_ONLY, 16, 0, 0));
    make_available(&view, hostile.len() as u16, 0);
    let chain = queue.pop_descriptor_chain(&view).unwrap();
    assert_eq!(chain.reader(&view).unwrap().available_bytes(), 16);
}

#[test]
fn ring_in_memory_that_goes_away_yields_nothing() {
    let table = table();
    let reader = table.reader();
    let mut queue = queue();
    put_descriptor(&reader.pin(), DESC, 0, (DATA, 8, 0, 0));
    make_available(&reader.pin(), 0, 0);
    table.unmap(DESC, PAGE).unwrap();
    let view = reader.pin();
    assert!(queue.pop_descriptor_chain(&view).is_none());
    assert!(queue.add_used(&view, 0, 0).is_err());
    assert!(!queue.is_valid(&view));
}

#[test]
fn check_range_knows_rights_gaps_and_the_end_of_the_address_space() {
    let table = table();
    let reader = table.reader();
    let view = reader.pin();
    let check = |addr, len, access| view.check_range(GuestAddress(addr), len, access);
    use Permissions::{Read, ReadWrite, Write};
    assert!(check(DATA, 2 * PAGE as usize, ReadWrite));
    assert!(!check(DATA, 2 * PAGE as usize + 1, Read));
    assert!(!check(DATA - 1, 2, Read));
    assert!(check(READ_ONLY, PAGE as usize, Read));
    assert!(!check(READ_ONLY, 1, Write));
    assert!(!check(READ_ONLY, 1, ReadWrite));
    assert!(!check(MESSAGE, 1, Read));
    assert!(!check(u64::MAX, 2, Read));
    assert!(!check(DATA, usize::MAX, Read));
    assert!(check(0xdead_0000, 0, Read));
    assert!(view.physical_memory().is_none());
}

#[test]
fn byte_access_stops_at_the_first_range_it_may_not_touch() {
    let table = table();
    let reader = table.reader();
    let view = reader.pin();
    let end = DATA + 2 * PAGE;
    assert_eq!(view.write(&[1; 32], GuestAddress(end - 8)).unwrap(), 8);
    let denied = view.write(&[1; 4], GuestAddress(READ_ONLY)).unwrap_err();
    let GuestMemoryError::IOError(error) = denied else {
        panic!("{denied}")
    };
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    let message = view.read(&mut [0; 4], GuestAddress(MESSAGE)).unwrap_err();
    let GuestMemoryError::IOError(error) = message else {
        panic!("{message}")
    };
    assert!(error.to_string().contains("DMA messages"));
    let gap = view.read(&mut [0; 4], GuestAddress(end)).unwrap_err();
    assert!(matches!(gap, GuestMemoryError::InvalidGuestAddress(_)));
    // An atomic that straddles two ranges cannot be atomic.
    assert!(
        view.load::<u64>(GuestAddress(DATA + PAGE - 4), Ordering::Relaxed)
            .is_err()
    );
}

#[test]
fn slices_reach_the_last_byte_of_the_address_space() {
    let mapping = HostMapping::anonymous(2 * PAGE).unwrap();
    let table = DotTable::new();
    let top = u64::MAX - (PAGE - 1);
    let backed = |offset| Backing::Mapped {
        mapping: mapping.clone(),
        offset,
    };
    table.map(top, PAGE, Perm::RW, backed(0)).unwrap();
    table.map(0, PAGE, Perm::RW, backed(PAGE)).unwrap();
    let reader = table.reader();
    let view = reader.pin();
    view.write_slice(&[7; 16], GuestAddress(u64::MAX - 15))
        .unwrap();
    assert!(view.check_range(GuestAddress(top), PAGE as usize, Permissions::Write));
    // The range at 0 is not what follows the top.
    assert!(!view.check_range(GuestAddress(top), PAGE as usize + 1, Permissions::Read));
}
