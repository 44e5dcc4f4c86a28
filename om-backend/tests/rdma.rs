//! RDMA functions of an OM whose EMs the test plays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake_em;

use fake_em::{FakeEm, LONG, Told, query, wait_functions};
use m2m_fabric::proto::{
    FunctionKind, LinkKind, RdmaDestination, RdmaRequest, Reply, Request as EmRequest,
};
use om_backend::Om;
use om_backend::config::Config;
use om_backend::northbound::protocol::Request;
use om_backend::northbound::table;
use om_backend::northbound::view::Inspect;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// EMs 0 and 1 with one InfiniBand function each, `rdma0` and `rdma1`, beside EM 2 with an Ethernet one.
fn start(dir: &Path) -> Om {
    let mut text = format!(
        "[dpu]\nrun_dir = \"{}\"\n[[network]]\nname = \"blue\"\n",
        dir.display()
    );
    for (n, link_type) in ["infiniband", "infiniband", "ethernet"].iter().enumerate() {
        text += &format!(
            "[[em]]\nname = \"em{n}\"\nmanaged = false\n[[em.function]]\nname = \"rdma{n}\"\n\
             kind = \"rdma\"\nlink_type = \"{link_type}\"\nmac = \"02:00:00:00:00:{n:02x}\"\n\
             network = \"blue\"\n"
        );
    }
    Om::start(Config::parse("test", &text).unwrap()).unwrap()
}

fn ask(em: &FakeEm, request: RdmaRequest, fds: &[&OwnedFd]) -> Result<Reply, String> {
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    match em
        .fabric
        .call(EmRequest::Rdma(request), &fds, LONG)
        .unwrap()
    {
        Reply::Failed(reason) => Err(reason),
        other => Ok(other),
    }
}

fn resolve(em: &FakeEm, function: u32, lid: u16) -> Result<Reply, String> {
    let to = RdmaDestination {
        lid,
        gid: None,
        mac: [0; 6],
    };
    ask(em, RdmaRequest::Resolve { function, to }, &[])
}

fn news(em: &FakeEm) -> (RdmaRequest, Vec<OwnedFd>) {
    em.wait(|told| match told {
        Told::Request(EmRequest::Rdma(request), fds) => Some((request, fds)),
        _ => None,
    })
}

fn memory(text: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text).unwrap();
    file.into()
}

fn inode(fd: &OwnedFd) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::File::from(fd.try_clone().unwrap());
    file.metadata().unwrap().ino()
}

#[test]
fn an_em_gets_its_rdma_function_and_a_wire_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let em0 = FakeEm::join(&om, "em0");
    let (spec, fds) = em0.wait(|told| match told {
        Told::Request(EmRequest::AddFunction(spec), fds) => Some((spec, fds)),
        _ => None,
    });
    let FunctionKind::Rdma(rdma) = &spec.kind else {
        panic!("{spec:?}");
    };
    assert_eq!((rdma.lid, rdma.link_up, fds.len()), (1, true, 3));
    let em1 = FakeEm::join(&om, "em1");
    let (first, fds) = em0.wait_link();
    let (second, _) = em1.wait_link();
    let peer_of = |kind: &LinkKind| match kind {
        LinkKind::Rdma {
            side,
            peer,
            peer_function,
        } => (*side, peer.clone(), *peer_function),
        other => panic!("{other:?}"),
    };
    assert_eq!(fds.len(), 3);
    assert_eq!(peer_of(&first.kind), (0, "rdma1".into(), 1));
    assert_eq!(peer_of(&second.kind), (1, "rdma0".into(), 0));
}

#[test]
fn paths_are_found_for_own_functions_only_and_revoked_with_the_peer() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let em0 = FakeEm::join(&om, "em0");
    assert_eq!(resolve(&em0, 0, 2).unwrap_err(), "the EM of rdma1 is away");
    let em1 = FakeEm::join(&om, "em1");
    let Ok(Reply::Path(path)) = resolve(&em0, 0, 2) else {
        panic!("no path");
    };
    assert_eq!(path.peer, 1);
    assert_eq!(
        resolve(&em0, 1, 1).unwrap_err(),
        "function 1 is no RDMA function of this EM"
    );
    assert_eq!(
        resolve(&em0, 0, 3).unwrap_err(),
        "network \"blue\" has no infiniband port with LID 3"
    );
    em1.fabric.close();
    let (request, _) = news(&em0);
    assert_eq!(
        request,
        RdmaRequest::Revoke {
            function: 0,
            peer: 1,
            generation: path.generation
        }
    );
}

