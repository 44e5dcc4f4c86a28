//! The control side as an EM has it: reads from the shadow, writes to the OM over the fabric.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use m2m_fabric::Fabric;
use m2m_fabric::proto::ControlAddress;
use smartep::ControlSide;
use smartep::config::ConfigState;
use smartep::shadow::ShadowReader;

use crate::net::config::ConfigOverride;

/// How long an access waits for the OM; a VMM gives up after 5 s.
const PATIENCE: Duration = Duration::from_secs(1);
/// An OM that was silent for this long is not waited for.
const SILENT: Duration = Duration::from_millis(1500);
/// How long the first write that finds no OM, and those behind it, wait for another together. A driver that probes a
/// device reads what it wrote, and turns DMA on by a write that comes to the data path with the OM's answer only.
const RETURN: Duration = Duration::from_secs(2);
/// Between two looks for one.
const LOOK: Duration = Duration::from_millis(5);
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
        let former = std::mem::replace(
            &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner),
            fabric,
        );
        // Not under the lock: the end of a connection waits for threads that may ask for the OM.
        drop(former);
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

    /// Takes a function's control side back to the state after power-on. Without an OM nothing
    /// happens: the next VMM's connection does it again.
    pub fn reset_function(&self, function: u32) {
        if let Some(write) = RegisterWrite::reset(function) {
            self.write(&write);
        }
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

impl RegisterWrite {
    /// The write that resets a function.
    fn reset(function: u32) -> Option<Self> {
        let register = ControlAddress {
            function,
            region: ControlAddress::RESET_REGION,
            offset: 0,
        };
        Some(Self {
            address: register.to_bits()?,
            byte_enable: 15,
            value: 1,
        })
    }
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

/// What the data path adds to the device configuration of a network function: the MAC address that the driver set
/// (`mac` shows it, virtio 1.3 §5.1.6.5.2.1) and the wish for an announcement (a bit of `status`, §5.1.6.5.5).
#[derive(Debug)]
pub struct ConfigOverlay {
    /// vfio region index.
    pub region: u32,
    /// First byte of the device configuration.
    pub offset: u64,
    /// What is added.
    pub config: Arc<ConfigOverride>,
}

/// Where `status` is, behind the address, and its bit for announcements.
const STATUS: usize = 6;
const STATUS_ANNOUNCE: u8 = 2;

impl ConfigOverlay {
    fn apply(&self, region: u32, offset: u64, data: &mut [u8]) {
        if region != self.region {
            return;
        }
        let (mac, announce) = (self.config.mac(), self.config.announce());
        for (i, to) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(i as u64).checked_sub(self.offset);
            let Some(at) = at.and_then(|at| usize::try_from(at).ok()) else {
                continue;
            };
            if let Some(byte) = mac.as_ref().and_then(|mac| mac.get(at)) {
                *to = *byte;
            }
            if at == STATUS && announce {
                *to |= STATUS_ANNOUNCE;
            }
        }
    }
}

/// One function's control side.
#[derive(Debug)]
pub struct RemoteControl {
    function: u32,
    shadow: Arc<ShadowReader>,
    om: Arc<OmLink>,
    overlay: Option<ConfigOverlay>,
    queued: VecDeque<RegisterWrite>,
    /// Since when there are writes for which there was no OM.
    since: Option<Instant>,
    /// A function level reset was told. What is queued came after it, and the reset that follows is not to drop it.
    flr: bool,
    /// See [`RETURN`].
    patience: Duration,
}

impl RemoteControl {
    /// For function `function`.
    pub fn new(
        function: u32,
        shadow: Arc<ShadowReader>,
        om: Arc<OmLink>,
        overlay: Option<ConfigOverlay>,
    ) -> Self {
        Self {
            function,
            shadow,
            om,
            overlay,
            queued: VecDeque::new(),
            since: None,
            flr: false,
            patience: RETURN,
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
        loop {
            if let Some(state) = self.write_queued() {
                return Some(state);
            }
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.patience {
                return None;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Writes what is queued, up to one that asks for a function level reset. The last completion, when there was an
    /// OM for all of these.
    fn write_queued(&mut self) -> Option<ConfigState> {
        let mut state = None;
        while let Some(write) = self.queued.front() {
            let new = ConfigState::from_bits(self.om.write(write)?);
            self.queued.pop_front();
            state = Some(new);
            if new.flr {
                self.flr = true;
                break;
            }
        }
        self.since = None;
        state
    }
}

impl ControlSide for RemoteControl {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if !self.shadow.read(region, offset, data) {
            // Not all of it is shadowed: byte by byte, and ones where nothing is.
            for (i, byte) in data.iter_mut().enumerate() {
                let (at, mut one) = (offset.saturating_add(i as u64), [0]);
                let found = self.shadow.read(region, at, &mut one);
                *byte = if found { one[0] } else { 0xff };
            }
        }
        if let Some(overlay) = &self.overlay {
            overlay.apply(region, offset, data);
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
        if !std::mem::take(&mut self.flr) {
            self.queued.clear();
        }
        self.since = None;
        let Some(write) = RegisterWrite::reset(self.function) else {
            return self.state();
        };
        // Nobody reads what a reset wrote, and an EM that ends is not to be held up.
        match self.om.write(&write) {
            Some(state) => ConfigState::from_bits(state),
            None => {
                self.queued.push_front(write);
                self.state()
            }
        }
    }

    fn waits(&self) -> bool {
        !self.queued.is_empty()
    }

    fn retry(&mut self) -> ConfigState {
        self.write_queued().unwrap_or_else(|| self.state())
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
    fn what_the_data_path_changed_is_read_back() {
        let config = Arc::new(ConfigOverride::default());
        let overlay = ConfigOverlay {
            region: 0,
            offset: 0x2000,
            config: config.clone(),
        };
        let read = |region, offset| {
            let mut data = [0xee; 4];
            overlay.apply(region, offset, &mut data);
            data
        };
        assert_eq!(read(0, 0x2000), [0xee; 4]);
        config.set_mac(Some([2, 3, 4, 5, 6, 7]));
        assert_eq!(read(0, 0x1ffe), [0xee, 0xee, 2, 3]);
        assert_eq!(read(0, 0x2004), [6, 7, 0xee, 0xee]);
        assert_eq!(read(1, 0x2000), [0xee; 4]);
        config.set_mac(None);
        assert_eq!(read(0, 0x2000), [0xee; 4]);
        config.set_announce(true);
        let mut status = [1, 0];
        overlay.apply(0, 0x2006, &mut status);
        assert_eq!(
            status,
            [3, 0],
            "the link is up, and an announcement is wanted"
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
        let mut control = RemoteControl::new(0, shadow, Arc::default(), None);
        control.patience = Duration::from_millis(20);
        let begin = Instant::now();
        assert_eq!(control.write(7, 4, &[6, 0]), state);
        assert_eq!(control.queued.len(), 1);
        assert!(begin.elapsed() >= control.patience, "it looked for an OM");
        let mut data = [0; 4];
        control.read(7, 4094, &mut data);
        assert_eq!(data, [0x5a, 0x5a, 0xff, 0xff]);
        for _ in 0..2 * QUEUED {
            control.write(7, 4, &[6, 0]);
        }
        assert_eq!(control.queued.len(), QUEUED);
    }

    /// An OM that takes writes down. One of [`Self::FLR`] asks for a function level reset.
    #[derive(Default)]
    struct Om(Mutex<Vec<(u32, u32)>>);

    impl Om {
        const FLR: u32 = 0x8000;

        fn taken(&self) -> Vec<(u32, u32)> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl m2m_fabric::Handler for Om {
        fn request(
            &self,
            _: m2m_fabric::proto::Request,
            _: Vec<std::os::fd::OwnedFd>,
        ) -> m2m_fabric::proto::Reply {
            m2m_fabric::proto::Reply::Ok
        }
        fn event(&self, _: m2m_fabric::proto::Event) {}
        fn register_read(&self, _: u32) -> u32 {
            0
        }
        fn register_write(&self, address: u32, _: u8, value: u32) -> u32 {
            let address = ControlAddress::from_bits(address);
            let mut taken = self.0.lock().unwrap();
            taken.push((address.region, value));
            let state = ConfigState {
                flr: value == Self::FLR,
                ..Default::default()
            };
            state.to_bits()
        }
        fn down(&self, _: &m2m_fabric::FabricError) {}
    }

    #[test]
    fn what_is_queued_behind_a_function_level_reset_outlives_it() {
        let (_writer, fd) = smartep::shadow::ShadowWriter::new().unwrap();
        let shadow = Arc::new(ShadowReader::new(&fd).unwrap());
        let link = Arc::new(OmLink::default());
        let mut control = RemoteControl::new(0, shadow, link.clone(), None);
        control.patience = Duration::ZERO;
        for value in [1, Om::FLR, 2] {
            control.write(7, 4, &value.to_le_bytes());
        }
        assert!(control.waits());

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m2m.sock");
        let listener = m2m_fabric::local::LocalListener::bind(&path).unwrap();
        let om = Arc::new(Om::default());
        let (_server, fabric) = std::thread::scope(|scope| {
            let em = scope.spawn(|| m2m_fabric::local::connect(&path, Arc::new(Om::default())));
            let om = listener.accept().unwrap().start(om.clone()).unwrap();
            (om, em.join().unwrap().unwrap())
        });
        link.set(Some(fabric));
        assert!(control.retry().flr);
        assert_eq!(om.taken(), [(7, 1), (7, Om::FLR)]);
        control.reset();
        assert_eq!(om.taken(), [(ControlAddress::RESET_REGION, 1)]);
        assert!(control.waits() && !control.retry().flr);
        assert_eq!(om.taken(), [(7, 2)]);
        assert!(!control.waits());
        // A client that is new leaves nothing of the former's.
        link.set(None);
        control.write(7, 4, &3u32.to_le_bytes());
        control.reset();
        assert_eq!(control.queued.len(), 1);
    }
}
