//! The table against a naive model, and every lookup of a small address space.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests count as no tests for clippy.toml

use std::collections::BTreeMap;
use std::sync::Arc;

use dot_iommu::{Access, Backing, DotError, DotTable, HostMapping, Perm};
use proptest::prelude::*;

/// Addresses of the model are small, and placed where the address space begins, ends, or neither.
const BASES: [u64; 3] = [0, 0x7fff_ff00, u64::MAX - 255];
const SPACE: u64 = 256;

#[derive(Clone, Debug)]
enum Step {
    Map {
        at: u64,
        len: u64,
        perm: Perm,
        message: bool,
    },
    Unmap {
        at: u64,
        len: u64,
    },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let perm = prop_oneof![Just(Perm::R), Just(Perm::W), Just(Perm::RW)];
    prop_oneof![
        8 => (0..SPACE, 0..40u64, perm, any::<bool>())
            .prop_map(|(at, len, perm, message)| Step::Map { at, len, perm, message }),
        4 => (0..SPACE, 0..60u64).prop_map(|(at, len)| Step::Unmap { at, len }),
        1 => Just(Step::Clear),
    ]
}

/// First offset → (last offset, rights, message only, generation).
type Model = BTreeMap<u64, (u64, Perm, bool, u64)>;

fn model_error(base: u64, at: u64, len: u64) -> Option<&'static str> {
    if len == 0 {
        Some("empty")
    } else if (base + at).checked_add(len - 1).is_none() {
        Some("wrap")
    } else {
        None
    }
}

fn name(error: &DotError) -> &'static str {
    match error {
        DotError::Empty { .. } => "empty",
        DotError::Wrap { .. } => "wrap",
        DotError::Overlap { .. } => "overlap",
        DotError::Split { .. } => "split",
        DotError::NotMapped { .. } => "not mapped",
        DotError::NoAccess { .. } => "no access",
        DotError::MessageOnly { .. } => "message",
        _ => "other",
    }
}

