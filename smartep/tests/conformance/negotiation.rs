use std::io::Write;

use super::harness::*;

#[test]
fn qemus_version_is_answered_within_its_length() {
    let served = serve();
    let mut raw = served.raw();
    let request = [&[0; 4], QEMU_VERSION.as_bytes(), &[0]].concat();
    let reply = raw.call(1, &request);
    assert!(reply.error.is_none() && reply.size <= 16 + request.len());
    assert_eq!(reply.body[..4], [0; 4]);
    assert_eq!(reply.body.last(), Some(&0));
}

#[test]
fn bad_versions_get_einval_and_lose_the_connection() {
    let served = serve();
    for body in [
        &[][..],
        &[0, 0, 0],
        &[1, 0, 0, 0],
        b"\0\0\0\0{\"capabilities\":3}\0",
        b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":\"x\"}}\0",
        b"\0\0\0\0not json\0",
        b"\0\0\0\0{}",
        b"\0\0\0\0\xff\xfe\0",
    ] {
        let mut raw = served.raw();
        assert_eq!(raw.call(1, body).error, Some(22), "{body:?}");
        assert!(raw.closed());
    }
    served.client();
}

#[test]
fn a_version_without_json_is_legal() {
    let served = serve();
    let mut raw = served.raw();
    assert_eq!(raw.call(1, &[0, 0, 1, 0]).error, None);
    assert_eq!(raw.read(7, 0, 4), [0xf4, 0x1a, 0x41, 0x10]);
}

#[test]
fn commands_before_the_version_and_stray_replies_lose_the_connection() {
    let served = serve();
    let mut raw = served.raw();
    raw.send(4, 0, &words(&[16, 0, 0, 0]), &[]);
    assert!(raw.closed());
    for flags in [1, 7] {
        let mut raw = served.client();
        raw.send(9, flags, &access(7, 0, 4), &[]);
        assert!(raw.closed());
    }
    served.client();
}

#[test]
fn a_second_version_is_refused_and_the_connection_goes_on() {
    let served = serve();
    let mut raw = served.client();
    assert_eq!(raw.call(1, &[0, 0, 0, 0]).error, Some(22));
    assert_eq!(raw.read(7, 0, 2), [0xf4, 0x1a]);
}

#[test]
fn unknown_commands_get_enotsup_with_their_payload_drained() {
    let served = serve();
    let mut raw = served.client();
    for command in [0, 6, 11, 12, 14, 16, 17, 18, 999] {
        assert_eq!(
            raw.call(command, &[7; 333]).error,
            Some(95),
            "command {command}"
        );
    }
    assert_eq!(raw.read(7, 0, 2), [0xf4, 0x1a]);
}

#[test]
fn impossible_sizes_lose_the_connection() {
    let served = serve();
    for size in [0, 15, 16 + (1 << 20) + 65, u32::MAX as usize] {
        let mut raw = served.client();
        raw.stream.write_all(&header(1, 9, size, 0)).unwrap();
        assert!(raw.closed(), "size {size}");
    }
    served.client();
}

#[test]
fn a_message_may_arrive_byte_by_byte() {
    let served = serve();
    let mut raw = served.client();
    let message = [&header(9, 9, 32, 0)[..], &access(7, 0, 4)].concat();
    for byte in &message {
        raw.stream.write_all(&[*byte]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(raw.receive().unwrap().body[16..], [0xf4, 0x1a, 0x41, 0x10]);
}

#[test]
fn a_client_may_leave_at_every_byte() {
    let served = serve();
    let message = [&header(9, 9, 32, 0)[..], &access(7, 0, 4)].concat();
    for n in 0..message.len() {
        let mut raw = served.client();
        raw.stream.write_all(&message[..n]).unwrap();
    }
    served.client();
}

#[test]
fn a_second_client_is_closed_at_once_and_the_first_goes_on() {
    let served = serve();
    let mut first = served.client();
    assert!(served.raw().closed());
    assert_eq!(first.read(7, 0, 2), [0xf4, 0x1a]);
}

#[test]
fn device_and_region_infos_say_what_there_is() {
    let served = serve();
    let mut raw = served.client();
    let info = raw.call(4, &words(&[16, 0, 0, 0]));
    assert_eq!(
        (info.size, info.word(4), info.word(8), info.word(12)),
        (32, 3, 9, 5)
    );
    assert_eq!(raw.call(4, &words(&[8, 0, 0, 0])).error, Some(22));
    for (index, size, flags) in [
        (0, 0x4000, 3),
        (1, 0, 0),
        (6, 0, 0),
        (7, 4096, 3),
        (8, 0, 0),
    ] {
        let region = raw.call(5, &words(&[32, 0, index, 0, 0, 0, 0, 0]));
        assert_eq!(
            (region.long(16), region.word(4)),
            (size, flags),
            "region {index}"
        );
        assert!(region.fds.is_empty());
    }
    for body in [
        words(&[32, 0, 9, 0, 0, 0, 0, 0]),
        words(&[31, 0, 0, 0, 0, 0, 0, 0]),
        words(&[32, 0, 0]),
    ] {
        assert_eq!(raw.call(5, &body).error, Some(22));
    }
}

#[test]
fn a_mappable_region_has_its_descriptor_on_both_replies_and_areas_on_the_second() {
    let served = serve();
    let mut raw = served.client();
    let first = raw.call(5, &words(&[32, 0, 2, 0, 0, 0, 0, 0]));
    assert_eq!(
        (first.size, first.word(0), first.word(4), first.fds.len()),
        (48, 80, 15, 1)
    );
    assert_eq!(first.word(12), 32, "QEMU refuses capabilities at offset 0");
    let second = raw.call(5, &words(&[80, 0, 2, 0, 0, 0, 0, 0]));
    assert_eq!(
        (second.size, second.word(12), second.fds.len()),
        (96, 32, 1)
    );
    assert_eq!(
        (second.word(32), second.word(36), second.word(40)),
        (1 << 16 | 1, 0, 2)
    );
    let areas = [48, 56, 64, 72].map(|at| second.long(at));
    assert_eq!(areas, [0, 0x1000, 0x2000, 0x6000]);
    let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    assert_eq!(inode(&second.fds[0]), inode(&served.bar2));
}
