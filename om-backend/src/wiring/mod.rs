//! Which wires there are between the functions whose EMs are up.
//!
//! A network is a full mesh of shared-memory wires. Every two functions that have Ethernet frames (a
//! virtio network device, an RDMA device of link type Ethernet) get a wire for frames; every two RDMA
//! devices of one link type get a wire for RDMA, because only those can talk. [`Wiring`] knows which
//! ends exist and whether the EMs took them; it talks to nobody, but says what the EMs are to be told
//! ([`Order`]).
//!
//! An EM that is lost has [`GRACE`] to be replaced. Until then its wires stay, and the peers go on filling and
//! emptying them; its successor gets the same ones.

use crate::config::{Attachment, Config, LinkType, MacAddress};
use m2m_fabric::proto::{LinkKind, LinkSpec, SHM_LINK_BYTES};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

mod adopt;

/// How long the wires of a lost EM wait for its successor.
pub const GRACE: Duration = Duration::from_secs(2);

/// Something an EM is to be told.
#[derive(Debug)]
pub enum Order {
    /// Join a wire.
    Add {
        /// The EM, by its place in the configuration.
        em: usize,
        /// Its end.
        link: LinkSpec,
        /// What belongs to it, see [`LinkKind`].
        fds: Vec<OwnedFd>,
    },
    /// Leave a wire.
    Remove {
        /// The EM, by its place in the configuration.
        em: usize,
        /// Id of its end.
        link: u32,
    },
}

/// What became of an end of a wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndState {
    /// The EM has not answered yet.
    Pending,
    /// The EM has it.
    Attached,
    /// The EM could not take it, and why.
    Failed(String),
}

/// One end of a wire.
#[derive(Debug, Clone)]
pub struct End {
    /// Id of its function.
    pub function: u32,
    /// Its EM, by its place in the configuration.
    pub em: usize,
    /// What travels there.
    pub cargo: Cargo,
    /// What it leads to.
    pub to: Destination,
    /// What became of it.
    pub state: EndState,
}

/// What travels on a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cargo {
    /// Ethernet frames.
    Frames,
    /// RDMA requests and answers.
    Rdma,
}

/// What an end of a wire leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Another function.
    Function {
        /// Its id.
        function: u32,
        /// Id of its end of the wire.
        end: u32,
    },
    /// The host, or nothing: TAP, loopback, null.
    Port,
    /// A file; it carries nothing to anybody.
    Capture,
}

#[derive(Debug)]
struct Place {
    em: usize,
    name: String,
    mac: MacAddress,
    /// Whether it sends and receives Ethernet frames.
    frames: bool,
    /// What an RDMA device's port is.
    rdma: Option<LinkType>,
    attachment: Attachment,
    capture: Option<String>,
}

impl Place {
    /// The wires that lead to no other function.
    fn alone(&self) -> Vec<(LinkKind, Destination)> {
        let port = match &self.attachment {
            Attachment::Tap(name) => Some(LinkKind::Tap { name: name.clone() }),
            Attachment::Loopback => Some(LinkKind::Loopback),
            Attachment::Null => Some(LinkKind::Null),
            Attachment::Network(_) | Attachment::None => None,
        };
        let capture = self.capture.clone().map(|path| LinkKind::Capture { path });
        let capture = capture.map(|kind| (kind, Destination::Capture));
        let port = port.map(|kind| (kind, Destination::Port));
        capture.into_iter().chain(port).collect()
    }
}

/// All wires.
#[derive(Debug)]
pub struct Wiring {
    /// By function id.
    places: Vec<Place>,
    up: BTreeSet<usize>,
    /// Lost EMs, and since when.
    away: BTreeMap<usize, Instant>,
    ends: BTreeMap<u32, End>,
    /// What the EM of an end gets, for its successor.
    kept: BTreeMap<u32, (LinkKind, Vec<OwnedFd>)>,
    /// Ids are never used again, so that an answer that comes late means nothing else.
    next: u32,
}

impl Wiring {
    /// No wires yet; function ids count up in the order of the configuration.
    pub fn new(config: &Config) -> Self {
        let places = config
            .ems
            .iter()
            .enumerate()
            .flat_map(|(em, c)| c.functions.iter().map(move |f| (em, f)))
            .map(|(em, f)| Place {
                em,
                name: f.name.clone(),
                mac: f.mac,
                frames: f.kind.has_frames(),
                rdma: f.kind.rdma().map(|rdma| rdma.link_type),
                attachment: f.attachment.clone(),
                capture: f
                    .capture
                    .as_ref()
                    .map(|path| path.to_string_lossy().into_owned()),
            })
            .collect();
        Self {
            places,
            up: BTreeSet::new(),
            away: BTreeMap::new(),
            ends: BTreeMap::new(),
            kept: BTreeMap::new(),
            next: 1,
        }
    }

