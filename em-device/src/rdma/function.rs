//! An RDMA function on the data path.

use super::engine::Context;
use super::fabric::Wires;
use super::front::{Device, erdma, mlx5};
use super::kept::KeptError;
use super::verbs::{Path, Peer};
use crate::net::links::Links;
use crate::worker::Watch;
use dot_iommu::DotReader;
use m2m_fabric::proto::FunctionStats;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Device, wires and memory of one function; belongs to the data path.
#[derive(Debug)]
pub struct RdmaFunction {
    id: u32,
    device: Device,
    /// Where requests and answers travel.
    pub wires: Wires,
    /// Where frames travel; for Ethernet only.
    pub links: Links,
    memory: DotReader,
    bus_master: bool,
    /// Whether all wires were given.
    wired: bool,
    /// Whether all windows were given.
    windowed: bool,
    /// Until when it does nothing: it takes the place of another, and not everything is there.
    waits: Option<Instant>,
    /// Whether what the other left is taken over.
    restored: bool,
}

/// How long a function waits for what a former process had.
const PATIENCE: Duration = Duration::from_secs(2);

impl RdmaFunction {
    /// A function as after power-on. `memory`: the guest's, and that of its other devices.
    pub fn new(id: u32, device: Device, wires: Wires, memory: DotReader) -> Self {
        Self {
            id,
            device,
            wires,
            links: Links::default(),
            memory,
            bus_master: false,
            wired: false,
            windowed: true,
            waits: None,
            restored: false,
        }
    }

    /// The same in the place of a process that was killed: it waits for [`Self::restore`] and [`Self::wired`], so
    /// that nothing is lost that peers sent, and if there may be `windows` for [`Self::windowed`].
    pub fn resuming(mut self, windows: bool) -> Self {
        self.windowed = !windows;
        self.waits = Instant::now().checked_add(PATIENCE);
        self
    }

