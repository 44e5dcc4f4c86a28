use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::harness::*;

const MSIX: u32 = 2;

fn set(flags: u32, index: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

fn fds(n: usize) -> Vec<OwnedFd> {
    (0..n)
        .map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap())
        .collect()
}

fn install(raw: &mut Raw, start: u32, fds: &[OwnedFd]) -> Option<u32> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    raw.call_with(8, &set(0x24, MSIX, start, fds.len() as u32), &borrowed)
        .error
}

fn count(fd: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

#[test]
fn irq_infos_say_what_there_is_at_full_size() {
    let served = serve();
    let mut raw = served.client();
    for (index, vectors) in [(0, 0), (1, 0), (2, VECTORS.into()), (3, 1), (4, 0)] {
        let info = raw.call(7, &words(&[16, 0, index, 0]));
        assert_eq!((info.error, info.size, info.word(12)), (None, 32, vectors));
    }
    for body in [words(&[16, 0, 5, 0]), words(&[12, 0, 2, 0]), words(&[16])] {
        let info = raw.call(7, &body);
        assert_eq!((info.error, info.size), (Some(22), 32));
    }
}

#[test]
fn vectors_are_installed_triggered_and_removed() {
    let served = serve();
    let mut raw = served.client();
    assert_eq!(
        raw.call(8, &set(0x24, MSIX, 0, 1)).error,
        None,
        "enabled, no vector yet"
    );
    let events = fds(3);
    assert_eq!(install(&mut raw, 1, &events), None);
    assert!(!served.irqs.trigger(0) && served.irqs.trigger(1) && served.irqs.trigger(3));
    assert_eq!(
        [count(&events[0]), count(&events[1]), count(&events[2])],
        [1, 0, 1]
    );
    assert_eq!(
        raw.call(8, &set(0x21, MSIX, 2, 1)).error,
        None,
        "a client may trigger"
    );
    assert_eq!(count(&events[1]), 1);
    let chosen = [&set(0x22, MSIX, 1, 3)[..], &[0, 1, 1]].concat();
    let chosen = [&words(&[23])[..], &chosen[4..]].concat();
    assert_eq!(raw.call(8, &chosen).error, None);
    assert_eq!(
        [count(&events[0]), count(&events[1]), count(&events[2])],
        [0, 1, 1]
    );
    assert_eq!(
        raw.call(8, &set(0x24, MSIX, 1, 1)).error,
        None,
        "no descriptor removes"
    );
    assert!(!served.irqs.trigger(1) && served.irqs.trigger(2));
    assert_eq!(
        raw.call(8, &set(0x21, MSIX, 0, 0)).error,
        None,
        "count 0 disables"
    );
    assert!((0..VECTORS).all(|v| !served.irqs.trigger(v)));
}

#[test]
fn legal_shapes_without_effect_are_accepted() {
    let served = serve();
    let mut raw = served.client();
    for body in [
        set(0x21, 0, 0, 0),
        set(0x21, 1, 0, 0),
        set(0x21, 3, 0, 0),
        set(0x21, 4, 0, 0),
        set(0x24, 3, 0, 1),
        set(0x11, MSIX, 0, 1),
        set(0x09, MSIX, 0, VECTORS.into()),
    ] {
        assert_eq!(raw.call(8, &body).error, None, "{body:?}");
    }
    let event = fds(1);
    assert_eq!(
        raw.call_with(8, &set(0x24, 3, 0, 1), &[event[0].as_fd()])
            .error,
        None
    );
}

#[test]
fn illegal_shapes_are_refused_and_change_nothing() {
    let served = serve();
    let mut raw = served.client();
    let events = fds(2);
    assert_eq!(install(&mut raw, 0, &events), None);
    let n = u32::from(VECTORS);
    for body in [
        vec![],
        words(&[20, 0x24, MSIX]),
        words(&[19, 0x24, MSIX, 0, 1]),
        words(&[21, 0x24, MSIX, 0, 1]),
        set(0, MSIX, 0, 1),
        set(0x20, MSIX, 0, 1),
        set(0x04, MSIX, 0, 1),
        set(0x23, MSIX, 0, 1),
        set(0x31, MSIX, 0, 1),
        set(0x61, MSIX, 0, 1),
        set(0x24, 5, 0, 1),
        set(0x24, u32::MAX, 0, 1),
        set(0x24, MSIX, n, 1),
        set(0x24, MSIX, 0, n + 1),
        set(0x24, MSIX, u32::MAX, 2),
        set(0x24, MSIX, 0, 0),
        set(0x21, MSIX, 1, 0),
        set(0x22, MSIX, 0, 4),
        set(0x24, 0, 0, 1),
        set(0x24, 4, 0, 1),
    ] {
        assert_eq!(raw.call(8, &body).error, Some(22), "{body:?}");
    }
    let borrowed: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    for body in [
        set(0x24, MSIX, 0, 1),
        set(0x24, MSIX, 0, 3),
        set(0x21, MSIX, 0, 2),
    ] {
        assert_eq!(
            raw.call_with(8, &body, &borrowed).error,
            Some(22),
            "{body:?}"
        );
    }
    assert!(served.irqs.trigger(0) && served.irqs.trigger(1) && !served.irqs.trigger(2));
}

#[test]
fn a_client_that_leaves_takes_its_eventfds_along() {
    let served = serve_alone();
    let before = open_fds();
    let mut raw = served.client();
    for chunk in 0..2 {
        let events = fds(16);
        assert_eq!(install(&mut raw, chunk * 16, &events), None);
    }
    drop(raw);
    served.until("the end", || {
        open_fds() == before && !served.irqs.is_armed(0)
    });
}
