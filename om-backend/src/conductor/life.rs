//! EMs that start, introduce themselves, fall silent and end.

use super::{Conductor, Message};
use crate::function::{Function, Life};
use crate::peer::{Binding, Introduction};
use crate::session::Session;
use crate::supervisor::process::{Process, describe_exit};
use crate::supervisor::{LAST_WORDS, SILENCE, STUCK, Supervised};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Instant;

impl Conductor {
    pub(super) fn start(&mut self, em: usize) {
        self.listen_for(em);
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let log = self.places.run_dir.join(format!("{}.log", e.name));
        let sender = self.sender.clone();
        let spawned = Process::spawn(
            e.program.as_deref().unwrap_or(&self.places.em_binary),
            &e.name,
            &self.places.m2m_socket,
            &log,
            move |pid, status| {
                let _ = sender.send(Message::Exited { em, pid, status });
            },
        );
        let now = Instant::now();
        e.restart_at = None;
        match spawned {
            Ok(process) => {
                log::info!("EM {} started as process {}", e.name, process.pid());
                e.process = Some(process);
                e.since = now;
                if let Some(upgrade) = &mut e.upgrade {
                    upgrade.started = true;
                }
            }
            Err(error) => {
                log::error!("EM {}: {error}", e.name);
                e.ended(error.to_string(), now);
                self.upgrade_failed(em, &error.to_string());
            }
        }
    }

    /// Listens where an EM of a former OM did that has not returned.
    fn listen_for(&mut self, em: usize) {
        let functions = self.ems.get(em).map(|e| e.functions.clone());
        for id in functions.unwrap_or_default() {
            let Some(place) = self.listeners.get_mut(id as usize) else {
                continue;
            };
            if place.socket().is_none() {
                if let Err(e) = place.again() {
                    log::error!("{e}");
                }
            }
        }
    }

    pub(super) fn start_those_due(&mut self, now: Instant) {
        for em in 0..self.ems.len() {
            let due = self
                .ems
                .get_mut(em)
                .filter(|e| e.restart_at.is_some_and(|at| at <= now));
            if let Some(e) = due {
                // One that another OM left and that did not return was never started here.
                e.restarts += u64::from(e.reason.is_some());
                self.start(em);
            }
        }
    }

    /// Looks after EMs that fell silent, are stuck, never came, or do not end.
    pub(super) fn tick(&mut self, now: Instant) {
        self.awake.looked(now);
        for em in 0..self.ems.len() {
            let Some(e) = self.ems.get_mut(em) else {
                continue;
            };
            if let Some(session) = &e.session {
                let silence = session.silent_for().min(self.awake.lasts(now));
                let stuck = session.stuck_for();
                let reason = if silence > SILENCE {
                    Some(format!("was silent for {:.1} s", silence.as_secs_f64()))
                } else if stuck > STUCK {
                    let seconds = stuck.as_secs_f64();
                    Some(format!("its data path was stuck for {seconds:.1} s"))
                } else {
                    None
                };
                if let Some(reason) = reason {
                    e.kill(reason.clone());
                    self.lost(em, &reason);
                }
            } else if let Some((at, reason)) = e.kill_at.clone() {
                if at <= now {
                    e.kill(reason);
                }
            } else if e.process.is_some()
                && e.killed_because.is_none()
                && now.saturating_duration_since(e.since) > e.introduction()
            {
                let seconds = e.introduction().as_secs();
                log::error!("EM {} did not connect within {seconds} s", e.name);
                e.kill(format!("did not connect within {seconds} s"));
            }
        }
        self.end_grace(now);
        for function in std::mem::take(&mut self.untold) {
            self.tell_changed(function);
        }
        self.show_again();
        self.start_those_due(now);
    }

