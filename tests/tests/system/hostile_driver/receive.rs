//! Receive buffers that cannot take a frame.

use super::{Act, Seen, the_peer_lives};
use crate::fixture::{Pair, flow, receive_until};
use distdpu_tests::ring::packed::Place;
use distdpu_tests::ring::{NEXT, WRITE};
use distdpu_tests::time::{SOON, wait_for};
use distdpu_tests::virtio_net::features::{LINUX, PACKED, status};
use distdpu_tests::virtio_net::{Setup, VirtioNet};

#[test]
fn malformed_receive_chains() {
    use Seen::{NeedsReset, Nothing, Returned};
    /// A running receive queue whose next buffer is the case's: nothing was filled before.
    fn with(a: &mut VirtioNet, buffer: (u64, u32), flags: u16, next: u16) {
        let setup = Setup {
            fill: false,
            features: a.setup.features,
            ..Setup::default()
        };
        a.start(setup).unwrap();
        if let Some(packed) = &a.receive_rings[0].packed {
            let (area, place) = (a.receive_rings[0].area(), packed.next);
            area.make_available(place, buffer, 5, flags).unwrap();
            a.notify(0).unwrap();
            return;
        }
        a.receive_rings[0]
            .write_descriptor(0, buffer, flags, next)
            .unwrap();
        a.receive_rings[0].offer(0).unwrap();
        a.notify(0).unwrap();
    }
    let cases: [(&str, Seen, Act); 8] = [
        ("a readable receive buffer", Returned, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 2048), 0, 0);
        }),
        ("a receive buffer smaller than a header", Returned, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 5), WRITE, 0);
        }),
        ("a receive buffer of no bytes", Returned, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 0), WRITE, 0);
        }),
        ("a receive buffer outside the memory", Returned, |a| {
            with(a, (0x70_0000_0000, 2048), WRITE, 0)
        }),
        ("a receive buffer that wraps", Returned, |a| {
            with(a, (u64::MAX - 100, 2048), WRITE, 0)
        }),
        ("a loop of receive descriptors", Returned, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 64), WRITE | NEXT, 0);
            // What follows in a packed ring cannot be a loop: a buffer that the device may read.
            if a.receive_rings[0].packed.is_some() {
                with(a, (at, 64), NEXT, 0);
            }
        }),
        ("a ring that is broken", NeedsReset, |a| {
            let at = a.memory.end() - 8192;
            with(a, (at, 2048), WRITE, 0);
            let ring = &mut a.receive_rings[0];
            if ring.packed.is_some() {
                for index in 0..ring.size {
                    let place = Place { index, wrap: true };
                    ring.area()
                        .make_available(place, (at, 1), 5, WRITE | NEXT)
                        .unwrap();
                }
            } else {
                ring.set_available_index(1000).unwrap();
            }
            a.notify(0).unwrap();
        }),
        ("no receive buffer at all", Nothing, |a| {
            a.start(Setup {
                fill: false,
                features: a.setup.features,
                ..Setup::default()
            })
            .unwrap();
        }),
    ];
    let mut pair = Pair::new();
    pair.b.start(Setup::default()).unwrap();
    for ((name, seen, act), layout) in cases
        .iter()
        .flat_map(|case| [LINUX, PACKED].map(|layout| (*case, layout)))
    {
        pair.a.setup.features = layout;
        act(&mut pair.a);
        pair.b.send(&flow(1, 0).frame(500, 1)).unwrap();
        if seen != Nothing {
            wait_for(name, SOON, || {
                let returned = pair.a.receive_rings[0].used_index().unwrap() != 0;
                let asks = pair.a.status().unwrap() & status::NEEDS_RESET != 0;
                (if seen == Returned { returned } else { asks }).then_some(())
            })
            .unwrap();
        }
        the_peer_lives(&mut pair.b, name);
        pair.a.start(Setup::default()).unwrap();
        let marker = flow(1, 0).frame(333, 0xfeed);
        pair.b.send(&marker).unwrap();
        receive_until(&mut pair.a, &marker);
    }
    pair.works();
}
