//! Ports other than the wire between two functions.

use crate::fixture::{Pair, flow};
use distdpu_tests::dpu::{Dpu, Net, config, mac, program};
use distdpu_tests::packet::{Flow, judge, payload};
use distdpu_tests::time::{QUIET, SOON, wait_for};
use distdpu_tests::virtio_net::features::PLAIN;
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Command;

fn single(port: &'static str) -> (Dpu, VirtioNet) {
    let net = Net {
        port: Some(port),
        ..Net::default()
    };
    let dpu = Dpu::start(&[net]).unwrap();
    let mut driver = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    driver.start(Setup::default()).unwrap();
    (dpu, driver)
}

#[test]
fn the_loopback_port_gives_every_frame_back() {
    let (_dpu, mut driver) = single("{ loopback = true }");
    let own = Flow::new(mac(0), mac(0));
    for len in [60, 1514, 9014] {
        let sent = own.frame(len, len as u64);
        driver.send(&sent).unwrap();
        assert!(driver.receive().unwrap().frame == sent.frame, "{len} bytes");
    }
    let data = payload(50000, 1);
    driver.send(&own.tcp().large(1, &data, 1448)).unwrap();
    assert!(judge(&driver.receive().unwrap().frame).unwrap().payload == data);
    driver
        .start(Setup {
            features: PLAIN,
            ..Setup::default()
        })
        .unwrap();
    let sent = own.frame(1000, 2);
    driver.send(&sent).unwrap();
    assert!(driver.receive().unwrap().frame == sent.frame);
}

#[test]
fn the_null_port_takes_every_frame_and_gives_none() {
    let (dpu, mut driver) = single("{ null = true }");
    for n in 0..500 {
        driver.send(&flow(0, 1).frame(1000, n)).unwrap();
    }
    driver.drain(0).unwrap();
    assert!(driver.receive_within(QUIET).unwrap_err().is_timeout());
    let stats = dpu.function_stats(0).unwrap();
    assert_eq!(stats["queues"][1]["packets"], 500, "{stats}");
}

#[test]
fn a_capture_has_the_frames_of_both_directions() {
    let first = Net {
        capture: Some("net0.pcap"),
        ..Net::default()
    };
    let dpu = Dpu::start(&[first, Net::default()]).unwrap();
    let a = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    let mut pair = Pair { a, b, dpu };
    pair.start(Setup::default(), Setup::default());
    pair.works();
    // 3 rounds of 3 sizes each way, 24 bytes for the file and 16 for each frame.
    let want = 24 + 18 * 16 + 6 * (60 + 1000 + 1514);
    let path = pair.dpu.directory().join("net0.pcap");
    let bytes = wait_for("the frames in the capture", SOON, || {
        std::fs::read(&path)
            .ok()
            .filter(|bytes| bytes.len() >= want)
    })
    .unwrap_or_else(|e| {
        panic!(
            "{e}: {:?} of {want} bytes",
            std::fs::metadata(&path).map(|m| m.len())
        )
    });
    assert_eq!(bytes.len(), want);
    let magic = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    assert!(magic == 0xa1b2_c3d4 || magic == 0xa1b2_3c4d, "{magic:#x}");
    let first = flow(0, 1).frame(60, 0);
    assert_eq!(bytes[40..100], first.frame[..], "the first frame");
}

#[test]
fn a_capture_is_whole_when_its_em_is_asked_to_end() {
    let net = Net {
        port: Some("{ loopback = true }"),
        capture: Some("net0.pcap"),
        ..Net::default()
    };
    // Started by the test: an EM that the OM starts again empties the file.
    let dpu = Dpu::with_config(0, |directory| {
        let name = "name = \"em0\"\n";
        config(directory, &[net]).replacen(name, &format!("{name}managed = false\n"), 1)
    })
    .unwrap();
    let mut em = Command::new(program("em").unwrap())
        .arg("--om")
        .arg(dpu.directory().join("m2m.sock"))
        .args(["--name", "em0"])
        .spawn()
        .unwrap();
    wait_for("the EM", SOON, || {
        let state = dpu.ctl(&["functions"]).ok()?["functions"][0]["state"].clone();
        (state == "waiting").then_some(())
    })
    .unwrap();
    let mut driver = VirtioNet::open(&dpu.socket(0), Guest::default()).unwrap();
    driver.start(Setup::default()).unwrap();
    let own = Flow::new(mac(0), mac(0));
    for n in 0..200 {
        driver.send(&own.frame(1000, n)).unwrap();
        driver.receive().unwrap();
    }
    kill_process(Pid::from_child(&em), Signal::TERM).unwrap();
    let status = em.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{status}");
    let bytes = std::fs::read(dpu.directory().join("net0.pcap")).unwrap();
    assert_eq!(bytes.len(), 24 + 400 * 1016, "each frame out and in");
}
