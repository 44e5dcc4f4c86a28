use std::sync::mpsc;
use std::time::Duration;

use dot_iommu::{Access, DotError};
use smartep::dma::DmaError;

use super::harness::*;

#[test]
fn mapped_memory_is_the_clients() {
    let served = serve();
    let mut raw = served.client();
    let file = HostFile::new(0x10000);
    rustix::io::pwrite(&file.0, b"from the guest", 0x3010).unwrap();
    assert_eq!(raw.map(0x4000_0000, 0x8000, Some((&file.0, 0x3000))), None);
    let reader = served.table.reader();
    let mut data = [0; 14];
    let view = reader.pin();
    view.translate(0x4000_0010, 14, Access::Read)
        .unwrap()
        .copy_to(&mut data)
        .unwrap();
    assert_eq!(&data, b"from the guest");
    view.translate(0x4000_7fff, 1, Access::Write)
        .unwrap()
        .copy_from(&[0x5a])
        .unwrap();
    rustix::io::pread(&file.0, &mut data[..1], 0xafff).unwrap();
    assert_eq!(data[0], 0x5a);
    assert!(view.translate(0x4000_8000, 1, Access::Read).is_err());
}

#[test]
fn bad_maps_are_refused_with_their_errno_and_their_descriptors_closed() {
    let served = serve_alone();
    let mut raw = served.client();
    let file = HostFile::new(0x10000);
    assert_eq!(raw.map(0x1000, 0x2000, Some((&file.0, 0))), None);
    let before = open_fds();
    assert_eq!(
        raw.map(0x2000, 0x2000, Some((&file.0, 0))),
        Some(17),
        "overlap"
    );
    assert_eq!(raw.map(0x1000, 0x2000, None), Some(17), "the same again");
    assert_eq!(raw.map(0x10000, 0, Some((&file.0, 0))), Some(22), "empty");
    assert_eq!(
        raw.map(u64::MAX - 0xfff, 0x2000, Some((&file.0, 0))),
        Some(22),
        "wraps"
    );
    assert!(
        raw.map(0x10000, 0x20000, Some((&file.0, 0))).is_some(),
        "longer than its file"
    );
    assert!(
        raw.map(0x10000, 0x1000, Some((&file.0, u64::MAX - 0xfff)))
            .is_some(),
        "offset wraps"
    );
    let body = [&words(&[32, 0x13, 0, 0])[..], &[0; 16]].concat();
    assert_eq!(raw.call(2, &body).error, Some(22), "unknown flags");
    assert_eq!(raw.call(2, &body[..20]).error, Some(22), "short");
    assert_eq!(open_fds(), before);
    assert_eq!(served.table.ranges().len(), 1);
}

#[test]
fn unmap_is_by_range() {
    let served = serve();
    let mut raw = served.client();
    let file = HostFile::new(0x10000);
    for i in 0..8 {
        assert_eq!(
            raw.map(0x10000 * i, 0x1000, Some((&file.0, 0x1000 * i))),
            None
        );
    }
    let reply = raw.unmap(0x8000, 0x20000, 0);
    assert_eq!((reply.error, reply.size), (None, 40), "covers two");
    assert_eq!(served.table.ranges().len(), 6);
    assert_eq!(raw.unmap(0x90_0000, 0x1000, 0).error, None, "never mapped");
    assert_eq!(
        raw.unmap(0xfee0_0000, 0xffff_ffff_0110_0000, 0).error,
        None,
        "past the end"
    );
    assert_eq!(raw.unmap(0x30000, 0x800, 0).error, Some(22), "would split");
    assert_eq!(raw.unmap(0, 0, 0).error, Some(22), "empty");
    assert_eq!(raw.unmap(0, 0x1000, 1).error, Some(95), "dirty bitmap");
    let reply = raw.unmap(5, 0, 2);
    assert_eq!(
        (reply.error, reply.size),
        (Some(22), 40),
        "all, with an address"
    );
    assert_eq!(served.table.ranges().len(), 6);
    assert_eq!(raw.unmap(0, 0, 2).error, None, "all");
    assert!(served.table.ranges().is_empty());
    let reply = raw.call(3, &words(&[24, 0]));
    assert_eq!((reply.error, reply.size), (Some(22), 40), "short");
}

