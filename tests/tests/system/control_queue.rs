//! Commands of the control queue: what a Linux and a Windows driver send, and what none should.

use crate::fixture::{Pair, exchange, flow};
use distdpu_tests::dpu::{Net, mac};
use distdpu_tests::packet::Packet;
use distdpu_tests::time::QUIET;
use distdpu_tests::virtio_net::control::{
    ALLMULTI, ERR, MAC_ADDR_SET, MAC_TABLE_SET, MQ_SET, OK, PROMISC, UNANSWERED, VLAN_ADD, VLAN_DEL,
};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};

fn pair_of_four() -> Pair {
    let net = Net {
        pairs: 4,
        ..Net::default()
    };
    let mut pair = Pair::with(net, Guest::default());
    pair.start(Setup::default(), Setup::default());
    pair
}

fn to(destination: [u8; 6], seed: u64) -> Packet {
    let mut flow = flow(0, 1);
    flow.to = destination;
    flow.frame(100, seed)
}

/// `packet` is not delivered: the marker that follows it is the next to arrive.
fn is_filtered(a: &mut VirtioNet, b: &mut VirtioNet, packet: &Packet) {
    a.send(packet).unwrap();
    exchange(a, b, &to([0xff; 6], 99));
}

#[test]
fn the_queue_answers_right_after_driver_ok() {
    let mut pair = pair_of_four();
    for _ in 0..20 {
        pair.a.start(Setup::default()).unwrap();
        assert_eq!(pair.a.set_pairs(1).unwrap(), OK);
    }
}

#[test]
fn queue_pairs_are_accepted_from_1_to_the_maximum_only() {
    let mut pair = pair_of_four();
    for (pairs, answer) in [(4, OK), (0, ERR), (5, ERR), (0xffff, ERR), (2, OK), (1, OK)] {
        assert_eq!(pair.a.set_pairs(pairs).unwrap(), answer, "{pairs} pairs");
    }
    pair.works();
}

#[test]
fn receive_modes_and_tables_filter_what_arrives() {
    let mut pair = pair_of_four();
    let Pair { a, b, .. } = &mut pair;
    let stranger = [2, 0, 0, 0, 9, 9];
    let group = [0x01, 0, 0x5e, 0, 0, 7];
    assert_eq!(b.control(PROMISC, &[1]).unwrap(), OK);
    exchange(a, b, &to(stranger, 1));
    exchange(a, b, &to(group, 2));
    assert_eq!(b.control(PROMISC, &[0]).unwrap(), OK);
    assert_eq!(b.control(ALLMULTI, &[0]).unwrap(), OK);
    is_filtered(a, b, &to(stranger, 3));
    is_filtered(a, b, &to(group, 4));
    let table = [
        &1u32.to_le_bytes()[..],
        &stranger,
        &1u32.to_le_bytes(),
        &group,
    ]
    .concat();
    assert_eq!(b.control(MAC_TABLE_SET, &table).unwrap(), OK);
    exchange(a, b, &to(stranger, 5));
    exchange(a, b, &to(group, 6));
    let empty = [0; 8];
    assert_eq!(b.control(MAC_TABLE_SET, &empty).unwrap(), OK);
    is_filtered(a, b, &to(group, 7));
    assert_eq!(b.control(ALLMULTI, &[1]).unwrap(), OK);
    exchange(a, b, &to(group, 8));
    is_filtered(a, b, &to(stranger, 9));
}

#[test]
fn the_mac_address_can_be_changed_and_a_reset_brings_the_old_one_back() {
    let mut pair = pair_of_four();
    let Pair { a, b, .. } = &mut pair;
    let new = [2, 0, 0, 0, 7, 7];
    assert_eq!(b.control(PROMISC, &[0]).unwrap(), OK);
    assert_eq!(b.control(MAC_ADDR_SET, &new).unwrap(), OK);
    exchange(a, b, &to(new, 1));
    is_filtered(a, b, &to(mac(1), 2));
    b.start(Setup::default()).unwrap();
    exchange(a, b, &to(mac(1), 3));
}

