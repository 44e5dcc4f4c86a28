//! Which wires there are between the functions whose EMs are up.
//!
//! A network is a full mesh: one shared-memory wire for every two of its functions. [`Wiring`] knows
//! which ends exist and whether the EMs took them; it talks to nobody, but says what the EMs are to
//! be told ([`Order`]).

use crate::config::{Attachment, Config, MacAddress};
use m2m_fabric::proto::{LinkKind, LinkSpec, SHM_LINK_BYTES};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

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
    /// What it leads to.
    pub to: Destination,
    /// What became of it.
    pub state: EndState,
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
    attachment: Attachment,
    capture: Option<String>,
}

/// All wires.
#[derive(Debug)]
pub struct Wiring {
    /// By function id.
    places: Vec<Place>,
    up: BTreeSet<usize>,
    ends: BTreeMap<u32, End>,
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
            ends: BTreeMap::new(),
            next: 1,
        }
    }

    /// An EM came; its functions have no wires yet.
    ///
    /// # Errors
    /// What the system said when it had no memory or descriptors for a wire. The orders that were
    /// made before are lost, so treat the EM as down.
    pub fn em_up(&mut self, em: usize) -> std::io::Result<Vec<Order>> {
        self.up.insert(em);
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

    /// An EM is gone, and with it its ends of the wires; the others are to leave theirs.
    pub fn em_down(&mut self, em: usize) -> Vec<Order> {
        self.up.remove(&em);
        let gone: BTreeSet<u32> = self
            .ends
            .iter()
            .filter(|(_, end)| end.em == em)
            .map(|(id, _)| *id)
            .collect();
        self.ends.retain(|id, _| !gone.contains(id));
        let orphans: Vec<(u32, usize)> = self
            .ends
            .iter()
            .filter(|(_, end)| {
                matches!(end.to, Destination::Function { end, .. } if gone.contains(&end))
            })
            .map(|(id, end)| (*id, end.em))
            .collect();
        for (id, _) in &orphans {
            self.ends.remove(id);
        }
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

    /// Whether frames of a function can go anywhere: one of its wires has both ends attached.
    pub fn carrier(&self, function: u32) -> bool {
        let attached = |end: &End| end.state == EndState::Attached;
        self.ends
            .values()
            .filter(|end| end.function == function && attached(end))
            .any(|end| match end.to {
                Destination::Function { end, .. } => self.ends.get(&end).is_some_and(attached),
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

    fn add_end(&mut self, function: u32, em: usize, to: Destination) -> u32 {
        let id = self.next;
        self.next += 1;
        self.ends.insert(
            id,
            End {
                function,
                em,
                to,
                state: EndState::Pending,
            },
        );
        id
    }

    /// Wires of one function alone.
    fn attach(&mut self, function: u32, orders: &mut Vec<Order>) {
        let Some(place) = self.place(function) else {
            return;
        };
        let em = place.em;
        let port = match &place.attachment {
            Attachment::Network(_) => None,
            Attachment::Tap(name) => Some(LinkKind::Tap { name: name.clone() }),
            Attachment::Loopback => Some(LinkKind::Loopback),
            Attachment::Null => Some(LinkKind::Null),
        };
        let capture = place.capture.clone().map(|path| LinkKind::Capture { path });
        let kinds = [(capture, Destination::Capture), (port, Destination::Port)];
        for (kind, to) in kinds {
            if let Some(kind) = kind {
                let id = self.add_end(function, em, to);
                orders.push(Order::Add {
                    em,
                    link: LinkSpec { id, function, kind },
                    fds: Vec::new(),
                });
            }
        }
    }

    /// The wire between two functions, if they share a network and both EMs are up.
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
        let sides = [
            (a, first.em, second.name.clone(), second.mac.0),
            (b, second.em, first.name.clone(), first.mac.0),
        ];
        let memory = shm_memory(&format!("wire-{}-{}", first.name, second.name))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wakes = [
            rustix::event::eventfd(0, flags)?,
            rustix::event::eventfd(0, flags)?,
        ];
        let fds = [
            vec![
                memory.try_clone()?,
                wakes[0].try_clone()?,
                wakes[1].try_clone()?,
            ],
            {
                let [own, peer] = wakes;
                vec![memory, peer, own]
            },
        ];
        // both ids are needed before either end can name the other
        let ids = [self.next, self.next + 1];
        for (index, ((function, em, peer, peer_mac), fds)) in sides.into_iter().zip(fds).enumerate()
        {
            let other = 1 - index;
            let id = self.add_end(
                function,
                em,
                Destination::Function {
                    function: [a, b][other],
                    end: ids[other],
                },
            );
            orders.push(Order::Add {
                em,
                link: LinkSpec {
                    id,
                    function,
                    kind: LinkKind::Shm {
                        side: index as u8,
                        peer,
                        peer_mac,
                    },
                },
                fds,
            });
        }
        Ok(())
    }
}

/// Zero-filled memory of a wire, which neither end can resize under the other.
fn shm_memory(name: &str) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, SHM_LINK_BYTES)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// EM by EM, the attachments of its functions.
    fn wiring(ems: &[&[&str]]) -> Wiring {
        let mut text = String::from("[[network]]\nname = \"blue\"\n[[network]]\nname = \"red\"\n");
        let mut n = 0;
        for (em, functions) in ems.iter().enumerate() {
            text += &format!("[[em]]\nname = \"em{em}\"\n");
            for attachment in *functions {
                text += &format!(
                    "[[em.function]]\nname = \"net{n}\"\nkind = \"virtio-net\"\n\
                     mac = \"02:00:00:00:00:{n:02x}\"\n{attachment}\n"
                );
                n += 1;
            }
        }
        Wiring::new(&Config::parse("test", &text).unwrap())
    }

    const BLUE: &str = "network = \"blue\"";
    const RED: &str = "network = \"red\"";

    fn added(orders: &[Order]) -> Vec<(usize, u32, u32)> {
        orders
            .iter()
            .map(|order| match order {
                Order::Add { em, link, .. } => (*em, link.function, link.id),
                Order::Remove { .. } => panic!("{order:?}"),
            })
            .collect()
    }

    fn attach_all(wiring: &mut Wiring, orders: &[Order]) {
        for (_, _, link) in added(orders) {
            wiring.answered(link, Ok(()));
        }
    }

    #[test]
    fn two_functions_are_joined_when_the_second_em_comes() {
        let mut w = wiring(&[&[BLUE], &[BLUE]]);
        assert!(w.em_up(0).unwrap().is_empty());
        let orders = w.em_up(1).unwrap();
        let [
            Order::Add {
                em: 0,
                link: first,
                fds: f0,
            },
            Order::Add {
                em: 1,
                link: second,
                fds: f1,
            },
        ] = &orders[..]
        else {
            panic!("{orders:?}");
        };
        assert_ne!(first.id, second.id);
        assert_eq!(
            first.kind,
            LinkKind::Shm {
                side: 0,
                peer: "net1".into(),
                peer_mac: [2, 0, 0, 0, 0, 1]
            }
        );
        assert_eq!(
            second.kind,
            LinkKind::Shm {
                side: 1,
                peer: "net0".into(),
                peer_mac: [2, 0, 0, 0, 0, 0]
            }
        );
        let (memory, other) = (
            rustix::fs::fstat(&f0[0]).unwrap(),
            rustix::fs::fstat(&f1[0]).unwrap(),
        );
        assert_eq!(memory.st_ino, other.st_ino);
        assert_eq!(memory.st_size as u64, SHM_LINK_BYTES);
        assert!(
            rustix::fs::ftruncate(&f0[0], 4096).is_err(),
            "the memory must be sealed"
        );
        // what wakes one end is what the other end wakes
        rustix::io::write(&f0[2], &1u64.to_ne_bytes()).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&f1[1], &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(rustix::io::read(&f1[2], &mut count).is_err());
    }

    #[test]
    fn a_network_is_a_full_mesh_also_within_an_em() {
        let mut w = wiring(&[&[BLUE, BLUE], &[BLUE, RED], &[RED]]);
        assert_eq!(w.em_up(0).unwrap().len(), 2, "net0-net1");
        assert_eq!(w.em_up(1).unwrap().len(), 4, "net0-net2, net1-net2");
        assert_eq!(w.em_up(2).unwrap().len(), 2, "net3-net4");
    }

    #[test]
    fn carrier_needs_both_ends() {
        let mut w = wiring(&[&[BLUE], &[BLUE]]);
        w.em_up(0).unwrap();
        let orders = w.em_up(1).unwrap();
        let links = added(&orders);
        w.answered(links[0].2, Ok(()));
        assert!(!w.carrier(0) && !w.carrier(1));
        w.answered(links[1].2, Ok(()));
        assert!(w.carrier(0) && w.carrier(1));
        w.answered(links[1].2, Err("no memory".into()));
        assert!(!w.carrier(0) && !w.carrier(1));
    }

    #[test]
    fn a_dead_em_takes_its_wires_along_and_gets_new_ones_when_it_returns() {
        let mut w = wiring(&[&[BLUE], &[BLUE], &[BLUE]]);
        for em in 0..3 {
            let orders = w.em_up(em).unwrap();
            attach_all(&mut w, &orders);
        }
        assert_eq!(w.ends().len(), 6);
        let removed = w.em_down(1);
        let ems: Vec<usize> = removed
            .iter()
            .map(|order| match order {
                Order::Remove { em, .. } => *em,
                Order::Add { .. } => panic!("{order:?}"),
            })
            .collect();
        assert_eq!(ems, [0, 2]);
        assert!(w.carrier(0) && !w.carrier(1) && w.carrier(2));
        let before: BTreeSet<u32> = w.ends().keys().copied().collect();
        let orders = w.em_up(1).unwrap();
        assert_eq!(orders.len(), 4);
        assert!(added(&orders).iter().all(|(_, _, id)| !before.contains(id)));
        assert!(!w.carrier(1));
        attach_all(&mut w, &orders);
        assert!(w.carrier(1));
    }

    #[test]
    fn a_late_answer_about_a_wire_that_is_gone_changes_nothing() {
        let mut w = wiring(&[&[BLUE], &[BLUE]]);
        w.em_up(0).unwrap();
        let orders = w.em_up(1).unwrap();
        w.em_down(1);
        attach_all(&mut w, &orders);
        assert!(!w.carrier(0) && w.ends().is_empty());
    }

    #[test]
    fn ports_need_no_peer_and_a_capture_is_no_carrier() {
        let mut w = wiring(&[
            &["port = { tap = \"tap0\" }\ncapture = \"x.pcap\""],
            &["network = \"blue\"\ncapture = \"y.pcap\""],
        ]);
        let orders = w.em_up(0).unwrap();
        let kinds: Vec<&LinkKind> = orders
            .iter()
            .map(|o| match o {
                Order::Add { link, .. } => &link.kind,
                Order::Remove { .. } => panic!("{o:?}"),
            })
            .collect();
        assert_eq!(
            kinds,
            [
                &LinkKind::Capture {
                    path: "x.pcap".into()
                },
                &LinkKind::Tap {
                    name: "tap0".into()
                }
            ]
        );
        attach_all(&mut w, &orders);
        assert!(w.carrier(0));
        let orders = w.em_up(1).unwrap();
        attach_all(&mut w, &orders);
        assert!(!w.carrier(1));
    }
}
