//! From the device's registers to requests.

use super::registers::{self, DEVICE, NOTIFY, Queue, Registers, Write};
use super::wire::{
    Channel, LOG_ALL, NO_FD, PROTOCOL_FEATURES, VERSION, longs, message, protocol, request, ring,
    ring_addresses,
};
use crate::client::Vmm;
use crate::memory::{GuestMemory, Range};
use crate::time::{SOON, wait_for};
use crate::virtio_net::features::{
    CTRL_GUEST_OFFLOADS, CTRL_MAC_ADDR, CTRL_RX, CTRL_VLAN, CTRL_VQ, GUEST_ANNOUNCE, RING_PACKED,
    status,
};
use crate::virtio_net::{Guest, VirtioNet};
use crate::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where the guest's memory is in the front end's process: nowhere that means anything to others.
const USER: u64 = 0x7a12_0000_0000;

/// What the front end keeps from its driver.
const OWN: u64 = PROTOCOL_FEATURES
    | LOG_ALL
    | CTRL_VQ
    | CTRL_RX
    | CTRL_VLAN
    | CTRL_MAC_ADDR
    | CTRL_GUEST_OFFLOADS
    | GUEST_ANNOUNCE;

/// How memory is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slots {
    /// All at once.
    Table,
    /// Range by range.
    Single,
}

/// A VMM with a vhost-user front end. Copies are the same VMM.
#[derive(Debug, Clone)]
pub struct FrontEnd(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    channel: Channel,
    slots: Slots,
    registers: Registers,
    memory: Option<Arc<GuestMemory>>,
    ranges: Vec<Range>,
    irqs: Vec<Option<OwnedFd>>,
    kicks: Vec<OwnedFd>,
    /// Where rings are while they do not run.
    bases: Vec<u32>,
    pairs: u16,
    running: bool,
}

impl FrontEnd {
    /// Connects to a back end that listens.
    ///
    /// # Errors
    /// Nobody listens, or the back end does not offer what it has to.
    pub fn connect(path: &Path, slots: Slots) -> Result<Self> {
        Self::new(Channel::connect(path)?, slots)
    }

    /// Takes a back end that connects.
    ///
    /// # Errors
    /// None connects in time, or it does not offer what it has to.
    pub fn accept(listener: &UnixListener, slots: Slots) -> Result<Self> {
        Self::new(accept(listener)?, slots)
    }

    fn new(mut channel: Channel, slots: Slots) -> Result<Self> {
        let (offered, queues) = agree(&mut channel)?;
        let kicks = (0..queues).map(|_| eventfd(0, EventfdFlags::NONBLOCK));
        let kicks: rustix::io::Result<_> = kicks.collect();
        Ok(Self(Arc::new(Mutex::new(Inside {
            channel,
            slots,
            registers: Registers::new(offered & !OWN, queues),
            memory: None,
            ranges: Vec::new(),
            irqs: Vec::new(),
            kicks: kicks.map_err(std::io::Error::from)?,
            bases: vec![0; usize::from(queues)],
            pairs: 1,
            running: false,
        }))))
    }

