//! A front end's view of the function, and how it becomes the data path's.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dot_iommu::{DotTable, HostMapping, Perm};
use m2m_fabric::proto::{FunctionState, VirtioNetSpec};
use smartep::irq::Irqs;
use smartep::shadow::ShadowReader;

use super::super::{Seat, lock, report};
use super::descriptors;
use super::error::FaceError;
use super::features;
use super::kicks::Kicks;
use super::memory::{Region, Regions};
use super::ring::Vring;
use crate::net::dirty::DirtyLog;
use crate::virtio::feature;
use crate::virtio::signals::Signals;

/// What the face and the rest of the EM share.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) seat: Seat,
    pub(super) spec: VirtioNetSpec,
    pub(super) table: Arc<DotTable>,
    pub(super) irqs: Arc<Irqs>,
    pub(super) signals: Arc<Signals>,
    pub(super) shadow: Arc<ShadowReader>,
    /// When the OM was last told something.
    pub(super) told: Mutex<Option<Instant>>,
}

/// The OM is not told more often than this: a front end that comes, starts, stops and goes as fast as it can waits. But for
/// the fuzzer's, which is to be as fast as it can and has no OM.
const NEWS: Duration = Duration::from_millis(if cfg!(feature = "fuzzing") { 0 } else { 5 });

/// Bytes of a log: for guest addresses below 32 TiB, since there may be holes in them.
const MOST_LOG: u64 = 1 << 30;

impl Parts {
    /// Tells the OM where the function is in its life. For the function's thread, which may wait.
    pub(super) fn report(&self, state: FunctionState) {
        let mut told = lock(&self.told);
        if let Some(left) = told.and_then(|at| NEWS.checked_sub(at.elapsed())) {
            std::thread::sleep(left);
        }
        *told = Some(Instant::now());
        report(&self.seat.om, self.seat.id, state);
    }

    /// Rings that the function has.
    pub(super) fn rings(&self) -> u16 {
        2 * self.spec.queue_pairs
    }

    /// Each ring has a vector for used buffers and, behind those of all rings, one for failure.
    pub(super) fn vectors(pairs: u16) -> u16 {
        4 * pairs
    }

    fn error_vector(&self, ring: u16) -> u16 {
        self.rings() + ring
    }

    fn set_vectors(&self) {
        self.signals.set_msix(true);
        for ring in 0..self.rings() {
            self.signals.set_queue_vector(ring, ring);
            self.signals
                .set_queue_error_vector(ring, self.error_vector(ring));
        }
    }
}

/// One front end's function.
#[derive(Debug)]
pub(super) struct Face {
    pub(super) parts: Arc<Parts>,
    kicks: Arc<Kicks>,
    pub(super) memory: Regions,
    rings: Vec<Vring>,
    /// What the front end acknowledged, bits of the protocol included.
    features: u64,
    /// Where writes are logged while the front end has LOG_ALL.
    log: Option<DirtyLog>,
    /// Whether the data path has a driver.
    open: bool,
    /// Whether requests are acknowledged when the front end asks for it (REPLY_ACK).
    pub(super) acknowledges: bool,
    /// The last request was refused, which is not the end of its connection.
    pub(super) refused: bool,
}

impl Face {
    /// Nothing is known of the front end.
    pub(super) fn new(parts: Arc<Parts>, kicks: Arc<Kicks>) -> Self {
        parts.set_vectors();
        let rings = (0..parts.rings()).map(|_| Vring::default()).collect();
        Self {
            parts,
            kicks,
            memory: Regions::default(),
            rings,
            features: 0,
            log: None,
            open: false,
            acknowledges: false,
            refused: false,
        }
    }

    /// Whether the data path has a ring.
    pub(super) fn is_running(&self) -> bool {
        self.rings.iter().any(|ring| ring.running.is_some())
    }

    fn index(&self, ring: u32) -> Result<u16, FaceError> {
        let pairs = self.parts.spec.queue_pairs;
        let index = u16::try_from(ring).ok();
        let index = index.filter(|index| *index < self.parts.rings());
        index.ok_or(FaceError::NoRing { ring, pairs })
    }

    fn ring(&mut self, ring: u32) -> Result<(u16, &mut Vring), FaceError> {
        let index = self.index(ring)?;
        let pairs = self.parts.spec.queue_pairs;
        let vring = self.rings.get_mut(usize::from(index));
        vring
            .map(|vring| (index, vring))
            .ok_or(FaceError::NoRing { ring, pairs })
    }

    /// A ring that does not run.
    pub(super) fn idle_ring(
        &mut self,
        ring: u32,
        what: &'static str,
    ) -> Result<&mut Vring, FaceError> {
        let (ring, vring) = self.ring(ring)?;
        match vring.running {
            None => Ok(vring),
            Some(_) => Err(FaceError::Running { ring, what }),
        }
    }

