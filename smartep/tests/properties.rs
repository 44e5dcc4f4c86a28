//! What holds for every input, not only for those somebody thought of.

#![allow(clippy::unwrap_used)] // helpers of tests stand outside `#[test]`

use proptest::prelude::*;
use smartep::config::ConfigState;
use smartep::proto::answer_version;
use smartep::route::{Route, RouteTable, Side};
use smartep::shadow::{ShadowReader, ShadowWindow, ShadowWriter};

fn json_like() -> impl Strategy<Value = String> {
    let key = prop_oneof![
        Just("max_msg_fds"),
        Just("max_data_xfer_size"),
        Just("max_dma_maps"),
        Just("pgsizes"),
        Just("write_multiple"),
        Just("migration"),
        Just("twin_socket"),
        Just("x"),
    ];
    let value = prop_oneof![
        any::<u64>().prop_map(|v| v.to_string()),
        (1u64..100_000).prop_map(|v| v.to_string()),
        any::<i64>().prop_map(|v| v.to_string()),
        any::<f64>().prop_map(|v| format!("{v:e}")),
        any::<bool>().prop_map(|v| v.to_string()),
        Just("null".to_string()),
        Just("\"4096\"".to_string()),
        Just("{\"pgsize\": 4096}".to_string()),
    ];
    let pair = (key, value).prop_map(|(k, v)| format!("\"{k}\":{v}"));
    proptest::collection::vec(pair, 0..8)
        .prop_map(|pairs| format!("{{\"capabilities\":{{{}}}}}", pairs.join(",")))
}

proptest! {
    #[test]
    fn any_version_message_is_answered_or_refused(body in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok((_, reply)) = answer_version(&body) {
            prop_assert!(reply.len() <= body.len());
        }
    }

    #[test]
    fn a_version_reply_fits_the_request_and_offers_nothing_that_was_not_asked(text in json_like()) {
        let body = [&[0, 0, 0, 0], text.as_bytes(), &[0]].concat();
        let Ok((agreed, reply)) = answer_version(&body) else { return Ok(()) };
        prop_assert!(reply.len() <= body.len());
        prop_assert_eq!(reply.last(), Some(&0));
        let said: serde_json::Value = serde_json::from_slice(&reply[4..reply.len() - 1]).unwrap();
        for (key, value) in said["capabilities"].as_object().unwrap() {
            prop_assert!(text.contains(key.as_str()));
            if key == "max_data_xfer_size" {
                prop_assert_eq!(value.as_u64(), Some(agreed.max_data_xfer as u64));
            }
        }
        prop_assert!((1..=16).contains(&agreed.max_fds) && (1..=1 << 20).contains(&agreed.max_data_xfer));
    }

    #[test]
    fn pieces_of_an_access_join_to_the_access(
        borders in proptest::collection::btree_set(0u64..200, 0..10),
        offset in 0u64..200,
        len in 0usize..200,
    ) {
        let borders: Vec<u64> = borders.into_iter().collect();
        let routes: Vec<_> = borders
            .chunks_exact(2)
            .map(|b| Route { region: 0, start: b[0], end: b[1], side: Side::Control })
            .collect();
        let table = RouteTable::new(routes.clone()).unwrap();
        let mut at = offset;
        for (side, start, n) in table.pieces(0, offset, len) {
            prop_assert!(start == at && n > 0);
            for byte in start..start + n as u64 {
                let control = routes.iter().any(|r| (r.start..r.end).contains(&byte));
                prop_assert_eq!(side == Side::Control, control);
            }
            at += n as u64;
        }
        prop_assert_eq!(at, offset + len as u64);
    }

    #[test]
    fn the_shadow_answers_exactly_what_was_published(
        config in proptest::collection::vec(any::<u8>(), 4096),
        register in proptest::collection::vec(any::<u8>(), 1..100),
        offset in 0u64..5000,
        len in 0usize..16,
    ) {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        let window = ShadowWindow { region: 0, offset: 0x40, bytes: &register };
        writer.publish(&config, &[window], ConfigState::default()).unwrap();
        let mut data = vec![0; len];
        let want = config.get(offset as usize..offset as usize + len);
        prop_assert_eq!(reader.read(7, offset, &mut data).then_some(&data[..]), want);
        let offset = offset % 200;
        let start = offset.checked_sub(0x40).map(|s| s as usize);
        let want = start.and_then(|s| register.get(s..s + len));
        prop_assert_eq!(reader.read(0, offset, &mut data).then_some(&data[..]), want);
    }
}