    /// Takes over what a former process left, by `act`.
    ///
    /// # Errors
    /// As `act`; the function is as after power-on then.
    pub fn restore(
        &mut self,
        act: impl FnOnce(&mut Device, &mut Context<'_>) -> Result<(), KeptError>,
    ) -> Result<(), KeptError> {
        let result = self.with(act);
        if result.is_err() {
            self.reset();
        }
        self.addresses_changed();
        self.restored = true;
        self.go_on();
        result
    }

    /// All wires are there that there are for now.
    pub fn wired(&mut self) {
        self.wired = true;
        self.go_on();
    }

    /// All windows are there that there are for now.
    pub fn windowed(&mut self) {
        self.windowed = true;
        self.go_on();
    }

    fn go_on(&mut self) {
        if self.wired && self.restored && self.windowed {
            self.waits = None;
        }
    }

    /// Does something with the device and what it needs from around it.
    pub fn with<R>(&mut self, act: impl FnOnce(&mut Device, &mut Context<'_>) -> R) -> R {
        let memory = self.memory.pin();
        let mut cx = Context {
            memory: &memory,
            fabric: &mut self.wires,
            now: Instant::now(),
        };
        act(&mut self.device, &mut cx)
    }

    /// [`Self::with`] for a device of the ConnectX family; `None`: it is another.
    pub fn with_mlx5<R>(
        &mut self,
        act: impl FnOnce(&mut mlx5::Device, &mut Context<'_>) -> R,
    ) -> Option<R> {
        self.with(|device, cx| match device {
            Device::Mlx5(device) => Some(act(device, cx)),
            Device::Erdma(_) => None,
        })
    }

    /// [`Self::with`] for a device of the `erdma` driver; `None`: it is another.
    pub fn with_erdma<R>(
        &mut self,
        act: impl FnOnce(&mut erdma::Device, &mut Context<'_>) -> R,
    ) -> Option<R> {
        self.with(|device, cx| match device {
            Device::Mlx5(_) => None,
            Device::Erdma(device) => Some(act(device, cx)),
        })
    }

    /// Whether the function may use guest memory (command register, bus master enable).
    pub fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
    }

    /// As after power-on: no object of the driver is left.
    pub fn reset(&mut self) {
        self.device.reset();
        self.links.forget_blocked();
        self.waits = None;
    }

    /// One round. Answers whether anything was done.
    pub fn turn(&mut self, now: Instant) -> bool {
        if self.waits.is_some_and(|until| now < until) {
            return false;
        }
        self.waits = None;
        self.links.set_now(now);
        let arrived = self.wires.collect();
        if !self.bus_master {
            // On any network, packets to who is not there are lost.
            while self.wires.take().is_some() {}
            self.wires.release();
            return self.device.discard_frames(&mut self.links) | arrived;
        }
        let memory = self.memory.pin();
        while let Some((from, packet)) = self.wires.take() {
            let mut cx = Context {
                memory: &memory,
                fabric: &mut self.wires,
                now,
            };
            let request = self.device.receive(from, packet, &mut cx);
            self.wires.reuse(request);
        }
        self.wires.release();
        let mut cx = Context {
            memory: &memory,
            fabric: &mut self.wires,
            now,
        };
        let worked = self.device.turn(&mut cx, &mut self.links);
        self.wires.flush();
        arrived | worked
    }

    /// Asks for wake-ups. Answers whether there is work already.
    pub fn arm(&mut self) -> bool {
        if self.waits.is_some() {
            return false;
        }
        let busy =
            self.device.is_rung() || self.device.patience(Instant::now()) == Some(Duration::ZERO);
        if self.bus_master && busy || self.wires.arm() {
            return true;
        }
        let waits = self.device.waits_for_receives();
        for link in self.links.iter_mut() {
            // What comes behind a frame that waits would wake for nothing.
            if !(waits && link.blocked.is_some()) && link.port.arm() {
                return true;
            }
        }
        let memory = self.memory.pin();
        self.bus_master && self.device.has_frames(&self.links, &memory)
    }

    /// Takes the wish for wake-ups back.
    pub fn disarm(&mut self) {
        self.device.woke();
        self.wires.disarm();
        for link in self.links.iter_mut() {
            link.port.disarm();
        }
    }

    /// When there must be a turn at the latest.
    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        if self.waits.is_some() {
            return self.waits;
        }
        let patience = self.device.patience(now).filter(|_| self.bus_master)?;
        now.checked_add(patience)
    }

    /// What to glance at while asleep.
    pub fn watch(&self) -> Option<Watch> {
        let served = self.bus_master && self.waits.is_none();
        self.device.watch().filter(|_| served)
    }

    /// What to sleep on.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let links = self.links.iter().filter_map(|link| link.port.wake_fd());
        self.wires.wake_fds().chain(links)
    }

    /// Counters.
    pub fn stats(&self) -> FunctionStats {
        FunctionStats {
            function: self.id,
            queues: self.device.stats(),
            ..FunctionStats::default()
        }
    }

    /// Takes over LID and GIDs from the device.
    pub fn addresses_changed(&mut self) {
        self.wires.set_addresses(self.device.addresses().clone());
    }

    /// The last answer of the OM about each peer that something relies on.
    pub fn paths(&mut self) -> Vec<Path> {
        let mut paths: BTreeMap<u32, Path> = BTreeMap::new();
        let own = self.device.paths();
        let all = own.into_iter().chain(self.wires.paths());
        for path in all {
            let last = paths.entry(path.peer.0).or_insert(path);
            last.generation = last.generation.max(path.generation);
        }
        paths.into_values().collect()
    }

    /// The GIDs that the driver set, by index.
    pub fn gids(&self) -> Vec<(u16, [u8; 16])> {
        let all = (0..).zip(self.device.addresses().gids.iter().copied());
        all.filter(|(_, gid)| *gid != [0; 16]).collect()
    }

    /// Answers of the OM about a peer, up to a generation, are not valid any more.
    pub fn revoke(&mut self, peer: Peer, generation: u64) {
        self.wires.revoke(peer, generation);
        self.with(|device, cx| device.revoke(peer, generation, cx));
        self.wires.flush();
    }

    /// Removes the wire of this id. Answers whether it was there.
    pub fn remove_wire(&mut self, id: u32) -> bool {
        let peer = self.wires.remove(id);
        if let Some(peer) = peer {
            self.revoke(peer, u64::MAX);
        }
        peer.is_some()
    }
}
