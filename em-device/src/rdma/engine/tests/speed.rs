//! How fast it is: `cargo test --release -p em-device rdma::engine::tests::speed -- --ignored --nocapture`.

use super::lab::*;
use crate::rdma::verbs::*;
use rustix::time::{ClockId, clock_gettime};

/// Processor time of this thread in seconds: others may be using the machine.
fn time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Messages per second through both engines on one thread, with this fabric's own cost.
fn rate(qps: u32, len: u32, total: u32, read: bool) -> f64 {
    let mut lab = Lab::new(2);
    let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE | Rights::REMOTE_READ;
    let a = lab.nodes[0].whole(rights);
    let b = lab.nodes[1].whole(rights);
    for n in 0..qps {
        let num = QpNum(n + 2);
        for node in 0..2 {
            lab.add_qp(node, num, Service::Rc, ReceiveFrom::Own);
        }
        lab.connect((0, num), (1, num), Service::Rc);
        lab.connect((1, num), (0, num), Service::Rc);
    }
    lab.nodes[0].engine.cq_mut(CQ).unwrap().armed = false;
    let batch = (1024 / qps).clamp(1, 64);
    let begin = time();
    let mut done = 0;
    while done < total {
        for n in 0..qps {
            for _ in 0..batch {
                let operation = match read {
                    true => Operation::Read {
                        addr: BASE,
                        key: b,
                        invalidate: None,
                    },
                    false => write(BASE, b),
                };
                let mut one = request(1, operation, &[sge(a, BASE, len)]);
                one.signaled = false;
                lab.nodes[0].post(QpNum(n + 2), one);
            }
        }
        lab.settle();
        done += qps * batch;
    }
    let time = time() - begin;
    assert_eq!(lab.nodes[0].counters().failed, 0);
    f64::from(done) / time
}

#[test]
#[ignore = "takes seconds and proves nothing by itself"]
fn rates() {
    for (qps, len) in [(1, 8), (16, 8), (64, 8), (1024, 8), (16, 256), (16, 4096)] {
        let writes = rate(qps, len, 1_000_000, false) / 1e6;
        println!("{qps:4} queue pairs, {len:5} bytes: {writes:.2} M writes/s");
    }
    let reads = rate(16, 8, 1_000_000, true) / 1e6;
    println!("  16 queue pairs,     8 bytes: {reads:.2} M reads/s");
    for len in [65536, 1 << 20] {
        let bytes = rate(1, len, 20_000, false) * f64::from(len) / 1e9;
        println!("   1 queue pair, {len:7} bytes: {bytes:.1} GB/s");
    }
}
