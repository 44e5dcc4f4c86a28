//! Work requests of connections, and their completions.

use super::bench::*;
use crate::rdma::front::erdma::tables::DMA_KEY;

const KEY: u32 = 7 << 8;
const SIGNALED: u64 = 1 << 22;
const INLINE: u64 = 1 << 25;

fn elements(n: u64) -> u64 {
    n << 56
}

/// The words behind the head of a WRITE.
fn to(addr: u64, len: u32, imm: u32) -> Vec<u8> {
    words(&[imm, len, KEY, addr as u32, (addr >> 32) as u32, 0])
}

#[test]
fn a_write_of_elements_and_one_of_its_own_bytes_arrive_and_complete_in_order() {
    let mut bench = Bench::connected(true);
    bench.memory.write(DATA, b"one two three");
    let mut body = to(DATA + 0x1000, 10, 0);
    body.extend(sge(DATA, 4, KEY));
    body.extend(sge(DATA + 8, 6, KEY));
    let next = bench.post(2, 0, 0, SIGNALED | elements(2), &body);
    let mut body = to(DATA + 0x2000, 40, 0);
    body.extend([0x5a; 40]);
    bench.post(2, next, 0, SIGNALED | INLINE | elements(40), &body);
    bench.run();
    assert_eq!(bench.memory.read(DATA + 0x1000, 9), b"one three");
    assert_eq!(
        bench.memory.read(DATA + 0x2000, 41)[..],
        [[0x5a; 40].as_slice(), &[0]].concat()
    );
    assert_eq!(bench.poll(1), Some([0, 0, 2, 0, 10, 0, 0, 0]));
    assert_eq!(bench.poll(1), Some([0, 2, 2, 0, 40, 0, 0, 0]));
    assert_eq!(bench.poll(1), None);
}

#[test]
fn requests_that_are_not_signalled_complete_silently_and_rings_wrap() {
    let mut bench = Bench::connected(true);
    let mut index = 0;
    for n in 0..200u64 {
        let mut body = to(DATA + 8 * n, 8, 0);
        body.extend(n.to_le_bytes());
        let signaled = if n % 10 == 9 { SIGNALED } else { 0 };
        let first = index;
        index = bench.post(2, index, 0, signaled | INLINE | elements(8), &body);
        bench.run();
        let entry = bench.poll(1);
        assert_eq!(entry.is_some(), signaled != 0);
        assert!(entry.is_none_or(|e| e[1] == u32::from(first)));
    }
    let last = bench.memory.read(DATA + 8 * 199, 8);
    assert_eq!(last, 199u64.to_le_bytes());
}

#[test]
fn a_read_brings_bytes_and_one_with_invalidate_takes_a_key_out_of_use() {
    let mut bench = Bench::connected(true);
    bench.register(8, 4).unwrap();
    bench.memory.write(DATA + 0x1000, b"remote");
    let read = |invalidate: u32, key: u32| {
        let mut body = words(&[invalidate, 6, key, DATA as u32, 0, 0]);
        body.extend(sge(DATA + 0x1000, 6, KEY));
        body
    };
    let next = bench.post(2, 0, 1, SIGNALED, &read(0, KEY));
    bench.run();
    assert_eq!(bench.memory.read(DATA, 6), b"remote");
    assert_eq!(bench.poll(1), Some([1 << 16, 0, 2, 0, 6, 0, 0, 0]));
    let next = bench.post(2, next, 16, SIGNALED, &read(8 << 8, 8 << 8));
    bench.run();
    assert_eq!(bench.poll(1), Some([16 << 16, 2, 2, 0, 6, 0, 0, 0]));
    bench.post(2, next, 1, SIGNALED, &read(0, 8 << 8));
    bench.run();
    let failed = bench.poll(1).unwrap();
    assert_eq!(failed[0] & 0xff, 10, "its key is not valid any more");
}

