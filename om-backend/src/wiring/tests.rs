use super::*;

/// EM by EM, the attachments of its functions, which are virtio network devices unless the lines say
/// their kind.
fn wiring(ems: &[&[&str]]) -> Wiring {
    let mut text = String::from("[[network]]\nname = \"blue\"\n[[network]]\nname = \"red\"\n");
    let mut n = 0;
    for (em, functions) in ems.iter().enumerate() {
        text += &format!("[[em]]\nname = \"em{em}\"\n");
        for attachment in *functions {
            let kind = match attachment.contains("kind =") {
                true => "",
                false => "kind = \"virtio-net\"\n",
            };
            text += &format!(
                "[[em.function]]\nname = \"net{n}\"\n{kind}\
                 mac = \"02:00:00:00:00:{n:02x}\"\n{attachment}\n"
            );
            n += 1;
        }
    }
    Wiring::new(&Config::parse("test", &text).unwrap())
}

const BLUE: &str = "network = \"blue\"";
const RED: &str = "network = \"red\"";

fn added(orders: &[Order]) -> Vec<(usize, u32, u32)> {
    orders
        .iter()
        .map(|order| match order {
            Order::Add { em, link, .. } => (*em, link.function, link.id),
            Order::Remove { .. } => panic!("{order:?}"),
        })
        .collect()
}

fn attach_all(wiring: &mut Wiring, orders: &[Order]) {
    for (_, _, link) in added(orders) {
        wiring.answered(link, Ok(()));
    }
}

