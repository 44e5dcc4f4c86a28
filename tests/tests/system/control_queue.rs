//! Commands of the control queue: what a Linux and a Windows driver send, and what none should.

use crate::fixture::{Pair, exchange, flow, works};
use crate::recovery::replace;
use distdpu_tests::dpu::{Net, mac};
use distdpu_tests::packet::Packet;
use distdpu_tests::time::{QUIET, SOON};
use distdpu_tests::virtio_net::control::{
    ALLMULTI, ANNOUNCE_ACK, COAL_RX_SET, COAL_VQ_GET, ERR, MAC_ADDR_SET, MAC_TABLE_SET, MQ_SET,
    OFFLOADS_SET, OK, PROMISC, RSS_CONFIG, STATS_GET, UNANSWERED, VLAN_ADD, VLAN_DEL,
};
use distdpu_tests::virtio_net::features;
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
fn what_newer_drivers_ask_for_is_done() {
    let mut pair = pair_of_four();
    let more = features::CTRL_GUEST_OFFLOADS
        | features::NOTF_COAL
        | features::VQ_NOTF_COAL
        | features::DEVICE_STATS
        | features::RSS
        | features::GUEST_ANNOUNCE;
    let setup = Setup {
        features: features::PACKED | more,
        pairs: 4,
        ..Setup::default()
    };
    pair.start(setup, setup);
    let Pair { a, b, dpu } = &mut pair;
    let mut rss = [0; 24];
    b.read_device(0, &mut rss).unwrap();
    assert_eq!(
        rss[17..],
        [40, 128, 0, 0xff, 1, 0, 0],
        "key, table and types"
    );
    // Everything to pair 2, whatever its hash.
    let mut command = vec![0xff, 1, 0, 0, 0, 0, 2, 0, 2, 0, 4, 0, 40];
    command.extend([0x6d; 40]);
    assert_eq!(b.control(RSS_CONFIG, &command).unwrap(), OK);
    for port in 0..8 {
        let packet = flow(0, 1).port(1000 + port).frame(200, u64::from(port));
        a.send(&packet).unwrap();
        let (pair, got) = b.receive_within(SOON).unwrap();
        assert_eq!((pair, got.frame), (2, packet.frame));
    }
    assert_eq!(b.control(OFFLOADS_SET, &[0; 8]).unwrap(), OK);
    let unfinished = flow(0, 1).partial(1, &[7; 100]);
    a.send(&unfinished).unwrap();
    assert_eq!(b.receive().unwrap().header.flags & 1, 0, "finished");
    assert_eq!(
        b.control(COAL_RX_SET, &[4, 0, 0, 0, 100, 0, 0, 0]).unwrap(),
        OK
    );
    assert_eq!(
        b.ask(COAL_VQ_GET, &[4, 0, 0, 0], 8).unwrap(),
        [OK, 4, 0, 0, 0, 100, 0, 0, 0]
    );
    a.send(&flow(0, 1).frame(100, 1)).unwrap();
    b.receive().unwrap();
    let ask = [&[4, 0, 0, 0, 0, 0, 0, 0][..], &1u64.to_le_bytes()].concat();
    let got = b.ask(STATS_GET, &ask, 56).unwrap();
    assert_eq!((got[0], got[3], got[17]), (OK, 4, 10), "frames on queue 4");
    // All of it is there for the next EM too.
    replace(dpu, 1);
    for port in 0..8 {
        a.send(&flow(0, 1).port(port).partial(1, &[7; 100]))
            .unwrap();
        let (pair, got) = b.receive_within(SOON).unwrap();
        assert_eq!((pair, got.header.flags & 1), (2, 0));
    }
    assert_eq!(b.ask(COAL_VQ_GET, &[4, 0, 0, 0], 8).unwrap()[5], 100);
    assert_eq!(b.control(ANNOUNCE_ACK, &[]).unwrap(), OK);
    assert_eq!(b.set_pairs(4).unwrap(), OK);
    b.control(OFFLOADS_SET, &features::GUEST_CSUM.to_le_bytes())
        .unwrap();
    works(a, b);
}

#[test]
fn thirty_two_pairs_work_with_fewer_vectors_than_queues_and_without_any() {
    let net = Net {
        pairs: 32,
        queue_size: 64,
        ..Net::default()
    };
    let guest = Guest {
        memory: 192 << 20,
        ..Guest::default()
    };
    let mut pair = Pair::with(net, guest);
    for interrupts in [true, false] {
        for features in [features::LINUX, features::PACKED] {
            let setup = Setup {
                features,
                pairs: 32,
                queue_size: 64,
                receive_buffers: 16,
                interrupts,
                ..Setup::default()
            };
            pair.a.start(setup).unwrap();
            assert!(pair.a.pci.msix.vectors <= 64, "as many as Windows takes");
            assert_eq!(pair.a.receive_rings.len(), 32);
            pair.b.start(Setup::default()).unwrap();
            let mut used = std::collections::BTreeSet::new();
            for port in 0..200 {
                let packet = flow(1, 0).port(port).frame(100, u64::from(port));
                pair.b.send(&packet).unwrap();
                let (queue, got) = pair.a.receive_within(SOON).unwrap();
                assert_eq!(got.frame, packet.frame);
                used.insert(queue);
            }
            assert!(used.len() > 24, "{used:?}");
            for queue in 0..32 {
                let packet = flow(0, 1).frame(100, queue as u64);
                pair.a.send_on(queue, &packet).unwrap();
                assert_eq!(pair.b.receive().unwrap().frame, packet.frame);
            }
        }
    }
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
