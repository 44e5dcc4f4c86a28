//! Wires that EMs have from a former OM.

use super::{Cargo, Destination, End, EndState, Order, Place, Wiring};
use m2m_fabric::proto::{LinkKind, LinkSpec};
use std::os::fd::OwnedFd;
use std::time::Instant;

impl Wiring {
    /// What EMs of a former OM return is to be taken; none of them counts as gone before its time is over.
    pub fn expect_all(&mut self, now: Instant) {
        self.away = self.places.iter().map(|place| (place.em, now)).collect();
        // Away from the ids that they have.
        let since = std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap_or_default();
        self.next = 1 + (since.as_secs() as u32 % (1 << 19)) * 4096;
    }

    /// An EM of another host has this port: no other end gets its number any more. `false`: it cannot be adopted, since
    /// the configuration asks for another, or the function has one, or another end has the number.
    pub fn avoid(&mut self, link: &LinkSpec) -> bool {
        // Numbers that are in use are small, and those of a hostile EM must not use up all that there are.
        let number = link.id;
        if number >= 1 << 31 {
            return false;
        }
        self.next = self.next.max(number + 1);
        let asked = self.place(link.function).map(Place::alone);
        let asked = asked.unwrap_or_default();
        let asked = asked.into_iter().find(|(kind, _)| *kind == link.kind);
        let is_missing = asked.is_some_and(|(_, to)| !self.leads(link.function, to));
        is_missing && !self.ends.contains_key(&number)
    }

    /// An EM of a former OM has this end of a wire.
    ///
    /// # Errors
    /// The end cannot be; a sentence.
    pub fn adopt(&mut self, em: usize, link: LinkSpec, fds: Vec<OwnedFd>) -> Result<(), String> {
        let LinkSpec { id, function, kind } = link;
        let (cargo, peer) = match &kind {
            LinkKind::Shm { peer, .. } => {
                let peer = self.places.iter().position(|place| place.name == *peer);
                (
                    Cargo::Frames,
                    Some(peer.ok_or("its peer does not exist")? as u32),
                )
            }
            LinkKind::Rdma { peer_function, .. } => (Cargo::Rdma, Some(*peer_function)),
            _ => (Cargo::Frames, None),
        };
        if self.ends.contains_key(&id) {
            return Err(format!("there is a link {id} already"));
        }
        let to = match (peer, &kind) {
            (Some(peer), _) => {
                let other = self.end_between(peer, function, cargo);
                if let Some(other) = other.and_then(|other| self.ends.get_mut(&other)) {
                    other.to = Destination::Function { function, end: id };
                }
                Destination::Function {
                    function: peer,
                    end: other.unwrap_or(0),
                }
            }
            (None, LinkKind::Capture { .. }) => Destination::Capture,
            (None, _) => Destination::Port,
        };
        let state = EndState::Attached;
        self.ends.insert(
            id,
            End {
                function,
                em,
                cargo,
                to,
                state,
            },
        );
        self.kept.insert(id, (kind, fds));
        Ok(())
    }

    /// An EM of a former OM has returned all that it had.
    ///
    /// # Errors
    /// As [`Self::em_up`].
    pub fn em_returned(&mut self, em: usize) -> std::io::Result<Vec<Order>> {
        self.up.insert(em);
        self.away.remove(&em);
        self.join_missing(em)
    }

    /// The end of `a` of its wire to `b`.
    pub(super) fn end_between(&self, a: u32, b: u32, cargo: Cargo) -> Option<u32> {
        let mut ends = self.ends.iter();
        let found = ends.find(|(_, end)| {
            let to_b = matches!(end.to, Destination::Function { function, .. } if function == b);
            end.function == a && end.cargo == cargo && to_b
        });
        found.map(|(id, _)| *id)
    }

    /// The other end of a wire that has only one.
    pub(super) fn complete(&mut self, one: u32) -> std::io::Result<Option<Order>> {
        let Some((function, peer)) = self.ends.get(&one).and_then(|end| match end.to {
            Destination::Function { function, .. } => Some((end.function, function)),
            _ => None,
        }) else {
            return Ok(None);
        };
        let (Some((LinkKind::Shm { side, .. }, fds)), Some(place), Some(other)) =
            (self.kept.get(&one), self.place(function), self.place(peer))
        else {
            return Ok(None);
        };
        let kind = LinkKind::Shm {
            side: 1 - side,
            peer: place.name.clone(),
            peer_mac: place.mac.0,
        };
        let mut fds: Vec<OwnedFd> = fds
            .iter()
            .map(OwnedFd::try_clone)
            .collect::<std::io::Result<_>>()?;
        // Memory, own wake-up, the peer's.
        if fds.len() == 3 {
            fds.swap(1, 2);
        }
        let em = other.em;
        let to = Destination::Function { function, end: one };
        let id = self.add_end(peer, em, Cargo::Frames, to);
        if let Some(end) = self.ends.get_mut(&one) {
            end.to = Destination::Function {
                function: peer,
                end: id,
            };
        }
        let copies = fds
            .iter()
            .map(OwnedFd::try_clone)
            .collect::<std::io::Result<_>>()?;
        self.kept.insert(id, (kind.clone(), copies));
        Ok(Some(Order::Add {
            em,
            link: LinkSpec {
                id,
                function: peer,
                kind,
            },
            fds,
        }))
    }
}
