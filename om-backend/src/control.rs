//! The control side of one function: config space and device configuration, written by its guest
//! through its EM and by the OM, read by the EM from the shadow.

use crate::northbound::view::PresentationView;
use crate::presentation::Presentation;
use m2m_fabric::proto::{FunctionKind, FunctionSpec};
use smartep::config::{ConfigError, ConfigState};
use smartep::model::{ControlRegisters, LocalControl};
use smartep::shadow::{ShadowError, ShadowReader, ShadowWriter};
use smartep::{CONFIG_REGION, ControlSide};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why a function cannot be presented.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// What it should look like is not possible in config space.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The memory of the shadow could not be made.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
}

/// One function's control side, for the fabric's threads and the OM's own.
#[derive(Debug)]
pub struct FunctionControl {
    model: Mutex<LocalControl>,
    /// Region and offset of the byte that has the link status in bit 0.
    link_status: Option<(u32, u64)>,
    /// Whether a reset leaves the BARs where the guest placed them, see [`Self::reset`].
    keeps_bars: bool,
}

/// The registers of the BARs in config space, and their bytes.
const BARS: u64 = 0x10;
const BARS_BYTES: usize = 24;

impl FunctionControl {
    /// As powered on, and the memory of its shadow for the EM.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn new(presentation: Presentation) -> Result<(Self, OwnedFd), ControlError> {
        let Presentation {
            config,
            windows,
            spec,
            link_status,
        } = presentation;
        let keeps_bars = matches!(spec.kind, FunctionKind::Memory(_));
        let (writer, shadow) = ShadowWriter::new()?;
        let link_status = link_status.and_then(|(window, byte)| {
            let window = spec.control.get(window)?;
            Some((window.region, window.offset + byte as u64))
        });
        let registers = spec
            .control
            .iter()
            .zip(windows)
            .map(|(window, bytes)| ControlRegisters {
                region: window.region,
                offset: window.offset,
                bytes,
            })
            .collect();
        let model = LocalControl::new(config.build()?, registers, Some(writer));
        let control = Self {
            model: Mutex::new(model),
            link_status,
            keeps_bars,
        };
        Ok((control, shadow))
    }

    fn lock(&self) -> MutexGuard<'_, LocalControl> {
        // A model is bytes; whoever panicked with the lock left some bytes written and others not.
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the 4 bytes at `offset` of `region`; what is not there reads as ones.
    pub fn read(&self, region: u32, offset: u32) -> u32 {
        let mut bytes = [0xff; 4];
        self.lock().read(region, offset.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes the bytes of `value` that `byte_enable` names (bit n: bits 8n to 8n+7). The answer is the
    /// new [`ConfigState`] as bits, also when no byte is named.
    pub fn write(&self, region: u32, offset: u32, byte_enable: u8, value: u32) -> u32 {
        let bytes = value.to_le_bytes();
        let mut model = self.lock();
        let mut state = model.state();
        let mut flr = false;
        for (start, end) in runs(byte_enable) {
            if let Some(run) = bytes.get(start..end) {
                state = model.write(region, u64::from(offset) + start as u64, run);
                flr |= state.flr;
            }
        }
        ConfigState { flr, ..state }.to_bits()
    }

    /// Where the guest placed a 64-bit memory BAR, when memory decode is on.
    pub fn decoded(&self, bar: u32) -> Option<u64> {
        let mut model = self.lock();
        if !model.state().memory {
            return None;
        }
        let mut register = [0; 8];
        model.read(CONFIG_REGION, BARS + 4 * u64::from(bar), &mut register);
        Some(u64::from_le_bytes(register) & !0xf)
    }

    /// Back to as powered on, but for the link; the answer is the new [`ConfigState`] as bits.
    ///
    /// The BARs of a memory function stay where they are, with memory decode off. A VMM shows its guest the addresses
    /// that the guest wrote, also after a reset; so the guest finds nothing to restore, and writes the command register
    /// only.
    pub fn reset(&self) -> u32 {
        let mut model = self.lock();
        let mut bars = [0; BARS_BYTES];
        model.read(CONFIG_REGION, BARS, &mut bars);
        let state = model.reset();
        if self.keeps_bars {
            model.write(CONFIG_REGION, BARS, &bars);
        }
        state.to_bits()
    }

    /// Takes what a former OM presented; `false` when it presented nothing.
    pub fn restore(&self, former: &ShadowReader) -> bool {
        self.lock().restore(former)
    }

    /// Makes the link status `up` or not; `true` if it was otherwise.
    pub fn set_link(&self, up: bool) -> bool {
        let Some((region, offset)) = self.link_status else {
            return false;
        };
        let mut model = self.lock();
        let mut status = [0];
        model.read(region, offset, &mut status);
        let [old] = status;
        let new = (old & !1) | u8::from(up);
        new != old && model.update(region, offset, &[new])
    }

    /// What the guest sees, for people.
    pub fn inspect(&self, spec: &FunctionSpec) -> PresentationView {
        let mut header = [0; 64];
        let mut model = self.lock();
        model.read(CONFIG_REGION, 0, &mut header);
        let state = model.state();
        PresentationView {
            regions: spec.regions.iter().map(|r| (r.index, r.size)).collect(),
            msix_vectors: spec.msix_vectors,
            bus_master: state.bus_master,
            memory: state.memory,
            msix_enabled: state.msix_enabled,
            config_header: header.iter().map(|b| format!("{b:02x}")).collect(),
        }
    }
}

/// The runs of neighbouring bytes among 4 that `byte_enable` names, as ranges.
fn runs(byte_enable: u8) -> impl Iterator<Item = (usize, usize)> {
    let named = move |n: usize| n < 4 && byte_enable >> n & 1 == 1;
    (0..4)
        .filter(move |n| named(*n) && (*n == 0 || !named(n - 1)))
        .map(move |start| {
            let end = (start..=4).find(|n| !named(*n)).unwrap_or(4);
            (start, end)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::presentation;

    fn control() -> (FunctionControl, ShadowReader) {
        let config = Config::parse(
            "test",
            "[[em]]\nname = \"em0\"\n[[em.function]]\nname = \"net0\"\nkind = \"virtio-net\"\n\
             mac = \"02:00:00:00:00:01\"\nport = { null = true }\n",
        )
        .unwrap();
        let presentation = presentation::present(0, &config.ems[0].functions[0]);
        let (control, fd) = FunctionControl::new(presentation).unwrap();
        (control, ShadowReader::new(fd).unwrap())
    }

    #[test]
    fn byte_enables_become_runs() {
        let all = |be| runs(be).collect::<Vec<_>>();
        assert_eq!(all(0b1111), [(0, 4)]);
        assert_eq!(all(0b0110), [(1, 3)]);
        assert_eq!(all(0b1001), [(0, 1), (3, 4)]);
        assert_eq!(all(0b1000), [(3, 4)]);
        assert_eq!(all(0), []);
        assert_eq!(all(0xf0), []);
    }

    #[test]
    fn only_the_named_bytes_are_written_and_the_state_comes_back() {
        let (control, shadow) = control();
        let state = ConfigState::from_bits(control.write(7, 4, 0b0001, 0xffff_ffff));
        assert!(state.bus_master && state.memory && !state.intx_disabled);
        assert_eq!(control.read(7, 4) & 0xff00, 0, "byte 5 was not named");
        assert_eq!(shadow.state(), state);
        assert_eq!(
            ConfigState::from_bits(control.reset()),
            ConfigState::default()
        );
        assert!(!shadow.state().bus_master);
    }

    #[test]
    fn a_bar_tells_its_size() {
        let (control, _shadow) = control();
        control.write(7, 0x10, 0xf, u32::MAX);
        control.write(7, 0x14, 0xf, u32::MAX);
        assert_eq!(control.read(7, 0x10), 0xffff_8004);
        assert_eq!(control.read(7, 0x14), u32::MAX);
    }

    #[test]
    fn a_bar_is_decoded_where_the_guest_put_it_while_decode_is_on() {
        let (control, _shadow) = control();
        control.write(7, 0x10, 0xf, 0x8000_0000);
        control.write(7, 0x14, 0xf, 0x1);
        assert_eq!(control.decoded(0), None);
        control.write(7, 4, 0b0001, 2);
        assert_eq!(control.decoded(0), Some(0x1_8000_0000));
        control.reset();
        assert_eq!(control.decoded(0), None);
    }

    #[test]
    fn a_memory_function_is_where_it_was_when_it_is_decoded_again_after_a_reset() {
        let config = Config::parse(
            "test",
            "[[em]]\nname = \"em0\"\n[[em.function]]\nname = \"gpu0\"\nkind = \"memory\"\nvm = \"a\"\n",
        );
        let function = config.unwrap().ems[0].functions[0].clone();
        let (control, shadow) = FunctionControl::new(presentation::present(0, &function)).unwrap();
        control.write(7, 0x18, 0xf, 0xd000_0000);
        control.write(7, 4, 0b0001, 2);
        assert_eq!(control.decoded(2), Some(0xd000_0000));
        let state = ConfigState::from_bits(control.reset());
        assert!(!state.memory);
        assert_eq!(control.decoded(2), None);
        control.write(7, 4, 0b0001, 2);
        assert_eq!(control.decoded(2), Some(0xd000_0000));
        drop(shadow);
    }

    #[test]
    fn the_link_is_down_first_and_its_changes_reach_the_shadow() {
        let (control, shadow) = control();
        let status = || {
            let mut bytes = [0xff; 2];
            assert!(shadow.read(0, 0x2006, &mut bytes));
            u16::from_le_bytes(bytes)
        };
        assert_eq!(status(), 0);
        assert!(control.set_link(true) && !control.set_link(true));
        assert_eq!(status(), 1);
        control.reset();
        assert_eq!(status(), 1, "the guest's reset does not unplug the cable");
        assert!(control.set_link(false));
        assert_eq!(status(), 0);
    }

    #[test]
    fn a_guest_cannot_write_the_device_configuration() {
        let (control, _shadow) = control();
        let mac = control.read(0, 0x2000);
        control.write(0, 0x2000, 0xf, 0);
        assert_eq!(control.read(0, 0x2000), mac);
        assert_eq!(mac, 0x0000_0002);
    }
}
