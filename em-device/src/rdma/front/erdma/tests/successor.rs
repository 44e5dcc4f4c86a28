//! A process that dies, and the one that takes its place.

use super::bench::*;

const KEY: u32 = 7 << 8;
const SIGNALED: u64 = 1 << 22;
const INLINE: u64 = 1 << 25;

fn write(at: u64, value: u8) -> Vec<u8> {
    let mut body = words(&[0, 4, KEY, at as u32, (at >> 32) as u32, 0]);
    body.extend([value; 4]);
    body
}

#[test]
fn connections_regions_and_positions_go_on_in_another_process() {
    for program in [true, false] {
        let mut bench = Bench::kept();
        bench.connect_all(program);
        bench.post_receive(3, 0, DATA + 0x5000, 8, KEY);
        let mut index = bench.post(2, 0, 0, SIGNALED | INLINE | 4 << 56, &write(DATA, 1));
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[1], 0);
        bench.arm(1, false);
        bench.run();
        bench.die();
        bench.run();
        assert_eq!(bench.event(CEQ, 0), [0; 2], "there is nothing new");
        assert_eq!(bench.poll(1), None, "nothing is completed twice");
        for value in 2..60 {
            let at = DATA + 4 * u64::from(value);
            let first = index;
            index = bench.post(2, index, 0, SIGNALED | INLINE | 4 << 56, &write(at, value));
            bench.run();
            let entry = bench.poll(1).unwrap();
            assert_eq!((entry[0], entry[1]), (0, u32::from(first)));
            assert_eq!(bench.memory.read(at, 4), [value; 4]);
            assert_eq!(bench.event(CEQ, 0), [1 << 31 | 1, 0], "it is armed");
            assert_eq!(bench.event(CEQ, 1), [0; 2], "once");
            if value % 20 == 0 {
                bench.die();
                bench.run();
            }
        }
        let mut body = words(&[0, 3]);
        body.extend(b"abc");
        bench.post(2, index, 2, INLINE | 3 << 56, &body);
        bench.run();
        assert_eq!(bench.poll(1).unwrap()[..3], [4 << 16 | 1 << 8, 0, 3]);
        assert_eq!(bench.memory.read(DATA + 0x5000, 3), b"abc");
    }
}

#[test]
fn commands_go_on_where_they_were_and_objects_are_what_they_were() {
    let mut bench = Bench::kept();
    bench.connect_all(true);
    let gid = [(8, 1), (12, 0x80fe), (24, 0x0100_0000)];
    bench.command((0, 14), &gid).unwrap();
    while bench.device.take_gid_change().is_some() {}
    bench.command((0, 9), &[(8, 7)]).unwrap();
    bench.die();
    assert_eq!(
        bench.device.take_gid_change().map(|(index, _)| index),
        Some(1)
    );
    assert!(bench.device.running());
    assert!(bench.register(7, 4).is_ok(), "it was gone");
    assert_eq!(bench.register(7, 4), Err(1));
    assert_eq!(bench.create_cq(1), Err(1), "it is there");
    let [answer, _] = bench.command((0, 17), &[(8, 2)]).unwrap();
    assert_eq!(answer >> 48, 3);
    bench.command((0, 2), &[(8, 2)]).unwrap();
    bench.die();
    assert_eq!(bench.command((0, 17), &[(8, 2)]), Err(1));
    assert!(bench.create_qp(2, true).is_ok());
}

#[test]
fn a_command_that_was_executed_and_not_completed_is_not_executed_again() {
    let mut bench = Bench::kept();
    bench.connect_all(true);
    // A process that dies between the record and the completion.
    bench.half = true;
    bench.raw_command((0, 2), &[(8, 3)]);
    bench.half = false;
    bench.die();
    assert_eq!(
        bench.finish(),
        Ok([0; 2]),
        "it is gone, and that is no error"
    );
    assert_eq!(bench.command((0, 2), &[(8, 3)]), Err(1));
}

#[test]
fn after_a_reset_there_is_nothing_to_take_over() {
    let mut bench = Bench::kept();
    bench.connect_all(true);
    bench.registers.write(0x10, &[1, 0, 0, 0]);
    bench.device.reset();
    bench.die();
    assert!(!bench.device.running());
    bench.memory.write(COMMANDS, &[0; 0xb000]);
    bench.begin_again();
    bench.connect_all(true);
    bench.post(2, 0, 0, SIGNALED | INLINE | 4 << 56, &write(DATA, 9));
    bench.run();
    bench.die();
    bench.run();
    assert_eq!(bench.memory.read(DATA, 4), [9; 4]);
}
