//! Frames: a fixed header and a postcard body.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic `M2MF` |
//! | 4..6 | [`VERSION`], little endian |
//! | 6 | kind |
//! | 7 | zero |
//! | 8..12 | id, little endian: joins a reply to its request |
//! | 12..16 | length of the body in bytes, little endian |
//! | 16.. | body |
//!
//! Magic and version keep their place in every version, so that any two versions can tell each
//! other why they do not talk.

use crate::proto::{Event, Image, Reply, Request, VERSION};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 16;
/// Most bytes a body can have.
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// Most bytes a frame can have.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_BODY_BYTES;
/// Most descriptors that travel with a frame.
pub const MAX_FDS: usize = 16;

mod field {
    use std::ops::Range;
    pub(super) const MAGIC: Range<usize> = 0..4;
    pub(super) const VERSION: Range<usize> = 4..6;
    pub(super) const KIND: usize = 6;
    pub(super) const RESERVED: usize = 7;
    pub(super) const ID: Range<usize> = 8..12;
    pub(super) const LENGTH: Range<usize> = 12..16;
}

const MAGIC: [u8; 4] = *b"M2MF";

/// Why bytes are no frame, or a message cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Less than a header, or less than the header says.
    #[error("truncated frame: {got} bytes where {need} are needed")]
    Truncated {
        /// Bytes there are.
        got: usize,
        /// Bytes there must be.
        need: usize,
    },
    /// More bytes than the header says.
    #[error("{0} bytes behind the end of the frame")]
    Trailing(usize),
    /// The first bytes are not the fabric's.
    #[error("the first bytes are {0:02x?}, not those of a fabric frame")]
    Magic([u8; 4]),
    /// The peer speaks another version.
    #[error("the peer speaks version {theirs} of the protocol, this program version {ours}")]
    Version {
        /// [`VERSION`] of this program.
        ours: u16,
        /// Version in the frame.
        theirs: u16,
    },
    /// Unknown kind of frame.
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    /// A byte that must be zero is not.
    #[error("reserved header byte is {0:#x}, not zero")]
    Reserved(u8),
    /// The body is longer than [`MAX_BODY_BYTES`].
    #[error("a body of {0} bytes; at most {MAX_BODY_BYTES} are allowed")]
    TooLong(usize),
    /// The body is not a message of its kind.
    #[error("the body of a {kind} frame does not parse: {reason}")]
    Body {
        /// Kind of frame.
        kind: &'static str,
        /// What the parser said.
        reason: String,
    },
}

/// First body each way on a local connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Bytes of the register window that rides along, 0 from the connecting side.
    pub window_bytes: u32,
}

/// A register access, where there is no memory to share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// Reads 4 bytes.
    Read {
        /// A multiple of 4.
        address: u32,
    },
    /// Writes the bytes that are named.
    Write {
        /// A multiple of 4.
        address: u32,
        /// Bit n names bits 8n to 8n+7 of the value; at most 0xf.
        byte_enable: u8,
        /// The bytes.
        value: u32,
    },
}

/// A parsed frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Handshake of a transport.
    Greeting(Greeting),
    /// A request and the id its reply must have.
    Request(u32, Request),
    /// A reply and the id of its request.
    Reply(u32, Reply),
    /// An event.
    Event(Event),
    /// A register access and the id its completion must have. A posted write has one too: it makes room for
    /// another access.
    Register(u32, Access),
    /// A completion and the id of its access; 4 bytes that were read, or the completion of a write.
    Completion(u32, u32),
    /// What a function presents.
    Image(Image),
}

impl Frame {
    const GREETING: u8 = 0;
    const REQUEST: u8 = 1;
    const REPLY: u8 = 2;
    const EVENT: u8 = 3;
    const REGISTER: u8 = 4;
    const COMPLETION: u8 = 5;
    const IMAGE: u8 = 6;