    /// Whether an EM may be who it says, and then everything it needs to work.
    pub(super) fn introduce(&mut self, introduction: Introduction) {
        let Introduction {
            hello,
            info,
            fabric,
            peer,
            answer,
        } = introduction;
        let refused = |reason: String| {
            log::warn!("refused {info} as EM {}: {reason}", hello.em);
            // It stays a stranger, whose connection is closed after it could read why.
            peer.started(fabric.clone());
            let _ = answer.send(Err(reason));
        };
        let Some(em) = self.ems.iter().position(|e| e.name == hello.em) else {
            return refused(format!(
                "no EM is named \"{}\" in the configuration",
                hello.em
            ));
        };
        if let Err(reason) = fabric.check_name(&hello.em) {
            return refused(reason.to_string());
        }
        let remote = self.ems.get(em).is_some_and(|e| e.remote);
        if remote == fabric.carries_fds() {
            let (here, there) = match remote {
                true => ("is `remote`", "on this host"),
                false => ("is not `remote`", "on another host"),
            };
            return refused(format!(
                "EM \"{}\" {here} in the configuration, and this one is {there}",
                hello.em
            ));
        }
        // Who is refused above puts nobody out.
        if self.ems.get(em).is_some_and(Supervised::may_be_replaced) {
            self.lost(em, "it connects again");
        }
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        if e.session.is_some() {
            return refused(format!("EM \"{}\" is connected already", e.name));
        }
        if e.managed {
            match &e.process {
                Some(process) if process.pid() == info.pid && e.killed_because.is_none() => {}
                None if hello.returns && info.uid == rustix::process::geteuid().as_raw() => {
                    let sender = self.sender.clone();
                    let adopted = Process::adopt(&e.name, info.pid, move |pid, status| {
                        let _ = sender.send(Message::Exited { em, pid, status });
                    });
                    match adopted {
                        Ok(process) => e.process = Some(process),
                        Err(error) => return refused(format!("it cannot be watched: {error}")),
                    }
                    e.restart_at = None;
                }
                _ => {
                    return refused(format!(
                        "the OM starts EM \"{}\" itself; set `managed = false` to start it yourself",
                        e.name
                    ));
                }
            }
        }
        let epoch = self.next_epoch;
        let session = match Session::start(
            em,
            &e.name,
            epoch,
            fabric.clone(),
            peer.clone(),
            self.sender.clone(),
        ) {
            Ok(session) => session,
            Err(error) => return refused(format!("the OM has no room for a thread: {error}")),
        };
        self.next_epoch += 1;
        let functions: Vec<Arc<Function>> = e
            .functions
            .iter()
            .filter_map(|id| self.functions.get(*id as usize).cloned())
            .collect();
        let mut orphans = Vec::new();
        for function in &functions {
            // A guest that lost its EM keeps what it wrote; what the last guest wrote is that guest's.
            if !hello.returns && !function.vault.has_connection() {
                function.control.reset();
                function.follow_later();
                orphans.push(function.spec.id);
            }
        }
        let bound = peer.bind(Binding {
            em,
            epoch,
            functions: functions.clone(),
            fabric: Arc::downgrade(&fabric),
        });
        if !bound {
            return refused("this connection has introduced itself before".to_owned());
        }
        log::info!("EM {} is up ({}, {info})", e.name, hello.program);
        e.session = Some(session);
        e.since = Instant::now();
        let _ = answer.send(Ok(()));
        if hello.returns {
            // It says what it has; see `adopt`. It may have had it of this OM.
            if e.remote {
                let orders = self.wiring.em_down(em);
                self.give(orders);
            }
            return;
        }
        self.rdma_renewed(em, &orphans);
        for function in &functions {
            self.order_function(em, function);
        }
        match self.wiring.em_up(em) {
            Ok(orders) => {
                self.give(orders);
                self.rdma_up(em);
                self.order_wired(em);
                if functions.is_empty() {
                    self.upgrade_goes_on(em);
                }
                self.update_links();
            }
            Err(error) => {
                let reason = format!("the OM could not make its wires: {error}");
                if let Some(e) = self.ems.get_mut(em) {
                    e.kill(reason.clone());
                }
                self.lost(em, &reason);
            }
        }
    }

    /// The connection of an EM is gone, or is to go.
    pub(super) fn lost(&mut self, em: usize, reason: &str) {
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let Some(session) = e.session.take() else {
            return;
        };
        log::warn!("EM {} is gone: {reason}", e.name);
        let now = Instant::now();
        e.was_up = session.since.elapsed();
        e.since = now;
        e.reason = Some(reason.to_owned());
        if e.process.is_some() && e.killed_because.is_none() {
            e.kill_at = Some((now + LAST_WORDS, format!("lost its connection: {reason}")));
        }
        drop(session);
        for id in e.functions.clone() {
            if let Some(function) = self.functions.get(id as usize) {
                function.set_life(Life::Absent);
                function.set_fault(None);
                if let (Some(windows), Some(_)) = (&function.windows, function.config.kind.rdma()) {
                    windows.down(id);
                }
            }
        }
        self.wiring.em_lost(em, now);
        self.update_links();
    }

    /// The wires of EMs that did not come back in time.
    fn end_grace(&mut self, now: Instant) {
        for (em, e) in self.ems.iter().enumerate() {
            // On a busy host a process takes its time to start; one that ends instead is not waited for.
            if e.is_starting() {
                self.wiring.wait_for(em, now);
            }
        }
        for em in self.wiring.over(now) {
            self.rdma_down(em);
            let orders = self.wiring.em_down(em);
            self.give(orders);
        }
        self.update_links();
    }

    pub(super) fn exited(&mut self, em: usize, pid: u32, status: &std::io::Result<ExitStatus>) {
        let ours = self
            .ems
            .get(em)
            .and_then(|e| e.process.as_ref())
            .is_some_and(|p| p.pid() == pid);
        if !ours {
            return;
        }
        let exit = describe_exit(status);
        self.lost(em, &exit);
        if let Some(e) = self.ems.get_mut(em) {
            e.ended(exit, Instant::now());
            log::warn!(
                "EM {} {}; its log is {}",
                e.name,
                e.reason.as_deref().unwrap_or("ended"),
                self.places
                    .run_dir
                    .join(format!("{}.log", e.name))
                    .display()
            );
            let started = e.upgrade.as_ref().is_some_and(|upgrade| upgrade.started);
            if let Some(reason) = e.reason.clone().filter(|_| started) {
                self.upgrade_failed(em, &reason);
            }
        }
    }
}
