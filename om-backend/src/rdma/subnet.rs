//! The ports, their addresses, and the paths between them that EMs rely on.

mod hold;

use super::Order;
use crate::config::{Attachment, Config, LinkType, MacAddress};
use crate::presentation::rdma::{guid, lid};
use m2m_fabric::proto::{RdmaDestination, RdmaPath, RdmaRequest};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;

/// Entries of a port's GID table, at most.
const MAX_GIDS: u16 = 256;
/// Prefix of the GIDs that every InfiniBand port has from the start (IBTA 1.5 §4.1.1).
const LINK_LOCAL: u64 = 0xfe80 << 48;

/// The port of an RDMA function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its EM, by its place in the configuration.
    pub em: usize,
    /// Name of the function.
    pub name: String,
    /// Name of its network.
    pub network: String,
    /// What it is attached to.
    pub link_type: LinkType,
    /// Its MAC address.
    pub mac: MacAddress,
    /// GUID of node and port.
    pub guid: u64,
    /// Its LID; 0 on Ethernet.
    pub lid: u16,
}

impl Port {
    /// Whether the network's policy lets the two talk; a port reaches itself.
    fn reaches(&self, other: &Self) -> bool {
        self.network == other.network && self.link_type == other.link_type
    }

    /// The GID that it has without anybody setting one.
    fn own_gid(&self) -> Option<[u8; 16]> {
        let gid = (u128::from(LINK_LOCAL) << 64 | u128::from(self.guid)).to_be_bytes();
        (self.link_type == LinkType::Infiniband).then_some(gid)
    }
}

/// All ports.
#[derive(Debug)]
pub struct Subnet {
    /// By function id.
    ports: BTreeMap<u32, Port>,
    /// By function id and index.
    gids: BTreeMap<u32, BTreeMap<u16, [u8; 16]>>,
    up: BTreeSet<usize>,
    /// Functions whose link the administrator does not let be up.
    barred: BTreeSet<u32>,
    /// Number of the last answer.
    generation: u64,
    /// Last answer by function that asked, and peer.
    granted: BTreeMap<(u32, u32), u64>,
}

impl Subnet {
    /// All EMs are away; function ids count up in the order of the configuration.
    pub fn new(config: &Config) -> Self {
        let all = config
            .ems
            .iter()
            .enumerate()
            .flat_map(|(em, c)| c.functions.iter().map(move |f| (em, f)));
        let mut ports = BTreeMap::new();
        let mut barred = BTreeSet::new();
        for (id, (em, f)) in (0..).zip(all) {
            let (Some(rdma), Attachment::Network(network)) = (f.kind.rdma(), &f.attachment) else {
                continue;
            };
            ports.insert(
                id,
                Port {
                    em,
                    name: f.name.clone(),
                    network: network.clone(),
                    link_type: rdma.link_type,
                    mac: f.mac,
                    guid: guid(f.mac),
                    lid: lid(id, rdma.link_type),
                },
            );
            if !f.link_up {
                barred.insert(id);
            }
        }
        Self {
            ports,
            gids: BTreeMap::new(),
            up: BTreeSet::new(),
            barred,
            generation: 0,
            granted: BTreeMap::new(),
        }
    }

    /// The port of a function, if it is an RDMA function.
    pub fn port(&self, function: u32) -> Option<&Port> {
        self.ports.get(&function)
    }

    /// The GIDs in use, in the order of the function's table; first the one it has anyway.
    pub fn gids(&self, function: u32) -> Vec<[u8; 16]> {
        let mut all: Vec<[u8; 16]> = Vec::new();
        let own = self.port(function).and_then(Port::own_gid);
        let set = self
            .gids
            .get(&function)
            .into_iter()
            .flat_map(|t| t.values());
        for gid in own.iter().chain(set) {
            if !all.contains(gid) {
                all.push(*gid);
            }
        }
        all
    }

    /// The EMs that serve a port which may talk to that of `function`, itself not counted.
    pub fn neighbours(&self, function: u32) -> BTreeSet<usize> {
        let Some(port) = self.port(function) else {
            return BTreeSet::new();
        };
        self.ports
            .iter()
            .filter(|(id, p)| **id != function && p.reaches(port) && self.up.contains(&p.em))
            .map(|(_, p)| p.em)
            .collect()
    }

    /// The RDMA functions of an EM.
    pub fn functions_of(&self, em: usize) -> Vec<u32> {
        let own = self.ports.iter().filter(|(_, p)| p.em == em);
        own.map(|(id, _)| *id).collect()
    }

    /// The RDMA functions whose EMs are up.
    pub fn functions_up(&self) -> Vec<u32> {
        let up = self.ports.iter().filter(|(_, p)| self.up.contains(&p.em));
        up.map(|(id, _)| *id).collect()
    }

    /// A function's GID table changed; all zeroes remove an entry.
    ///
    /// # Errors
    /// A sentence when there is no such function or index.
    pub fn set_gid(&mut self, function: u32, index: u16, gid: [u8; 16]) -> Result<(), String> {
        if self.port(function).is_none() {
            return Err(format!("function {function} is no RDMA function"));
        }
        if index >= MAX_GIDS {
            return Err(format!(
                "GID index {index} is out of range; a table has {MAX_GIDS} entries"
            ));
        }
        let table = self.gids.entry(function).or_default();
        if gid == [0; 16] {
            table.remove(&index);
        } else {
            table.insert(index, gid);
        }
        Ok(())
    }

