//! Addresses of the 4-byte registers.
//!
//! The fabric's primitive is a 4-byte register access with byte enables, like a PCIe
//! configuration request. An EM reaches the control side of its functions this way.

/// Functions a DPU can have; a function's id is below.
pub const MAX_FUNCTIONS: u32 = 256;

/// A register on the control side: function, vfio region and offset in 32 bits
/// (`function << 24 | region << 20 | offset`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ControlAddress {
    /// Function id, below [`MAX_FUNCTIONS`].
    pub function: u32,
    /// vfio region index, below 16.
    pub region: u32,
    /// Offset in the region, a multiple of 4 below 1 MiB.
    pub offset: u32,
}

impl ControlAddress {
    /// Offset that stands for "reset this function" when `region` is [`Self::RESET_REGION`].
    pub const RESET_REGION: u32 = 15;

    /// The 32-bit form; `None` when a part is out of range or the offset is not aligned.
    pub fn to_bits(self) -> Option<u32> {
        (self.function < MAX_FUNCTIONS
            && self.region < 16
            && self.offset < 1 << 20
            && self.offset % 4 == 0)
            .then_some(self.function << 24 | self.region << 20 | self.offset)
    }

    /// Parts of a 32-bit address; every value has a meaning.
    pub fn from_bits(bits: u32) -> Self {
        Self {
            function: bits >> 24,
            region: (bits >> 20) & 15,
            offset: bits & 0xf_fffc,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_survives_its_32_bit_form() {
        let address = ControlAddress {
            function: 255,
            region: 7,
            offset: 0xffc,
        };
        assert_eq!(
            address.to_bits().map(ControlAddress::from_bits),
            Some(address)
        );
    }

    #[test]
    fn parts_out_of_range_have_no_32_bit_form() {
        for (function, region, offset) in [(256, 0, 0), (0, 16, 0), (0, 0, 1 << 20), (0, 0, 2)] {
            assert_eq!(
                ControlAddress {
                    function,
                    region,
                    offset
                }
                .to_bits(),
                None
            );
        }
    }
}
