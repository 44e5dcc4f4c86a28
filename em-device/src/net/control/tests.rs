use super::*;
use crate::net::features::OFFERED;

const OWN: Mac = [2, 0, 0, 0, 0, 1];

fn settings() -> Settings {
    Settings::new(OWN, OFFERED, 4)
}

#[test]
fn commands_are_answered_ok_only_if_they_make_sense() {
    let long = [&[1, 0, 100, 0, 0, 0][..], &[2; 600], &[0; 4]].concat();
    let cases: &[(&str, &[u8], u8)] = &[
        ("promiscuous on", &[0, 0, 1], OK),
        ("promiscuous without a byte", &[0, 0], ERR),
        ("all multicast off", &[0, 1, 0], OK),
        ("an unknown receive mode", &[0, 9, 1], ERR),
        ("empty tables", &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], OK),
        ("one table", &[1, 0, 0, 0, 0, 0], ERR),
        (
            "a table cut short",
            &[1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            ERR,
        ),
        (
            "a table of 2^32 - 1",
            &[1, 0, 255, 255, 255, 255, 0, 0, 0, 0],
            ERR,
        ),
        ("a table of 100", &long, OK),
        ("an address", &[1, 1, 2, 0, 0, 0, 0, 7], OK),
        ("a multicast address", &[1, 1, 1, 0, 0, 0, 0, 7], ERR),
        ("the null address", &[1, 1, 0, 0, 0, 0, 0, 0], ERR),
        ("a short address", &[1, 1, 2, 0, 0], ERR),
        ("VLAN 7", &[2, 0, 7, 0], OK),
        ("VLAN 7 gone", &[2, 1, 7, 0], OK),
        ("VLAN 4096", &[2, 0, 0, 16], ERR),
        ("VLAN of one byte", &[2, 0, 7], ERR),
        ("1 pair", &[4, 0, 1, 0], OK),
        ("4 pairs", &[4, 0, 4, 0], OK),
        ("0 pairs", &[4, 0, 0, 0], ERR),
        ("5 pairs", &[4, 0, 5, 0], ERR),
        ("pairs of one byte", &[4, 0, 1], ERR),
        ("an announcement", &[3, 0], OK),
        ("an unknown announcement", &[3, 1], ERR),
        ("no offloads", &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], OK),
        (
            "an offload that is none",
            &[5, 0, 0, 4, 0, 0, 0, 0, 0, 0],
            ERR,
        ),
        ("offloads cut short", &[5, 0, 0, 0], ERR),
        (
            "coalescing of transmit queues",
            &[6, 0, 8, 0, 0, 0, 50, 0, 0, 0],
            OK,
        ),
        (
            "coalescing of receive queues",
            &[6, 1, 8, 0, 0, 0, 50, 0, 0, 0],
            OK,
        ),
        ("coalescing cut short", &[6, 1, 8, 0, 0, 0, 50], ERR),
        (
            "coalescing of queue 7",
            &[6, 2, 7, 0, 0, 0, 8, 0, 0, 0, 50, 0, 0, 0],
            OK,
        ),
        (
            "coalescing of the control queue",
            &[6, 2, 8, 0, 0, 0, 8, 0, 0, 0, 50, 0, 0, 0],
            ERR,
        ),
        ("the coalescing of queue 7", &[6, 3, 7, 0, 0, 0], OK),
        ("the coalescing of queue 8", &[6, 3, 8, 0, 0, 0], ERR),
        ("unknown coalescing", &[6, 4, 0, 0, 0, 0], ERR),
        ("kinds of statistics", &[8, 0], OK),
        ("statistics of nothing", &[8, 1], ERR),
        ("unknown statistics", &[8, 2], ERR),
        ("an unknown class", &[77, 0, 1], ERR),
        ("no command", &[4], ERR),
        ("nothing", &[], ERR),
    ];
    for (name, command, want) in cases {
        assert_eq!(settings().plain(command), *want, "{name}");
    }
}

#[test]
fn a_refused_command_changes_nothing() {
    let mut s = settings();
    assert_eq!(s.plain(&[4, 0, 3, 0]), OK);
    assert_eq!(s.plain(&[4, 0, 9, 0]), ERR);
    assert_eq!(s.pairs, 3);
}

