//! Packet sequence numbers: 24 bits that wrap (IBTA 1.5 §9.7.2).

const MASK: u32 = 0xff_ffff;

/// Bits of a PSN.
pub(super) const BITS: u32 = 24;

/// The PSN `count` after `psn`.
#[inline]
pub(super) fn add(psn: u32, count: u32) -> u32 {
    psn.wrapping_add(count) & MASK
}

/// The PSN before `psn`.
#[inline]
pub(super) fn before(psn: u32) -> u32 {
    psn.wrapping_sub(1) & MASK
}

/// How far `psn` is after `other`; negative when it is before it. Right for distances below 2²³.
#[inline]
pub(super) fn since(psn: u32, other: u32) -> i32 {
    (psn.wrapping_sub(other) << (32 - BITS)) as i32 >> (32 - BITS)
}

/// PSNs that `len` bytes use with packets of `1 << mtu_shift` bytes.
#[inline]
pub(super) fn count(len: u32, mtu_shift: u32) -> u32 {
    len.saturating_add((1 << mtu_shift) - 1) >> mtu_shift | u32::from(len == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_survive_the_wrap() {
        assert_eq!(add(MASK, 1), 0);
        assert_eq!(before(0), MASK);
        assert_eq!(since(2, MASK), 3);
        assert_eq!(since(MASK, 2), -3);
        assert_eq!(since(7, 7), 0);
    }

    #[test]
    fn an_empty_message_uses_one_psn_as_a_full_packet_does() {
        for (len, psns) in [(0, 1), (1, 1), (1024, 1), (1025, 2), (1 << 30, 1 << 20)] {
            assert_eq!(count(len, 10), psns, "{len}");
        }
    }
}
