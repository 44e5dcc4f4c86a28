//! What EMs ask about RDMA, and what they are told of each other.

use super::Conductor;
use crate::northbound::view::RdmaView;
use crate::rdma::Order;
use crate::session::Subject;
use m2m_fabric::proto::{RdmaRequest, Reply, Request};
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;

impl Conductor {
    /// Answers an EM, which may ask about its own functions only.
    pub(super) fn rdma_request(
        &mut self,
        em: usize,
        request: &RdmaRequest,
        fds: Vec<OwnedFd>,
    ) -> Reply {
        match self.rdma_result(em, request, fds) {
            Ok(reply) => reply,
            Err(reason) => {
                log::debug!("refused {request:?}: {reason}");
                Reply::Failed(reason)
            }
        }
    }

    fn rdma_result(
        &mut self,
        em: usize,
        request: &RdmaRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, String> {
        let (RdmaRequest::Resolve { function, .. }
        | RdmaRequest::SetGid { function, .. }
        | RdmaRequest::ShareMemory { function, .. }
        | RdmaRequest::Holds { function, .. }
        | RdmaRequest::UnshareMemory { function, .. }) = *request
        else {
            return Err("the OM takes no such request".to_owned());
        };
        if self.subnet.port(function).is_none_or(|port| port.em != em) {
            return Err(format!(
                "function {function} is no RDMA function of this EM"
            ));
        }
        let orders = match request {
            RdmaRequest::Resolve { to, .. } => {
                return self.subnet.resolve(function, to).map(Reply::Path);
            }
            RdmaRequest::SetGid { index, gid, .. } => {
                self.subnet.set_gid(function, *index, *gid)?;
                Vec::new()
            }
            RdmaRequest::ShareMemory { file, .. } => {
                let count = fds.len();
                let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| {
                    format!("shared memory came with {count} descriptors; it must be one")
                })?;
                self.memory.share(&self.subnet, function, *file, fd)?
            }
            RdmaRequest::Holds {
                gids, paths, files, ..
            } => {
                let mut orders = self.subnet.hold(function, gids, paths);
                orders.extend(self.memory.hold(&self.subnet, function, files));
                orders
            }
            RdmaRequest::UnshareMemory { file, .. } => self.memory.unshare(function, *file),
            _ => Vec::new(),
        };
        self.give_rdma(orders);
        Ok(Reply::Ok)
    }

    /// An EM came and has its wires.
    pub(super) fn rdma_up(&mut self, em: usize) {
        self.subnet.em_up(em);
        let orders = self.memory.em_up(&self.subnet, em);
        self.give_rdma(orders);
    }

    /// An EM of a former OM came, and its wires are known. What its functions have it says later.
    pub(super) fn rdma_returned(&mut self, em: usize) {
        self.subnet.em_up(em);
        let mut orders = self.memory.em_returned(&self.subnet, em);
        orders.extend(self.subnet.links_of(em));
        self.give_rdma(orders);
    }

    /// An EM takes the place of a former one, of which some functions have no guest any more. Its guests' memory
    /// comes anew, under other numbers.
    pub(super) fn rdma_renewed(&mut self, em: usize, orphans: &[u32]) {
        let mut orders = self.subnet.functions_gone(orphans);
        orders.extend(self.memory.em_down(&self.subnet, em));
        self.give_rdma(orders);
    }

    /// An EM is gone.
    pub(super) fn rdma_down(&mut self, em: usize) {
        // Queue pairs stop before the memory goes that they use.
        let mut orders = self.subnet.em_down(em);
        orders.extend(self.memory.em_down(&self.subnet, em));
        self.give_rdma(orders);
    }

    pub(super) fn give_rdma(&self, orders: Vec<Order>) {
        for Order { em, request, fds } in orders {
            if let Some(session) = self.ems.get(em).and_then(|e| e.session.as_ref()) {
                session.order(Subject::Rdma, Request::Rdma(request), fds);
            }
        }
    }

    /// What people are shown of an RDMA function.
    pub(super) fn rdma_view(&self, function: u32) -> Option<RdmaView> {
        let port = self.subnet.port(function)?;
        let config = self.functions.get(function as usize)?.config.kind.rdma()?;
        let gids = self.subnet.gids(function).into_iter();
        Some(RdmaView {
            link_type: port.link_type.as_str().to_owned(),
            guid: format!("{:016x}", port.guid),
            lid: Some(port.lid).filter(|lid| *lid != 0),
            gids: gids.map(|gid| Ipv6Addr::from(gid).to_string()).collect(),
            mapped_doorbells: config.mapped_doorbells,
            shared_files: self.memory.count(function),
        })
    }
}
