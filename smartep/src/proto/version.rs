//! Version negotiation (spec: "Version").

use serde_json::{Map, Value, json};
use thiserror::Error;

use super::{MAX_DATA_XFER, MAX_FDS};

/// What both sides agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Bytes of data in one message.
    pub max_data_xfer: usize,
    /// Descriptors on one message.
    pub max_fds: usize,
    /// Maps a client may have.
    pub max_dma_maps: usize,
    /// `REGION_WRITE_MULTI` may be used.
    pub write_multiple: bool,
    /// The client takes `DMA_READ` and `DMA_WRITE`. No key says so. Cloud Hypervisor would take them for replies; it
    /// is told by what it does not say: it knows no `max_dma_maps`.
    pub message_dma: bool,
}

impl Default for Capabilities {
    /// What the specification says of absent keys.
    fn default() -> Self {
        Self {
            max_data_xfer: 1 << 20,
            max_fds: 1,
            max_dma_maps: 65535,
            write_multiple: false,
            message_dma: false,
        }
    }
}

/// Why a client's version is refused. All are EINVAL on the wire.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VersionError {
    /// No room for the version numbers.
    #[error("the version message has {0} bytes; at least 4 are needed")]
    Short(usize),
    /// Another major version.
    #[error("the client speaks version {0}.{1}; 0.x is spoken here")]
    Major(u16, u16),
    /// The data is not a string.
    #[error("the version data is not NUL-terminated UTF-8")]
    Text,
    /// The string is not an object with an object of capabilities.
    #[error("the version data is not a JSON object: {0}")]
    Json(String),
    /// A capability has an impossible value.
    #[error("capability `{0}` has an impossible value")]
    Value(&'static str),
}

/// Reads a client's version message and makes the body of the reply. The reply's JSON is never longer than the
/// client's, because QEMU has room for no more, and names only keys that the client named.
pub fn answer_version(body: &[u8]) -> Result<(Capabilities, Vec<u8>), VersionError> {
    let [a, b, c, d, json @ ..] = body else {
        return Err(VersionError::Short(body.len()));
    };
    let (major, minor) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
    if major != 0 {
        return Err(VersionError::Major(major, minor));
    }
    let mut reply = vec![0; 4]; // 0.0: older than any client, and all of it is spoken here
    if json.is_empty() {
        return Ok((Capabilities::default(), reply));
    }
    let text = json.strip_suffix(&[0]).ok_or(VersionError::Text)?;
    let text = std::str::from_utf8(text).map_err(|_| VersionError::Text)?;
    let value: Value = serde_json::from_str(text).map_err(|e| VersionError::Json(e.to_string()))?;
    let object = value
        .as_object()
        .ok_or_else(|| VersionError::Json("it is no object".into()))?;
    let empty = Map::new();
    let asked = match object.get("capabilities") {
        None => &empty,
        Some(value) => value
            .as_object()
            .ok_or_else(|| VersionError::Json("`capabilities` is no object".into()))?,
    };
    let (capabilities, said) = agree(asked)?;
    let mut answer = json!({ "capabilities": said }).to_string();
    if answer.len() > text.len() {
        answer = json!({ "capabilities": {} }).to_string();
    }
    if answer.len() <= text.len() {
        reply.extend_from_slice(answer.as_bytes());
        reply.push(0);
    }
    Ok((capabilities, reply))
}

