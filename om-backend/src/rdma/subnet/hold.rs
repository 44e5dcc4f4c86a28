//! What goes on from before this OM, or from an EM that another took the place of.

use super::{MAX_GIDS, Subnet};
use crate::rdma::Order;
use m2m_fabric::proto::{RdmaPath, RdmaRequest};

impl Subnet {
    /// What a function has whose EM another OM, or another EM, left: its GIDs, and the answers that its queue pairs
    /// rely on. Those that the network's policy does not allow any more are revoked.
    pub fn hold(
        &mut self,
        function: u32,
        gids: &[(u16, [u8; 16])],
        paths: &[RdmaPath],
    ) -> Vec<Order> {
        let Some(asker) = self.ports.get(&function) else {
            return Vec::new();
        };
        let set = gids.iter().copied();
        let table = set.filter(|(index, gid)| *index < MAX_GIDS && *gid != [0; 16]);
        self.gids.insert(function, table.collect());
        let mut orders = Vec::new();
        for path in paths {
            // Those that come later count on from here.
            self.generation = self.generation.max(path.generation);
            let peer = self.ports.get(&path.peer);
            let barred = [function, path.peer]
                .iter()
                .any(|id| self.barred.contains(id));
            if !barred && peer.is_some_and(|peer| asker.reaches(peer)) {
                let last = self.granted.entry((function, path.peer)).or_default();
                *last = path.generation.max(*last);
                continue;
            }
            orders.push(Order {
                em: asker.em,
                request: RdmaRequest::Revoke {
                    function,
                    peer: path.peer,
                    generation: path.generation,
                },
                fds: Vec::new(),
            });
        }
        orders
    }

    /// What makes the links of an EM's functions what the administrator lets them be.
    pub fn links_of(&self, em: usize) -> Vec<Order> {
        let link = |function| Order {
            em,
            request: RdmaRequest::SetLink {
                function,
                up: !self.barred.contains(&function),
            },
            fds: Vec::new(),
        };
        self.functions_of(em).into_iter().map(link).collect()
    }
}
