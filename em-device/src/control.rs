//! The control side as an EM has it: reads from the shadow, writes to the OM over the fabric.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use m2m_fabric::Fabric;
use m2m_fabric::proto::ControlAddress;
use smartep::ControlSide;
use smartep::config::ConfigState;
use smartep::shadow::ShadowReader;

/// How long an access waits for the OM; a VMM gives up after 5 s.
const PATIENCE: Duration = Duration::from_secs(1);
/// An OM that was silent for this long is not waited for.
const SILENT: Duration = Duration::from_millis(1500);
/// Writes that wait for an OM at the most.
const QUEUED: usize = 1024;

/// The OM of this EM, when there is one.
#[derive(Default)]
pub struct OmLink(Mutex<Option<Arc<dyn Fabric>>>);

impl std::fmt::Debug for OmLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OmLink(up: {})", self.get().is_some())
    }
}

impl OmLink {
    /// Replaces the connection.
    pub fn set(&self, fabric: Option<Arc<dyn Fabric>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = fabric;
    }

    /// The connection, when it is up.
    pub fn get(&self) -> Option<Arc<dyn Fabric>> {
        let fabric = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        fabric.filter(|f| f.is_up())
    }

    fn write(&self, write: &RegisterWrite) -> Option<u32> {
        let om = self.get().filter(|f| f.last_heard().elapsed() < SILENT)?;
        match om
            .registers()
            .write(write.address, write.byte_enable, write.value, PATIENCE)
        {
            Ok(completion) => Some(completion),
            Err(e) => {
                log::warn!("the OM does not take a register write: {e}");
                None
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RegisterWrite {
    address: u32,
    byte_enable: u8,
    value: u32,
}

/// Cuts a write into aligned 4-byte accesses with byte enables. What has no register address is dropped.
fn register_writes(function: u32, region: u32, offset: u64, data: &[u8]) -> Vec<RegisterWrite> {
    let mut writes: Vec<RegisterWrite> = Vec::with_capacity(data.len() / 4 + 2);
    for (i, &byte) in data.iter().enumerate() {
        let at = offset.saturating_add(i as u64);
        let (aligned, lane) = (at & !3, (at & 3) as u32);
        let address = u32::try_from(aligned).ok().and_then(|offset| {
            ControlAddress {
                function,
                region,
                offset,
            }
            .to_bits()
        });
        let Some(address) = address else { break };
        let (enable, value) = (1 << lane, u32::from(byte) << (8 * lane));
        match writes.last_mut().filter(|w| w.address == address) {
            Some(w) => {
                w.byte_enable |= enable;
                w.value |= value;
            }
            None => writes.push(RegisterWrite {
                address,
                byte_enable: enable,
                value,
            }),
        }
    }
    writes
}

/// One function's control side.
#[derive(Debug)]
pub struct RemoteControl {
    function: u32,
    shadow: Arc<ShadowReader>,
    om: Arc<OmLink>,
    queued: VecDeque<RegisterWrite>,
}

impl RemoteControl {
    /// For function `function`.
    pub fn new(function: u32, shadow: Arc<ShadowReader>, om: Arc<OmLink>) -> Self {
        Self {
            function,
            shadow,
            om,
            queued: VecDeque::new(),
        }
    }

    /// Writes in order, those that waited first. The last completion, when all were taken.
    fn write_all(&mut self, writes: Vec<RegisterWrite>) -> Option<ConfigState> {
        for write in writes {
            if self.queued.len() >= QUEUED {
                log::warn!(
                    "more than {QUEUED} register writes wait for the OM; the oldest is dropped"
                );
                self.queued.pop_front();
            }
            self.queued.push_back(write);
        }
        let mut state = ConfigState::default();
        let mut flr = false;
        while let Some(write) = self.queued.front() {
            state = ConfigState::from_bits(self.om.write(write)?);
            flr |= state.flr;
            self.queued.pop_front();
        }
        Some(ConfigState { flr, ..state })
    }
}

impl ControlSide for RemoteControl {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if self.shadow.read(region, offset, data) {
            return;
        }
        // Not all of it is shadowed: byte by byte, and ones where nothing is.
        for (i, byte) in data.iter_mut().enumerate() {
            let mut one = [0xff];
            if !self
                .shadow
                .read(region, offset.saturating_add(i as u64), &mut one)
            {
                one = [0xff];
            }
            *byte = one[0];
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> ConfigState {
        let writes = register_writes(self.function, region, offset, data);
        if writes.is_empty() && self.queued.is_empty() {
            return self.state();
        }
        self.write_all(writes).unwrap_or_else(|| self.state())
    }

    fn reset(&mut self) -> ConfigState {
        self.queued.clear();
        let region = ControlAddress::RESET_REGION;
        let reset = ControlAddress {
            function: self.function,
            region,
            offset: 0,
        };
        let Some(address) = reset.to_bits() else {
            return self.state();
        };
        let write = RegisterWrite {
            address,
            byte_enable: 15,
            value: 1,
        };
        self.write_all(vec![write]).unwrap_or_else(|| self.state())
    }

    fn state(&self) -> ConfigState {
        self.shadow.state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_of_any_alignment_becomes_aligned_registers_with_byte_enables() {
        let writes = register_writes(3, 7, 6, &[1, 2, 3, 4, 5, 6, 7]);
        let parts: Vec<_> = writes
            .iter()
            .map(|w| {
                (
                    ControlAddress::from_bits(w.address).offset,
                    w.byte_enable,
                    w.value,
                )
            })
            .collect();
        assert_eq!(
            parts,
            [
                (4, 0b1100, 0x0201_0000),
                (8, 0b1111, 0x0605_0403),
                (12, 1, 7)
            ]
        );
    }

    #[test]
    fn without_an_om_writes_wait_and_reads_come_from_the_shadow() {
        let (mut writer, fd) = smartep::shadow::ShadowWriter::new().unwrap();
        let state = ConfigState {
            memory: true,
            ..Default::default()
        };
        writer.publish(&[0x5a; 4096], &[], state).unwrap();
        let shadow = Arc::new(ShadowReader::new(&fd).unwrap());
        let mut control = RemoteControl::new(0, shadow, Arc::default());
        assert_eq!(control.write(7, 4, &[6, 0]), state);
        assert_eq!(control.queued.len(), 1);
        let mut data = [0; 4];
        control.read(7, 4094, &mut data);
        assert_eq!(data, [0x5a, 0x5a, 0xff, 0xff]);
        for _ in 0..2 * QUEUED {
            control.write(7, 4, &[6, 0]);
        }
        assert_eq!(control.queued.len(), QUEUED);
    }
}
