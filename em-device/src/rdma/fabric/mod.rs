//! How packets travel between functions of one host, and whose memory they may refer to.
//!
//! [`Wires`] belongs to the data path and to one function. A packet to another function goes through
//! a shared-memory wire ([`ShmPort`]); one to the function itself does not leave. The payload does
//! not travel: the responder's EM has the requester's memory mapped ([`Wires::add_file`]).

mod codec;
mod routes;

use super::packet::{Addresses, Fabric, NotSent, Packet, Request, Route};
use super::verbs::{Destination, Path, Peer};
use crate::port::shm::ShmPort;
use crate::port::{Port, TxError};
use dot_iommu::HostMapping;
use m2m_fabric::proto::LinkStats;
use routes::Routes;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Packets to the function itself that wait at most.
const LOOPBACK: usize = 1024;
/// Packets taken from a wire at once.
const BURST: usize = 64;
/// Files of one peer at most.
const MAX_FILES: usize = 256;
/// In the place of a wire's id: to the function itself.
const OWN: u32 = u32::MAX;

/// Asks the OM for the way to a destination; the answer goes to [`Wires::answered`]. Must not wait.
pub type Ask = Box<dyn Fn(Destination) + Send>;

struct Wire {
    id: u32,
    peer: Peer,
    port: ShmPort,
    /// Something was sent since the last flush.
    dirty: bool,
}

struct File {
    peer: Peer,
    number: u64,
    mapping: Arc<HostMapping>,
}

/// All ways of one function to others and to itself.
pub struct Wires {
    own: Peer,
    wires: Vec<Wire>,
    loopback: VecDeque<Packet>,
    /// Packets to the function itself, sent and taken.
    looped: (u64, u64),
    files: Vec<File>,
    routes: Routes,
    ask: Ask,
    addresses: Addresses,
    encoded: codec::Bytes,
    arrived: Box<[u8; codec::MAX_BYTES]>,
    /// What came and was not handled yet.
    inbox: VecDeque<(Peer, Packet)>,
    /// Boxes for what comes next.
    spare: codec::Spare,
}

impl std::fmt::Debug for Wires {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wires")
            .field("own", &self.own)
            .field("wires", &self.wires.len())
            .field("files", &self.files.len())
            .finish_non_exhaustive()
    }
}

impl Wires {
    /// Function `own`, alone.
    pub fn new(own: Peer, ask: Ask) -> Self {
        Self {
            own,
            wires: Vec::new(),
            loopback: VecDeque::new(),
            looped: (0, 0),
            files: Vec::new(),
            routes: Routes::default(),
            ask,
            addresses: Addresses::default(),
            encoded: codec::Bytes::new(),
            arrived: Box::new([0; codec::MAX_BYTES]),
            inbox: VecDeque::new(),
            spare: codec::Spare::new(),
        }
    }

    /// Adds the wire to a peer, instead of an older one.
    pub fn add(&mut self, id: u32, peer: Peer, port: ShmPort) {
        self.wires.retain(|wire| wire.peer != peer);
        self.wires.push(Wire {
            id,
            peer,
            port,
            dirty: false,
        });
    }

    /// Removes a wire, by its id. Answers whose it was.
    pub fn remove(&mut self, id: u32) -> Option<Peer> {
        let at = self.wires.iter().position(|wire| wire.id == id)?;
        let peer = self.wires.remove(at).peer;
        self.routes.forget(peer, u64::MAX);
        Some(peer)
    }

    /// A peer's memory, or the function's own, lies also in this file. `false` when it has too many.
    pub fn add_file(&mut self, peer: Peer, number: u64, mapping: Arc<HostMapping>) -> bool {
        self.remove_file(peer, Some(number));
        if self.files.iter().filter(|f| f.peer == peer).count() >= MAX_FILES {
            return false;
        }
        self.files.push(File {
            peer,
            number,
            mapping,
        });
        true
    }

    /// A peer uses a file no more; without a number, no file.
    pub fn remove_file(&mut self, peer: Peer, number: Option<u64>) {
        self.files
            .retain(|f| f.peer != peer || number.is_some_and(|n| n != f.number));
    }

    /// What the OM answered.
    pub fn answered(&mut self, to: Destination, path: Option<Path>) {
        self.routes.answered(to, path, Instant::now());
    }

    /// The answers of the OM that datagrams rely on.
    pub fn paths(&self) -> impl Iterator<Item = Path> {
        self.routes.known()
    }

    /// Of a peer's files, those that are not among these are used no more.
    pub fn keep_files(&mut self, peer: Peer, numbers: &[u64]) {
        self.files
            .retain(|f| f.peer != peer || numbers.contains(&f.number));
    }

    /// Answers about a peer up to a generation are not valid any more.
    pub fn revoke(&mut self, peer: Peer, generation: u64) {
        self.routes.forget(peer, generation);
    }

