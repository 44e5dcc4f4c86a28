//! Tests of the subnet.

use super::*;

/// Functions 0, 1, 2: InfiniBand in `blue`, on EMs 0, 1, 1; 3: InfiniBand in `red` on EM 1; 4 and
/// 5: Ethernet in `blue` on EMs 0 and 1; 6: virtio-net. All EMs are up.
fn subnet() -> Subnet {
    let f = |n: u32, kind: &str, network: &str| {
        format!(
            "[[em.function]]\nname = \"f{n}\"\nmac = \"02:00:00:00:00:{n:02x}\"\n\
             network = \"{network}\"\nkind = {kind}\n"
        )
    };
    let (ib, eth) = ("\"rdma\"\nlink_type = \"infiniband\"", "\"rdma\"");
    // the order in the file is the order of ids
    let text = format!(
        "[[network]]\nname = \"blue\"\n[[network]]\nname = \"red\"\n\
         [[em]]\nname = \"em0\"\n{}[[em]]\nname = \"em1\"\n{}{}{}\
         [[em]]\nname = \"em2\"\n{}[[em]]\nname = \"em3\"\n{}{}",
        f(0, ib, "blue"),
        f(1, ib, "blue"),
        f(2, ib, "blue"),
        f(3, ib, "red"),
        f(4, eth, "blue"),
        f(5, eth, "blue"),
        f(6, "\"virtio-net\"", "blue"),
    );
    let mut subnet = Subnet::new(&Config::parse("test", &text).unwrap());
    for em in 0..4 {
        subnet.em_up(em);
    }
    subnet
}

const NOWHERE: RdmaDestination = RdmaDestination {
    lid: 0,
    gid: None,
    mac: [0; 6],
};

fn at_lid(lid: u16) -> RdmaDestination {
    RdmaDestination { lid, ..NOWHERE }
}

fn at_gid(gid: &str, mac: u8) -> RdmaDestination {
    let gid: Ipv6Addr = gid.parse().unwrap();
    RdmaDestination {
        gid: Some(gid.octets()),
        mac: [2, 0, 0, 0, 0, mac],
        lid: 0,
    }
}

fn octets(gid: &str) -> [u8; 16] {
    gid.parse::<Ipv6Addr>().unwrap().octets()
}

#[test]
fn what_an_em_holds_is_as_if_it_had_been_asked_for_here() {
    let mut s = subnet();
    let old = |peer| RdmaPath {
        peer,
        generation: 40,
    };
    let gid = "::ffff:10.0.0.5";
    let orders = s.hold(5, &[(3, octets(gid)), (4, [0; 16])], &[old(4)]);
    assert!(orders.is_empty(), "{orders:?}");
    assert_eq!(s.gids(5), [octets(gid)]);
    assert_eq!(peer(&mut s, 4, at_gid(gid, 0xee)), Ok(5));
    let new = s.resolve(4, &at_gid(gid, 5)).unwrap();
    assert!(new.generation > 40, "{new:?}");
    let revoked = s.functions_gone(&[4]);
    let revoked: Vec<_> = revoked.into_iter().map(|order| order.request).collect();
    let revoke = |function, peer, generation| RdmaRequest::Revoke {
        function,
        peer,
        generation,
    };
    assert_eq!(revoked, [revoke(4, 5, new.generation), revoke(5, 4, 40)]);
    // What is not allowed any more ends, and what nobody has any more is gone.
    s.set_link(4, false);
    let orders = s.hold(5, &[], &[old(4), old(0), old(99)]);
    let orders: Vec<_> = orders.into_iter().map(|order| order.request).collect();
    assert_eq!(orders, [4, 0, 99].map(|peer| revoke(5, peer, 40)));
    assert!(s.gids(5).is_empty());
}

fn peer(s: &mut Subnet, function: u32, to: RdmaDestination) -> Result<u32, String> {
    s.resolve(function, &to).map(|path| path.peer)
}

#[test]
fn a_lid_leads_to_its_function_also_to_itself_and_answers_count_up() {
    let mut s = subnet();
    let first = s.resolve(0, &at_lid(2)).unwrap();
    let second = s.resolve(1, &at_lid(1)).unwrap();
    assert_eq!((first.peer, second.peer), (1, 0));
    assert!(second.generation > first.generation);
    assert_eq!(peer(&mut s, 0, at_lid(1)), Ok(0));
}

#[test]
fn an_infiniband_port_has_the_link_local_gid_of_its_guid() {
    let mut s = subnet();
    let own = "fe80::200:ff:fe00:1";
    assert_eq!(peer(&mut s, 0, at_gid(own, 0xee)), Ok(1));
    assert_eq!(s.gids(1), [octets(own)]);
    let both = |lid| RdmaDestination {
        lid,
        ..at_gid(own, 0)
    };
    assert_eq!(peer(&mut s, 0, both(2)), Ok(1));
    assert!(peer(&mut s, 0, both(3)).is_err(), "the GID is another's");
}

