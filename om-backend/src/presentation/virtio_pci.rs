//! The vendor capabilities by which a virtio driver finds its registers (virtio 1.3 §4.1.4).

use m2m_fabric::proto::{VirtioPciLayout, Window};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

/// PCI vendor of all virtio devices (virtio 1.3 §4.1.2).
pub const VENDOR: u16 = 0x1af4;
/// PCI device id of a virtio 1.x device without a legacy interface: this plus its virtio id.
pub const DEVICE_BASE: u16 = 0x1040;
/// PCI revision of a device without a legacy interface, at least (virtio 1.3 §4.1.2.1).
pub const REVISION: u8 = 1;

/// `cfg_type` of each structure (virtio 1.3 §4.1.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    /// Common configuration.
    Common = 1,
    /// Notifications.
    Notify = 2,
    /// ISR status.
    Isr = 3,
    /// Device-specific configuration.
    Device = 4,
    /// Access to the BARs from configuration space.
    PciAccess = 5,
}

/// `struct virtio_pci_cap` from `cap_len` on.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct VirtioPciCap {
    cap_len: u8,
    cfg_type: u8,
    bar: u8,
    id: u8,
    padding: [u8; 2],
    offset: U32,
    length: U32,
}

/// Bytes of the two fields every capability has, which [`VirtioPciCap`] leaves out.
const HEADER: usize = 2;

/// Bodies of the capabilities for a layout: what follows the capability's id and next pointer.
///
/// The registers of the PCI configuration access capability (§4.1.4.9) are a window onto the BARs. What
/// they hold is kept by the EM, which sees both sides of the function; here they are zero and read-only.
pub fn capabilities(layout: &VirtioPciLayout) -> Vec<Vec<u8>> {
    let multiplier = layout.notify_multiplier.to_le_bytes();
    vec![
        body(layout, Structure::Common, layout.common, &[]),
        body(layout, Structure::Notify, layout.notify, &multiplier),
        body(layout, Structure::Isr, layout.isr, &[]),
        body(layout, Structure::Device, layout.device, &[]),
        body(
            layout,
            Structure::PciAccess,
            Window { offset: 0, len: 0 },
            &[0; 4],
        ),
    ]
}

fn body(layout: &VirtioPciLayout, what: Structure, window: Window, extra: &[u8]) -> Vec<u8> {
    let length = HEADER + size_of::<VirtioPciCap>() + extra.len();
    let mut body = VirtioPciCap {
        cap_len: length as u8,
        cfg_type: what as u8,
        bar: layout.bar as u8,
        id: 0,
        padding: [0; 2],
        offset: window.offset.into(),
        length: window.len.into(),
    }
    .as_bytes()
    .to_vec();
    body.extend_from_slice(extra);
    body
}
