use super::harness::*;

#[test]
fn every_access_size_and_alignment_reaches_the_data_side() {
    let served = serve();
    let mut raw = served.client();
    for len in [1usize, 2, 3, 4, 8, 64] {
        for offset in [0u64, 1, 5, 0x1000] {
            let data: Vec<u8> = (0..len).map(|i| (i as u64 + offset) as u8 | 0x80).collect();
            let reply = raw.write(0, offset, &data);
            assert_eq!(
                (reply.error, reply.size, reply.word(12)),
                (None, 32, len as u32)
            );
            assert_eq!(raw.read(0, offset, len as u32), data);
        }
    }
}

#[test]
fn an_access_across_control_and_data_is_split() {
    let served = serve();
    let mut raw = served.client();
    raw.write(0, CONTROL_AT - 2, &[1, 2, 3, 4]);
    assert_eq!(raw.read(0, CONTROL_AT - 2, 4), [1, 2, 0xc0, 0xc0]);
    assert_eq!(raw.read(0, CONTROL_AT + 14, 4), [0xc0, 0xc0, 0xff, 0xff]);
    assert_eq!(served.data.memory.lock().unwrap()[CONTROL_AT as usize], 0);
}

#[test]
fn accesses_outside_read_ones_write_nothing_and_are_no_error() {
    let served = serve();
    let mut raw = served.client();
    for (region, offset) in [
        (0, BAR0 as u64 - 2),
        (0, u64::MAX - 1),
        (1, 0),
        (6, 0),
        (9, 0),
        (u32::MAX, 0),
    ] {
        assert_eq!(
            raw.read(region, offset, 4),
            [0xff; 4],
            "{region} {offset:#x}"
        );
        let reply = raw.write(region, offset, &[1; 4]);
        assert_eq!((reply.error, reply.size), (None, 32));
    }
    assert_eq!(
        raw.read(0, BAR0 as u64 - 2, 2),
        [0, 0],
        "nothing was written in part"
    );
}

#[test]
fn empty_and_bulk_accesses_work() {
    let served = serve();
    let mut raw = served.client();
    assert!(raw.read(0, 0, 0).is_empty());
    assert_eq!(raw.write(0, 0, &[]).error, None);
    let config = raw.read(7, 0, 4096);
    assert_eq!(config[..4], [0xf4, 0x1a, 0x41, 0x10]);
}

#[test]
fn a_write_whose_count_and_data_differ_is_refused_at_full_size() {
    let served = serve();
    let mut raw = served.client();
    let body = [&access(0, 0, 8)[..], &[1; 4]].concat();
    let reply = raw.call(10, &body);
    assert_eq!((reply.error, reply.size), (Some(22), 32));
    let reply = raw.call(10, &[1, 2, 3]);
    assert_eq!((reply.error, reply.size), (Some(22), 32));
}

#[test]
fn a_read_beyond_the_agreed_size_loses_the_connection() {
    let served = serve();
    let mut raw = served.client();
    raw.send(9, 0, &access(0, 0, (1 << 20) + 1), &[]);
    assert!(raw.closed());
    served.client();
}

#[test]
fn posted_writes_are_applied_in_order_and_not_answered() {
    let served = serve();
    let mut raw = served.client();
    for i in 0..1000u32 {
        let body = [&access(0, 0, 4)[..], &i.to_le_bytes()].concat();
        raw.send(10, 16, &body, &[]);
    }
    assert_eq!(raw.read(0, 0, 4), 999u32.to_le_bytes());
}

#[test]
fn errors_of_posted_messages_are_not_answered() {
    let served = serve();
    let mut raw = served.client();
    raw.send(10, 16, &access(0, 0, 99), &[]);
    raw.send(999, 16, &[], &[]);
    raw.send(8, 16, &[], &[]);
    raw.send(2, 16, &[], &[]);
    assert_eq!(
        raw.read(7, 0, 2),
        [0xf4, 0x1a],
        "the next reply is the read's"
    );
}

#[test]
fn write_multi_applies_mixed_sizes_and_regions_in_order() {
    let served = serve();
    let mut raw = served.client();
    let record = |region: u32, offset: u64, data: &[u8]| {
        let mut padded = [0; 8];
        padded[..data.len()].copy_from_slice(data);
        [&access(region, offset, data.len() as u32)[..], &padded].concat()
    };
    let records = [
        record(0, 0, &[1]),
        record(0, 0, &[2, 3]),
        record(7, 0x3c, &[9]),
        record(0, 8, &[7; 8]),
        record(5, 0, &[1]),
        record(0, 9, &[6]),
    ];
    let body = [&6u64.to_le_bytes()[..], &records.concat()].concat();
    let reply = raw.call(15, &body);
    assert_eq!((reply.error, reply.long(0)), (None, 6));
    assert_eq!(raw.read(0, 0, 2), [2, 3]);
    assert_eq!(raw.read(0, 8, 3), [7, 6, 7]);
    assert_eq!(raw.read(7, 0x3c, 1), [9]);
    for bad in [
        vec![],
        7u64.to_le_bytes().to_vec(),
        u64::MAX.to_le_bytes().to_vec(),
        body[..body.len() - 1].to_vec(),
    ] {
        assert_eq!(raw.call(15, &bad).error, Some(22));
    }
}

#[test]
fn bus_master_flr_and_reset_reach_the_data_side() {
    let served = serve();
    let mut raw = served.client();
    let calls = || std::mem::take(&mut *served.data.calls.lock().unwrap());
    calls();
    raw.write(7, 4, &[6, 0]);
    assert_eq!(calls(), ["bus_master true"]);
    raw.write(7, 0x48 + 1, &[0x80]); // PCIe capability at 0x40, Device Control at +8
    assert_eq!(calls(), ["reset", "bus_master false"]);
    assert_eq!(raw.read(7, 4, 2), [0, 0]);
    raw.write(7, 4, &[6, 0]);
    calls();
    assert_eq!(raw.call(13, &[]).error, None);
    assert_eq!(calls(), ["reset", "bus_master false"]);
    raw.write(7, 4, &[6, 0]);
    calls();
    drop(raw);
    served.until("the end", || served.data.calls.lock().unwrap().len() == 2);
    assert_eq!(calls(), ["disconnected", "bus_master false"]);
}

#[test]
fn the_data_side_hears_of_clients_that_agreed_on_a_version_only() {
    let served = serve();
    let events = || {
        let calls = served.data.calls.lock().unwrap();
        let relevant = |c: &&String| c.ends_with("connected");
        calls.iter().filter(relevant).cloned().collect::<Vec<_>>()
    };
    let mut raw = served.raw();
    assert_eq!(raw.call(1, &[9, 0, 0, 0]).error, Some(22));
    assert!(raw.closed());
    drop(served.raw());
    let mut raw = served.client();
    raw.read(7, 0, 4);
    assert_eq!(events(), ["connected"]);
    drop(raw);
    served.until("the end", || events().len() == 2);
    assert_eq!(events(), ["connected", "disconnected"]);
}

#[test]
fn a_new_client_finds_the_function_after_power_on() {
    let served = serve();
    let mut raw = served.client();
    raw.write(7, 4, &[6, 0]);
    drop(raw);
    assert_eq!(served.client().read(7, 4, 2), [0, 0]);
}
