//! A virtio-net driver for tests: as strict as the specification, and on demand hostile.
//!
//! It sleeps only when it asked for an interrupt and kicks only when the device asked for a kick, so that a
//! lost interrupt or kick shows as a timeout. Interrupts are eventfds, as a VMM sets them.

pub mod control;
pub mod features;
mod transfer;

use crate::client::{Client, Vmm};
use crate::memory::{GuestMemory, Shape};
use crate::pci::Function;
use crate::ring::Ring;
use crate::time::{SOON, wait_for};
use crate::{Error, Result};
use features::{NO_VECTOR, common, status};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The guest around the driver.
#[derive(Debug, Clone, Copy)]
pub struct Guest {
    /// Bytes of memory.
    pub memory: u64,
    /// How the memory is told to the device.
    pub shape: Shape,
    /// Whether register writes are posted, as QEMU does.
    pub posted: bool,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            memory: 48 << 20,
            shape: Shape::Whole,
            posted: true,
        }
    }
}

/// How the driver sets the device up.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Features that the driver takes when they are offered.
    pub features: u64,
    /// Queue pairs in use, when the device and the features allow more than 1.
    pub pairs: u16,
    /// Largest queue size the driver takes.
    pub queue_size: u16,
    /// Bytes of a receive buffer; 0 chooses what the features need.
    pub receive_buffer: u32,
    /// Receive buffers kept available, at most the queue's size.
    pub receive_buffers: u16,
    /// Descriptors that a receive buffer is cut into.
    pub receive_pieces: u32,
    /// Descriptors that a frame is cut into, besides the header's.
    pub transmit_pieces: u32,
    /// Whether frames go out in indirect tables, when negotiated.
    pub indirect: bool,
    /// Whether queues and configuration have MSI-X vectors; without, the driver polls.
    pub interrupts: bool,
    /// Whether receive buffers are there before DRIVER_OK.
    pub fill: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            features: features::LINUX,
            pairs: 1,
            queue_size: 256,
            receive_buffer: 0,
            receive_buffers: 64,
            receive_pieces: 1,
            transmit_pieces: 1,
            indirect: true,
            interrupts: true,
            fill: true,
        }
    }
}

/// The driver and its device.
pub struct VirtioNet {
    /// The VMM's half of the connection.
    pub vmm: Box<dyn Vmm>,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The function as probed.
    pub pci: Function,
    /// Features agreed on.
    pub features: u64,
    /// Receive queues by pair.
    pub receive_rings: Vec<Ring>,
    /// Transmit queues by pair.
    pub transmit_rings: Vec<Ring>,
    /// Control queue, when negotiated.
    pub control_ring: Option<Ring>,
    /// The setup of the last start.
    pub setup: Setup,
    interrupts: Vec<OwnedFd>,
    notify_offsets: HashMap<u16, u16>,
    receive_buffer: u32,
    receive_base: Vec<u64>,
    transmit_base: Vec<u64>,
    transmit_slots: Vec<transfer::Slots>,
    receive_slots: Vec<HashMap<u16, u16>>,
    control_buffer: u64,
}

impl VirtioNet {
    /// Connects as QEMU would, maps the memory, probes and switches the function on.
    ///
    /// # Errors
    /// The server refused something, or the function is not a virtio network device.
    pub fn open(socket: &Path, guest: Guest) -> Result<Self> {
        let mut client = Client::connect(socket)?;
        client.posted = guest.posted;
        let memory = Arc::new(GuestMemory::new(guest.memory, guest.shape)?);
        Self::attach(Box::new(client), memory)
    }

    /// The same on an open connection.
    ///
    /// # Errors
    /// The server refused something, or the function is not a virtio network device.
    pub fn attach(mut vmm: Box<dyn Vmm>, memory: Arc<GuestMemory>) -> Result<Self> {
        vmm.map_all(&memory)?;
        let pci = Function::probe(vmm.as_mut())?;
        if (pci.vendor, pci.device) != (0x1af4, 0x1041) {
            return Err(Error::Device(format!(
                "{:04x}:{:04x} is not a virtio network function",
                pci.vendor, pci.device
            )));
        }
        Self::with_function(vmm, memory, pci)
    }

    /// The same on a function that needs no probe, with its memory mapped.
    ///
    /// # Errors
    /// The server refused something.
    pub fn with_function(
        vmm: Box<dyn Vmm>,
        memory: Arc<GuestMemory>,
        pci: Function,
    ) -> Result<Self> {
        let mut driver = Self {
            vmm,
            memory,
            pci,
            features: 0,
            receive_rings: Vec::new(),
            transmit_rings: Vec::new(),
            control_ring: None,
            setup: Setup::default(),
            interrupts: Vec::new(),
            notify_offsets: HashMap::new(),
            receive_buffer: 0,
            receive_base: Vec::new(),
            transmit_base: Vec::new(),
            transmit_slots: Vec::new(),
            receive_slots: Vec::new(),
            control_buffer: 0,
        };
        driver.switch_on()?;
        Ok(driver)
    }