#[test]
fn networks_and_link_types_do_not_reach_each_other() {
    let mut s = subnet();
    assert_eq!(
        peer(&mut s, 0, at_lid(4)).unwrap_err(),
        "network \"blue\" has no infiniband port with LID 4"
    );
    let sentence = "network \"blue\" has no infiniband port with MAC 02:00:00:00:00:05";
    let mac = RdmaDestination {
        mac: [2, 0, 0, 0, 0, 5],
        ..NOWHERE
    };
    assert_eq!(peer(&mut s, 0, mac).unwrap_err(), sentence);
    assert_eq!(peer(&mut s, 4, mac), Ok(5));
    let virtio = RdmaDestination {
        mac: [2, 0, 0, 0, 0, 6],
        ..NOWHERE
    };
    assert!(peer(&mut s, 4, virtio).is_err());
    assert_eq!(
        peer(&mut s, 6, virtio).unwrap_err(),
        "function 6 is no RDMA function"
    );
}

#[test]
fn a_gid_leads_where_it_was_set_until_it_is_removed() {
    let mut s = subnet();
    let gid = "::ffff:10.0.0.5";
    assert!(peer(&mut s, 4, at_gid(gid, 0xee)).is_err());
    assert_eq!(
        peer(&mut s, 4, at_gid(gid, 5)),
        Ok(5),
        "the MAC is known although the GID is not"
    );
    s.set_gid(5, 3, octets(gid)).unwrap();
    assert_eq!(peer(&mut s, 4, at_gid(gid, 0xee)), Ok(5));
    assert_eq!(s.gids(5), [octets(gid)]);
    s.set_gid(4, 0, octets(gid)).unwrap();
    assert_eq!(peer(&mut s, 4, at_gid(gid, 5)), Ok(5));
    assert_eq!(peer(&mut s, 4, at_gid(gid, 4)), Ok(4));
    assert!(peer(&mut s, 4, at_gid(gid, 0xee)).is_err(), "two have it");
    s.set_gid(5, 3, [0; 16]).unwrap();
    assert_eq!(peer(&mut s, 4, at_gid(gid, 0xee)), Ok(4));
    let e = s.set_gid(5, 256, octets(gid)).unwrap_err();
    assert_eq!(e, "GID index 256 is out of range; a table has 256 entries");
    assert!(s.set_gid(6, 0, octets(gid)).is_err());
}

fn revocations(orders: &[Order]) -> Vec<(usize, u32, u32, u64)> {
    orders
        .iter()
        .map(|order| match order.request {
            RdmaRequest::Revoke {
                function,
                peer,
                generation,
            } => (order.em, function, peer, generation),
            _ => panic!("{order:?}"),
        })
        .collect()
}

fn link(order: Option<Order>) -> Option<(usize, u32, bool)> {
    let order = order?;
    match order.request {
        RdmaRequest::SetLink { function, up } => Some((order.em, function, up)),
        _ => None,
    }
}

#[test]
fn paths_end_with_the_em_of_the_peer_and_its_gids_are_forgotten() {
    let mut s = subnet();
    s.set_gid(5, 0, octets("fd00::5")).unwrap();
    s.resolve(0, &at_lid(2)).unwrap();
    let last = s.resolve(0, &at_lid(2)).unwrap().generation;
    s.resolve(1, &at_lid(1)).unwrap();
    s.resolve(0, &at_lid(1)).unwrap();
    let eth = s.resolve(4, &at_gid("fd00::5", 0)).unwrap().generation;

    assert_eq!(revocations(&s.em_down(1)), [(0, 0, 1, last)]);
    assert_eq!(
        peer(&mut s, 0, at_lid(2)).unwrap_err(),
        "the EM of f1 is away"
    );
    assert!(s.em_down(1).is_empty(), "told once");
    assert_eq!(revocations(&s.em_down(3)), [(2, 4, 5, eth)]);
    s.em_up(3);
    assert!(peer(&mut s, 4, at_gid("fd00::5", 0xee)).is_err());
}

#[test]
fn paths_end_both_ways_when_the_administrator_takes_the_link_down() {
    let mut s = subnet();
    let there = s.resolve(0, &at_lid(2)).unwrap().generation;
    let back = s.resolve(1, &at_lid(1)).unwrap().generation;
    s.resolve(2, &at_lid(2)).unwrap();
    let mut orders = s.set_link(0, false);
    assert_eq!(link(orders.pop()), Some((0, 0, false)));
    assert_eq!(revocations(&orders), [(0, 0, 1, there), (1, 1, 0, back)]);
    assert!(s.set_link(0, false).is_empty(), "it is told once");
    for (function, lid) in [(0, 2), (1, 1)] {
        let e = peer(&mut s, function, at_lid(lid)).unwrap_err();
        assert_eq!(e, "the link of f0 is down");
    }
    assert_eq!(peer(&mut s, 2, at_lid(2)), Ok(1));
    assert_eq!(link(s.set_link(0, true).pop()), Some((0, 0, true)));
    assert_eq!(peer(&mut s, 1, at_lid(1)), Ok(0));
}

#[test]
fn neighbours_are_the_ems_of_ports_that_may_talk() {
    let mut s = subnet();
    assert_eq!(s.neighbours(0), [1].into());
    assert_eq!(s.neighbours(1), [0, 1].into(), "f2 is on the same EM");
    assert_eq!(s.neighbours(3), [].into());
    assert_eq!(s.neighbours(6), [].into());
    s.em_down(0);
    assert_eq!(s.neighbours(1), [1].into());
}