    /// The front end took these features.
    pub(super) fn set_features(&mut self, features: u64) -> Result<(), FaceError> {
        let unknown = features & !features::OFFERED;
        if unknown != 0 {
            return Err(FaceError::Features(unknown));
        }
        // A front end may say the same again, and logging begins and ends while rings run.
        let changed = (features ^ self.features) & !features::LOG_ALL;
        if self.is_running() && changed != 0 {
            return Err(FaceError::Running {
                ring: 0,
                what: "features",
            });
        }
        self.features = features;
        self.log_writes();
        Ok(())
    }

    /// Where to log which pages the device writes: `size` bytes from `offset` on in a file.
    pub(super) fn set_log(&mut self, offset: u64, size: u64, file: &File) -> Result<(), FaceError> {
        if size > MOST_LOG {
            return Err(FaceError::TooMuch {
                what: "a log",
                bytes: size,
                most: MOST_LOG,
            });
        }
        if !descriptors::is_memory(file) {
            return Err(FaceError::NoMemoryFile("the log"));
        }
        let mapping = HostMapping::new(file.as_fd(), offset, size, Perm::RW);
        let mapping = mapping.map_err(FaceError::Log)?;
        // Kept until the data path has the new one, so that it is not the one to unmap.
        let former = self.log.replace(DirtyLog::new(mapping));
        self.log_writes();
        drop(former);
        Ok(())
    }

    fn log_writes(&self) {
        let log = self.log.clone();
        let log = log.filter(|_| self.features & features::LOG_ALL != 0);
        self.parts.seat.on_device(move |f| f.device.log_to(log));
    }

    /// All memory at once: the data path sees the old or the new.
    pub(super) fn set_memory(&mut self, regions: Vec<Region>) -> Result<(), FaceError> {
        let (table, new) = (self.parts.table.clone(), regions.clone());
        let done = self.parts.seat.worker.run(move |_| {
            table.clear();
            let result = new.iter().try_for_each(|region| region.insert(&table));
            if result.is_err() {
                table.clear();
            }
            result
        });
        // Unmapping may take long: here, not on the data path.
        drop(self.memory.replace(regions));
        done.unwrap_or(Err(FaceError::Worker))
    }

    /// One more range.
    pub(super) fn add_memory(&mut self, region: Region) -> Result<(), FaceError> {
        self.memory.add(&self.parts.table, region)
    }

    /// One range less.
    pub(super) fn remove_memory(
        &mut self,
        region: &vhost::vhost_user::message::VhostUserMemoryRegion,
    ) -> Result<(), FaceError> {
        self.memory.remove(&self.parts.table, region)
    }

    /// Where the parts of a ring are, in the front end's memory. A running ring stays where it is.
    pub(super) fn set_addresses(
        &mut self,
        ring: u32,
        desc: u64,
        avail: u64,
        used: u64,
    ) -> Result<(), FaceError> {
        let (index, vring) = self.ring(ring)?;
        let former = (vring.desc, vring.avail, vring.used);
        (vring.desc, vring.avail, vring.used) = (desc, avail, used);
        let Some(running) = vring.running else {
            return Ok(());
        };
        let packed = self.features & feature::RING_PACKED != 0;
        let vring = self.rings.get(usize::from(index));
        let moved = vring.map(|vring| vring.setup(index, &self.memory, packed));
        if matches!(moved, Some(Ok(setup)) if setup == running) {
            return Ok(());
        }
        let (_, vring) = self.ring(ring)?;
        (vring.desc, vring.avail, vring.used) = former;
        Err(FaceError::Running {
            ring: index,
            what: "addresses",
        })
    }

    /// A ring starts: its notifications come by this descriptor.
    pub(super) fn set_kick(&mut self, ring: u8, file: Option<File>) -> Result<(), FaceError> {
        let index = self.index(u32::from(ring))?;
        let kick = eventfd(index, file.ok_or(FaceError::Polled(index))?)?;
        self.drop_kick(index);
        self.kicks
            .add(&kick, index)
            .map_err(|source| FaceError::Descriptor {
                ring: index,
                source,
            })?;
        if let Some(vring) = self.rings.get_mut(usize::from(index)) {
            vring.kick = Some(kick);
        }
        self.update(index)
    }

    fn drop_kick(&mut self, ring: u16) {
        let vring = self.rings.get_mut(usize::from(ring));
        if let Some(kick) = vring.and_then(|vring| vring.kick.take()) {
            self.kicks.remove(kick.as_fd());
        }
    }

    /// What tells the driver of used buffers.
    pub(super) fn set_call(&mut self, ring: u8, file: Option<File>) -> Result<(), FaceError> {
        let index = self.index(u32::from(ring))?;
        self.set_vector(index, index, file)?;
        // What was used before had nobody to tell.
        self.parts.signals.interrupt_queue(index);
        Ok(())
    }

    /// What tells the front end that a ring failed.
    pub(super) fn set_error(&mut self, ring: u8, file: Option<File>) -> Result<(), FaceError> {
        let index = self.index(u32::from(ring))?;
        self.set_vector(index, self.parts.error_vector(index), file)
    }