/// Host address of each guest address is its offset in the mapping: one mapping backs all ranges.
fn check_lookup(
    table: &DotTable,
    model: &Model,
    mapping: &Arc<HostMapping>,
    base: u64,
    at: u64,
    len: u64,
    access: Access,
) -> Result<(), TestCaseError> {
    let reader = table.reader();
    let view = reader.pin();
    let hit = model
        .iter()
        .find(|(first, (last, ..))| (**first..=*last).contains(&at));
    let found = view.lookup(base + at);
    prop_assert_eq!(
        found.map(|e| (e.start() - base, e.last() - base, e.generation().0)),
        hit.map(|(first, (last, _, _, generation))| (*first, *last, *generation))
    );
    let wanted = match (model_error(base, at, len), hit) {
        (Some(error), _) => Err(error),
        (None, None) => Err("not mapped"),
        (None, Some((_, (last, perm, message, _)))) => {
            if !perm.allows(access) {
                Err("no access")
            } else if at + len - 1 > *last {
                Err("not mapped")
            } else if *message {
                Err("message")
            } else {
                Ok(())
            }
        }
    };
    match (view.translate(base + at, len, access), wanted) {
        (Ok(span), Ok(())) => {
            prop_assert_eq!(span.len() as u64, len);
            let first = mapping.as_volatile_slice().ptr_guard().as_ptr() as u64;
            prop_assert_eq!(span.as_ptr() as u64 - first, at);
        }
        (Err(error), Err(wanted)) => prop_assert_eq!(name(&error), wanted),
        (got, wanted) => prop_assert!(false, "{:?} instead of {:?}", got, wanted),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn table_behaves_like_a_list_of_ranges(
        base in prop::sample::select(&BASES[..]),
        steps in prop::collection::vec(step(), 1..60),
        probes in prop::collection::vec((0..SPACE, 0..50u64, 0..3usize), 64),
    ) {
        let mapping = HostMapping::anonymous(SPACE + 64).unwrap();
        let table = DotTable::new();
        let mut model = Model::new();
        let mut newest = 0;
        for step in steps {
            match step {
                Step::Map { at, len, perm, message } => {
                    let backing = if message {
                        Backing::Message
                    } else {
                        Backing::Mapped { mapping: mapping.clone(), offset: at }
                    };
                    let wanted = model_error(base, at, len).or_else(|| {
                        model.iter().any(|(first, (last, ..))| *first < at + len && at <= *last)
                            .then_some("overlap")
                    });
                    match table.map(base + at, len, perm, backing) {
                        Ok(generation) => {
                            prop_assert_eq!(wanted, None);
                            prop_assert!(generation.0 > newest);
                            newest = generation.0;
                            model.insert(at, (at + len - 1, perm, message, newest));
                        }
                        Err(error) => prop_assert_eq!(Some(name(&error)), wanted),
                    }
                }
                Step::Unmap { at, len } => {
                    let touched = |first: u64, last: u64| first < at + len && at <= last;
                    let inside = |first: u64, last: u64| first >= at && last < at + len;
                    let split = model.iter().any(|(f, (l, ..))| touched(*f, *l) && !inside(*f, *l));
                    let wanted = model_error(base, at, len).or(split.then_some("split"));
                    match table.unmap(base + at, len) {
                        Ok(unmapped) => {
                            prop_assert_eq!(wanted, None);
                            let before = model.len();
                            let mut bytes = 0;
                            model.retain(|f, (l, ..)| {
                                let gone = inside(*f, *l);
                                bytes += if gone { *l - *f + 1 } else { 0 };
                                !gone
                            });
                            prop_assert_eq!(unmapped.ranges, before - model.len());
                            prop_assert_eq!(unmapped.bytes, bytes);
                        }
                        Err(error) => prop_assert_eq!(Some(name(&error)), wanted),
                    }
                }
                Step::Clear => {
                    prop_assert_eq!(table.clear().ranges, model.len());
                    model.clear();
                }
            }
            let listed: Vec<_> = table.ranges().iter().map(|r| (r.start - base, r.len)).collect();
            let wanted: Vec<_> = model.iter().map(|(f, (l, ..))| (*f, l - f + 1)).collect();
            prop_assert_eq!(listed, wanted);
        }
        for (at, len, access) in probes {
            let access = [Access::Read, Access::Write, Access::ReadWrite][access];
            check_lookup(&table, &model, &mapping, base, at, len, access)?;
        }
    }
}

#[test]
fn no_lookup_of_a_small_space_ever_leaves_its_range() {
    const END: u64 = 40;
    let mapping = HostMapping::anonymous(256).unwrap();
    // Neighbours, gaps, single bytes, each kind of right, one without memory.
    let layout: &[(u64, u64, Perm, bool)] = &[
        (1, 1, Perm::RW, false),
        (2, 7, Perm::R, false),
        (9, 3, Perm::W, false),
        (14, 2, Perm::RW, true),
        (16, 16, Perm::RW, false),
        (33, 1, Perm::RW, false),
    ];
    for base in [0, 0x1000, u64::MAX - (END - 1)] {
        let table = DotTable::new();
        let mut model = Model::new();
        for &(at, len, perm, message) in layout {
            let backing = match message {
                true => Backing::Message,
                false => Backing::Mapped {
                    mapping: mapping.clone(),
                    offset: at,
                },
            };
            let generation = table.map(base + at, len, perm, backing).unwrap();
            model.insert(at, (at + len - 1, perm, message, generation.0));
        }
        for at in 0..END {
            for len in 0..=END + 2 {
                for access in [Access::Read, Access::Write, Access::ReadWrite] {
                    check_lookup(&table, &model, &mapping, base, at, len, access).unwrap();
                }
            }
        }
        let reader = table.reader();
        let view = reader.pin();
        for at in 0..END {
            for len in [u64::MAX, u64::MAX - at, u64::MAX / 2 + 1] {
                assert!(
                    view.translate(base.wrapping_add(at), len, Access::Read)
                        .is_err()
                );
            }
        }
    }
}

#[test]
fn range_that_ends_at_the_top_of_the_address_space_is_reachable() {
    let mapping = HostMapping::anonymous(0x1000).unwrap();
    let table = DotTable::new();
    let start = u64::MAX - 0xfff;
    table
        .map(
            start,
            0x1000,
            Perm::RW,
            Backing::Mapped { mapping, offset: 0 },
        )
        .unwrap();
    let reader = table.reader();
    assert!(reader.pin().translate(u64::MAX, 1, Access::Read).is_ok());
    let wrap = reader
        .pin()
        .translate(u64::MAX, 2, Access::Read)
        .map(|_| ());
    assert!(matches!(wrap, Err(DotError::Wrap { .. })));
    assert!(matches!(
        table.unmap(u64::MAX, 1),
        Err(DotError::Split { .. })
    ));
    assert_eq!(table.unmap(start, 0x1000).unwrap().bytes, 0x1000);
}

#[test]
fn range_must_fit_its_host_mapping_and_its_rights() {
    use std::os::fd::AsFd;
    let fd = HostMapping::memfd(0x1000).unwrap();
    let mapping = HostMapping::new(fd.as_fd(), 0, 0x1000, Perm::R).unwrap();
    let table = DotTable::new();
    let backed = |offset| Backing::Mapped {
        mapping: mapping.clone(),
        offset,
    };
    let outside = table.map(0, 0x1000, Perm::R, backed(1)).unwrap_err();
    assert!(matches!(outside, DotError::OutsideMapping { .. }));
    let outside = table.map(0, 1, Perm::R, backed(u64::MAX)).unwrap_err();
    assert!(matches!(outside, DotError::OutsideMapping { .. }));
    let rights = table.map(0, 0x1000, Perm::RW, backed(0)).unwrap_err();
    assert!(matches!(rights, DotError::MappingRights { .. }));
    assert!(table.ranges().is_empty());
    table.map(0, 0x1000, Perm::R, backed(0)).unwrap();
}

#[test]
fn mapping_again_gives_a_new_generation() {
    let table = DotTable::new();
    let reader = table.reader();
    let first = table
        .map(0x1000, 0x1000, Perm::RW, Backing::Message)
        .unwrap();
    assert!(reader.pin().is_current(0x1fff, first));
    table.unmap(0x1000, 0x1000).unwrap();
    assert!(!reader.pin().is_current(0x1fff, first));
    let second = table
        .map(0x1000, 0x1000, Perm::RW, Backing::Message)
        .unwrap();
    assert!(second > first);
    assert!(!reader.pin().is_current(0x1fff, first));
    assert!(reader.pin().is_current(0x1fff, second));
}

#[test]
fn span_refuses_the_direction_it_was_not_translated_for() {
    let mapping = HostMapping::anonymous(0x1000).unwrap();
    let table = DotTable::new();
    table
        .map(0, 0x1000, Perm::RW, Backing::Mapped { mapping, offset: 0 })
        .unwrap();
    let reader = table.reader();
    let view = reader.pin();
    let read = view.translate(0, 8, Access::Read).unwrap();
    let write = view.translate(8, 8, Access::Write).unwrap();
    assert_eq!(
        read.copy_from(&[1; 8]),
        Err(DotError::SpanAccess(Access::Write))
    );
    assert_eq!(
        write.copy_to(&mut [0; 8]),
        Err(DotError::SpanAccess(Access::Read))
    );
    assert_eq!(
        write.copy_span(read),
        Err(DotError::SpanAccess(Access::Read))
    );
    view.translate(0, 8, Access::Write)
        .unwrap()
        .copy_from(b"abcdefgh")
        .unwrap();
    assert_eq!(read.copy_span(write), Ok(8));
    let mut out = [0; 8];
    view.translate(8, 8, Access::Read)
        .unwrap()
        .copy_to(&mut out)
        .unwrap();
    assert_eq!(&out, b"abcdefgh");
    assert_eq!(read.subspan(6, 2).map(|s| s.len()), Some(2));
    assert!(read.subspan(6, 3).is_none() && read.subspan(usize::MAX, 2).is_none());
}