#[test]
fn two_functions_are_joined_when_the_second_em_comes() {
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    assert!(w.em_up(0).unwrap().is_empty());
    let orders = w.em_up(1).unwrap();
    let [
        Order::Add {
            em: 0,
            link: first,
            fds: f0,
        },
        Order::Add {
            em: 1,
            link: second,
            fds: f1,
        },
    ] = &orders[..]
    else {
        panic!("{orders:?}");
    };
    assert_ne!(first.id, second.id);
    assert_eq!(
        first.kind,
        LinkKind::Shm {
            side: 0,
            peer: "net1".into(),
            peer_mac: [2, 0, 0, 0, 0, 1]
        }
    );
    assert_eq!(
        second.kind,
        LinkKind::Shm {
            side: 1,
            peer: "net0".into(),
            peer_mac: [2, 0, 0, 0, 0, 0]
        }
    );
    let (memory, other) = (
        rustix::fs::fstat(&f0[0]).unwrap(),
        rustix::fs::fstat(&f1[0]).unwrap(),
    );
    assert_eq!(memory.st_ino, other.st_ino);
    assert_eq!(memory.st_size as u64, SHM_LINK_BYTES);
    assert!(
        rustix::fs::ftruncate(&f0[0], 4096).is_err(),
        "the memory must be sealed"
    );
    // what wakes one end is what the other end wakes
    rustix::io::write(&f0[2], &1u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    rustix::io::read(&f1[1], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    assert!(rustix::io::read(&f1[2], &mut count).is_err());
}

#[test]
fn a_network_is_a_full_mesh_also_within_an_em() {
    let mut w = wiring(&[&[BLUE, BLUE], &[BLUE, RED], &[RED]]);
    assert_eq!(w.em_up(0).unwrap().len(), 2, "net0-net1");
    assert_eq!(w.em_up(1).unwrap().len(), 4, "net0-net2, net1-net2");
    assert_eq!(w.em_up(2).unwrap().len(), 2, "net3-net4");
}

#[test]
fn carrier_needs_both_ends() {
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    w.em_up(0).unwrap();
    let orders = w.em_up(1).unwrap();
    let links = added(&orders);
    w.answered(links[0].2, Ok(()));
    assert!(!w.carrier(0) && !w.carrier(1));
    w.answered(links[1].2, Ok(()));
    assert!(w.carrier(0) && w.carrier(1));
    w.answered(links[1].2, Err("no memory".into()));
    assert!(!w.carrier(0) && !w.carrier(1));
}

#[test]
fn a_dead_em_takes_its_wires_along_and_gets_new_ones_when_it_returns() {
    let mut w = wiring(&[&[BLUE], &[BLUE], &[BLUE]]);
    for em in 0..3 {
        let orders = w.em_up(em).unwrap();
        attach_all(&mut w, &orders);
    }
    assert_eq!(w.ends().len(), 6);
    let removed = w.em_down(1);
    let ems: Vec<usize> = removed
        .iter()
        .map(|order| match order {
            Order::Remove { em, .. } => *em,
            Order::Add { .. } => panic!("{order:?}"),
        })
        .collect();
    assert_eq!(ems, [0, 2]);
    assert!(w.carrier(0) && !w.carrier(1) && w.carrier(2));
    let before: BTreeSet<u32> = w.ends().keys().copied().collect();
    let orders = w.em_up(1).unwrap();
    assert_eq!(orders.len(), 4);
    assert!(added(&orders).iter().all(|(_, _, id)| !before.contains(id)));
    assert!(!w.carrier(1));
    attach_all(&mut w, &orders);
    assert!(w.carrier(1));
}

#[test]
fn a_late_answer_about_a_wire_that_is_gone_changes_nothing() {
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    w.em_up(0).unwrap();
    let orders = w.em_up(1).unwrap();
    w.em_down(1);
    attach_all(&mut w, &orders);
    assert!(!w.carrier(0) && w.ends().is_empty());
}

#[test]
fn ports_need_no_peer_and_a_capture_is_no_carrier() {
    let mut w = wiring(&[
        &["port = { tap = \"tap0\" }\ncapture = \"x.pcap\""],
        &["network = \"blue\"\ncapture = \"y.pcap\""],
    ]);
    let orders = w.em_up(0).unwrap();
    let kinds: Vec<&LinkKind> = orders
        .iter()
        .map(|o| match o {
            Order::Add { link, .. } => &link.kind,
            Order::Remove { .. } => panic!("{o:?}"),
        })
        .collect();
    assert_eq!(
        kinds,
        [
            &LinkKind::Capture {
                path: "x.pcap".into()
            },
            &LinkKind::Tap {
                name: "tap0".into()
            }
        ]
    );
    attach_all(&mut w, &orders);
    assert!(w.carrier(0));
    let orders = w.em_up(1).unwrap();
    attach_all(&mut w, &orders);
    assert!(!w.carrier(1));
}

const IB: &str = "kind = \"rdma\"\nlink_type = \"infiniband\"\nnetwork = \"blue\"";
const ROCE: &str = "kind = \"rdma\"\nlink_type = \"ethernet\"\nnetwork = \"blue\"";
const RED_IB: &str = "kind = \"rdma\"\nlink_type = \"infiniband\"\nnetwork = \"red\"";

/// The joined pairs of functions, by what travels between them.
fn pairs(w: &Wiring, cargo: Cargo) -> Vec<(u32, u32)> {
    w.ends()
        .values()
        .filter(|end| end.cargo == cargo)
        .filter_map(|end| match end.to {
            Destination::Function { function, .. } => Some((end.function, function)),
            _ => None,
        })
        .filter(|(a, b)| a < b)
        .collect()
}

#[test]
fn rdma_devices_of_one_network_and_link_type_are_joined_and_infiniband_has_no_frames() {
    let mut w = wiring(&[&[BLUE, IB, ROCE], &[BLUE, IB, ROCE, RED_IB]]);
    for em in 0..2 {
        let orders = w.em_up(em).unwrap();
        attach_all(&mut w, &orders);
    }
    assert_eq!(pairs(&w, Cargo::Rdma), [(1, 4), (2, 5)]);
    let mut frames = pairs(&w, Cargo::Frames);
    frames.sort_unstable();
    assert_eq!(frames, [(0, 2), (0, 3), (0, 5), (2, 3), (2, 5), (3, 5)]);
}

#[test]
fn an_rdma_wire_names_the_peer_and_has_memory_of_its_own() {
    let mut w = wiring(&[&[ROCE, ROCE]]);
    let orders = w.em_up(0).unwrap();
    let mut memories = BTreeSet::new();
    let mut rdma = Vec::new();
    for order in &orders {
        let Order::Add { em: 0, link, fds } = order else {
            panic!("{order:?}");
        };
        assert_eq!(fds.len(), 3);
        memories.insert(rustix::fs::fstat(&fds[0]).unwrap().st_ino);
        if matches!(link.kind, LinkKind::Rdma { .. }) {
            rdma.push((link.function, link.kind.clone()));
        }
    }
    assert_eq!((orders.len(), memories.len()), (4, 2));
    let end = |side, peer: &str, peer_function| LinkKind::Rdma {
        side,
        peer: peer.into(),
        peer_function,
    };
    assert_eq!(rdma, [(0, end(0, "net1", 1)), (1, end(1, "net0", 0))]);
}

#[test]
fn an_erdma_port_has_no_frames_of_its_own_and_carrier_while_its_em_is_up() {
    let mac = "mac = \"02:00:00:00:00:01\"\nnetwork = \"blue\"\n";
    let text = format!(
        "[[network]]\nname = \"blue\"\n[[em]]\nname = \"em0\"\n\
         [[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\n{mac}\
         [[em.function]]\nname = \"rdma0\"\nkind = \"erdma\"\n{mac}\
         [[em.function]]\nname = \"rdma1\"\nkind = \"rdma\"\nmac = \"02:00:00:00:00:02\"\nnetwork = \"blue\"\n"
    );
    let mut w = Wiring::new(&Config::parse("test", &text).unwrap());
    assert!(!w.carrier(1));
    let orders = w.em_up(0).unwrap();
    assert!(w.carrier(1));
    attach_all(&mut w, &orders);
    assert_eq!(pairs(&w, Cargo::Rdma), [(1, 2)], "both are RoCE");
    assert_eq!(pairs(&w, Cargo::Frames), [(0, 2)]);
}

#[test]
fn an_infiniband_port_has_carrier_while_its_em_is_up_and_an_ethernet_one_needs_a_peer_for_frames() {
    let mut w = wiring(&[&[IB], &[ROCE], &[ROCE]]);
    assert!(!w.carrier(0));
    w.em_up(0).unwrap();
    assert!(w.carrier(0));
    w.em_up(1).unwrap();
    let orders = w.em_up(2).unwrap();
    assert!(!w.carrier(1));
    for order in &orders {
        let Order::Add { link, .. } = order else {
            panic!("{order:?}");
        };
        if matches!(link.kind, LinkKind::Rdma { .. }) {
            w.answered(link.id, Ok(()));
        }
    }
    assert!(!w.carrier(1), "an RDMA wire carries no frames");
    attach_all(&mut w, &orders);
    assert!(w.carrier(1) && w.carrier(2));
    w.em_down(0);
    assert!(!w.carrier(0));
}

#[test]
fn rdma_wires_go_with_either_em() {
    let mut w = wiring(&[&[IB], &[IB], &[IB]]);
    for em in 0..3 {
        w.em_up(em).unwrap();
    }
    assert_eq!(w.em_down(1).len(), 2);
    assert_eq!(pairs(&w, Cargo::Rdma), [(0, 2)]);
}

/// What becomes of EMs whose time is over.
fn end_grace(w: &mut Wiring, now: Instant) -> Vec<Order> {
    let over = w.over(now).into_iter();
    over.flat_map(|em| w.em_down(em)).collect()
}

#[test]
fn an_em_that_returns_in_time_finds_its_rdma_wires_too() {
    let mut w = wiring(&[&[IB], &[IB]]);
    for em in 0..2 {
        let orders = w.em_up(em).unwrap();
        attach_all(&mut w, &orders);
    }
    let start = Instant::now();
    w.em_lost(1, start);
    assert!(w.carrier(1), "it may be replaced");
    let orders = w.em_up(1).unwrap();
    let [Order::Add { em: 1, link, fds }] = &orders[..] else {
        panic!("{orders:?}");
    };
    assert!(
        matches!(
            link.kind,
            LinkKind::Rdma {
                peer_function: 0,
                ..
            }
        ) && fds.len() == 3
    );
    assert!(end_grace(&mut w, start + GRACE * 2).is_empty());
}

#[test]
fn a_lost_em_that_returns_in_time_finds_its_wires_and_nobody_is_told() {
    let mut w = wiring(&[&[BLUE], &[BLUE, "port = { null = true }"], &[BLUE]]);
    for em in 0..3 {
        let orders = w.em_up(em).unwrap();
        attach_all(&mut w, &orders);
    }
    let start = Instant::now();
    let before: BTreeSet<u32> = w.ends().keys().copied().collect();
    w.em_lost(1, start);
    assert!(end_grace(&mut w, start + GRACE / 2).is_empty());
    assert!((0..4).all(|function| w.carrier(function)));
    let orders = w.em_up(1).unwrap();
    let again = added(&orders);
    assert_eq!(again.len(), 3);
    assert!(
        again
            .iter()
            .all(|(em, _, id)| *em == 1 && before.contains(id))
    );
    assert!(end_grace(&mut w, start + GRACE * 2).is_empty());
    assert_eq!(w.ends().len(), before.len());
    assert!((0..4).all(|function| w.carrier(function)));
}

#[test]
fn a_lost_em_that_does_not_return_in_time_takes_its_wires_along() {
    let mut w = wiring(&[&[BLUE], &[BLUE], &[BLUE]]);
    for em in 0..3 {
        let orders = w.em_up(em).unwrap();
        attach_all(&mut w, &orders);
    }
    let start = Instant::now();
    w.em_lost(1, start);
    w.wait_for(1, start + GRACE / 2);
    assert!(
        end_grace(&mut w, start + GRACE).is_empty(),
        "one is on its way"
    );
    assert_eq!(end_grace(&mut w, start + GRACE / 2 + GRACE).len(), 2);
    assert!(w.carrier(0) && !w.carrier(1) && w.ends().len() == 2);
    assert_eq!(w.em_up(1).unwrap().len(), 4);
}

/// The orders of a first OM for two EMs, as the EMs return them to another.
fn returned(orders: Vec<Order>) -> Vec<(usize, LinkSpec, Vec<OwnedFd>)> {
    let all = orders.into_iter().map(|order| match order {
        Order::Add { em, link, fds } => (em, link, fds),
        Order::Remove { .. } => panic!("{order:?}"),
    });
    all.collect()
}

#[test]
fn ems_that_return_keep_their_wires() {
    let mut first = wiring(&[&[BLUE], &[BLUE]]);
    first.em_up(0).unwrap();
    let links = returned(first.em_up(1).unwrap());
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    let start = Instant::now();
    w.expect_all(start);
    for (em, link, fds) in links {
        w.adopt(em, link, fds).unwrap();
        assert!(w.em_returned(em).unwrap().is_empty());
        assert!(w.carrier(em as u32), "also before the other returns");
    }
    assert!(end_grace(&mut w, start + GRACE).is_empty());
    assert!(w.carrier(0) && w.carrier(1) && w.ends().len() == 2);
    // One that is lost later finds the same wire.
    w.em_lost(1, start);
    assert_eq!(added(&w.em_up(1).unwrap()).len(), 1);
}

#[test]
fn an_em_that_is_new_gets_the_other_end_of_a_wire_that_was_returned() {
    let mut first = wiring(&[&[BLUE], &[BLUE]]);
    first.em_up(0).unwrap();
    let mut links = returned(first.em_up(1).unwrap());
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    w.expect_all(Instant::now());
    let (em, link, fds) = links.remove(0);
    let id = link.id;
    w.adopt(em, link, fds).unwrap();
    assert!(w.em_returned(0).unwrap().is_empty());
    let orders = w.em_up(1).unwrap();
    let [Order::Add { em: 1, link, fds }] = &orders[..] else {
        panic!("{orders:?}");
    };
    assert!(matches!(&link.kind, LinkKind::Shm { side: 1, peer, .. } if peer == "net0"));
    assert!(fds.len() == 3 && link.id != id);
    attach_all(&mut w, &orders);
    assert!(w.carrier(0) && w.carrier(1));
}

#[test]
fn a_wire_whose_other_em_never_returns_goes() {
    let mut first = wiring(&[&[BLUE], &[BLUE]]);
    first.em_up(0).unwrap();
    let mut links = returned(first.em_up(1).unwrap());
    let mut w = wiring(&[&[BLUE], &[BLUE]]);
    let start = Instant::now();
    w.expect_all(start);
    let (em, link, fds) = links.remove(0);
    w.adopt(em, link, fds).unwrap();
    w.em_returned(0).unwrap();
    assert_eq!(end_grace(&mut w, start + GRACE).len(), 1);
    assert!(!w.carrier(0) && w.ends().is_empty());
}

#[test]
fn a_port_of_another_host_is_adopted_if_it_is_the_one_that_is_missing() {
    let config = "[[em]]\nname = \"em0\"\n[[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\n\
                  mac = \"02:00:00:00:00:01\"\nport = { null = true }\ncapture = \"a.pcap\"\n";
    let mut wiring = Wiring::new(&Config::parse("test", config).unwrap());
    let link = |id, kind| LinkSpec {
        id,
        function: 0,
        kind,
    };
    let port = |id| link(id, LinkKind::Null);
    let capture = |id, path: &str| link(id, LinkKind::Capture { path: path.into() });
    assert!(!wiring.avoid(&port(u32::MAX)));
    assert!(!wiring.avoid(&link(9, LinkKind::Loopback)), "not asked for");
    assert!(!wiring.avoid(&capture(9, "b.pcap")), "another file");
    assert!(!wiring.avoid(&LinkSpec {
        function: 1,
        ..port(9)
    }));
    let wire = LinkKind::Shm {
        side: 0,
        peer: "net1".into(),
        peer_mac: [2, 0, 0, 0, 0, 2],
    };
    assert!(!wiring.avoid(&link(9, wire)));
    assert!(wiring.avoid(&port(5)));
    wiring.adopt(0, port(5), Vec::new()).unwrap();
    assert!(!wiring.avoid(&port(6)), "it has one");
    assert!(
        !wiring.avoid(&capture(5, "a.pcap")),
        "the port has this number"
    );
    assert!(wiring.carrier(0));
    // What is still missing gets a number that nobody had.
    let orders = wiring.em_returned(0).unwrap();
    let [Order::Add { link: new, .. }] = orders.as_slice() else {
        panic!("{orders:?}");
    };
    assert_eq!(*new, capture(10, "a.pcap"));
}
