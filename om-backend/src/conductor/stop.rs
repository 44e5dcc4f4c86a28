//! The end, in order.

use super::{Conductor, Message};
use crate::fd_store::FdStore;
use crate::session::Subject;
use m2m_fabric::proto::Request;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long EMs get to end in order.
const SHUTDOWN: Duration = Duration::from_secs(2);

impl Conductor {
    /// Ends the EMs in order: asks, waits, then insists.
    pub(super) fn stop(&mut self) {
        for e in &mut self.ems {
            e.restart_at = None;
            match (&e.session, &e.process) {
                (Some(session), _) => {
                    session.order(Subject::Shutdown, Request::Shutdown, Vec::new());
                }
                (None, Some(process)) => process.kill(),
                (None, None) => {}
            }
        }
        let mut deadline = Instant::now() + SHUTDOWN;
        let mut insisted = false;
        // An EM that others started is not waited for, beyond its answer.
        let mut asked: BTreeSet<usize> = (0..self.ems.len())
            .filter(|em| self.epoch(*em).is_some())
            .collect();
        loop {
            asked.retain(|em| self.epoch(*em).is_some());
            if asked.is_empty() && self.ems.iter().all(|e| e.process.is_none()) {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left) {
                Ok(Message::Answer {
                    em,
                    subject: Subject::Shutdown,
                    ..
                }) => {
                    asked.remove(&em);
                }
                Ok(Message::Exited { em, pid, .. }) => {
                    asked.remove(&em);
                    if let Some(e) = self.ems.get_mut(em) {
                        if e.process.as_ref().is_some_and(|p| p.pid() == pid) {
                            e.process = None;
                        }
                    }
                }
                Ok(Message::Down { em, .. }) => {
                    asked.remove(&em);
                }
                Ok(Message::Introduction(i)) => {
                    let _ = i.answer.send(Err("the OM is stopping".to_owned()));
                }
                Ok(_) => {}
                Err(_) if insisted => break,
                Err(_) => {
                    insisted = true;
                    asked.clear();
                    deadline = Instant::now() + SHUTDOWN;
                    for e in &self.ems {
                        if let Some(process) = &e.process {
                            log::warn!("EM {} did not end in order and was killed", e.name);
                            process.kill();
                        }
                    }
                }
            }
        }
        for e in &mut self.ems {
            e.session = None;
        }
        // Nothing of this is for an OM after this one.
        let manager = FdStore::from_environment();
        for function in &self.functions {
            function.vault.clear();
            manager.forget_shadow(&function.config.name);
        }
    }
}
