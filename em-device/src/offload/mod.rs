//! Checksums and segmentation in software, for receivers and ports that do not do them.

pub mod checksum;
mod headers;
pub mod segment;

pub use checksum::{Checksum, complete_checksum, finished_checksum};
pub use segment::{SegmentError, Segmenter};

use crate::frame::{FrameMeta, MIN_FRAME};

/// What a receiver takes: the features its driver negotiated (virtio 1.3 §5.1.3), or what a port
/// offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiver {
    /// Frames with unfinished checksums (`GUEST_CSUM`).
    pub csum: bool,
    /// TCPv4 frames to be segmented (`GUEST_TSO4`).
    pub tso4: bool,
    /// TCPv6 frames to be segmented (`GUEST_TSO6`).
    pub tso6: bool,
    /// The same with CWR (`GUEST_ECN`).
    pub ecn: bool,
    /// UDP frames to be segmented, over IPv4 and IPv6 (`GUEST_USO4` and `GUEST_USO6`).
    pub uso: bool,
    /// Largest IP packet in bytes.
    pub mtu: u16,
}

/// What must happen to a frame before a receiver can have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing. A receiver without `csum` also gets no flags, see [`Receiver::meta`].
    PassThrough,
    /// The checksum must be finished, then [`FrameMeta::default`] goes with it.
    CompleteChecksum,
    /// [`Segmenter`] makes finished frames of it.
    Segment,
    /// It must be dropped, for this reason.
    Drop(DropReason),
}

/// Why a receiver cannot have a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropReason {
    /// Larger than the receiver's MTU, and not to be segmented into less.
    AboveMtu,
}

impl DropReason {
    /// Name of the counter.
    pub fn name(self) -> &'static str {
        match self {
            Self::AboveMtu => "above_mtu",
        }
    }
}

impl Receiver {
    /// One that takes nothing but finished frames.
    pub fn plain(mtu: u16) -> Self {
        Self {
            csum: false,
            tso4: false,
            tso6: false,
            ecn: false,
            uso: false,
            mtu,
        }
    }

    /// What a frame of `len` bytes needs. `meta` passed [`FrameMeta::check`] with that length.
    pub fn needs(&self, meta: &FrameMeta, len: usize) -> Needs {
        const VLAN_TAG: usize = 4;
        let mtu = usize::from(self.mtu);
        if meta.is_gso() {
            // TCP's options are not counted: their length is in the frame, and hdr_len is only a
            // hint. A sender with the receiver's MTU has left room for them.
            let transport = if meta.gso() == FrameMeta::GSO_UDP {
                8
            } else {
                20
            };
            let headers = usize::from(meta.csum_start).saturating_sub(MIN_FRAME) + transport;
            if headers + usize::from(meta.gso_size) > mtu + VLAN_TAG {
                return Needs::Drop(DropReason::AboveMtu);
            }
            let kind = match meta.gso() {
                FrameMeta::GSO_TCPV4 => self.tso4,
                FrameMeta::GSO_TCPV6 => self.tso6,
                FrameMeta::GSO_UDP => self.uso,
                _ => false,
            };
            let ecn = self.ecn || meta.gso_type & FrameMeta::GSO_ECN == 0;
            return if kind && ecn && self.csum {
                Needs::PassThrough
            } else {
                Needs::Segment
            };
        }
        if len > mtu + MIN_FRAME + VLAN_TAG {
            return Needs::Drop(DropReason::AboveMtu);
        }
        if meta.needs_csum() && !self.csum {
            return Needs::CompleteChecksum;
        }
        Needs::PassThrough
    }

    /// The offload facts to hand over with a frame that passes through: a driver without
    /// `GUEST_CSUM` must see no flags (virtio 1.3 §5.1.6.4.1).
    pub fn meta(&self, meta: &FrameMeta) -> FrameMeta {
        if self.csum {
            *meta
        } else {
            FrameMeta::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Receiver = Receiver {
        csum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        uso: true,
        mtu: 1500,
    };

    fn unfinished() -> FrameMeta {
        FrameMeta {
            flags: FrameMeta::NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 16,
            ..FrameMeta::default()
        }
    }

    fn tso(gso_type: u8, gso_size: u16) -> FrameMeta {
        FrameMeta {
            gso_type,
            gso_size,
            hdr_len: 54,
            ..unfinished()
        }
    }

    #[test]
    fn a_capable_receiver_gets_frames_as_they_are() {
        assert_eq!(ALL.needs(&unfinished(), 1514), Needs::PassThrough);
        assert_eq!(ALL.needs(&tso(0x81, 1460), 64000), Needs::PassThrough);
        assert_eq!(ALL.needs(&tso(0x04, 1440), 64000), Needs::PassThrough);
        assert_eq!(ALL.meta(&unfinished()), unfinished());
    }

    #[test]
    fn each_missing_feature_is_made_up_for() {
        let plain = Receiver::plain(1500);
        assert_eq!(plain.needs(&FrameMeta::default(), 60), Needs::PassThrough);
        assert_eq!(plain.needs(&unfinished(), 60), Needs::CompleteChecksum);
        assert_eq!(plain.needs(&tso(1, 1460), 64000), Needs::Segment);
        assert_eq!(plain.meta(&unfinished()), FrameMeta::default());
        let no4 = Receiver { tso4: false, ..ALL };
        assert_eq!(no4.needs(&tso(1, 1460), 64000), Needs::Segment);
        assert_eq!(no4.needs(&tso(4, 1440), 64000), Needs::PassThrough);
        let no6 = Receiver { tso6: false, ..ALL };
        assert_eq!(no6.needs(&tso(4, 1440), 64000), Needs::Segment);
        let no_ecn = Receiver { ecn: false, ..ALL };
        assert_eq!(no_ecn.needs(&tso(0x81, 1460), 64000), Needs::Segment);
        assert_eq!(no_ecn.needs(&tso(1, 1460), 64000), Needs::PassThrough);
        let no_uso = Receiver { uso: false, ..ALL };
        assert_eq!(ALL.needs(&tso(5, 1472), 64000), Needs::PassThrough);
        assert_eq!(no_uso.needs(&tso(5, 1472), 64000), Needs::Segment);
    }

    #[test]
    fn what_no_wire_of_that_mtu_would_carry_is_dropped() {
        let drop = Needs::Drop(DropReason::AboveMtu);
        assert_eq!(ALL.needs(&FrameMeta::default(), 1518), Needs::PassThrough);
        assert_eq!(ALL.needs(&FrameMeta::default(), 1519), drop);
        assert_eq!(ALL.needs(&tso(1, 8960), 64000), drop);
        let jumbo = Receiver { mtu: 9000, ..ALL };
        assert_eq!(jumbo.needs(&tso(1, 8960), 64000), Needs::PassThrough);
    }
}