    /// Sets LID and GIDs of the function.
    pub fn set_addresses(&mut self, addresses: Addresses) {
        self.addresses = addresses;
    }

    /// The next packet that came in. After the last one has been handled, [`Self::release`].
    pub fn take(&mut self) -> Option<(Peer, Packet)> {
        if let Some(packet) = self.loopback.pop_front() {
            self.looped.1 += 1;
            return Some((self.own, packet));
        }
        self.inbox.pop_front()
    }

    /// A request was handled: the next one takes its place, so that none is allocated.
    #[inline]
    pub fn reuse(&mut self, request: Option<Box<Request>>) {
        if self.spare.len() < BURST {
            self.spare.extend(request);
        }
    }

    /// Takes what waits on the wires, some of it. Answers whether anything did.
    pub fn collect(&mut self) -> bool {
        let (inbox, spare) = (&mut self.inbox, &mut self.spare);
        let arrived = &mut *self.arrived;
        for wire in &mut self.wires {
            let peer = wire.peer;
            wire.port.receive_bytes(BURST, &mut |bytes| {
                let len = bytes.copy_to(&mut arrived[..]);
                // What is no packet is lost, as on any wire.
                let packet = arrived.get(..len).filter(|_| len == bytes.len());
                if let Some(packet) = packet.and_then(|bytes| codec::decode(bytes, spare)) {
                    inbox.push_back((peer, packet));
                }
            });
        }
        !self.inbox.is_empty() || !self.loopback.is_empty()
    }

    /// All that was collected has been handled: peers may know.
    pub fn release(&mut self) {
        for wire in &mut self.wires {
            wire.port.release();
        }
    }

    /// Makes what was sent visible.
    pub fn flush(&mut self) {
        for wire in self.wires.iter_mut().filter(|wire| wire.dirty) {
            wire.port.flush();
            wire.dirty = false;
        }
    }

    /// How much was sent to each peer until now, for [`Self::is_done`].
    pub fn sent(&self) -> Vec<(u32, u64)> {
        self.wires
            .iter()
            .map(|wire| (wire.id, wire.port.sent()))
            .chain([(OWN, self.looped.0)])
            .collect()
    }

    /// Whether all peers are done with what was sent to them until then: nobody touches memory on its
    /// account any more.
    pub fn is_done(&mut self, sent: &[(u32, u64)]) -> bool {
        // Nothing of it is taken and not handled between two rounds.
        let looped = self.looped.1;
        let own_done = sent
            .iter()
            .all(|(id, until)| *id != OWN || looped >= *until);
        own_done
            && self.wires.iter_mut().all(|wire| {
                let until = sent.iter().find(|(id, _)| *id == wire.id);
                until.is_none_or(|(_, until)| wire.port.is_done(*until))
            })
    }

    /// Asks for wake-ups; see [`Port::arm`].
    pub fn arm(&mut self) -> bool {
        !self.loopback.is_empty()
            || !self.inbox.is_empty()
            || self.wires.iter_mut().any(|wire| wire.port.arm())
    }

    /// See [`Port::disarm`].
    pub fn disarm(&mut self) {
        self.wires.iter_mut().for_each(|wire| wire.port.disarm());
    }

    /// What to sleep on.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.wires.iter().filter_map(|wire| wire.port.wake_fd())
    }

    /// Counters of the wires.
    pub fn stats(&self) -> impl Iterator<Item = LinkStats> {
        self.wires.iter().map(|wire| {
            let mut stats = wire.port.stats();
            stats.link = wire.id;
            stats
        })
    }
}

impl Fabric for Wires {
    fn send(&mut self, peer: Peer, packet: &Packet) -> Result<(), NotSent> {
        if peer == self.own {
            if self.loopback.len() >= LOOPBACK {
                return Err(NotSent::Full);
            }
            self.loopback.push_back(packet.clone());
            self.looped.0 += 1;
            return Ok(());
        }
        let wire = self.wires.iter_mut().find(|wire| wire.peer == peer);
        let wire = wire.ok_or(NotSent::Gone)?;
        codec::encode(packet, &mut self.encoded).ok_or(NotSent::Gone)?;
        match wire.port.transmit_bytes(&self.encoded) {
            Ok(()) => {
                wire.dirty = true;
                Ok(())
            }
            Err(TxError::Full) => Err(NotSent::Full),
            Err(TxError::TooLong | TxError::Down | TxError::Malformed) => Err(NotSent::Gone),
        }
    }

    fn position(&self, peer: Peer) -> u64 {
        let wire = self.wires.iter().find(|wire| wire.peer == peer);
        wire.map_or(0, |wire| wire.port.sent())
    }

    fn is_taken(&mut self, peer: Peer, position: u64) -> bool {
        let wire = self.wires.iter_mut().find(|wire| wire.peer == peer);
        wire.is_none_or(|wire| wire.port.is_done(position))
    }