    /// The frame's bytes.
    ///
    /// # Errors
    /// [`WireError::TooLong`].
    pub fn emit(&self) -> Result<Vec<u8>, WireError> {
        match self {
            Self::Greeting(body) => emit(Self::GREETING, 0, "greeting", body),
            Self::Request(id, body) => emit(Self::REQUEST, *id, "request", body),
            Self::Reply(id, body) => emit(Self::REPLY, *id, "reply", body),
            Self::Event(body) => emit(Self::EVENT, 0, "event", body),
            Self::Register(id, body) => emit(Self::REGISTER, *id, "register access", body),
            Self::Completion(id, body) => emit(Self::COMPLETION, *id, "completion", body),
            Self::Image(body) => emit(Self::IMAGE, 0, "image", body),
        }
    }

    /// Bytes of the frame that begins with `header`, for a transport that knows no packets.
    ///
    /// # Errors
    /// The header is none of this version.
    pub fn bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, WireError> {
        let magic = [header[0], header[1], header[2], header[3]];
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        let theirs = u16::from_le_bytes([header[4], header[5]]);
        if theirs != VERSION {
            return Err(WireError::Version {
                ours: VERSION,
                theirs,
            });
        }
        if header[field::RESERVED] != 0 {
            return Err(WireError::Reserved(header[field::RESERVED]));
        }
        let length = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
        if length > MAX_BODY_BYTES {
            return Err(WireError::TooLong(length));
        }
        Ok(HEADER_BYTES + length)
    }

    /// Parses exactly one frame.
    ///
    /// # Errors
    /// Any [`WireError`]; the connection cannot go on then.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let (header, body) =
            bytes
                .split_first_chunk::<HEADER_BYTES>()
                .ok_or(WireError::Truncated {
                    got: bytes.len(),
                    need: HEADER_BYTES,
                })?;
        let length = Self::bytes(header)? - HEADER_BYTES;
        let id = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if body.len() < length {
            return Err(WireError::Truncated {
                got: bytes.len(),
                need: HEADER_BYTES + length,
            });
        }
        if body.len() > length {
            return Err(WireError::Trailing(body.len() - length));
        }
        match header[field::KIND] {
            Self::GREETING => Ok(Self::Greeting(parse("greeting", body)?)),
            Self::REQUEST => Ok(Self::Request(id, parse("request", body)?)),
            Self::REPLY => Ok(Self::Reply(id, parse("reply", body)?)),
            Self::EVENT => Ok(Self::Event(parse("event", body)?)),
            Self::REGISTER => Ok(Self::Register(id, parse("register access", body)?)),
            Self::COMPLETION => Ok(Self::Completion(id, parse("completion", body)?)),
            Self::IMAGE => Ok(Self::Image(parse("image", body)?)),
            kind => Err(WireError::Kind(kind)),
        }
    }
}