#[test]
fn atomics_return_the_old_value() {
    let mut bench = Bench::connected(true);
    let place = DATA + 0x1000;
    bench.memory.write(place, &5u64.to_le_bytes());
    let atomic = |operand: u64, compare: u64| {
        let mut body = vec![0; 8];
        body.extend(operand.to_le_bytes());
        body.extend(compare.to_le_bytes());
        body.extend(sge(place, 8, KEY));
        body.extend(sge(DATA, 8, KEY));
        body
    };
    let value =
        |bench: &Bench, at: u64| u64::from_le_bytes(bench.memory.read(at, 8).try_into().unwrap());
    let next = bench.post(2, 0, 18, SIGNALED, &atomic(3, 0));
    bench.run();
    assert_eq!((value(&bench, place), value(&bench, DATA)), (8, 5));
    assert_eq!(bench.poll(1).unwrap()[..2], [18 << 16, 0]);
    bench.post(2, next, 17, SIGNALED, &atomic(100, 8));
    bench.run();
    assert_eq!((value(&bench, place), value(&bench, DATA)), (100, 8));
    assert_eq!(bench.poll(1).unwrap()[..2], [17 << 16, 2]);
}

#[test]
fn sends_take_receives_with_immediate_data_and_keys_to_invalidate() {
    let mut bench = Bench::connected(false);
    for n in 0..4 {
        bench.post_receive(3, n, DATA + 0x1000 * u64::from(n), 16, KEY);
    }
    let mut index = 0;
    // Bytes of the wire: 1, 2, 3, 4.
    for (opcode, word) in [(2, 0), (3, 0x0403_0201), (9, 0x0403_0201)] {
        let mut body = match opcode {
            9 => to(DATA + 0x9000, 3, word),
            _ => words(&[word, 3]),
        };
        body.extend(b"abc");
        index = bench.post(2, index, opcode, INLINE | elements(3), &body);
        bench.run();
    }
    assert_eq!(bench.memory.read(DATA, 3), b"abc");
    assert_eq!(bench.poll(1), Some([4 << 16 | 1 << 8, 0, 3, 0, 3, 0, 0, 0]));
    // In the opposite order: the word is big endian like the others.
    let immediate = 0x0403_0201;
    assert_eq!(
        bench.poll(1),
        Some([12 << 16 | 1 << 8, 1, 3, immediate, 3, 0, 0, 0])
    );
    assert_eq!(
        bench.poll(1),
        Some([5 << 16 | 1 << 8, 2, 3, immediate, 3, 0, 0, 0])
    );
    assert_eq!(bench.memory.read(DATA + 0x9000, 3), b"abc");
}

#[test]
fn a_sender_waits_without_end_for_a_receive() {
    let mut bench = Bench::connected(true);
    bench.post(2, 0, 2, SIGNALED, &words(&[0, 0]));
    bench.run();
    for _ in 0..500 {
        bench.wait(std::time::Duration::from_secs(1));
        assert_eq!(bench.poll(1), None);
    }
    bench.post_receive(3, 0, 0x123, 0, 0);
    bench.wait(std::time::Duration::from_secs(1));
    let two = [bench.poll(1).unwrap(), bench.poll(1).unwrap()];
    assert_eq!(two.map(|entry| entry[0] & 0xff), [0, 0]);
}

#[test]
fn a_queue_pair_that_is_only_ready_to_receive_serves() {
    let mut bench = Bench::new();
    bench.create_cq(1).unwrap();
    for qpn in [2, 3] {
        bench.create_qp(qpn, true).unwrap();
    }
    bench.register(7, 0x1f).unwrap();
    bench.connect(2, 3);
    bench.modify(3, 1, 1, 2).unwrap();
    bench.modify(3, 2, 0x35, 2).unwrap();
    let mut body = to(DATA, 4, 0);
    body.extend(b"here");
    bench.post(2, 0, 0, SIGNALED | INLINE | elements(4), &body);
    bench.run();
    assert_eq!(bench.memory.read(DATA, 4), b"here");
    assert_eq!(bench.poll(1).unwrap()[0], 0);
}