#[test]
fn shared_memory_reaches_the_peer_now_or_when_it_comes_and_goes_with_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let (em0, em2) = (FakeEm::join(&om, "em0"), FakeEm::join(&om, "em2"));
    let share = |em: &FakeEm, function, file, fds: &[&OwnedFd]| {
        ask(em, RdmaRequest::ShareMemory { function, file }, fds)
    };
    let ram = memory(b"guest 0");
    assert_eq!(share(&em0, 0, 4, &[&ram]), Ok(Reply::Ok));
    assert_eq!(
        share(&em0, 0, 5, &[]).unwrap_err(),
        "shared memory came with 0 descriptors; it must be one"
    );
    assert!(share(&em2, 0, 6, &[&ram]).is_err(), "not its function");
    let em1 = FakeEm::join(&om, "em1");
    let (request, fds) = news(&em1);
    let known = |function, file| RdmaRequest::PeerMemory { function, file };
    assert_eq!((request, inode(&fds[0])), (known(0, 4), inode(&ram)));
    let other = memory(b"guest 1");
    share(&em1, 1, 0, &[&other]).unwrap();
    let (request, fds) = news(&em0);
    assert_eq!((request, inode(&fds[0])), (known(1, 0), inode(&other)));

    let unshare = RdmaRequest::UnshareMemory {
        function: 0,
        file: Some(4),
    };
    assert_eq!(ask(&em0, unshare, &[]), Ok(Reply::Ok));
    let gone = |function, file| RdmaRequest::PeerMemoryGone { function, file };
    assert_eq!(news(&em1).0, gone(0, Some(4)));
    em1.fabric.close();
    assert_eq!(news(&em0).0, gone(1, None));
    // the Ethernet function was never told of any of it
    om.stop();
    em2.wait(|told| match told {
        Told::Request(EmRequest::Rdma(request), _) => panic!("{request:?}"),
        Told::Down => Some(()),
        _ => None,
    });
}

#[test]
fn an_infiniband_link_is_up_with_its_em_and_the_administrator_ends_its_paths() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let (em0, em1) = (FakeEm::join(&om, "em0"), FakeEm::join(&om, "em1"));
    wait_functions(&om, "up", |f| {
        f.functions[0].link == "up" && f.functions[1].link == "up"
    });
    resolve(&em1, 1, 1).unwrap();
    let set = |up| {
        let function = "rdma0".to_owned();
        let _: serde_json::Value = query(&om, &Request::LinkSet { function, up });
    };
    set(false);
    assert!(matches!(
        news(&em1).0,
        RdmaRequest::Revoke {
            function: 1,
            peer: 0,
            ..
        }
    ));
    let down = "the link of rdma0 is down";
    assert_eq!(resolve(&em1, 1, 1).unwrap_err(), down);
    drop(em0);
    let em0 = FakeEm::join_again(&om, "em0");
    let link_up = em0.wait(|told| match told {
        Told::Request(EmRequest::AddFunction(spec), _) => match spec.kind {
            FunctionKind::Rdma(rdma) => Some(rdma.link_up),
            FunctionKind::VirtioNet(_) | FunctionKind::Memory(_) => None,
        },
        _ => None,
    });
    assert!(!link_up, "an EM that returns hears of it");
    set(true);
    resolve(&em1, 1, 1).unwrap();
}

#[test]
fn people_see_kind_lid_and_gids() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let em2 = FakeEm::join(&om, "em2");
    let gid = "::ffff:10.0.0.3".parse::<std::net::Ipv6Addr>().unwrap();
    let set = RdmaRequest::SetGid {
        function: 2,
        index: 1,
        gid: gid.octets(),
    };
    ask(&em2, set, &[]).unwrap();
    let functions = wait_functions(&om, "waiting", |f| f.functions[2].state == "waiting");
    let rdma = |n: usize| functions.functions[n].rdma.clone().unwrap();
    assert_eq!(functions.functions[0].kind, "rdma");
    assert_eq!((rdma(1).lid, rdma(2).lid), (Some(2), None));
    assert_eq!(rdma(1).gids, ["fe80::200:ff:fe00:1"]);
    assert_eq!(rdma(2).gids, ["::ffff:10.0.0.3"]);
    assert_eq!(rdma(2).guid, "020000fffe000002");
    let text = table::functions(&functions);
    for wanted in ["lid 2", "::ffff:10.0.0.3"] {
        assert!(text.contains(wanted), "{text}");
    }
    let all: Inspect = query(&om, &Request::Inspect);
    let text = table::inspect(&all);
    assert!(
        text.contains("rdma: infiniband, lid 1, guid 020000fffe000000, 0 files shared"),
        "{text}"
    );
}
