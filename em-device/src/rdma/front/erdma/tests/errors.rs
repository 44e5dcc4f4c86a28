//! Requests that fail, what is flushed behind them, and events.

use super::bench::*;
use std::time::Duration;

const KEY: u32 = 7 << 8;
const SIGNALED: u64 = 1 << 22;
const INLINE: u64 = 1 << 25;
const OWNER: u32 = 1 << 31;

fn write(key: u32) -> Vec<u8> {
    let mut body = words(&[0, 8, key, DATA as u32, 0, 0]);
    body.extend([1; 8]);
    body
}

#[test]
fn a_failed_request_completes_though_nobody_asked_and_flushes_the_rest_of_both_queues() {
    let mut bench = Bench::connected(true);
    bench.post_receive(2, 0, DATA, 8, KEY);
    let next = bench.post(2, 0, 0, INLINE | 8 << 56, &write(99 << 8));
    let last = bench.post(2, next, 0, INLINE | 8 << 56, &write(KEY));
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[..3], [3, 0, 2], "a remote key");
    let mut flushed: Vec<_> = std::iter::from_fn(|| bench.poll(1)).collect();
    flushed.sort();
    let flushed: Vec<_> = flushed.iter().map(|e| (e[0], e[1], e[2])).collect();
    assert_eq!(flushed, [(15, 2, 2), (4 << 16 | 1 << 8 | 15, 0, 2)]);
    let events = [bench.event(EVENTS, 0), bench.event(EVENTS, 1)];
    assert!(
        events.contains(&[OWNER | 2 << 16, 3]),
        "an access: {events:x?}"
    );
    assert!(events.contains(&[OWNER, 2]), "a fatal error: {events:x?}");
    // A program's queue pair in error is flushed by its doorbell.
    bench.post(2, last, 0, INLINE | 8 << 56, &write(KEY));
    bench.post_receive(2, 1, DATA, 8, KEY);
    bench.run();
    let mut later = [bench.poll(1).unwrap(), bench.poll(1).unwrap()].map(|e| (e[0], e[1]));
    later.sort();
    assert_eq!(later, [(15, 4), (4 << 16 | 1 << 8 | 15, 1)]);
}

#[test]
fn a_kernel_has_its_queue_pair_flushed_by_a_command() {
    let mut bench = Bench::connected(false);
    bench.modify(2, 6, 1, 0).unwrap();
    bench.run();
    assert_eq!(bench.poll(1), None);
    assert_eq!(bench.event(EVENTS, 0), [0; 2], "it knows that");
    bench.post_receive(2, 0, DATA, 8, KEY);
    bench.post(2, 0, 0, INLINE | 8 << 56, &write(KEY));
    assert!(bench.command((0, 6), &[(8, 2), (12, 2), (16, 1)]).is_ok());
    bench.run();
    let flushed: Vec<_> = std::iter::from_fn(|| bench.poll(1)).collect();
    assert_eq!(flushed.len(), 2);
    assert!(flushed.iter().all(|entry| entry[0] & 0xff == 15));
}

#[test]
fn entries_that_make_no_sense_are_bad_requests() {
    let mut far = words(&[0, 8, KEY, DATA as u32, 0, 0]);
    far.extend(sge(DATA, 8, KEY));
    for (opcode, flags, body) in [
        (31, 0, vec![0; 24]),
        (4, 0, vec![0; 24]),
        (0, 7 << 56, far.clone()),
        (0, 3 << 56, far.clone()),
        (0, INLINE | 97 << 56, vec![0; 120]),
        (0, INLINE | 33 << 56, vec![0; 56]),
        (17, 0, vec![0; 56]),
    ] {
        let mut bench = Bench::connected(false);
        bench.post(2, 0, opcode, flags, &body);
        bench.run();
        let entry = bench.poll(1).unwrap();
        assert_eq!((entry[0] & 0xff, entry[1]), (8, 0), "{opcode}");
        assert_eq!(entry[0] >> 16, u32::from(opcode));
    }
}

