use super::super::status::{ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FEATURES_OK};
use super::*;
use crate::testing::signals;

const OFFERED: u64 = feature::VERSION_1 | feature::EVENT_IDX | 0b111;

fn registers() -> CommonConfig {
    let offer = Offer {
        features: OFFERED,
        queues: 3,
        queue_size: 256,
        vectors: 4,
        // Bit 1 needs bit 0.
        acceptable: |features| features & 2 == 0 || features & 1 != 0,
    };
    CommonConfig::new(offer, signals(3))
}

fn read16(c: &CommonConfig, offset: u64) -> u16 {
    let mut data = [0; 2];
    c.read(offset, &mut data);
    u16::from_le_bytes(data)
}

fn read32(c: &CommonConfig, offset: u64) -> u32 {
    let mut data = [0; 4];
    c.read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn accept(c: &mut CommonConfig, features: u64) {
    for (select, word) in [(0u32, features as u32), (1, (features >> 32) as u32)] {
        c.write(0x08, &select.to_le_bytes());
        c.write(0x0c, &word.to_le_bytes());
    }
}

/// Negotiates and answers whether FEATURES_OK stayed.
fn negotiate(c: &mut CommonConfig, features: u64) -> bool {
    c.write(0x14, &[ACKNOWLEDGE]);
    c.write(0x14, &[ACKNOWLEDGE | DRIVER]);
    accept(c, features);
    c.write(0x14, &[ACKNOWLEDGE | DRIVER | FEATURES_OK]);
    c.status() & FEATURES_OK != 0
}

#[test]
fn the_offer_is_read_in_words() {
    let mut c = registers();
    for (select, word) in [
        (0u32, OFFERED as u32),
        (1, (OFFERED >> 32) as u32),
        (2, 0),
        (u32::MAX, 0),
    ] {
        c.write(0x00, &select.to_le_bytes());
        assert_eq!(read32(&c, 0x00), select);
        assert_eq!(read32(&c, 0x04), word, "word {select}");
    }
    assert_eq!(read16(&c, 0x12), 3);
}

#[test]
fn features_ok_stays_only_for_features_that_work() {
    let cases = [
        ("the minimum", feature::VERSION_1, true),
        ("all that is offered", OFFERED, true),
        ("no VERSION_1", 1, false),
        ("nothing", 0, false),
        (
            "a bit that is not offered",
            feature::VERSION_1 | 1 << 40,
            false,
        ),
        (
            "a bit without the one it needs",
            feature::VERSION_1 | 2,
            false,
        ),
    ];
    for (name, features, want) in cases {
        assert_eq!(negotiate(&mut registers(), features), want, "{name}");
    }
}

#[test]
fn a_driver_may_try_other_features_after_a_refusal() {
    let mut c = registers();
    assert!(!negotiate(&mut c, feature::VERSION_1 | 2));
    assert!(negotiate(&mut c, feature::VERSION_1 | 3));
}

#[test]
fn features_are_settled_by_features_ok() {
    let mut c = registers();
    assert!(negotiate(&mut c, feature::VERSION_1));
    accept(&mut c, u64::MAX);
    assert_eq!(c.features(), feature::VERSION_1);
}

#[test]
fn driver_ok_starts_once_and_only_after_features_ok() {
    let mut c = registers();
    assert_eq!(c.write(0x14, &[DRIVER_OK]), Action::None);
    assert_eq!(c.status() & DRIVER_OK, 0);
    assert!(negotiate(&mut c, feature::VERSION_1));
    let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
    assert_eq!(c.write(0x14, &[all]), Action::Start);
    assert_eq!(c.write(0x14, &[all]), Action::None);
    assert_eq!(c.status(), all);
    c.write(0x14, &[ACKNOWLEDGE]);
    assert_eq!(c.status(), all, "bits are not cleared but by a reset");
}

#[test]
fn a_reset_brings_everything_back() {
    let mut c = registers();
    assert!(negotiate(&mut c, feature::VERSION_1));
    c.write(0x10, &[1, 0]);
    c.write(0x1a, &[2, 0]);
    c.write(0x18, &[16, 0]);
    c.write(0x20, &[0xf0; 8]);
    c.signals.set_needs_reset();
    assert_ne!(c.status() & DEVICE_NEEDS_RESET, 0);
    assert_eq!(c.write(0x14, &[0]), Action::Reset);
    assert_ne!(c.status(), 0, "not before the data path let go");
    c.reset();
    assert_eq!((c.status(), c.features()), (0, 0));
    assert_eq!(
        (read16(&c, 0x10), read16(&c, 0x1a), read16(&c, 0x18)),
        (NO_VECTOR, NO_VECTOR, 256)
    );
    assert_eq!(read32(&c, 0x20), 0);
}

#[test]
fn a_queue_that_does_not_exist_has_size_0_and_takes_nothing() {
    let mut c = registers();
    for queue in [3u16, 0x7fff, 0xffff] {
        c.write(0x16, &queue.to_le_bytes());
        assert_eq!(read16(&c, 0x16), queue);
        for offset in (0x18..0x40).step_by(2) {
            c.write(offset, &[1, 0]);
        }
        assert_eq!(
            (read16(&c, 0x18), read16(&c, 0x1a), read16(&c, 0x1c)),
            (0, NO_VECTOR, 0)
        );
    }
    assert_eq!(c.queues(), registers().queues());
}

#[test]
fn queue_sizes_are_powers_of_two_up_to_the_maximum() {
    let mut c = registers();
    for (size, want) in [
        (16u16, 16),
        (0, 16),
        (3, 16),
        (257, 16),
        (512, 16),
        (1, 1),
        (256, 256),
    ] {
        c.write(0x18, &size.to_le_bytes());
        assert_eq!(read16(&c, 0x18), want, "after {size}");
    }
}

#[test]
fn vectors_out_of_range_become_none() {
    let mut c = registers();
    for offset in [0x10, 0x1a] {
        for (vector, want) in [(3u16, 3), (4, NO_VECTOR), (0, 0), (NO_VECTOR, NO_VECTOR)] {
            c.write(offset, &vector.to_le_bytes());
            assert_eq!(read16(&c, offset), want, "{offset:#x}: {vector}");
        }
    }
}

#[test]
fn an_enabled_queue_does_not_change() {
    let mut c = registers();
    for (offset, address) in [(0x20, 0x1000u64), (0x28, 0x2000), (0x30, 0x3000)] {
        c.write(offset, &address.to_le_bytes());
    }
    c.write(0x1c, &[1, 0]);
    assert_eq!(read16(&c, 0x1c), 1);
    let before = c.queues().to_vec();
    c.write(0x20, &[0xf0; 8]);
    c.write(0x2c, &[0xf0; 4]);
    c.write(0x18, &[16, 0]);
    c.write(0x1c, &[0, 0]);
    assert_eq!(c.queues(), before);
}

#[test]
fn rings_without_address_or_alignment_are_not_enabled() {
    for addresses in [
        [0u64, 0, 0],
        [0x1001, 0x2000, 0x3000],
        [0x1000, 0x2001, 0x3000],
        [0x1000, 0x2000, 0x3002],
    ] {
        let mut c = registers();
        for (offset, address) in [0x20, 0x28, 0x30].into_iter().zip(addresses) {
            c.write(offset, &address.to_le_bytes());
        }
        c.write(0x1c, &[1, 0]);
        assert_eq!(read16(&c, 0x1c), 0, "{addresses:x?}");
    }
}

/// Sets up queue 0 and enables it.
fn enable(c: &mut CommonConfig) -> Action {
    for (offset, address) in [(0x20, 0x1000u64), (0x28, 0x2000), (0x30, 0x3000)] {
        c.write(offset, &address.to_le_bytes());
    }
    c.write(0x1c, &[1, 0])
}

#[test]
fn one_queue_is_reset_and_enabled_again_while_the_others_run() {
    let offer = Offer {
        features: OFFERED | feature::RING_RESET,
        ..registers().offer
    };
    let mut c = CommonConfig::new(offer, signals(3));
    assert!(negotiate(&mut c, feature::VERSION_1 | feature::RING_RESET));
    assert_eq!(c.write(0x3a, &[1, 0]), Action::None, "not enabled yet");
    c.write(0x18, &[16, 0]);
    c.write(0x1a, &[2, 0]);
    assert_eq!(enable(&mut c), Action::None);
    c.write(0x14, &[15]);
    assert_eq!(c.write(0x3a, &[1, 0]), Action::ResetQueue(0));
    c.reset_queue(0);
    assert_eq!((read16(&c, 0x3a), read16(&c, 0x1c)), (0, 0));
    assert_eq!((read16(&c, 0x18), read16(&c, 0x1a)), (256, NO_VECTOR));
    assert_eq!(enable(&mut c), Action::StartQueue(0));
    assert_eq!(c.write(0x1c, &[1, 0]), Action::None, "it runs already");
    // Without the feature neither is possible.
    let mut c = CommonConfig::new(offer, signals(3));
    assert!(negotiate(&mut c, feature::VERSION_1));
    c.write(0x14, &[15]);
    assert_eq!(enable(&mut c), Action::None);
    assert_eq!(read16(&c, 0x1c), 0);
    c.write(0x3a, &[1, 0]);
    assert_eq!(c.write(0x3a, &[1, 0]), Action::None);
}

#[test]
fn packed_rings_have_any_size_and_their_own_alignment() {
    let offer = Offer {
        features: OFFERED | feature::RING_PACKED,
        queue_size: 1000,
        ..registers().offer
    };
    let mut c = CommonConfig::new(offer, signals(3));
    assert!(negotiate(&mut c, feature::VERSION_1 | feature::RING_PACKED));
    for (size, want) in [(1u16, 1), (999, 999), (1001, 999), (0, 999), (1000, 1000)] {
        c.write(0x18, &size.to_le_bytes());
        assert_eq!(read16(&c, 0x18), want);
    }
    for (offset, address) in [(0x20, 0x1000u64), (0x28, 0x2002), (0x30, 0x3000)] {
        c.write(offset, &address.to_le_bytes());
    }
    c.write(0x1c, &[1, 0]);
    assert_eq!(read16(&c, 0x1c), 0, "events are aligned to 4 bytes");
    c.write(0x28, &0x2004u64.to_le_bytes());
    c.write(0x1c, &[1, 0]);
    assert_eq!(read16(&c, 0x1c), 1);
    let mut next = CommonConfig::new(offer, signals(3));
    assert!(next.restore(&c.save()));
}

#[test]
fn addresses_may_be_written_in_halves() {
    let mut c = registers();
    c.write(0x2c, &0x12u32.to_le_bytes());
    c.write(0x28, &0x3456_7890u32.to_le_bytes());
    assert_eq!(c.queues()[0].avail, 0x12_3456_7890);
    assert_eq!((read32(&c, 0x28), read32(&c, 0x2c)), (0x3456_7890, 0x12));
}

#[test]
fn every_access_of_every_shape_is_survived() {
    let mut c = registers();
    for offset in (0..0x48).chain([u64::MAX - 3, u64::MAX]) {
        for len in [0, 1, 2, 3, 4, 8, 64, 100] {
            let mut data = vec![0x55; len];
            c.read(offset, &mut data);
            c.write(offset, &data);
        }
    }
}

#[test]
fn another_process_goes_on_with_the_registers_of_a_device_of_the_same_shape() {
    let mut c = registers();
    assert!(negotiate(&mut c, feature::VERSION_1 | 1));
    c.write(0x10, &2u16.to_le_bytes());
    c.write(0x16, &1u16.to_le_bytes());
    c.write(0x18, &64u16.to_le_bytes());
    c.write(0x1a, &3u16.to_le_bytes());
    for (at, address) in [(0x20, 0x1000u64), (0x28, 0x2000), (0x30, 0x3000)] {
        c.write(at, &address.to_le_bytes());
    }
    c.write(0x1c, &[1, 0]);
    c.write(0x14, &[15]);
    let saved = c.save();
    let mut next = registers();
    assert!(next.restore(&saved) && next.is_running());
    let image = |c: &CommonConfig| {
        let mut bytes = [0; COMMON_BYTES];
        c.read(0, &mut bytes);
        bytes
    };
    assert_eq!(image(&next), image(&c));
    assert_eq!(next.write(0x14, &[15]), Action::None, "it runs already");
    let mut other = saved.clone();
    other.queues.pop();
    assert!(!registers().restore(&other));
    let mut other = saved.clone();
    other.queues[0].0.size = 512;
    assert!(!registers().restore(&other));
    let mut other = saved;
    other.driver_features |= 1 << 40;
    assert!(!registers().restore(&other));
}