#[test]
fn vlans_can_be_added_and_removed() {
    let mut pair = pair_of_four();
    let Pair { a, b, .. } = &mut pair;
    let mut tagged = flow(0, 1);
    tagged.vlan = Some(7);
    assert_eq!(b.control(VLAN_ADD, &7u16.to_le_bytes()).unwrap(), OK);
    exchange(a, b, &tagged.frame(200, 1));
    assert_eq!(b.control(VLAN_DEL, &7u16.to_le_bytes()).unwrap(), OK);
    is_filtered(a, b, &tagged.frame(200, 2));
    exchange(a, b, &flow(0, 1).frame(200, 3));
    assert_eq!(b.control(VLAN_ADD, &4096u16.to_le_bytes()).unwrap(), ERR);
}

#[test]
fn what_makes_no_sense_is_answered_with_an_error_and_the_queue_lives_on() {
    let mut pair = pair_of_four();
    let a = &mut pair.a;
    let zeros = vec![0; 3000];
    let too_many = [&1000u32.to_le_bytes()[..], &zeros[..600]].concat();
    let cases: &[(&str, (u8, u8), &[u8])] = &[
        ("an unknown class", (77, 0), &[1]),
        ("an unknown command", (4, 9), &[1, 0]),
        ("no data for the pairs", MQ_SET, &[]),
        ("one byte for the pairs", MQ_SET, &[1]),
        ("no byte for the mode", PROMISC, &[]),
        ("three bytes of a MAC address", MAC_ADDR_SET, &[2, 0, 0]),
        ("a multicast MAC address", MAC_ADDR_SET, &[1, 0, 0, 0, 0, 1]),
        ("a table cut short", MAC_TABLE_SET, &[1, 0, 0, 0, 2]),
        (
            "a table that claims more than it has",
            MAC_TABLE_SET,
            &too_many,
        ),
        ("a table that claims 2^32 - 1", MAC_TABLE_SET, &[0xff; 8]),
        ("a VLAN of one byte", VLAN_ADD, &[7]),
    ];
    for (what, command, data) in cases {
        assert_eq!(a.control(*command, data).unwrap(), ERR, "{what}");
    }
    let long = a.control(PROMISC, &zeros).unwrap();
    assert!(
        long == OK || long == ERR,
        "3000 bytes where one is due: {long}"
    );
    assert_eq!(a.control(PROMISC, &[0]).unwrap(), OK);
    pair.works();
}

#[test]
fn chains_without_a_header_or_without_room_for_the_answer_come_back() {
    let mut pair = pair_of_four();
    let a = &mut pair.a;
    assert_eq!(a.control_raw(&[&[0, 0], &[1]], 0).unwrap(), UNANSWERED);
    let answer = a.control_raw(&[&[4]], 1).unwrap();
    assert!(answer == ERR || answer == UNANSWERED, "{answer}");
    let answer = a.control_raw(&[], 1).unwrap();
    assert!(answer == ERR || answer == UNANSWERED, "{answer}");
    // A header in pieces is a header (virtio 1.3 §2.7.4.2).
    assert_eq!(a.control_raw(&[&[0], &[0], &[1]], 1).unwrap(), OK);
    assert_eq!(a.control_raw(&[&[0], &[0], &[0]], 64).unwrap(), OK);
    pair.works();
}

#[test]
fn after_a_reset_a_driver_without_multiqueue_has_one_pair() {
    let mut pair = pair_of_four();
    let four = Setup {
        pairs: 4,
        ..Setup::default()
    };
    pair.start(four, four);
    let single = Setup {
        features: distdpu_tests::virtio_net::features::PLAIN,
        ..Setup::default()
    };
    pair.start(single, single);
    pair.works();
    pair.start(four, four);
    pair.works();
    assert!(pair.b.receive_within(QUIET).unwrap_err().is_timeout());
}
