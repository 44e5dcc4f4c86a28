//! What dpuctl counts is what was sent.

use crate::fixture::{Pair, flow};
use distdpu_tests::dpu::Dpu;
use distdpu_tests::virtio_net::Setup;
use serde_json::Value;

fn queue(dpu: &Dpu, function: usize, name: &str) -> Value {
    let stats = dpu.function_stats(function).unwrap();
    stats["queues"]
        .as_array()
        .and_then(|list| list.iter().find(|q| q["name"] == name))
        .cloned()
        .unwrap_or_else(|| panic!("no queue {name} in {stats}"))
}

fn count(queue: &Value, key: &str) -> u64 {
    queue[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no {key} in {queue}"))
}

#[test]
fn packets_and_bytes_are_those_that_were_sent() {
    let mut pair = Pair::started(Setup::default());
    let before = (queue(&pair.dpu, 0, "tx0"), queue(&pair.dpu, 1, "rx0"));
    let mut bytes = 0;
    for n in 0..100 {
        let packet = flow(0, 1).frame(60 + 13 * n, n as u64);
        bytes += packet.frame.len() as u64;
        pair.a.send(&packet).unwrap();
        pair.b.receive().unwrap();
    }
    pair.a.drain(0).unwrap();
    let after = (queue(&pair.dpu, 0, "tx0"), queue(&pair.dpu, 1, "rx0"));
    for (name, before, after) in [("tx0", &before.0, &after.0), ("rx0", &before.1, &after.1)] {
        assert_eq!(
            count(after, "packets") - count(before, "packets"),
            100,
            "{name}"
        );
        assert_eq!(
            count(after, "bytes") - count(before, "bytes"),
            bytes,
            "{name}"
        );
        assert_eq!(after["enabled"], true);
    }
    assert!(count(&after.0, "kicks") > count(&before.0, "kicks"));
    assert!(count(&after.1, "interrupts") > count(&before.1, "interrupts"));
}

#[test]
fn a_frame_too_long_for_the_wire_is_a_drop_with_a_reason() {
    let mut pair = Pair::started(Setup::default());
    pair.a.send(&flow(0, 1).frame(20000, 1)).unwrap();
    pair.works();
    let tx = queue(&pair.dpu, 0, "tx0");
    let rx = queue(&pair.dpu, 1, "rx0");
    let drops = |q: &Value| -> u64 {
        q["drops"]
            .as_object()
            .map_or(0, |d| d.values().filter_map(Value::as_u64).sum())
    };
    assert_eq!(drops(&tx) + drops(&rx), 1, "{tx} {rx}");
}

#[test]
fn status_functions_and_stats_agree_on_the_life_cycle() {
    let mut pair = Pair::new();
    let state =
        |pair: &Pair| pair.dpu.ctl(&["functions"]).unwrap()["functions"][0]["state"].clone();
    assert_eq!(state(&pair), "connected");
    pair.start(Setup::default(), Setup::default());
    pair.works();
    assert_eq!(state(&pair), "running");
    let stats = pair.dpu.function_stats(0).unwrap();
    let features = format!("{:#x}", pair.a.features);
    assert_eq!(stats["features"], features.as_str(), "{stats}");
    assert!(stats["dma_bytes"].as_u64() >= Some(48 << 20), "{stats}");
    let status = pair.dpu.ctl(&["status"]).unwrap();
    assert_eq!(status["ems"].as_array().map(Vec::len), Some(2), "{status}");
}
