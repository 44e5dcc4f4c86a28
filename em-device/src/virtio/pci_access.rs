//! Finds the PCI configuration access capability (virtio 1.3 §4.1.4.9) in what the OM presents.

use smartep::CONFIG_REGION;
use smartep::shadow::ShadowReader;

/// Capability id of vendor-specific capabilities (PCI 3.0, appendix H).
const VENDOR_SPECIFIC: u8 = 0x09;
/// `VIRTIO_PCI_CAP_PCI_CFG`.
const PCI_CFG: u8 = 5;
/// Capabilities that fit in 256 bytes at the most.
const MOST: usize = 48;
/// Pointer to the first capability (PCI 3.0 §6.7).
const POINTER: u64 = 0x34;
/// `cfg_type` and `bar` in `struct virtio_pci_cap`.
const CFG_TYPE: u64 = 3;
const BAR: u64 = 4;

/// Offset of the capability's `bar` in configuration space; `None` when there is no such capability.
pub fn find(shadow: &ShadowReader) -> Option<u64> {
    find_in(|offset| {
        let mut byte = [0];
        shadow
            .read(CONFIG_REGION, offset, &mut byte)
            .then_some(byte[0])
    })
}

fn find_in(byte: impl Fn(u64) -> Option<u8>) -> Option<u64> {
    let mut at = u64::from(byte(POINTER)?);
    for _ in 0..MOST {
        if at == 0 {
            return None;
        }
        if byte(at)? == VENDOR_SPECIFIC && byte(at + CFG_TYPE)? == PCI_CFG {
            return Some(at + BAR);
        }
        at = u64::from(byte(at + 1)?);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(capabilities: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[0x34] = capabilities.first().map_or(0, |c| c.0 as u8);
        for (at, body) in capabilities {
            bytes[*at..*at + body.len()].copy_from_slice(body);
        }
        bytes
    }

    fn found(bytes: &[u8]) -> Option<u64> {
        find_in(|at| bytes.get(at as usize).copied())
    }

    #[test]
    fn the_capability_is_found_behind_others() {
        let bytes = space(&[
            (0x40, &[1, 0x50]),
            (0x50, &[9, 0x60, 16, 1]),
            (0x60, &[9, 0, 20, 5]),
        ]);
        assert_eq!(found(&bytes), Some(0x64));
    }

    #[test]
    fn a_list_without_it_or_without_an_end_has_none() {
        assert_eq!(found(&space(&[])), None);
        assert_eq!(found(&space(&[(0x40, &[9, 0, 16, 1])])), None);
        assert_eq!(found(&space(&[(0x40, &[1, 0x40])])), None, "a loop");
        assert_eq!(found(&[0; 16]), None, "cut short");
    }
}
