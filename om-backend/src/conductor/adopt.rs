//! EMs that a former OM left behind: they return what they have, and are adopted.

use super::Conductor;
use crate::function::Life;
use crate::session::Subject;
use m2m_fabric::proto::{Reply, Request};
use smartep::shadow::{ShadowReader, ShadowWriter};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long the EMs of a former OM have to return before others are started in their place.
const ORPHANS: Duration = Duration::from_secs(1);

/// What is taken of a function that returns.
struct Returned {
    /// Its socket, if it is on this host.
    listener: Option<OwnedFd>,
    /// The former OM's shadow, or the same content.
    shadow: OwnedFd,
}

impl Conductor {
    /// The same for an OM that takes the place of one which was killed.
    pub fn waiting_for_orphans(mut self) -> Self {
        let now = Instant::now();
        self.wiring.expect_all(now);
        for e in self.ems.iter_mut().filter(|e| e.managed) {
            // An EM that lives listens, so that its paths are in use.
            let listens = |id: &u32| {
                let place = self.listeners.get(*id as usize);
                place.is_some_and(|place| place.socket().is_none())
            };
            if e.functions.iter().any(listens) {
                e.restart_at = Some(now + ORPHANS);
            }
        }
        self
    }

    /// What an EM returns.
    pub(super) fn returned(&mut self, em: usize, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match self.take_back(em, request, fds) {
            Ok(()) => Reply::Ok,
            Err(reason) => {
                log::warn!("an EM returns what is of no use: {reason}");
                Reply::Failed(reason)
            }
        }
    }

    fn take_back(&mut self, em: usize, request: Request, fds: Vec<OwnedFd>) -> Result<(), String> {
        match request {
            Request::ReturnFunction { function, state } => {
                let returned = self.returned_fds(em, function, fds)?;
                let (Some(f), Some(place)) = (
                    self.functions.get(function as usize).filter(|f| f.em == em),
                    self.listeners.get_mut(function as usize),
                ) else {
                    return Err(format!("function {function} is none of this EM"));
                };
                let former = ShadowReader::new(&returned.shadow).map_err(|e| e.to_string())?;
                f.control.restore(&former);
                // It gives everything anew.
                f.vault.clear();
                if let Some(listener) = returned.listener {
                    place.adopt(listener);
                }
                f.set_life(Life::Served(state));
                f.set_fault(None);
                Ok(())
            }
            Request::ReturnLink(link) => {
                let ours = self.functions.get(link.function as usize);
                if ours.is_none_or(|f| f.em != em) {
                    return Err(format!("link {} is none of this EM", link.id));
                }
                let e = self.ems.get(em).filter(|e| e.remote);
                if let Some(session) = e.and_then(|e| e.session.as_ref()) {
                    if !self.wiring.avoid(&link) {
                        // A port holds nothing: a new one does as well, with a number that nobody has.
                        let link = link.id;
                        let request = Request::RemoveLink { link };
                        session.order(Subject::RemoveLink(link), request, Vec::new());
                        return Ok(());
                    }
                }
                self.wiring.adopt(em, link, fds)
            }
            Request::Returned => self.adopt(em),
            _ => Err("that cannot be returned".to_owned()),
        }
    }

    /// What comes with a function: descriptors, or from another host an image before.
    fn returned_fds(
        &self,
        em: usize,
        function: u32,
        fds: Vec<OwnedFd>,
    ) -> Result<Returned, String> {
        let session = self.ems.get(em).and_then(|e| e.session.as_ref());
        if let Some(session) = session.filter(|session| !session.takes_fds()) {
            let image = session.former(function);
            let image = image.ok_or("nobody said what the function presented")?;
            let made = ShadowWriter::new().and_then(|(mut writer, shadow)| {
                writer.publish_image(&image)?;
                Ok(shadow)
            });
            return Ok(Returned {
                listener: None,
                shadow: made.map_err(|e| e.to_string())?,
            });
        }
        let [listener, shadow] = <[OwnedFd; 2]>::try_from(fds)
            .map_err(|fds| format!("a function is 2 descriptors, not {}", fds.len()))?;
        Ok(Returned {
            listener: Some(listener),
            shadow,
        })
    }

    fn adopt(&mut self, em: usize) -> Result<(), String> {
        let orders = self.wiring.em_returned(em).map_err(|e| e.to_string())?;
        self.give(orders);
        self.rdma_returned(em);
        // Before the EM reads the shadow, so that no guest sees a link go.
        self.update_links();
        let Some(e) = self.ems.get(em) else {
            return Ok(());
        };
        let Some(session) = &e.session else {
            return Err("its connection is gone".to_owned());
        };
        for &id in &e.functions {
            let Some(function) = self.functions.get(id as usize) else {
                continue;
            };
            if !session.takes_fds() {
                function.show(&*session.fabric());
                let request = Request::Adopt { function: id };
                session.order(Subject::Adopt(id), request, Vec::new());
                continue;
            }
            let keeper = function.vault.open();
            let fds = function
                .shadow
                .try_clone()
                .and_then(|shadow| Ok(vec![shadow, keeper?]))
                .map_err(|e| e.to_string())?;
            session.order(Subject::Adopt(id), Request::Adopt { function: id }, fds);
        }
        log::info!("EM {} is adopted", e.name);
        Ok(())
    }
}
