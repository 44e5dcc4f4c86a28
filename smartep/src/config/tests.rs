use proptest::prelude::*;

use super::*;

fn builder() -> ConfigBuilder {
    let mem = |size, kind| {
        Some(BarSpec {
            size,
            kind,
            prefetchable: false,
        })
    };
    ConfigBuilder {
        vendor: 0x1af4,
        device: 0x1041,
        revision: 1,
        class: 0x02_0000,
        subsystem_vendor: 0x1af4,
        subsystem: 1,
        bars: [
            mem(0x8000, BarKind::Mem64),
            None,
            mem(0x1000, BarKind::Mem32),
            mem(32, BarKind::Io),
            None,
            None,
        ],
        capabilities: vec![
            Capability::PciExpress,
            Capability::PowerManagement,
            Capability::MsiX {
                vectors: 4,
                table_bar: 2,
                table_offset: 0,
                pba_bar: 2,
                pba_offset: 0x800,
            },
            Capability::Vendor(vec![6, 1, 2, 3]),
        ],
    }
}

fn read32(space: &ConfigSpace, at: u64) -> u32 {
    let mut bytes = [0; 4];
    space.read(at, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn find(space: &ConfigSpace, id: u32) -> u64 {
    let mut at = u64::from(read32(space, 0x34) & 0xff);
    while read32(space, at) & 0xff != id {
        at = u64::from(read32(space, at) >> 8 & 0xff);
        assert_ne!(at, 0, "capability {id:#x} is in the list");
    }
    at
}

#[test]
fn header_says_what_the_builder_was_told() {
    let space = builder().build().unwrap();
    assert_eq!(read32(&space, 0), 0x1041_1af4);
    assert_eq!(read32(&space, 8), 0x0200_0001);
    assert_eq!(read32(&space, 0x2c), 0x0001_1af4);
}

#[test]
fn ones_written_to_a_bar_read_back_its_size_and_kind() {
    let mut space = builder().build().unwrap();
    for (at, want) in [
        (0x10, 0xffff_8004),
        (0x14, 0xffff_ffff),
        (0x18, 0xffff_f000),
        (0x1c, 0xffff_ffe1),
        (0x20, 0),
    ] {
        space.write(at, &[0xff; 4]);
        assert_eq!(read32(&space, at), want, "register {at:#x}");
    }
    space.write(0x10, &0x1234_5678u32.to_le_bytes());
    assert_eq!(read32(&space, 0x10), 0x1234_0004);
}

#[test]
fn read_only_bytes_keep_their_value() {
    let mut space = builder().build().unwrap();
    let before = [0u64, 8, 0x2c, 0x34].map(|at| read32(&space, at));
    for at in [0u64, 8, 0x2c, 0x34] {
        space.write(at, &[0xff; 4]);
    }
    assert_eq!([0u64, 8, 0x2c, 0x34].map(|at| read32(&space, at)), before);
}

#[test]
fn state_follows_command_register_and_msix_control() {
    let mut space = builder().build().unwrap();
    let state = space.write(4, &[0x06, 0x04]);
    assert!(state.bus_master && state.memory && state.intx_disabled && !state.msix_enabled);
    let msix = find(&space, 0x11);
    let state = space.write(msix + 2, &0xc000u16.to_le_bytes());
    assert!(state.msix_enabled && state.msix_masked);
    assert_eq!(
        read32(&space, msix) >> 16 & 0x7ff,
        3,
        "the table size is read-only"
    );
    assert_eq!(ConfigState::from_bits(state.to_bits()), state);
    assert_eq!(space.reset(), ConfigState::default());
}

#[test]
fn function_level_reset_is_reported_once_and_reads_as_zero() {
    let mut space = builder().build().unwrap();
    let control = find(&space, 0x10) + 8;
    assert!(space.write(control, &0x8000u16.to_le_bytes()).flr);
    assert_eq!(read32(&space, control) & 0x8000, 0);
    assert!(!space.write(control, &[0x10]).flr);
}

#[test]
fn accesses_past_the_end_read_ones_and_write_nothing() {
    let mut space = builder().build().unwrap();
    let mut bytes = [0; 4];
    space.write(4094, &[0xff; 4]);
    space.read(4094, &mut bytes);
    assert_eq!(bytes, [0, 0, 0xff, 0xff]);
    space.read(u64::MAX, &mut bytes);
    assert_eq!(bytes, [0xff; 4]);
}

#[test]
fn impossible_descriptions_are_refused() {
    let mut bad = builder();
    bad.bars[2] = Some(BarSpec {
        size: 0x3000,
        kind: BarKind::Mem32,
        prefetchable: false,
    });
    assert_eq!(bad.build().unwrap_err(), ConfigError::BarSize(2, 0x3000));
    let mut bad = builder();
    bad.bars[1] = bad.bars[2];
    assert_eq!(bad.build().unwrap_err(), ConfigError::BarPair(0));
    let mut bad = builder();
    bad.capabilities.push(Capability::Vendor(vec![9, 0]));
    assert_eq!(bad.build().unwrap_err(), ConfigError::VendorLength(4, 9));
    let mut bad = builder();
    bad.capabilities.extend(vec![Capability::PciExpress; 3]);
    assert_eq!(bad.build().unwrap_err(), ConfigError::NoRoom(0xc0));
}

proptest! {
    #[test]
    fn no_write_changes_what_is_read_only(
        writes in proptest::collection::vec((0u64..4200, proptest::collection::vec(any::<u8>(), 1..9)), 0..64),
    ) {
        let fresh = builder().build().unwrap();
        let mut space = fresh.clone();
        for (offset, data) in &writes {
            let state = space.write(*offset, data);
            prop_assert_eq!(ConfigState { flr: false, ..state }, space.state());
            prop_assert_eq!(ConfigState::from_bits(state.to_bits()), state);
        }
        // Ids, class, header type, BAR kinds, capability pointer, and the capability list itself.
        let (old, new) = (fresh.bytes(), space.bytes());
        for range in [0..4, 8..12, 14..15, 0x2c..0x38, 0x3d..0x3e, 0x40..0x48, 0x100..4096] {
            prop_assert_eq!(&old[range.clone()], &new[range]);
        }
        for (at, mask) in [(0x10, 0xf), (0x18, 0xf), (0x1c, 3)] {
            prop_assert_eq!(old[at] & mask, new[at] & mask);
        }
        prop_assert_eq!(new[0x49] & 0x80, 0, "the bit that starts a reset reads as zero");
        prop_assert_eq!(space.reset(), fresh.state());
        prop_assert_eq!(space.bytes(), fresh.bytes());
    }
}
