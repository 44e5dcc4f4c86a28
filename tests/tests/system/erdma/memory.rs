//! Keys: tables of every depth, pages of other sizes, regions that work requests make and end.

use super::{Pair, Side};
use distdpu_tests::erdma::{Pages, Send, rights, syndrome};
use distdpu_tests::memory::{PAGE, Shape};
use distdpu_tests::virtio_net::Guest;

/// Pages of a region, in an order that is not that of their addresses, and where in the first page it begins.
fn shuffled(side: &Side, count: u64) -> Vec<u64> {
    let first = side.driver.memory.allocate(count * PAGE, PAGE).unwrap();
    // 7 has no divisor in common with the counts that are used.
    (0..count).map(|n| first + n * 7 % count * PAGE).collect()
}

/// What is in the region by its pages.
fn gather(side: &Side, pages: &[u64], start: u64, len: u64) -> Vec<u8> {
    let bytes = pages
        .iter()
        .flat_map(|&page| side.driver.memory.bytes(page, PAGE as usize).unwrap());
    bytes
        .skip((start % PAGE) as usize)
        .take(len as usize)
        .collect()
}

#[test]
fn tables_of_every_depth_say_where_each_page_is() {
    let shapes = [
        (Pages::Inline, 3),
        (Pages::Array, 3),
        (Pages::Array, 600),
        (Pages::TwoLevels, 600),
        (Pages::TwoLevels, 1100),
        (Pages::ThreeLevels, 1100),
    ];
    let guest = Guest {
        shape: Shape::Pages,
        ..Guest::default()
    };
    let mut pair = Pair::with(true, guest, guest);
    assert!(pair.a.driver.capabilities.has_levels());
    for (seed, (shape, count)) in shapes.into_iter().enumerate() {
        let data = pair.a.fill(seed as u8);
        let pages = shuffled(&pair.b, count);
        // Addresses that are nobody's, and a region that begins and ends in the middle of a page.
        let start = 0x7f12_3456_7000 + 123;
        let len = count * PAGE - 123 - 77;
        let driver = &mut pair.b.driver;
        let key = driver.register_pages(pair.b.pd, (start, len), rights::ALL, (12, &pages), shape);
        let key = key.unwrap();
        let part = pair.a.part(5, len as u32);
        pair.a.send(Send::Write(start, key, None), &[part]);
        pair.a.sends.success().unwrap();
        let got = gather(&pair.b, &pages, start, len);
        assert!(got == data[5..][..len as usize], "{shape:?}, {count} pages");
        // A piece out of the middle, across the lists' ends, read back.
        let (from, some) = (len / 2 - 1000, 5000);
        let part = pair.a.part(1, some);
        pair.a.send(Send::Read(start + from, key), &[part]);
        pair.a.sends.success().unwrap();
        let expected = &got[from as usize..][..some as usize];
        assert!(pair.a.bytes(1, some as usize) == expected, "{shape:?}");
        pair.b.driver.deregister(key).unwrap();
    }
}

#[test]
fn pages_may_be_large() {
    let mut pair = Pair::new(true);
    let data = pair.a.fill(0x31);
    for shift in [16, 21] {
        let size = 1u64 << shift;
        let first = pair.b.driver.memory.allocate(4 * size, size).unwrap();
        let pages = [first + 2 * size, first, first + 3 * size, first + size];
        let (start, len) = (0x10_0000_0000 + size / 2 + 3, 3 * size);
        let driver = &mut pair.b.driver;
        let key = driver
            .register_pages(
                pair.b.pd,
                (start, len),
                rights::ALL,
                (shift, &pages),
                Pages::Inline,
            )
            .unwrap();
        let part = pair.a.part(0, len as u32);
        pair.a.send(Send::Write(start, key, None), &[part]);
        pair.a.sends.success().unwrap();
        let bytes: Vec<u8> = pages
            .iter()
            .flat_map(|&page| pair.b.driver.memory.bytes(page, size as usize).unwrap())
            .skip((start % size) as usize)
            .take(len as usize)
            .collect();
        assert!(bytes == data[..len as usize], "pages of 2^{shift}");
    }
}

#[test]
fn all_memory_has_keys_for_the_kernel() {
    let mut pair = Pair::new(false);
    let data = pair.a.fill(0x41);
    let local = pair.a.driver.capabilities.dma_key();
    let remote = pair.b.driver.dma_region(pair.b.pd).unwrap();
    let (from, to) = (pair.a.buffer.address + 9, pair.b.buffer.address + 4000);
    pair.a
        .send(Send::Write(to, remote, None), &[(local, from, 70_000)]);
    pair.a.sends.success().unwrap();
    assert!(pair.b.bytes(4000, 70_000) == data[9..][..70_000]);
}