    /// Decoding, bus mastering and MSI-X on, an eventfd for each vector. Also needed after an FLR.
    ///
    /// # Errors
    /// The server refused something.
    pub fn switch_on(&mut self) -> Result<()> {
        self.pci.enable(self.vmm.as_mut())?;
        self.pci
            .connect_msix(self.vmm.as_mut(), &mut self.interrupts)
    }

    /// The whole of virtio 1.3 §3.1.1, from reset to DRIVER_OK, then the queue pairs of the setup.
    ///
    /// # Errors
    /// The device refused the features or a queue, or did not answer.
    pub fn start(&mut self, setup: Setup) -> Result<()> {
        self.start_without_kick(setup)?;
        self.kick_all()?;
        // Without a control queue the VMM knows.
        if setup.pairs > 1 && self.features & features::MQ != 0 && self.control_ring.is_some() {
            let answer = self.set_pairs(setup.pairs)?;
            if answer != control::OK {
                return Err(Error::Device(format!(
                    "{} queue pairs were answered with {answer}",
                    setup.pairs
                )));
            }
        }
        Ok(())
    }

    /// The same up to DRIVER_OK, with one queue pair in use and without the kicks that follow.
    ///
    /// # Errors
    /// The device refused the features or a queue, or did not answer.
    pub fn start_without_kick(&mut self, setup: Setup) -> Result<()> {
        self.negotiate(setup.features)?;
        self.setup = setup;
        self.make_queues()?;
        let status = self.status()?;
        self.set_status(status | status::DRIVER_OK)?;
        // Writes are posted: once the status reads back, the device has seen DRIVER_OK, and no frame that the
        // peer sends from now on may be lost.
        self.wait_status(status::DRIVER_OK)
    }

