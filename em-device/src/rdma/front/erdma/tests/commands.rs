//! Commands: what they answer, what they refuse.

use super::bench::*;
use crate::rdma::verbs::{MemKey, Pd, Rights};

#[test]
fn the_probe_of_a_driver_finds_what_it_asks_for() {
    let mut bench = Bench::new();
    let [first, second] = bench.command((0, 0), &[]).unwrap();
    assert_eq!(first >> 48 & 0xf, 4, "GIDs");
    assert_eq!(
        first >> 24 & 0xff,
        0xa8,
        "atomics, page tables, doorbell pages"
    );
    assert_eq!(first & 0xff, 40);
    assert_eq!(second >> 32, 0xffff_ff00);
    assert_eq!(second >> 16 & 0xfff, 4);
    assert!(bench.command((1, 2), &[]).is_ok());
    assert!(bench.command((1, 5), &[(8, 1 << 31 | 12)]).is_ok());
    let stats = bench.command((1, 4), &[(12, 9), (16, DATA as u32), (24, 256)]);
    assert_eq!(stats, Ok([0; 2]));
    let head = bench.memory.read(DATA, 8);
    assert_eq!(head, [0x66, 0x55, 1, 104, 9, 0, 0, 0]);
    assert_eq!(bench.command((0, 63), &[]), Err(1));
    assert_eq!(bench.command((2, 0), &[]), Err(1));
}

#[test]
fn the_command_queue_goes_round_more_than_once() {
    let mut bench = Bench::new();
    for _ in 0..1200 {
        assert!(bench.command((1, 2), &[]).is_ok());
    }
}

#[test]
fn the_command_queue_tells_of_completions_once_it_is_armed() {
    let mut bench = Bench::new();
    bench.run();
    assert_eq!(bench.event(COMMAND_EVENTS, 0), [0; 2]);
    // Nothing read so far.
    bench.memory.write(RECORDS, &(1u64 << 31).to_le_bytes());
    bench.registers.write(0x300, &[0; 8]);
    bench.run();
    assert_eq!(bench.event(COMMAND_EVENTS, 0), [1 << 31, 0], "at once");
    bench.memory.write(RECORDS, &(1u64 << 31 | 1).to_le_bytes());
    bench.registers.write(0x300, &[0; 8]);
    bench.run();
    assert_eq!(bench.event(COMMAND_EVENTS, 1), [0; 2]);
    bench.command((1, 2), &[]).unwrap();
    assert_eq!(bench.event(COMMAND_EVENTS, 1), [1 << 31, 0]);
    bench.command((1, 2), &[]).unwrap();
    assert_eq!(bench.event(COMMAND_EVENTS, 2), [0; 2], "not armed again");
}

#[test]
fn pages_of_doorbells_are_of_the_kind_that_the_driver_takes_them_for() {
    let mut bench = Bench::new();
    for _ in 0..200 {
        let [pages, _] = bench.command((1, 8), &[(8, 7)]).unwrap();
        assert!((0x7a..0x80).contains(&(pages >> 48)), "completion queues");
        assert!((0x62..0x79).contains(&(pages >> 32 & 0xffff)), "receives");
        assert!((1..0x5f).contains(&(pages & 0xffff)), "sends");
    }
    assert!(bench.command((1, 9), &[]).is_ok());
}

#[test]
fn event_queues_are_made_once() {
    let mut bench = Bench::new();
    let eq = |number: u32, log: u32| {
        [
            (8, CEQ as u32),
            (16, 1 << 24 | log << 16 | number << 8 | number),
        ]
    };
    assert_eq!(bench.command((1, 0), &eq(1, 6)), Err(1), "it is there");
    assert!(bench.command((1, 0), &eq(31, 6)).is_ok());
    for (number, log) in [(0, 6), (32, 6), (2, 16), (2, 200)] {
        assert_eq!(bench.command((1, 0), &eq(number, log)), Err(1), "{number}");
    }
    assert!(bench.command((1, 1), &eq(31, 6)).is_ok());
    assert_eq!(bench.command((1, 1), &eq(31, 6)), Err(1));
}

#[test]
fn numbers_of_queues_are_free_and_in_range() {
    let mut bench = Bench::new();
    for cqn in [0, 8192, 0xf_ffff] {
        assert_eq!(bench.create_cq(cqn & 0xfffff), Err(1), "{cqn}");
    }
    assert!(bench.create_cq(1).is_ok());
    assert_eq!(bench.create_cq(1), Err(1));
    assert!(bench.create_qp(1, false).is_ok());
    assert_eq!(bench.create_qp(1, false), Err(1));
    assert_eq!(bench.command((0, 5), &[(8, 1)]), Err(1), "it is in use");
    assert!(bench.command((0, 2), &[(8, 1)]).is_ok());
    assert_eq!(bench.command((0, 2), &[(8, 1)]), Err(1));
    assert!(bench.command((0, 5), &[(8, 1)]).is_ok());
    assert_eq!(bench.create_qp(2, false), Err(1), "no completion queue");
    for code in [2, 3, 5, 6, 9, 16, 17] {
        assert_eq!(bench.command((0, code), &[(8, 77)]), Err(1), "{code}");
        assert_eq!(bench.command((0, code), &[(8, 0xf_ffff)]), Err(1), "{code}");
    }
}