#[test]
fn the_ends_of_a_connection_need_not_agree_on_an_mtu() {
    let mut bench = Bench::new();
    bench.create_cq(1).unwrap();
    for qpn in [2, 3] {
        bench.create_qp(qpn, true).unwrap();
    }
    bench.register(7, 0x1f).unwrap();
    bench.connect(2, 3);
    assert!(bench.command((1, 3), &[(8, 600)]).is_ok());
    bench.connect(3, 2);
    let bytes: Vec<u8> = (0..0x8_0000u32).map(|n| (n / 7) as u8).collect();
    bench.memory.write(DATA, &bytes[..0x7_0123]);
    let mut index = [0, 0];
    for from in [2, 3, 2, 3] {
        let mut body = to(DATA + 0x8_0000, 0x7_0123, 0);
        body.extend(sge(DATA, 0x7_0123, KEY));
        let at = &mut index[from as usize - 2];
        *at = bench.post(from, *at, 0, SIGNALED | elements(1), &body);
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[0], 0, "of {from}");
        let mut body = words(&[0, 0x5000, KEY, DATA as u32 + 0xf_0000, 0, 0]);
        body.extend(sge(DATA, 0x5000, KEY));
        let at = &mut index[from as usize - 2];
        *at = bench.post(from, *at, 1, SIGNALED, &body);
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[0] & 0xff, 0, "of {from}");
    }
    assert_eq!(
        bench.memory.read(DATA + 0x8_0000, 0x7_0123),
        &bytes[..0x7_0123]
    );
}

#[test]
fn a_kernel_registers_memory_by_work_requests_and_uses_all_of_it_under_one_key() {
    let mut bench = Bench::connected(false);
    let table = [
        (8, 9),
        (12, 5 << 12 | 1 << 6),
        (28, 12 << 27 | 1 << 20 | 8),
        (32, DATA as u32 + 0x8_0000),
    ];
    bench.command((0, 8), &table).unwrap();
    let pages: Vec<u8> = [DATA + 0x3000, DATA + 0x1000]
        .iter()
        .flat_map(|p| p.to_le_bytes())
        .collect();
    bench.memory.write(DATA + 0x8_0000, &pages);
    let stag = 9 << 8 | 0x42;
    // From 0x800 of the first page on; remote read and write.
    let mut register = 0x5_0000_0800u64.to_le_bytes().to_vec();
    register.extend(words(&[0x1000, stag, 2 << 12 | 1 << 6 | (16 | 8) << 1, 0]));
    let next = bench.post(3, 0, 14, SIGNALED, &register);
    bench.run();
    assert_eq!(bench.poll(1), Some([14 << 16, 0, 3, 0, 0, 0, 0, 0]));
    let mut body = words(&[0, 0x1000, stag, 0x800, 5, 0]);
    body.extend(sge(DATA + 0x4_0000, 0x1000, DMA_KEY.0));
    bench.memory.write(DATA + 0x4_07f0, &[7; 32]);
    let sent = bench.post(2, 0, 0, SIGNALED | elements(1), &body);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[0], 0);
    assert_eq!(bench.memory.read(DATA + 0x3ff0, 16), [7; 16]);
    assert_eq!(bench.memory.read(DATA + 0x1000, 16), [7; 16]);
    let invalidate = words(&[0, 0, 0, stag, 0, 0]);
    bench.post(3, next, 15, SIGNALED, &invalidate);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[0], 15 << 16);
    bench.post(2, sent, 0, SIGNALED | elements(1), &body);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[0] & 0xff, 3, "a remote key");
}

#[test]
fn a_program_does_not_know_the_key_of_all_memory_and_registers_nothing() {
    for (opcode, syndrome) in [(0, 10), (14, 8), (15, 8)] {
        let mut bench = Bench::connected(true);
        let mut body = to(DATA, 8, 0);
        body.extend(sge(DATA, 8, DMA_KEY.0));
        bench.post(2, 0, opcode, elements(1), &body);
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[0] & 0xff, syndrome, "{opcode}");
    }
}

#[test]
fn a_queue_pair_begins_anew_after_a_reset_whatever_its_record_says() {
    let mut bench = Bench::connected(false);
    let mut body = to(DATA, 4, 0);
    body.extend(b"once");
    bench.post(2, 0, 0, SIGNALED | INLINE | elements(4), &body);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[1], 0);
    for qpn in [2, 3] {
        bench.modify(qpn, 0, 1, 0).unwrap();
    }
    bench.connect(2, 3);
    bench.connect(3, 2);
    bench.run();
    assert_eq!(bench.poll(1), None);
    bench.post(2, 0, 0, SIGNALED | INLINE | elements(4), &body);
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[..2], [0, 0]);
}
