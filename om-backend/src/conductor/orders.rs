//! What EMs are told, what they answer, and what becomes of the links.

use super::Conductor;
use crate::function::Function;
use crate::session::Subject;
use crate::wiring::Order;
use m2m_fabric::proto::{Event, Request};
use smartep::listener::PathListener;
use std::sync::atomic::Ordering;

impl Conductor {
    pub(super) fn order_function(&self, em: usize, function: &Function) {
        let Some(session) = self.ems.get(em).and_then(|e| e.session.as_ref()) else {
            return;
        };
        if !session.takes_fds() {
            function.show(&*session.fabric());
            let spec = Box::new(function.current_spec());
            let subject = Subject::Function(function.id());
            return session.order(subject, Request::AddFunction(spec), Vec::new());
        }
        let listener = self.listeners.get(function.id() as usize);
        let Some(listener) = listener.and_then(PathListener::socket) else {
            let path = function.config.socket.display();
            return function.set_fault(Some(format!("another process listens on {path}")));
        };
        let keeper = function.vault.open();
        let copies = listener.try_clone_to_owned().and_then(|listener| {
            let shadow = function.shadow.try_clone()?;
            Ok(vec![listener, shadow, keeper?])
        });
        match copies {
            Ok(fds) => session.order(
                Subject::Function(function.id()),
                Request::AddFunction(Box::new(function.current_spec())),
                fds,
            ),
            Err(error) => {
                function.set_fault(Some(format!("the OM has no descriptors left: {error}")))
            }
        }
    }

    pub(super) fn give(&self, orders: Vec<Order>) {
        for order in orders {
            let (em, subject, request, fds) = match order {
                Order::Add { em, link, fds } => {
                    (em, Subject::AddLink(link.id), Request::AddLink(link), fds)
                }
                Order::Remove { em, link } => (
                    em,
                    Subject::RemoveLink(link),
                    Request::RemoveLink { link },
                    Vec::new(),
                ),
            };
            if let Some(session) = self.ems.get(em).and_then(|e| e.session.as_ref()) {
                session.order(subject, request, fds);
            }
        }
    }

    /// Tells an EM that its functions have all wires that there are.
    pub(super) fn order_wired(&self, em: usize) {
        let Some(e) = self.ems.get(em) else {
            return;
        };
        if let Some(session) = &e.session {
            for &function in &e.functions {
                session.order(Subject::Wired, Request::Wired { function }, Vec::new());
            }
        }
    }

    pub(super) fn answered(&mut self, em: usize, subject: Subject, result: Result<(), String>) {
        let Some(name) = self.ems.get(em).map(|e| e.name.clone()) else {
            return;
        };
        match subject {
            Subject::Function(id) => {
                let Some(function) = self.functions.get(id as usize) else {
                    return;
                };
                match result {
                    Ok(()) => {
                        function.served();
                        self.windows_up(em, id);
                    }
                    Err(reason) => {
                        log::error!(
                            "EM {name} does not serve {}: {reason}",
                            function.config.name
                        );
                        function.set_fault(Some(reason.clone()));
                        self.upgrade_useless(em, &reason);
                    }
                }
            }
            Subject::AddLink(link) => {
                if let Err(reason) = &result {
                    let function = self
                        .wiring
                        .ends()
                        .get(&link)
                        .and_then(|end| self.functions.get(end.function as usize))
                        .map_or("a function", |f| f.config.name.as_str());
                    log::error!("EM {name} could not join wire {link} of {function}: {reason}");
                }
                self.wiring.answered(link, result);
                self.update_links();
            }
            Subject::Adopt(id) => match result {
                Ok(()) => self.windows_up(em, id),
                Err(reason) => {
                    log::error!("EM {name} cannot be adopted: {reason}");
                    if let Some(function) = self.functions.get(id as usize) {
                        function.set_fault(Some(reason));
                    }
                }
            },
            Subject::Wired => match result {
                Ok(()) => self.upgrade_goes_on(em),
                Err(reason) => {
                    log::warn!("EM {name} does not go on: {reason}");
                    self.upgrade_useless(em, &reason);
                }
            },
            Subject::RemoveLink(link) => {
                if let Err(reason) = result {
                    log::warn!("EM {name} could not leave wire {link}: {reason}");
                }
            }
            Subject::Rdma => {
                if let Err(reason) = result {
                    log::warn!("EM {name} did not take news about RDMA: {reason}");
                }
            }
            Subject::Shutdown => {
                if let Err(reason) = result {
                    log::warn!("EM {name} does not end in order: {reason}");
                }
            }
        }
    }

    /// An EM serves a function: one with memory may have it somewhere already, an RDMA function gets what its VM has.
    fn windows_up(&self, em: usize, id: u32) {
        let (Some(function), Some(e)) = (self.functions.get(id as usize), self.ems.get(em)) else {
            return;
        };
        function.follow_later();
        if let (Some(windows), Some(session), Some(_)) =
            (&function.windows, &e.session, function.config.kind.rdma())
        {
            windows.up(id, session.fabric());
        }
    }

    /// Makes every function's link status what administrator and wires say.
    pub(super) fn update_links(&mut self) {
        for id in 0..self.functions.len() as u32 {
            let Some(function) = self.functions.get(id as usize) else {
                continue;
            };
            let up = function.admin_up.load(Ordering::Acquire) && self.wiring.carrier(id);
            if function.control.set_link(up) {
                let word = if up { "up" } else { "down" };
                log::info!("link of {} is {word}", function.config.name);
                self.tell_changed(id);
            }
        }
    }

    pub(super) fn tell_changed(&mut self, function: u32) {
        let Some(f) = self.functions.get(function as usize) else {
            return;
        };
        let Some(session) = self.ems.get(f.em).and_then(|e| e.session.as_ref()) else {
            return;
        };
        f.show(&*session.fabric());
        if !session.notify(Event::ConfigChanged { function }) {
            self.untold.insert(function);
        }
    }

    /// EMs that had no room for what their functions present get it now.
    pub(super) fn show_again(&self) {
        for function in &self.functions {
            if let Some(session) = self.ems.get(function.em).and_then(|e| e.session.as_ref()) {
                function.show_again(&*session.fabric());
            }
        }
    }
}