#[test]
fn queues_of_impossible_shapes_are_refused() {
    let mut bench = Bench::new();
    bench.create_cq(1).unwrap();
    let at = QPS as u32;
    let good = [
        (8, 5 << 20 | 2),
        (12, 5 << 20 | 5),
        (16, 1),
        (20, 1),
        (24, at),
        (32, at + 0x1000),
        (40, 1 << 1),
        (44, 1 << 1),
        (48, RECORDS as u32),
        (56, RECORDS as u32),
    ];
    let with = |at: usize, value: u32| {
        let mut words = good.to_vec();
        words.retain(|(place, _)| *place != at);
        words.push((at, value));
        words
    };
    for (at, value) in [
        (8, 16 << 20 | 2),
        (8, 0xfff << 20 | 2),
        (8, 5 << 20),
        (16, 2),
        (20, 0xff_ffff),
        (24, 8),
        (40, 0),
        (40, 5 << 1),
        (40, 0x1000 | 1 << 1),
        (40, 3 << 1 | 1),
        (48, 4),
        (12, 12 << 20 | 5),
    ] {
        // The list of the level 1 is not mapped there.
        let words = match (at, value & 1) {
            (40, 1) => {
                let mut words = with(40, value);
                words.retain(|(place, _)| *place != 24);
                words
            }
            _ => with(at, value),
        };
        assert_eq!(bench.command((0, 1), &words), Err(1), "{at} {value:#x}");
    }
    assert!(bench.command((0, 1), &good).is_ok());
}

#[test]
fn a_region_is_made_and_unmade_by_its_number() {
    let mut bench = Bench::new();
    assert!(bench.register(7, 4 | 16).is_ok());
    assert_eq!(bench.register(7, 4), Err(1), "it is there");
    let regions = bench.device.engine().regions();
    let key = MemKey(7 << 8);
    assert!(
        regions
            .check(key, Pd(5), DATA, 0x10_0000, Rights::REMOTE_WRITE)
            .is_ok()
    );
    assert!(
        regions
            .check(key, Pd(5), DATA, 8, Rights::REMOTE_READ)
            .is_err()
    );
    assert!(bench.command((0, 9), &[(8, 7)]).is_ok());
    assert_eq!(bench.command((0, 9), &[(8, 7)]), Err(1));
    assert!(bench.register(7, 4).is_ok());
}

#[test]
fn gids_are_set_and_taken_away_and_a_reset_takes_all() {
    let mut bench = Bench::new();
    let gid = [(8, 1), (12, 0x80fe), (24, 0x0100_0000)];
    assert!(bench.command((0, 14), &gid).is_ok());
    let (index, value) = bench.device.take_gid_change().unwrap();
    assert_eq!((index, &value[..2], value[15]), (1, &[0xfe, 0x80][..], 1));
    assert_eq!(bench.device.take_gid_change(), None);
    assert_eq!(bench.command((0, 14), &[(8, 16)]), Err(1));
    bench.command((0, 14), &[(8, 1 << 31 | 1)]).unwrap();
    assert_eq!(bench.device.take_gid_change(), Some((1, [0; 16])));
    bench.command((0, 14), &gid).unwrap();
    bench.device.take_gid_change();
    bench.device.reset();
    assert!(!bench.device.running());
    assert_eq!(bench.device.take_gid_change(), Some((1, [0; 16])));
}

#[test]
fn a_queue_pair_says_its_state() {
    let mut bench = Bench::connected(true);
    let [answer, _] = bench.command((0, 17), &[(8, 2)]).unwrap();
    assert_eq!(answer >> 48, 3);
    assert_eq!((answer & 0xff_ffff, answer >> 24 & 0xff_ffff), (102, 103));
    assert_eq!(bench.modify(2, 7, 1, 0), Err(1), "no such state");
    assert_eq!(bench.modify(2, 1, 1, 0), Err(1), "not from here");
    assert!(bench.modify(2, 6, 1, 0).is_ok());
    assert!(bench.modify(2, 0, 1, 0).is_ok());
}

#[test]
fn commands_of_no_memory_or_no_length_do_not_hold_the_queue_up() {
    let mut bench = Bench::without_driver();
    let memory = bench.memory.clone();
    let reader = memory.table.reader();
    assert!(bench.device.next_command(4, &reader.pin()).is_none());
    bench.begin();
    // Five blocks, and more than there are.
    for (head, producer) in [(4u64 << 52, 8), (3 << 52, 11), (0, 0x8000)] {
        memory.write(COMMANDS, &head.to_le_bytes());
        memory.write(COMMANDS + 8 * 32, &head.to_le_bytes());
        assert!(bench.device.next_command(producer, &reader.pin()).is_none());
        assert!(bench.device.next_command(producer, &reader.pin()).is_none());
    }
}