fn emit<T: Serialize>(
    kind: u8,
    id: u32,
    name: &'static str,
    body: &T,
) -> Result<Vec<u8>, WireError> {
    let mut bytes =
        postcard::to_extend(body, vec![0; HEADER_BYTES]).map_err(|e| WireError::Body {
            kind: name,
            reason: e.to_string(),
        })?;
    let length = bytes.len() - HEADER_BYTES;
    if length > MAX_BODY_BYTES {
        return Err(WireError::TooLong(length));
    }
    bytes[field::MAGIC].copy_from_slice(&MAGIC);
    bytes[field::VERSION].copy_from_slice(&VERSION.to_le_bytes());
    bytes[field::KIND] = kind;
    bytes[field::ID].copy_from_slice(&id.to_le_bytes());
    bytes[field::LENGTH].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(kind: &'static str, body: &[u8]) -> Result<T, WireError> {
    let (value, rest) = postcard::take_from_bytes(body).map_err(|e| WireError::Body {
        kind,
        reason: e.to_string(),
    })?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(WireError::Trailing(rest.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Hello, LinkKind, LinkSpec};
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let text = "\\PC{0,200}";
        prop_oneof![
            any::<u32>().prop_map(|window_bytes| Frame::Greeting(Greeting { window_bytes })),
            (any::<u32>(), text, any::<u32>()).prop_map(|(id, em, pid)| {
                let program = String::new();
                Frame::Request(
                    id,
                    Request::Hello(Hello {
                        em,
                        pid,
                        program,
                        returns: pid % 2 == 0,
                    }),
                )
            }),
            (any::<u32>(), any::<u32>(), text).prop_map(|(id, link, name)| {
                Frame::Request(
                    id,
                    Request::AddLink(LinkSpec {
                        id: link,
                        function: 3,
                        kind: LinkKind::Tap { name },
                    }),
                )
            }),
            (any::<u32>(), text).prop_map(|(id, why)| Frame::Reply(id, Reply::Failed(why))),
            any::<(u32, u32)>().prop_map(|(id, value)| Frame::Completion(id, value)),
            any::<(u32, u32)>()
                .prop_map(|(id, address)| { Frame::Register(id, Access::Read { address }) }),
            any::<(u32, u32, u8, u32)>().prop_map(|(id, address, byte_enable, value)| {
                Frame::Register(
                    id,
                    Access::Write {
                        address,
                        byte_enable,
                        value,
                    },
                )
            }),
            (any::<u32>(), prop::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(function, bytes)| Frame::Image(Image { function, bytes })),
            any::<(u64, u64, bool)>().prop_map(|(sequence, progress, backlog)| {
                Frame::Event(Event::Heartbeat {
                    sequence,
                    progress,
                    backlog,
                })
            }),
        ]
    }

    proptest! {
        #[test]
        fn frame_survives_its_bytes(frame in frames()) {
            prop_assert_eq!(Frame::parse(&frame.emit().unwrap()), Ok(frame));
        }

        #[test]
        fn random_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = Frame::parse(&bytes);
        }

        #[test]
        fn random_body_behind_a_good_header_is_parsed_or_refused(
            kind in 0u8..9,
            body in prop::collection::vec(any::<u8>(), 0..512),
        ) {
            let mut bytes = emit(kind, 1, "test", &()).unwrap();
            bytes[field::LENGTH].copy_from_slice(&(body.len() as u32).to_le_bytes());
            bytes.extend(body);
            let parsed = Frame::parse(&bytes);
            prop_assert_eq!(kind > Frame::IMAGE, parsed == Err(WireError::Kind(kind)));
        }

        #[test]
        fn part_of_a_frame_is_truncated(frame in frames(), cut in any::<prop::sample::Index>()) {
            let bytes = frame.emit().unwrap();
            let got = cut.index(bytes.len());
            let refused = matches!(
                Frame::parse(&bytes[..got]),
                Err(WireError::Truncated { got: g, .. }) if g == got
            );
            prop_assert!(refused);
        }

        #[test]
        fn frame_with_a_tail_is_refused(frame in frames(), tail in 1usize..40) {
            let mut bytes = frame.emit().unwrap();
            bytes.resize(bytes.len() + tail, 0);
            prop_assert_eq!(Frame::parse(&bytes), Err(WireError::Trailing(tail)));
        }
    }

    #[test]
    fn tail_inside_the_body_is_refused() {
        let mut bytes = Frame::Request(1, Request::Stats).emit().unwrap();
        bytes.push(0);
        bytes[field::LENGTH.start] += 1;
        assert_eq!(Frame::parse(&bytes), Err(WireError::Trailing(1)));
    }

    #[test]
    fn every_header_field_is_checked() {
        let good = Frame::Request(1, Request::Stats).emit().unwrap();
        let spoilt = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Frame::parse(&bytes)
        };
        assert_eq!(spoilt(0, 0), Err(WireError::Magic(*b"\x002MF")));
        assert_eq!(
            spoilt(5, 0xff),
            Err(WireError::Version {
                ours: VERSION,
                theirs: VERSION | 0xff00
            })
        );
        assert_eq!(spoilt(field::KIND, 200), Err(WireError::Kind(200)));
        assert_eq!(spoilt(field::RESERVED, 1), Err(WireError::Reserved(1)));
        assert!(matches!(spoilt(15, 0xff), Err(WireError::TooLong(_))));
    }

    #[test]
    fn body_beyond_the_bound_is_not_sent() {
        let longest = MAX_BODY_BYTES - 4; // 1 byte for the variant, 3 for the string's length
        let reply = |bytes| Frame::Reply(0, Reply::Failed("x".repeat(bytes))).emit();
        assert_eq!(reply(longest).map(|bytes| bytes.len()), Ok(MAX_FRAME_BYTES));
        assert_eq!(
            reply(longest + 1),
            Err(WireError::TooLong(MAX_BODY_BYTES + 1))
        );
    }
}
