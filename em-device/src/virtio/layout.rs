//! Which virtio structure a BAR access means.

use m2m_fabric::proto::{VirtioPciLayout, Window};

/// A register area of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Area {
    /// Common configuration, with the offset in it.
    Common(u64),
    /// ISR status, with the offset in it.
    Isr(u64),
    /// Notification area: the queue whose notification address this is.
    Notify(u16),
    /// Nothing is there.
    Nothing,
}

/// The area of the byte at `offset` of region `region`. The device configuration is the control
/// side's and is [`Area::Nothing`] here.
pub fn area(layout: &VirtioPciLayout, region: u32, offset: u64) -> Area {
    if region != layout.bar {
        return Area::Nothing;
    }
    if let Some(at) = inside(layout.notify, offset) {
        // The driver writes exactly at the address of the queue (virtio 1.3 §4.1.4.4.1).
        let multiplier = u64::from(layout.notify_multiplier);
        return match at.checked_rem(multiplier) {
            Some(0) => u16::try_from(at / multiplier).map_or(Area::Nothing, Area::Notify),
            _ => Area::Nothing,
        };
    }
    if let Some(at) = inside(layout.common, offset) {
        return Area::Common(at);
    }
    if let Some(at) = inside(layout.isr, offset) {
        return Area::Isr(at);
    }
    Area::Nothing
}

fn inside(window: Window, offset: u64) -> Option<u64> {
    let at = offset.checked_sub(u64::from(window.offset))?;
    (at < u64::from(window.len)).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LAYOUT;

    #[test]
    fn offsets_lead_to_their_area() {
        let cases = [
            (0, 0x0, Area::Common(0)),
            (0, 0x14, Area::Common(0x14)),
            (0, 0x3f, Area::Common(0x3f)),
            (0, 0x40, Area::Nothing),
            (0, 0x1000, Area::Isr(0)),
            (0, 0x1004, Area::Nothing),
            (0, 0x2000, Area::Nothing),
            (0, 0x3000, Area::Notify(0)),
            (0, 0x3004, Area::Notify(1)),
            (0, 0x3006, Area::Nothing),
            (0, 0x3ffc, Area::Notify(1023)),
            (0, 0x4000, Area::Nothing),
            (2, 0x0, Area::Nothing),
        ];
        for (region, offset, want) in cases {
            assert_eq!(area(&LAYOUT, region, offset), want, "{region} {offset:#x}");
        }
    }
}