    fn set_vector(&self, ring: u16, vector: u16, file: Option<File>) -> Result<(), FaceError> {
        let file = file.map(|file| eventfd(ring, file)).transpose()?;
        let set = self.parts.irqs.set(vector, file);
        set.map(|_| ()).map_err(|error| FaceError::Descriptor {
            ring,
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
        })
    }

    /// Whether frames may come and go through a ring.
    pub(super) fn enable(&mut self, ring: u32, enabled: bool) -> Result<(), FaceError> {
        let (index, vring) = self.ring(ring)?;
        vring.enabled = enabled;
        self.update(index)
    }

    /// A ring stops. Answers where it is.
    pub(super) fn stop_ring(&mut self, ring: u32) -> Result<u32, FaceError> {
        let index = self.index(ring)?;
        self.drop_kick(index);
        self.update(index)?;
        let (_, vring) = self.ring(ring)?;
        Ok(vring.base)
    }

    /// All rings stop; what was said about them is forgotten.
    pub(super) fn reset(&mut self) {
        for index in 0..self.parts.rings() {
            self.drop_kick(index);
        }
        self.rings.iter_mut().for_each(|r| *r = Vring::default());
        self.close();
        self.news();
    }

    /// The front end is gone: nothing of it is left.
    pub(super) fn leave(&mut self) {
        self.reset();
        self.features = 0;
        self.log_writes();
        self.log = None;
        self.parts.irqs.clear();
        self.parts.table.clear();
        drop(self.memory.replace(Vec::new()));
    }

    /// Gives a ring to the data path or takes it away.
    fn update(&mut self, index: u16) -> Result<(), FaceError> {
        // Without that bit rings are enabled from the start.
        let always = self.features & features::PROTOCOL_FEATURES == 0;
        let Some(vring) = self.rings.get(usize::from(index)) else {
            return Ok(());
        };
        let enabled = vring.enabled || always;
        let transmits = index % 2 == 1;
        let wanted = vring.kick.is_some() && (enabled || transmits);
        let before = self.is_running();
        if transmits {
            let seat = &self.parts.seat;
            seat.on_device(move |f| f.device.discard_from(index, !enabled));
        }
        match (wanted, vring.running.is_some()) {
            (true, false) => self.start(index)?,
            (false, true) => self.stop(index),
            _ => {}
        }
        if !self.is_running() {
            self.close();
        }
        // One that stops for a while keeps its frames from others: those behind it go on.
        let receivers = self.rings.iter().step_by(2);
        let used = receivers.take_while(|ring| ring.in_use && (ring.enabled || always));
        let pairs = used.count() as u16;
        if self.open {
            let seat = &self.parts.seat;
            seat.on_device(move |f| f.device.use_pairs(pairs));
        }
        if before != self.is_running() {
            self.news();
        }
        Ok(())
    }

    fn start(&mut self, index: u16) -> Result<(), FaceError> {
        let features =
            features::of_device(self.features).ok_or(FaceError::Unacceptable(self.features))?;
        let packed = features & feature::RING_PACKED != 0;
        let Some(vring) = self.rings.get_mut(usize::from(index)) else {
            return Ok(());
        };
        let setup = vring.setup(index, &self.memory, packed)?;
        let (position, open) = (vring.base, self.open);
        let started = self.parts.seat.on_device(move |f| {
            if !open {
                f.device.open(features, &mut f.links);
            }
            f.device.start_queue_at(index, setup, position)
        });
        self.open = true;
        match started {
            Some(true) => {
                vring.running = Some(setup);
                vring.in_use = true;
                Ok(())
            }
            Some(false) => Err(FaceError::Position {
                ring: index,
                position,
            }),
            None => Err(FaceError::Worker),
        }
    }

    fn stop(&mut self, index: u16) {
        let seat = &self.parts.seat;
        let position = seat.on_device(move |f| f.device.stop_queue(index, &mut f.links));
        if let Some(vring) = self.rings.get_mut(usize::from(index)) {
            vring.running = None;
            // A ring that failed has none; the last one known is as good as any.
            if let Some(Some(position)) = position {
                vring.base = position;
            }
        }
    }

    /// No ring runs: the driver may be another one next time.
    fn close(&mut self) {
        if std::mem::take(&mut self.open) {
            self.parts.seat.on_device(|f| f.device.stop(&mut f.links));
            self.parts.signals.reset();
            self.parts.set_vectors();
            self.rings.iter_mut().for_each(|ring| ring.in_use = false);
        }
    }

    fn news(&self) {
        let state = match self.is_running() {
            true => FunctionState::Running,
            false => FunctionState::Connected,
        };
        self.parts.report(state);
    }
}

fn eventfd(ring: u16, file: File) -> Result<OwnedFd, FaceError> {
    descriptors::eventfd(file).map_err(|source| FaceError::Descriptor { ring, source })
}