    /// The driver in its guest.
    ///
    /// # Errors
    /// There is no memory.
    pub fn driver(&self, guest: Guest) -> Result<VirtioNet> {
        let memory = Arc::new(GuestMemory::new(guest.memory, guest.shape)?);
        let mut vmm = self.clone();
        vmm.map_all(&memory)?;
        let function = registers::function(self.lock().registers.queues.len() as u16);
        VirtioNet::with_function(Box::new(vmm), memory, function)
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many queue pairs are enabled, now and at later starts.
    ///
    /// # Errors
    /// The back end refused it.
    pub fn use_pairs(&self, pairs: u16) -> Result<()> {
        let mut inside = self.lock();
        inside.pairs = pairs;
        if inside.running {
            inside.enable()?;
        }
        Ok(())
    }

    /// Stops the device as a VMM does that pauses; answers where its rings are.
    ///
    /// # Errors
    /// The back end refused it.
    pub fn pause(&self) -> Result<Vec<u32>> {
        let mut inside = self.lock();
        inside.stop()?;
        Ok(inside.bases.clone())
    }

    /// Goes on where the rings are.
    ///
    /// # Errors
    /// The back end refused it.
    pub fn go_on(&self) -> Result<()> {
        self.lock().start()
    }

    /// Goes on with another connection, since the back end died: what a ring's memory says is where it is.
    ///
    /// # Errors
    /// Nobody listens, or the back end refused it.
    pub fn reconnect(&self, path: &Path) -> Result<()> {
        self.go_on_with(Channel::connect(path)?)
    }

    /// The same with a back end that connects.
    ///
    /// # Errors
    /// None connects, or it refused something.
    pub fn accept_again(&self, listener: &UnixListener) -> Result<()> {
        self.go_on_with(accept(listener)?)
    }

    fn go_on_with(&self, mut channel: Channel) -> Result<()> {
        agree(&mut channel)?;
        let mut inside = self.lock();
        inside.channel = channel;
        if std::mem::take(&mut inside.running) {
            inside.bases_from_memory()?;
            inside.start()?;
        }
        Ok(())
    }

    /// Logs what the device writes in `file`, a bit for each page of 4096 bytes, or ends that.
    ///
    /// # Errors
    /// The back end refused it.
    pub fn log(&self, file: Option<(BorrowedFd<'_>, u64)>) -> Result<()> {
        let mut inside = self.lock();
        let mut features = inside.registers.accepted | PROTOCOL_FEATURES;
        if let Some((fd, bytes)) = file {
            features |= LOG_ALL;
            let payload = longs(&[bytes, 0]);
            let asks = message(request::SET_LOG_BASE, VERSION, &payload);
            inside.channel.send_bytes(&asks, &[fd])?;
            inside.channel.reply(request::SET_LOG_BASE)?;
        }
        let payload = longs(&[features]);
        inside.channel.tell(request::SET_FEATURES, &payload, &[])
    }

    /// Whether the back end has closed the connection.
    pub fn is_cut_off(&self) -> bool {
        let inside = self.lock();
        let mut byte = [0];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(inside.channel.stream(), &mut byte[..], flags);
        !matches!(peeked, Err(rustix::io::Errno::AGAIN))
    }

    /// Does something with the connection itself.
    pub fn with_channel<R>(&self, act: impl FnOnce(&mut Channel) -> R) -> R {
        act(&mut self.lock().channel)
    }

    /// Takes a range of memory from the back end, and gives it again.
    ///
    /// # Errors
    /// The back end refused it.
    pub fn replug(&self, index: usize) -> Result<()> {
        let mut inside = self.lock();
        let range = inside.ranges.get(index).copied();
        let range = range.ok_or_else(|| Error::Harness("no such range".into()))?;
        let payload = one_range(&range);
        inside.channel.tell(request::REM_MEM_REG, &payload, &[])?;
        inside.add_range(&range)
    }
}

fn accept(listener: &UnixListener) -> Result<Channel> {
    listener.set_nonblocking(true)?;
    let stream = wait_for("a back end", SOON, || listener.accept().ok())?.0;
    stream.set_nonblocking(false)?;
    Channel::new(stream)
}

/// Features and queues of a back end.
fn agree(channel: &mut Channel) -> Result<(u64, u16)> {
    const NEEDED: u64 = protocol::MQ
        | protocol::LOG_SHMFD
        | protocol::REPLY_ACK
        | protocol::CONFIG
        | protocol::CONFIGURE_MEM_SLOTS
        | protocol::RESET_DEVICE;
    let offered = channel.ask_long(request::GET_FEATURES)?;
    let known = match offered & PROTOCOL_FEATURES {
        0 => 0,
        _ => channel.ask_long(request::GET_PROTOCOL_FEATURES)?,
    };
    if known & NEEDED != NEEDED {
        return Err(Error::Protocol(format!("protocol features {known:#x}")));
    }
    channel.tell(request::SET_PROTOCOL_FEATURES, &longs(&[NEEDED]), &[])?;
    let queues = channel.ask_long(request::GET_QUEUE_NUM)?;
    channel.tell(request::SET_OWNER, &[], &[])?;
    // QEMU enables rings before it acknowledges features.
    for index in 0..2 {
        channel.tell(request::SET_VRING_ENABLE, &ring(index, 1), &[])?;
    }
    Ok((offered, queues as u16))
}

/// Guest address, bytes, address here, offset in the file.
fn described(range: &Range) -> [u64; 4] {
    [range.address, range.len, USER + range.address, range.offset]
}

fn one_range(range: &Range) -> Vec<u8> {
    [longs(&[0]), longs(&described(range))].concat()
}

impl Inside {
    fn start(&mut self) -> Result<()> {
        let features = self.registers.accepted | PROTOCOL_FEATURES;
        self.channel
            .tell(request::SET_FEATURES, &longs(&[features]), &[])?;
        self.give_memory()?;
        for index in 0..self.registers.queues.len() {
            self.start_ring(index)?;
        }
        self.running = true;
        self.enable()
    }

    fn give_memory(&mut self) -> Result<()> {
        if self.slots == Slots::Single {
            let ranges = self.ranges.clone();
            return ranges.iter().try_for_each(|range| self.add_range(range));
        }
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let count = self.ranges.len();
        let mut payload = ring(count as u32, 0);
        for range in &self.ranges {
            payload.extend(longs(&described(range)));
        }
        let fds = vec![memory.fd(); count];
        self.channel.tell(request::SET_MEM_TABLE, &payload, &fds)
    }

    fn add_range(&mut self, range: &Range) -> Result<()> {
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let payload = one_range(range);
        let fds = [memory.fd()];
        self.channel.tell(request::ADD_MEM_REG, &payload, &fds)
    }

    fn start_ring(&mut self, index: usize) -> Result<()> {
        let queue = self.registers.queues[index];
        if !queue.enabled {
            return Ok(());
        }
        let at = index as u32;
        let [desc, avail, used] = queue.addresses.map(|address| USER + address);
        let addresses = ring_addresses(at, 0, [desc, used, avail, 0]);
        let base = ring(at, self.bases[index]);
        let call = self.irqs.get(usize::from(queue.vector));
        let call = call.and_then(Option::as_ref);
        let channel = &mut self.channel;
        let size = ring(at, u32::from(queue.size));
        channel.tell(request::SET_VRING_NUM, &size, &[])?;
        channel.tell(request::SET_VRING_BASE, &base, &[])?;
        channel.tell(request::SET_VRING_ADDR, &addresses, &[])?;
        let number = longs(&[index as u64]);
        let kick = [self.kicks[index].as_fd()];
        channel.tell(request::SET_VRING_KICK, &number, &kick)?;
        match call {
            Some(call) => channel.tell(request::SET_VRING_CALL, &number, &[call.as_fd()]),
            None => {
                let none = longs(&[index as u64 | NO_FD]);
                channel.tell(request::SET_VRING_CALL, &none, &[])
            }
        }
    }

    fn enable(&mut self) -> Result<()> {
        for index in 0..self.registers.queues.len() as u32 {
            let on = u32::from(index < 2 * u32::from(self.pairs));
            let payload = ring(index, on);
            self.channel
                .tell(request::SET_VRING_ENABLE, &payload, &[])?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.running) {
            return Ok(());
        }
        for index in 0..self.registers.queues.len() {
            if self.registers.queues[index].enabled {
                self.stop_ring(index)?;
            }
        }
        if self.slots == Slots::Single {
            for range in self.ranges.clone() {
                let payload = one_range(&range);
                self.channel.tell(request::REM_MEM_REG, &payload, &[])?;
            }
        }
        Ok(())
    }

    fn stop_ring(&mut self, index: usize) -> Result<()> {
        let state = ring(index as u32, 0);
        let reply = self.channel.ask(request::GET_VRING_BASE, &state)?;
        let (number, base) = reply.split_at_checked(4).unwrap_or_default();
        let base = base.try_into().map(u32::from_le_bytes);
        match (number == (index as u32).to_le_bytes(), base) {
            (true, Ok(base)) => self.bases[index] = base,
            _ => return Err(Error::Protocol(format!("{reply:?} is no position"))),
        }
        Ok(())
    }

    fn bases_from_memory(&mut self) -> Result<()> {
        if self.registers.accepted & RING_PACKED != 0 {
            return Err(Error::Harness(
                "a packed ring does not say where it is".into(),
            ));
        }
        let Some(memory) = &self.memory else {
            return Ok(());
        };
        for (base, queue) in self.bases.iter_mut().zip(&self.registers.queues) {
            if queue.enabled {
                *base = u32::from(memory.load_u16(queue.addresses[2] + 2)?);
            }
        }
        Ok(())
    }

    fn empty_base(&self) -> u32 {
        match self.registers.accepted & RING_PACKED {
            0 => 0,
            // The wrap counter of what is available, as DPDK's virtio-user says it.
            _ => 0x8000,
        }
    }

    fn set_status(&mut self, new: u8) -> Result<()> {
        if new == 0 {
            self.stop()?;
            self.registers.status = 0;
            self.registers.accepted = 0;
            self.registers.queues.fill(Queue::NEW);
        } else if new & status::DRIVER_OK != 0 && !self.running {
            let base = self.empty_base();
            self.bases.fill(base);
            self.start()?;
        }
        self.registers.status = new;
        Ok(())
    }
}

impl Vmm for FrontEnd {
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        let mut inside = self.lock();
        if region != 0 {
            data.fill(0);
        } else if offset < DEVICE {
            inside.registers.read(offset, data);
        } else {
            let (at, len) = ((offset - DEVICE) as u32, data.len() as u32);
            let head = [at, len, 0].map(u32::to_le_bytes).concat();
            let payload = [head, vec![0; data.len()]].concat();
            let reply = inside.channel.ask(request::GET_CONFIG, &payload)?;
            let bytes = reply.get(12..).filter(|bytes| bytes.len() == data.len());
            data.copy_from_slice(bytes.ok_or_else(|| {
                Error::Protocol(format!("{} bytes of configuration", reply.len()))
            })?);
        }
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let mut inside = self.lock();
        if region != 0 {
            return Ok(());
        }
        if offset >= NOTIFY {
            let queue = usize::from(registers::notified(offset - NOTIFY));
            if let Some(kick) = inside.kicks.get(queue) {
                let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
            }
            return Ok(());
        }
        match inside.registers.write(offset, data) {
            Write::Nothing => Ok(()),
            Write::Status(new) => inside.set_status(new),
            Write::ResetQueue(queue) => {
                let index = usize::from(queue);
                inside.stop_ring(index)?;
                inside.bases[index] = inside.empty_base();
                inside.registers.queues[index] = Queue::NEW;
                Ok(())
            }
        }
    }

    fn map(&mut self, memory: &Arc<GuestMemory>, range: &Range) -> Result<()> {
        let mut inside = self.lock();
        inside.memory = Some(memory.clone());
        inside.ranges.push(*range);
        Ok(())
    }

    fn unmap(&mut self, address: u64, _len: u64) -> Result<()> {
        self.lock().ranges.retain(|range| range.address != address);
        Ok(())
    }

    fn set_irqs(
        &mut self,
        _index: u32,
        _flags: u32,
        start: u32,
        _count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let mut inside = self.lock();
        for (vector, fd) in (start as usize..).zip(fds) {
            if inside.irqs.len() <= vector {
                inside.irqs.resize_with(vector + 1, || None);
            }
            inside.irqs[vector] = Some(fd.try_clone_to_owned()?);
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.lock().channel.tell(request::RESET_DEVICE, &[], &[])
    }

    fn region_size(&mut self, _region: u32) -> Result<u64> {
        Ok(0)
    }

    fn serve(&mut self) -> Result<()> {
        Ok(())
    }

    fn inject(&mut self, message: &[u8]) -> Result<()> {
        self.lock().channel.send_bytes(message, &[])
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
