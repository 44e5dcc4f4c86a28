//! The control side as a model in this process: what an OM runs, and what tests use without one.

use log::warn;

use crate::config::{CONFIG_SIZE, ConfigSpace, ConfigState};
use crate::shadow::{ShadowReader, ShadowWindow, ShadowWriter};
use crate::{CONFIG_REGION, ControlSide};

/// Control registers outside configuration space. A guest reads them; writes are dropped.
#[derive(Debug, Clone)]
pub struct ControlRegisters {
    /// vfio region index.
    pub region: u32,
    /// First byte in the region.
    pub offset: u64,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Configuration space and control registers, with a shadow that is kept current.
#[derive(Debug)]
pub struct LocalControl {
    config: ConfigSpace,
    registers: Vec<ControlRegisters>,
    shadow: Option<ShadowWriter>,
}

impl LocalControl {
    /// A model; with `shadow`, every change is published there.
    pub fn new(
        config: ConfigSpace,
        registers: Vec<ControlRegisters>,
        shadow: Option<ShadowWriter>,
    ) -> Self {
        let mut this = Self {
            config,
            registers,
            shadow,
        };
        this.publish();
        this
    }

    /// Changes control registers from the device's side, as for a new link status. False when they do not exist.
    pub fn update(&mut self, region: u32, offset: u64, data: &[u8]) -> bool {
        let place = self
            .registers
            .iter_mut()
            .filter(|r| r.region == region)
            .find_map(|r| {
                let start = usize::try_from(offset.checked_sub(r.offset)?).ok()?;
                r.bytes.get_mut(start..start.checked_add(data.len())?)
            });
        let found = place.map(|bytes| bytes.copy_from_slice(data)).is_some();
        self.publish();
        found
    }

    /// Takes configuration space as another process presented it.
    pub fn restore(&mut self, former: &ShadowReader) -> bool {
        let mut bytes = [0; CONFIG_SIZE];
        let found = former.read(CONFIG_REGION, 0, &mut bytes);
        if found {
            self.config.restore(&bytes);
            self.publish();
        }
        found
    }

    fn publish(&mut self) {
        let Some(shadow) = &mut self.shadow else {
            return;
        };
        let windows: Vec<_> = self
            .registers
            .iter()
            .map(|r| ShadowWindow {
                region: r.region,
                offset: r.offset,
                bytes: &r.bytes,
            })
            .collect();
        if let Err(e) = shadow.publish(self.config.bytes(), &windows, self.config.state()) {
            warn!("the shadow is not current: {e}");
        }
    }
}

impl ControlSide for LocalControl {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region == CONFIG_REGION {
            return self.config.read(offset, data);
        }
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(i as u64);
            *byte = self
                .registers
                .iter()
                .filter(|r| r.region == region)
                .find_map(|r| {
                    r.bytes
                        .get(usize::try_from(at.checked_sub(r.offset)?).ok()?)
                })
                .copied()
                .unwrap_or(0xff);
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> ConfigState {
        if region != CONFIG_REGION {
            return self.config.state();
        }
        let state = self.config.write(offset, data);
        self.publish();
        state
    }

    fn reset(&mut self) -> ConfigState {
        let state = self.config.reset();
        self.publish();
        state
    }

    fn state(&self) -> ConfigState {
        self.config.state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigBuilder;

    #[test]
    fn every_change_reaches_the_shadow() {
        let (writer, fd) = ShadowWriter::new().unwrap();
        let reader = ShadowReader::new(&fd).unwrap();
        let registers = vec![ControlRegisters {
            region: 0,
            offset: 0x2000,
            bytes: vec![1, 2, 3, 4],
        }];
        let config = ConfigBuilder {
            vendor: 0x1af4,
            ..Default::default()
        }
        .build()
        .unwrap();
        let mut model = LocalControl::new(config, registers, Some(writer));
        let mut data = [0; 2];
        assert!(reader.read(7, 0, &mut data));
        assert_eq!(data, [0xf4, 0x1a]);
        assert!(model.write(7, 4, &[4, 0]).bus_master && reader.state().bus_master);
        assert!(model.update(0, 0x2002, &[9]));
        assert!(reader.read(0, 0x2001, &mut data));
        assert_eq!(data, [2, 9]);
        assert!(!model.update(0, 0x2003, &[1, 1]) && !model.update(1, 0x2000, &[1]));
        model.reset();
        assert!(!reader.state().bus_master);
    }

    #[test]
    fn registers_outside_every_window_read_as_ones() {
        let registers = vec![ControlRegisters {
            region: 0,
            offset: 4,
            bytes: vec![0; 2],
        }];
        let mut model =
            LocalControl::new(ConfigBuilder::default().build().unwrap(), registers, None);
        let mut data = [1; 4];
        model.read(0, 3, &mut data);
        assert_eq!(data, [0xff, 0, 0, 0xff]);
    }
}
