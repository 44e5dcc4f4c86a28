//! Cases from a seed. `DISTDPU_FUZZ_CASES` says how many for each kind of port, `DISTDPU_FUZZ_SEED`
//! which.

use super::{Source, World};
use m2m_fabric::proto::RdmaLinkLayer;

/// Cases without the variable.
const CASES: u64 = 50_000;
/// Cases between two checks.
const CHECK_EVERY: u64 = 250;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn hostile_cases(link: RdmaLinkLayer) {
    let cases = variable("DISTDPU_FUZZ_CASES").unwrap_or(CASES);
    let seed = variable("DISTDPU_FUZZ_SEED").unwrap_or(0x6d6c_7835);
    println!("{cases} cases of {link:?} with DISTDPU_FUZZ_SEED={seed}");
    let mut world = World::new(link);
    for case in 0..cases {
        // Each stretch has a seed of its own, by which it can be run alone.
        if case % CHECK_EVERY == 0 {
            println!("case {case}");
        }
        let mut source = Source::seed(seed ^ case << 32);
        world.case(&mut source);
        if case % CHECK_EVERY == CHECK_EVERY - 1 {
            world.check();
        }
    }
    world.check();
    let coverage = world.coverage();
    println!("{coverage:?}");
    let (given, succeeded) = coverage.commands;
    // Cases that get nowhere would show nothing.
    assert!(succeeded > given / 5, "{coverage:?}");
    assert!(coverage.packets > cases / 40, "{coverage:?}");
    let (done, failed) = coverage.messages;
    assert!(done > cases / 60 && failed > cases / 500, "{coverage:?}");
    let frames = link == RdmaLinkLayer::Ethernet;
    assert_eq!(coverage.frames > cases / 1000, frames, "{coverage:?}");
}

#[test]
fn a_hostile_driver_harms_its_own_infiniband_function_only() {
    hostile_cases(RdmaLinkLayer::Infiniband);
}

#[test]
fn a_hostile_driver_harms_its_own_ethernet_function_only() {
    hostile_cases(RdmaLinkLayer::Ethernet);
}