#[test]
fn commands_take_effect() {
    let mut s = settings();
    let other = [2, 0, 0, 0, 0, 9];
    let frame = [&other[..], &[0; 12]].concat();
    assert!(s.filter.wants(&frame));
    s.plain(&[0, 0, 0]);
    assert!(!s.filter.wants(&frame));
    let tables = [&[1, 0, 1, 0, 0, 0][..], &other, &[0; 4]].concat();
    s.plain(&tables);
    assert!(s.filter.wants(&frame));
    s.plain(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(!s.filter.wants(&frame));
    let many = [&[1, 0, 65, 0, 0, 0][..], &[2; 390], &[0; 4]].concat();
    s.plain(&many);
    assert!(
        s.filter.wants(&frame),
        "a table that is too long lets all in"
    );
}

#[test]
fn what_was_not_negotiated_is_refused() {
    let mut s = Settings::new(OWN, features::CTRL_VQ, 4);
    for command in [
        &[0, 0, 1][..],
        &[1, 1, 2, 0, 0, 0, 0, 7],
        &[2, 0, 7, 0],
        &[4, 0, 1, 0],
    ] {
        assert_eq!(s.plain(command), ERR, "{command:?}");
    }
}

/// Types, mask, unclassified, table, transmit queues, key.
fn rss(types: u32, unclassified: u16, table: &[u16], transmit: u16, key: u8) -> Vec<u8> {
    let mut command = vec![4, 1];
    command.extend(types.to_le_bytes());
    command.extend((table.len() as u16).wrapping_sub(1).to_le_bytes());
    command.extend(unclassified.to_le_bytes());
    command.extend(table.iter().flat_map(|entry| entry.to_le_bytes()));
    command.extend(transmit.to_le_bytes());
    command.push(key);
    command.extend((0..key).map(|n| n ^ 0x5a));
    command
}

#[test]
fn scaling_is_refused_unless_all_of_it_makes_sense() {
    let cases: &[(&str, Vec<u8>, u8)] = &[
        ("all types", rss(0x1ff, 0, &[0, 1, 2, 3], 4, 40), OK),
        ("no type, no key", rss(0, 3, &[0], 1, 0), OK),
        ("a full table", rss(1, 0, &[1; 128], 4, 40), OK),
        ("an unknown type", rss(0x200, 0, &[0], 1, 40), ERR),
        ("a table of three", rss(1, 0, &[0, 1, 2], 4, 40), ERR),
        ("a table that is too long", rss(1, 0, &[0; 256], 4, 40), ERR),
        ("a pair that does not exist", rss(1, 0, &[0, 4], 4, 40), ERR),
        (
            "an unclassified pair that does not exist",
            rss(1, 4, &[0, 1], 4, 40),
            ERR,
        ),
        ("no transmit queue", rss(1, 0, &[0], 0, 40), ERR),
        ("too many transmit queues", rss(1, 0, &[0], 5, 40), ERR),
        ("a long key", rss(1, 0, &[0], 1, 41), ERR),
    ];
    for (name, command, want) in cases {
        assert_eq!(settings().plain(command), *want, "{name}");
    }
    let whole = rss(0x1ff, 0, &[0, 1, 2, 3], 4, 40);
    for len in 2..whole.len() {
        assert_eq!(settings().plain(&whole[..len]), ERR, "{len} bytes");
    }
    let too_long = [&whole[..], &[0; 512]].concat();
    assert_eq!(settings().plain(&too_long), ERR, "it could not be kept");
    let mut report = vec![4, 2, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2];
    assert_eq!(settings().plain(&report), OK);
    report.pop();
    assert_eq!(settings().plain(&report), ERR);
}

#[test]
fn scaling_chooses_pairs_from_the_table_until_the_device_may_again() {
    let mut s = settings();
    assert_eq!(s.plain(&rss(0x1ff, 2, &[0, 3, 1, 3], 1, 40)), OK);
    assert_eq!(s.pairs, 4);
    let indirection = s.indirection.clone().unwrap();
    let pair = |value, report| indirection.pair(crate::net::hash::Hash { value, report });
    assert_eq!([0, 1, 2, 3, 5].map(|value| pair(value, 1)), [0, 3, 1, 3, 3]);
    assert_eq!(pair(1, 0), 2, "without a hash");
    assert_eq!(s.plain(&[4, 0, 2, 0]), OK);
    assert!(s.indirection.is_none());
}

#[test]
fn coalescing_of_one_queue_and_of_all_is_read_back() {
    let mut s = settings();
    let read = |s: &mut Settings, queue: u8| {
        let mut result = Vec::new();
        let answer = s.execute(&[6, 3, queue, 0, 0, 0], &NoSource, &mut result);
        assert_eq!(answer, OK);
        (result[0], result[4])
    };
    assert_eq!(read(&mut s, 0), (0, 0));
    s.plain(&[6, 1, 8, 0, 0, 0, 50, 0, 0, 0]);
    s.plain(&[6, 0, 4, 0, 0, 0, 20, 0, 0, 0]);
    s.plain(&[6, 2, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(
        [0, 1, 2, 3].map(|q| read(&mut s, q)),
        [(8, 50), (4, 20), (1, 2), (4, 20)]
    );
    s.coalescing.forget(2);
    assert_eq!(read(&mut s, 2), (8, 50), "a reset of the queue");
    s.plain(&[6, 2, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
    s.plain(&[6, 1, 9, 0, 0, 0, 60, 0, 0, 0]);
    assert_eq!(read(&mut s, 2), (9, 60), "for all also means this one");
}

#[test]
fn offloads_are_those_that_were_negotiated() {
    let mut s = Settings::new(OWN, OFFERED & !features::GUEST_TSO6, 4);
    let set =
        |s: &mut Settings, offloads: u64| s.plain(&[&[5, 0][..], &offloads.to_le_bytes()].concat());
    assert_eq!(s.offloads, features::GUEST_OFFLOADS & !features::GUEST_TSO6);
    assert_eq!(set(&mut s, features::GUEST_CSUM), OK);
    assert_eq!(s.offloads, features::GUEST_CSUM);
    assert_eq!(set(&mut s, features::GUEST_TSO6), ERR);
    assert_eq!(s.offloads, features::GUEST_CSUM);
}
