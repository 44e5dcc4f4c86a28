//! The window in configuration space onto the BARs.

use super::harness::*;

fn point(raw: &mut Raw, bar: u8, offset: u32, len: u32) {
    raw.write(7, WINDOW, &[bar]);
    raw.write(7, WINDOW + 4, &offset.to_le_bytes());
    raw.write(7, WINDOW + 8, &len.to_le_bytes());
}

#[test]
fn an_access_of_its_data_is_an_access_of_the_bar() {
    let served = serve();
    let mut raw = served.client();
    raw.write(0, 0x100, &[1, 2, 3, 4]);
    for (len, want) in [(4, [1, 2, 3, 4]), (2, [1, 2, 3, 4]), (1, [1, 2, 3, 4])] {
        point(&mut raw, 0, 0x100, len);
        assert_eq!(raw.read(7, WINDOW + 12, 4), want, "{len} bytes");
    }
    point(&mut raw, 0, 0x104, 2);
    raw.write(7, WINDOW + 12, &[8, 9]);
    assert_eq!(raw.read(0, 0x104, 4), [8, 9, 0, 0]);
    assert_eq!(raw.read(7, WINDOW + 4, 4), 0x104u32.to_le_bytes());
}

#[test]
fn control_registers_are_behind_it_too() {
    let served = serve();
    let mut raw = served.client();
    point(&mut raw, 0, CONTROL_AT as u32, 4);
    assert_eq!(raw.read(7, WINDOW + 12, 4), [0xc0; 4]);
}

#[test]
fn places_that_do_not_exist_read_as_ones_and_take_nothing() {
    let served = serve();
    let mut raw = served.client();
    for (bar, offset) in [(0, BAR0 as u32), (0, u32::MAX - 3), (1, 0)] {
        point(&mut raw, bar, offset, 4);
        raw.write(7, WINDOW + 12, &[1; 4]);
        assert_eq!(raw.read(7, WINDOW + 12, 4), [0xff; 4], "{bar} {offset:#x}");
    }
    // Config space itself and odd accesses are not behind it: the data register is plain memory then.
    for (bar, offset, len) in [(7, 0, 4), (0, 2, 4), (0, 0, 3), (0, 0, 0), (0, 0, u32::MAX)] {
        point(&mut raw, bar, offset, len);
        raw.write(7, WINDOW + 12, &[5; 4]);
        assert_eq!(raw.read(7, WINDOW + 12, 4), [5; 4], "{bar} {offset} {len}");
    }
    assert_eq!(raw.read(0, 0, 4), [0; 4]);
}

#[test]
fn a_reset_clears_it() {
    let served = serve();
    let mut raw = served.client();
    point(&mut raw, 0, 0x100, 4);
    assert_eq!(raw.call(13, &[]).error, None);
    assert_eq!(raw.read(7, WINDOW + 4, 8), [0; 8]);
}