#[test]
fn doorbells_that_make_no_sense_end_the_queue_pair() {
    for producer in [33u16, 0x8000, 0xffff] {
        let mut bench = Bench::connected(true);
        let bell = (2u64 << 32 | u64::from(producer)).to_le_bytes();
        bench.memory.write(RECORDS + 0x80, &bell);
        bench.registers.write(0x5f000, &bell);
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[0] & 0xff, 8, "{producer}");
    }
    // An entry of more blocks than were posted.
    let mut bench = Bench::connected(true);
    bench.post(2, 0, 0, 0, &[0; 24]);
    bench
        .memory
        .write(QPS + 0x4000, &(7u64 << 52).to_le_bytes());
    bench.run();
    assert_eq!(bench.poll(1).unwrap()[0] & 0xff, 8);
    // Of queues that are not there.
    let mut bench = Bench::connected(true);
    for number in [0u64, 77, 0xf_ffff] {
        let bell = (number << 32 | 5).to_le_bytes();
        for page in [0x1000, 0x61000, 0x79000] {
            bench.registers.write(page, &bell);
        }
    }
    bench.run();
}

#[test]
fn queues_whose_memory_is_gone_end_the_queue_pair() {
    let mut bench = Bench::connected(true);
    bench.post(2, 0, 0, INLINE | 8 << 56, &write(KEY));
    bench
        .memory
        .table
        .unmap(crate::testing::BASE, crate::testing::BYTES)
        .unwrap();
    bench.run();
    bench.memory.map();
    bench.run();
    let [answer, _] = bench.command((0, 17), &[(8, 2)]).unwrap();
    assert_eq!(answer >> 48 & 0xff, 6, "error");
}

#[test]
fn a_peer_that_never_answers_is_given_up_after_half_a_minute() {
    let mut bench = Bench::connected(true);
    bench.fabric.lose = true;
    bench.post(2, 0, 0, INLINE | 8 << 56, &write(KEY));
    bench.run();
    let mut waited = 0;
    while bench.poll(1).is_none() {
        bench.wait(Duration::from_millis(135));
        waited += 1;
        assert!(waited < 400);
    }
    assert!((200..300).contains(&waited), "{waited}");
}

#[test]
fn a_peer_that_is_late_is_found_by_asking_again() {
    let mut bench = Bench::connected(true);
    bench.fabric.lose = true;
    bench.post(2, 0, 0, SIGNALED | INLINE | 8 << 56, &write(KEY));
    bench.run();
    bench.wait(Duration::from_secs(1));
    bench.fabric.lose = false;
    bench.wait(Duration::from_secs(1));
    assert_eq!(bench.poll(1).unwrap()[0], 0);
}

#[test]
fn a_completion_queue_tells_of_the_next_entry_when_it_is_armed() {
    let mut bench = Bench::connected(true);
    let next = bench.post(2, 0, 0, SIGNALED | INLINE | 8 << 56, &write(KEY));
    bench.run();
    assert_eq!(bench.event(CEQ, 0), [0; 2], "not armed");
    bench.arm(1, false);
    bench.run();
    assert_eq!(
        bench.event(CEQ, 0),
        [OWNER | 1, 0],
        "what is there is told of at once"
    );
    // Programs ask before they take what an event told of.
    bench.arm(1, false);
    bench.run();
    assert_eq!(bench.event(CEQ, 1), [0; 2]);
    bench.poll(1).unwrap();
    let next = bench.post(2, next, 0, SIGNALED | INLINE | 8 << 56, &write(KEY));
    bench.run();
    assert_eq!(bench.event(CEQ, 1), [OWNER | 1, 0]);
    bench.poll(1).unwrap();
    // For entries whose sender asked for it only, and for failed ones.
    bench.arm(1, true);
    bench.run();
    let next = bench.post(2, next, 0, SIGNALED | INLINE | 8 << 56, &write(KEY));
    bench.run();
    assert_eq!(bench.event(CEQ, 2), [0; 2]);
    bench.post(2, next, 0, INLINE | 8 << 56, &write(99 << 8));
    bench.run();
    assert_eq!(bench.event(CEQ, 2), [OWNER | 1, 0]);
}

#[test]
fn a_reset_forgets_the_driver_and_the_next_one_begins_anew() {
    let mut bench = Bench::connected(true);
    bench.post(2, 0, 0, SIGNALED | INLINE | 8 << 56, &write(KEY));
    bench.device.reset();
    bench.run();
    assert_eq!(bench.poll(1), None);
    let memory = bench.memory.clone();
    let reader = memory.table.reader();
    assert!(bench.device.next_command(4, &reader.pin()).is_none());
    memory.write(COMMANDS, &[0; 0xc000]);
    assert!(!bench.device.running());
}