    /// An EM came; it has no wires yet. One that takes the place of another in time gets that one's.
    ///
    /// # Errors
    /// What the system said when it had no memory or descriptors for a wire. The orders that were
    /// made before are lost, so treat the EM as down.
    pub fn em_up(&mut self, em: usize) -> std::io::Result<Vec<Order>> {
        self.up.insert(em);
        self.away.remove(&em);
        let mut orders = Vec::new();
        for (id, end) in self.ends.iter().filter(|(_, end)| end.em == em) {
            if let Some((kind, fds)) = self.kept.get(id) {
                let fds: std::io::Result<Vec<_>> = fds.iter().map(OwnedFd::try_clone).collect();
                orders.push(Order::Add {
                    em,
                    link: LinkSpec {
                        id: *id,
                        function: end.function,
                        kind: kind.clone(),
                    },
                    fds: fds?,
                });
            }
        }
        orders.extend(self.join_missing(em)?);
        Ok(orders)
    }

    /// The wires that the functions of an EM should have and have not.
    fn join_missing(&mut self, em: usize) -> std::io::Result<Vec<Order>> {
        let mut orders = Vec::new();
        let ids = 0..self.places.len() as u32;
        for a in ids.clone() {
            if self.place(a).is_some_and(|p| p.em == em) {
                self.attach(a, &mut orders);
            }
            for b in a + 1..ids.end {
                let touches = [a, b]
                    .iter()
                    .any(|f| self.place(*f).is_some_and(|p| p.em == em));
                if touches {
                    self.join(a, b, &mut orders)?;
                }
            }
        }
        Ok(orders)
    }

    /// An EM was lost at `now` and may be replaced.
    pub fn em_lost(&mut self, em: usize, now: Instant) {
        if self.up.remove(&em) {
            self.away.insert(em, now);
        }
    }

    /// The successor of a lost EM is on its way at `now`: its time begins anew.
    pub fn wait_for(&mut self, em: usize, now: Instant) {
        if let Some(since) = self.away.get_mut(&em) {
            *since = now;
        }
    }

    /// Lost EMs whose time is over by `now`: [`Self::em_down`] follows.
    pub fn over(&self, now: Instant) -> Vec<usize> {
        self.away
            .iter()
            .filter(|(_, since)| now.saturating_duration_since(**since) >= GRACE)
            .map(|(em, _)| *em)
            .collect()
    }

    /// An EM is gone, and with it its ends of the wires; the others are to leave theirs.
    pub fn em_down(&mut self, em: usize) -> Vec<Order> {
        self.up.remove(&em);
        self.away.remove(&em);
        self.remove(|end| end.em == em)
    }

    /// Removes ends, and those that lead to them, whose EMs are to be told.
    fn remove(&mut self, which: impl Fn(&End) -> bool) -> Vec<Order> {
        let gone: BTreeSet<u32> = self
            .ends
            .iter()
            .filter(|(_, end)| which(end))
            .map(|(id, _)| *id)
            .collect();
        self.ends.retain(|id, _| !gone.contains(id));
        let orphans: Vec<(u32, usize)> = self
            .ends
            .iter()
            .filter(|(_, end)| {
                matches!(end.to, Destination::Function { end, .. } if !self.ends.contains_key(&end))
            })
            .map(|(id, end)| (*id, end.em))
            .collect();
        for (id, _) in &orphans {
            self.ends.remove(id);
        }
        self.kept.retain(|id, _| self.ends.contains_key(id));
        orphans
            .into_iter()
            .map(|(link, em)| Order::Remove { em, link })
            .collect()
    }

    /// An EM answered to [`Order::Add`]. An answer about an end that is gone meanwhile is ignored.
    pub fn answered(&mut self, link: u32, result: Result<(), String>) {
        if let Some(end) = self.ends.get_mut(&link) {
            end.state = match result {
                Ok(()) => EndState::Attached,
                Err(reason) => EndState::Failed(reason),
            };
        }
    }

    /// Whether frames of a function can go anywhere: one of its wires for frames has both ends
    /// attached. An RDMA port without frames has carrier as soon as its EM is up, like a port that is plugged
    /// into a switch: the subnet (this OM) is there, whoever else is. So has a function without a port.
    pub fn carrier(&self, function: u32) -> bool {
        let no_wire =
            |p: &&Place| p.rdma.is_some() && !p.frames || p.attachment == Attachment::None;
        if let Some(place) = self.place(function).filter(no_wire) {
            return self.up.contains(&place.em) || self.away.contains_key(&place.em);
        }
        let attached = |end: &End| end.state == EndState::Attached;
        self.ends
            .values()
            .filter(|end| end.function == function && end.cargo == Cargo::Frames && attached(end))
            .any(|end| match end.to {
                Destination::Function { end, function } => match self.ends.get(&end) {
                    Some(end) => attached(end),
                    // Of an EM that has not returned yet.
                    None => self
                        .place(function)
                        .is_some_and(|p| self.away.contains_key(&p.em)),
                },
                Destination::Port => true,
                Destination::Capture => false,
            })
    }

