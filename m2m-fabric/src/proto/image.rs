//! What a function presents, for a peer that cannot map the memory of its shadow.

use serde::{Deserialize, Serialize};

/// Most bytes of an image.
pub const MAX_IMAGE_BYTES: usize = 60 << 10;

/// The whole content of a function's shadow at one moment. What the bytes mean is the two modules' matter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Id from [`super::FunctionSpec::id`].
    pub function: u32,
    /// At most [`MAX_IMAGE_BYTES`].
    pub bytes: Vec<u8>,
}