fn agree(asked: &Map<String, Value>) -> Result<(Capabilities, Map<String, Value>), VersionError> {
    let (mut caps, mut said) = (Capabilities::default(), Map::new());
    let mut number = |key: &'static str, most: usize, slot: Option<&mut usize>| {
        let Some(value) = asked.get(key) else {
            return Ok(());
        };
        let asked = value
            .as_u64()
            .filter(|v| *v > 0)
            .ok_or(VersionError::Value(key))?;
        let agreed = usize::try_from(asked).unwrap_or(usize::MAX).min(most);
        if let Some(slot) = slot {
            *slot = agreed;
        }
        said.insert(key.into(), agreed.into());
        Ok(())
    };
    number("max_msg_fds", MAX_FDS, Some(&mut caps.max_fds))?;
    number(
        "max_data_xfer_size",
        MAX_DATA_XFER,
        Some(&mut caps.max_data_xfer),
    )?;
    number(
        "max_dma_maps",
        dot_iommu::MAX_RANGES,
        Some(&mut caps.max_dma_maps),
    )?;
    caps.message_dma = asked.contains_key("max_dma_maps");
    if let Some(value) = asked.get("pgsizes") {
        let sizes = value.as_u64().filter(|v| v % 4096 == 0 && *v > 0);
        sizes.ok_or(VersionError::Value("pgsizes"))?;
        said.insert("pgsizes".into(), 4096.into());
    }
    if let Some(value) = asked.get("write_multiple") {
        caps.write_multiple = value
            .as_bool()
            .ok_or(VersionError::Value("write_multiple"))?;
        said.insert("write_multiple".into(), caps.write_multiple.into());
    }
    Ok((caps, said))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QEMU: &str = r#"{"capabilities": {"pgsizes": 4096, "max_msg_fds": 16, "max_dma_maps": 65535, "max_data_xfer_size": 1048576, "migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "write_multiple": true}}"#;

    fn body(major: u16, minor: u16, text: &str) -> Vec<u8> {
        let mut body = [major.to_le_bytes(), minor.to_le_bytes()].concat();
        body.extend_from_slice(text.as_bytes());
        body.push(0);
        body
    }

    #[test]
    fn qemu_gets_a_reply_that_fits_its_buffer_and_echoes_its_keys() {
        let request = body(0, 0, QEMU);
        let (caps, reply) = answer_version(&request).unwrap();
        assert!(reply.len() <= request.len());
        assert_eq!(reply[..4], [0; 4]);
        let json: Value = serde_json::from_slice(&reply[4..reply.len() - 1]).unwrap();
        assert_eq!(json["capabilities"]["write_multiple"], true);
        assert!(json["capabilities"].get("migration").is_none());
        assert_eq!(
            (caps.max_fds, caps.max_dma_maps, caps.write_multiple),
            (16, 65535, true)
        );
        assert!(caps.message_dma);
    }

    #[test]
    fn a_version_without_data_is_legal() {
        let (caps, reply) = answer_version(&[0, 0, 1, 0]).unwrap();
        assert_eq!((caps, reply), (Capabilities::default(), vec![0; 4]));
        let (_, reply) = answer_version(&body(0, 1, "{}")).unwrap();
        assert_eq!(
            reply,
            vec![0; 4],
            "a reply longer than the request would break QEMU"
        );
    }

    #[test]
    fn limits_are_the_smaller_of_both_sides() {
        let text = r#"{"capabilities":{"max_msg_fds":64,"max_data_xfer_size":4096}}"#;
        let (caps, _) = answer_version(&body(0, 1, text)).unwrap();
        assert_eq!((caps.max_fds, caps.max_data_xfer), (16, 4096));
        assert!(!caps.message_dma, "a client as terse as Cloud Hypervisor");
    }

    #[test]
    fn bad_versions_are_refused_with_the_reason() {
        assert_eq!(
            answer_version(&[0, 0, 0]).unwrap_err(),
            VersionError::Short(3)
        );
        assert_eq!(
            answer_version(&body(1, 0, "{}")).unwrap_err(),
            VersionError::Major(1, 0)
        );
        assert_eq!(
            answer_version(b"\0\0\0\0{}").unwrap_err(),
            VersionError::Text
        );
        assert_eq!(
            answer_version(&body(0, 0, "\u{1}")[..4]).unwrap().1.len(),
            4
        );
        for text in ["[]", "{", "nonsense", r#"{"capabilities":3}"#] {
            assert!(matches!(
                answer_version(&body(0, 0, text)),
                Err(VersionError::Json(_))
            ));
        }
        for (key, value) in [
            ("max_msg_fds", "-1"),
            ("max_msg_fds", "\"a\""),
            ("max_data_xfer_size", "0"),
            ("pgsizes", "5"),
            ("write_multiple", "1"),
        ] {
            let text = format!(r#"{{"capabilities":{{"{key}":{value}}}}}"#);
            assert_eq!(
                answer_version(&body(0, 0, &text)).unwrap_err(),
                VersionError::Value(key)
            );
        }
    }
}