    /// All ends by id.
    pub fn ends(&self) -> &BTreeMap<u32, End> {
        &self.ends
    }

    fn place(&self, function: u32) -> Option<&Place> {
        self.places.get(function as usize)
    }

    fn add_end(&mut self, function: u32, em: usize, cargo: Cargo, to: Destination) -> u32 {
        let id = self.next;
        self.next += 1;
        self.ends.insert(
            id,
            End {
                function,
                em,
                cargo,
                to,
                state: EndState::Pending,
            },
        );
        id
    }

    /// Whether a function has an end that leads there.
    fn leads(&self, function: u32, to: Destination) -> bool {
        let there = |end: &End| end.function == function && end.to == to;
        self.ends.values().any(there)
    }

    /// Wires of one function alone.
    fn attach(&mut self, function: u32, orders: &mut Vec<Order>) {
        let Some(place) = self.place(function) else {
            return;
        };
        let em = place.em;
        for (kind, to) in place.alone() {
            if !self.leads(function, to) {
                let id = self.add_end(function, em, Cargo::Frames, to);
                self.kept.insert(id, (kind.clone(), Vec::new()));
                orders.push(Order::Add {
                    em,
                    link: LinkSpec { id, function, kind },
                    fds: Vec::new(),
                });
            }
        }
    }

    /// The wires between two functions, if they share a network and both EMs are up.
    fn join(&mut self, a: u32, b: u32, orders: &mut Vec<Order>) -> std::io::Result<()> {
        let (Some(first), Some(second)) = (self.place(a), self.place(b)) else {
            return Ok(());
        };
        let together = matches!(
            (&first.attachment, &second.attachment),
            (Attachment::Network(x), Attachment::Network(y)) if x == y
        );
        if !together || !self.up.contains(&first.em) || !self.up.contains(&second.em) {
            return Ok(());
        }
        let frames = first.frames && second.frames;
        let rdma = first.rdma.is_some() && first.rdma == second.rdma;
        for (wanted, cargo) in [(frames, Cargo::Frames), (rdma, Cargo::Rdma)] {
            let ends = [self.end_between(a, b, cargo), self.end_between(b, a, cargo)];
            match ends {
                _ if !wanted => {}
                [None, None] => self.wire(a, b, cargo, orders)?,
                [Some(_), Some(_)] => {}
                // The other EM lost its end while there was no OM.
                [Some(id), None] | [None, Some(id)] if cargo == Cargo::Frames => {
                    orders.extend(self.complete(id)?);
                }
                [Some(link), None] | [None, Some(link)] => {
                    let em = self.ends.remove(&link).map(|end| end.em);
                    orders.extend(em.map(|em| Order::Remove { em, link }));
                    self.wire(a, b, cargo, orders)?;
                }
            }
        }
        Ok(())
    }

    /// A shared-memory wire between two functions.
    fn wire(
        &mut self,
        a: u32,
        b: u32,
        cargo: Cargo,
        orders: &mut Vec<Order>,
    ) -> std::io::Result<()> {
        let (Some(first), Some(second)) = (self.place(a), self.place(b)) else {
            return Ok(());
        };
        let kind = |side, peer_function, peer: &Place| match cargo {
            Cargo::Frames => LinkKind::Shm {
                side,
                peer: peer.name.clone(),
                peer_mac: peer.mac.0,
            },
            Cargo::Rdma => LinkKind::Rdma {
                side,
                peer: peer.name.clone(),
                peer_function,
            },
        };
        let [first_fds, second_fds] = descriptors(&format!("wire-{}-{}", first.name, second.name))?;
        // both ids are needed before either end can name the other
        let ids = [self.next, self.next + 1];
        let sides = [
            (a, first.em, b, ids[1], kind(0, b, second), first_fds),
            (b, second.em, a, ids[0], kind(1, a, first), second_fds),
        ];
        for (function, em, peer, end, kind, fds) in sides {
            let to = Destination::Function {
                function: peer,
                end,
            };
            let id = self.add_end(function, em, cargo, to);
            let copies: std::io::Result<Vec<_>> = fds.iter().map(OwnedFd::try_clone).collect();
            self.kept.insert(id, (kind.clone(), copies?));
            orders.push(Order::Add {
                em,
                link: LinkSpec { id, function, kind },
                fds,
            });
        }
        Ok(())
    }
}

/// What the two ends of a shared-memory wire get, see [`LinkKind::Shm`].
fn descriptors(name: &str) -> std::io::Result<[Vec<OwnedFd>; 2]> {
    let memory = shm_memory(name)?;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let first = rustix::event::eventfd(0, flags)?;
    let second = rustix::event::eventfd(0, flags)?;
    Ok([
        vec![memory.try_clone()?, first.try_clone()?, second.try_clone()?],
        vec![memory, second, first],
    ])
}

/// Zero-filled memory of a wire, which neither end can resize under the other.
fn shm_memory(name: &str) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, SHM_LINK_BYTES)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests;