/// Pages of the buffer as a fast region has them.
fn pages_of(side: &Side, from: u64, count: u64) -> Vec<u64> {
    (0..count)
        .rev()
        .map(|n| side.buffer.address + (from + n) * PAGE)
        .collect()
}

/// Runs an entry of `b` and answers its completion's syndrome.
fn local(pair: &mut Pair, send: Send<'_>) -> u8 {
    pair.b.send(send, &[]);
    let done = pair.b.sends.wait().unwrap();
    assert_eq!(done.opcode, send.opcode());
    done.syndrome
}

#[test]
fn a_fast_region_is_made_and_ended_by_work_requests() {
    let mut pair = Pair::new(false);
    let data = pair.a.fill(0x51);
    let (key, table) = pair.b.driver.fast_region(pair.b.pd, 16).unwrap();
    for round in 0..3u32 {
        // The user of the region changes the key's last byte.
        let key = key & !0xff | (0x80 + round);
        let start = 0x5000_0000_0000 + 100;
        let len = 10_000;
        let pages = pages_of(
            &pair.b,
            20 * u64::from(round),
            if round == 1 { 16 } else { 3 },
        );
        let register = match round {
            1 => {
                let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
                pair.b.driver.memory.write(table, &bytes).unwrap();
                Send::RegisterByTable(key, start, len, rights::ALL, 16)
            }
            _ => Send::Register(key, start, len, rights::ALL, &pages),
        };
        assert_eq!(local(&mut pair, register), 0);
        let part = pair.a.part(0, len);
        pair.a.send(Send::Write(start, key, None), &[part]);
        pair.a.sends.success().unwrap();
        assert!(
            gather(&pair.b, &pages, start, len.into()) == data[..len as usize],
            "{round}"
        );
        if round == 2 {
            // The peer ends it.
            pair.b.receive(4 << 20, 100);
            let part = pair.a.part(0, 64);
            pair.a.send(Send::SendInvalidate(key), &[part]);
            pair.a.sends.success().unwrap();
            let done = pair.b.receives.success().unwrap();
            assert_eq!((done.opcode, done.invalidated, done.len), (6, key, 64));
        } else {
            assert_eq!(local(&mut pair, Send::Invalidate(key)), 0);
        }
    }
    // It has ended.
    let part = pair.a.part(0, 8);
    pair.a.send(
        Send::Write(0x5000_0000_0000 + 100, key & !0xff | 0x82, None),
        &[part],
    );
    let done = pair.a.sends.wait().unwrap();
    assert!((3..=6).contains(&done.syndrome), "{done:?}");
}

#[test]
fn a_read_may_end_the_region_that_it_fills() {
    let mut pair = Pair::new(false);
    let data = pair.b.fill(0x61);
    let (key, _) = pair.a.driver.fast_region(pair.a.pd, 4).unwrap();
    let pages = pages_of(&pair.a, 3, 2);
    pair.a.send(
        Send::Register(
            key,
            0,
            8192,
            rights::LOCAL_READ | rights::LOCAL_WRITE,
            &pages,
        ),
        &[],
    );
    let remote = pair.b.buffer;
    let read = Send::ReadInvalidate(remote.address + 1, remote.key, key);
    pair.a.send(read, &[(key, 0, 8192)]);
    for opcode in [14, 16] {
        assert_eq!(pair.a.sends.success().unwrap().opcode, opcode);
    }
    assert!(gather(&pair.a, &pages, 0, 8192) == data[1..][..8192]);
    pair.a
        .send(Send::Read(remote.address, remote.key), &[(key, 0, 8)]);
    let done = pair.a.sends.wait().unwrap();
    assert!((10..=13).contains(&done.syndrome), "{done:?}");
}

#[test]
fn a_key_that_was_given_back_is_none() {
    let mut pair = Pair::new(true);
    let len = 3 * PAGE;
    let gone = pair.b.driver.register(pair.b.pd, len).unwrap();
    let part = pair.a.part(0, 8);
    pair.a
        .send(Send::Write(gone.address, gone.key, None), &[part]);
    pair.a.sends.success().unwrap();
    pair.b.driver.deregister(gone.key).unwrap();
    pair.a
        .send(Send::Write(gone.address, gone.key, None), &[part]);
    let done = pair.a.sends.wait().unwrap();
    assert!(
        (syndrome::REMOTE_KEY..=syndrome::REMOTE_DOMAIN).contains(&done.syndrome),
        "{done:?}"
    );
}