#[test]
fn thousands_of_maps_of_one_file_share_one_mapping() {
    let served = serve_alone();
    let mut raw = served.client();
    let file = HostFile::new(0x1000 * 20_000);
    let (fds, maps) = (
        open_fds(),
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .count(),
    );
    for i in 0..20_000 {
        let page = i * 7919 % 20_000;
        assert_eq!(
            raw.map(
                0x10_0000_0000 + 0x2000 * i,
                0x1000,
                Some((&file.0, 0x1000 * page))
            ),
            None
        );
    }
    assert_eq!(served.table.ranges().len(), 20_000);
    assert!(open_fds() <= fds + 1);
    let now = std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count();
    assert!(now < maps + 50, "{now} mappings after {maps}");
    assert_eq!(raw.unmap(0, 0, 2).error, None);
}

#[test]
fn pipelined_bursts_are_answered_in_order() {
    let served = serve();
    let mut raw = served.client();
    let mut ids = Vec::new();
    for i in 0..200u64 {
        let body = [
            &words(&[32, 3, 0, 0])[..],
            &(i * 0x1000).to_le_bytes(),
            &0x1000u64.to_le_bytes(),
        ]
        .concat();
        ids.push(raw.send(2, 0, &body, &[]));
    }
    let answered: Vec<u16> = ids.iter().map(|_| raw.receive().unwrap().id).collect();
    assert_eq!(answered, ids);
    assert_eq!(served.table.ranges().len(), 200);
}

#[test]
fn a_client_that_leaves_takes_its_memory_along() {
    let served = serve();
    let mut raw = served.client();
    let file = HostFile::new(0x1000);
    assert_eq!(raw.map(0, 0x1000, Some((&file.0, 0))), None);
    drop(raw);
    served.until("the end", || served.table.ranges().is_empty());
}

/// Answers one DMA message as QEMU would, from `memory` at address 0.
fn serve_dma(raw: &mut Raw, memory: &mut [u8]) -> (u16, usize) {
    let message = raw.receive().unwrap();
    assert!(message.is_command);
    let (address, count) = (message.long(0) as usize, message.long(8) as usize);
    let mut body = message.body[..16].to_vec();
    if message.command == 11 {
        body.extend_from_slice(&memory[address..address + count]);
    } else {
        memory[address..address + count].copy_from_slice(&message.body[16..]);
    }
    let head = header(message.id, message.command, 16 + body.len(), 1);
    std::io::Write::write_all(&mut raw.stream, &[head, body].concat()).unwrap();
    (message.command, count)
}

#[test]
fn memory_without_a_descriptor_is_reached_by_messages_of_at_most_64_kib() {
    let served = serve();
    let mut raw = served.client();
    assert_eq!(raw.map(0, 0x10_0000, None), None);
    let view_error = served
        .table
        .reader()
        .pin()
        .translate(0, 4, Access::Read)
        .unwrap_err();
    assert!(matches!(view_error, DotError::MessageOnly { .. }));
    let dma = served.data.dma.lock().unwrap().clone().unwrap();
    let mut memory: Vec<u8> = (0..0x10_0000).map(|i| (i / 7) as u8).collect();
    let want = memory[0x123..0x123 + 150_000].to_vec();
    let (tx, rx) = mpsc::channel();
    let done = tx.clone();
    dma.submit_read(0x123, 150_000, Box::new(move |r| done.send(r).unwrap()));
    assert_eq!(
        [(); 3].map(|()| serve_dma(&mut raw, &mut memory)),
        [(11, 65536), (11, 65536), (11, 18928)]
    );
    assert_eq!(
        rx.recv_timeout(Duration::from_secs(10)).unwrap().unwrap(),
        want
    );
    let done = tx.clone();
    dma.submit_write(
        0x5000,
        vec![0xee; 70_000],
        Box::new(move |r| done.send(r).unwrap()),
    );
    assert_eq!(
        [(); 2].map(|()| serve_dma(&mut raw, &mut memory)),
        [(12, 65536), (12, 4464)]
    );
    assert_eq!(
        rx.recv_timeout(Duration::from_secs(10)).unwrap(),
        Ok(vec![])
    );
    assert!(memory[0x5000..0x5000 + 70_000].iter().all(|b| *b == 0xee));
}

