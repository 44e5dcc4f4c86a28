use super::*;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

fn successor(fd: &OwnedFd) -> State {
    State::open(fd).unwrap()
}

#[test]
fn a_successor_finds_what_was_agreed_and_mapped() {
    let (state, fd) = State::create().unwrap();
    assert_eq!(state.agreed(), None);
    let agreed = Capabilities {
        max_fds: 16,
        message_dma: true,
        ..Capabilities::default()
    };
    state.set_agreed(&agreed);
    let map = |n: u64, file| MapRecord {
        address: n << 20,
        size: 1 << 20,
        offset: n,
        perm: Perm {
            read: true,
            write: n % 2 == 0,
        },
        file,
    };
    for n in 0..1000 {
        assert!(state.set_map(n, &map(n.into(), (n % 3 != 0).then_some(n))));
    }
    (0..500).for_each(|n| state.remove_map(n));
    let next = successor(&fd);
    assert_eq!(next.agreed(), Some(agreed));
    let maps = next.maps();
    assert_eq!(maps.len(), 500);
    assert_eq!(maps[0], (500, map(500, Some(500))));
    assert_eq!(maps[1], (501, map(501, None)));
    next.clear();
    assert!(state.maps().is_empty() && state.agreed().is_none());
}

#[test]
fn the_kernel_notes_a_reply_together_with_sending_it() {
    let (state, fd) = State::create().unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    state.begin(7, 9);
    let noted = Pending {
        id: 7,
        command: 9,
        replied: false,
    };
    assert_eq!(successor(&fd).pending(), Some(noted));
    assert_eq!(state.reply(ours.as_fd(), b"reply").unwrap(), 5);
    let replied = Pending {
        replied: true,
        ..noted
    };
    assert_eq!(successor(&fd).pending(), Some(replied));
    let mut got = [0; 5];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"reply");
    state.end();
    assert_eq!(successor(&fd).pending(), None);
    state.begin(8, 9);
    assert!(!successor(&fd).pending().unwrap().replied);
}

#[test]
fn a_reply_that_finds_no_room_is_not_noted() {
    let (state, fd) = State::create().unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    state.begin(1, 1);
    while state.reply(ours.as_fd(), &[0; 4096]).is_ok() {
        state.begin(1, 1);
    }
    assert!(!successor(&fd).pending().unwrap().replied);
}

#[test]
fn a_section_is_replaced_as_a_whole() {
    let (state, fd) = State::create().unwrap();
    assert_eq!(state.load(Section::Registers), None);
    for len in [1, 7, 8, 4097, SECTION_BYTES, 3] {
        let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
        assert!(state.save(Section::Registers, &bytes));
        assert_eq!(successor(&fd).load(Section::Registers), Some(bytes));
    }
    assert!(!state.save(Section::Registers, &vec![0; SECTION_BYTES + 1]));
    assert_eq!(state.load(Section::DataPath), None);
    assert!(state.save(Section::DataPath, &[9]));
    state.drop_section(Section::Registers);
    assert_eq!(state.load(Section::Registers), None);
    assert_eq!(state.load(Section::DataPath), Some(vec![9]));
}

#[test]
fn another_version_or_an_incomplete_state_is_refused() {
    let (state, fd) = State::create().unwrap();
    state.set_broken();
    assert!(matches!(State::open(&fd), Err(StateError::Broken)));
    state.clear();
    assert!(State::open(&fd).is_ok());
    let other = VERSION + 1;
    state.memory.layout().version.store(other);
    assert!(matches!(State::open(&fd), Err(StateError::Version(v)) if v == other));
    let other = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    assert!(matches!(State::open(&other), Err(StateError::Size(0))));
}

#[test]
fn the_version_of_any_layout_is_known() {
    let (_state, fd) = State::create().unwrap();
    assert_eq!(State::version_of(fd.as_fd()), Some(VERSION));
    let mut head = MAGIC.to_le_bytes().to_vec();
    head.extend(77u32.to_le_bytes());
    let other = |bytes: &[u8]| {
        let fd = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, bytes).unwrap();
        State::version_of(fd.as_fd())
    };
    assert_eq!(other(&head), Some(77));
    assert_eq!(other(&head[..11]), None);
    assert_eq!(other(&[0; 64]), None);
}

#[test]
fn a_queue_s_place_is_found_again_and_is_empty_for_the_next_client() {
    let (state, fd) = State::create().unwrap();
    let last = (memory::QUEUES - 1) as u16;
    assert!(state.queue(last + 1).is_none());
    let queue = state.queue(last).unwrap();
    assert_eq!(queue.step(), 0);
    assert!(queue.set_entry(QueueState::ENTRIES - 1, 7));
    assert!(!queue.set_entry(QueueState::ENTRIES, 7));
    queue.set_step(9);
    let next = successor(&fd);
    let found = next.queue(last).unwrap();
    assert_eq!((found.step(), found.entry(QueueState::ENTRIES - 1)), (9, 7));
    next.clear();
    assert_eq!(state.queue(last).unwrap().step(), 0);
}