    /// Reset and feature negotiation, up to FEATURES_OK.
    ///
    /// # Errors
    /// The device refused the features.
    pub fn negotiate(&mut self, wanted: u64) -> Result<()> {
        self.reset()?;
        self.set_status(status::ACKNOWLEDGE)?;
        self.set_status(status::ACKNOWLEDGE | status::DRIVER)?;
        self.features = self.offered()? & wanted;
        self.accept(self.features)?;
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK)?;
        if self.status()? & status::FEATURES_OK == 0 {
            return Err(Error::Device(format!(
                "features {:#x} were refused",
                self.features
            )));
        }
        Ok(())
    }

    /// Writes 0 to the status and waits until it reads 0; the driver's memory and queues are given up.
    ///
    /// # Errors
    /// The device does not reset in time.
    pub fn reset(&mut self) -> Result<()> {
        self.set_status(0)?;
        let end = Instant::now() + SOON;
        while self.status()? != 0 {
            if Instant::now() > end {
                return Err(Error::Timeout {
                    what: "the status to read 0 after a reset".into(),
                    seconds: SOON.as_secs_f32(),
                });
            }
        }
        self.forget();
        Ok(())
    }

    /// Drops the queues without telling the device.
    pub fn forget(&mut self) {
        self.receive_rings.clear();
        self.transmit_rings.clear();
        self.control_ring = None;
        self.receive_base.clear();
        self.transmit_base.clear();
        self.transmit_slots.clear();
        self.receive_slots.clear();
        self.notify_offsets.clear();
        self.features = 0;
        self.memory.free_all();
        for vector in 0..self.interrupts.len() {
            self.interrupted(vector as u16);
        }
    }

    fn make_queues(&mut self) -> Result<()> {
        let has_control = self.features & features::CTRL_VQ != 0;
        let max_pairs = match self.features & (features::MQ | features::RSS) {
            0 => 1,
            _ => self.max_pairs()?,
        };
        if self.setup.interrupts {
            self.write_common(common::CONFIG_VECTOR, &0u16.to_le_bytes())?;
        }
        for pair in 0..max_pairs {
            let receive = self.make_queue(2 * pair)?;
            self.receive_rings.push(receive);
            let transmit = self.make_queue(2 * pair + 1)?;
            self.transmit_rings.push(transmit);
        }
        if has_control {
            self.control_ring = Some(self.make_queue(2 * max_pairs)?);
            self.control_buffer = self.memory.allocate(8192, 64)?;
        }
        self.make_buffers()
    }

    /// Sets up one queue and enables it.
    ///
    /// # Errors
    /// The device does not have it.
    pub fn make_queue(&mut self, index: u16) -> Result<Ring> {
        self.write_common(common::QUEUE_SELECT, &index.to_le_bytes())?;
        let offered = self.read_common16(common::QUEUE_SIZE)?;
        if offered == 0 {
            return Err(Error::Device(format!("queue {index} does not exist")));
        }
        let size = offered.min(self.setup.queue_size);
        let ring = Ring::new(&self.memory, index, size, self.features)?;
        self.write_common(common::QUEUE_SIZE, &size.to_le_bytes())?;
        let vector = self.vector_of(index);
        self.write_common(common::QUEUE_VECTOR, &vector.to_le_bytes())?;
        if self.read_common16(common::QUEUE_VECTOR)? != vector {
            return Err(Error::Device(format!(
                "queue {index} does not take vector {vector}"
            )));
        }
        let notify_offset = self.read_common16(common::QUEUE_NOTIFY_OFF)?;
        self.notify_offsets.insert(index, notify_offset);
        for (offset, address) in [
            (common::QUEUE_DESCRIPTORS, ring.descriptors),
            (common::QUEUE_AVAILABLE, ring.available),
            (common::QUEUE_USED, ring.used),
        ] {
            // A driver writes 64-bit fields as two halves (virtio 1.3 §4.1.3.1).
            self.write_common(offset, &(address as u32).to_le_bytes())?;
            self.write_common(offset + 4, &((address >> 32) as u32).to_le_bytes())?;
        }
        self.write_common(common::QUEUE_ENABLE, &1u16.to_le_bytes())?;
        Ok(ring)
    }

    /// MSI-X vector of a queue; the last one is shared when there are fewer vectors than queues.
    pub fn vector_of(&self, queue: u16) -> u16 {
        if self.setup.interrupts {
            (queue + 1).min(self.pci.msix.vectors - 1)
        } else {
            NO_VECTOR
        }
    }

    /// Features that the device offers.
    ///
    /// # Errors
    /// The access failed.
    pub fn offered(&mut self) -> Result<u64> {
        let mut bits = 0;
        for half in 0..2u32 {
            self.write_common(common::DEVICE_FEATURE_SELECT, &half.to_le_bytes())?;
            bits |= u64::from(self.read_common32(common::DEVICE_FEATURE)?) << (32 * half);
        }
        Ok(bits)
    }

    /// Writes the driver's features.
    ///
    /// # Errors
    /// The access failed.
    pub fn accept(&mut self, bits: u64) -> Result<()> {
        for half in 0..2u32 {
            self.write_common(common::DRIVER_FEATURE_SELECT, &half.to_le_bytes())?;
            let word = (bits >> (32 * half)) as u32;
            self.write_common(common::DRIVER_FEATURE, &word.to_le_bytes())?;
        }
        Ok(())
    }

    /// Device status.
    ///
    /// # Errors
    /// The access failed.
    pub fn status(&mut self) -> Result<u8> {
        let mut byte = [0];
        self.read_common(common::DEVICE_STATUS, &mut byte)?;
        Ok(byte[0])
    }

    /// Writes the device status.
    ///
    /// # Errors
    /// The access failed.
    pub fn set_status(&mut self, status: u8) -> Result<()> {
        self.write_common(common::DEVICE_STATUS, &[status])
    }

    /// Waits until the status has a bit.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait_status(&mut self, bit: u8) -> Result<()> {
        wait_for("a device status bit", SOON, || {
            matches!(self.status(), Ok(status) if status & bit != 0).then_some(())
        })
    }

    /// MAC address in the device configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn mac(&mut self) -> Result<[u8; 6]> {
        let mut mac = [0; 6];
        self.read_device(0, &mut mac)?;
        Ok(mac)
    }

    /// Whether the device configuration says that the link is up.
    ///
    /// # Errors
    /// The access failed.
    pub fn link_up(&mut self) -> Result<bool> {
        let mut status = [0; 2];
        self.read_device(6, &mut status)?;
        Ok(status[0] & 1 != 0)
    }

    /// max_virtqueue_pairs of the device configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn max_pairs(&mut self) -> Result<u16> {
        let mut pairs = [0; 2];
        self.read_device(8, &mut pairs)?;
        Ok(u16::from_le_bytes(pairs))
    }

    /// Reads the device configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn read_device(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        let window = self.pci.virtio.device;
        self.vmm
            .read(window.bar.into(), u64::from(window.offset) + offset, data)
    }

    /// Reads the common configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn read_common(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        let window = self.pci.virtio.common;
        self.vmm
            .read(window.bar.into(), u64::from(window.offset) + offset, data)
    }

    /// Reads 16 bits of the common configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn read_common16(&mut self, offset: u64) -> Result<u16> {
        let mut data = [0; 2];
        self.read_common(offset, &mut data)?;
        Ok(u16::from_le_bytes(data))
    }

    /// Reads 32 bits of the common configuration.
    ///
    /// # Errors
    /// The access failed.
    pub fn read_common32(&mut self, offset: u64) -> Result<u32> {
        let mut data = [0; 4];
        self.read_common(offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Writes the common configuration, whatever it is.
    ///
    /// # Errors
    /// The access failed.
    pub fn write_common(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let window = self.pci.virtio.common;
        self.vmm
            .write(window.bar.into(), u64::from(window.offset) + offset, data)
    }

    /// Kicks a queue, whether it exists or not.
    ///
    /// # Errors
    /// The access failed.
    pub fn notify(&mut self, queue: u16) -> Result<()> {
        let window = self.pci.virtio.notify;
        let slot = self.notify_offsets.get(&queue).copied().unwrap_or(queue);
        let offset = u64::from(slot) * u64::from(self.pci.virtio.notify_multiplier);
        let mut data = queue.to_le_bytes().to_vec();
        if self.features & features::NOTIFICATION_DATA != 0 {
            let rings = self.receive_rings.iter().chain(&self.transmit_rings);
            let ring = rings.chain(&self.control_ring).find(|r| r.index == queue);
            data.extend(ring.map_or(0, Ring::notification_data).to_le_bytes());
        }
        let at = u64::from(window.offset) + offset;
        self.vmm.write(window.bar.into(), at, &data)
    }

    /// Resets one queue pair's queue and sets it up anew, empty (virtio 1.3 §2.6.1).
    ///
    /// # Errors
    /// The device does not reset it.
    pub fn reset_queue(&mut self, index: u16) -> Result<Ring> {
        self.write_common(common::QUEUE_SELECT, &index.to_le_bytes())?;
        self.write_common(common::QUEUE_RESET, &1u16.to_le_bytes())?;
        wait_for("a queue's reset", SOON, || {
            let done = self.read_common16(common::QUEUE_RESET).ok()? == 0;
            (done && self.read_common16(common::QUEUE_ENABLE).ok()? == 0).then_some(())
        })?;
        self.make_queue(index)
    }

    /// Takes an interrupt of a vector, if there was one.
    pub fn interrupted(&self, vector: u16) -> bool {
        let mut count = [0; 8];
        self.interrupts
            .get(usize::from(vector))
            .is_some_and(|fd| rustix::io::read(fd, &mut count).is_ok())
    }

    /// Waits for the configuration-change interrupt.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait_config_change(&mut self) -> Result<()> {
        let what = "the configuration-change interrupt";
        self.wait_vectors(&[0], what, Instant::now() + SOON, SOON)
    }

    /// Sleeps until one of the queues interrupts, or a moment when the driver has no interrupts.
    pub(crate) fn wait_queue_interrupt(
        &mut self,
        queues: &[u16],
        what: &str,
        end: Instant,
        limit: Duration,
    ) -> Result<()> {
        let vectors: Vec<u16> = queues.iter().map(|q| self.vector_of(*q)).collect();
        self.wait_vectors(&vectors, what, end, limit)
    }

    fn wait_vectors(
        &mut self,
        vectors: &[u16],
        what: &str,
        end: Instant,
        limit: Duration,
    ) -> Result<()> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout {
                    what: what.into(),
                    seconds: limit.as_secs_f32(),
                });
            }
            let nap = if self.setup.interrupts {
                left
            } else {
                left.min(Duration::from_micros(200))
            };
            self.poll(vectors, nap)?;
            self.vmm.serve()?;
            let fired = vectors.iter().filter(|v| self.interrupted(**v)).count();
            if fired > 0 || !self.setup.interrupts {
                return Ok(());
            }
        }
    }

    fn poll(&self, vectors: &[u16], nap: Duration) -> Result<()> {
        let mut fds: Vec<PollFd<'_>> = vectors
            .iter()
            .filter_map(|v| self.interrupts.get(usize::from(*v)))
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let socket = self.vmm.socket();
        if let Some(socket) = &socket {
            fds.push(PollFd::new(socket, PollFlags::IN));
        }
        let nap = Timespec::try_from(nap).unwrap_or(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        });
        match rustix::event::poll(&mut fds, Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::Socket(e.into())),
        }
    }
}

impl Drop for VirtioNet {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        eprintln!("driver: features {:#x}", self.features);
        let rings = self.receive_rings.iter().chain(&self.transmit_rings);
        for ring in rings.chain(&self.control_ring) {
            eprintln!("{}", ring.describe());
        }
    }
}