#[test]
fn accesses_are_answered_while_a_dma_message_waits() {
    let served = serve();
    let mut raw = served.client();
    let dma = served.data.dma.lock().unwrap().clone().unwrap();
    let (tx, rx) = mpsc::channel();
    dma.submit_read(0, 16, Box::new(move |r| tx.send(r).unwrap()));
    let question = raw.receive().unwrap();
    assert_eq!(question.command, 11);
    for _ in 0..100 {
        assert_eq!(raw.read(7, 0, 2), [0xf4, 0x1a]);
    }
    assert!(rx.try_recv().is_err());
    let refusal = [
        &header(question.id, 11, 16, 0x21)[..12],
        &19u32.to_le_bytes(),
    ]
    .concat();
    std::io::Write::write_all(&mut raw.stream, &refusal).unwrap();
    let result = rx.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(result, Err(DmaError::Refused(rustix::io::Errno::NODEV)));
}

#[test]
fn dma_messages_fail_when_the_client_leaves_or_answers_nonsense() {
    let served = serve();
    let mut raw = served.client();
    let dma = served.data.dma.lock().unwrap().clone().unwrap();
    let (tx, rx) = mpsc::channel();
    let ask = || {
        let tx = tx.clone();
        dma.submit_read(0, 16, Box::new(move |r| tx.send(r).unwrap()));
    };
    ask();
    let question = raw.receive().unwrap();
    let nonsense = [
        &header(question.id, 11, 16 + 20, 1)[..],
        &question.body,
        &[0; 4],
    ]
    .concat();
    std::io::Write::write_all(&mut raw.stream, &nonsense).unwrap();
    assert_eq!(
        rx.recv_timeout(Duration::from_secs(10)).unwrap(),
        Err(DmaError::Answer)
    );
    (0..50).for_each(|_| ask());
    drop(raw);
    for _ in 0..50 {
        assert_eq!(
            rx.recv_timeout(Duration::from_secs(10)).unwrap(),
            Err(DmaError::Gone)
        );
    }
}

#[test]
fn a_client_that_knows_no_dma_messages_gets_none() {
    let served = serve();
    let mut raw = served.raw();
    let version =
        b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576}}\0";
    assert_eq!(raw.call(1, version).error, None);
    let dma = served.data.dma.lock().unwrap().clone().unwrap();
    let (tx, rx) = mpsc::channel();
    dma.submit_read(0, 16, Box::new(move |r| tx.send(r).unwrap()));
    assert_eq!(rx.recv().unwrap(), Err(DmaError::Unsupported));
    assert_eq!(
        raw.read(7, 0, 2),
        [0xf4, 0x1a],
        "and nothing came in between"
    );
}

#[test]
fn writes_on_their_way_fit_a_sockets_buffer_and_do_not_hold_up_accesses() {
    let served = serve();
    let mut raw = served.client();
    let dma = served.data.dma.lock().unwrap().clone().unwrap();
    let (tx, rx) = mpsc::channel();
    for i in 0..20u8 {
        let tx = tx.clone();
        // Nobody reads yet: this must not block.
        dma.submit_write(
            u64::from(i) << 16,
            vec![i; 65536],
            Box::new(move |r| tx.send(r).unwrap()),
        );
    }
    let mut memory = vec![0; 20 << 16];
    for _ in 0..20 {
        assert_eq!(serve_dma(&mut raw, &mut memory), (12, 65536));
    }
    for _ in 0..20 {
        assert_eq!(
            rx.recv_timeout(Duration::from_secs(10)).unwrap(),
            Ok(vec![])
        );
    }
    for (i, page) in memory.chunks(65536).enumerate() {
        assert!(page.iter().all(|b| *b == i as u8));
    }
}