    fn file(&self, peer: Peer, file: u64) -> Option<&HostMapping> {
        self.files
            .iter()
            .find(|f| f.number == file && f.peer == peer)
            .map(|f| &*f.mapping)
    }

    fn route(&mut self, to: &Destination) -> Route {
        let (route, ask) = self.routes.look_up(to, Instant::now());
        if ask {
            (self.ask)(*to);
        }
        route
    }

    fn is_handled(&mut self, peer: Peer) -> bool {
        if peer == self.own {
            return self.loopback.is_empty();
        }
        let sent = self.position(peer);
        self.is_taken(peer, sent)
    }

    fn addresses(&self) -> &Addresses {
        &self.addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::shm::test_support::pair;
    use crate::rdma::packet::{Body, Verdict};
    use crate::rdma::verbs::QpNum;

    fn packet(psn: u32) -> Packet {
        Packet {
            to: QpNum(1),
            from: QpNum(2),
            psn,
            body: Body::Answer(Verdict::Done),
        }
    }

    fn two() -> (Wires, Wires) {
        let (a, b) = pair();
        let mut wires = [1, 2].map(|own| Wires::new(Peer(own), Box::new(|_| {})));
        wires[0].add(10, Peer(2), a);
        wires[1].add(11, Peer(1), b);
        let [a, b] = wires;
        (a, b)
    }

    #[test]
    fn packets_reach_the_peer_in_order() {
        let (mut a, mut b) = two();
        for psn in 0..100 {
            a.send(Peer(2), &packet(psn)).unwrap();
        }
        assert_eq!(a.send(Peer(3), &packet(0)), Err(NotSent::Gone));
        a.flush();
        let mut came = Vec::new();
        while b.collect() {
            while let Some((from, packet)) = b.take() {
                assert_eq!(from, Peer(1));
                came.push(packet.psn);
            }
            b.release();
        }
        assert_eq!(came, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_peer_is_done_when_it_released_what_it_took() {
        let (mut a, mut b) = two();
        assert!(a.is_done(&a.sent()));
        a.send(Peer(2), &packet(0)).unwrap();
        let sent = a.sent();
        a.send(Peer(2), &packet(1)).unwrap();
        a.flush();
        assert!(!a.is_done(&sent));
        assert!(b.collect());
        b.take();
        assert!(!a.is_done(&sent), "taken is not handled");
        b.release();
        assert!(a.is_done(&sent) && a.is_done(&a.sent()));
        a.send(Peer(2), &packet(2)).unwrap();
        let position = a.position(Peer(2));
        assert!(!a.is_taken(Peer(2), position));
        assert!(b.collect());
        b.take();
        b.release();
        assert!(a.is_taken(Peer(2), position));
        assert!(a.is_taken(Peer(3), a.position(Peer(3))), "there is nobody");
    }

    #[test]
    fn packets_to_oneself_come_back() {
        let (mut a, _b) = two();
        a.send(Peer(1), &packet(7)).unwrap();
        assert!(a.arm(), "there is work");
        assert_eq!(a.take(), Some((Peer(1), packet(7))));
        assert_eq!(a.take(), None);
        for psn in 0..LOOPBACK as u32 {
            a.send(Peer(1), &packet(psn)).unwrap();
        }
        assert_eq!(a.send(Peer(1), &packet(0)), Err(NotSent::Full));
    }

    #[test]
    fn packets_to_oneself_that_wait_are_not_done() {
        let (mut a, _b) = two();
        a.send(Peer(1), &packet(0)).unwrap();
        let sent = a.sent();
        a.send(Peer(1), &packet(1)).unwrap();
        assert!(!a.is_done(&sent));
        a.take();
        assert!(a.is_done(&sent) && !a.is_done(&a.sent()));
    }

    #[test]
    fn a_file_is_the_peers_alone_and_gone_when_it_says_so() {
        let (mut a, _b) = two();
        let mapping = HostMapping::anonymous(4096).unwrap();
        assert!(a.add_file(Peer(2), 5, mapping.clone()));
        assert!(a.file(Peer(2), 5).is_some());
        assert!(a.file(Peer(3), 5).is_none() && a.file(Peer(2), 6).is_none());
        for number in 6..=5 + MAX_FILES as u64 {
            let room = number < 5 + MAX_FILES as u64;
            assert_eq!(a.add_file(Peer(2), number, mapping.clone()), room);
        }
        assert!(a.add_file(Peer(3), 5, mapping.clone()));
        a.remove_file(Peer(2), Some(5));
        assert!(a.file(Peer(2), 5).is_none() && a.file(Peer(3), 5).is_some());
        a.keep_files(Peer(2), &[6, 7, 1 << 40]);
        assert!(a.file(Peer(2), 7).is_some() && a.file(Peer(2), 8).is_none());
        assert!(a.file(Peer(3), 5).is_some());
        a.remove_file(Peer(3), None);
        assert!(a.file(Peer(3), 5).is_none() && a.file(Peer(2), 6).is_some());
    }
}