    /// Where a destination is, for a function that wants to reach it.
    ///
    /// # Errors
    /// A sentence that says why it cannot: nobody has that address in the function's network, or the
    /// port is not up.
    pub fn resolve(&mut self, function: u32, to: &RdmaDestination) -> Result<RdmaPath, String> {
        let asker = self
            .port(function)
            .ok_or_else(|| format!("function {function} is no RDMA function"))?;
        let (peer, port) = self.find(asker, to).ok_or_else(|| {
            format!(
                "network \"{}\" has no {} port with {}",
                asker.network,
                asker.link_type.as_str(),
                describe(to)
            )
        })?;
        if !self.up.contains(&port.em) {
            return Err(format!("the EM of {} is away", port.name));
        }
        for (id, port) in [(function, asker), (peer, port)] {
            if self.barred.contains(&id) {
                return Err(format!("the link of {} is down", port.name));
            }
        }
        self.generation = self.generation.saturating_add(1);
        self.granted.insert((function, peer), self.generation);
        Ok(RdmaPath {
            peer,
            generation: self.generation,
        })
    }

    fn find(&self, asker: &Port, to: &RdmaDestination) -> Option<(u32, &Port)> {
        let reachable = || {
            let all = self.ports.iter().filter(|(_, p)| p.reaches(asker));
            all.map(|(id, p)| (*id, p))
        };
        let with_gid: Vec<(u32, &Port)> = match to.gid {
            Some(gid) => reachable()
                .filter(|(id, port)| self.has_gid(*id, port, gid))
                .collect(),
            None => Vec::new(),
        };
        if asker.link_type == LinkType::Infiniband && to.lid != 0 {
            // The LID is where packets go; a port there that is known not to have the GID drops them.
            return reachable()
                .find(|(_, port)| port.lid == to.lid)
                .filter(|(id, _)| with_gid.is_empty() || with_gid.iter().any(|(g, _)| g == id));
        }
        let at_mac = |(_, port): &(u32, &Port)| port.mac.0 == to.mac;
        match with_gid[..] {
            [] => reachable().find(at_mac),
            [only] => Some(only),
            // Two guests took the same address; the one that the frame would reach has it.
            _ => with_gid.into_iter().find(at_mac),
        }
    }

    fn has_gid(&self, function: u32, port: &Port, gid: [u8; 16]) -> bool {
        let set = self.gids.get(&function);
        port.own_gid() == Some(gid) || set.is_some_and(|table| table.values().any(|g| *g == gid))
    }

    /// An EM came.
    pub fn em_up(&mut self, em: usize) {
        self.up.insert(em);
    }

    /// An EM is gone: its ports lose their GIDs, and paths to them end.
    pub fn em_down(&mut self, em: usize) -> Vec<Order> {
        self.up.remove(&em);
        let gone = self.functions_of(em);
        for function in &gone {
            self.gids.remove(function);
        }
        self.revoke(&gone)
    }

    /// The guests of some functions are gone: their ports lose their GIDs, and paths to them end.
    pub fn functions_gone(&mut self, functions: &[u32]) -> Vec<Order> {
        for function in functions {
            self.gids.remove(function);
        }
        self.revoke(functions)
    }

    /// The administrator lets the link of a function be up or not. Its EM is told whenever that
    /// changes; an EM that comes later has it from the function's description.
    pub fn set_link(&mut self, function: u32, up: bool) -> Vec<Order> {
        let Some(em) = self.ports.get(&function).map(|port| port.em) else {
            return Vec::new();
        };
        let (changed, mut orders) = match up {
            true => (self.barred.remove(&function), Vec::new()),
            false => (self.barred.insert(function), self.revoke(&[function])),
        };
        if changed {
            orders.push(Order {
                em,
                request: RdmaRequest::SetLink { function, up },
                fds: Vec::new(),
            });
        }
        orders
    }

    /// Ends the paths from and to some functions, and tells the EMs that are up.
    fn revoke(&mut self, functions: &[u32]) -> Vec<Order> {
        let mut orders = Vec::new();
        let (ports, up) = (&self.ports, &self.up);
        self.granted.retain(|(function, peer), generation| {
            if !functions.contains(function) && !functions.contains(peer) {
                return true;
            }
            let em = ports.get(function).map(|port| port.em);
            if let Some(em) = em.filter(|em| up.contains(em)) {
                orders.push(Order {
                    em,
                    request: RdmaRequest::Revoke {
                        function: *function,
                        peer: *peer,
                        generation: *generation,
                    },
                    fds: Vec::new(),
                });
            }
            false
        });
        orders
    }
}

fn describe(to: &RdmaDestination) -> String {
    let mut parts = Vec::new();
    if to.lid != 0 {
        parts.push(format!("LID {}", to.lid));
    }
    if let Some(gid) = to.gid {
        parts.push(format!("GID {}", Ipv6Addr::from(gid)));
    }
    let mac = MacAddress(to.mac);
    if !mac.is_zero() || parts.is_empty() {
        parts.push(format!("MAC {mac}"));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests;