#[test]
fn a_file_that_grew_or_shrank_is_mapped_as_it_is_now() {
    let served = serve();
    let mut raw = served.client();
    let file = HostFile::new(0x2000);
    assert_eq!(raw.map(0, 0x2000, Some((&file.0, 0))), None);
    assert!(
        raw.map(0x10000, 0x1000, Some((&file.0, 0x2000))).is_some(),
        "not yet that long"
    );
    rustix::fs::ftruncate(&file.0, 0x4000).unwrap();
    assert_eq!(raw.map(0x10000, 0x2000, Some((&file.0, 0x2000))), None);
    let view_of = |address| {
        let reader = served.table.reader();
        let mut data = [0];
        let view = reader.pin();
        let span = view.translate(address, 1, Access::Read).unwrap();
        span.copy_to(&mut data).unwrap();
        data[0]
    };
    rustix::io::pwrite(&file.0, &[0x77], 0x2001).unwrap();
    assert_eq!(view_of(0x10001), 0x77);
    rustix::fs::ftruncate(&file.0, 0x3000).unwrap();
    assert!(
        raw.map(0x20000, 0x1000, Some((&file.0, 0x3000))).is_some(),
        "no longer that long"
    );
    assert_eq!(raw.map(0x20000, 0x1000, Some((&file.0, 0x2000))), None);
}

#[test]
fn a_file_first_seen_read_only_can_be_written_through_a_better_descriptor() {
    use std::os::fd::AsRawFd;
    let served = serve();
    let mut raw = served.client();
    let file = HostFile::new(0x2000);
    let path = format!("/proc/self/fd/{}", file.0.as_raw_fd());
    let read_only: std::os::fd::OwnedFd = std::fs::File::open(path).unwrap().into();
    let map = |raw: &mut Raw, address: u64, flags: u32, fd: &std::os::fd::OwnedFd| {
        let body = [
            &words(&[32, flags, 0, 0])[..],
            &address.to_le_bytes(),
            &0x1000u64.to_le_bytes(),
        ]
        .concat();
        raw.call_with(2, &body, &[std::os::fd::AsFd::as_fd(fd)])
            .error
    };
    assert_eq!(map(&mut raw, 0, 1, &read_only), None);
    assert_eq!(map(&mut raw, 0x10000, 3, &read_only), Some(13));
    assert_eq!(map(&mut raw, 0x10000, 3, &file.0), None);
    let reader = served.table.reader();
    assert!(reader.pin().translate(0x10000, 4, Access::Write).is_ok());
    assert!(reader.pin().translate(0, 4, Access::Write).is_err());
}

#[test]
fn more_maps_than_agreed_on_are_refused_until_some_go() {
    let served = serve();
    let mut raw = served.raw();
    let version = b"\0\0\0\0{\"capabilities\":{\"max_dma_maps\":3}}\0";
    assert_eq!(raw.call(1, version).error, None);
    for i in 0..3 {
        assert_eq!(raw.map(0x1000 * i, 0x1000, None), None);
    }
    assert_eq!(raw.map(0x8000, 0x1000, None), Some(28));
    assert_eq!(raw.unmap(0, 0x2000, 0).error, None);
    assert_eq!(raw.map(0x8000, 0x1000, None), None);
    assert_eq!(raw.map(0x9000, 0x1000, None), None);
    assert_eq!(raw.map(0xa000, 0x1000, None), Some(28));
}

#[test]
fn the_data_side_learns_of_each_file_once_and_when_its_last_range_is_gone() {
    let served = serve();
    let mut raw = served.client();
    let (a, b) = (HostFile::new(0x10000), HostFile::new(0x4000));
    assert_eq!(raw.map(0x0, 0x1000, Some((&a.0, 0))), None);
    assert_eq!(raw.map(0x1000, 0x1000, Some((&a.0, 0x5000))), None);
    assert_eq!(raw.map(0x2000, 0x1000, Some((&b.0, 0))), None);
    assert_eq!(raw.map(0x3000, 0x1000, None), None);
    let came = || served.data.came.lock().unwrap().clone();
    let gone = || served.data.gone.lock().unwrap().clone();
    let first = came();
    let sizes: Vec<u64> = first.iter().map(|file| file.1).collect();
    assert_eq!((sizes, gone().len()), (vec![0x10000, 0x4000], 0));
    raw.unmap(0x0, 0x1000, 0);
    assert!(gone().is_empty());
    raw.unmap(0x1000, 0x1000, 0);
    assert_eq!(gone(), [first[0].0]);
    assert_eq!(raw.map(0x0, 0x1000, Some((&a.0, 0))), None);
    let again = came();
    assert!(again.len() == 3 && again[2].0 != first[0].0);
}
