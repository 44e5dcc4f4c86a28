use super::*;
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, OwnedFd};

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn file(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

fn size(fd: &OwnedFd) -> i64 {
    rustix::fs::fstat(fd).unwrap().st_size
}

/// Takes everything that an EM sent before its end.
fn collect(socket: &OwnedFd, store: &mut Store) {
    while let Some(change) = Store::take(socket).unwrap() {
        store.apply(change).unwrap();
    }
}

fn attach(store: &Store) -> (Keeper, Restored, OwnedFd) {
    let (om, em) = pair();
    store.restore(&om).unwrap();
    let (keeper, restored) = Keeper::attach(em).unwrap();
    (keeper, restored, om)
}

#[test]
fn the_next_em_gets_what_the_one_before_gave() {
    let mut store = Store::default();
    let (keeper, restored, om) = attach(&store);
    assert!(restored.is_empty());
    assert!(keeper.keep(Key::CONNECTION, file(1).as_fd()));
    for n in 0..40 {
        assert!(keeper.keep(Key::vector(n), file(100 + u64::from(n)).as_fd()));
    }
    assert!(keeper.keep(Key::vector(3), file(7).as_fd()));
    assert!(keeper.keep(Key::file(9), file(2).as_fd()) && keeper.forget(Key::file(9)));
    drop(keeper);
    collect(&om, &mut store);
    assert!(store.has_connection());
    let (_keeper, restored, _om) = attach(&store);
    assert_eq!(restored.len(), 41);
    assert_eq!(size(&restored[&Key::vector(3)]), 7);
    assert_eq!(size(&restored[&Key::vector(39)]), 139);
    assert!(!restored.contains_key(&Key::file(9)));
}

#[test]
fn what_was_sent_counts_when_the_sender_died_with_unread_packets() {
    let (om, em) = pair();
    let mut store = Store::default();
    store.restore(&om).unwrap();
    let (keeper, _) = Keeper::attach(em).unwrap();
    // Something that the EM does not read any more makes its end a reset.
    store.restore(&om).unwrap();
    assert!(keeper.keep(Key::STATE, file(5).as_fd()));
    drop(keeper);
    collect(&om, &mut store);
    assert_eq!(store.len(), 1);
}

#[test]
fn clearing_forgets_all_and_an_end_mark_of_an_em_is_no_packet() {
    let mut store = Store::default();
    let (keeper, _, om) = attach(&store);
    assert!(keeper.keep(Key::STATE, file(5).as_fd()) && keeper.clear());
    drop(keeper);
    collect(&om, &mut store);
    assert!(store.is_empty());
    let (om, em) = pair();
    Store::default().restore(&em).unwrap();
    assert!(Store::take(&om).is_err());
}

#[test]
fn another_om_gets_everything() {
    let (keeper, _, _om) = attach(&Store::default());
    assert!(keeper.keep(Key::CONNECTION, file(1).as_fd()));
    assert!(keeper.keep(Key::file(0), file(2).as_fd()));
    let (om, em) = pair();
    let mut store = Store::default();
    store.restore(&om).unwrap();
    keeper.move_to(em).unwrap();
    assert!(keeper.keep(Key::file(1), file(3).as_fd()));
    drop(keeper);
    collect(&om, &mut store);
    assert_eq!(store.len(), 3);
}

#[test]
fn without_a_keeper_nothing_is_safe() {
    let keeper = Keeper::default();
    assert!(!keeper.keep(Key::STATE, file(1).as_fd()));
    let (keeper, _, om) = attach(&Store::default());
    drop(om);
    assert!(!keeper.keep(Key::STATE, file(1).as_fd()));
}
